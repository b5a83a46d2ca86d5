"""Roster: the rows a uniform replay may sample, without gaps, so that a draw is one look-up and needs no tree."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]


class Roster:
    """A set of rows below `capacity`; `rows` lists them in an order that their history decides."""

    def __init__(self, capacity: int) -> None:
        self._rows = np.zeros(capacity, np.int64)
        self._place = np.full(capacity, -1, np.int64)  # where in `rows` each row stands, or -1
        self._n = 0

    def __len__(self) -> int:
        return self._n

    @property
    def rows(self) -> Rows:
        """The rows, to be read only."""
        return self._rows[: self._n]

    def set_range(self, start: int, may_sample: NDArray[np.bool_]) -> None:
        """Say for the rows from `start` on which of them belong."""
        belonged = self._place[start : start + len(may_sample)] >= 0
        self._remove(start + np.flatnonzero(belonged & ~may_sample))
        self._add(start + np.flatnonzero(may_sample & ~belonged))

    def draw(self, rng: np.random.Generator, size: tuple[int, int]) -> Rows:
        """Rows drawn evenly, each independently of the others."""
        return self._rows[rng.integers(0, self._n, size)]

    def restore(self, rows: NDArray[Any]) -> None:
        """Become the roster whose `rows` these were."""
        self._remove(self.rows.copy())
        self._add(rows.astype(np.int64))

    def _add(self, rows: Rows) -> None:
        end = self._n + len(rows)
        self._rows[self._n : end] = rows
        self._place[rows] = np.arange(self._n, end)
        self._n = end

    def _remove(self, rows: Rows) -> None:
        """Fill the gaps that these rows leave with the last ones that stay."""
        if not len(rows):
            return
        gaps, end = self._place[rows], self._n - len(rows)
        self._place[rows] = -1
        last = self._rows[end : self._n]
        movers, gaps = last[self._place[last] >= 0], gaps[gaps < end]
        self._rows[gaps], self._place[movers] = movers, gaps
        self._n = end
