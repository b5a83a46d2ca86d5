"""Full and failing disks: nothing acknowledged is lost, and work goes on when it can."""

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.stores.desks import local, local_desk, sessions
from understudy.core.chunk import Chunk
from understudy.core.errors import StorageFailed, StorageFull, Unreachable
from understudy.core.game import GameSpec
from understudy.core.names import new_session
from understudy.stores.reader import SegmentReader
from understudy.stores.view import StoreView
from understudy.testing.clock import START_S
from understudy.testing.desk import SPEC, Desk
from understudy.testing.faults import FaultySync
from understudy.testing.samples import PLAYER, random_chunk


def test_a_full_disk_refuses_one_write_and_takes_the_next(tmp_path: Path):
    (chunks,) = sessions(1, 8)
    for call in range(2, 8):
        sync = FaultySync(full_at=[call])
        desk = local_desk(tmp_path / str(call), sync=sync)
        for number, chunk in enumerate(chunks[:6]):
            if number + 2 == call:
                with pytest.raises(StorageFull):
                    desk.put(chunk)
                assert desk.chunks() == chunks[:number], "what was refused is not there"
                assert local(desk).positions().get("p") == (str(number) if number else None)
                desk.position -= 1
            assert desk.put(chunk) == ["new"]
        assert desk.chunks() == chunks[:6]
        desk.reopen()
        assert desk.chunks() == chunks[:6]
        assert not desk.store.audit().corrupt
        desk.store.close()


def test_after_a_failed_sync_the_store_wants_to_be_reopened(tmp_path: Path):
    (chunks,) = sessions(1, 6)
    for call in range(2, 6):
        desk = local_desk(tmp_path / str(call), sync=FaultySync(eio_at=[call]))
        acked: list[Chunk] = []
        for chunk in chunks:
            try:
                desk.put(chunk)
                acked.append(chunk)
            except StorageFailed:
                break
        assert len(acked) == call - 2
        for refused in (partial(desk.put, chunks[5]), partial(desk.store.forget, PLAYER), local(desk).freeze):
            with pytest.raises(StorageFailed, match="reopen"):
                refused()
        assert desk.chunks() == acked, "reading goes on"
        desk.store.close()
        again = local_desk(tmp_path / str(call))
        stored = again.chunks()
        assert stored[: len(acked)] == acked
        assert set(again.put(*chunks)) <= {"new", "duplicate"}
        assert {chunk.meta.chunk_no for chunk in again.chunks()} == set(range(6))
        audit = again.store.audit()
        assert (list(audit.corrupt), audit.duplicate_chunks, audit.chunks) == ([], 0, 6)
        again.store.close()


@pytest.mark.parametrize("what", ["segment", "catalogue", "log"])
def test_no_room_to_seal_stops_writing_until_there_is(tmp_path: Path, monkeypatch, what: str):
    desk = local_desk(tmp_path, seal_rows=8)
    many = [chunk for session in sessions(6, 3) for chunk in session]
    with monkeypatch.context() as patch:
        if what == "segment":
            patch.setattr("understudy.stores.segments.sync_folder", _no_room)
        elif what == "log":
            patch.setattr("understudy.core.log.sync_folder", _no_room)
        else:
            patch.setattr("understudy.stores.sealing._write_sessions", _no_room)
        stored = _put_until_full(desk, many)
        with pytest.raises(StorageFull):
            desk.put(many[stored])
        assert desk.chunks() == many[:stored]
    desk.position = stored
    assert desk.put(*many) == ["duplicate"] * stored + ["new"] * (len(many) - stored)
    desk.reopen()
    assert desk.chunks() == many
    audit = desk.store.audit()
    assert (list(audit.corrupt), audit.duplicate_chunks, audit.chunks) == ([], 0, len(many))
    desk.store.close()


def _put_until_full(desk: Desk, chunks: list[Chunk]) -> int:
    for number, chunk in enumerate(chunks):
        try:
            desk.put(chunk)
        except StorageFull:
            return number
    raise AssertionError("there was room for everything")


def _no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_failed_seal_for_any_other_reason_wants_a_reopening(tmp_path: Path, monkeypatch):
    desk = local_desk(tmp_path)
    (chunks,) = sessions(1, 3)
    desk.put(*chunks)
    with monkeypatch.context() as patch:
        patch.setattr("understudy.stores.sealing._write_sessions", _broken)
        with pytest.raises(StorageFailed, match="reopen"):
            local(desk).freeze(wait=True)
        with pytest.raises(StorageFailed):
            desk.put(*chunks)
    desk.reopen()
    assert desk.chunks() == chunks
    local(desk).freeze(wait=True)
    assert not desk.store.audit().corrupt
    desk.store.close()


