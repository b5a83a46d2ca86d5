"""What a killed, torn or damaged store is when it is opened again."""

import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.stores.desks import dies_in_a_child, files_with, last_log, local, local_desk, sessions
from understudy.core.errors import Locked, StorageFailed
from understudy.core.ports import Forgotten, Stored
from understudy.stores.commits import Watermark, WatermarkFile
from understudy.stores.local import LocalStore
from understudy.stores.view import StoreView
from understudy.testing.clock import ManualClock
from understudy.testing.desk import Desk
from understudy.testing.samples import OTHER_PLAYER, PLAYER


def assert_sound(desk: Desk, *, chunks: int) -> None:
    audit = desk.store.audit()
    assert list(audit.corrupt) == []
    assert (audit.chunks, audit.duplicate_chunks, audit.gap_chunks) == (chunks, 0, 0)
    desk.tail()
    assert_no_orphans(local(desk))


def assert_no_orphans(store: LocalStore) -> None:
    registered = {
        f"{row[0]:08d}.safetensors" for row in StoreView(store.folder).catalogue.rows("SELECT id FROM segments")
    }
    assert {path.name for path in (store.folder / "segments").iterdir()} == registered
    assert len(list((store.folder / "log").iterdir())) == 1


def test_a_torn_last_entry_costs_only_what_nobody_was_promised(quick_path: Path):
    desk = local_desk(quick_path / "store")
    first, second = sessions(2, 2)
    desk.put(*first)
    promised = last_log(quick_path / "store").stat().st_size
    mark = (quick_path / "store" / "watermark").read_bytes()
    desk.put(*second)
    desk.store.close()
    whole = last_log(quick_path / "store").read_bytes()
    for size in {*range(promised, promised + 40), *range(promised, len(whole), 13), *range(len(whole) - 8, len(whole))}:
        torn = quick_path / "torn"
        shutil.copytree(quick_path / "store", torn)
        last_log(torn).write_bytes(whole[:size])
        (torn / "watermark").write_bytes(mark)
        again = local_desk(torn)
        assert again.chunks() == first
        assert local(again).positions() == {"p": "1"}
        again.position = 1
        assert again.put(*second) == ["new", "new"]
        assert_sound(again, chunks=4)
        again.store.close()
        shutil.rmtree(torn)


def test_an_acknowledged_entry_that_is_cut_off_is_damage(tmp_path: Path):
    desk = local_desk(tmp_path)
    first, second = sessions(2, 2)
    desk.put(*first)
    desk.put(*second)
    desk.store.close()
    log = last_log(tmp_path)
    log.write_bytes(log.read_bytes()[:-1])
    for _ in range(2):
        again = local_desk(tmp_path)
        assert again.chunks() == first
        assert [type(item) for item in again.tail()] == [Stored, Stored, Forgotten, Forgotten]
        assert again.store.audit().corrupt
        local(again).freeze(wait=True)
        assert again.store.audit().corrupt, "damage stays visible after sealing"
        again.store.close()


@pytest.mark.parametrize("n_damaged", [1, 2, 3])
@pytest.mark.parametrize("is_live", [True, False])
def test_damage_inside_the_log_is_shown_and_stops_nobody(tmp_path: Path, n_damaged: int, is_live: bool):
    desk = local_desk(tmp_path)
    chunks = sessions(1, 6)[0]
    ends = []
    for chunk in chunks:
        desk.put(chunk)
        ends.append(last_log(tmp_path).stat().st_size)
    with last_log(tmp_path).open("r+b") as file:
        for index in range(1, 1 + n_damaged):
            file.seek((ends[index - 1] + ends[index]) // 2)
            file.write(b"\xff\x00\xff")
    if not is_live:
        desk.reopen()
    left = [chunks[0], *chunks[1 + n_damaged :]]
    with StoreView(tmp_path) as view:
        numbers = [item.arrival_no for item in view.tail(None, max_items=99, wait_s=0.0).items]
    assert numbers == [1, 2, 3, 4, 5, 6]
    assert desk.chunks() == left
    audit = desk.store.audit()
    assert audit.corrupt
    assert (audit.chunks, audit.gap_chunks) == (6 - n_damaged, n_damaged)
    fates = desk.put(*chunks)
    assert fates == (
        ["duplicate"] * 6 if is_live else ["duplicate", *["new"] * n_damaged, *["duplicate"] * (5 - n_damaged)]
    )
    desk.store.close()


def test_damaged_quarantine_is_reported_even_after_sealing(tmp_path: Path):
    desk = local_desk(tmp_path)
    chunks = sessions(1, 3)[0]
    desk.put(chunks[0])
    start = last_log(tmp_path).stat().st_size
    desk.write(refused=[desk.refusal(chunks[1])])
    desk.put(chunks[2])
    desk.store.close()
    with last_log(tmp_path).open("r+b") as file:
        file.seek(start + 40)
        file.write(b"\xff\x00\xff")
    again = local_desk(tmp_path)
    assert again.chunks() == [chunks[0], chunks[2]]
    assert again.store.audit().corrupt
    local(again).freeze(wait=True)
    assert again.store.audit().corrupt
    again.store.close()


@pytest.mark.parametrize("what", ["missing", "empty", "torn", "stale"])
def test_a_bad_watermark_loses_nothing(tmp_path: Path, what: str):
    desk = local_desk(tmp_path)
    first, second = sessions(2, 3)
    desk.put(*first)
    path = tmp_path / "watermark"
    stale = path.read_bytes()
    desk.put(*second)
    desk.store.close()
    if what == "missing":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "torn": stale[:9] + b"\xff" + stale[10:], "stale": stale}[what])
    again = local_desk(tmp_path)
    assert again.chunks() == [*first, *second]
    assert_sound(again, chunks=6)
    again.store.close()


