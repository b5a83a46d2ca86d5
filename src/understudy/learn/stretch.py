"""The windows of a stretch: for each of its rows what an update needs to know, computed once, when it is inserted.

A stretch is what a replay keeps of one chunk: lead-in rows of the session's chunks before it, its own rows, and its
last row, which is never a step. The rules are those of `core.windows`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from understudy.core.algorithm import Transitions
from understudy.core.chunk import RowKind
from understudy.core.tensors import Array

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Windows:
    """One entry per row of the stretch; rows that are no steps have entries without meaning."""

    returns: Floats
    factor: Floats
    ahead: NDArray[Any]  # how many rows further the row to bootstrap from lies
    behind: NDArray[Any]  # how many rows further back the same episode is known to go, at most stack - 1
    may_sample: NDArray[np.bool_]
    n_open: int
    """Rows before the last one that belong to the episode still open there; 0 where it ended."""


def windows_of(columns: Mapping[str, Array], lead: int, *, needs: Transitions) -> Windows:
    """The windows of rows whose first `lead` are lead-in; short where the stretch ends, as if nothing followed."""
    is_step, is_first = columns["row"] == RowKind.STEP, columns["is_first"]
    n_rows = len(is_step)
    at = np.arange(n_rows)
    stop = np.minimum.accumulate(np.where(is_step, n_rows, at)[::-1])[::-1]
    ahead = np.minimum(needs.n_step, stop - at)
    begins = is_first.copy()
    begins[0] = True
    begins[1:] |= ~is_step[:-1]
    begin = np.maximum.accumulate(np.where(begins, at, 0))
    may_sample = is_step
    # Lead-in rows that do not wait were sampleable where they came from.
    may_sample[: max(0, lead - (needs.n_step - 1))] = False
    behind = at - begin
    if needs.stack > 1:
        may_sample &= is_first[begin] | (behind >= needs.stack - 1)
    return Windows(
        returns=_returns(columns["reward"], ahead, needs=needs),
        factor=np.where(columns["terminated"][at + ahead - 1], 0.0, _powers(needs)[ahead]).astype(np.float32),
        ahead=ahead,
        behind=np.minimum(behind, needs.stack - 1),
        may_sample=may_sample,
        n_open=int(behind[-1]) if columns["row"][-1] == RowKind.BOOTSTRAP else 0,
    )


def _powers(needs: Transitions) -> NDArray[np.float64]:
    return np.power(float(needs.discount), np.arange(needs.n_step + 1))


def _returns(reward: Array, ahead: NDArray[Any], *, needs: Transitions) -> Floats:
    rewards = reward.astype(np.float64)
    returns = rewards.copy()
    for step, power in enumerate(_powers(needs)[1:-1].tolist(), start=1):
        returns[:-step] += np.where(ahead[:-step] > step, rewards[step:] * power, 0.0)
    return returns.astype(np.float32)
