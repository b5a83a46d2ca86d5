"""What had to be dropped: which numbers of which session, until a report says so."""

import uuid
from collections.abc import Iterable, Iterator

from understudy.core.frame import DropReport

_MAX_RANGES = 1024
"""As many as one report may hold."""


class Losses:
    """Lost numbers and steps by session, since the last report."""

    def __init__(self) -> None:
        self._lost: dict[uuid.UUID, tuple[list[int], int]] = {}

    def add(self, session: uuid.UUID, numbers: Iterable[int], n_steps: int) -> None:
        """These numbers, which hold so many steps, will not be sent."""
        known, steps = self._lost.setdefault(session, ([], 0))
        known.extend(numbers)
        self._lost[session] = (known, steps + n_steps)

    def reports(self) -> Iterator[tuple[uuid.UUID, DropReport]]:
        """What to report now, by session; it is forgotten here."""
        lost, self._lost = self._lost, {}
        for session, (numbers, n_steps) in lost.items():
            ranges = merge(numbers)
            for at in range(0, len(ranges), _MAX_RANGES):
                yield session, DropReport(ranges[at : at + _MAX_RANGES], n_steps if at == 0 else 0)


def merge(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Numbers as sorted, closed ranges."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return tuple(ranges)
