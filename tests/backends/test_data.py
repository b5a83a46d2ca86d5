"""Statistics of a remote store; a local one takes its place, since both have the same port."""

from pathlib import Path

import pytest

from understudy.backends.data import DataFolder, remote_stats
from understudy.ports import Cursor, Tail
from understudy.stores.local import LocalStore
from understudy.testing.desk import SPEC, Desk, StoreFactory


class _Factory(StoreFactory):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def make(self, clock):
        return LocalStore(self._folder / "elsewhere", clock=clock)


@pytest.fixture
def factory(tmp_path: Path) -> _Factory:
    return _Factory(tmp_path)


def test_figures_that_only_the_servers_know_are_left_out(factory: _Factory, tmp_path: Path):
    desk = factory.desk()
    data = DataFolder(tmp_path / "D")
    chunks = factory.chunks(3)
    desk.put(*chunks)
    desk.write(refused=[desk.refusal(one) for one in factory.chunks(2)])
    for left_over in (data.store, data.ledger):
        left_over.mkdir(parents=True)
        (left_over / "file").write_bytes(b"12345")
    steps = sum(one.meta.n_steps for one in chunks)
    assert remote_stats(data, desk.store) == {
        "steps": steps,
        "chunks": 3,
        "sessions": 1,
        "games": {SPEC.game: steps},
        "quarantined": {"bad_action": 2},
        "parked": 0,
        "bytes": {"ledger": 5},
    }


def test_figures_are_consistent_and_complete_while_another_process_writes(
    factory: _Factory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    desk = factory.desk()
    tail = desk.store.tail
    _write(desk, factory)

    def growing(cursor: Cursor | None, *, max_items: int, wait_s: float) -> Tail:
        _write(desk, factory)
        return tail(cursor, max_items=max_items, wait_s=wait_s)

    monkeypatch.setattr(desk.store, "tail", growing)
    found = remote_stats(DataFolder(tmp_path / "D"), desk.store)
    assert found["steps"] == sum(found["games"].values()) > 0
    assert found["chunks"] == 3 * found["sessions"] >= 6


def _write(desk: Desk, factory: _Factory) -> None:
    desk.put(*factory.chunks(3))
