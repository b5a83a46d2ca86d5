"""NetworkSpec: a network as data, with a JSON form and named weights.

    obs ────► layers ─┐
    obs.cam ► layers ─┴─ concatenated ─► trunk ─┬─► head "q"
                                                └─► head "value"

The same spec runs in NumPy (`core/forward.py`) and in JAX (`learn/networks.py`), with the same flat weights:
`inputs.obs.0.kernel`, `trunk.2.bias`, `heads.q.0.kernel`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from understudy.core.canonical import canonical_json, strict_json
from understudy.core.errors import ConfigError, Refused
from understudy.core.layers import (
    Conv,
    Layer,
    ObservationNorm,
    OneHot,
    ScaleImage,
    Shape,
    layer_from_json,
    layer_to_json,
)
from understudy.core.tensors import DTYPE_NAMES, DTYPES, Array

NETWORK_FORMAT = 1
MAX_LAYERS = 100
MAX_WEIGHTS = 1 << 28
CACHE_LINE = 64

Weights = Mapping[str, Array]
"""Flat name to float32 array."""

_HEAD = re.compile(r"[a-z][a-z0-9_]{0,39}")


@dataclass(frozen=True, slots=True)
class Input:
    """One column of observations and its own layers; the shape starts with the stack axis where there is one."""

    shape: Shape
    dtype: np.dtype[Any]
    layers: tuple[Layer, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "layers", tuple(self.layers))
        if len(self.shape) > 7 or not all(type(size) is int and size > 0 for size in self.shape):
            raise ConfigError(f"an input has shape {self.shape}; give at most 7 whole numbers from 1")
        dtype = np.dtype(self.dtype).newbyteorder("<")
        if dtype not in DTYPE_NAMES:
            raise ConfigError(f"an input has dtype {dtype}; give one of {', '.join(DTYPES)}")
        object.__setattr__(self, "dtype", DTYPES[DTYPE_NAMES[dtype]])


@dataclass(frozen=True)
class NetworkSpec:
    """Inputs by column name, a trunk over their concatenation, and heads by the name of what they give."""

    inputs: Mapping[str, Input]
    trunk: tuple[Layer, ...]
    heads: Mapping[str, tuple[Layer, ...]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", dict(sorted(self.inputs.items())))
        object.__setattr__(self, "trunk", tuple(self.trunk))
        object.__setattr__(self, "heads", {name: tuple(self.heads[name]) for name in sorted(self.heads)})
        if not self.inputs or not self.heads:
            raise ConfigError("a network without inputs or heads; give at least one of each")
        for name in self.inputs:
            if name != "obs" and not name.startswith("obs."):
                raise ConfigError(f"an input is called {name!r}; give the name of an observation column, such as 'obs'")
        for name in self.heads:
            if not _HEAD.fullmatch(name):
                raise ConfigError(f"a head is called {name!r}; give letters a-z, digits and _, such as 'q'")
        for place, layers in self.places():
            _check_place(place, layers)
        if (size := sum(int(np.prod(shape)) for shape in self.shapes().values())) > MAX_WEIGHTS:
            raise ConfigError(f"a network of {size} weights; give at most {MAX_WEIGHTS}")

    def __hash__(self) -> int:
        return hash(self._key)

    def places(self) -> Iterable[tuple[str, tuple[Layer, ...]]]:
        """Weight-name prefix and layers of each part, in the order they are computed."""
        for name, one in self.inputs.items():
            yield f"inputs.{name}", one.layers
        yield "trunk", self.trunk
        for name, layers in self.heads.items():
            yield f"heads.{name}", layers

    def shapes(self) -> Mapping[str, Shape]:
        """Flat weight name to shape."""
        return self._layout[0]

    def outputs(self) -> Mapping[str, Shape]:
        """What each head gives for one row."""
        return self._layout[1]

    @cached_property
    def _layout(self) -> tuple[dict[str, Shape], dict[str, Shape]]:
        weights: dict[str, Shape] = {}
        features = 0
        for name, one in self.inputs.items():
            out = _through(f"inputs.{name}", one.layers, shape=one.shape, weights=weights)
            if len(out) != 1:
                raise ConfigError(f"input {name!r} ends with shape {out}; end it with Flatten()")
            features += out[0]
        trunk = _through("trunk", self.trunk, shape=(features,), weights=weights)
        ends = {name: _through(f"heads.{name}", layers, shape=trunk, weights=weights)
                for name, layers in self.heads.items()}  # fmt: skip
        return weights, ends

    @cached_property
    def _key(self) -> bytes:
        return network_to_json(self)


def _through(place: str, layers: Iterable[Layer], *, shape: Shape, weights: dict[str, Shape]) -> Shape:
    for index, layer in enumerate(layers):
        try:
            after = layer.out(shape)
        except ConfigError as error:
            raise ConfigError(f"{place}.{index}: {error}") from None
        weights |= {f"{place}.{index}.{part}": size for part, size in layer.weights(shape).items()}
        shape = after
    return shape


def _check_place(place: str, layers: tuple[Layer, ...]) -> None:
    if len(layers) > MAX_LAYERS:
        raise ConfigError(f"{place} has {len(layers)} layers; give at most {MAX_LAYERS}")
    for layer in layers:
        if not isinstance(layer, Layer):
            raise ConfigError(f"{place} holds {layer!r}; give layers, such as Dense(64)")
        if isinstance(layer, ObservationNorm | ScaleImage | OneHot | Conv) and not place.startswith("inputs."):
            raise ConfigError(f"{place} holds {layer}; it belongs into an input's layers")


def network_to_json(spec: NetworkSpec) -> bytes:
    """Canonical JSON: equal specs give equal bytes."""
    return canonical_json({
        "format": NETWORK_FORMAT,
        "inputs": {
            name: {"shape": list(one.shape), "dtype": DTYPE_NAMES[one.dtype], "layers": _listed(one.layers)}
            for name, one in spec.inputs.items()
        },
        "trunk": _listed(spec.trunk),
        "heads": {name: _listed(layers) for name, layers in spec.heads.items()},
    })  # fmt: skip


def network_from_json(raw: bytes | str) -> NetworkSpec:
    """The spec that `network_to_json` wrote; ConfigError when it is not exactly one."""
    try:
        given = strict_json(raw)
        if given["format"] != NETWORK_FORMAT or type(given["format"]) is not int:
            raise ConfigError(f"network format {given['format']!r}; this build reads {NETWORK_FORMAT}")
        if given.keys() != {"format", "inputs", "trunk", "heads"}:
            raise ConfigError(f"a network has format, inputs, trunk and heads, got {sorted(given)[:6]}")
        inputs = {}
        for name, one in given["inputs"].items():
            if one.keys() != {"shape", "dtype", "layers"}:
                raise ConfigError(f"input {name!r} has shape, dtype and layers, got {sorted(one)[:6]}")
            inputs[name] = Input(tuple(one["shape"]), DTYPES[one["dtype"]], _layers(one["layers"]))
        heads = {name: _layers(layers) for name, layers in given["heads"].items()}
        return NetworkSpec(inputs, _layers(given["trunk"]), heads)
    except (Refused, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"a network is not readable: {error!r}") from None


def _listed(layers: Iterable[Layer]) -> list[dict[str, Any]]:
    return [layer_to_json(layer) for layer in layers]


def _layers(given: Any) -> tuple[Layer, ...]:
    if not isinstance(given, list):
        raise ConfigError(f"layers are {str(given)[:40]!r}; give a list")
    return tuple(layer_from_json(one) for one in given)


def checked_weights(spec: NetworkSpec, weights: Mapping[str, Any]) -> dict[str, Array]:
    """Copies as float32 that no learner can change, in the spec's order; ConfigError names what does not fit."""
    wanted = spec.shapes()
    if weights.keys() != wanted.keys():
        raise ConfigError(
            f"weights have other names: {sorted(weights.keys() ^ wanted.keys())[:6]}; give the spec's own"
        )
    copies = {}
    for name, shape in wanted.items():
        copy = _aligned_copy(np.asarray(weights[name], np.float32))
        if copy.shape != shape:
            raise ConfigError(f"{name} has shape {copy.shape}; the network wants {shape}")
        copy.flags.writeable = False
        copies[name] = copy
    return copies


def aligned(array: Array) -> Array:
    """The array, or its copy, at the start of a cache line: a row times a matrix is up to a quarter quicker there."""
    return _aligned_copy(array) if array.ctypes.data % CACHE_LINE else array


def _aligned_copy(array: Array) -> Array:
    raw = np.empty(array.nbytes + CACHE_LINE, np.uint8)
    start = -raw.ctypes.data % CACHE_LINE
    copy: Array = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
