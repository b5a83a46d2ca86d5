"""What a data folder holds, counted without opening the store for writing."""

import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from understudy.app.data import DataFolder
from understudy.core.ports import Cursor, Forgotten, FullStore, Stored
from understudy.stores.view import StoreView

_PAGE = 1000


def stats(data: DataFolder) -> dict[str, Any]:
    """Counts of the store, and bytes of every part."""
    fields = no_counts() | {"writer": data.has_writer()}
    if data.has_store():
        with StoreView(data.store) as view:
            count_store(view, fields)
    fields["bytes"] = {name: _size(path) for name, path in _parts(data).items()}
    return fields


def stats_elsewhere(data: DataFolder, store: FullStore) -> dict[str, Any]:
    """The same of a store on other machines, by reading all of it; what only its servers know is left out.

    Everything is counted in one pass, so the figures belong together also while somebody writes.
    """
    games: Counter[str] = Counter()
    sessions: set[uuid.UUID] = set()
    chunks = 0
    for item in _held(store):
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
        "steps": sum(games.values()), "chunks": chunks, "sessions": len(sessions), "games": dict(games),
        "quarantined": dict(reasons), "parked": parked, "bytes": {name: _size(path) for name, path in there.items()},
    }  # fmt: skip


def _held(store: FullStore) -> Iterator[Stored | Forgotten]:
    """What a store holds now. However fast more comes, it ends: where a page was not full for the second time."""
    cursor: Cursor | None = None
    short = 0
    while short < 2:
        page = store.tail(cursor, max_items=_PAGE, wait_s=0.0)
        yield from page.items
        cursor = page.cursor
        short += len(page.items) < _PAGE


def no_counts() -> dict[str, Any]:
    """The counts of an empty store."""
    return {
        "steps": 0, "chunks": 0, "sessions": 0, "games": {}, "quarantined": {}, "parked": 0, "free_bytes": 0,
    }  # fmt: skip


def count_store(view: StoreView, fields: dict[str, Any]) -> None:
    """Add what a store holds to these counts."""
    counts = view.counts()
    fields["games"] = counts.steps_by_game
    fields["steps"] = sum(counts.steps_by_game.values())
    fields["chunks"] = counts.chunks
    fields["sessions"] = counts.sessions
    fields["quarantined"] = counts.quarantined
    fields["parked"] = counts.parked
    fields["free_bytes"] = counts.free_bytes


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
