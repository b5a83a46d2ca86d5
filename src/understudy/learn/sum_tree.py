"""A 16-ary tree of sums: finds rows in proportion to their mass.

A node is always recomputed from its children, in one fixed order, and never corrected by a difference. So the tree is
a pure function of its leaves: nothing drifts, and a tree rebuilt from saved leaves has the same bits.
Importing this page imports numba; whoever may do without imports it late.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from understudy.core.errors import ConfigError

WIDTH = 16
"""Children of a node: two cache lines of float64."""

Rows = NDArray[np.int64]
Masses = NDArray[np.float64]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """The function, compiled when it is first called, and kept on disk where there is a place for it."""
    machine_code: Any
    try:
        machine_code = numba.njit(function, cache=True, nogil=True, error_model="numpy")
    except RuntimeError:  # nowhere to write a cache: a read-only install for a user without a home
        machine_code = numba.njit(function, nogil=True, error_model="numpy")
    return cast(_Function, machine_code)


class SumTree:
    """Masses of `capacity` rows, all 0 at first; `find` never returns a row whose mass is 0."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ConfigError(f"a tree of {capacity} rows; give at least 1")
        sizes = [-(-capacity // WIDTH) * WIDTH]
        while sizes[-1] > WIDTH:
            sizes.append(-(-(sizes[-1] // WIDTH) // WIDTH) * WIDTH)
        self._begin = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)  # where each level begins; last the root
        self._nodes = _aligned(int(self._begin[-1]) + 1)
        self._counts = np.zeros(1, np.int64)
        self.capacity = capacity
        self.leaves: Masses = self._nodes[:capacity]

    @property
    def total(self) -> float:
        """The sum of all masses."""
        return float(self._nodes[-1])

    def __len__(self) -> int:
        """How many rows have a mass."""
        return int(self._counts[0])

    def set(self, rows: Rows, masses: Masses, *, only_positive: bool = False) -> None:
        """Give these rows their masses; where a row is named twice the last one holds.

        Rows below 0 are left out; `only_positive` leaves those out, too, that have no mass now.
        """
        _set(self._nodes, self._begin, self._counts, rows, masses, only_positive)

    def set_range(self, start: int, masses: Masses) -> None:
        """Give the rows from `start` on their masses."""
        _set_range(self._nodes, self._begin, self._counts, start, masses)

    def clear_range(self, start: int, n_rows: int) -> None:
        """Take the masses of the rows from `start` on."""
        _set_range(self._nodes, self._begin, self._counts, start, np.zeros(n_rows))

    def find(self, values: Masses) -> Rows:
        """The rows at these distances into the total, in the shape of `values`; needs a total above 0."""
        rows = np.empty(values.shape, np.int64)
        _find(self._nodes, self._begin, values.ravel(), rows.ravel())
        return rows


def _aligned(size: int) -> Masses:
    """Zeros that begin at a pair of cache lines, so that a node's children take one pair, which is fetched as one."""
    spare = np.zeros(size + 16, np.float64)
    skip = (-spare.ctypes.data % 128) // 8
    return spare[skip : skip + size]


@compiled
def _set(nodes: Any, begin: Any, counts: Any, rows: Any, masses: Any, only_positive: bool) -> None:
    parents = np.empty(len(rows), np.int64)
    n = 0
    for i in range(len(rows)):
        row = rows[i]
        if row < 0 or (only_positive and not nodes[row] > 0):
            continue
        counts[0] += int(masses[i] > 0) - int(nodes[row] > 0)
        nodes[row] = masses[i]
        if n == 0 or parents[n - 1] != row >> 4:
            parents[n] = row >> 4
            n += 1
    for level in range(len(begin) - 1):
        # Rows mostly come sorted, so that neighbours share parents and the list shrinks on its way up.
        kept = 0
        for i in range(n):
            parent = parents[i]
            at = begin[level] + (parent << 4)
            a, b, c, d = nodes[at], nodes[at + 1], nodes[at + 2], nodes[at + 3]
            for j in range(4, 16, 4):
                a += nodes[at + j]
                b += nodes[at + j + 1]
                c += nodes[at + j + 2]
                d += nodes[at + j + 3]
            nodes[begin[level + 1] + parent] = (a + b) + (c + d)
            if kept == 0 or parents[kept - 1] != parent >> 4:
                parents[kept] = parent >> 4
                kept += 1
        n = kept


@compiled
def _set_range(nodes: Any, begin: Any, counts: Any, start: Any, masses: Any) -> None:
    if len(masses) == 0:
        return
    for i in range(len(masses)):
        counts[0] += int(masses[i] > 0) - int(nodes[start + i] > 0)
        nodes[start + i] = masses[i]
    first, last = start >> 4, (start + len(masses) - 1) >> 4
    for level in range(len(begin) - 1):
        for parent in range(first, last + 1):
            at = begin[level] + (parent << 4)
            a, b, c, d = nodes[at], nodes[at + 1], nodes[at + 2], nodes[at + 3]
            for j in range(4, 16, 4):
                a += nodes[at + j]
                b += nodes[at + j + 1]
                c += nodes[at + j + 2]
                d += nodes[at + j + 3]
            nodes[begin[level + 1] + parent] = (a + b) + (c + d)
        first, last = first >> 4, last >> 4


@compiled
def _find(nodes: Any, begin: Any, values: Any, rows: Any) -> None:
    left, node = values.copy(), np.zeros(len(rows), np.uint64)
    one, two, three, four = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4)  # unsigned: no look for minus
    # Level by level over the whole batch, so that loads do not wait for one another. In a node first the right four of
    # its children, then the right one of the four: without branches, and in two short chains of sums.
    for level in range(len(begin) - 2, -1, -1):
        touched = 0.0
        if level < 2:
            # The lower levels are larger than the cache: a short loop that waits for nothing fetches their lines first.
            for i in range(len(rows)):
                at = np.uint64(begin[level]) + (node[i] << four)
                touched += nodes[at] + nodes[at + (two << two)]
        if touched < 0:
            rows[0] = -1  # never; it keeps the loop above from being left out as useless
        for i in range(len(rows)):
            value = left[i]
            at = np.uint64(begin[level]) + (node[i] << four)
            b, c = at + four, at + (two << two)
            to_b = (nodes[at] + nodes[at + one]) + (nodes[at + two] + nodes[at + three])
            to_c = to_b + ((nodes[b] + nodes[b + one]) + (nodes[b + two] + nodes[b + three]))
            to_d = to_c + ((nodes[c] + nodes[c + one]) + (nodes[c + two] + nodes[c + three]))
            child = (np.uint64(value >= to_b) + np.uint64(value >= to_c) + np.uint64(value >= to_d)) << two
            value -= to_d if value >= to_d else (to_c if value >= to_c else (to_b if value >= to_b else 0.0))
            at += child
            to_1 = nodes[at]
            to_2 = to_1 + nodes[at + one]
            to_3 = to_2 + nodes[at + two]
            inner = np.uint64(value >= to_1) + np.uint64(value >= to_2) + np.uint64(value >= to_3)
            at, child = at + inner, child + inner
            value -= to_3 if value >= to_3 else (to_2 if value >= to_2 else (to_1 if value >= to_1 else 0.0))
            if not nodes[at] > 0:  # rounding led past the end: the last child that has a mass, and its last one
                while not nodes[at] > 0:
                    at, child = at - one, child - one
                value = nodes[at]
            node[i] = (node[i] << four) + child
            left[i] = value
    for i in range(len(rows)):
        rows[i] = np.int64(node[i])
