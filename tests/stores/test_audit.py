"""An audit detects and reports any change to the bytes of a store."""

import contextlib
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from tests.faults.profiles import sizes
from tests.stores.local_stores import local, local_harness, sessions
from understudy.core.errors import Corrupt
from understudy.experience.chunk import Chunk
from understudy.experience.session import REMEMBER_S
from understudy.ports import Audit, Forgotten, Position, Stored, WriteBatch
from understudy.stores.audit import audit, summary
from understudy.stores.database import FILE_NAME, check_of
from understudy.stores.view import StoreView
from understudy.testing.samples import OTHER_PLAYER


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Path, list[Chunk]]:
    """A closed store of three sessions, a close, a quarantined frame, a forgotten player and a
    claim."""
    harness = local_harness(tmp_path)
    chunks = [chunk for session in sessions(3, 3) for chunk in session]
    harness.put(*chunks)
    harness.write([harness.close_frame(chunks[0].meta.session, 3)])
    harness.write(refused=[harness.refusal(sessions(1, 1, seed=8)[0][0])])
    harness.put(*sessions(1, 2, seed=9)[0], player=OTHER_PLAYER)
    harness.store.forget(OTHER_PLAYER)
    harness.store.close()
    found = audit_of(tmp_path)
    assert (list(found.corrupt), found.chunks, found.quarantined) == ([], 9, 1)
    return tmp_path, chunks


def audit_of(folder: Path) -> Audit:
    """An audit of a store without a writer."""
    with StoreView(folder) as view:
        return summary(audit(view, is_alone=True))


def change(folder: Path, statement: str, *values: object) -> None:
    """Edit the database without the store."""
    with sqlite3.connect(folder / FILE_NAME) as db:
        assert db.execute(statement, values).rowcount > 0
    db.close()


