"""Digests of stores: equal for equal steps, other for anything else."""

from dataclasses import replace
from pathlib import Path

from understudy.app.digest import digests, whole
from understudy.core.chunk import Chunk
from understudy.core.ports import Cursor, Tail
from understudy.stores.local import LocalStore
from understudy.testing.desk import Desk, StoreFactory


class _Factory(StoreFactory):
    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0

    def make(self, clock):
        self._count += 1
        return LocalStore(self._folder / str(self._count), clock=clock)


def _digests(desk: Desk) -> dict[str, str]:
    def page(cursor: Cursor | None) -> Tail:
        return desk.store.tail(cursor, max_items=2, wait_s=0.0)

    return digests(page)


def test_the_order_of_arrival_and_repeats_change_nothing(tmp_path: Path):
    factory = _Factory(tmp_path)
    one, other = factory.desk(), factory.desk()
    chunks, more = factory.chunks(4), factory.chunks(2)
    one.put(*chunks, *more)
    other.put(*more[::-1])
    other.put(*chunks[2:], *chunks)
    assert len(_digests(one)) == 2
    assert _digests(one) == _digests(other)
    assert whole(_digests(one)) == whole(_digests(other))


def test_any_other_bit_gives_another_digest(tmp_path: Path):
    factory = _Factory(tmp_path)
    factory.desk()
    (chunk,) = factory.chunks(1)
    obs = chunk.columns["obs"]
    others = [
        Chunk(chunk.meta, {**chunk.columns, "obs": obs + 1}),
        Chunk(chunk.meta, {name: column for name, column in chunk.columns.items() if name != "by"}),
        Chunk(replace(chunk.meta, consent="unknown" if chunk.meta.consent != "unknown" else "granted"), chunk.columns),
    ]
    found = set()
    for one in [chunk, *others]:
        desk = factory.desk()
        desk.put(one)
        found.add(whole(_digests(desk)))
    assert len(found) == len({one.encode() for one in [chunk, *others]})
