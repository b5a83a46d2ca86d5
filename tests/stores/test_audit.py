"""An audit sees whatever is done to the bytes of a store, and names it."""

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from tests.stores.desks import last_log, local, local_desk, sessions
from understudy.core import tensors
from understudy.core.ages import REMEMBER_S
from understudy.core.chunk import Chunk
from understudy.core.log import HEAD_BYTES, LogFile, LogReader, no_sync
from understudy.core.ports import Audit, Position, WriteBatch
from understudy.stores.audit import audit, summary
from understudy.stores.commits import commit_parts, read_commit
from understudy.stores.sealing import segment_path
from understudy.stores.segments import Segment
from understudy.stores.view import StoreView
from understudy.testing.desk import Desk


@pytest.fixture
def sealed(tmp_path: Path) -> tuple[Desk, list[Chunk]]:
    """A store with one sealed segment of three sessions, a close and a quarantined frame."""
    desk = local_desk(tmp_path)
    chunks = [chunk for session in sessions(3, 3) for chunk in session]
    desk.put(*chunks)
    desk.write([desk.close(chunks[0].meta.session, 3)])
    desk.write(refused=[desk.refusal(sessions(1, 1, seed=8)[0][0])])
    local(desk).freeze(wait=True)
    found = desk.store.audit()
    assert (list(found.corrupt), found.chunks, found.quarantined) == ([], 9, 1)
    return desk, chunks


def audit_of(desk: Desk) -> Audit:
    """A fresh look from outside, as another process would take it."""
    with StoreView(local(desk).folder) as view:
        return summary(audit(view))


def segment_file(desk: Desk) -> Path:
    (path,) = (local(desk).folder / "segments").iterdir()
    return path


def change(desk: Desk, statement: str, *values: object) -> None:
    """Edit the catalogue behind the store's back."""
    with sqlite3.connect(local(desk).folder / "catalogue.sqlite") as db:
        assert db.execute(statement, values).rowcount > 0
    db.close()


