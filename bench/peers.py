"""LMDB and SQLite as experience stores: a chunk per key, or a row per key.

Both commit durably (LMDB with sync and metasync; SQLite in WAL with synchronous=FULL) and reject
duplicate keys. Conditions favour them: keys are dense and ascending, NumPy packs the rows, nothing
is checked.
"""

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from understudy.core.tensors import Array
from understudy.experience.chunk import Chunk, RowKind
from understudy.experience.frame import Frame

ROW = np.dtype(
    [
        ("obs", "<f4", 4),
        ("next_obs", "<f4", 4),
        ("action", "<i4"),
        ("reward", "<f4"),
        ("terminated", "?"),
        ("truncated", "?"),
    ]
)
"""One transition of the CartPole-like game, 42 bytes."""

_MAP_BYTES = 8 << 30


class Peer(Protocol):
    """A store that is measured against ours."""

    name: str

    def write_chunks(self, frames: Sequence[Frame]) -> None:
        """One durable commit, a body per key."""
        ...

    def write_rows(self, chunks: Sequence[Chunk]) -> None:
        """One durable commit, a transition per key."""
        ...

    def count(self) -> tuple[int, int]:
        """The number of stored chunks and rows."""
        ...

    def close(self) -> None: ...


def transitions(chunk: Chunk) -> Array:
    """A chunk's steps as packed rows."""
    columns = chunk.columns
    steps = np.flatnonzero(columns["row"] == RowKind.STEP)
    rows = np.empty(len(steps), ROW)
    for name in ("obs", "action", "reward", "terminated", "truncated"):
        rows[name] = columns[name][steps]
    rows["next_obs"] = columns["obs"][steps + 1]
    return rows


def _split(chunks: Sequence[Chunk]) -> list[bytes]:
    raw = b"".join(transitions(chunk).tobytes() for chunk in chunks)
    return [raw[at : at + ROW.itemsize] for at in range(0, len(raw), ROW.itemsize)]


def _key(frame: Frame) -> bytes:
    return frame.session.bytes + frame.chunk_no.to_bytes(8, "big")


class LmdbPeer:
    """LMDB with its default durability."""

    name = "LMDB"

    def __init__(self, folder: Path) -> None:
        import lmdb

        folder.mkdir(parents=True)
        self._env: Any = lmdb.open(
            str(folder), map_size=_MAP_BYTES, max_dbs=2, sync=True, metasync=True
        )
        self._chunks = self._env.open_db(b"chunks")
        self._rows = self._env.open_db(b"rows")
        self._next = 0

    def write_chunks(self, frames: Sequence[Frame]) -> None:
        with self._env.begin(write=True, db=self._chunks) as change:
            for frame in frames:
                if not change.put(_key(frame), frame.body, overwrite=False):
                    raise ValueError("duplicate chunk")

    def write_rows(self, chunks: Sequence[Chunk]) -> None:
        rows = _split(chunks)
        items = [(number.to_bytes(8, "big"), row) for number, row in enumerate(rows, self._next)]
        with self._env.begin(write=True, db=self._rows) as change:
            change.cursor().putmulti(items, dupdata=False, overwrite=False, append=True)
        self._next += len(rows)

    def count(self) -> tuple[int, int]:
        with self._env.begin() as look:
            return look.stat(self._chunks)["entries"], look.stat(self._rows)["entries"]

    def close(self) -> None:
        self._env.close()


class SqlitePeer:
    """SQLite with durable settings."""

    name = "SQLite"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._db = sqlite3.connect(folder / "peer.sqlite", isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute("CREATE TABLE chunks (key BLOB PRIMARY KEY, body BLOB) WITHOUT ROWID")
        self._db.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, row BLOB)")
        self._next = 0

    def write_chunks(self, frames: Sequence[Frame]) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany(
            "INSERT INTO chunks VALUES (?, ?)", [(_key(frame), frame.body) for frame in frames]
        )
        self._db.execute("COMMIT")

    def write_rows(self, chunks: Sequence[Chunk]) -> None:
        rows = _split(chunks)
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany("INSERT INTO rows VALUES (?, ?)", enumerate(rows, self._next))
        self._db.execute("COMMIT")
        self._next += len(rows)

    def count(self) -> tuple[int, int]:
        chunks, rows = (
            self._db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("chunks", "rows")
        )
        return chunks, rows

    def close(self) -> None:
        self._db.close()


def peers(folder: Path) -> tuple[list[Peer], list[str]]:
    """Every peer that can run here, in its own folder, and why others cannot."""
    available: list[Peer] = [SqlitePeer(folder / "sqlite")]
    try:
        available.insert(0, LmdbPeer(folder / "lmdb"))
    except ImportError:
        return available, ["LMDB: the lmdb package is not installed (make bench installs it)"]
    return available, []
