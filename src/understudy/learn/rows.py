"""Rows of a replay: the columns it stores, the chunks it rejects, and each row's window.

A window is a row's n-step return and frame stack, computed once, on insertion. A span holds the
rows of one chunk in a replay: lead-in rows from the session's previous chunks, its own rows, and
its last row, which is never a step. A window ends after n steps, or at the first row that is not a
step: a final row, or a bootstrap row that no chunk continues.

    rows      s  s  s  F  s  s  B          s: step, F: final, B: bootstrap
    ahead     2  2  1  .  2  1  .          with n = 2: rows to the one it bootstraps from
    behind    0  1  2  3  0  1  2          with stacks of 4: rows back to the episode's first

A prioritised replay computes the same in one compiled pass (`sum_tree.compiled_windows_of`), in a
tenth of the time. A uniform replay does not use numba, whose import and first compilation take
longer than a short run.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from understudy.algorithm import Transitions
from understudy.core.errors import ConfigError, Refused
from understudy.core.tensors import Array
from understudy.core.wording import joined
from understudy.experience.chunk import OPTIONAL, Chunk, RowKind
from understudy.experience.game import GameSpec
from understudy.experience.spaces import MAX_NUMBER, check_recordable

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ReplayColumn:
    """One column of a replay."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class RowLayout:
    """The columns that a replay stores for one game."""

    def __init__(self, game: GameSpec, needs: Transitions) -> None:
        if len(game.action_columns) != 1:
            raise ConfigError(
                f"{game.game} has {len(game.action_columns)} action parts; a replay supports one, "
                "such as a single Discrete or Box space; flatten the actions with a wrapper"
            )
        self._game = game
        ((self._action_name, space),) = game.action_columns.items()
        self.discrete = game.discrete
        self._size = math.prod(space.shape)
        self.extras = needs.extras
        self.obs = tuple(game.obs_columns)
        self.columns: dict[str, ReplayColumn] = {
            name: ReplayColumn(part.dtype, part.shape) for name, part in game.obs_columns.items()
        }
        discrete = game.discrete
        actions = ReplayColumn(np.dtype(np.float32), (self._size,))
        self.columns["action"] = ReplayColumn(np.dtype(np.int32), ()) if discrete else actions
        if discrete is not None and game.has_action_mask:
            self.columns["action_mask"] = ReplayColumn(np.dtype(np.bool_), (discrete.n,))
        for name in needs.extras:
            if name != "raw_action" and name not in OPTIONAL:
                raise ConfigError(
                    f"{name!r} is not an optional column; choose from "
                    f"{joined(['raw_action', *sorted(OPTIONAL)])}"
                )
            self.columns[name] = (
                actions if name == "raw_action" else ReplayColumn(OPTIONAL[name], ())
            )
        self._unchanged = [name for name in self.columns if name not in ("action", "action_mask")]
        self._reals = [name for name, column in self.columns.items() if column.dtype.kind == "f"]

    def __eq__(self, other: object) -> bool:
        """Whether both have the same columns, so that they can share compiled programs."""
        return isinstance(other, RowLayout) and (self.obs, self.columns) == (
            other.obs,
            other.columns,
        )

    def __hash__(self) -> int:
        return hash((self.obs, *self.columns))

    def take(self, chunk: Chunk) -> dict[str, Array]:
        """The chunk's rows in the replay's format; Refused if they are invalid."""
        meta = chunk.meta
        columns = chunk.columns
        if (meta.game, meta.schema) != (self._game.game, self._game.schema):
            raise Refused(
                "wrong_game",
                f"the chunk belongs to {meta.game}, schema {meta.schema[:8]}; this replay stores "
                f"{self._game.game}, schema {self._game.schema[:8]}",
            )
        rows = {name: self._column(columns, name) for name in self._unchanged}
        rows["action"] = self._actions(columns)
        if "action_mask" in self.columns:
            shape = (len(rows["action"]), *self.columns["action_mask"].shape)
            action_mask = columns.get("action_mask")
            rows["action_mask"] = np.ones(shape, np.bool_) if action_mask is None else action_mask
            if rows["action_mask"].shape != shape:
                got = list(rows["action_mask"].shape)
                raise Refused(
                    "bad_columns", f"'action_mask' has shape {got}; expected {list(shape)}"
                )
        _check_numbers("reward", columns["reward"])
        for name in self._reals:
            _check_numbers(name, rows[name])
        return rows

    def _column(self, columns: Mapping[str, Array], name: str) -> Array:
        expected = self.columns[name]
        column = columns.get(name)
        if (
            column is None
            or column.dtype != expected.dtype
            or len(column.shape[1:]) < len(expected.shape) > 1
        ):
            got = (
                "missing"
                if column is None
                else f"{column.dtype} with {list(column.shape[1:])} per row"
            )
            raise Refused(
                "bad_columns",
                f"{name!r} is {got}; expected {expected.dtype} with {list(expected.shape)} per row",
            )
        if column.shape[1:] == expected.shape:
            return column
        if name != "raw_action" or math.prod(column.shape[1:]) != self._size:
            raise Refused(
                "bad_columns",
                f"{name!r} has {list(column.shape[1:])} per row; expected {list(expected.shape)}",
            )
        return column.reshape(len(column), self._size)

    def _actions(self, columns: Mapping[str, Array]) -> Array:
        space = self._game.action_columns[self._action_name]
        column = columns.get(self._action_name)
        if column is None or column.dtype != space.dtype or column.shape[1:] != space.shape:
            got = (
                "missing"
                if column is None
                else f"{column.dtype} with {list(column.shape[1:])} per row"
            )
            raise Refused(
                "bad_columns",
                f"{self._action_name!r} is {got}; expected {space.dtype} with {list(space.shape)} "
                "per row",
            )
        if self.discrete is None:
            return column.reshape(len(column), self._size).astype(np.float32)
        if self.discrete.start == 0 and column.dtype == np.int32:
            return column
        # Padding in final and bootstrap rows may be out of range; it is never read, but must fit
        # the type.
        return np.asarray(column - self.discrete.start, np.int32)


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Zeros aligned to a pair of cache lines, so that small records never straddle two lines."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.zeros(size + 128, np.uint8)
    offset = -buffer.ctypes.data % 128
    return buffer[offset : offset + size].view(dtype).reshape(shape)


