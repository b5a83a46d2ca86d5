"""Space: the named settings that a study varies, and the values that each may have."""

import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from understudy.core.errors import ConfigError
from understudy.core.settings import nearest, value_text
from understudy.core.wording import CONTROL, joined
from understudy.tuning.trial import Values

MAX_INTEGER = 2**53
"""Integers up to this are exact as float64, which samplers compute with."""
MAX_VALUES = 1_000
"""Of a list: each value is checked before a study starts."""
_DIGITS = 12
"""Significant digits of the values at the steps of an interval: 0.3, not 0.30000000000000004."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One of some values, each equally likely."""

    values: Sequence[Any]
    """JSON values."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(self.values))
        if not self.values:
            raise ConfigError("its list is empty; give at least one value, such as [32, 64]")
        texts = [_text(value) for value in self.values]
        if len(set(texts)) < len(texts):
            doubled = next(text for text in texts if texts.count(text) > 1)
            raise ConfigError(f"its list has {doubled} twice; give each value once")
        if len(texts) > MAX_VALUES:
            raise ConfigError(
                f"its list has {len(texts)} values; give at most {MAX_VALUES}, or min, max and step"
            )

    @property
    def size(self) -> int:
        """The number of values."""
        return len(self.values)

    def at(self, unit: float) -> Any:
        """The value at a share of the list, from 0 to 1."""
        return self.values[_index(unit, self.size)]

    def contains(self, value: Any) -> bool:
        """Whether it is one of the values; 1, 1.0 and true differ."""
        return _text(value) in map(_text, self.values)

    def axis(self, points: int) -> Sequence[Any]:
        """The values on a grid: all of them."""
        return self.values

    def to_json(self) -> dict[str, Any]:
        return {"values": list(self.values)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """From `low` to `high`, both included; on a linear scale, integers are equally likely."""

    low: float
    high: float
    is_integer: bool = False
    scale: Literal["linear", "log"] = "linear"
    step: float | None = None
    """Only `low`, `low + step` and so on; None: every number, or every integer."""

    def __post_init__(self) -> None:
        numbers = {"min": self.low, "max": self.high}
        if self.step is not None:
            numbers["step"] = self.step
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"its {name} is {value_text(value)}; give a number")
            if not abs(value) <= sys.float_info.max:
                raise ConfigError(f"its {name} is {value_text(value)}; give a finite number")
            if self.is_integer and (value != int(value) or abs(value) > MAX_INTEGER):
                raise ConfigError(
                    f"its {name} is {value_text(value)}; give a whole number of at most 2^53"
                )
        if self.scale not in ("linear", "log"):
            raise ConfigError(f"its scale is {value_text(self.scale)}; give linear or log")
        if self.low > self.high:
            raise ConfigError(f"its min {self.low} is above its max {self.high}; exchange the two")
        if self.scale == "log" and self.low <= 0:
            raise ConfigError(
                f"its scale is log, but its min is {self.low}; give a min above 0, or a linear "
                "scale"
            )
        if self.step is not None and (self.step <= 0 or self.scale == "log"):
            raise ConfigError(
                f"its step is {self.step} on a {self.scale} scale; give a step above 0 on a linear "
                "scale, or omit it"
            )
        if self.step is not None and not (self.high - self.low) / self.step <= MAX_INTEGER:
            raise ConfigError(f"its step {self.step} is too small for its ends; give a larger one")
        convert = int if self.is_integer else float
        for name in ("low", "high") if self.step is None else ("low", "high", "step"):
            object.__setattr__(self, name, convert(getattr(self, name)))

    @property
    def size(self) -> int | None:
        """The number of values; None if they are continuous."""
        if self.step is not None:
            steps = (self.high - self.low) / self.step
            return math.floor(steps * (1 + 1e-12) + 1e-9) + 1
        return int(self.high - self.low) + 1 if self.is_integer else None

    def at(self, unit: float) -> float:
        """The value at a share of the interval, from 0 to 1."""
        if self.scale == "log":
            # Each integer has the share of the scale around it, also the first and the last.
            margin = 0.5 if self.is_integer else 0.0
            logs = math.log(self.low - margin), math.log(self.high + margin)
            value = math.exp(logs[0] + unit * (logs[1] - logs[0]))
            return self._within(round(value) if self.is_integer else value)
        if self.size is None:
            return self._within(self.low * (1 - unit) + self.high * unit)
        return self._step(_index(unit, self.size))

    def contains(self, value: Any) -> bool:
        """Whether it is a number of the interval; an integer one has no 2.0."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or (self.is_integer and not isinstance(value, int)):
            return False
        if not self.low <= value <= self.high:
            return False
        if self.step is None:
            return True
        return bool(value == self._step(round((value - self.low) / self.step)))

    def axis(self, points: int) -> Sequence[float]:
        """The values on a grid: those of the steps, else so many evenly spaced ones."""
        if self.size is not None and (self.step is not None or self.size <= points):
            return [self._step(number) for number in range(self.size)]
        if points < 1:
            raise ConfigError(
                "it is an interval, of which a grid needs a step or a number of points; give one "
                "of them"
            )
        low = math.log(self.low) if self.scale == "log" else self.low
        high = math.log(self.high) if self.scale == "log" else self.high
        values = np.linspace(low, high, points) if points > 1 else [low / 2 + high / 2]
        numbers = [math.exp(value) if self.scale == "log" else float(value) for value in values]
        rounded = [self._within(round(number) if self.is_integer else number) for number in numbers]
        return list(dict.fromkeys(rounded))

    def to_json(self) -> dict[str, Any]:
        fields = {"min": self.low, "max": self.high, "type": "int" if self.is_integer else "float"}
        if self.step is not None:
            fields["step"] = self.step
        return {**fields, "scale": self.scale}

    def _step(self, number: int) -> float:
        value = self.low + number * (1 if self.step is None else self.step)
        return self._within(value if self.is_integer else float(f"{value:.{_DIGITS}g}"))

    def _within(self, value: float) -> float:
        """The value within the ends, of which rounding may miss the last bit."""
        return min(max(value, self.low), self.high)


