"""The spaces of observations and actions, as plain data that checks whole columns at once."""

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from understudy.core.errors import Refused, SpecError
from understudy.core.tensors import DTYPE_NAMES, DTYPES, Array
from understudy.core.wording import joined

MAX_DIMENSIONS = 6

MAX_NUMBER = 1e20
"""The largest float that is recorded, stored or learned from, of either sign: the squares of larger
ones are not finite in float32. A bound of a Box of at least this size counts as no bound: in a
partly bounded Box, the elements without a bound have the extremes of the dtype."""

Bounds = float | tuple[float, ...] | None  # whole numbers stay int
"""One bound for all elements, one for each (flattened), or none."""


class Space(Protocol):
    """The values that one column may have per row."""

    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def contains(self, rows: Array) -> NDArray[np.bool_]:
        """For each row of a column with the right dtype and shape: whether it is in the space."""
        ...

    def to_json(self) -> dict[str, Any]: ...


def _to_json(space: Any) -> dict[str, Any]:
    """The space's kind and fields; bounds and counts per element are lists."""
    fields = {name: getattr(space, name) for name in space.__dataclass_fields__}
    values = {
        name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()
    }
    return {**values, "space": _NAMES[type(space)], "dtype": DTYPE_NAMES[space.dtype]}


@dataclass(frozen=True, slots=True)
class Box:
    """Numbers within bounds; floats must be finite.

    Fields are normalised, so that equal boxes compare equal.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    low: Bounds = None
    high: Bounds = None

    def __post_init__(self) -> None:
        _normalise(self, sorts="fiub")
        object.__setattr__(self, "low", _bound_of(self, self.low, end=0))
        object.__setattr__(self, "high", _bound_of(self, self.high, end=1))
        low, high = (np.asarray(bound, object) for bound in (self.low, self.high))
        if self.low is not None and self.high is not None and (low > high).any():
            raise SpecError(
                f"a Box has a low bound {str(self.low)[:40]} above its high bound "
                f"{str(self.high)[:40]}; give low bounds of at most the high ones"
            )

    def contains(self, rows: Array) -> NDArray[np.bool_]:
        flat = rows.reshape(len(rows), math.prod(self.shape))
        ok = np.ones(len(rows), np.bool_)
        if self.dtype.kind == "f":
            ok &= np.isfinite(flat).all(axis=1)
        if self.low is not None:
            ok &= (flat >= np.asarray(self.low, self.dtype)).all(axis=1)
        if self.high is not None:
            ok &= (flat <= np.asarray(self.high, self.dtype)).all(axis=1)
        return ok

    def ends(self) -> tuple[Array, Array]:
        """The bounds of each element, or the extremes of its type; uint8 for booleans."""
        dtype = np.dtype(np.uint8) if self.dtype.kind == "b" else self.dtype
        ends = [
            np.asarray(extreme if bound is None else bound, dtype)
            for bound, extreme in zip((self.low, self.high), type_bounds(self.dtype), strict=True)
        ]
        low, high = (
            np.broadcast_to(end.reshape(self.shape if end.ndim else ()), self.shape) for end in ends
        )
        return low, high

    to_json = _to_json


@dataclass(frozen=True, slots=True)
class Discrete:
    """One of `n` whole numbers from `start`."""

    n: int
    start: int = 0
    dtype: np.dtype[Any] = DTYPES["I32"]

    def __post_init__(self) -> None:
        _normalise(self, sorts="iu")
        n = _integer(self.n, "n")
        start = _integer(self.start, "start")
        info = np.iinfo(self.dtype)
        object.__setattr__(self, "n", n)
        object.__setattr__(self, "start", start)
        if n < 1 or start < info.min or start + n - 1 > info.max:
            raise SpecError(
                f"{n} choices from {start} do not fit into {DTYPE_NAMES[self.dtype]}; give at "
                "least one choice, and a last one of at most the type's maximum"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return ()

    def contains(self, rows: Array) -> NDArray[np.bool_]:
        # Compared with the last choice, since the number after it may not fit into the dtype.
        return np.asarray((rows >= self.start) & (rows <= self.start + self.n - 1))

    to_json = _to_json


@dataclass(frozen=True, slots=True)
class MultiDiscrete:
    """Several whole numbers, each below its own count."""

    counts: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any] = DTYPES["I64"]

    def __post_init__(self) -> None:
        _normalise(self, sorts="iu")
        counts = tuple(_integer(count, "a count") for count in self.counts)
        object.__setattr__(self, "counts", counts)
        if len(counts) != math.prod(self.shape):
            raise SpecError(
                f"{len(counts)} counts for shape {self.shape}; give one count for each element"
            )
        if min(counts) < 1 or max(counts) - 1 > np.iinfo(self.dtype).max:
            raise SpecError(
                f"counts {str(counts)[:60]} do not fit into {DTYPE_NAMES[self.dtype]}; give each "
                "at least 1 and at most the type's maximum"
            )

    def contains(self, rows: Array) -> NDArray[np.bool_]:
        flat = rows.reshape(len(rows), math.prod(self.shape))
        return np.asarray(((flat >= 0) & (flat <= np.asarray(self.counts) - 1)).all(axis=1))

    to_json = _to_json


@dataclass(frozen=True, slots=True)
class MultiBinary:
    """Switches: each element is 0 or 1."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any] = DTYPES["I8"]

    def __post_init__(self) -> None:
        _normalise(self, sorts="iub")

    def contains(self, rows: Array) -> NDArray[np.bool_]:
        flat = rows.reshape(len(rows), math.prod(self.shape))
        return np.asarray(((flat == 0) | (flat == 1)).all(axis=1))

    to_json = _to_json


