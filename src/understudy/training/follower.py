"""StoreFollower: reads a growing store once for all that follow it, each from its own place.

    store ─► page ─► statistics of all games
                 ├─► a training of one game
                 └─► a training of another

A reader that starts or resumes later catches up by itself; from then on it shares the pages of the
others.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from understudy.backends.local import open_view
from understudy.core.errors import UnderstudyError
from understudy.experience.chunk import Chunk, ChunkId
from understudy.ports import Cursor, Forgotten, Stored, Tail

if TYPE_CHECKING:
    from understudy.stores.local import LocalStore
    from understudy.stores.view import StoreView


@dataclass(slots=True)
class ReaderPosition:
    """How far a reader of a store came."""

    cursor: Cursor | None = None
    seen_no: int = 0
    """The arrival number of the newest item it read; may be ahead of the cursor, inside the page
    behind it."""

    def to_json(self) -> list[Any]:
        return [self.cursor, self.seen_no]


def place_from_json(fields: Any) -> ReaderPosition:
    """The place that `to_json` wrote."""
    cursor, seen_no = fields
    return ReaderPosition(None if cursor is None else Cursor(cursor), int(seen_no))


class Reader(Protocol):
    """Gets the items of a store, each once and in order."""

    place: ReaderPosition

    def read(self, item: Stored | Forgotten) -> None: ...


class StoreFollower:
    """One view of a store and its readers; not thread-safe. The view is closed with the last
    reader."""

    def __init__(self, store: Path) -> None:
        self.view = open_view(store)
        self._readers: list[Reader] = []

    def join(self, reader: Reader) -> None:
        self._readers.append(reader)

    def leave(self, reader: Reader) -> None:
        """Hand nothing to this reader any more; may be called twice."""
        self._readers = [one for one in self._readers if one is not reader]
        if not self._readers:
            self.view.close()

    def follow(self, reader: Reader, *, max_items: int = 1024) -> bool:
        """Read one page from where this reader stands; whether it held anything.

        Others that stand in the page read it too. What goes wrong there is left for them: they stay
        where they are, and meet it when they follow themselves.
        """
        page = self.view.tail(reader.place.cursor, max_items=max_items, wait_s=0.0)
        _hand(page, reader)
        if page.items:
            first = page.items[0].arrival_no
            for other in self._readers:
                if other is not reader and first - 1 <= other.place.seen_no < _number(
                    page.items[-1]
                ):
                    try:
                        _hand(page, other)
                    except UnderstudyError:
                        continue
        return bool(page.items)


def _hand(page: Tail, reader: Reader) -> None:
    for item in page.items:
        number = _number(item)
        if number > reader.place.seen_no:
            reader.read(item)
            reader.place.seen_no = number
    reader.place.cursor = page.cursor


def _number(item: Stored | Forgotten) -> int:
    return item.last_no if isinstance(item, Forgotten) else item.arrival_no


def stored_chunks(store: "LocalStore | StoreView", wanted: set[ChunkId]) -> dict[ChunkId, Chunk]:
    """Chunks of a store by id, from the oldest of them on; those that are not there are left
    out."""
    found: dict[ChunkId, Chunk] = {}
    cursor = store.behind(wanted)
    while len(found) < len(wanted):
        page = store.tail(cursor, max_items=1024, wait_s=0.0)
        if not page.items:
            break
        cursor = page.cursor
        chunks = [
            item.chunk for item in page.items if isinstance(item, Stored) and item.chunk is not None
        ]
        found |= {key: chunk for chunk in chunks if (key := chunk.meta.id) in wanted}
    return found
