"""Validates a game's values for one row and writes them into preallocated columns.

Arrays of the right dtype and shape take a fast path. Lists, scalars and other dtypes are converted
only if no value changes, except that a float may be rounded to the column's precision.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from math import hypot
from typing import Any

import numpy as np

from understudy.core.errors import Refused
from understudy.core.tensors import Array
from understudy.core.wording import joined, sized
from understudy.experience.game import GameSpec
from understudy.experience.spaces import MAX_NUMBER, Box, Space, check_recordable

_SHORT = 32
"""Up to this length, Python's hypot is faster than a call into NumPy."""
_NUMBERS = frozenset({bool, int, float, np.bool_, np.float32, np.float64, np.int32, np.int64})
"""The usual types of a list's elements; a list that has only these needs no further check."""
_MAX_DEPTH = 32

Columns = Sequence[Array] | Sequence[list[Any]]
Write = Callable[[Columns, int, Any], None]
"""Writes one validated value into a row of its columns, or raises Refused.

After Refused, the content of the row is undefined. If a column is a list, the validated array
itself is stored in it.
"""

Read = Callable[[Any], dict[str, Array]]
"""Returns the validated columns of one value, or raises Refused."""


def obs_writer(spec: GameSpec) -> Write:
    """A writer for observations of this game: one array, or a mapping or tuple with its parts."""
    return _tree_writer("obs", spec.obs, check_bounds=False)


def obs_reader(spec: GameSpec, *, stack: int = 1) -> Read:
    """A reader for observations of this game, or for sequences of `stack` of them.

    Without a stack, an array of the right dtype and shape is not copied.
    """
    write = obs_writer(spec)
    spaces = spec.obs_columns
    (only, *more) = spaces

    def read_only(obs: Any) -> dict[str, Array]:
        column: list[Any] = [None]
        write([column], 0, obs)
        return {only: column[0]}

    def read(obs: Any) -> dict[str, Array]:
        columns: list[list[Any]] = [[None] for _ in spaces]
        write(columns, 0, obs)
        return {name: column[0] for name, column in zip(spaces, columns, strict=True)}

    def read_stack(rows: Any) -> dict[str, Array]:
        columns = {
            name: np.empty((stack, *space.shape), space.dtype) for name, space in spaces.items()
        }
        for at, row in enumerate(rows):
            write(list(columns.values()), at, row)
        return columns

    if stack > 1:
        return read_stack
    return read if more else read_only


def action_writer(spec: GameSpec) -> Write:
    """A writer for actions of this game; accepts names if the spec has them."""
    space = spec.discrete
    if space is None:
        return _tree_writer("action", spec.action, check_bounds=True)
    low = space.start
    high = space.start + space.n
    by_name = {name: low + index for index, name in enumerate(spec.action_names)}

    def write(columns: Columns, at: int, action: Any) -> None:
        if type(action) is not int:
            action = _action_number(action, by_name)
        if not low <= action < high:
            raise Refused(
                "not_in_space", f"action {action}; give a whole number from {low} to {high - 1}"
            )
        columns[0][at] = action

    return write


def raw_action_writer(spec: GameSpec) -> Write:
    """A writer for actions before clip or tanh: same parts, no bounds."""
    spaces = {path: raw_space(space) for path, space in spec.action.items()}
    return _tree_writer("raw_action", spaces, check_bounds=False)


def raw_space(space: Space) -> Space:
    """The space of an action before clipping: the same shape, as floats."""
    return Box(space.shape, space.dtype if space.dtype.kind == "f" else np.dtype("<f4"))


def check_mask(mask: Any, n_actions: int) -> Array:
    """An action mask as bool[n_actions]; Refused if it is something else."""
    if type(mask) is np.ndarray and mask.dtype == np.bool_ and mask.shape == (n_actions,):
        return mask
    array = _asarray("action_mask", mask)
    if array.shape != (n_actions,):
        raise Refused(
            "bad_shape",
            f"action_mask is {sized(array.shape)}; give one flag for each of the {n_actions} "
            "actions",
        )
    return _lossless("action_mask", array, np.dtype(np.bool_))


def check_flag(name: str, flag: Any) -> bool:
    """A flag as bool, such as `truncated`; Refused if it is something else."""
    if flag is True or flag is False:
        return bool(flag)
    array = np.asarray(flag)
    if array.shape != () or array.dtype.kind not in "biu" or array not in (0, 1):
        raise Refused("bad_dtype", f"{name} is {str(flag)[:40]!r}; give True or False")
    return bool(array)


