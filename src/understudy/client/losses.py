"""Losses: the chunk numbers that will not be sent, until a drop report names them."""

import uuid
from collections.abc import Iterable, Iterator

from understudy.experience.frame import DropReport

_MAX_RANGES = 1024
"""The most ranges in one report."""


class Losses:
    """Lost chunk numbers and steps of each session since the last report."""

    def __init__(self) -> None:
        self._lost: dict[uuid.UUID, tuple[list[int], int]] = {}

    def add(self, session: uuid.UUID, numbers: Iterable[int], n_steps: int) -> None:
        """Note that these chunk numbers, with `n_steps` in total, will not be sent."""
        lost_numbers, steps = self._lost.setdefault(session, ([], 0))
        lost_numbers.extend(numbers)
        self._lost[session] = (lost_numbers, steps + n_steps)

    def reports(self) -> Iterator[tuple[uuid.UUID, DropReport]]:
        """Yield drop reports for all losses, with their session, and forget the losses."""
        losses = self._lost
        self._lost = {}
        for session, (numbers, n_steps) in losses.items():
            ranges = merge(numbers)
            for start in range(0, len(ranges), _MAX_RANGES):
                part = ranges[start : start + _MAX_RANGES]
                yield session, DropReport(part, n_steps if start == 0 else 0)


def merge(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return numbers as sorted, closed ranges."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return tuple(ranges)
