"""The local store's manifest in SQLite: which arrivals are sealed where, and what is known of sessions.

It learns of data only at sealing, in the one transaction that registers segments and retires log files.
"""

import os
import sqlite3
import sys
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.core.errors import StorageFailed
from understudy.core.frame import Frame, FrameKind
from understudy.core.ports import Quarantined
from understudy.stores.disk import disk

_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS schemas (id INTEGER PRIMARY KEY, game TEXT NOT NULL, schema TEXT UNIQUE NOT NULL, spec BLOB);
CREATE TABLE IF NOT EXISTS segments (
  id INTEGER PRIMARY KEY, schema TEXT NOT NULL, n_rows INTEGER NOT NULL, size_bytes INTEGER NOT NULL,
  crc INTEGER NOT NULL, first_received INTEGER NOT NULL, last_received INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS arrivals (
  no INTEGER PRIMARY KEY, kind INTEGER NOT NULL, session BLOB, chunk_no INTEGER, crc INTEGER, length INTEGER,
  player BLOB, received INTEGER, game TEXT, first_step INTEGER, n_steps INTEGER, segment INTEGER, chunk INTEGER,
  fate INTEGER NOT NULL DEFAULT 0, body BLOB);
CREATE INDEX IF NOT EXISTS arrivals_by_key ON arrivals (session, chunk_no) WHERE kind < 9;
CREATE INDEX IF NOT EXISTS arrivals_by_player ON arrivals (player);
CREATE INDEX IF NOT EXISTS arrivals_by_segment ON arrivals (segment);
CREATE TABLE IF NOT EXISTS sessions (
  session BLOB PRIMARY KEY, game TEXT NOT NULL, player BLOB NOT NULL, last_received INTEGER NOT NULL,
  state BLOB NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS sessions_by_player ON sessions (player);
CREATE TABLE IF NOT EXISTS positions (partition TEXT PRIMARY KEY, position TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS claims (partition TEXT PRIMARY KEY, epoch INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS quarantine (
  id INTEGER PRIMARY KEY, reason TEXT NOT NULL, detail TEXT NOT NULL, parked INTEGER NOT NULL, received REAL NOT NULL,
  game TEXT NOT NULL, session BLOB NOT NULL, chunk_no INTEGER NOT NULL, crc INTEGER NOT NULL, player BLOB NOT NULL,
  replayed INTEGER NOT NULL DEFAULT 0, raw BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS quarantine_by_key ON quarantine (session, chunk_no);
CREATE TABLE IF NOT EXISTS tombstones (player BLOB NOT NULL, at REAL NOT NULL, arrival INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS erasures (
  arrival INTEGER PRIMARY KEY, kind TEXT NOT NULL, player BLOB NOT NULL, chunks BLOB NOT NULL, reason TEXT NOT NULL);
"""

_BUSY_MS = 30_000
_TRUNCATE_MS = 2_000
"""How long an erasure waits for readers before it leaves the last step to the next one."""

EVENT_KIND = 9
"""`kind` of arrivals that are no frames."""

STORED, FORGOTTEN, EXPIRED, QUARANTINED, DAMAGED = range(5)
"""An arrival's fate; damaged ones were acknowledged and can no longer be read."""


@dataclass(frozen=True, slots=True)
class ArrivalRow:
    """One arrival number as the catalogue keeps it."""

    no: int
    kind: int
    session: bytes
    chunk_no: int
    crc: int
    length: int
    player: bytes
    received: int
    game: str
    first_step: int
    n_steps: int
    segment: int | None
    chunk: int | None
    fate: int
    body: bytes | None

    def frame(self) -> Frame:
        """The frame of a drop report or a close, whose body the catalogue keeps."""
        return Frame(
            kind=FrameKind(self.kind), session=uuid.UUID(bytes=self.session), chunk_no=self.chunk_no,
            body=self.body or b"", body_crc=self.crc, player=self.player, received_s=self.received,
        )  # fmt: skip


_COLUMNS = (
    "no, kind, session, chunk_no, crc, length, player, received, game, first_step, n_steps, segment, chunk, fate, body"
)


class Catalogue:
    """One connection; the writer's may change things, readers' may not."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._lock = threading.RLock()
        self._db = _looked_at(path) if read_only else _connected(path, "")
        if not read_only:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("PRAGMA secure_delete=ON")
            self._db.execute("PRAGMA wal_autocheckpoint=4000")
            self._db.executescript(_SCHEMA)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """One durable transaction, all or nothing."""
        with self._lock, disk("the catalogue"):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                # SQLite has rolled back on its own where the disk was full.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def looking(self) -> Iterator[None]:
        """One consistent view over several queries."""
        with self._lock:
            self._db.execute("BEGIN")
            try:
                self._db.execute("SELECT 1 FROM facts LIMIT 1").fetchone()
                yield
            finally:
                self._db.execute("COMMIT")

    def rows(self, query: str, *values: Any) -> list[Any]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    def one(self, query: str, *values: Any) -> Any:
        with self._lock:
            return self._db.execute(query, values).fetchone()

    def run(self, query: str, *values: Any) -> int:
        with self._lock:
            return self._db.execute(query, values).rowcount

    def many(self, query: str, values: Iterable[Sequence[Any]]) -> None:
        with self._lock:
            self._db.executemany(query, values)

    def fact(self, name: str, default: int = 0) -> int:
        row = self.one("SELECT value FROM facts WHERE name = ?", name)
        return default if row is None else int(row[0])

    def set_fact(self, name: str, value: int) -> None:
        self.run("INSERT INTO facts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value", name, value)

    def arrivals(self, query: str, *values: Any) -> list[ArrivalRow]:
        """Arrivals that match a WHERE clause (and what may follow it)."""
        return [ArrivalRow(*row) for row in self.rows(f"SELECT {_COLUMNS} FROM arrivals WHERE {query}", *values)]

    def add_arrivals(self, rows: Iterable[ArrivalRow]) -> None:
        marks = ", ".join("?" * 15)
        self.many(
            f"INSERT INTO arrivals ({_COLUMNS}) VALUES ({marks})",
            ((row.no, row.kind, row.session, row.chunk_no, row.crc, row.length, row.player, row.received, row.game,
              row.first_step, row.n_steps, row.segment, row.chunk, row.fate, row.body) for row in rows),
        )  # fmt: skip

    def key_of(self, session: uuid.UUID, chunk_no: int) -> tuple[int, int] | None:
        """(crc, length) of the frame stored or recorded under this number."""
        query = "SELECT crc, length FROM arrivals WHERE session = ? AND chunk_no = ? AND kind < 9 ORDER BY fate LIMIT 1"
        row = self.one(query, session.bytes, chunk_no)
        return None if row is None else (row[0], row[1])

    def is_stored(self, session: uuid.UUID, chunk_no: int) -> bool:
        """Whether a frame is there under this number, not only a record of one."""
        query = f"SELECT 1 FROM arrivals WHERE session = ? AND chunk_no = ? AND kind < 9 AND fate = {STORED}"
        return self.one(query, session.bytes, chunk_no) is not None

    def quarantined_key(self, session: uuid.UUID, chunk_no: int) -> list[int]:
        """Checksums of quarantined frames under this number."""
        rows = self.rows("SELECT crc FROM quarantine WHERE session = ? AND chunk_no = ?", session.bytes, chunk_no)
        return [row[0] for row in rows]

    def waiting(self, quarantine_id: int) -> tuple[str, bytes] | None:
        """Reason and bytes of a frame in quarantine that has not been stored since."""
        row = self.one("SELECT reason, raw FROM quarantine WHERE id = ? AND replayed = 0", quarantine_id)
        return None if row is None else (row[0], row[1])

    def truncate_wal(self) -> bool:
        """Leave no erased byte in the write-ahead log; False when a reader was in the way for too long."""
        with self._lock, disk("the catalogue"):
            self._db.execute(f"PRAGMA busy_timeout = {_TRUNCATE_MS}")
            try:
                busy, *_ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            finally:
                self._db.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
            return not busy

    def is_sound(self) -> str:
        """Empty text, or what SQLite's own check found."""
        with self._lock:
            try:
                found = self._db.execute("PRAGMA quick_check(3)").fetchall()
            except sqlite3.DatabaseError as error:
                return str(error)
        return "" if found == [("ok",)] else "; ".join(str(row[0]) for row in found)

    def close(self) -> None:
        with self._lock:
            self._db.close()


def _connected(path: Path, how: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}{how}"
    return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=_BUSY_MS / 1000)


def _looked_at(path: Path) -> sqlite3.Connection:
    """A reader's connection. SQLite writes beside what it reads, unless it is told that nobody can change it."""
    db = _connected(path, "?mode=ro")
    try:
        db.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone()
        return db
    except sqlite3.DatabaseError as error:
        if not isinstance(error, sqlite3.OperationalError) or os.access(path.parent, os.W_OK):
            return db  # whoever asks next is told the same
        db.close()
        needs = f"{path.parent} cannot be written to, and SQLite writes beside what it reads"
        if not _is_on_read_only_disk(path):
            raise StorageFailed(f"{needs}; run this as the user whose folder it is, or allow writing there") from error
        if any(path.with_name(f"{path.name}-{end}").exists() for end in ("wal", "shm")):
            raise StorageFailed(
                f"{needs} where the last writer did not close it; the disk is read-only: copy the data folder to "
                "another one, or mount it so that it can be written to"
            ) from error
        # Nobody has it open for writing, or there would be a log beside it, and nobody can write to this disk.
        return _connected(path, "?mode=ro&immutable=1")


def _is_on_read_only_disk(path: Path) -> bool:
    return sys.platform != "win32" and bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def quarantined(catalogue: Catalogue, *, after_id: int, limit: int) -> list[Quarantined]:
    """Frames in quarantine, oldest first, without those that were stored by replay or expired."""
    rows = catalogue.rows(
        "SELECT id, reason, detail, parked, received, game, session, chunk_no, crc, raw FROM quarantine "
        "WHERE id > ? AND replayed = 0 AND raw <> x'' ORDER BY id LIMIT ?", after_id, limit,
    )  # fmt: skip
    return [
        Quarantined(
            id=number, reason=reason, detail=detail, parked=bool(parked), received_s=received, game=game,
            session=uuid.UUID(bytes=session) if any(session) else None, chunk_no=chunk_no if any(session) else None,
            crc=crc, raw=raw,
        )
        for number, reason, detail, parked, received, game, session, chunk_no, crc, raw in rows
    ]  # fmt: skip
