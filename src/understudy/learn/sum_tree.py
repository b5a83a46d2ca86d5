"""A 16-ary tree of sums: finds rows in proportion to their mass.

A node is always recomputed from its children, in one fixed order, and never corrected by a difference. So the tree is
a pure function of its leaves: nothing drifts, and a tree rebuilt from saved leaves has the same bits.
Importing this page imports numba; whoever may do without imports it late.
"""

import numpy as np
from numpy.typing import NDArray

from understudy.core.errors import ConfigError
from understudy.learn.compiled import SUMMED, descend, set_rows
from understudy.learn.layout import aligned_zeros

WIDTH = 16
"""Children of a node: two cache lines of float64."""

Rows = NDArray[np.int64]
Masses = NDArray[np.float64]


class SumTree:
    """Masses of `capacity` rows, all 0 at first; `find` never returns a row whose mass is 0."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ConfigError(f"a tree of {capacity} rows; give at least 1")
        sizes = [-(-capacity // WIDTH) * WIDTH]
        while sizes[-1] > WIDTH:
            sizes.append(-(-(sizes[-1] // WIDTH) // WIDTH) * WIDTH)
        self._begin = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)  # where each level begins; last the root
        self._nodes = aligned_zeros((int(self._begin[-1]) + 1,), np.dtype(np.float64))
        self._sums = aligned_zeros((sum(sizes[SUMMED:]),), np.dtype(np.float64))
        self.n_rows = 0
        """How many rows have a mass."""
        self.capacity = capacity
        self.leaves: Masses = self._nodes[:capacity]
        self.parts = self._nodes, self._sums, self._begin
        """What the compiled loops need: nodes level by level, sums from `SUMMED` on, and where each level begins."""

    @property
    def total(self) -> float:
        """The sum of all masses."""
        return float(self._nodes[-1])

    def __len__(self) -> int:
        """How many rows have a mass."""
        return self.n_rows

    def set(self, rows: Rows, masses: Masses) -> None:
        """Give these rows their masses; where a row is named twice the last one holds."""
        self.n_rows += set_rows(self.parts, rows, masses)

    def set_range(self, start: int, masses: Masses) -> None:
        """Give the rows from `start` on their masses."""
        self.set(np.arange(start, start + len(masses)), masses)

    def clear_range(self, start: int, n_rows: int) -> None:
        """Take the masses of the rows from `start` on."""
        self.set_range(start, np.zeros(n_rows))

    def find(self, values: Masses) -> Rows:
        """The rows at these distances into the total, in the shape of `values`; needs a total above 0."""
        rows = np.empty(values.size, np.int64)
        nothing = np.empty((0, 0), np.uint8)
        descend(self.parts, values.flatten(), rows, nothing, nothing)
        return rows.reshape(values.shape)
