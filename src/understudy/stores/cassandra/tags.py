"""Which attempts at a commit counted: rows of all others are leftovers that nobody may see."""

import threading
from collections.abc import Iterable

from understudy.stores.cassandra.facts import Tag
from understudy.stores.cassandra.tables import COMMIT_BUCKET
from understudy.stores.cassandra.wire import Wire

_MOST = 100_000
_HEADS = "SELECT partition, commit_no FROM lanes WHERE partition = ?"
_ATTEMPT = "SELECT attempt FROM commits WHERE partition = ? AND bucket = ? AND commit_no = ?"


class Tags:
    """Remembers what it found: an attempt that counted always will."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._counted: dict[Tag, None] = {}
        self._lock = threading.Lock()

    def committed(self, tags: Iterable[Tag]) -> set[Tag]:
        """Those of these attempts that counted."""
        wanted = set(tags)
        with self._lock:
            found = {tag for tag in wanted if tag in self._counted}
        asked = sorted(wanted - found, key=lambda tag: (tag.partition, tag.commit_no, tag.attempt))
        names = sorted({tag.partition for tag in asked})
        heads = self._wire.all([self._wire.bind(_HEADS, name) for name in names])
        head = {name: rows[0].commit_no if rows else 0 for name, rows in zip(names, heads, strict=True)}
        below = [tag for tag in asked if tag.commit_no <= head[tag.partition]]
        rows = self._wire.all([
            self._wire.bind(_ATTEMPT, tag.partition, tag.commit_no >> COMMIT_BUCKET, tag.commit_no) for tag in below
        ])  # fmt: skip
        # A row that is gone ran out long after whoever could have tried again.
        new = {tag for tag, found in zip(below, rows, strict=True) if not found or found[0].attempt == tag.attempt}
        self.remember(new)
        return found | new

    def remember(self, tags: Iterable[Tag]) -> None:
        """Attempts that are known to have counted."""
        with self._lock:
            self._counted.update(dict.fromkeys(tags))
            while len(self._counted) > _MOST:
                del self._counted[next(iter(self._counted))]
