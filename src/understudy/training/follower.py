"""StoreFollower: reads a growing store once for several readers, each at its own position.

    store ─► page ─► statistics of all games
                 ├─► a training of one game
                 └─► a training of another

A reader that starts or resumes later catches up first, and then shares the pages of the others.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from understudy.backends.local import open_view
from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import UnderstudyError
from understudy.experience.chunk import Chunk, ChunkId
from understudy.ports import Cursor, Forgotten, Stored, Tail

if TYPE_CHECKING:
    from understudy.stores.local import LocalStore
    from understudy.stores.view import StoreView


MAX_READ_S = 1.0
"""How long a learner reads before it trains again."""


@dataclass(slots=True)
class ReaderPosition:
    """A reader's position in a store."""

    cursor: Cursor | None = None
    seen_no: int = 0
    """Arrival number of the newest item read; ahead of the cursor if a page was read in part."""

    def to_json(self) -> list[Any]:
        return [self.cursor, self.seen_no]


def position_from_json(fields: Any) -> ReaderPosition:
    """The position that `to_json` returned."""
    cursor, seen_no = fields
    return ReaderPosition(None if cursor is None else Cursor(cursor), int(seen_no))


class Reader(Protocol):
    """Receives the items of a store, each once and in order."""

    position: ReaderPosition

    def read(self, item: Stored | Forgotten) -> None: ...


class StoreFollower:
    """A view of a store and its readers; closed when the last one leaves. Not thread-safe."""

    def __init__(self, store: Path, *, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self.view = open_view(store)
        self._readers: list[Reader] = []

    def join(self, reader: Reader) -> None:
        self._readers.append(reader)

    def leave(self, reader: Reader) -> None:
        """Stop sending items to this reader; may be called twice."""
        self._readers = [other for other in self._readers if other is not reader]
        if not self._readers:
            self.view.close()

    def catch_up(self, reader: Reader, *, max_s: float = math.inf, max_items: int = 256) -> bool:
        """Read to where the store ends now; returns whether there was anything to read.

        What arrives in the meantime is left for the next call: where players record faster than
        this process reads, a reader would never reach the end. `max_s`: seconds after which no
        other page is read. `max_items`: the size of a page.
        """
        end = self.view.next_arrival
        until_s = self._clock.monotonic() + max_s
        has_read = False
        while self.follow(reader, max_items=max_items):
            has_read = True
            if reader.position.seen_no + 1 >= end or self._clock.monotonic() >= until_s:
                break
        return has_read

    def follow(self, reader: Reader, *, max_items: int = 1024) -> bool:
        """Read one page from this reader's position; returns whether it had any items.

        Other readers whose position is in the page read it too. Their errors are ignored here: such
        a reader keeps its position and gets the error again when it calls `follow` itself.
        """
        page = self.view.tail(reader.position.cursor, max_items=max_items, wait_s=0.0)
        _deliver(page, reader)
        if page.items:
            first = page.items[0].arrival_no
            last = _number(page.items[-1])
            for other in self._readers:
                if other is not reader and first - 1 <= other.position.seen_no < last:
                    try:
                        _deliver(page, other)
                    except UnderstudyError:
                        continue
        return bool(page.items)


def _deliver(page: Tail, reader: Reader) -> None:
    for item in page.items:
        number = _number(item)
        if number > reader.position.seen_no:
            reader.read(item)
            reader.position.seen_no = number
    reader.position.cursor = page.cursor


def _number(item: Stored | Forgotten) -> int:
    return item.last_no if isinstance(item, Forgotten) else item.arrival_no


def stored_chunks(store: "LocalStore | StoreView", ids: set[ChunkId]) -> dict[ChunkId, Chunk]:
    """The chunks of a store with these ids; missing ones are omitted."""
    chunks: dict[ChunkId, Chunk] = {}
    end = store.next_arrival
    cursor = store.cursor_before(ids)
    last = 0
    while len(chunks) < len(ids) and last + 1 < end:
        page = store.tail(cursor, max_items=1024, wait_s=0.0)
        if not page.items:
            break
        last = _number(page.items[-1])
        cursor = page.cursor
        for item in page.items:
            if isinstance(item, Stored) and item.chunk is not None and item.chunk.meta.id in ids:
                chunks[item.chunk.meta.id] = item.chunk
    return chunks
