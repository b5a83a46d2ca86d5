"""Statistics of a remote store; a local one takes its place, since both have the same port."""

from pathlib import Path

import pytest

from understudy.backends.data import DataFolder, remote_stats
from understudy.ports import Cursor, Tail
from understudy.stores.local import LocalStore
from understudy.testing.store_harness import SPEC, StoreFactory, StoreHarness


class _Factory(StoreFactory):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def make(self, clock):
        return LocalStore(self._folder / "elsewhere", clock=clock)


@pytest.fixture
def factory(tmp_path: Path) -> _Factory:
    return _Factory(tmp_path)


def test_figures_that_only_the_servers_know_are_left_out(factory: _Factory, tmp_path: Path):
    harness = factory.harness()
    data = DataFolder(tmp_path / "D")
    chunks = factory.chunks(3)
    harness.put(*chunks)
    harness.write(refused=[harness.refusal(one) for one in factory.chunks(2)])
    for left_over in (data.store, data.ledger):
        left_over.mkdir(parents=True)
        (left_over / "file").write_bytes(b"12345")
    steps = sum(one.meta.n_steps for one in chunks)
    assert remote_stats(data, harness.store) == {
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
    harness = factory.harness()
    tail = harness.store.tail
    _write(harness, factory)

    def growing(cursor: Cursor | None, *, max_items: int, wait_s: float) -> Tail:
        _write(harness, factory)
        return tail(cursor, max_items=max_items, wait_s=wait_s)

    monkeypatch.setattr(harness.store, "tail", growing)
    found = remote_stats(DataFolder(tmp_path / "D"), harness.store)
    assert found["steps"] == sum(found["games"].values()) > 0
    assert found["chunks"] == 3 * found["sessions"] >= 6


def _write(harness: StoreHarness, factory: _Factory) -> None:
    harness.put(*factory.chunks(3))