@sizes("n_places", short=48, full=192)
def test_a_flipped_byte_anywhere_is_detected_or_has_no_effect(
    recorded, tmp_path: Path, n_places: int
):
    folder, chunks = recorded
    path = folder / FILE_NAME
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    used = np.flatnonzero(np.frombuffer(whole, np.uint8))
    places = [
        *rng.choice(used, n_places * 3 // 4).tolist(),
        *rng.integers(0, len(whole), n_places // 6).tolist(),
        *range(16, 100, 1344 // n_places),
    ]
    seen = 0
    for place in places:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(flipped)
        try:
            found = audit_of(folder)
        except Corrupt:
            seen += 1
            continue
        if found.corrupt:
            seen += 1
            continue
        assert (found.chunks, found.quarantined, found.duplicate_chunks) == (9, 1, 0), (
            f"byte {place}"
        )
        with StoreView(folder) as view:
            items = view.tail(None, max_items=100, wait_s=0.0).items
        assert [
            item.chunk for item in items if isinstance(item, Stored) and item.chunk
        ] == chunks, f"byte {place}"
    path.write_bytes(whole)
    assert not audit_of(folder).corrupt
    assert seen > n_places // 2


def test_a_damaged_schema_is_corruption_and_not_a_disk_failure(recorded):
    folder, _ = recorded
    path = folder / FILE_NAME
    whole = path.read_bytes()
    assert b"partition" in whole
    path.write_bytes(whole.replace(b"partition", b"partitioo", 1))
    try:
        corrupt = audit_of(folder).corrupt
    except Corrupt as error:
        corrupt = [str(error)]
    path.write_bytes(whole)
    assert "no such column" in corrupt[0]


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE frames SET n_steps = n_steps + 1 WHERE arrival = 2",
        "UPDATE frames SET received = received - 7 WHERE arrival = 2",
        "UPDATE frames SET fate = 2 WHERE arrival = 2",
        "UPDATE bodies SET raw = substr(raw, 1, length(raw) - 1) WHERE arrival = 2",
        "UPDATE bodies SET raw = (SELECT raw FROM bodies WHERE arrival = 1) WHERE arrival = 2",
        "DELETE FROM bodies WHERE arrival = 2",
        "DELETE FROM frames WHERE arrival = 2",
        "DELETE FROM frames WHERE arrival = (SELECT max(arrival) FROM frames)",
        "DELETE FROM sessions WHERE id = 2",
        "DELETE FROM events",
        "UPDATE sessions SET game = 'other' WHERE id = 2",
        "UPDATE positions SET position = '0'",
        "UPDATE claims SET epoch = epoch - 1",
        "UPDATE events SET at = at + 1",
        "UPDATE quarantine SET reason = 'other'",
        "UPDATE quarantine SET raw = x'00'",
        "UPDATE forgotten_sessions SET digest = x'00'",
        "UPDATE schemas SET game = 'other'",
        "UPDATE head SET next_arrival = next_arrival + 1",
    ],
)
def test_a_changed_value_is_detected(recorded, statement: str):
    folder, _ = recorded
    change(folder, statement)
    with contextlib.suppress(Corrupt):  # where it cannot be read at all
        assert audit_of(folder).corrupt


def test_damage_is_reported_by_chunk_and_does_not_affect_others(recorded):
    folder, chunks = recorded
    change(
        folder,
        "UPDATE bodies SET raw = CAST(substr(raw, 1, 90) || x'ff' || substr(raw, 92) AS BLOB) "
        "WHERE arrival = 5",
    )
    found = audit_of(folder)
    meta = chunks[4].meta
    assert f"chunk {meta.chunk_no} of session {meta.session}" in found.corrupt[0]
    assert found.chunks == 8
    with StoreView(folder) as view:
        items = view.tail(None, max_items=100, wait_s=0.0).items
    gone = [item for item in items if isinstance(item, Forgotten) and item.reason == "damaged"]
    assert [item.arrival_no for item in gone] == [5]
    harness = local_harness(folder)
    assert [item.arrival_no for item in harness.tail()] == list(range(1, 14)), (
        "the store is opened all the same"
    )
    assert len(harness.chunks()) == 8
    harness.store.close()


@pytest.mark.parametrize(
    "damage",
    [
        (
            "UPDATE bodies SET raw = CAST(substr(raw, 1, 90) || x'ff' || substr(raw, 92) AS BLOB) "
            "WHERE arrival = 5"
        ),
        "DELETE FROM bodies WHERE arrival = 5",
    ],
)
def test_quarantining_a_damaged_chunk_is_an_error(recorded, damage: str):
    folder, chunks = recorded
    change(folder, damage)
    harness = local_harness(folder)
    try:
        with pytest.raises(Corrupt, match="arrival number 5 of the store is damaged"):
            harness.store.quarantine(
                [(chunk.meta.session, chunk.meta.chunk_no) for chunk in chunks[3:6]], reason="test"
            )
        assert len(harness.chunks()) == 8, "the sound chunks beside it stay"
    finally:
        harness.store.close()


def test_a_frame_stored_twice_is_a_duplicate(recorded):
    folder, chunks = recorded
    with sqlite3.connect(folder / FILE_NAME) as db:
        db.execute("DROP INDEX frames_by_key")
        (number,) = db.execute("SELECT arrival FROM frames WHERE kind = 2").fetchone()
        db.execute("DELETE FROM frames WHERE arrival = ?", (number,))
        db.execute("DELETE FROM bodies WHERE arrival = ?", (number,))
        row = list(db.execute("SELECT * FROM frames WHERE arrival = 5").fetchone())
        row[0] = number
        row[-1] = check_of(*row[:-1])
        db.execute(f"INSERT INTO frames VALUES ({', '.join('?' * len(row))})", row)
        db.execute("INSERT INTO bodies SELECT ?, raw FROM bodies WHERE arrival = 5", (number,))
    db.close()
    found = audit_of(folder)
    assert (found.duplicate_chunks, found.duplicate_steps) == (1, chunks[4].meta.n_steps)


def test_an_audit_during_writes_and_erasures_finds_no_damage(tmp_path: Path):
    harness = local_harness(tmp_path)
    many = sessions(30, 2)
    stored = 0
    for index, chunks in enumerate(many):
        stored += harness.put(*chunks, player=bytes([index % 5]) * 16).count("new")
        if index % 6 == 5:
            harness.store.forget(bytes([index % 5]) * 16)
            harness.clock.advance(0.001)
        found = harness.store.audit()
        assert (list(found.corrupt), found.duplicate_chunks) == ([], 0)
        assert found.chunks + found.forgotten_chunks == stored
    harness.store.close()


def test_positions_alone_are_not_a_gap(tmp_path: Path):
    harness = local_harness(tmp_path)
    harness.store.write(WriteBatch("p", harness.epoch, Position("5")))
    found = harness.store.audit()
    assert (found.chunks, found.gap_chunks, list(found.corrupt)) == (0, 0, [])
    harness.store.close()


def test_long_expired_chunks_are_neither_a_gap_nor_damage(tmp_path: Path):
    harness = local_harness(tmp_path)
    chunks = sessions(1, 6)[0]
    harness.put(*chunks[:3])
    harness.clock.advance(REMEMBER_S + 10.0)
    harness.put(*chunks[3:])
    assert harness.store.expire(harness.clock.now() - 5.0) == 3
    for _ in range(2):
        found = harness.store.audit()
        assert (list(found.corrupt), found.chunks, found.gap_chunks, found.gap_steps) == (
            [],
            3,
            0,
            0,
        )
        assert [item.arrival_no for item in harness.everything()] == [1, 4, 5, 6]
        assert harness.chunks() == chunks[3:]
        harness.reopen()
    assert not local(harness).is_erasing
    harness.store.close()


def test_trimmed_chunks_are_neither_a_gap_nor_damage_and_their_space_is_used_again(tmp_path: Path):
    harness = local_harness(tmp_path)
    store = local(harness)
    one, other = sessions(2, 8, max_steps=400)
    for pair in zip(one, other, strict=True):
        harness.put(*pair)
    store.quarantine([one[1].meta.id, one[5].meta.id], reason="by hand")
    assert store.trim([(one[0].meta.session, 99)]) == 0, "a chunk that is not stored"
    # The ninth arrival number is one[4], the eleventh one[5], which is in quarantine.
    assert store.trim([other[6].meta.id, one[5].meta.id]) == 10
    assert store.trim([other[6].meta.id, one[5].meta.id]) == 0
    kept = [other[5], one[6], other[6], one[7], other[7]]
    for _ in range(2):
        found = harness.store.audit()
        assert (list(found.corrupt), found.chunks, found.quarantined) == ([], 5, 2)
        assert (found.gap_chunks, found.gap_steps, found.duplicate_chunks) == (0, 0, 0)
        assert harness.chunks() == kept
        first = harness.everything()[0]
        assert isinstance(first, Forgotten)
        assert (first.arrival_no, first.last_no, first.reason) == (1, 10, "expired")
        assert [frame.chunk_no for frame in harness.store.quarantined()] == [1, 5]
        harness.reopen()
        store = local(harness)
    free_pages = store._database.pragma("freelist_count")
    pages = store._database.pragma("page_count")
    harness.put(*sessions(1, 4, seed=7, max_steps=400)[0])
    assert store._database.pragma("freelist_count") < free_pages
    assert store._database.pragma("page_count") == pages
    harness.store.close()