def describe(spaces: Mapping[str, Space]) -> str:
    """Spaces by path as a text, such as `2 choices` or `grid: uint8[5, 5]; place: float32[2]`."""
    texts = {
        path: f"{space.n} choices"
        if isinstance(space, Discrete)
        else f"{space.dtype}{list(space.shape)}"
        for path, space in spaces.items()
    }
    return "; ".join(f"{path}: {text}" if path else text for path, text in texts.items())


def check_recordable(name: str, floats: Array) -> None:
    """Raise Refused unless all floats are finite and at most MAX_NUMBER, of either sign."""
    # MAX_NUMBER, rounded to the dtype as the numbers are; the largest float16 is smaller.
    most = floats.dtype.type(min(MAX_NUMBER, float(np.finfo(floats.dtype).max)))
    # With a NaN, the extremes are NaN too, and the comparisons are False.
    if floats.size and not (floats.max() <= most and floats.min() >= -most):
        raise Refused(
            "not_finite",
            f"{name!r} contains NaN, infinity or a number beyond {MAX_NUMBER:g}; give finite, "
            "smaller numbers",
        )


def _normalise(space: Any, *, sorts: str) -> None:
    """Convert the dtype and shape of a new space to their normal form; SpecError if invalid."""
    dtype = np.dtype(space.dtype).newbyteorder("<")
    if dtype not in DTYPE_NAMES or dtype.kind not in sorts:
        fitting = [name for name, column_type in DTYPES.items() if column_type.kind in sorts]
        raise SpecError(
            f"a {type(space).__name__} space of dtype {dtype} cannot be recorded; use one of "
            f"{fitting}"
        )
    object.__setattr__(space, "dtype", DTYPES[DTYPE_NAMES[dtype]])
    if isinstance(space, Discrete):
        return
    shape = tuple(_integer(n, "a dimension") for n in space.shape)
    if len(shape) > MAX_DIMENSIONS or any(n < 1 for n in shape):
        raise SpecError(
            f"shape {shape} is not allowed; give at most {MAX_DIMENSIONS} dimensions, each at "
            "least 1"
        )
    object.__setattr__(space, "shape", shape)


def _integer(value: Any, what: str) -> int:
    if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
        raise SpecError(f"{what} is {value!r}; give a whole number")
    return operator.index(value)


def _bound_of(box: Box, bound: Any, *, end: int) -> Bounds:
    """A bound in its normal form: None if it is the dtype's own, one number if all are equal."""
    if bound is None:
        return None
    is_list = isinstance(bound, list | tuple)
    values = list(bound) if is_list else [bound]
    if is_list and len(values) != math.prod(box.shape):
        raise SpecError(
            f"{len(values)} bounds for shape {box.shape}; give one, or one for each element"
        )
    numbers = [_number(value, box.dtype) for value in values]
    if len(set(numbers)) > 1:
        return tuple(numbers)
    return None if numbers[0] == type_bounds(box.dtype)[end] else numbers[0]


def type_bounds(dtype: np.dtype[Any]) -> tuple[float, float]:
    """The lowest and highest number of a type."""
    if dtype.kind == "f":
        return -np.inf, np.inf
    return (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))


