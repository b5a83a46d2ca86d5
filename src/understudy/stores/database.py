"""The database of the embedded store: one SQLite file, its tables, and how it is opened.

    STORE/.lock               held by the one process that writes
    STORE/store.json          the store's id and format, and the mark: an arrival number that the
                              database has reached
    STORE/experience.sqlite   everything else, with SQLite's -wal and -shm beside it
    STORE/reserve             space that forgetting and expiry use when the disk is full

A process that has the database open must not open or copy the file by its path as well: closing
that second descriptor would release SQLite's locks, which are POSIX locks.
"""

import contextlib
import json
import os
import shutil
import sqlite3
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple
from zlib import crc32

from understudy.core.errors import ConfigError, Corrupt, StorageFailed, StorageFull
from understudy.core.log import is_locked, make_folder, remove, storage_error, write_file
from understudy.ports import CRASHED_INGEST, DAMAGED_STREAM

FORMAT = "understudy-store/1"
FILE_NAME = "experience.sqlite"

Synchronous = Literal["FULL", "NORMAL", "OFF"]
"""With FULL, commits survive a power cut; the others are for tests that show the difference."""

PAGE_BYTES = 16_384
_BUSY_MS = 30_000
CHECKPOINT_BYTES = 16 * 1024 * 1024
"""Approximate bytes committed between two checkpoints of the write-ahead log."""
_LONG_LOG_BYTES = 64 * 1024 * 1024
"""Above this size, a checkpoint waits for readers, so that the write-ahead log can be reused from
its start. SQLite then truncates the file to this size."""
_COMMIT_BYTES = 8 * PAGE_BYTES
"""Approximate bytes of a commit besides its frames."""
_RESTART_MS = 500
_TRUNCATE_MS = 2_000
"""How long truncating the write-ahead log waits for readers; then the next erasure tries again."""
RESERVE_BYTES = 24 * 1024 * 1024
"""Disk space reserved for a checkpoint of the write-ahead log and for one slice of an erasure."""

_SCHEMA = """
CREATE TABLE head (
  id INTEGER PRIMARY KEY CHECK (id = 1), store BLOB NOT NULL, next_arrival INTEGER NOT NULL,
  next_quarantine INTEGER NOT NULL, next_session INTEGER NOT NULL, pruned_below INTEGER NOT NULL,
  pruned_before_s INTEGER NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE positions (
  partition TEXT PRIMARY KEY, position TEXT, crc INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE claims (
  partition TEXT PRIMARY KEY, epoch INTEGER NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE schemas (
  id INTEGER PRIMARY KEY, game TEXT NOT NULL, schema TEXT UNIQUE NOT NULL, spec BLOB,
  crc INTEGER NOT NULL);
CREATE TABLE sessions (
  id INTEGER PRIMARY KEY, session BLOB UNIQUE NOT NULL, player BLOB NOT NULL, game TEXT NOT NULL,
  last_received INTEGER NOT NULL, state BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE INDEX sessions_by_player ON sessions (player);
CREATE TABLE frames (
  arrival INTEGER PRIMARY KEY, session INTEGER, chunk_no INTEGER, gone INTEGER NOT NULL,
  kind INTEGER NOT NULL, fate INTEGER NOT NULL, event INTEGER NOT NULL, received INTEGER NOT NULL,
  schema INTEGER NOT NULL, first_step INTEGER NOT NULL, n_steps INTEGER NOT NULL,
  body_crc INTEGER NOT NULL, body_len INTEGER NOT NULL, crc INTEGER NOT NULL);
CREATE UNIQUE INDEX frames_by_key ON frames (session, chunk_no, gone);
CREATE INDEX frames_by_age ON frames (received) WHERE fate = 0;
CREATE INDEX frames_by_event ON frames (event) WHERE event > 0;
CREATE TABLE bodies (arrival INTEGER PRIMARY KEY, raw BLOB NOT NULL);
CREATE TABLE events (
  arrival INTEGER PRIMARY KEY, reason TEXT NOT NULL, at REAL NOT NULL, player BLOB,
  crc INTEGER NOT NULL);
CREATE TABLE forgotten_sessions (digest BLOB PRIMARY KEY, crc INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE erasures (
  arrival INTEGER PRIMARY KEY, player BLOB NOT NULL, sessions_below INTEGER NOT NULL,
  crc INTEGER NOT NULL);
CREATE TABLE quarantine (
  id INTEGER PRIMARY KEY, reason TEXT NOT NULL, detail TEXT NOT NULL, parked INTEGER NOT NULL,
  received REAL NOT NULL, game TEXT NOT NULL, session BLOB NOT NULL, chunk_no INTEGER NOT NULL,
  body_crc INTEGER NOT NULL, player BLOB NOT NULL, replayed INTEGER NOT NULL,
  crc INTEGER NOT NULL, raw BLOB NOT NULL);
CREATE INDEX quarantine_by_key ON quarantine (session, chunk_no);
"""
# frames.gone is 0 while the frame can be read and its arrival number afterwards, so that the unique
# index allows one readable frame per key and any number of removed ones. A forgotten player's ids
# are erased from sessions, bodies, quarantine and erasures; only a digest of each id is left.
# quarantine.replayed is 0 for a frame that waits or expired, else REPLAYED or EVICTED.

