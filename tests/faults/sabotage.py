"""Ways to damage a recorded data folder, as thoroughly as somebody who knows the formats could."""

import sqlite3
import struct
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from understudy.app.data import DataFolder
from understudy.app.roles.ingest import IngestRole
from understudy.core.frame import FrameKind, decode_frame
from understudy.core.log import HEAD_BYTES, LogFile, LogReader
from understudy.stores.commits import (
    Commit,
    Trailer,
    Watermark,
    WatermarkFile,
    commit_parts,
    log_numbers,
    log_path,
    read_commit,
)
from understudy.stores.sealing import segment_path
from understudy.stores.segments import Sealable, Segment, write_segment


def seal(data: DataFolder) -> None:
    """Move everything that is in the store's log into segments."""
    with IngestRole(data) as role:
        role.store.freeze(wait=True)


# --- Segments and catalogue -----------------------------------------------------------------------------------------


def delete_sealed_chunk(data: DataFolder) -> None:
    """A chunk in the middle of a session vanishes from segment and catalogue, which agree with each other."""
    number, segment = _first_segment(data)
    _rewrite(data, number, _without(segment, segment.n_chunks // 2))


def delete_last_sealed_chunk(data: DataFolder) -> None:
    """The last chunk of a session vanishes with its close, so that nothing looks amiss without a ledger."""
    number, segment = _first_segment(data)
    one = segment.sealable(segment.n_chunks - 1)
    session, last = one.order
    with _catalogue(data) as db:
        db.execute("DELETE FROM arrivals WHERE session = ? AND chunk_no > ?", (session, last))
    _rewrite(data, number, _without(segment, segment.n_chunks - 1))


def store_sealed_chunk_twice(data: DataFolder) -> None:
    """A second segment holds a chunk again, under an arrival number of its own."""
    _, segment = _first_segment(data)
    with _catalogue(data) as db:
        (new,) = db.execute("SELECT value FROM facts WHERE name = 'next_segment'").fetchone()
        (schema,) = db.execute("SELECT schema FROM segments LIMIT 1").fetchone()
        one = segment.sealable(0)
        (old_no,) = db.execute("SELECT no FROM arrivals WHERE session = ? AND chunk_no = ?", one.order).fetchone()
        (free_no,) = db.execute("SELECT max(no) FROM arrivals WHERE kind = 2").fetchone()
        db.execute("DELETE FROM arrivals WHERE no = ?", (free_no,))
        written = write_segment(segment_path(data.store, new), [replace(one, arrival_no=free_no)])
        db.execute("DROP INDEX arrivals_by_key")
        db.execute("CREATE INDEX arrivals_by_key ON arrivals (session, chunk_no)")
        db.execute(
            "INSERT INTO arrivals SELECT ?, kind, session, chunk_no, crc, length, player, received, game, first_step, "
            "n_steps, ?, 0, fate, body FROM arrivals WHERE no = ?", (free_no, new, old_no),
        )  # fmt: skip
        db.execute(
            "INSERT INTO segments VALUES (?, ?, ?, ?, ?, 0, 0)",
            (new, schema, written.n_rows, written.size_bytes, written.crc),
        )


def remove_segment_file(data: DataFolder) -> None:
    number, _ = _first_segment(data)
    segment_path(data.store, number).unlink()


def flip_in_segment_column(data: DataFolder) -> None:
    _flip_in_segment(data, lambda segment: segment.columns["obs"].tobytes()[40:72])


def flip_in_segment_table(data: DataFolder) -> None:
    _flip_in_segment(data, lambda segment: segment.table["metadata"].tobytes()[60:92])


def flip_in_segment_header(data: DataFolder) -> None:
    number, _ = _first_segment(data)
    flip(segment_path(data.store, number), 20)


def flip_in_catalogue(data: DataFolder) -> None:
    """One bit of a checksum that the catalogue keeps."""
    _, segment = _first_segment(data)
    needle = segment.table["session"][0].tobytes()
    path = data.store / "catalogue.sqlite"
    with _catalogue(data) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    raw = path.read_bytes()
    at = raw.find(needle)
    assert at >= 0
    flip(path, at + 9)


def flip_in_catalogue_header(data: DataFolder) -> None:
    """SQLite no longer takes the file for a database."""
    flip(data.store / "catalogue.sqlite", 2)


def _first_segment(data: DataFolder) -> tuple[int, Segment]:
    with _catalogue(data) as db:
        (number,) = db.execute("SELECT min(id) FROM segments").fetchone()
    return number, Segment(segment_path(data.store, number))


def _without(segment: Segment, gone: int) -> list[Sealable]:
    return [segment.sealable(index) for index in range(segment.n_chunks) if index != gone]


def _rewrite(data: DataFolder, number: int, kept: list[Sealable]) -> None:
    """Replace a segment by these chunks and let the catalogue agree with it in every respect."""
    path = segment_path(data.store, number)
    copies = [replace(one, chunk=replace(one.chunk, columns=dict(one.chunk.columns))) for one in kept]
    written = write_segment(path, copies)
    with _catalogue(data) as db:
        numbers = [one.arrival_no for one in kept]
        marks = ", ".join("?" * len(numbers))
        db.execute(f"DELETE FROM arrivals WHERE segment = ? AND no NOT IN ({marks})", (number, *numbers))
        for index, no in enumerate(numbers):
            db.execute("UPDATE arrivals SET chunk = ? WHERE no = ?", (index, no))
        db.execute(
            "UPDATE segments SET n_rows = ?, size_bytes = ?, crc = ? WHERE id = ?",
            (written.n_rows, written.size_bytes, written.crc, number),
        )


def _flip_in_segment(data: DataFolder, part: Callable[[Segment], bytes]) -> None:
    number, segment = _first_segment(data)
    path = segment_path(data.store, number)
    at = path.read_bytes().find(part(segment))
    assert at > 0
    flip(path, at + 5)


@contextmanager
def _catalogue(data: DataFolder) -> Iterator[sqlite3.Connection]:
    """The store's database for a moment of vandalism."""
    db = sqlite3.connect(data.store / "catalogue.sqlite")
    yield db
    db.commit()
    db.close()


# --- The log --------------------------------------------------------------------------------------------------------


def delete_logged_chunk(data: DataFolder) -> None:
    """A frame vanishes from the log; arrival numbers close up behind it, checksums and watermark agree."""
    commits, raws = _read_log(data)
    victim = next(at for at in range(len(commits) // 3, len(commits)) if _data_frames(commits[at]))
    rewritten: list[tuple[Trailer, list[bytes]]] = []
    moved = 0
    for at, commit in enumerate(commits):
        stored, parts = list(commit.trailer.stored), list(raws[at])
        trailer = msgspec.structs.replace(commit.trailer, first_arrival=commit.trailer.first_arrival - moved)
        if at == victim:
            gone = _data_frames(commit)[0]
            del stored[gone], parts[gone]
            moved = 1
            trailer = msgspec.structs.replace(trailer, stored=stored)
        rewritten.append((trailer, parts))
    _write_log(data, rewritten)


def delete_logged_commit(data: DataFolder) -> None:
    """A whole commit is cut out of the log; the numbers show the gap."""
    commits, raws = _read_log(data)
    kept = [(commit.trailer, raws[at]) for at, commit in enumerate(commits) if at != len(commits) // 2]
    _write_log(data, kept)


def delete_last_logged_commit(data: DataFolder) -> None:
    """The newest commits are cut off the log, and the stream no longer has them."""
    commits, raws = _read_log(data)
    half = len(commits) // 2
    _write_log(data, [(commit.trailer, raws[at]) for at, commit in enumerate(commits[:half])])
    for path in data.stream.glob("*/*.log"):
        path.unlink()


def store_logged_chunk_twice(data: DataFolder) -> None:
    """The last commit with data is repeated under the next numbers."""
    commits, raws = _read_log(data)
    at = max(at for at, commit in enumerate(commits) if _data_frames(commit))
    last = commits[-1].trailer
    copy = msgspec.structs.replace(
        commits[at].trailer, number=last.number + 1, first_arrival=last.first_arrival + last.n_arrivals
    )
    _write_log(data, [*((commit.trailer, raws[at]) for at, commit in enumerate(commits)), (copy, raws[at])])


def flip_in_log(data: DataFolder) -> None:
    commits, _ = _read_log(data)
    commit = commits[len(commits) // 2]
    flip(_log_file(data), commit.entry.end - 20)


def flip_at_end_of_log(data: DataFolder) -> None:
    flip(_log_file(data), -20)


def flip_in_log_with_matching_checksum(data: DataFolder) -> None:
    """A bit of an observation flips, and the log's own checksum is made to match: only the body's CRC can tell."""
    commits, raws = _read_log(data)
    victim = next(at for at in range(len(commits) // 2, len(commits)) if _data_frames(commits[at]))
    which = _data_frames(commits[victim])[0]
    raw = bytearray(raws[victim][which])
    raw[-70] ^= 1
    raws[victim][which] = bytes(raw)
    _write_log(data, [(commit.trailer, raws[at]) for at, commit in enumerate(commits)])


def _log_file(data: DataFolder) -> Path:
    return log_path(data.store, log_numbers(data.store)[-1])


def _read_log(data: DataFolder) -> tuple[list[Commit], list[list[bytes]]]:
    with LogReader(_log_file(data)) as reader:
        commits = [read_commit(entry) for entry in reader.entries()]
    assert len(commits) >= 4, "record some more before damaging it"
    raws = [[raw for *_, raw in (*commit.frames(), *commit.quarantined())] for commit in commits]
    return commits, raws


def _data_frames(commit: Commit) -> list[int]:
    return [at for at, (*_, raw) in enumerate(commit.frames()) if raw[5] == FrameKind.DATA]


def _write_log(data: DataFolder, commits: list[tuple[Trailer, list[bytes]]]) -> None:
    path = _log_file(data)
    path.unlink()
    log = LogFile(path)
    for trailer, raws in commits:
        log.append(commit_parts(trailer, raws))
    log.close()
    last = commits[-1][0]
    mark_file = WatermarkFile(data.store / "watermark", create=True)
    mark = mark_file.read()
    assert mark is not None
    mark_file.write(Watermark(mark.sealed_below, last.first_arrival + last.n_arrivals, mark.file, log.size_bytes))
    mark_file.close()


# --- Stream and ledger ----------------------------------------------------------------------------------------------


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