def _number(value: Any, dtype: np.dtype[Any]) -> float:
    # Bounds have the column's precision, so that float32(0.1) is within a bound of 0.1.
    if (
        dtype.kind == "f"
        and isinstance(value, int | float | np.number)
        and not isinstance(value, bool)
    ):
        with np.errstate(over="ignore"):
            number = float(dtype.type(value)) + 0.0  # turns -0.0 into 0.0
        if math.isfinite(number):
            return number
    elif dtype.kind != "f" and hasattr(value, "__index__"):
        low, high = type_bounds(dtype)
        if low <= operator.index(value) <= high:
            return operator.index(value)
    raise SpecError(f"a bound is {value!r}; give None or a number of type {DTYPE_NAMES[dtype]}")


_KINDS: Mapping[str, type[Box] | type[Discrete] | type[MultiDiscrete] | type[MultiBinary]] = {
    "box": Box,
    "discrete": Discrete,
    "multi_discrete": MultiDiscrete,
    "multi_binary": MultiBinary,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def space_from_json(fields: Any) -> Space:
    """Parse the JSON of `to_json`; SpecError unless it is exactly a space."""
    if (
        not isinstance(fields, dict)
        or not isinstance(fields.get("space"), str)
        or fields["space"] not in _KINDS
    ):
        raise SpecError(
            f"a space is {str(fields)[:80]!r}; give a JSON object whose space is one of "
            f"{', '.join(sorted(_KINDS))}"
        )
    try:
        kind = _KINDS[fields["space"]]
        if fields.keys() != {"space", *kind.__dataclass_fields__}:
            raise SpecError(
                f"a {fields['space']} space must have exactly the fields "
                f"{joined(kind.__dataclass_fields__)}"
            )
        listed = [fields[name] for name in ("shape", "counts") if name in fields]
        bounds = [fields[name] for name in ("low", "high") if name in fields]
        if not all(isinstance(value, list) for value in listed) or any(
            isinstance(bound, bool) for bound in bounds
        ):
            raise SpecError("shape and counts must be lists, and bounds must be numbers")
        arguments = {name: value for name, value in fields.items() if name != "space"}
        return kind(**{**arguments, "dtype": DTYPES[fields["dtype"]]})
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise SpecError(
            f"a space cannot be read: {error} in {str(fields)[:200]}; its dtype must be one of "
            f"{', '.join(DTYPES)}"
        ) from None


def space_from_gymnasium(space: Any, *, is_action: bool) -> dict[str, Space]:
    """The leaves of a Gymnasium space by dotted path; `""` if it is neither Dict nor Tuple."""
    kind = type(space).__name__
    if kind not in ("Dict", "Tuple"):
        return {"": _leaf(kind, space, is_action=is_action)}
    leaves: dict[str, Space] = {}
    for key, part in space.spaces.items() if kind == "Dict" else enumerate(space.spaces):
        if not str(key) or "." in str(key):
            raise SpecError(
                f"a Dict space has the key {key!r}; use letters, digits, _ and -, since a dot "
                "separates the parts of a column's name"
            )
        for path, leaf in space_from_gymnasium(part, is_action=is_action).items():
            leaves[f"{key}.{path}" if path else str(key)] = leaf
    return leaves


def _leaf(kind: str, space: Any, *, is_action: bool) -> Space:
    match kind:
        case "Box":
            return Box(
                space.shape,
                space.dtype,
                *(_bounds_of(np.asarray(side)) for side in (space.low, space.high)),
            )
        case "Discrete":
            return Discrete(space.n, space.start, DTYPES["I32"] if is_action else space.dtype)
        case "MultiDiscrete":
            if np.any(getattr(space, "start", 0)):
                raise SpecError(
                    "a MultiDiscrete space that does not start at 0 cannot be recorded; shift it "
                    "to start at 0"
                )
            counts = np.asarray(space.nvec)
            return MultiDiscrete(tuple(counts.ravel().tolist()), counts.shape, space.dtype)
        case "MultiBinary":
            return MultiBinary(space.shape, space.dtype)
        case _:
            raise SpecError(
                f"a {kind} space cannot be recorded; use Box, Discrete, MultiDiscrete, "
                "MultiBinary, or a Dict or Tuple of them"
            )


def _bounds_of(values: Array) -> Bounds:
    if values.dtype.kind == "f":
        if not np.isfinite(values).any():
            return None
        # In a partly bounded Box, unbounded elements get the dtype's extremes.
        info = np.finfo(values.dtype)
        values = np.nan_to_num(values, posinf=info.max, neginf=info.min)
    return tuple(values.ravel().tolist())
