"""Layers of a network as data: what each needs, what it gives, and which weights it holds.

A layer maps the shape of one row to another; `weights` names its arrays. What it computes stands once in
`core/forward.py` (NumPy) and once in `learn/networks.py` (JAX).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from understudy.core.errors import ConfigError

ACTIVATIONS = ("relu", "tanh", "silu", "gelu", "elu", "sigmoid")
SQRT2 = 1.4142135623730951
MAX_WIDTH = 1 << 20

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear map of a flat row, and a bias."""

    width: int
    gain: float = SQRT2
    """Scale of the orthogonal kernel it starts from; 0.01 suits a policy's last layer, 1 a value's."""

    def __post_init__(self) -> None:
        _check_count("width", self.width)
        _check_number("gain", self.gain)

    def out(self, shape: Shape) -> Shape:
        _check_flat(self, shape)
        return (self.width,)

    def weights(self, shape: Shape) -> dict[str, Shape]:
        return {"kernel": (shape[0], self.width), "bias": (self.width,)}


@dataclass(frozen=True, slots=True)
class Conv:
    """A square convolution without padding over (height, width, channels)."""

    channels: int
    kernel: int
    stride: int = 1
    gain: float = SQRT2

    def __post_init__(self) -> None:
        for name in ("channels", "kernel", "stride"):
            _check_count(name, getattr(self, name))
        _check_number("gain", self.gain)

    def out(self, shape: Shape) -> Shape:
        if len(shape) != 3 or min(shape[:2]) < self.kernel:
            raise ConfigError(
                f"{self} over shape {shape}; it wants (height, width, channels) with sides of at least {self.kernel}: "
                "move the channels with Channels(), or use a smaller kernel"
            )
        high, wide = ((side - self.kernel) // self.stride + 1 for side in shape[:2])
        return (high, wide, self.channels)

    def weights(self, shape: Shape) -> dict[str, Shape]:
        return {"kernel": (self.kernel, self.kernel, shape[2], self.channels), "bias": (self.channels,)}


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Zero mean and unit variance over the last axis, then a learned scale and bias."""

    def out(self, shape: Shape) -> Shape:
        if not shape:
            raise ConfigError("LayerNorm() over a single number; it wants at least one axis: put Flatten() before it")
        return shape

    def weights(self, shape: Shape) -> dict[str, Shape]:
        return {"scale": shape[-1:], "bias": shape[-1:]}


@dataclass(frozen=True, slots=True)
class ObservationNorm:
    """Each element by its running mean and variance, clipped to ±10; the statistics are updated, not trained."""

    def out(self, shape: Shape) -> Shape:
        return shape

    def weights(self, shape: Shape) -> dict[str, Shape]:
        return {"mean": shape, "var": shape, "count": ()}


@dataclass(frozen=True, slots=True)
class Flatten:
    """All axes of a row as one."""

    def out(self, shape: Shape) -> Shape:
        return (math.prod(shape),)

    def weights(self, shape: Shape) -> dict[str, Shape]:
        return {}


@dataclass(frozen=True, slots=True)
class Activation:
    """An elementwise function; gelu is the tanh form."""

    name: str

    def __post_init__(self) -> None:
        if self.name not in ACTIVATIONS:
            raise ConfigError(f"activation {self.name!r} is not known; give one of {', '.join(ACTIVATIONS)}")

    def out(self, shape: Shape) -> Shape:
        return shape

    def weights(self, shape: Shape) -> dict[str, Shape]:
        return {}


@dataclass(frozen=True, slots=True)
class Dueling:
    """Value plus advantages less their mean; with `hidden`, each comes from a relu layer of that width of its own."""

    width: int
    hidden: int = 0
    gain: float = 1.0

    def __post_init__(self) -> None:
        _check_count("width", self.width)
        _check_count("hidden", self.hidden, low=0)
        _check_number("gain", self.gain)

    def out(self, shape: Shape) -> Shape:
        _check_flat(self, shape)
        return (self.width,)

    def weights(self, shape: Shape) -> dict[str, Shape]:
        inner = self.hidden or shape[0]
        parts: dict[str, Shape] = {}
        for name, width in (("value", 1), ("advantage", self.width)):
            parts |= {f"{name}.kernel": (inner, width), f"{name}.bias": (width,)}
            if self.hidden:
                parts |= {f"{name}_hidden.kernel": (shape[0], self.hidden), f"{name}_hidden.bias": (self.hidden,)}
        return parts


@dataclass(frozen=True, slots=True)
class ScaleImage:
    """Bytes as numbers from 0 to 1."""

    def out(self, shape: Shape) -> Shape:
        return shape

    def weights(self, shape: Shape) -> dict[str, Shape]:
        return {}


@dataclass(frozen=True, slots=True)
class Channels:
    """These axes of a row moved last and merged into one; none adds a channel axis of length 1."""

    axes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        axes = self.axes
        if not isinstance(axes, tuple) or not all(type(axis) is int and 0 <= axis < 8 for axis in axes):
            raise ConfigError(f"Channels has axes {axes!r}; give a tuple of axes of a row, such as (0,)")
        if len(set(axes)) != len(axes):
            raise ConfigError(f"Channels has axes {axes!r}; give each axis once")

    def order(self, n_axes: int) -> Shape:
        """The axes of a row in their new order."""
        return (*(axis for axis in range(n_axes) if axis not in self.axes), *self.axes)

    def out(self, shape: Shape) -> Shape:
        if any(axis >= len(shape) for axis in self.axes):
            raise ConfigError(f"{self} over shape {shape}; give axes below {len(shape)}")
        kept = tuple(size for axis, size in enumerate(shape) if axis not in self.axes)
        return (*kept, math.prod(shape[axis] for axis in self.axes))

    def weights(self, shape: Shape) -> dict[str, Shape]:
        return {}


@dataclass(frozen=True, slots=True)
class OneHot:
    """A whole number from `start` as `n` numbers of which one is 1; all are 0 outside."""

    n: int
    start: int = 0

    def __post_init__(self) -> None:
        _check_count("n", self.n)
        if type(self.start) is not int:
            raise ConfigError(f"start is {self.start!r}; give a whole number")

    def out(self, shape: Shape) -> Shape:
        return (*shape, self.n)

    def weights(self, shape: Shape) -> dict[str, Shape]:
        return {}


@dataclass(frozen=True, slots=True)
class Constant:
    """A learned vector, the same for every row, whatever comes in."""

    width: int
    value: float = 0.0
    """What each element starts as."""

    def __post_init__(self) -> None:
        _check_count("width", self.width)
        _check_number("value", self.value)

    def out(self, shape: Shape) -> Shape:
        return (self.width,)

    def weights(self, shape: Shape) -> dict[str, Shape]:
        return {"constant": (self.width,)}


Layer = (
    Dense | Conv | LayerNorm | ObservationNorm | Flatten | Activation | Dueling | ScaleImage | Channels | OneHot
    | Constant
)  # fmt: skip

_KINDS: Mapping[str, type[Any]] = {
    "dense": Dense, "conv": Conv, "layer_norm": LayerNorm, "observation_norm": ObservationNorm, "flatten": Flatten,
    "activation": Activation, "dueling": Dueling, "scale_image": ScaleImage, "channels": Channels, "one_hot": OneHot,
    "constant": Constant,
}  # fmt: skip
_NAMES = {kind: name for name, kind in _KINDS.items()}


def layer_to_json(layer: Layer) -> dict[str, Any]:
    """The layer's kind and fields."""
    given = {field.name: getattr(layer, field.name) for field in fields(layer)}
    return {"layer": _NAMES[type(layer)], **{k: list(v) if isinstance(v, tuple) else v for k, v in given.items()}}


def layer_from_json(given: Any) -> Layer:
    """The layer that `layer_to_json` described; ConfigError unless the description is exact."""
    name = given.get("layer") if isinstance(given, dict) else None
    if not isinstance(name, str) or name not in _KINDS:
        raise ConfigError(f"a layer is {str(given)[:80]}; give one whose 'layer' is one of {', '.join(_KINDS)}")
    kind = _KINDS[name]
    wanted = {"layer", *(field.name for field in fields(kind))}
    if given.keys() != wanted:
        raise ConfigError(
            f"a {name} layer has other fields: {sorted(given.keys() ^ wanted)[:6]}; give {sorted(wanted)}"
        )
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items() if key != "layer"}
    layer: Layer = kind(**values)
    return layer


def _check_flat(layer: object, shape: Shape) -> None:
    if len(shape) != 1:
        raise ConfigError(f"{layer} over shape {shape}; it wants a flat row: put Flatten() before it")


def _check_count(name: str, value: object, *, low: int = 1) -> None:
    if type(value) is not int or not low <= value <= MAX_WIDTH:
        raise ConfigError(f"{name} is {value!r}; give a whole number from {low} to {MAX_WIDTH}")


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{name} is {value!r}; give a finite number")
