"""A store under test with its clock, one claimed partition, and a check of its tail."""

import unittest
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np

from understudy.core.clock import Clock
from understudy.core.errors import UnderstudyError
from understudy.core.names import new_session
from understudy.experience.chunk import Chunk, ChunkId
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

    def drop_frame(
        self, session: uuid.UUID, number: int, *ranges: tuple[int, int], n_steps: int = 0
    ) -> Candidate:
        frame = drop_frame(session, number, DropReport(ranges, n_steps))
        return Candidate(frame.stamped(PLAYER, int(self.clock.now())), None)

    def close_frame(self, session: uuid.UUID, number: int, *, n_steps: int = 0) -> Candidate:
        frame = close_frame(session, number, CloseReport(number, n_steps))
        return Candidate(frame.stamped(PLAYER, int(self.clock.now())), None)

    def tail(self, *, page: int = 3) -> list[Stored | Forgotten]:
        """New items since the last call; asserts that each arrival number occurs once, in order."""
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

    def removed(self) -> list[tuple[int, str, bytes | None, tuple[ChunkId, ...]]]:
        """Arrival number, reason, player and chunks of every removed frame and event, in order."""
        return [
            (number, item.reason, item.player, item.chunks)
            for item in self.everything()
            if isinstance(item, Forgotten)
            for number in range(item.arrival_no, item.last_no + 1)
        ]

    def session(self, session: uuid.UUID) -> SessionInfo | None:
        infos = [info for info in self.store.sessions(SessionFilter()) if info.session == session]
        assert len(infos) <= 1, "a session is listed once"
        return infos[0] if infos else None


def last_no(item: Stored | Forgotten) -> int:
    """The last arrival number of an item of a tail."""
    return item.last_no if isinstance(item, Forgotten) else item.arrival_no


def raises(kind: type[UnderstudyError], call: Callable[[], object]) -> bool:
    """Whether a call raises this error; other errors pass through."""
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
        """Create an empty store; each call creates another one, apart from the earlier ones."""
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

    def files(self, store: FullStore) -> Iterable[Path]:
        """Return every file of a closed store."""
        raise unittest.SkipTest("this store has no files in which to search for erased bytes")

    def damage(self, store: FullStore, frame: Frame) -> None:
        """Destroy the bytes of a stored frame, as a failing disk would."""
        raise unittest.SkipTest("a test cannot damage the bytes of this store")

    def harness(self, *, waits_in_real_time: bool = False) -> StoreHarness:
        """A harness over a new store; asserts that the store is empty."""
        clock = ManualClock(waits_in_real_time=waits_in_real_time)
        self.rng = np.random.default_rng(7)
        harness = StoreHarness(self.make(clock), clock, lambda store: self.reopen(store, clock))
        self._harnesses = [*self._harnesses, harness]
        assert harness.tail() == [], "make() must return an empty store"
        return harness

    def teardown_method(self) -> None:
        """Close the stores of a test; called by pytest."""
        for harness in self._harnesses:
            harness.store.close()

    def chunks(self, count: int) -> list[Chunk]:
        """A new session with this many chunks."""
        return random_session(SPEC, self.rng, n_chunks=count)

    def session_now(self, harness: StoreHarness) -> list[Chunk]:
        """Four chunks of a new session that begins now."""
        session = new_session(harness.clock.now(), self.rng.bytes(10))
        return random_session(SPEC, self.rng, session=session)

    def stages(self, harness: StoreHarness) -> Iterator[AbstractContextManager[None]]:
        """Three stages of a store (as written, settled, reopened) to enter with `with`.

        An error inside a stage names the stage.
        """
        yield _stage("as written")
        self.settle(harness.store)
        yield _stage("settled")
        harness.reopen()
        yield _stage("reopened")


@contextmanager
def _stage(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"stage of the store: {name}")
        raise
