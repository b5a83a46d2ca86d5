"""Full and failing disks: nothing acknowledged is lost, and writing resumes when it can."""

import contextlib
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.stores.local_stores import files_with, local, local_harness, sessions
from understudy.core.errors import Closed, StorageFailed, StorageFull, Unreachable
from understudy.core.names import new_session
from understudy.experience.chunk import Chunk
from understudy.experience.game import GameSpec
from understudy.experience.session import tombstone_of
from understudy.stores.database import FILE_NAME
from understudy.stores.local import LocalStore
from understudy.stores.view import StoreView
from understudy.testing.clock import START_S
from understudy.testing.samples import OTHER_PLAYER, PLAYER, random_chunk
from understudy.testing.store_harness import SPEC, StoreHarness


class FailingCommit:
    """A connection whose `at`th COMMIT fails on sync, so the state on disk is unknown."""

    def __init__(self, db: sqlite3.Connection, at: int) -> None:
        self._db = db
        self._left = at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def execute(self, query: str, *values: Any) -> Any:
        if query == "COMMIT":
            self._left -= 1
            if self._left == 0:
                self._db.execute("ROLLBACK")
                error = sqlite3.OperationalError("disk I/O error")
                error.sqlite_errorcode = sqlite3.SQLITE_IOERR
                raise error
        return self._db.execute(query, *values)


def test_after_a_failed_sync_the_store_must_be_reopened(tmp_path: Path):
    (chunks,) = sessions(1, 6)
    for call in range(1, 5):
        harness = local_harness(tmp_path / str(call))
        failing: Any = FailingCommit(local(harness)._db, call)
        local(harness)._database.db = failing
        acked: list[Chunk] = []
        for chunk in chunks:
            try:
                harness.put(chunk)
                acked.append(chunk)
            except StorageFailed:
                break
        assert len(acked) == call - 1
        for refused in (
            partial(harness.put, chunks[5]),
            partial(harness.store.forget, PLAYER),
            local(harness).compact,
        ):
            with pytest.raises(StorageFailed, match="reopen"):
                refused()
        assert harness.chunks() == acked, "reading goes on"
        harness.store.close()
        again = local_harness(tmp_path / str(call))
        assert again.chunks() == acked
        assert set(again.put(*chunks)) <= {"new", "duplicate"}
        assert {chunk.meta.chunk_no for chunk in again.chunks()} == set(range(6))
        audit = again.store.audit()
        assert (list(audit.corrupt), audit.duplicate_chunks, audit.chunks) == ([], 0, 6)
        again.store.close()


def test_a_read_error_of_sqlite_becomes_an_error_of_the_store(tmp_path: Path):
    ((chunk, other),) = sessions(1, 2)
    harness = local_harness(tmp_path)
    harness.put(chunk)
    store = local(harness)
    store.lookup.clear()
    store._database.db.close()
    for call in (
        partial(store.quarantine, [(chunk.meta.session, 0)], reason="by hand"),
        partial(store.forget_tombstone, tombstone_of(PLAYER)),
        partial(harness.write, refused=[harness.refusal(other)]),
    ):
        with pytest.raises(StorageFailed, match="reopen"):
            call()
    store.close()


def test_a_closed_store_raises_closed(tmp_path: Path):
    store = local(local_harness(tmp_path))
    store.close()
    for call in (
        partial(store.expire, 0.0),
        partial(store.trim, []),
        partial(store.forget_tombstone, tombstone_of(PLAYER)),
        store.erase,
    ):
        with pytest.raises(Closed):
            call()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A mounted file system of 12 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def write_until_full(harness: StoreHarness, acked: list[Chunk], *, player: bytes = PLAYER) -> None:
    """Chunks of one session until there is no space for the next one."""
    session = acked[0].meta.session if acked else new_session(START_S)
    rng = np.random.default_rng(len(acked))
    while len(acked) < 5_000:
        number = len(acked)
        chunk = random_chunk(
            SPEC, rng, session=session, chunk_no=number, first_step=400 * number, n_steps=400
        )
        try:
            assert harness.put(chunk, player=player) == ["new"]
        except StorageFull:
            harness.position -= 1
            return
        acked.append(chunk)
    raise AssertionError("the disk never ran full")


