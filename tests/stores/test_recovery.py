"""Reopening a store after kill -9, a torn write or damage."""

import contextlib
import json
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.faults.profiles import sizes
from tests.stores.local_stores import dies_in_a_child, files_with, fork, local_harness, sessions
from understudy.core.errors import ConfigError, Corrupt, Locked
from understudy.experience.chunk import Chunk
from understudy.stores.database import FILE_NAME, file_system_of, has_store
from understudy.stores.local import LocalStore
from understudy.stores.view import StoreView
from understudy.testing.clock import ManualClock
from understudy.testing.samples import OTHER_PLAYER, PLAYER
from understudy.testing.store_harness import StoreHarness

WAL = f"{FILE_NAME}-wal"


def assert_sound(harness: StoreHarness, *, chunks: int) -> None:
    audit = harness.store.audit()
    assert list(audit.corrupt) == []
    assert (audit.chunks, audit.duplicate_chunks, audit.gap_chunks) == (chunks, 0, 0)
    harness.tail()


def killed(folder: Path, batches: list[list[Chunk]]) -> list[int]:
    """Write batches in a child killed before a checkpoint; return the log's size after each."""
    reader, writer = os.pipe()
    if fork() == 0:
        harness = local_harness(folder)
        sizes = [(folder / WAL).stat().st_size]
        for chunks in batches:
            harness.put(*chunks)
            sizes.append((folder / WAL).stat().st_size)
        os.write(writer, json.dumps(sizes).encode())
        os._exit(9)
    os.close(writer)
    os.wait()
    with os.fdopen(reader, "rb") as file:
        return list(json.loads(file.read()))


