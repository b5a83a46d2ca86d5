"""A store under test with its clock, one claimed partition, and a check of its tail."""

import uuid
from collections.abc import Callable, Sequence

import numpy as np

from understudy.core.clock import Clock
from understudy.core.errors import UnderstudyError
from understudy.experience.chunk import Chunk
from understudy.experience.frame import (
    CloseReport,
    DropReport,
    Frame,
    FrameKind,
    close_frame,
    drop_frame,
)
from understudy.ports import (
    Candidate,
    Cursor,
    Forgotten,
    FullStore,
    Position,
    Receipt,
    RefusedFrame,
    SessionFilter,
    SessionInfo,
    Stored,
    WriteBatch,
)
from understudy.testing.clock import ManualClock
from understudy.testing.samples import PLAYER, cart_spec, random_session

SPEC = cart_spec()
"""The game of most contract tests."""


class StoreHarness:
    """Writes chunks through one partition and reads the tail as a learner would."""

    def __init__(
        self, store: FullStore, clock: ManualClock, reopen: Callable[[FullStore], FullStore]
    ) -> None:
        self.store = store
        self.clock = clock
        self._reopen = reopen
        self.position = 0
        self.cursor: Cursor | None = None
        self.tailed: list[Stored | Forgotten] = []
        self.epoch = self._claim()

    def _claim(self) -> int:
        return self.store.claim("p", owner="harness", ttl_s=60.0).epoch

    def reopen(self) -> None:
        """Close and reopen the store, and claim the partition again."""
        self.store.close()
        self.store = self._reopen(self.store)
        self.epoch = self._claim()

    def write(
        self,
        candidates: Sequence[Candidate] = (),
        *,
        refused: Sequence[RefusedFrame] = (),
        parked: Sequence[RefusedFrame] = (),
    ) -> Receipt:
        self.position += 1
        return self.store.write(
            WriteBatch("p", self.epoch, Position(str(self.position)), candidates, refused, parked)
        )

    def candidate(self, chunk: Chunk, *, player: bytes = PLAYER) -> Candidate:
        return Candidate(chunk.frame().stamped(player, int(self.clock.now())), chunk)

    def put(self, *chunks: Chunk, player: bytes = PLAYER) -> list[str]:
        """Write chunks and return the fate of each."""
        return list(self.write([self.candidate(chunk, player=player) for chunk in chunks]).fates)

    def refusal(
        self, chunk: Chunk, reason: str = "bad_action", *, player: bytes = PLAYER
    ) -> RefusedFrame:
        frame = chunk.frame().stamped(player, int(self.clock.now()))
        return RefusedFrame(frame.encode(), reason, "for a test", self.clock.now(), chunk.meta.game)

    def drop(
        self, session: uuid.UUID, number: int, *ranges: tuple[int, int], n_steps: int = 0
    ) -> Candidate:
        frame = drop_frame(session, number, DropReport(ranges, n_steps))
        return Candidate(frame.stamped(PLAYER, int(self.clock.now())), None)

    def close(self, session: uuid.UUID, number: int, *, n_steps: int = 0) -> Candidate:
        frame = close_frame(session, number, CloseReport(number, n_steps))
        return Candidate(frame.stamped(PLAYER, int(self.clock.now())), None)

    def tail(self, *, page: int = 3) -> list[Stored | Forgotten]:
        """The new items since the last call; asserts that every number appears once, in order."""
        new: list[Stored | Forgotten] = []
        while items := (tail := self.store.tail(self.cursor, max_items=page, wait_s=0.0)).items:
            new += items
            self.cursor = tail.cursor
        expected = last_no(self.tailed[-1]) + 1 if self.tailed else 1
        for item in new:
            assert item.arrival_no == expected, (
                f"arrival {item.arrival_no} appeared instead of {expected}"
            )
            expected = last_no(item) + 1
        self.tailed += new
        return new

    def everything(self) -> list[Stored | Forgotten]:
        """The whole tail from the start, as a new reader sees it."""
        cursor = self.cursor
        self.cursor = None
        tailed = self.tailed
        self.tailed = []
        items = self.tail(page=1000)
        self.cursor = cursor
        self.tailed = tailed
        return items

    def chunks(self) -> list[Chunk]:
        """Every stored chunk, in the order of arrival."""
        return [
            item.chunk
            for item in self.everything()
            if isinstance(item, Stored) and item.chunk is not None
        ]

    def frames(self, kind: FrameKind) -> list[Frame]:
        return [
            item.frame
            for item in self.everything()
            if isinstance(item, Stored) and item.frame.kind is kind
        ]

    def session(self, session: uuid.UUID) -> SessionInfo | None:
        infos = [info for info in self.store.sessions(SessionFilter()) if info.session == session]
        assert len(infos) <= 1, "a session is listed once"
        return infos[0] if infos else None


def last_no(item: Stored | Forgotten) -> int:
    """The last arrival number of an item of a tail."""
    return item.last_no if isinstance(item, Forgotten) else item.arrival_no


def raises(kind: type[UnderstudyError], call: Callable[[], object]) -> bool:
    """Whether a call fails with exactly this error."""
    try:
        call()
    except kind:
        return True
    return False


class StoreFactory:
    """The methods that a subclass of a store contract provides."""

    rng: np.random.Generator
    _harnesses: Sequence[StoreHarness] = ()

    def make(self, clock: Clock) -> FullStore:
        """Create an empty store; every call creates another one."""
        raise NotImplementedError(
            "a subclass of a store contract must define make(): the store under test"
        )

    def reopen(self, store: FullStore, clock: Clock) -> FullStore:
        """Open a new store over the data of a closed one."""
        raise NotImplementedError(
            "a subclass of a store contract must define reopen(): a store over the data of a "
            "closed one"
        )

    def settle(self, store: FullStore) -> None:
        """Run everything that the store defers (flushing, compacting) now."""

    def harness(self) -> StoreHarness:
        clock = ManualClock()
        self.rng = np.random.default_rng(7)
        harness = StoreHarness(self.make(clock), clock, lambda store: self.reopen(store, clock))
        self._harnesses = [*self._harnesses, harness]
        return harness

    def teardown_method(self) -> None:
        """Close the stores of a test; called by pytest."""
        for harness in self._harnesses:
            harness.store.close()

    def chunks(self, count: int) -> list[Chunk]:
        """A new session with this many chunks."""
        return random_session(SPEC, self.rng, n_chunks=count)

    def later(self, harness: StoreHarness) -> Callable[[], None]:
        """Call the result three times: it leaves the store as is, settles it, then reopens it."""
        stages = iter([lambda: None, lambda: self.settle(harness.store), harness.reopen])
        return lambda: next(stages)()