def _broken(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A mounted file system of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_runs_full_loses_nothing_and_goes_on_with_space(small_disk: Path):
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(700_000))
    desk = local_desk(small_disk / "store", seal_rows=2000, seal_bytes=256 * 1024)
    rng, session = np.random.default_rng(0), new_session(START_S)
    acked: list[Chunk] = []

    def write_until_full() -> None:
        while len(acked) < 1000:
            chunk = random_chunk(
                SPEC, rng, session=session, chunk_no=len(acked), first_step=400 * len(acked), n_steps=400
            )
            try:
                assert desk.put(chunk) == ["new"]
            except StorageFull:
                desk.position -= 1
                return
            acked.append(chunk)
        raise AssertionError("the disk never ran full")

    write_until_full()
    before = len(acked)
    write_until_full()
    assert desk.chunks() == acked
    ballast.unlink()
    write_until_full()
    assert len(acked) > before + 10
    assert desk.chunks() == acked
    _check_reopened(desk, acked)


def test_a_sound_store_is_read_from_a_disk_that_is_read_only(small_disk: Path):
    folder, (chunks,) = small_disk / "store", sessions(1, 6)
    desk = local_desk(folder)
    for chunk in chunks:
        desk.put(chunk)
    with read_only(folder) as seen:
        assert len(tailed(seen)) == 6, "somebody writes to it elsewhere"
    desk.store.close()
    assert not list(folder.glob("*-wal"))
    with read_only(folder) as seen:
        assert len(tailed(seen)) == 6
        with StoreView(seen) as view:
            assert view.catalogue.is_sound() == ""
            with view.snapshot() as unsealed:
                assert len(unsealed.items) + view.catalogue.one("SELECT count(*) FROM arrivals")[0] == 6
    (folder / "catalogue.sqlite-wal").write_bytes(b"what a killed writer left")
    with read_only(folder) as seen, pytest.raises(StorageFailed, match="the disk is read-only"):
        StoreView(seen)


def tailed(folder: Path) -> list[object]:
    with StoreView(folder) as view:
        return list(view.tail(None, max_items=100, wait_s=0.0).items)


@contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """The same folder where nobody can write to it."""
    seen = folder.with_name("seen")
    seen.mkdir(exist_ok=True)
    for mount in (["--bind", str(folder)], ["-o", "remount,bind,ro"]):
        subprocess.run(["mount", *mount, str(seen)], check=True)
    try:
        yield seen
    finally:
        subprocess.run(["umount", "-l", str(seen)], check=True)


def _check_reopened(desk: Desk, acked: list[Chunk]) -> None:
    """Room is made, as an operator would; then everything that was acknowledged is there, once."""
    folder = local(desk).folder
    desk.store.close()
    subprocess.run(["mount", "-o", "remount,size=8m", str(folder.parent)], check=True)
    again = local_desk(folder)
    assert again.chunks() == acked
    audit = again.store.audit()
    assert (list(audit.corrupt), audit.duplicate_chunks, audit.gap_chunks, audit.chunks) == ([], 0, 0, len(acked))
    assert again.put(*acked) == ["duplicate"] * len(acked)
    again.store.close()


class SpecsElsewhere:
    """Specs on other machines that are away for a while."""

    is_away = True

    def spec(self, game: str, schema: str) -> GameSpec | None:
        if self.is_away:
            raise Unreachable("nobody answers")
        return SPEC if (game, schema) == (SPEC.game, SPEC.schema) else None

    def knows(self, game: str) -> bool:
        return game == SPEC.game


def test_specs_elsewhere_that_are_away_make_sealing_wait_and_no_reopening_is_needed(tmp_path: Path):
    specs = SpecsElsewhere()
    desk = local_desk(tmp_path, specs=specs)
    (chunks,) = sessions(1, 4)
    desk.put(*chunks[:2])
    for _ in range(2):
        with pytest.raises(Unreachable):
            local(desk).freeze(wait=True)
    assert desk.put(chunks[2]) == ["new"], "writing goes on while there is room in the log"
    specs.is_away = False
    assert desk.put(chunks[3]) == ["new"]
    local(desk).freeze(wait=True)
    assert desk.chunks() == chunks
    desk.store.close()
    with SegmentReader(tmp_path) as reader:
        assert reader.spec == SPEC
