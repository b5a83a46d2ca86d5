"""`stretch.windows_of` in one compiled pass, for replays that need numba anyway; a test holds both to equal answers."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from understudy.core.algorithm import Transitions
from understudy.core.tensors import Array
from understudy.learn.stretch import Windows, powers
from understudy.learn.sum_tree import compiled


def compiled_windows_of(columns: Mapping[str, Array], lead: int, *, needs: Transitions) -> Windows:
    """What `windows_of` answers."""
    n_rows = len(columns["row"])
    reals, wholes = np.empty((2, n_rows), np.float32), np.empty((2, n_rows), np.int32)
    may_sample = np.empty(n_rows, np.bool_)
    waiting = max(0, lead - (needs.n_step - 1))
    n_open = _windows(
        columns["row"], columns["is_first"], columns["terminated"], columns["reward"], waiting,
        powers(needs.discount, needs.n_step), needs.stack, reals, wholes, may_sample,
    )  # fmt: skip
    return Windows(reals[0], reals[1], wholes[0], wholes[1], may_sample, int(n_open))


@compiled
def _windows(
    row: Any, is_first: Any, terminated: Any, reward: Any, first: int, powers: Any, stack: int, reals: Any,
    wholes: Any, may_sample: Any,
) -> int:  # fmt: skip
    n, begin = len(powers) - 1, 0
    for i in range(len(row)):
        if i > 0 and row[i - 1] != 0:
            begin = i
        behind = i - begin
        wholes[1, i] = min(behind, stack - 1)
        may_sample[i] = row[i] == 0 and i >= first and (is_first[begin] or behind >= stack - 1)
    stop = len(row) - 1
    for i in range(len(row) - 1, -1, -1):
        if row[i] != 0:
            stop = i
        steps = min(n, stop - i)
        summed = np.float64(0.0)
        for j in range(steps):
            summed += np.float64(reward[i + j]) * powers[j]
        ends = steps > 0 and terminated[i + steps - 1]
        reals[0, i], reals[1, i] = summed, 0.0 if ends else powers[steps]
        wholes[0, i] = steps
    return len(row) - 1 - begin if row[-1] == 2 else 0