def test_a_torn_watermark_hides_the_log_from_readers_for_a_moment_only(tmp_path: Path):
    desk = local_desk(tmp_path)
    (chunks,) = sessions(1, 2)
    desk.put(chunks[0])
    with StoreView(tmp_path) as view, (tmp_path / "watermark").open("r+b") as file:
        file.write(b"\x00\x00")
        file.flush()
        assert list(view.tail(None, max_items=9, wait_s=0.0).items) == []
        assert view.mark().next_arrival == 0
        desk.put(chunks[1])
        assert len(view.tail(None, max_items=9, wait_s=0.0).items) == 2
    desk.store.close()


def test_a_watermark_is_read_back_as_written(tmp_path: Path):
    file = WatermarkFile(tmp_path / "mark", create=True)
    assert file.read() is None
    mark = Watermark(3, 1 << 40, 7, 1 << 33)
    file.write(mark)
    assert file.read() == mark
    file.close()
    file.close()


def write_seal_and_erase(folder: Path) -> None:
    """One of everything that moves bytes; what it leaves is checked by whoever opens the folder next."""
    clock = ManualClock()
    desk = local_desk(folder, clock=clock)
    mine, others = sessions(2, 3, seed=5)
    desk.put(*others, player=OTHER_PLAYER)
    desk.put(*mine[:2])
    desk.write(refused=[desk.refusal(mine[2])])
    local(desk).freeze(wait=True)
    desk.store.quarantine([(others[1].meta.session, 1)], reason="guard")
    desk.store.forget(PLAYER)
    clock.advance(100.0)
    more = sessions(1, 2, seed=6)[0]
    desk.put(*more, player=OTHER_PLAYER)
    desk.store.expire(clock.now() - 50.0)
    desk.store.close()


def test_dying_at_any_step_of_sealing_and_erasing_leaves_a_sound_store(quick_path: Path):
    mine, others = sessions(2, 3, seed=5)
    canary = mine[0].columns["obs"].tobytes()
    step = 1
    while dies_in_a_child(partial(write_seal_and_erase, quick_path / str(step)), at=step):
        folder = quick_path / str(step)
        if (folder / "catalogue.sqlite").exists():
            desk = local_desk(folder)
            audit = desk.store.audit()
            assert (list(audit.corrupt), audit.duplicate_chunks, audit.gap_chunks) == ([], 0, 0), f"step {step}"
            desk.tail()
            assert_no_orphans(local(desk))
            if audit.forgotten_chunks or any(b"forget" in p.read_bytes() for p in (folder / "log").iterdir()):
                assert files_with(folder, canary) == [], f"step {step}"
            fates = desk.put(*others, player=OTHER_PLAYER)
            assert set(fates) <= {"new", "duplicate"}
            assert desk.put(*others, player=OTHER_PLAYER) == ["duplicate"] * 3
            desk.reopen()
            assert list(desk.store.audit().corrupt) == []
            desk.store.close()
            shutil.rmtree(folder)
        step += 1
    assert step > 60, "the whole way was walked"


def test_an_acknowledged_write_survives_dying_anywhere_behind_it(quick_path: Path):
    chunks = sessions(1, 4, seed=9)[0]
    step = 1

    def work() -> None:
        desk = local_desk(quick_path / str(step), seal_rows=4)
        with (quick_path / f"{step}.acked").open("wb", buffering=0) as acked:
            for chunk in chunks:
                desk.put(chunk)
                acked.write(b".")
        desk.store.close()

    while dies_in_a_child(work, at=step):
        acked = quick_path / f"{step}.acked"
        promised = acked.stat().st_size if acked.exists() else 0
        desk = local_desk(quick_path / str(step))
        stored = desk.chunks()
        assert stored == chunks[: len(stored)]
        assert promised <= len(stored) <= promised + 1
        assert_sound(desk, chunks=len(stored))
        desk.store.close()
        shutil.rmtree(quick_path / str(step))
        step += 1
    assert step > 30


def test_a_store_is_open_in_one_place_only(tmp_path: Path):
    desk = local_desk(tmp_path)
    with pytest.raises(Locked):
        LocalStore(tmp_path)
    desk.store.close()
    LocalStore(tmp_path).close()


def test_opening_that_fails_lets_go_of_the_folder(tmp_path: Path):
    desk = local_desk(tmp_path)
    desk.put(*sessions(1, 2)[0])
    desk.store.close()

    def refuse(_: int) -> None:
        raise OSError(5, os.strerror(5))

    with pytest.raises(StorageFailed, match="Input/output error"):
        LocalStore(tmp_path, sync=refuse)
    again = local_desk(tmp_path)
    assert_sound(again, chunks=2)
    again.store.close()