def _check_numbers(name: str, column: Array) -> None:
    # If the sum of squares is below the squared bound, so is each square: one pass for most
    # columns.
    if float(np.vdot(column, column)) <= MAX_NUMBER**2:
        return
    check_recordable(name, column)


# --- Windows --------------------------------------------------------------------------------------


# A row's scalar facts fill half a cache line, so that a draw fetches them at once.
RETURN = 0
DISCOUNT = 1
ACTION = 2
REACH = 3
STAMP = 4
WEIGHT = 5
WIDTH = 8

# The numbers of a prioritised replay: the exponent and the bounds of priorities, the largest
# priority of the last period and of this one, and the priorities that this one has had so far.
# A period has as many priorities as the replay has rows. New rows without a priority get the larger
# of the two largest: one huge priority lifts them for at most two periods, not for ever.
ALPHA = 0
LOW = 1
HIGH = 2
BEFORE = 3
NOW = 4
COUNT = 5
PERIOD = 6


class Windows(NamedTuple):
    """One entry per row of a span; entries of rows that are not steps have no meaning."""

    facts: Floats
    """[rows, WIDTH]; action and stamp are filled in later."""
    n_open: int
    """Steps of the episode that is still open at the span's end; 0 if the last one has ended."""

    @property
    def returns(self) -> Floats:
        """The discounted sum of the window's rewards."""
        return self.facts[:, RETURN]

    @property
    def discount(self) -> Floats:
        """The discount of the value at the window's end: discount^steps, 0 if terminated."""
        return self.facts[:, DISCOUNT]

    @property
    def weight(self) -> Floats:
        """The row's weight; 0 if it may not be sampled."""
        return self.facts[:, WEIGHT]

    @property
    def ahead(self) -> NDArray[np.int32]:
        """The number of rows to the one to bootstrap from."""
        return self.facts.view(np.int32)[:, REACH] & 0xFFFF

    @property
    def behind(self) -> NDArray[np.int32]:
        """The number of earlier rows of the same episode, up to the size of a stack."""
        return self.facts.view(np.int32)[:, REACH] >> 16


def windows_of(columns: Mapping[str, Array], lead: int, *, needs: Transitions) -> Windows:
    """The windows of a span whose first `lead` rows are lead-in; shortened at the span's end.

    The rows must obey `Chunk.validate`: an episode starts right after a row that is not a step.
    """
    row = columns["row"]
    n_rows = len(columns["row"])
    at = np.arange(n_rows)
    stops = np.flatnonzero(row)
    counts = stops.copy()  # rows in each episode
    counts[1:] -= stops[:-1]
    counts[0] += 1
    ahead = np.minimum(np.repeat(stops, counts) - at, needs.n_step)
    may_sample = row == RowKind.STEP
    # Lead-in rows that do not wait are sampleable in their own span.
    may_sample[: max(0, lead - (needs.n_step - 1))] = False
    begin = int(stops[-2]) + 1 if len(stops) > 1 else 0
    discount = powers(needs.discount, needs.n_step).astype(np.float32).take(ahead)
    discount[columns["terminated"].take(at + ahead - 1)] = 0.0
    reach = ahead
    if needs.stack > 1:
        begins = np.concatenate([[0], stops[:-1] + 1])
        behind = at - np.repeat(begins, counts)
        may_sample &= np.repeat(columns["is_first"][begins], counts) | (behind >= needs.stack - 1)
        reach = ahead | np.minimum(behind, needs.stack - 1) << 16
    facts = np.zeros((n_rows, WIDTH), np.float32)
    facts[:, RETURN] = _returns(columns["reward"], ahead, needs=needs)
    facts[:, DISCOUNT] = discount
    facts[:, WEIGHT] = columns["weight"] * may_sample
    facts.view(np.int32)[:, REACH] = reach
    return Windows(facts, n_rows - 1 - begin if row[-1] == RowKind.BOOTSTRAP else 0)


def stack_rows(rows: NDArray[np.int64], behind: NDArray[Any], stack: int) -> NDArray[np.int64]:
    """The rows of each stack, oldest first, [..., stack]; the episode's first row is repeated."""
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