def _action_number(action: Any, by_name: Mapping[str, int]) -> int:
    if isinstance(action, str):
        if action not in by_name:
            expected = (
                f"one of {joined(by_name)}"
                if by_name
                else "a number: this game has no action names"
            )
            raise Refused("not_in_space", f"action {action[:40]!r}; give {expected}")
        return by_name[action]
    try:
        return operator.index(action)
    except TypeError:
        raise Refused("bad_dtype", f"action {str(action)[:40]!r}; give a whole number") from None


def _tree_writer(what: str, leaves: Mapping[str, Space], *, check_bounds: bool) -> Write:
    if set(leaves) == {""}:
        return _leaf_writer(what, leaves[""], check_bounds=check_bounds)
    parts = [
        (
            index,
            path,
            path.split("."),
            _leaf_writer(f"{what}.{path}", space, check_bounds=check_bounds),
        )
        for index, (path, space) in enumerate(sorted(leaves.items()))
    ]

    def write(columns: Columns, at: int, value: Any) -> None:
        for index, path, keys, leaf in parts:
            leaf(columns[index : index + 1], at, _part(what, value, path, keys))

    return write


def _part(what: str, value: Any, path: str, keys: Sequence[str]) -> Any:
    if isinstance(value, Mapping) and path in value:
        return value[path]
    try:
        for key in keys:
            value = value[key] if isinstance(value, Mapping) and key in value else value[int(key)]
    except (KeyError, IndexError, TypeError, ValueError):
        raise Refused(
            "bad_shape",
            f"{what} has no part {path!r}; give every part that the game was connected with",
        ) from None
    return value


def _leaf_writer(what: str, space: Space, *, check_bounds: bool) -> Write:
    dtype = space.dtype
    shape = space.shape
    is_float = dtype.kind == "f"
    is_short = len(shape) == 1 and shape[0] <= _SHORT
    # Real games sometimes exceed the float bounds of their observations, which is accepted; whole
    # numbers and actions must be within bounds.
    is_open = isinstance(space, Box) and space.low is None and space.high is None
    must_hold = (check_bounds or not is_float) and not is_open
    array_type = np.ndarray

    def write(columns: Columns, at: int, value: Any) -> None:
        if type(value) is not array_type or value.dtype != dtype or value.shape != shape:
            value = _asarray(what, value)
            if value.shape != shape:
                raise Refused(
                    "bad_shape",
                    f"{what} is {sized(value.shape)}; this game was connected with {sized(shape)}",
                )
            value = _lossless(what, value, dtype)
        # No element is larger than the norm, which is NaN if an element is; if it is too large,
        # each element is checked.
        if is_float and not (is_short and hypot(*value.tolist()) <= MAX_NUMBER):
            check_recordable(what, value)
        if must_hold and not space.contains(value[None])[0]:
            raise Refused(
                "not_in_space",
                f"{what} {str(value)[:60]} is outside of {space}; clip it or widen the space",
            )
        columns[0][at] = value

    return write


def _asarray(what: str, value: Any) -> Array:
    if isinstance(value, list | tuple):
        _refuse_text(what, value)
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise Refused("bad_shape", f"{what} is not an array: {str(error)[:80]}") from None
    if array.dtype.kind not in "biuf":
        raise Refused("bad_dtype", f"{what} has dtype {array.dtype}; give numbers")
    return array


def _refuse_text(what: str, values: Sequence[Any], depth: int = 1) -> None:
    """Raise Refused for text in a list: NumPy would make each element as wide as the longest."""
    if _NUMBERS.issuperset(map(type, values)):
        return
    for value in values:
        if isinstance(value, str | bytes):
            raise Refused("bad_dtype", f"{what} contains the text {value[:40]!r}; give numbers")
        if isinstance(value, list | tuple):
            if depth == _MAX_DEPTH:
                raise Refused(
                    "bad_shape", f"{what} has over {depth} levels of lists; give its space's shape"
                )
            _refuse_text(what, value, depth + 1)


def _lossless(what: str, array: Array, dtype: np.dtype[Any]) -> Array:
    if array.dtype == dtype:
        return array
    with np.errstate(all="ignore"):
        converted = array.astype(dtype)
        may_round = dtype.kind == "f" and array.dtype.kind == "f"
        if not may_round and not (converted == array).all():
            raise Refused(
                "bad_dtype",
                f"{what} of {array.dtype} does not fit into {dtype} exactly; connect with a wider "
                "dtype",
            )
    return converted