REPLAYED = 1
"""Column `replayed` of a quarantined frame: stored after all."""
EVICTED = 2
"""Column `replayed` of a quarantined frame: deleted because the quarantine was full."""

IS_REPLAYABLE = (
    "(parked = 1 OR detail = '' OR reason IN "
    f"('unknown_game', '{CRASHED_INGEST}', '{DAMAGED_STREAM}'))"
)
"""Whether a quarantined frame is evicted last: it may be valid, or notes that frames were lost.

Frames that were withdrawn from the store have no detail.
"""
_HELD_INDEX = (
    f"CREATE INDEX IF NOT EXISTS quarantine_held ON quarantine ({IS_REPLAYABLE}) WHERE raw <> x''"
)
"""Finds the oldest frame to evict without reading the rows of those evicted before. Created when a
store is opened, since stores of earlier versions lack it."""

_NETWORK_FILE_SYSTEMS = {
    "9p",
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "davfs",
    "fuse.cephfs",
    "fuse.glusterfs",
    "fuse.rclone",
    "fuse.s3fs",
    "fuse.sshfs",
    "gfs2",
    "glusterfs",
    "gpfs",
    "lustre",
    "nfs",
    "nfs4",
    "ocfs2",
    "smb3",
    "smbfs",
}


def check_of(*values: object) -> int:
    """The checksum of these values, such as the other columns of a row."""
    return crc32(repr(values).encode())


def quarantine_check(columns: Sequence[object], raw: bytes) -> int:
    """The checksum of a quarantine row: of its other columns and the frame's bytes."""
    return check_of(*columns, crc32(raw))


def checked(table: str, row: tuple[Any, ...]) -> tuple[Any, ...]:
    """A row's values without the checksum in its last column; Corrupt if that does not match."""
    *values, crc = row
    if check_of(*values) != crc:
        raise Corrupt(
            f"a row of the store's table {table} does not match its checksum; restore the store "
            "from a backup"
        )
    return tuple(values)


