"""Windows: n-step returns and frame stacks of a session's rows, computed once, when a replay takes them.

A stretch is what a replay keeps of one chunk: lead-in rows of the session's chunks before it, its own rows, and its
last row, which is never a step. A window ends at n steps or at the first row that is no step: a final row, or a
bootstrap row that no chunk continues.

    rows      s  s  s  F  s  s  B          s: step, F: final, B: bootstrap
    ahead     2  2  1  .  2  1  .          with n = 2: how many rows further its value is looked up
    behind    0  1  2  3  0  1  2          with stacks of 4: how far back its episode goes

A prioritised replay computes the same in one compiled pass (`sum_tree.compiled_windows_of`), which takes a tenth of the
time. A uniform one does without numba, whose import and first compilation take longer than a short run.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from understudy.core.algorithm import Transitions
from understudy.core.chunk import RowKind
from understudy.core.tensors import Array

Floats = NDArray[np.float32]
_STEP, _BOOTSTRAP = int(RowKind.STEP), int(RowKind.BOOTSTRAP)  # an enum's members are slow to reach


# A row's small facts lie together, half a cache line, so that a draw fetches them at once.
RETURN, FACTOR, ACTION, REACH, STAMP, WEIGHT, WIDTH = 0, 1, 2, 3, 4, 5, 8


class Windows(NamedTuple):
    """One entry per row of the stretch; rows that are no steps have entries without meaning."""

    facts: Floats
    """[rows, WIDTH]; action and stamp are not filled in yet."""
    n_open: int
    """Rows before the last one that belong to the episode still open there; 0 where it ended."""

    @property
    def returns(self) -> Floats:
        """The discounted sum of the window's rewards."""
        return self.facts[:, RETURN]

    @property
    def factor(self) -> Floats:
        """What the value at the window's end counts: discount^steps, 0 where the game terminated."""
        return self.facts[:, FACTOR]

    @property
    def weight(self) -> Floats:
        """The row's weight; 0 where it may not be sampled."""
        return self.facts[:, WEIGHT]

    @property
    def ahead(self) -> NDArray[np.int32]:
        """How many rows further the row to bootstrap from lies."""
        return self.facts.view(np.int32)[:, REACH] & 0xFFFF

    @property
    def behind(self) -> NDArray[np.int32]:
        """How many rows further back the same episode goes, as far as a stack may look."""
        return self.facts.view(np.int32)[:, REACH] >> 16


def windows_of(columns: Mapping[str, Array], lead: int, *, needs: Transitions) -> Windows:
    """The windows of rows whose first `lead` are lead-in; short where the stretch ends, as if nothing followed.

    The rows must obey `Chunk.validate`: an episode begins exactly behind a row that is no step.
    """
    row, n_rows = columns["row"], len(columns["row"])
    at, stops = np.arange(n_rows), np.flatnonzero(row)
    counts = stops.copy()  # how many rows each of them ends
    counts[1:] -= stops[:-1]
    counts[0] += 1
    ahead = np.minimum(np.repeat(stops, counts) - at, needs.n_step)
    may_sample = row == _STEP
    # Lead-in rows that do not wait were sampleable where they came from.
    may_sample[: max(0, lead - (needs.n_step - 1))] = False
    begin = int(stops[-2]) + 1 if len(stops) > 1 else 0
    factor = powers(needs.discount, needs.n_step).astype(np.float32).take(ahead)
    factor[columns["terminated"].take(at + ahead - 1)] = 0.0
    reach = ahead
    if needs.stack > 1:
        begins = np.concatenate([[0], stops[:-1] + 1])
        behind = at - np.repeat(begins, counts)
        may_sample &= np.repeat(columns["is_first"][begins], counts) | (behind >= needs.stack - 1)
        reach = ahead | np.minimum(behind, needs.stack - 1) << 16
    facts = np.zeros((n_rows, WIDTH), np.float32)
    facts[:, RETURN], facts[:, FACTOR] = _returns(columns["reward"], ahead, needs=needs), factor
    facts[:, WEIGHT] = columns["weight"] * may_sample
    facts.view(np.int32)[:, REACH] = reach
    return Windows(facts, n_rows - 1 - begin if row[-1] == _BOOTSTRAP else 0)


def stack_rows(rows: NDArray[np.int64], behind: NDArray[Any], stack: int) -> NDArray[np.int64]:
    """The rows of each stack, oldest first, [..., stack]; before a reset the episode's first row is repeated."""
    return np.asarray(rows[..., None] - np.minimum(np.arange(stack - 1, -1, -1), behind[..., None]))


@lru_cache
def powers(discount: float, n: int) -> NDArray[np.float64]:
    """discount^0 to discount^n."""
    return np.power(float(discount), np.arange(n + 1))


def _returns(reward: Array, ahead: NDArray[Any], *, needs: Transitions) -> Array:
    if needs.n_step == 1:
        return reward
    rewards = reward.astype(np.float64)
    returns = rewards.copy()
    for step, power in enumerate(powers(needs.discount, needs.n_step)[1:-1].tolist(), start=1):
        returns[:-step] += rewards[step:] * ((ahead[:-step] > step) * power)
    return returns.astype(np.float32)