def test_a_truncated_log_rolls_back_data_and_position_together(tmp_path: Path):
    first, second = sessions(2, 2)
    sizes = killed(tmp_path / "store", [first, second])
    for cut in [sizes[1], sizes[1] + 24, (sizes[1] + sizes[2]) // 2, sizes[2] - 1]:
        torn = tmp_path / "torn"
        shutil.copytree(tmp_path / "store", torn)
        os.truncate(torn / WAL, cut)
        again = local_harness(torn)
        assert again.chunks() == first
        assert again.store.positions() == {"p": "1"}  # type: ignore[attr-defined]
        again.position = 1
        assert again.put(*second) == ["new", "new"]
        assert_sound(again, chunks=4)
        again.store.close()
        shutil.rmtree(torn)


@sizes("places", short=15, full=60)
def test_a_flipped_byte_in_the_log_rolls_back_or_has_no_effect(tmp_path: Path, places: int):
    batches = sessions(6, 2)
    log_sizes = killed(tmp_path / "store", batches)
    chunks = [chunk for batch in batches for chunk in batch]
    whole = (tmp_path / "store" / WAL).read_bytes()
    for place in range(log_sizes[0] + 7, log_sizes[-1], (log_sizes[-1] - log_sizes[0]) // places):
        torn = tmp_path / "torn"
        shutil.copytree(tmp_path / "store", torn)
        raw = bytearray(whole)
        raw[place] ^= 4
        (torn / WAL).write_bytes(raw)
        again = local_harness(torn)
        stored = again.chunks()
        assert stored == chunks[: len(stored)]
        assert again.store.positions().get("p") == (str(len(stored) // 2) if stored else None)  # type: ignore[attr-defined]
        again.position = len(stored) // 2
        assert again.put(*chunks) == ["duplicate"] * len(stored) + ["new"] * (12 - len(stored))
        assert_sound(again, chunks=12)
        again.store.close()
        shutil.rmtree(torn)


def test_a_log_of_another_time_is_rejected_before_it_can_change_the_database(tmp_path: Path):
    batches = sessions(42, 4, max_steps=30)
    harness = local_harness(tmp_path)
    harness.put(*[chunk for batch in batches[:20] for chunk in batch])
    harness.store.close()
    killed(tmp_path, batches[20:22])
    older = (tmp_path / WAL).read_bytes()
    harness = local_harness(tmp_path)
    for batch in batches[22:]:
        harness.put(*batch)
    harness.store.close()
    whole = (tmp_path / FILE_NAME).read_bytes()
    (tmp_path / WAL).write_bytes(older)
    for opening in (LocalStore, StoreView):
        with pytest.raises(Corrupt):
            opening(tmp_path)
    with pytest.raises(Corrupt, match="belongs to another copy, move it away"):
        LocalStore(tmp_path)
    assert (tmp_path / FILE_NAME).read_bytes() == whole
    (tmp_path / WAL).unlink()
    (tmp_path / f"{FILE_NAME}-shm").unlink(missing_ok=True)
    again = local_harness(tmp_path)
    assert_sound(again, chunks=168)
    again.store.close()


def test_a_cursor_ahead_of_a_truncated_store_is_rejected(tmp_path: Path):
    first, second = sessions(2, 2)
    sizes = killed(tmp_path, [first, second])
    with StoreView(tmp_path) as view:
        cursor = view.tail(None, max_items=10, wait_s=0.0).cursor
    os.truncate(tmp_path / WAL, sizes[1])
    (tmp_path / f"{FILE_NAME}-shm").unlink()
    with StoreView(tmp_path) as view, pytest.raises(Corrupt, match="cursor 4 is ahead"):
        view.tail(cursor, max_items=10, wait_s=0.0)


@pytest.mark.parametrize("size", [None, 0])
def test_a_missing_or_empty_database_is_rejected_and_not_recreated(
    tmp_path: Path, size: int | None
):
    harness = local_harness(tmp_path)
    harness.put(*sessions(1, 2)[0])
    harness.store.close()
    path = tmp_path / FILE_NAME
    whole = path.read_bytes()
    path.unlink()
    if size is not None:
        path.write_bytes(b"")
    for opening in (LocalStore, StoreView):
        with pytest.raises(Corrupt, match="missing or empty"):
            opening(tmp_path)
    assert path.exists() == (size is not None)
    path.write_bytes(whole)
    again = local_harness(tmp_path)
    assert_sound(again, chunks=2)
    again.store.close()


def test_a_missing_store_json_is_rewritten_and_a_foreign_one_is_rejected(tmp_path: Path):
    harness = local_harness(tmp_path)
    harness.put(*sessions(1, 2)[0])
    harness.store.close()
    path = tmp_path / "store.json"
    known = path.read_bytes()
    path.unlink()
    again = local_harness(tmp_path)
    assert_sound(again, chunks=2)
    again.store.close()
    assert path.read_bytes() == known
    other = local_harness(tmp_path / "other")
    other.store.close()
    path.write_bytes((tmp_path / "other" / "store.json").read_bytes())
    for opening in (LocalStore, StoreView):
        with pytest.raises(Corrupt, match="is not the database of store"):
            opening(tmp_path)
    path.write_bytes(known[:-9] + b"}")
    with pytest.raises(Corrupt, match="damaged"):
        LocalStore(tmp_path)


def test_anything_in_the_place_of_a_store_counts_as_one_and_is_rejected(tmp_path: Path):
    def garbage(folder: Path) -> None:
        folder.mkdir()
        (folder / FILE_NAME).write_bytes(b"no database" * 100)

    def foreign(folder: Path) -> None:
        folder.mkdir()
        with contextlib.closing(sqlite3.connect(folder / FILE_NAME)) as db:
            db.execute("CREATE TABLE theirs (value)")

    def old(folder: Path) -> None:
        (folder / "segments").mkdir(parents=True)

    def a_file(folder: Path) -> None:
        folder.touch()

    refused: list[tuple[Callable[[Path], None], str]] = [
        (garbage, "not a database"),
        (foreign, "is the database of another program"),
        (old, "before the first release"),
        (a_file, "is a file, but a store needs a folder"),
    ]
    for number, (make, said) in enumerate(refused):
        folder = tmp_path / str(number)
        make(folder)
        assert has_store(folder)
        for opening in (LocalStore, StoreView):
            with pytest.raises((Corrupt, ConfigError), match=said):
                opening(folder)
    assert not has_store(tmp_path / "nothing")
    lost = local_harness(tmp_path / "lost")
    lost.put(*sessions(1, 2)[0])
    lost.store.close()
    (tmp_path / "lost" / "store.json").unlink()
    assert has_store(tmp_path / "lost")


def test_a_store_of_an_older_format_is_rejected_and_not_changed(tmp_path: Path):
    (tmp_path / "segments").mkdir()
    (tmp_path / "catalogue.sqlite").write_bytes(b"old")
    for opening in (LocalStore, StoreView):
        with pytest.raises(ConfigError, match="before the first release"):
            opening(tmp_path)
    assert (tmp_path / "catalogue.sqlite").read_bytes() == b"old"
    assert not (tmp_path / FILE_NAME).exists()


def test_network_file_systems_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mounts = (
        "21 1 254:0 / / rw - ext4 /dev/vda rw\n"
        "30 21 0:40 / /srv rw shared:1 - nfs4 server:/ rw\n"
        "31 30 0:41 / /srv/local\\040disk rw - xfs /dev/vdb rw\n"
    )
    assert file_system_of(Path("/srv/data/store"), mounts) == "nfs4"
    assert file_system_of(Path("/srv/local disk/store"), mounts) == "xfs"
    assert file_system_of(Path("/home"), mounts) == "ext4"
    monkeypatch.setattr("understudy.stores.database.file_system_of", lambda *_: "nfs4")
    with pytest.raises(ConfigError, match=r"network file system \(nfs4\)"):
        LocalStore(tmp_path / "store")


def write_and_erase(folder: Path) -> None:
    """Every operation that moves bytes, once; the next process to open the folder checks them."""
    clock = ManualClock()
    harness = local_harness(folder, clock=clock)
    mine, others = sessions(2, 3, seed=5)
    harness.put(*others, player=OTHER_PLAYER)
    harness.put(*mine[:2])
    harness.write(refused=[harness.refusal(mine[2])])
    harness.store.quarantine([(others[1].meta.session, 1)], reason="guard")
    harness.store.forget(PLAYER)
    clock.advance(100.0)
    more = sessions(1, 2, seed=6)[0]
    harness.put(*more, player=OTHER_PLAYER)
    harness.store.expire(clock.now() - 50.0)
    harness.store.compact()  # type: ignore[attr-defined]
    harness.store.close()


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_dying_at_any_step_of_writing_and_erasing_leaves_an_undamaged_store(
    quick_path: Path, every: int
):
    """Kills and recovers a process at every eighth of some 200 steps; in the full card at each."""
    mine, others = sessions(2, 3, seed=5)
    theirs = (mine[0].columns["obs"].tobytes(), mine[0].meta.session.bytes, PLAYER)
    step = 1
    while dies_in_a_child(partial(write_and_erase, quick_path / str(step)), at=step):
        folder = quick_path / str(step)
        harness = local_harness(folder)
        audit = harness.store.audit()
        assert (list(audit.corrupt), audit.duplicate_chunks, audit.gap_chunks) == ([], 0, 0), (
            f"step {step}"
        )
        harness.tail()
        if audit.forgotten_chunks:
            assert files_with(folder, *theirs) == [], f"step {step}"
        fates = harness.put(*others, player=OTHER_PLAYER)
        assert set(fates) <= {"new", "duplicate"}
        assert harness.put(*others, player=OTHER_PLAYER) == ["duplicate"] * 3
        harness.store.close()
        shutil.rmtree(folder)
        step += every
    assert step > 100, "the whole way was walked"


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_an_acknowledged_write_survives_dying_at_any_later_step(quick_path: Path, every: int):
    chunks = sessions(1, 4, seed=9)[0]
    step = 1

    def work() -> None:
        harness = local_harness(quick_path / str(step))
        with (quick_path / f"{step}.acked").open("wb", buffering=0) as acked:
            for chunk in chunks:
                harness.put(chunk)
                acked.write(b".")
        harness.store.close()

    while dies_in_a_child(work, at=step):
        acked = quick_path / f"{step}.acked"
        promised = acked.stat().st_size if acked.exists() else 0
        harness = local_harness(quick_path / str(step))
        stored = harness.chunks()
        assert stored == chunks[: len(stored)]
        assert promised <= len(stored) <= promised + 1
        assert_sound(harness, chunks=len(stored))
        harness.store.close()
        shutil.rmtree(quick_path / str(step))
        step += every
    assert step > 30


def test_only_one_process_can_open_a_store(tmp_path: Path):
    harness = local_harness(tmp_path)
    with pytest.raises(Locked):
        LocalStore(tmp_path)
    harness.store.close()
    LocalStore(tmp_path).close()


def test_a_copy_includes_what_was_written_during_the_copy(tmp_path: Path):
    harness = local_harness(tmp_path / "store")
    first, more = sessions(2, 3)
    harness.put(*first)
    waiting = list(more)

    def between() -> None:
        if waiting:
            harness.put(waiting.pop(0))

    harness.store.back_up(tmp_path / "copy", between=between)  # type: ignore[attr-defined]
    assert len(waiting) < 3
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "copy").iterdir()} == {0}
    copy = local_harness(tmp_path / "copy")
    stored = copy.chunks()
    assert stored == [*first, *more][: len(stored)]
    assert len(stored) >= 3
    assert_sound(copy, chunks=len(stored))
    copy.store.close()
    harness.store.close()


def test_compacting_shrinks_the_file_and_keeps_every_chunk(tmp_path: Path):
    harness = local_harness(tmp_path)
    many = sessions(40, 4, max_steps=400)
    for number, chunks in enumerate(many):
        harness.put(*chunks, player=PLAYER if number % 2 else OTHER_PLAYER)
    harness.store.forget(PLAYER)
    before = (tmp_path / FILE_NAME).stat().st_size
    turns: list[int] = []
    freed = harness.store.compact(slice_s=0.001, between=lambda: turns.append(1))  # type: ignore[attr-defined]
    assert freed > 0
    assert before - (tmp_path / FILE_NAME).stat().st_size >= freed - 65_536
    assert len(turns) > 1, "in slices"
    assert harness.chunks() == [chunk for chunks in many[::2] for chunk in chunks]
    assert_sound(harness, chunks=80)
    harness.store.close()


def test_a_slice_too_short_for_anything_still_shrinks_the_file(tmp_path: Path):
    harness = local_harness(tmp_path)
    for chunks in sessions(20, 4, max_steps=400):
        harness.put(*chunks, player=PLAYER)
    harness.store.forget(PLAYER)
    slices = 0

    def between() -> None:
        nonlocal slices
        slices += 1
        assert slices < 10_000, "a slice that frees nothing is repeated for ever"

    assert harness.store.compact(slice_s=1e-9, between=between) > 0  # type: ignore[attr-defined]
    assert slices > 0
    harness.store.close()


def test_under_retention_the_file_stops_growing(tmp_path: Path):
    harness = local_harness(tmp_path)
    sizes: list[int] = []
    for turn in range(30):
        harness.put(*sessions(1, 6, seed=turn, max_steps=300)[0])
        harness.clock.advance(10.0)
        harness.store.expire(harness.clock.now() - 45.0)
        sizes.append((tmp_path / FILE_NAME).stat().st_size)
    assert max(sizes[15:]) <= max(sizes[:15]) + 4 * 16_384
    harness.store.close()


def test_the_write_ahead_log_is_bounded_under_ten_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("understudy.stores.database.CHECKPOINT_BYTES", 1 << 17)
    monkeypatch.setattr("understudy.stores.database._LONG_LOG_BYTES", 1 << 18)
    harness = local_harness(tmp_path)
    stop = threading.Event()

    def follow() -> None:
        with StoreView(tmp_path) as view:
            cursor = None
            while not stop.is_set():
                cursor = view.tail(cursor, max_items=3, wait_s=0.01).cursor

    largest = 0
    with ThreadPoolExecutor(10) as pool:
        readers = [pool.submit(follow) for _ in range(10)]
        try:
            for turn in range(15):
                harness.put(*sessions(1, 4, seed=turn, max_steps=500)[0])
                largest = max(largest, (tmp_path / WAL).stat().st_size)
        finally:
            stop.set()
        for reader in readers:
            reader.result()
    assert (tmp_path / FILE_NAME).stat().st_size > 1 << 19
    assert largest < 2 << 20
    harness.store.close()