@contextmanager
def disk(doing: str) -> Iterator[None]:
    """Raise OSErrors and SQLite errors as StorageFull, StorageFailed or Corrupt."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, doing, then="reopen the store") from error
    except UnicodeDecodeError as error:
        raise Corrupt(
            f"{doing} failed: stored text is damaged; restore the store from a backup"
        ) from error
    except sqlite3.Error as error:
        extended = getattr(error, "sqlite_errorcode", 0)
        code = extended & 0xFF
        if code == sqlite3.SQLITE_FULL or extended == sqlite3.SQLITE_IOERR_SHMSIZE:
            raise StorageFull(
                f"no space for {doing}: {error}; free some space and try again"
            ) from error
        # Every statement here is fixed, so a missing table or column is a damaged schema.
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or "no such" in str(error):
            raise Corrupt(f"{doing} failed: {error}; restore the store from a backup") from error
        raise StorageFailed(f"{doing} failed: {error}; reopen the store") from error


def has_store(folder: Path) -> bool:
    """Whether the folder contains an embedded store, even a damaged or unsupported one.

    Also true for a file in place of the folder, so that opening it reports the problem. False while
    a process creates the store: `store.json` is written last.
    """
    if folder.is_file() or any(
        (folder / name).exists() for name in ("store.json", "catalogue.sqlite", "segments")
    ):
        return True
    path = folder / FILE_NAME
    return path.exists() and path.stat().st_size > 0 and not is_locked(folder / ".lock")


def open_writer(folder: Path, *, synchronous: Synchronous = "FULL") -> sqlite3.Connection:
    """Open a connection that may write; creates the database if it does not exist."""
    check_folder(folder)
    _refuse_network_file_system(folder)
    make_folder(folder)
    path = folder / FILE_NAME
    known = _read_facts(folder)
    if known is None and not path.exists():
        # Private to this user; SQLite gives -wal and -shm the same mode.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    if path.stat().st_size:
        _check_unopened(folder, known)
    with disk(f"opening the store in {folder}"):
        db = _connect(path, "")
        try:
            db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute(f"PRAGMA synchronous = {synchronous}")
            db.execute("PRAGMA secure_delete = ON")
            db.execute("PRAGMA wal_autocheckpoint = 0")
            db.execute(f"PRAGMA journal_size_limit = {_LONG_LOG_BYTES}")
            db.execute("PRAGMA temp_store = MEMORY")
            if sys.platform == "darwin":
                db.execute("PRAGMA fullfsync = ON")
                db.execute("PRAGMA checkpoint_fullfsync = ON")
            identity = _created(db, folder, known)
            db.execute(_HELD_INDEX)
        except BaseException:
            db.close()
            raise
    if known is None:
        _write_facts(folder, _StoreFacts(identity, 0))
    return db


class Database:
    """The only connection that writes and checkpoints, and its reserved disk space.

    The caller must hold the store's lock file: two connections that write or checkpoint at once
    trigger a known bug of older SQLite versions. The caller's threads synchronise with `lock`.
    """

    def __init__(
        self, folder: Path, *, synchronous: Synchronous = "FULL", reserve_bytes: int = RESERVE_BYTES
    ) -> None:
        self.lock = threading.RLock()
        self._folder = folder
        self._reserve = folder / "reserve"
        self._reserve_bytes = reserve_bytes
        self._is_disk_short = False
        self._failed: str | None = None
        self._written_bytes = 0
        try:
            self.db = open_writer(folder, synchronous=synchronous)
        except StorageFull:
            if not self._reserve.exists():
                raise
            remove(self._reserve)
            self._is_disk_short = True
            self.db = open_writer(folder, synchronous=synchronous)
        self.keep_reserve()

    def check(self) -> None:
        """Raise StorageFailed if an earlier write failed, which leaves the disk's state unknown."""
        if self._failed:
            raise StorageFailed(self._failed)

    def rows(self, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """All rows of a query."""
        with self.lock, disk("reading the store"):
            return self.db.execute(query, values).fetchall()

    def pragma(self, name: str) -> int:
        with self.lock:
            return int(self.db.execute(f"PRAGMA {name}").fetchone()[0])

    @contextmanager
    def transaction(self, doing: str) -> Iterator[None]:
        """One durable transaction, all or nothing."""
        try:
            with disk(doing):
                self.db.execute("BEGIN IMMEDIATE")
                try:
                    yield
                    self.db.execute("COMMIT")
                except BaseException:
                    if self.db.in_transaction:
                        self.db.execute("ROLLBACK")
                    raise
        except (StorageFailed, Corrupt) as error:
            self._fail(error)
            raise

    def wrote(self, size_bytes: int) -> None:
        """Count the bytes of a transaction, and checkpoint after CHECKPOINT_BYTES."""
        self._written_bytes += size_bytes + _COMMIT_BYTES
        if self._written_bytes < CHECKPOINT_BYTES and not self._is_disk_short:
            return
        self._written_bytes = 0
        try:
            with disk("a checkpoint"):
                _, pages, _ = self.db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                if pages * PAGE_BYTES > _LONG_LOG_BYTES or self._is_disk_short:
                    self._wait_for_readers("RESTART", _RESTART_MS)
        except StorageFull:
            pass  # commits are durable in the log; the next checkpoint may find space
        except (StorageFailed, Corrupt) as error:
            self._fail(error)
            raise

    def truncate_log(self) -> bool:
        """Remove erased bytes from the log; False when a reader or a full disk prevents it."""
        with self.lock:
            for _ in range(2):
                try:
                    with disk("a checkpoint"):
                        return self._wait_for_readers("TRUNCATE", _TRUNCATE_MS)
                except StorageFull:
                    if not self.use_reserve():
                        return False
            return False

    def _wait_for_readers(self, mode: str, timeout_ms: int) -> bool:
        self.db.execute(f"PRAGMA busy_timeout = {timeout_ms}")
        try:
            busy, *_ = self.db.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
        finally:
            self.db.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
        return not busy

    def _fail(self, error: Exception) -> None:
        self._failed = f"an earlier write failed, so the store must be reopened: {error}"

    def use_reserve(self) -> bool:
        """Delete the reserve and checkpoint into its space; False if there was no reserve."""
        if not self._reserve.exists():
            return False
        remove(self._reserve)
        self._is_disk_short = True
        self.wrote(0)
        return True

    def keep_reserve(self) -> None:
        """Reserve disk space again, if at least four times as much is free."""
        if (
            self._reserve.exists()
            or shutil.disk_usage(self._reserve.parent).free < 4 * self._reserve_bytes
        ):
            return
        try:
            with self._reserve.open("wb") as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, self._reserve_bytes)
                else:
                    file.write(bytes(self._reserve_bytes))
        except OSError:
            remove(self._reserve)
        else:
            self._is_disk_short = False

    def mark(self, next_arrival: int) -> None:
        """Write to store.json that the database has reached this arrival number.

        Called after a change that cannot be read again from the stream: frames were trimmed, a
        player was forgotten. An older copy of the database is rejected from then on.
        """
        with self.lock, contextlib.suppress(OSError):  # on a full disk, the old mark stays
            known = _read_facts(self._folder)
            if known is not None and known.mark < next_arrival:
                _write_facts(self._folder, known._replace(mark=next_arrival))

    def close(self) -> None:
        self.db.close()


