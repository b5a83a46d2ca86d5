"""What a prioritised replay does with rows, in one compiled pass each instead of ten over short arrays."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from understudy.core.algorithm import Transitions
from understudy.core.tensors import Array
from understudy.learn import compiled
from understudy.learn.ring import Edit
from understudy.learn.sum_tree import SumTree
from understudy.learn.windows import WIDTH, Windows, powers

Rows = NDArray[np.int64]
Floats = NDArray[np.float32]
Lines = tuple[Floats, NDArray[np.int32], NDArray[np.uint8], NDArray[np.uint8]]
"""All rows' facts as floats, whole numbers and bytes, and the bytes of an observation column, to be fetched early."""


def compiled_windows_of(columns: Mapping[str, Array], lead: int, *, needs: Transitions) -> Windows:
    """What `windows_of` answers."""
    facts = np.empty((len(columns["row"]), WIDTH), np.float32)
    small = columns["row"], columns["is_first"], columns["terminated"], columns["reward"], columns["weight"]
    first = max(0, lead - (needs.n_step - 1))
    factors, out = powers(needs.discount, needs.n_step), (facts, facts.view(np.int32))
    n_open = compiled.windows(small, first, factors, needs.stack, out)
    return Windows(facts, n_open)


def draw(masses: SumTree, chance: NDArray[np.float64], *, beta: float, lines: Lines) -> tuple[Array, ...]:
    """Rows for numbers from 0 to 1, [k, batch], and what is known of them: what `replay.Found` holds."""
    places = np.empty((2, *chance.shape), np.int64)
    reals, wholes = np.empty((3, *chance.shape), np.float32), np.empty((2, *chance.shape), np.int32)
    compiled.draw(masses.parts, chance, beta, lines, (places, reals, wholes))
    return places, *reals, *wholes


def feed_back(
    masses: SumTree, rows: Rows, *, stamps: Array, priorities: Array, lines: Lines, rule: Array
) -> tuple[int, float]:
    """Give rows that still hold what was drawn new masses; how many priorities made no sense, and the largest."""
    more, n_bad, largest = compiled.feed_back(masses.parts, *lines[:2], rows, stamps, priorities, rule)
    masses.n_rows += int(more)
    return int(n_bad), largest


def weigh(masses: SumTree, edit: Edit, *, rule: Array, missing: float) -> float:
    """Carry out an edit; the largest of its priorities."""
    more, largest = compiled.weigh(masses.parts, edit.start, edit.weight, edit.priority, rule, missing)
    masses.n_rows += int(more)
    return largest
