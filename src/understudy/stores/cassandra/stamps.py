"""Stamps: numbers that rise over the whole store, near to the time in microseconds, drawn in ranges.

Every plain write carries one as its timestamp, so whatever a writer sends late never beats a newer owner's.
"""

from understudy.core.clock import Clock
from understudy.core.errors import StorageFailed
from understudy.stores.cassandra.wire import Unsure, Wire

RANGE = 1 << 20
FRESH_US = 3_600_000_000
"""A range older than this is left, so that stamps stay near the time, which compaction by time windows goes by."""
_TRIES = 1000


def draw(wire: Wire, clock: Clock) -> int:
    """The first number of a range that is above all that were drawn before, by anybody."""
    row = wire.one(wire.serial("SELECT number FROM meta WHERE name = 'stamp'"))
    last = row.number if row is not None else 0
    for _ in range(_TRIES):
        first = max(int(clock.now() * 1e6), last + RANGE)
        try:
            answer = wire.change(
                wire.bind("UPDATE meta SET number = ? WHERE name = 'stamp' IF number = ?", first, last)
            )
        except Unsure:
            # If it was drawn after all, nobody uses it.
            row = wire.one(wire.serial("SELECT number FROM meta WHERE name = 'stamp'"))
            last = row.number if row is not None else 0
            continue
        if answer.applied:
            return first
        last = getattr(answer, "number", None)
        if last is None:
            break
    raise StorageFailed(
        "no stamp could be drawn: the row stamp of table meta is lost or changes all the time; restore it from a backup"
    )


class Stamps:
    """One range, used up one by one."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._next = first + 1

    def take(self, count: int) -> int:
        """The first of this many numbers in a row."""
        taken = self._next
        self._next += count
        return taken

    def is_spent(self, count: int, now_us: int, *, above: int = 0) -> bool:
        """Whether another range is needed for this many numbers above one."""
        return self._next + count >= self._first + RANGE or self._next <= above or now_us - self._first > FRESH_US
