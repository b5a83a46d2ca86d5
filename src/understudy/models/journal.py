"""Journal: numbered documents of which each number is written once; whoever takes the next number has won.

    NAME/0000000001.json, NAME/0000000002.json, ...

Writing number N + 1 says: I have read everything up to N. If somebody else was faster, the number is taken, and one
reads on and decides again. So a journal is compare-and-swap with the one conditional write that every backend has, and
following it means asking for one object.
"""

from collections.abc import Iterator

from understudy.core.errors import Corrupt
from understudy.core.ports import Objects

FIRST = 1


class Journal:
    """One journal of a name; safe for any number of readers and writers, here and elsewhere."""

    def __init__(self, objects: Objects, name: str) -> None:
        self._objects, self.name = objects, name

    def read(self, after: int = 0) -> Iterator[tuple[int, bytes]]:
        """Documents behind a number, in order."""
        number = after
        while (raw := self._objects.get(self._place(number := number + 1))) is not None:
            yield number, raw

    def append(self, number: int, raw: bytes) -> bool:
        """Whether the document now stands under this number, which must be the one behind the last that was read."""
        place = self._place(number)
        if number > FIRST and self._objects.get(self._place(number - 1)) is None:
            raise Corrupt(
                f"{self._place(number - 1)} is missing, so {place} cannot follow it; restore it from a backup"
            )
        if self.is_hole(number):
            raise Corrupt(f"{place} is missing, and later entries are there; restore it from a backup before you go on")
        # Taken, yet with our bytes: an earlier attempt arrived although its answer was lost.
        return self._objects.create(place, raw) or self._objects.get(place) == raw

    def is_hole(self, number: int) -> bool:
        """Whether there is nothing under this number although there is behind it: somebody has lost it."""
        # Looked for in this order: whatever stands behind it was written after it.
        later = any(name > self._place(number) for name in self._objects.list(self.name))
        return later and self._objects.get(self._place(number)) is None

    def _place(self, number: int) -> str:
        return f"{self.name}/{number:010d}.json"
