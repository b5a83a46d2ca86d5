"""The data folder: where a platform stores each kind of data, and statistics of that data."""

import contextlib
import os
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.core.errors import ConfigError, InvalidName, UnderstudyError
from understudy.core.log import is_locked
from understudy.core.names import game_name
from understudy.experience.intake import RESTORING
from understudy.ports import Cursor, FullStore, Stored
from understudy.stores.database import has_store
from understudy.stores.view import StoreView

_PAGE = 1000


@dataclass(frozen=True, slots=True)
class DataFolder:
    """Paths inside a data folder."""

    root: Path
    store_name: str = "store"
    """Name of the subfolder with the store, or with the local copy of a remote store."""

    @property
    def stream(self) -> Path:
        return self.root / "stream"

    @property
    def store(self) -> Path:
        return self.root / self.store_name

    @property
    def spool(self) -> Path:
        return self.root / "spool"

    @property
    def games(self) -> Path:
        return self.root / "models" / "games"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger"

    @property
    def requests(self) -> Path:
        return self.root / "requests"

    @property
    def restoring(self) -> Path:
        """Where a restore copies to; it exists only while one runs, or after one was killed."""
        return self.root / RESTORING

    def game_names(self) -> list[str]:
        """Return the names of the games whose spec is registered in this folder."""
        names: list[str] = []
        for path in sorted(self.games.iterdir()) if self.games.is_dir() else ():
            with contextlib.suppress(InvalidName):  # files of other programs
                if any(path.glob("*.json")):
                    names.append(game_name(path.name))
        return names

    def has_store(self) -> bool:
        """Return whether the folder holds a store."""
        return has_store(self.store)

    def has_writer(self) -> bool:
        """Return whether a process has the store open for writing."""
        return is_locked(self.store / ".lock")

    def must_exist(self) -> "DataFolder":
        """Return this object; raise ConfigError if the folder holds no recorded data."""
        if not self.root.is_dir() or not any(
            (self.store.exists(), self.stream.exists(), self.spool.exists())
        ):
            raise ConfigError(
                f"{self.root} holds no recorded data; record some first, for example with "
                f"'understudy simulate CartPole-v1 --data {self.root}', or pass another folder "
                "with --data"
            )
        return self


def data_folder(option: str | None) -> DataFolder:
    """Return the folder that `--data` or UNDERSTUDY_DATA names."""
    text = option or os.environ.get("UNDERSTUDY_DATA")
    if not text:
        raise ConfigError("no data folder is set; pass --data DIR, or set UNDERSTUDY_DATA")
    try:
        path = Path(text).expanduser().resolve()
        is_file = path.exists() and not path.is_dir()
    except (ValueError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"the data folder {text[:80]!r} is not a valid path: {error}; pass --data with a path "
            "such as D"
        ) from None
    if is_file:
        raise ConfigError(f"{path} is a file; pass a folder to --data")
    return DataFolder(path)


# --- Statistics -----------------------------------------------------------------------------------


def stats(data: DataFolder) -> dict[str, Any]:
    """Return the counts of the folder's store, and the bytes of store, stream, spool and ledger.

    Nothing is opened for writing.
    """
    fields = {**count_store(data), "writer": data.has_writer()}
    fields["bytes"] = {name: _size(path) for name, path in _parts(data).items()}
    return fields


def remote_stats(data: DataFolder, store: FullStore) -> dict[str, Any]:
    """Return the statistics of `stats` for a remote store, by reading all of it.

    Figures that only its servers know are left out. Steps, chunks and sessions are counted in one
    pass, so they match each other even while another process writes.
    """
    games: Counter[str] = Counter()
    sessions: set[uuid.UUID] = set()
    chunks = short = 0
    cursor: Cursor | None = None
    # The pass ends at the second page that is not full, even if other processes keep writing.
    while short < 2:
        tail = store.tail(cursor, max_items=_PAGE, wait_s=0.0)
        cursor = tail.cursor
        short += len(tail.items) < _PAGE and not tail.is_cut
        for item in tail.items:
            if isinstance(item, Stored) and item.chunk is not None:
                sessions.add(item.frame.session)
                games[item.chunk.meta.game] += item.chunk.meta.n_steps
                chunks += 1
    reasons: Counter[str] = Counter()
    parked = after = 0
    while page := store.quarantined(after_id=after):
        after = page[-1].id
        parked += sum(entry.parked for entry in page)
        reasons.update(entry.reason for entry in page if not entry.parked)
    parts = {name: path for name, path in _parts(data).items() if name != "store" and path.exists()}
    return {
        "steps": sum(games.values()),
        "chunks": chunks,
        "sessions": len(sessions),
        "games": dict(games),
        "quarantined": dict(reasons),
        "parked": parked,
        "bytes": {name: _size(path) for name, path in parts.items()},
    }


def stored_schemas(data: DataFolder) -> dict[str, set[str]]:
    """Return the schemas of the recorded steps by game, from the store or its local copy."""
    schemas: dict[str, set[str]] = {}
    for folder in (data, DataFolder(data.root, store_name="window")):
        # A damaged store is reported by `doctor`.
        with contextlib.suppress(UnderstudyError):
            if folder.has_store():
                with StoreView(folder.store) as view:
                    for spec in view.specs():
                        schemas.setdefault(spec.game, set()).add(spec.schema)
    return schemas


def count_store(data: DataFolder) -> dict[str, Any]:
    """Return the counts of the folder's store; zeros if there is none."""
    if not data.has_store():
        return {
            "steps": 0,
            "chunks": 0,
            "sessions": 0,
            "games": {},
            "quarantined": {},
            "parked": 0,
            "evicted": 0,
            "free_bytes": 0,
        }
    with StoreView(data.store) as view:
        counts = view.counts()
    return {
        "steps": sum(counts.steps_by_game.values()),
        "chunks": counts.chunks,
        "sessions": counts.sessions,
        "games": counts.steps_by_game,
        "quarantined": counts.quarantined,
        "parked": counts.parked,
        "evicted": counts.evicted,
        "free_bytes": counts.free_bytes,
    }


def _parts(data: DataFolder) -> dict[str, Path]:
    return {"store": data.store, "stream": data.stream, "spool": data.spool, "ledger": data.ledger}


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*") if folder.exists() else ():
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total
