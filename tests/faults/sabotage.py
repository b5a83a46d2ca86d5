"""Ways to damage a recorded data folder, with full knowledge of the formats."""

import os
import sqlite3
import struct
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from understudy.backends.data import DataFolder
from understudy.core.log import HEAD_BYTES, LogReader
from understudy.experience.frame import HEADER_BYTES, FrameKind, decode_frame
from understudy.experience.session import unpack_state, withdraw
from understudy.stores.database import FILE_NAME, check_of
from understudy.stores.view import read_head

# --- The store ------------------------------------------------------------------------------------


@contextmanager
def database(data: DataFolder) -> Iterator[sqlite3.Connection]:
    """The store's database for a moment of vandalism."""
    db = sqlite3.connect(data.store / FILE_NAME, isolation_level=None)
    db.execute("BEGIN")
    yield db
    db.execute("COMMIT")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()


def put(db: sqlite3.Connection, table: str, *values: object) -> None:
    """Write a row with the checksum it needs, in place of the one with its key."""
    marks = ", ".join("?" * (len(values) + 1))
    db.execute(f"REPLACE INTO {table} VALUES ({marks})", (*values, check_of(*values)))


def _middle(db: sqlite3.Connection) -> int:
    """A data frame in the middle of what is stored."""
    numbers = [
        row[0]
        for row in db.execute(
            "SELECT arrival FROM frames WHERE kind = 0 AND fate = 0 ORDER BY arrival"
        )
    ]
    return int(numbers[len(numbers) // 2])


def _delete(db: sqlite3.Connection, arrival: int) -> None:
    """A frame vanishes, and its session was never told of it."""
    query = "SELECT kind, session, n_steps FROM frames WHERE arrival = ?"
    kind, session, n_steps = db.execute(query, (arrival,)).fetchone()
    db.execute("DELETE FROM frames WHERE arrival = ?", (arrival,))
    db.execute("DELETE FROM bodies WHERE arrival = ?", (arrival,))
    if kind != FrameKind.DATA:
        return
    *row, state, _ = db.execute("SELECT * FROM sessions WHERE id = ?", (session,)).fetchone()
    put(db, "sessions", *row, withdraw(unpack_state(state), n_steps).pack())


def delete_a_chunk(data: DataFolder) -> None:
    with database(data) as db:
        _delete(db, _middle(db))


def delete_a_chunk_and_close_up(data: DataFolder) -> None:
    """A chunk vanishes, and the arrival numbers behind it close up."""
    with database(data) as db:
        gone = _middle(db)
        _delete(db, gone)
        rows = db.execute(
            "SELECT * FROM frames WHERE arrival > ? ORDER BY arrival", (gone,)
        ).fetchall()
        for number, *row, _ in rows:
            db.execute("DELETE FROM frames WHERE arrival = ?", (number,))
            put(db, "frames", number - 1, *row)
            db.execute("UPDATE bodies SET arrival = ? WHERE arrival = ?", (number - 1, number))
        head = read_head(db)
        put(db, "head", 1, *head._replace(next_arrival=head.next_arrival - 1))


def delete_the_end(data: DataFolder) -> None:
    """The newest frames vanish with the numbers they had, and the stream no longer has them."""
    with database(data) as db:
        head = read_head(db)
        half = head.next_arrival // 2
        for (arrival,) in db.execute(
            "SELECT arrival FROM frames WHERE arrival >= ?", (half,)
        ).fetchall():
            _delete(db, arrival)
        put(db, "head", 1, *head._replace(next_arrival=half))
    for path in data.stream.glob("*/*.log"):
        path.unlink()


def store_a_chunk_twice(data: DataFolder) -> None:
    """A chunk is stored again under another arrival number."""
    with database(data) as db:
        db.execute("DROP INDEX frames_by_key")
        arrival = _middle(db)
        head = read_head(db)
        _, *row, _ = db.execute("SELECT * FROM frames WHERE arrival = ?", (arrival,)).fetchone()
        put(db, "frames", head.next_arrival, *row)
        db.execute(
            "INSERT INTO bodies SELECT ?, raw FROM bodies WHERE arrival = ?",
            (head.next_arrival, arrival),
        )
        put(db, "head", 1, *head._replace(next_arrival=head.next_arrival + 1))


def take_a_chunk_for_another(data: DataFolder) -> None:
    """Two frames of equal length change places."""
    with database(data) as db:
        arrival = _middle(db)
        other = db.execute(
            "SELECT max(arrival) FROM frames WHERE kind = 0 AND arrival < ?", (arrival,)
        ).fetchone()[0]
        (raw,) = db.execute("SELECT raw FROM bodies WHERE arrival = ?", (other,)).fetchone()
        db.execute("UPDATE bodies SET raw = ? WHERE arrival = ?", (raw, arrival))


def drop_the_bytes_of_a_chunk(data: DataFolder) -> None:
    with database(data) as db:
        db.execute("DELETE FROM bodies WHERE arrival = ?", (_middle(db),))


def change_a_session(data: DataFolder) -> None:
    with database(data) as db:
        db.execute("UPDATE sessions SET player = x'00112233445566778899aabbccddeeff' WHERE id = 1")


def change_a_position(data: DataFolder) -> None:
    with database(data) as db:
        db.execute("UPDATE positions SET position = position || '0'")


def remove_the_database(data: DataFolder) -> None:
    (data.store / FILE_NAME).unlink()


def empty_the_database(data: DataFolder) -> None:
    os.truncate(data.store / FILE_NAME, 0)


def cut_the_database(data: DataFolder) -> None:
    os.truncate(
        data.store / FILE_NAME, (data.store / FILE_NAME).stat().st_size // 2 // 16384 * 16384
    )


def flip_in_a_body(data: DataFolder) -> None:
    with database(data) as db:
        (raw,) = db.execute("SELECT raw FROM bodies WHERE arrival = ?", (_middle(db),)).fetchone()
    flip_bytes(data.store / FILE_NAME, raw[HEADER_BYTES + 80 : HEADER_BYTES + 120])


def flip_in_a_session_id(data: DataFolder) -> None:
    with database(data) as db:
        (session,) = db.execute("SELECT session FROM sessions WHERE id = 1").fetchone()
    flip_bytes(data.store / FILE_NAME, session)


def flip_in_the_header(data: DataFolder) -> None:
    """SQLite no longer takes the file for a database."""
    flip(data.store / FILE_NAME, 2)


def flip_in_store_json(data: DataFolder) -> None:
    flip(data.store / "store.json", 35)


def flip_bytes(path: Path, needle: bytes) -> None:
    """Flip a bit in the first place of a file that holds these bytes."""
    at = path.read_bytes().find(needle)
    assert at >= 0
    flip(path, at + len(needle) // 2)


# --- Stream and ledger ----------------------------------------------------------------------------


def promise_what_was_never_stored(data: DataFolder) -> None:
    path = next(data.ledger.glob("*.jsonl"))
    line = path.read_text().splitlines()[0]
    session = line.split('"session": "')[1][:32]
    with path.open("a") as file:
        file.write(line.replace(session, uuid.uuid4().hex) + "\n")


def promise_other_bytes(data: DataFolder) -> None:
    path = next(data.ledger.glob("*.jsonl"))
    lines = path.read_text().splitlines()
    crc = lines[0].split('"crc": ')[1].rstrip("}")
    path.write_text("\n".join([lines[0].replace(crc, str(int(crc) ^ 1)), *lines[1:]]) + "\n")


def remove_store_and_stream(data: DataFolder) -> None:
    for folder in (data.store, data.stream):
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()


def cut_stream_before_it_is_stored(data: DataFolder) -> None:
    """Frames that were acknowledged and not stored yet are cut off the stream's end."""
    path = max(data.stream.glob("*/*.log"))
    with LogReader(path) as reader:
        entries = list(reader.entries())
    with path.open("r+b") as file:
        file.truncate(entries[len(entries) // 2].start)


def flip_in_stream_before_it_is_stored(data: DataFolder) -> None:
    """A bit flips in the stream while ingest was away."""
    path = max(data.stream.glob("*/*.log"))
    with LogReader(path) as reader:
        entries = list(reader.entries())
    middle = entries[len(entries) // 2]
    flip(path, (middle.start + HEAD_BYTES + middle.end) // 2)


def flip_in_the_streams_last_entry(data: DataFolder) -> None:
    """A bit flips in the entry that was acknowledged last and is not stored yet."""
    path = max(data.stream.glob("*/*.log"))
    with LogReader(path) as reader:
        last = list(reader.entries())[-1]
    flip(path, (last.start + HEAD_BYTES + last.end) // 2)


def flip(path: Path, at: int) -> None:
    """Flip one bit of the byte at an offset (from the end when negative)."""
    with path.open("r+b") as file:
        file.seek(at, 2 if at < 0 else 0)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(struct.pack("B", byte[0] ^ 4))


def frames_in(path: Path) -> list[bytes]:
    """Raw frames of a stream's log file."""
    found = []
    with LogReader(path) as reader:
        for entry in reader.entries():
            at = 8
            while at < len(entry.payload):
                size = 64 + int.from_bytes(entry.payload[at + 8 : at + 12], "little")
                decode_frame(entry.payload[at : at + size])
                found.append(entry.payload[at : at + size])
                at += size
    return found
