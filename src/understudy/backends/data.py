"""The data folder: one place for everything a platform keeps, where each part of it is, and how
much it holds."""

import os
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.core.errors import ConfigError
from understudy.core.log import is_locked
from understudy.ports import Cursor, FullStore, Stored
from understudy.stores.database import has_store
from understudy.stores.view import StoreView

_PAGE = 1000


@dataclass(frozen=True, slots=True)
class DataFolder:
    """Paths inside a data folder."""

    root: Path
    store_name: str = "store"
    """Another one for the copy of a store that lies elsewhere."""

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

    def game_names(self) -> list[str]:
        """Games with a registered spec."""
        return sorted(path.name for path in self.games.iterdir()) if self.games.is_dir() else []

    def has_store(self) -> bool:
        """Whether a store was ever created here."""
        return has_store(self.store)

    def has_writer(self) -> bool:
        """Whether some process has the store open for writing."""
        return is_locked(self.store / ".lock")

    def must_exist(self) -> "DataFolder":
        """Itself, or ConfigError when nothing was ever recorded here."""
        if not self.root.is_dir() or not any(
            (self.store.exists(), self.stream.exists(), self.spool.exists())
        ):
            raise ConfigError(
                f"{self.root} holds no recorded data; record some first, such as "
                f"'understudy simulate CartPole-v1 --data {self.root}', or name another folder "
                "with --data"
            )
        return self


def data_folder(given: str | None) -> DataFolder:
    """The folder named by `--data` or UNDERSTUDY_DATA."""
    text = given or os.environ.get("UNDERSTUDY_DATA")
    if not text:
        raise ConfigError("no data folder was named; give --data DIR, or set UNDERSTUDY_DATA")
    try:
        path = Path(text).expanduser().resolve()
        is_taken = path.exists() and not path.is_dir()
    except (ValueError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"--data {text[:80]!r} is no folder: {error}; give a path such as D"
        ) from None
    if is_taken:
        raise ConfigError(f"{path} is a file; give a folder to --data")
    return DataFolder(path)


# --- What it holds --------------------------------------------------------------------------------


def stats(data: DataFolder) -> dict[str, Any]:
    """Counts of the store, and bytes of every part; nothing is opened for writing."""
    fields = {**count_store(data), "writer": data.has_writer()}
    fields["bytes"] = {name: _size(path) for name, path in _parts(data).items()}
    return fields


def stats_elsewhere(data: DataFolder, store: FullStore) -> dict[str, Any]:
    """The same of a store on other machines, by reading all of it; what only its servers know is
    left out.

    Everything is counted in one pass, so the figures belong together also while another process
    writes.
    """
    games: Counter[str] = Counter()
    sessions: set[uuid.UUID] = set()
    chunks = short = 0
    cursor: Cursor | None = None
    while (
        short < 2
    ):  # however fast more comes, this ends: where a page was not full for the second time
        tail = store.tail(cursor, max_items=_PAGE, wait_s=0.0)
        cursor = tail.cursor
        short += len(tail.items) < _PAGE
        for item in tail.items:
            if isinstance(item, Stored) and item.chunk is not None:
                sessions.add(item.frame.session)
                games[item.chunk.meta.game] += item.chunk.meta.n_steps
                chunks += 1
    reasons: Counter[str] = Counter()
    parked = after = 0
    while page := store.quarantined(after_id=after):
        after = page[-1].id
        parked += sum(one.parked for one in page)
        reasons.update(one.reason for one in page if not one.parked)
    there = {name: path for name, path in _parts(data).items() if name != "store" and path.exists()}
    return {
        "steps": sum(games.values()),
        "chunks": chunks,
        "sessions": len(sessions),
        "games": dict(games),
        "quarantined": dict(reasons),
        "parked": parked,
        "bytes": {name: _size(path) for name, path in there.items()},
    }


def count_store(data: DataFolder) -> dict[str, Any]:
    """What the folder's store holds; zeros where there is none."""
    if not data.has_store():
        return {
            "steps": 0,
            "chunks": 0,
            "sessions": 0,
            "games": {},
            "quarantined": {},
            "parked": 0,
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
