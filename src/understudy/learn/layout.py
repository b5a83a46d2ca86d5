"""RowLayout: which columns of a chunk a replay keeps, in which form, and what it refuses to take."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from understudy.core.algorithm import Transitions
from understudy.core.chunk import OPTIONAL, Chunk
from understudy.core.errors import ConfigError, Refused
from understudy.core.game import GameSpec
from understudy.core.tensors import Array

TOO_LARGE = 1e20
"""No game means a number beyond this; its square would not be finite in float32."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One column of a replay."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class RowLayout:
    """The columns a replay keeps for each row of one game."""

    def __init__(self, game: GameSpec, needs: Transitions) -> None:
        if len(game.action_columns) != 1:
            raise ConfigError(
                f"{game.game} has {len(game.action_columns)} action parts; a replay takes games with one, such as a "
                "single Discrete or Box space: flatten the actions with a wrapper"
            )
        self._game = game
        ((self._action_name, space),) = game.action_columns.items()
        self.discrete = game.discrete
        self._size = math.prod(space.shape)
        self.extras = needs.extras
        self.obs = tuple(game.obs_columns)
        self.columns: dict[str, Kept] = {name: Kept(part.dtype, part.shape) for name, part in game.obs_columns.items()}
        discrete, actions = game.discrete, Kept(np.dtype(np.float32), (self._size,))
        self.columns["action"] = Kept(np.dtype(np.int32), ()) if discrete else actions
        if discrete is not None and game.has_legal:
            self.columns["legal"] = Kept(np.dtype(np.bool_), (discrete.n,))
        for name in needs.extras:
            if name != "raw_action" and name not in OPTIONAL:
                raise ConfigError(f"{name!r} is no optional column; give some of {['raw_action', *sorted(OPTIONAL)]}")
            self.columns[name] = actions if name == "raw_action" else Kept(OPTIONAL[name], ())
        self._as_they_are = [name for name in self.columns if name not in ("action", "legal")]
        self._reals = [name for name, kept in self.columns.items() if kept.dtype.kind == "f"]

    def __eq__(self, other: object) -> bool:
        """Whether rows of both look the same, so that what was compiled for one serves the other."""
        return isinstance(other, RowLayout) and (self.obs, self.columns) == (other.obs, other.columns)

    def __hash__(self) -> int:
        return hash((self.obs, *self.columns))

    def take(self, chunk: Chunk) -> dict[str, Array]:
        """The chunk's rows in the form a replay keeps; Refused says what is wrong with them."""
        meta, columns = chunk.meta, chunk.columns
        if (meta.game, meta.schema) != (self._game.game, self._game.schema):
            raise Refused(
                "wrong_game",
                f"a chunk of {meta.game}, schema {meta.schema[:8]}; this replay holds {self._game.game}, schema "
                f"{self._game.schema[:8]}",
            )
        taken = {name: self._column(columns, name) for name in self._as_they_are}
        taken["action"] = self._actions(columns)
        if "legal" in self.columns:
            taken["legal"] = self._legal(columns, len(taken["action"]))
        _check_numbers("reward", columns["reward"])
        for name in self._reals:
            _check_numbers(name, taken[name])
        return taken

    def _column(self, columns: Mapping[str, Array], name: str) -> Array:
        kept, column = self.columns[name], columns.get(name)
        if column is None or column.dtype != kept.dtype or len(column.shape[1:]) < len(kept.shape) > 1:
            found = "nothing" if column is None else f"{column.dtype}{list(column.shape)}"
            raise Refused("bad_columns", f"{name!r} is {found}; wanted {kept.dtype} with {list(kept.shape)} per row")
        if column.shape[1:] == kept.shape:
            return column
        if name != "raw_action" or math.prod(column.shape[1:]) != self._size:
            raise Refused("bad_columns", f"{name!r} has {list(column.shape[1:])} per row; wanted {list(kept.shape)}")
        return column.reshape(len(column), self._size)

    def _actions(self, columns: Mapping[str, Array]) -> Array:
        space, column = self._game.action_columns[self._action_name], columns.get(self._action_name)
        if column is None or column.dtype != space.dtype or column.shape[1:] != space.shape:
            found = "nothing" if column is None else f"{column.dtype}{list(column.shape)}"
            raise Refused(
                "bad_columns",
                f"{self._action_name!r} is {found}; wanted {space.dtype} with {list(space.shape)} per row",
            )
        if self.discrete is None:
            return column.reshape(len(column), self._size).astype(np.float32)
        if self.discrete.start == 0 and column.dtype == np.int32:
            return column
        # Padding of final and bootstrap rows may lie outside; nobody reads it, but it must fit the type.
        return np.asarray(column - self.discrete.start, np.int32)

    def _legal(self, columns: Mapping[str, Array], n_rows: int) -> Array:
        legal = columns.get("legal")
        shape = (n_rows, *self.columns["legal"].shape)
        if legal is None:
            return np.ones(shape, np.bool_)
        if legal.shape != shape:
            raise Refused("bad_columns", f"'legal' has shape {list(legal.shape)}; wanted {list(shape)}")
        return legal


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Zeros that begin at a pair of cache lines, so that a record that fits into one never lies in two."""
    size = math.prod(shape) * dtype.itemsize
    spare = np.zeros(size + 128, np.uint8)
    skip = -spare.ctypes.data % 128
    return spare[skip : skip + size].view(dtype).reshape(shape)


def _check_numbers(name: str, column: Array) -> None:
    # Where the sum of squares is below the bound's square, so is each of them: one pass for most columns.
    if float(np.vdot(column, column)) <= TOO_LARGE**2:
        return
    # A NaN makes the largest number NaN, which is not below the bound either.
    if not (column.max() <= TOO_LARGE and column.min() >= -TOO_LARGE):
        raise Refused("not_finite", f"{name!r} holds NaN, infinity or a number beyond {TOO_LARGE:g}")