def open_reader(folder: Path) -> sqlite3.Connection:
    """Open a read-only connection; ConfigError if there is no store, Corrupt if it is damaged."""
    check_folder(folder)
    path = folder / FILE_NAME
    known = _read_facts(folder)
    if known is None and not path.exists():
        raise ConfigError(
            f"there is no store in {folder}; record something, store it with `understudy ingest "
            "--until-empty`, or use another --data folder"
        )
    with disk(f"opening the store in {folder}"):
        db = _connect(path, "?mode=ro")
        try:
            if _tables(db, path):
                head = db.execute("SELECT store, next_arrival FROM head").fetchone()
                if head is not None:
                    _compare(folder, known, uuid.UUID(bytes=head[0]), head[1])
                return db
        except sqlite3.OperationalError as error:
            db.close()
            return _on_read_only_disk(path, error)
        except BaseException:
            db.close()
            raise
    db.close()
    raise ConfigError(f"the store in {folder} is still being created; try again")


def _connect(path: Path, how: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}{how}"
    return sqlite3.connect(
        uri, uri=True, isolation_level=None, check_same_thread=False, timeout=_BUSY_MS / 1000
    )


def _check_unopened(folder: Path, known: "_StoreFacts | None") -> None:
    """Raise Corrupt if the files of a store are inconsistent; changes none of them.

    A connection that may write merges the log into the database when it closes, and the log of
    another copy would destroy the database.
    """
    path = folder / FILE_NAME
    log = folder / f"{FILE_NAME}-wal"
    try:
        reading = disk(f"opening the store in {folder}")
        with reading, contextlib.closing(_connect(path, "?mode=ro")) as db:
            if _tables(db, path):
                _fit(db, folder, known)
    except Corrupt as error:
        if not log.exists():
            raise
        raise Corrupt(f"{error}; if {log.name} belongs to another copy, move it away") from error


