"""The contracts detect faults: every promise broken on purpose fails one of their tests."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import SkipTest

import numpy as np
import pytest

from tests.streams.memory import MemoryStream
from understudy.algorithm import Transitions
from understudy.core.clock import Clock
from understudy.core.errors import UnderstudyError
from understudy.experience.chunk import OPTIONAL, Chunk, chunk_of
from understudy.experience.frame import Frame
from understudy.experience.game import GameSpec
from understudy.experience.session import tombstone_of
from understudy.learn.replay import HostReplay
from understudy.ports import (
    Ack,
    Candidate,
    Forgotten,
    FullStore,
    Position,
    Read,
    Receipt,
    Stream,
    WriteBatch,
)
from understudy.replay import Drawn, Replay, ReplayConfig
from understudy.stores import view
from understudy.stores.draft import Draft, _stored
from understudy.stores.local import LocalStore
from understudy.stores.view import LocalLookup, StoreView
from understudy.testing.replays import ReplayContract
from understudy.testing.stores import StoreAdminContract, StoreContract
from understudy.testing.streams import StreamContract


def breaks_a_promise(contract: object) -> bool:
    """Whether a test of a contract fails; any other error is a bug of the sabotage itself."""
    for name, test in inspect.getmembers(contract, inspect.ismethod):
        if name.startswith("test_"):
            try:
                test()
            except SkipTest:
                continue
            except (AssertionError, UnderstudyError):
                return True
            finally:
                if isinstance(contract, StoreContract):
                    contract.teardown_method()
    return False


class Losing(MemoryStream):
    def append(self, frames: Sequence[Frame]) -> Sequence[Ack]:
        super().append(frames[:-1])
        return [Ack(True)] * len(frames)


class Doubling(MemoryStream):
    def append(self, frames: Sequence[Frame]) -> Sequence[Ack]:
        super().append(frames[:1])
        return super().append(frames)


class Consuming(MemoryStream):
    def read(
        self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float
    ) -> Read:
        read = super().read(partition, after, max_bytes=max_bytes, wait_s=wait_s)
        self._records[partition].clear()
        return read


class Unbounded(MemoryStream):
    def read(
        self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float
    ) -> Read:
        return super().read(partition, after, max_bytes=1 << 30, wait_s=wait_s)


class Impatient(MemoryStream):
    def read(
        self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float
    ) -> Read:
        return super().read(partition, after, max_bytes=max_bytes, wait_s=0.0)


class NeverEnding(MemoryStream):
    def read(
        self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float
    ) -> Read:
        return replace(
            super().read(partition, after, max_bytes=max_bytes, wait_s=wait_s), ended=False
        )


class Forgiving(MemoryStream):
    """Continues with the remaining records instead of raising PositionGone."""

    def trim(self, partition: str, keep_last: int) -> None:
        del self._records[partition][: len(self._records[partition]) - keep_last]


@pytest.mark.parametrize(
    "kind",
    [Losing, Doubling, Consuming, Unbounded, Impatient, NeverEnding, Forgiving],
    ids=lambda kind: kind.__name__,
)
def test_a_stream_that_breaks_a_promise_fails(kind: Callable[[], MemoryStream]):
    class Contract(StreamContract):
        timeout_s = 0.5

        def make(self) -> Stream:
            return kind()

        def end(self, stream: Stream) -> Stream:
            assert isinstance(stream, MemoryStream)
            stream.split("p0")
            return stream

        def trim(self, stream: Stream, partition: str) -> Stream:
            assert isinstance(stream, MemoryStream)
            stream.trim(partition, keep_last=2)
            return stream

    assert breaks_a_promise(Contract())


class Contract(StoreContract, StoreAdminContract):
    def __init__(self, folder: Path, kind: type[LocalStore] = LocalStore) -> None:
        self._folder = folder
        self._kind = kind
        self._made = 0

    def make(self, clock: Clock) -> FullStore:
        self._made += 1
        return self.reopen(None, clock)

    def reopen(self, store: FullStore | None, clock: Clock) -> FullStore:
        return self._kind(self._folder / str(self._made), clock=clock)

    def settle(self, store: FullStore) -> None:
        assert isinstance(store, LocalStore)
        store.compact()


class PositionsLost(LocalStore):
    def write(self, batch: WriteBatch) -> Receipt:
        return super().write(replace(batch, position=None))


class ForgetsNobody(LocalStore):
    def forget(self, player: bytes, *, at_s: float | None = None) -> int:
        return 0


_claim = LocalStore.claim


def store_anyway(self: Any, frame: Frame, game: str) -> tuple[str, str]:
    self._store(_stored(Candidate(frame, chunk_of(frame))), *self._session(frame.session))
    return "new", ""


def without_optional_columns(frame: Frame) -> Chunk:
    chunk = chunk_of(frame)
    return replace(
        chunk,
        columns={name: column for name, column in chunk.columns.items() if name not in OPTIONAL},
    )


SABOTAGE: dict[str, tuple[object, str, object]] = {
    "dedup off": (Draft, "_decide_seen", store_anyway),
    "epochs ignored": (LocalStore, "_add", lambda _, draft, batch: draft.add(batch)),
    "owners ignored": (
        LocalStore,
        "claim",
        lambda self, partition, **more: _claim(self, partition, **more | {"owner": "all"}),
    ),
    "conflicts ignored": (Draft, "_decide_seen", lambda *_: ("duplicate", "")),
    "quarantine ignored": (Draft, "_quarantine", lambda *_, **__: None),
    "forgetting ignored": (LocalLookup, "is_forgotten", lambda *_: False),
    "nothing erased": (LocalStore, "_finish_erasures", lambda _: 0),
    "optional columns lost": (view, "chunk_of", without_optional_columns),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_a_store_with_a_part_switched_off_fails(quick_path: Path, monkeypatch, name: str):
    owner, attribute, replacement = SABOTAGE[name]
    monkeypatch.setattr(
        owner, attribute, replacement
    )  # which refuses a part that has moved elsewhere
    assert breaks_a_promise(Contract(quick_path))


def test_a_store_with_every_part_in_place_passes(quick_path: Path):
    assert not breaks_a_promise(Contract(quick_path))


class Equal:
    """Equal to everything."""

    def __ne__(self, other: object) -> bool:
        return False


_tail = StoreView.tail
_events = view._events
_quarantined = StoreView.quarantined
_expire = LocalStore.expire
_add = Draft.add
_decide_seen = Draft._decide_seen
_item = view._Page._item


def add_and_reset_position(self: Draft, batch: WriteBatch) -> Receipt:
    return _add(self, replace(batch, position=batch.position or Position("0")))


def with_reason_for_duplicates(self: Draft, frame: Frame, game: str) -> tuple[str, str]:
    fate, reason = _decide_seen(self, frame, game)
    return fate, reason or "seen"


def without_chunks(*args: Any) -> Any:
    item = _item(*args)
    return replace(item, chunks=()) if isinstance(item, Forgotten) else item


WAITS = "test_a_tail_waits_for_a_commit_and_ends_with_close"
MOVES = "test_a_stored_chunk_can_be_quarantined_and_replayed"
EXPIRES = "test_expired_chunks_are_deleted_and_stay_known"
FORGETS = "test_forgetting_refuses_sessions_that_began_before_it"

DETECTED: dict[str, tuple[object, str, object, str]] = {
    "wait_s ignored": (
        StoreView,
        "tail",
        lambda self, cursor, **more: _tail(self, cursor, **more | {"wait_s": 0.0}),
        WAITS,
    ),
    "waiting tail not closed": (
        LocalStore,
        "tail",
        lambda self, cursor, **more: self._view.tail(cursor, **more),
        WAITS,
    ),
    "quarantine not announced": (
        view,
        "_events",
        lambda *args: {no: replace(event, chunks=()) for no, event in _events(*args).items()},
        MOVES,
    ),
    "removed chunks not named": (view._Page, "_item", without_chunks, EXPIRES),
    "expiry inclusive": (
        LocalStore,
        "expire",
        lambda self, before_s: _expire(self, before_s + 1.0),
        EXPIRES,
    ),
    "other bytes replayed": (
        LocalLookup,
        "waiting",
        lambda *_: ("unknown_schema", Equal()),
        "test_replay_stores_a_parked_frame_once",
    ),
    "no checksum in quarantine": (
        StoreView,
        "quarantined",
        lambda self, **more: [replace(frame, crc=0) for frame in _quarantined(self, **more)],
        "test_refused_and_parked_frames_are_kept_with_reason_and_bytes",
    ),
    "duplicates have a reason": (
        Draft,
        "_decide_seen",
        with_reason_for_duplicates,
        "test_the_same_chunk_twice_is_stored_once",
    ),
    "position reset": (Draft, "add", add_and_reset_position, "test_positions_move_with_the_data"),
    "session time ignored": (
        LocalLookup,
        "is_forgotten",
        lambda self, player, _, received_s: (
            received_s < self._tombstones.get(tombstone_of(player), 0.0)
        ),
        FORGETS,
    ),
    "new sessions refused": (
        LocalLookup,
        "is_forgotten",
        lambda self, player, _, received_s: (
            received_s <= self._tombstones.get(tombstone_of(player), 0.0)
        ),
        FORGETS,
    ),
}


@pytest.mark.parametrize("name", DETECTED)
def test_a_broken_promise_fails_its_own_test(quick_path: Path, monkeypatch, name: str):
    owner, attribute, replacement, test = DETECTED[name]
    monkeypatch.setattr(owner, attribute, replacement)
    contract = Contract(quick_path)
    contract.timeout_s = 1.0
    with pytest.raises(AssertionError):
        getattr(contract, test)()
    contract.teardown_method()


@pytest.mark.parametrize("kind", [PositionsLost, ForgetsNobody])
def test_a_store_that_breaks_a_promise_fails(quick_path: Path, kind: type[LocalStore]):
    assert breaks_a_promise(Contract(quick_path, kind))


# --- Replays --------------------------------------------------------------------------------------


class Hoarding(HostReplay):
    """Keeps what it is told to evict."""

    def evict(self, session: Any, chunk_no: int) -> bool:
        return (session, chunk_no) in self.chunk_ids()


class Waiting(HostReplay):
    """Never samples the last steps of a session."""

    def close(self, session: Any) -> int:
        return 0


class Careless(HostReplay):
    """Draws by a chance of its own."""

    def draw(self, k: int, **how: Any) -> Drawn:
        return super().draw(k, **how | {"rng": np.random.default_rng()})


class Unfair(HostReplay):
    """Corrects priorities with weights above 1."""

    def draw(self, k: int, **how: Any) -> Drawn:
        drawn = super().draw(k, **how)
        return drawn._replace(batches=drawn.batches._replace(weight=2 * drawn.batches.weight))


class Shifted(HostReplay):
    """Mixes rewards up."""

    def draw(self, k: int, **how: Any) -> Drawn:
        drawn = super().draw(k, **how)
        reward = np.roll(drawn.batches.reward, 1)
        return drawn._replace(batches=drawn.batches._replace(reward=reward))


class Forgetful(HostReplay):
    """Loses its priorities in a checkpoint."""

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        arrays, facts = super().state()
        if self.needs.prioritised:
            arrays["masses"] = (arrays["masses"] > 0).astype(np.float64)
        return arrays, facts


class Trusting(HostReplay):
    """Sets priorities of rows whatever was inserted there since."""

    def feedback(self, rows: Any, stamps: Any, priorities: Any) -> None:
        if self.needs.prioritised:
            places = np.unique(np.asarray(rows))
            self._masses.set(places, np.ones(len(places)))  # type: ignore[union-attr]


class Nameless(HostReplay):
    """Cannot tell which chunks its rows come from."""

    def chunks_of(self, rows: Any) -> list[Any]:
        return []


@pytest.mark.parametrize(
    "kind",
    [Hoarding, Waiting, Careless, Unfair, Shifted, Forgetful, Trusting, Nameless],
    ids=lambda kind: kind.__name__,
)
def test_a_replay_that_breaks_a_promise_fails(kind: type[HostReplay]):
    class Contract(ReplayContract):
        def make(self, game: GameSpec, needs: Transitions, config: ReplayConfig) -> Replay:
            return kind(game, needs, config)

    assert breaks_a_promise(Contract())