Dimension = Choice | Interval


@dataclass(frozen=True, slots=True)
class Space:
    """The dimensions by name, in order."""

    dimensions: Mapping[str, Dimension]

    def __post_init__(self) -> None:
        if not self.dimensions:
            raise ConfigError("the space is empty; give at least one setting to vary")
        for name in self.dimensions:
            if control := CONTROL.search(name):
                raise ConfigError(
                    f"the space has a setting {value_text(name)}, with the control character "
                    f"{control[0]!a}; give it a printable name"
                )

    @property
    def size(self) -> int | None:
        """The number of points; None if a dimension is continuous."""
        sizes = [dimension.size for dimension in self.dimensions.values()]
        return None if None in sizes else math.prod(size for size in sizes if size is not None)

    @property
    def fixed(self) -> list[str]:
        """The names of the settings that have only one value."""
        return [
            name
            for name, dimension in self.dimensions.items()
            if dimension.size == 1
            or (isinstance(dimension, Interval) and dimension.low == dimension.high)
        ]

    def sample(self, rng: np.random.Generator) -> Values:
        """Return a random point."""
        return self.at(rng.random(len(self.dimensions)).tolist())

    def at(self, unit: Sequence[float]) -> Values:
        """Return the point at a position in the unit cube, with one coordinate per dimension."""
        return {
            name: dimension.at(coordinate)
            for (name, dimension), coordinate in zip(self.dimensions.items(), unit, strict=True)
        }

    def contains(self, values: Values) -> bool:
        """Whether the values are a point of this space: all of its names, and no others."""
        return values.keys() == self.dimensions.keys() and all(
            dimension.contains(values[name]) for name, dimension in self.dimensions.items()
        )

    def grid(self, points: int = 0) -> Iterator[Values]:
        """Yield all combinations; the last dimension changes fastest.

        `points` is the number of values of an interval without a step; ConfigError if there is such
        an interval, and points is 0.
        """
        axes = []
        for name, dimension in self.dimensions.items():
            try:
                axes.append(dimension.axis(points))
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None
        return (
            dict(zip(self.dimensions, values, strict=True)) for values in itertools.product(*axes)
        )

    def to_json(self) -> dict[str, Any]:
        return {name: dimension.to_json() for name, dimension in self.dimensions.items()}


_KEYS = ("min", "max", "type", "scale", "step")


def read_space(fields: Mapping[str, Any], *, types: Mapping[str, type] | None = None) -> Space:
    """A space from JSON or TOML: a list of values, or {min, max} with type, scale and step.

    Without a `type`, an interval has integers if `types` says so for its name, else if both ends
    are integers. Returns what `Space.to_json` wrote, too. ConfigError names the faulty key.
    """
    if not isinstance(fields, Mapping):
        raise ConfigError(f"the space is {value_text(fields)}; give an object with one key each")
    dimensions: dict[str, Dimension] = {}
    for name, entry in fields.items():
        try:
            dimensions[name] = _read_dimension(entry, (types or {}).get(name))
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
    return Space(dimensions)


def _read_dimension(entry: Any, kind: type | None) -> Dimension:
    if isinstance(entry, list):
        return Choice(entry)
    if isinstance(entry, Mapping) and entry.keys() == {"values"}:
        return Choice(entry["values"])
    if not isinstance(entry, Mapping):
        raise ConfigError(
            f"it is {value_text(entry)}; give a list of values, or an object with min and max"
        )
    if unknown := next((key for key in entry if key not in _KEYS), ""):
        raise ConfigError(f"it has an unknown key {unknown}; {nearest(unknown, _KEYS)}")
    if missing := [key for key in ("min", "max") if key not in entry]:
        raise ConfigError(
            f"{joined(missing)} is missing; give both min and max, or a list of values"
        )
    ends = [entry["min"], entry["max"], *([entry["step"]] if "step" in entry else [])]
    if entry.get("type", "int") not in ("int", "float"):
        raise ConfigError(f"its type is {value_text(entry['type'])}; give int or float")
    are_integers = all(isinstance(end, int) for end in ends)
    is_integer = are_integers if kind not in (int, float) else kind is int
    if "type" in entry:
        is_integer = entry["type"] == "int"
    return Interval(
        low=entry["min"],
        high=entry["max"],
        is_integer=is_integer,
        scale=entry.get("scale", "linear"),
        step=entry.get("step"),
    )


def _index(unit: float, size: int) -> int:
    return min(int(unit * size), size - 1)


def _text(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError):
        raise ConfigError(
            f"its list has {value_text(value)}; give numbers, texts, true or false, or lists of "
            "them"
        ) from None
