"""The contracts detect faults: every promise broken on purpose fails one of their tests."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import SkipTest

import pytest

from tests.streams.memory import MemoryStream
from understudy.core.clock import Clock
from understudy.core.errors import UnderstudyError
from understudy.experience.chunk import OPTIONAL, Chunk, chunk_of
from understudy.experience.frame import Frame
from understudy.ports import Ack, Candidate, FullStore, Position, Read, Receipt, Stream, WriteBatch
from understudy.stores import view
from understudy.stores.draft import Draft, _stored
from understudy.stores.local import LocalStore
from understudy.stores.view import LocalLookup
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


@pytest.mark.parametrize("kind", [PositionsLost, ForgetsNobody])
def test_a_store_that_breaks_a_promise_fails(quick_path: Path, kind: type[LocalStore]):
    assert breaks_a_promise(Contract(quick_path, kind))
