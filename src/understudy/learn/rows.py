"""Rows of a replay: which columns of a chunk it keeps, in which form, what it refuses, and each
row's window.

A window is a row's n-step return and frame stack, computed once, when a replay takes it. A stretch
is what a replay keeps of one chunk: lead-in rows of the session's chunks before it, its own rows,
and its last row, which is never a step. A window ends at n steps or at the first row that is no
step: a final row, or a bootstrap row that no chunk continues.

    rows      s  s  s  F  s  s  B          s: step, F: final, B: bootstrap
    ahead     2  2  1  .  2  1  .          with n = 2: how many rows further its value is looked up
    behind    0  1  2  3  0  1  2          with stacks of 4: how far back its episode goes

A prioritised replay computes the same in one compiled pass (`sum_tree.compiled_windows_of`), which
takes a tenth of the time. A uniform one does without numba, whose import and first compilation take
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
from understudy.experience.chunk import OPTIONAL, Chunk, RowKind
from understudy.experience.game import GameSpec

Floats = NDArray[np.float32]
# an enum's members are slow to reach
_STEP = int(RowKind.STEP)
_BOOTSTRAP = int(RowKind.BOOTSTRAP)

TOO_LARGE = 1e20
"""No game means a number beyond this; its square would not be finite in float32."""


@dataclass(frozen=True, slots=True)
class ReplayColumn:
    """One column of a replay."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class RowLayout:
    """The columns a replay keeps for each row of one game."""

    def __init__(self, game: GameSpec, needs: Transitions) -> None:
        if len(game.action_columns) != 1:
            raise ConfigError(
                f"{game.game} has {len(game.action_columns)} action parts; a replay takes games "
                "with one, such as a "
                "single Discrete or Box space: flatten the actions with a wrapper"
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
                    f"{name!r} is no optional column; give some of "
                    f"{['raw_action', *sorted(OPTIONAL)]}"
                )
            self.columns[name] = (
                actions if name == "raw_action" else ReplayColumn(OPTIONAL[name], ())
            )
        self._as_they_are = [name for name in self.columns if name not in ("action", "action_mask")]
        self._reals = [name for name, kept in self.columns.items() if kept.dtype.kind == "f"]

    def __eq__(self, other: object) -> bool:
        """Whether rows of both look the same, so that what was compiled for one serves the
        other."""
        return isinstance(other, RowLayout) and (self.obs, self.columns) == (
            other.obs,
            other.columns,
        )

    def __hash__(self) -> int:
        return hash((self.obs, *self.columns))

    def take(self, chunk: Chunk) -> dict[str, Array]:
        """The chunk's rows in the form a replay keeps; Refused says what is wrong with them."""
        meta = chunk.meta
        columns = chunk.columns
        if (meta.game, meta.schema) != (self._game.game, self._game.schema):
            raise Refused(
                "wrong_game",
                f"a chunk of {meta.game}, schema {meta.schema[:8]}; this replay holds "
                f"{self._game.game}, schema "
                f"{self._game.schema[:8]}",
            )
        taken = {name: self._column(columns, name) for name in self._as_they_are}
        taken["action"] = self._actions(columns)
        if "action_mask" in self.columns:
            shape = (len(taken["action"]), *self.columns["action_mask"].shape)
            action_mask = columns.get("action_mask")
            taken["action_mask"] = np.ones(shape, np.bool_) if action_mask is None else action_mask
            if taken["action_mask"].shape != shape:
                found = list(taken["action_mask"].shape)
                raise Refused("bad_columns", f"'legal' has shape {found}; wanted {list(shape)}")
        _check_numbers("reward", columns["reward"])
        for name in self._reals:
            _check_numbers(name, taken[name])
        return taken

    def _column(self, columns: Mapping[str, Array], name: str) -> Array:
        kept = self.columns[name]
        column = columns.get(name)
        if (
            column is None
            or column.dtype != kept.dtype
            or len(column.shape[1:]) < len(kept.shape) > 1
        ):
            found = "nothing" if column is None else f"{column.dtype}{list(column.shape)}"
            raise Refused(
                "bad_columns",
                f"{name!r} is {found}; wanted {kept.dtype} with {list(kept.shape)} per row",
            )
        if column.shape[1:] == kept.shape:
            return column
        if name != "raw_action" or math.prod(column.shape[1:]) != self._size:
            raise Refused(
                "bad_columns",
                f"{name!r} has {list(column.shape[1:])} per row; wanted {list(kept.shape)}",
            )
        return column.reshape(len(column), self._size)

    def _actions(self, columns: Mapping[str, Array]) -> Array:
        space = self._game.action_columns[self._action_name]
        column = columns.get(self._action_name)
        if column is None or column.dtype != space.dtype or column.shape[1:] != space.shape:
            found = "nothing" if column is None else f"{column.dtype}{list(column.shape)}"
            raise Refused(
                "bad_columns",
                f"{self._action_name!r} is {found}; wanted {space.dtype} with {list(space.shape)} "
                "per row",
            )
        if self.discrete is None:
            return column.reshape(len(column), self._size).astype(np.float32)
        if self.discrete.start == 0 and column.dtype == np.int32:
            return column
        # Padding of final and bootstrap rows may lie outside; nobody reads it, but it must fit the
        # type.
        return np.asarray(column - self.discrete.start, np.int32)


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Zeros that begin at a pair of cache lines, so that a record that fits into one never lies
    in two."""
    size = math.prod(shape) * dtype.itemsize
    spare = np.zeros(size + 128, np.uint8)
    skip = -spare.ctypes.data % 128
    return spare[skip : skip + size].view(dtype).reshape(shape)


def _check_numbers(name: str, column: Array) -> None:
    # Where the sum of squares is below the bound's square, so is each of them: one pass for most
    # columns.
    if float(np.vdot(column, column)) <= TOO_LARGE**2:
        return
    # A NaN makes the largest number NaN, which is not below the bound either.
    if not (column.max() <= TOO_LARGE and column.min() >= -TOO_LARGE):
        raise Refused(
            "not_finite", f"{name!r} holds NaN, infinity or a number beyond {TOO_LARGE:g}"
        )


# --- Windows --------------------------------------------------------------------------------------


# A row's small facts lie together, half a cache line, so that a draw fetches them at once.
RETURN = 0
DISCOUNT = 1
ACTION = 2
REACH = 3
STAMP = 4
WEIGHT = 5
WIDTH = 8


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
    def discount(self) -> Floats:
        """What the value at the window's end counts: discount^steps, 0 where the game
        terminated."""
        return self.facts[:, DISCOUNT]

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
    """The windows of rows whose first `lead` are lead-in; short where the stretch ends, as if
    nothing followed.

    The rows must obey `Chunk.validate`: an episode begins exactly behind a row that is no step.
    """
    row = columns["row"]
    n_rows = len(columns["row"])
    at = np.arange(n_rows)
    stops = np.flatnonzero(row)
    counts = stops.copy()  # how many rows each of them ends
    counts[1:] -= stops[:-1]
    counts[0] += 1
    ahead = np.minimum(np.repeat(stops, counts) - at, needs.n_step)
    may_sample = row == _STEP
    # Lead-in rows that do not wait were sampleable where they came from.
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
    return Windows(facts, n_rows - 1 - begin if row[-1] == _BOOTSTRAP else 0)


def stack_rows(rows: NDArray[np.int64], behind: NDArray[Any], stack: int) -> NDArray[np.int64]:
    """The rows of each stack, oldest first, [..., stack]; before a reset the episode's first row
    is repeated."""
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