def test_a_flipped_bit_anywhere_in_a_segment_is_seen(sealed):
    desk, _ = sealed
    path = segment_file(desk)
    whole = path.read_bytes()
    layout = tensors.parse_header(whole, total_bytes=len(whole), max_header_bytes=1 << 23)
    places = [3, 9, layout.data_start // 2, layout.data_start - 1]
    for entry in layout.entries.values():
        places += [layout.data_start + at for at in (entry.start, (entry.start + entry.end) // 2, entry.end - 1)]
    rng = np.random.default_rng(0)
    places += rng.integers(0, len(whole), 100).tolist()
    for place in places:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(flipped)
        corrupt = audit_of(desk).corrupt
        assert corrupt, f"byte {place} of {len(whole)}"
        assert "segment" in corrupt[0] or "session" in corrupt[0]
    path.write_bytes(whole)
    assert not audit_of(desk).corrupt
    desk.store.close()


@pytest.mark.parametrize("column", ["obs", "action", "reward", "row", "is_first", "terminated", "truncated"])
def test_damage_in_a_column_names_the_chunk_and_spares_the_others(sealed, column: str):
    desk, _ = sealed
    path = segment_file(desk)
    whole = bytearray(path.read_bytes())
    segment = Segment(path)
    layout = tensors.parse_header(bytes(whole), total_bytes=len(whole), max_header_bytes=1 << 23)
    entry = layout.entries[column]
    row_bytes = (entry.end - entry.start) // entry.shape[0]
    whole[layout.data_start + entry.start + segment.rows(4).start * row_bytes] ^= 1
    path.unlink()
    path.write_bytes(whole)
    found = audit_of(desk)
    assert "damaged chunks: [4]" in found.corrupt[0]
    assert found.chunks == 8
    desk.store.close()


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_cut_or_missing_segment_is_seen(sealed, size: int):
    desk, _ = sealed
    path = segment_file(desk)
    whole = path.read_bytes()
    path.unlink()
    assert "is not there" in audit_of(desk).corrupt[0]
    path.write_bytes(whole[:size])
    found = audit_of(desk)
    assert "not readable" in found.corrupt[0]
    assert found.chunks == 0
    desk.store.close()


def test_a_chunk_deleted_from_the_catalogue_is_seen(sealed):
    desk, chunks = sealed
    last = chunks[2].meta
    change(desk, "DELETE FROM arrivals WHERE session = ? AND chunk_no = ?", last.session.bytes, last.chunk_no)
    found = audit_of(desk)
    assert len(found.corrupt) == 2
    assert found.chunks == 8
    desk.store.close()


def test_a_row_that_stands_twice_is_a_duplicate(sealed):
    desk, chunks = sealed
    meta = chunks[4].meta
    change(
        desk,
        "INSERT INTO arrivals SELECT 99, kind, session, chunk_no, crc, length, player, received, game, first_step, "
        "n_steps, segment, chunk, fate, body FROM arrivals WHERE session = ? AND chunk_no = ?",
        meta.session.bytes, meta.chunk_no,
    )  # fmt: skip
    found = audit_of(desk)
    assert (found.duplicate_chunks, found.duplicate_steps) == (1, meta.n_steps)
    assert any("listed twice" in line for line in found.corrupt)
    desk.store.close()


def test_a_checksum_that_was_not_acknowledged_is_seen(sealed):
    desk, chunks = sealed
    change(desk, "UPDATE arrivals SET crc = crc + 1 WHERE session = ? AND chunk_no = 0", chunks[0].meta.session.bytes)
    assert any("not what the catalogue says" in line for line in audit_of(desk).corrupt)
    desk.store.close()


def test_a_changed_close_is_seen(sealed):
    desk, _ = sealed
    change(desk, "UPDATE arrivals SET body = x'7b7d' WHERE kind = 2")
    assert any("bad_body_checksum" in line for line in audit_of(desk).corrupt)
    desk.store.close()


def test_a_ruined_catalogue_is_reported_not_raised(sealed):
    desk, _ = sealed
    desk.store.close()
    path = local(desk).folder / "catalogue.sqlite"
    raw = bytearray(path.read_bytes())
    for at in range(4096, len(raw), 4096):
        raw[at : at + 64] = b"\xff" * 64
    path.write_bytes(raw)
    try:
        corrupt = audit_of(desk).corrupt
    except sqlite3.DatabaseError:
        return  # too far gone to be opened at all
    assert "catalogue" in corrupt[0]


def test_a_commit_copied_in_the_log_is_stored_once(tmp_path: Path):
    desk = local_desk(tmp_path)
    (chunks,) = sessions(1, 2)
    desk.put(*chunks)
    desk.store.close()
    _append_commit(last_log(tmp_path), number=None)
    again = local_desk(tmp_path)
    assert again.chunks() == chunks
    assert not again.store.audit().corrupt
    again.store.close()


def test_a_frame_under_two_commits_is_a_duplicate(tmp_path: Path):
    desk = local_desk(tmp_path)
    (chunks,) = sessions(1, 2)
    desk.put(*chunks)
    desk.store.close()
    _append_commit(last_log(tmp_path), number=2)
    again = local_desk(tmp_path)
    for _ in range(2):
        found = again.store.audit()
        assert (found.chunks, found.duplicate_chunks) == (2, 2)
        local(again).freeze(wait=True)
    again.store.close()


def _append_commit(path: Path, *, number: int | None) -> None:
    """Write the log's only commit a second time, under the same number or a new one, with sound checksums."""
    with LogReader(path) as reader:
        entry = reader.at(0)
        assert entry is not None
        commit = read_commit(entry)
    trailer = commit.trailer
    if number is not None:
        trailer = type(trailer)(number=number, first_arrival=1 + trailer.n_arrivals, stored=trailer.stored)
    with path.open("ab") as file:
        payload = b"".join(commit_parts(trailer, [raw for _, _, raw in commit.frames()]))
        scratch = LogFile(path.with_suffix(".tmp"), sync=no_sync)
        scratch.append([bytes(entry.end - entry.start - HEAD_BYTES)])
        scratch.append([payload])
        scratch.close()
        file.write(path.with_suffix(".tmp").read_bytes()[entry.end :])
    path.with_suffix(".tmp").unlink()


def test_an_audit_while_others_write_and_erase_is_sound(tmp_path: Path):
    desk = local_desk(tmp_path, seal_rows=64)
    many = sessions(30, 2)
    stored = 0
    for index, chunks in enumerate(many):
        stored += desk.put(*chunks, player=bytes([index % 5]) * 16).count("new")
        if index % 6 == 5:
            desk.store.forget(bytes([index % 5]) * 16)
            desk.clock.advance(0.001)
        found = audit_of(desk)
        assert (list(found.corrupt), found.duplicate_chunks) == ([], 0)
        assert found.chunks + found.forgotten_chunks == stored
    desk.store.close()


def test_an_audit_starts_over_when_a_segment_was_rewritten_under_it(tmp_path: Path, monkeypatch):
    desk = local_desk(tmp_path)
    mine, others = sessions(2, 2)
    desk.put(*mine)
    desk.put(*others, player=b"o" * 16)
    local(desk).freeze(wait=True)
    calls: list[int] = []

    def forget_first(folder: Path, number: int) -> Path:
        if not calls:
            calls.append(number)
            desk.store.forget(b"o" * 16)
        return segment_path(folder, number)

    monkeypatch.setattr("understudy.stores.catalogue._TRUNCATE_MS", 10)
    monkeypatch.setattr("understudy.stores.audit.segment_path", forget_first)
    found = audit_of(desk)
    assert calls
    assert (list(found.corrupt), found.chunks, found.forgotten_chunks) == ([], 2, 2)
    desk.store.close()


def test_positions_alone_are_no_gap(tmp_path: Path):
    desk = local_desk(tmp_path)
    desk.store.write(WriteBatch("p", desk.epoch, Position("5")))
    found = desk.store.audit()
    assert (found.chunks, found.gap_chunks, list(found.corrupt)) == (0, 0, [])
    desk.store.close()


def test_what_expired_long_ago_is_neither_a_gap_nor_damage(tmp_path: Path):
    desk = local_desk(tmp_path)
    chunks = sessions(1, 6)[0]
    desk.put(*chunks[:3])
    desk.clock.advance(REMEMBER_S + 10.0)
    desk.put(*chunks[3:])
    assert desk.store.expire(desk.clock.now() - 5.0) == 3
    for _ in range(2):
        found = audit_of(desk)
        assert (list(found.corrupt), found.chunks, found.gap_chunks, found.gap_steps) == ([], 3, 0, 0)
        assert [item.arrival_no for item in desk.everything()] == [1, 4, 5, 6]
        assert desk.chunks() == chunks[3:]
        desk.reopen()
    desk.store.close()