def test_a_full_disk_without_a_reserve_is_storage_full(small_disk: Path):
    harness = local_harness(small_disk / "store", reserve_bytes=64 << 20)
    harness.put(*sessions(1, 2)[0])
    folder = local(harness).folder
    harness.store.close()
    assert not (folder / "reserve").exists(), "there was no room for one"
    with (small_disk / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    for opening in (StoreView, partial(LocalStore, reserve_bytes=64 << 20)):
        with pytest.raises(StorageFull, match="free some space"):
            opening(folder)
    (small_disk / "ballast").unlink()
    again = local_harness(folder)
    assert len(again.chunks()) == 2
    again.store.close()


def test_a_full_disk_loses_nothing_and_writing_resumes_with_space(small_disk: Path):
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(3_000_000))
    harness = local_harness(small_disk / "store", reserve_bytes=1 << 20)
    acked: list[Chunk] = []
    write_until_full(harness, acked)
    before = len(acked)
    write_until_full(harness, acked)
    assert harness.chunks() == acked
    ballast.unlink()
    write_until_full(harness, acked)
    assert len(acked) > before + 10
    assert harness.chunks() == acked
    folder = local(harness).folder
    harness.store.close()
    subprocess.run(["mount", "-o", "remount,size=40m", str(folder.parent)], check=True)
    again = local_harness(folder)
    assert again.chunks() == acked
    audit = again.store.audit()
    assert (list(audit.corrupt), audit.duplicate_chunks, audit.gap_chunks, audit.chunks) == (
        [],
        0,
        0,
        len(acked),
    )
    assert again.put(*acked) == ["duplicate"] * len(acked)
    again.store.close()


@pytest.mark.parametrize("is_reopened", [False, True])
def test_on_a_full_disk_players_are_forgotten_and_old_steps_expire(
    small_disk: Path, is_reopened: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("understudy.stores.database.CHECKPOINT_BYTES", 1 << 20)
    harness = local_harness(small_disk / "store", reserve_bytes=2 << 20)
    mine: list[Chunk] = []
    others: list[Chunk] = []
    for chunks in sessions(6, 10, max_steps=400):
        harness.put(*chunks, player=OTHER_PLAYER)
        others += chunks
    harness.clock.advance(100.0)
    write_until_full(harness, mine)
    (small_disk / "ballast").write_bytes(bytes(_free(small_disk)))
    if is_reopened:
        harness.reopen()
    assert harness.store.forget(PLAYER) == len(mine)
    assert files_with(small_disk / "store", PLAYER, mine[0].meta.session.bytes) == []
    assert harness.store.expire(harness.clock.now() - 50.0) == len(others)
    assert harness.chunks() == []
    fresh = sessions(1, 5, seed=77, max_steps=400)[0]
    assert harness.put(*fresh, player=OTHER_PLAYER) == ["new"] * 5, (
        "the room inside the database is used again"
    )
    audit = harness.store.audit()
    assert (list(audit.corrupt), audit.chunks) == ([], 5)
    harness.store.close()


def _free(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def test_a_closed_store_can_be_read_from_a_read_only_disk(small_disk: Path):
    folder = small_disk / "store"
    (chunks,) = sessions(1, 6)
    harness = local_harness(folder)
    for chunk in chunks:
        harness.put(chunk)
    with read_only(folder) as seen:
        assert len(tailed(seen)) == 6, "somebody writes to it elsewhere"
    harness.store.close()
    assert not list(folder.glob("*-wal"))
    with read_only(folder) as seen:
        assert len(tailed(seen)) == 6
        with StoreView(seen) as view:
            assert view.damage() == ""
            assert view.counts().chunks == 6
    (folder / f"{FILE_NAME}-wal").write_bytes(b"what a killed writer left")
    with read_only(folder) as seen, pytest.raises(StorageFailed, match="is on a read-only disk"):
        StoreView(seen)


def tailed(folder: Path) -> list[object]:
    with StoreView(folder) as view:
        return list(view.tail(None, max_items=100, wait_s=0.0).items)


@contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """The same folder on a read-only mount."""
    seen = folder.with_name("seen")
    seen.mkdir(exist_ok=True)
    for mount in (["--bind", str(folder)], ["-o", "remount,bind,ro"]):
        subprocess.run(["mount", *mount, str(seen)], check=True)
    try:
        yield seen
    finally:
        subprocess.run(["umount", "-l", str(seen)], check=True)


class SpecsElsewhere:
    """Remote specs that are unreachable for a while."""

    is_away = True

    def spec(self, game: str, schema: str) -> GameSpec | None:
        if self.is_away:
            raise Unreachable("nobody answers")
        return SPEC if (game, schema) == (SPEC.game, SPEC.schema) else None

    def has_game(self, game: str) -> bool:
        return game == SPEC.game


def test_unreachable_specs_fail_a_write_and_the_store_need_not_be_reopened(tmp_path: Path):
    specs = SpecsElsewhere()
    harness = local_harness(tmp_path, specs=specs)
    (chunks,) = sessions(1, 4)
    for _ in range(2):
        with pytest.raises(Unreachable):
            harness.put(*chunks[:2])
    specs.is_away = False
    assert harness.put(*chunks) == ["new"] * 4
    assert harness.chunks() == chunks
    harness.store.close()
    with StoreView(tmp_path) as view:
        assert view.specs(SPEC.game) == [SPEC]
