"""The contracts bite: every promise that is broken on purpose makes one of their tests fail."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import SkipTest

import pytest
from understudy.stores.claims import Claims
from understudy.stores.local_known import LocalKnown
from understudy.stores.segments import Segment

from understudy.core.clock import Clock
from understudy.core.frame import Frame
from understudy.core.ports import Ack, FullStore, Position, Read, Receipt, Stream, WriteBatch
from understudy.stores.draft import Draft
from understudy.stores.local import LocalStore
from understudy.streams.memory import MemoryStream
from understudy.testing.admin import StoreAdminContract
from understudy.testing.stores import StoreContract
from understudy.testing.streams import StreamContract


def breaks_a_promise(contract: object) -> bool:
    """Whether some test of a contract fails."""
    for name, test in inspect.getmembers(contract, inspect.ismethod):
        if name.startswith("test_"):
            try:
                test()
            except SkipTest:
                continue
            except Exception:
                return True
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
    def read(self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float) -> Read:
        found = super().read(partition, after, max_bytes=max_bytes, wait_s=wait_s)
        self._lanes[partition].clear()
        return found


class Unbounded(MemoryStream):
    def read(self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float) -> Read:
        return super().read(partition, after, max_bytes=1 << 30, wait_s=wait_s)


class Impatient(MemoryStream):
    def read(self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float) -> Read:
        return super().read(partition, after, max_bytes=max_bytes, wait_s=0.0)


class NeverEnding(MemoryStream):
    def read(self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float) -> Read:
        return replace(super().read(partition, after, max_bytes=max_bytes, wait_s=wait_s), ended=False)


class Forgiving(MemoryStream):
    """Reads on from whatever is left instead of saying that a position is gone."""

    def trim(self, partition: str, keep_last: int) -> None:
        del self._lanes[partition][: len(self._lanes[partition]) - keep_last]


@pytest.mark.parametrize(
    "kind", [Losing, Doubling, Consuming, Unbounded, Impatient, NeverEnding, Forgiving], ids=lambda kind: kind.__name__
)
def test_a_stream_that_breaks_a_promise_fails(kind: Callable[[], MemoryStream]):
    class Contract(StreamContract):
        patience_s = 0.5

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
        self._folder, self._kind, self._made = folder, kind, 0

    def make(self, clock: Clock) -> FullStore:
        self._made += 1
        return self.reopen(None, clock)

    def reopen(self, store: FullStore | None, clock: Clock) -> FullStore:
        return self._kind(self._folder / str(self._made), clock=clock)

    def settle(self, store: FullStore) -> None:
        assert isinstance(store, LocalStore)
        store.freeze(wait=True)


class PositionsLost(LocalStore):
    def write(self, batch: WriteBatch) -> Receipt:
        return super().write(replace(batch, position=None))


class ForgetsNobody(LocalStore):
    def forget(self, player: bytes, *, at_s: float | None = None) -> int:
        return 0


_take = Claims.take

SABOTAGE: dict[str, tuple[object, str, object]] = {
    "dedup off": (Draft, "_decide", lambda self, candidate: (self._store(candidate), ("new", ""))[1]),
    "epochs ignored": (Claims, "renew", lambda *_, **__: True),
    "owners ignored": (
        Claims,
        "take",
        lambda self, partition, **more: _take(self, partition, **more | {"owner": "all"}),
    ),
    "conflicts ignored": (Draft, "_seen", lambda *_: ("duplicate", "")),
    "quarantine ignored": (Draft, "_quarantine", lambda *_, **__: None),
    "forgetting ignored": (LocalKnown, "is_forgotten", lambda *_: False),
    "optional columns kept": (Segment, "_optional", property(lambda _: [], lambda *_: None)),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_a_store_with_a_part_switched_off_fails(quick_path: Path, monkeypatch, name: str):
    owner, attribute, replacement = SABOTAGE[name]
    # A part that moved elsewhere must not pass for one that is switched off; of segments only instances have this one.
    monkeypatch.setattr(owner, attribute, replacement, raising=owner is not Segment)
    assert breaks_a_promise(Contract(quick_path))


@pytest.mark.parametrize("kind", [PositionsLost, ForgetsNobody])
def test_a_store_that_breaks_a_promise_fails(quick_path: Path, kind: type[LocalStore]):
    assert breaks_a_promise(Contract(quick_path, kind))