def _created(db: sqlite3.Connection, folder: Path, known: "_StoreFacts | None") -> uuid.UUID:
    """Create the tables of a new database; return its id; Corrupt if it is inconsistent."""
    if not _tables(db, folder / FILE_NAME):
        if known is not None:
            raise _lost(folder)
        fresh = uuid.uuid4()
        head = (1, fresh.bytes, 1, 1, 1, 1, 0)
        db.execute("BEGIN IMMEDIATE")
        for statement in _SCHEMA.split(";")[:-1]:
            db.execute(statement)
        db.execute("INSERT INTO head VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*head, check_of(*head)))
        db.execute("COMMIT")
        return fresh
    return _fit(db, folder, known)


def _fit(db: sqlite3.Connection, folder: Path, known: "_StoreFacts | None") -> uuid.UUID:
    """Return the id of a database; Corrupt if its tables and store.json are inconsistent."""
    if (row := db.execute("SELECT * FROM head").fetchone()) is None:
        raise _lost(folder)
    _, store, next_arrival, next_quarantine, next_session, *_ = checked("head", row)
    identity = uuid.UUID(bytes=store)
    _compare(folder, known, identity, next_arrival)
    query = (
        "SELECT (SELECT max(arrival) FROM frames), (SELECT max(arrival) FROM events), "
        "(SELECT max(id) FROM quarantine), (SELECT max(id) FROM sessions)"
    )
    limits = (next_arrival, next_arrival, next_quarantine, next_session)
    numbers = db.execute(query).fetchone()
    if any(top is not None and top >= limit for top, limit in zip(numbers, limits, strict=True)):
        raise Corrupt(
            f"the tables of {folder / FILE_NAME} are inconsistent, as if one of its files had been "
            f"replaced by another copy's; {_WAY_OUT}"
        )
    return identity


def _tables(db: sqlite3.Connection, path: Path) -> set[str]:
    """The tables of a database, none if it is new; Corrupt if they belong to another program."""
    names = {name for (name,) in db.execute("SELECT name FROM sqlite_schema")}
    if names and "head" not in names:
        raise Corrupt(
            f"{path} is the database of another program; move it away, or restore the store from a "
            "backup"
        )
    return names


_WAY_OUT = (
    "restore the store from a backup; without one, move the store's folder away: ingest then "
    "creates a new store from what the stream still has"
)


def _compare(
    folder: Path, known: "_StoreFacts | None", identity: uuid.UUID, next_arrival: int
) -> None:
    """Raise Corrupt if the database is not the one that store.json describes, or an older copy."""
    if known is None:
        return
    if known.id != identity:
        raise Corrupt(
            f"{folder / FILE_NAME} is not the database of store {known.id}, which store.json "
            "beside it names; restore both files from the same backup"
        )
    if next_arrival < known.mark:
        raise Corrupt(
            f"{folder / FILE_NAME} is an older copy: it ends at arrival number {next_arrival - 1}, "
            f"but store.json says that it reached {known.mark - 1}, and the stream may no longer "
            "have the frames between; put the newest database back, or restore both files from the "
            "same backup; to continue with this copy and lose the rest, delete store.json"
        )


class _StoreFacts(NamedTuple):
    """The contents of store.json."""

    id: uuid.UUID
    mark: int
    """The database has reached this arrival number."""


def _write_facts(folder: Path, known: _StoreFacts) -> None:
    fields = (FORMAT, str(known.id), known.mark)
    facts = {"format": FORMAT, "id": str(known.id), "mark": known.mark, "crc": check_of(*fields)}
    write_file(folder / "store.json", json.dumps(facts).encode())


def _read_facts(folder: Path) -> _StoreFacts | None:
    """The contents of store.json, None without that file; raises if it or the database is bad."""
    try:
        text = (folder / "store.json").read_text()
    except FileNotFoundError:
        return None
    try:
        facts = json.loads(text)
        store_format = facts["format"]
        known = _StoreFacts(uuid.UUID(facts["id"]), int(facts["mark"]))
        is_valid = facts["crc"] == check_of(store_format, facts["id"], facts["mark"])
    except (ValueError, KeyError, TypeError):
        is_valid = False
    if not is_valid:
        raise Corrupt(
            f"{folder / 'store.json'} is damaged; delete it: it is written again from the database"
        )
    if store_format != FORMAT:
        raise ConfigError(
            f"the store in {folder} has format {store_format!r}, but this version of understudy "
            f"reads {FORMAT!r}; use the version that wrote the store"
        )
    path = folder / FILE_NAME
    if not path.exists() or not path.stat().st_size:
        raise _lost(folder)
    return known


def _lost(folder: Path) -> Corrupt:
    return Corrupt(f"the database {FILE_NAME} in {folder} is missing or empty; {_WAY_OUT}")


def check_folder(folder: Path) -> None:
    """Raise ConfigError if the folder is a file, or holds a store of an older format."""
    if folder.is_file():
        raise ConfigError(
            f"{folder} is a file, but a store needs a folder; move the file away, or use another "
            "path"
        )
    if (folder / "catalogue.sqlite").exists() or (folder / "segments").exists():
        raise ConfigError(
            f"the store in {folder} is in segments, a format from before the first release that "
            "this version does not read; use another --data folder, or export it with the version "
            "that wrote it and import it here"
        )


def _refuse_network_file_system(folder: Path) -> None:
    """Raise ConfigError on a network file system, where SQLite's locks do not work."""
    mounts = Path("/proc/self/mountinfo")
    if (
        mounts.exists()
        and (kind := file_system_of(folder, mounts.read_text())) in _NETWORK_FILE_SYSTEMS
    ):
        raise ConfigError(
            f"{folder} is on a network file system ({kind}), where SQLite's locks do not work; use "
            "a folder on a local disk, or set store.url to a remote store"
        )


def file_system_of(folder: Path, mountinfo: str) -> str:
    """The file system type of a folder, from the text of Linux's mountinfo."""
    resolved = folder.absolute().resolve()
    best = -1
    kind = ""
    for line in mountinfo.splitlines():
        fields, _, after = line.partition(" - ")
        mount = Path(fields.split()[4].encode().decode("unicode_escape"))
        if (resolved == mount or mount in resolved.parents) and len(mount.parts) >= best:
            best = len(mount.parts)
            kind = after.split()[0]
    return kind


def _on_read_only_disk(path: Path, error: sqlite3.OperationalError) -> sqlite3.Connection:
    """Open the database without locks if its disk is read-only; otherwise raise what to do."""
    if os.access(path.parent, os.W_OK):
        raise error
    if sys.platform == "win32" or not os.statvfs(path).f_flag & os.ST_RDONLY:
        raise StorageFailed(
            f"{path.parent} is not writable, but SQLite writes next to the database it reads; run "
            "this as the owner of the folder, or make it writable"
        ) from error
    if any(path.with_name(f"{path.name}-{end}").exists() for end in ("wal", "shm")):
        raise StorageFailed(
            f"{path.parent} is on a read-only disk, but the last writer did not close the store, "
            "so SQLite must write next to the database to read it; copy the data folder to another "
            "disk, or mount this disk writable"
        ) from error
    return _connect(path, "?mode=ro&immutable=1")
