"""A network in NumPy: what actors and games run, without JAX and in microseconds.

`compile_network` turns a spec and its weights into closures once; a call then does only array work. What it returned
may be called from several threads: no buffer is shared between calls.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided

from understudy.core.layers import (
    Activation,
    Channels,
    Constant,
    Conv,
    Dense,
    Dueling,
    Flatten,
    Layer,
    LayerNorm,
    ObservationNorm,
    OneHot,
    ScaleImage,
)
from understudy.core.network import Input, NetworkSpec, Weights
from understudy.core.tensors import Array

F32 = np.dtype(np.float32)
NORM_EPSILON = 1e-6
OBSERVATION_EPSILON = 1e-8
OBSERVATION_LIMIT = 10.0
GELU = (0.7978845608028654, 0.044715)

Step = Callable[[Array], Array]
"""float32[batch, ...] to float32[batch, ...]; an input's first step takes the column's own dtype."""

Forward = Callable[[Mapping[str, Array]], dict[str, Array]]

_Act = Callable[[Array, Array | None], Array]


def compile_network(spec: NetworkSpec, weights: Weights, *, heads: Iterable[str] | None = None) -> Forward:
    """A function from observation columns [batch, ...] to each head's output; `heads` names those wanted, else all."""
    inputs = [(name, _steps(f"inputs.{name}", _cast(one), weights)) for name, one in spec.inputs.items()]
    trunk = _steps("trunk", spec.trunk, weights)
    ends = [
        (name, _steps(f"heads.{name}", spec.heads[name], weights)) for name in (spec.heads if heads is None else heads)
    ]
    if len(inputs) > 1:
        return _many(inputs, trunk, ends)
    ((column, first),) = inputs
    body = first + trunk

    def run(obs: Mapping[str, Array]) -> dict[str, Array]:
        x = obs[column]
        for step in body:
            x = step(x)
        return _ends(x, ends)

    return run


def _many(
    inputs: Sequence[tuple[str, list[Step]]], trunk: list[Step], ends: Sequence[tuple[str, list[Step]]]
) -> Forward:
    def run(obs: Mapping[str, Array]) -> dict[str, Array]:
        parts = []
        for column, steps in inputs:
            x = obs[column]
            for step in steps:
                x = step(x)
            parts.append(x)
        x = np.concatenate(parts, 1)
        for step in trunk:
            x = step(x)
        return _ends(x, ends)

    return run


def _ends(features: Array, ends: Sequence[tuple[str, list[Step]]]) -> dict[str, Array]:
    outputs = {}
    for name, steps in ends:
        x = features
        for step in steps:
            x = step(x)
        outputs[name] = x
    return outputs


def _cast(one: Input) -> tuple[Layer | None, ...]:
    """An input's layers; None stands for the cast to float32 where the first layer does not do it."""
    return one.layers if one.layers and isinstance(one.layers[0], ScaleImage | OneHot) else (None, *one.layers)


def _steps(place: str, layers: Sequence[Layer | None], weights: Weights) -> list[Step]:
    offset = 1 if layers and layers[0] is None else 0
    steps, index = [], 0
    while index < len(layers):
        layer, after = layers[index], layers[index + 1] if index + 1 < len(layers) else None
        prefix = f"{place}.{index - offset}."
        own = {name.removeprefix(prefix): array for name, array in weights.items() if name.startswith(prefix)}
        # What a linear layer or norm gives is its own, so that the activation after it may work in place.
        fused = isinstance(layer, Dense | Conv | LayerNorm | Dueling) and isinstance(after, Activation)
        act = ACTS[after.name] if fused and isinstance(after, Activation) else None
        steps.append(_to_float32 if layer is None else _step(layer, own, act))
        index += 2 if fused else 1
    return steps


def _step(layer: Layer, own: Mapping[str, Array], act: _Act | None) -> Step:
    match layer:
        case Dense():
            return _dense(own["kernel"], own["bias"], act)
        case Dueling():
            return _dueling(layer, own, act)
        case Conv():
            return _conv(layer, own, act)
        case LayerNorm():
            return _layer_norm(own["scale"], own["bias"], act)
        case ObservationNorm():
            return _observation_norm(own["mean"], own["var"])
        case Activation():
            one = ACTS[layer.name]
            return lambda x: one(x, None)
        case Flatten():
            return lambda x: x.reshape(len(x), -1)
        case ScaleImage():
            return _scale_image
        case Channels():
            return _channels(layer)
        case OneHot():
            choices = np.arange(layer.start, layer.start + layer.n)
            return lambda x: (x[..., None] == choices).astype(F32)
        case Constant():
            return _constant(own["constant"])


# --- Linear layers ---------------------------------------------------------------------------------------------------


def _dense(kernel: Array, bias: Array, act: _Act | None) -> Step:
    dot, add = np.dot, np.add

    def plain(x: Array) -> Array:
        h = dot(x, kernel)
        return add(h, bias, h)

    if act is None:
        return plain
    if act is _relu:
        zero, maximum = _ZERO, np.maximum

        def rectified(x: Array) -> Array:
            h = dot(x, kernel)
            add(h, bias, h)
            return maximum(h, zero, out=h)

        return rectified
    one = act

    def activated(x: Array) -> Array:
        h = dot(x, kernel)
        return one(add(h, bias, h), h)

    return activated


def _dueling(layer: Dueling, own: Mapping[str, Array], act: _Act | None) -> Step:
    """Value + advantage - mean is linear in what both come from, so it is one matrix, worked out beforehand."""
    advantage, bias = own["advantage.kernel"], own["advantage.bias"]
    centred = advantage - advantage.mean(1, keepdims=True)
    value = np.repeat(own["value.kernel"], layer.width, 1)
    bias = own["value.bias"] + bias - bias.mean()
    if not layer.hidden:
        return _dense(value + centred, bias, act)
    hidden = _dense(
        np.concatenate([own["value_hidden.kernel"], own["advantage_hidden.kernel"]], 1),
        np.concatenate([own["value_hidden.bias"], own["advantage_hidden.bias"]]),
        _relu,
    )
    last = _dense(np.concatenate([value, centred]), bias, act)
    return lambda x: last(hidden(x))


def _conv(layer: Conv, own: Mapping[str, Array], act: _Act | None) -> Step:
    size, stride = layer.kernel, layer.stride
    linear = _dense(own["kernel"].reshape(-1, layer.channels), own["bias"], act)

    def run(x: Array) -> Array:
        if not x.flags.c_contiguous:
            x = np.ascontiguousarray(x)
        batch, high, wide, channels = x.shape
        high, wide = (high - size) // stride + 1, (wide - size) // stride + 1
        b, h, w, c = x.strides
        # A view of every patch; the copy that reshape makes of it is what the matrix product reads.
        patches = as_strided(x, (batch, high, wide, size, size, channels), (b, h * stride, w * stride, h, w, c))
        rows = linear(patches.reshape(batch * high * wide, -1))
        return rows.reshape(batch, high, wide, -1)

    return run


def _constant(value: Array) -> Step:
    tables: dict[int, Array] = {}

    def run(x: Array) -> Array:
        batch = len(x)
        table = tables.get(batch)
        if table is None:
            table = np.tile(value, (batch, 1))
            table.flags.writeable = False
            if len(tables) < 8:  # an actor has one batch size, a server a few
                tables[batch] = table
        return table

    return run


# --- Norms and shapes ------------------------------------------------------------------------------------------------


def _layer_norm(scale: Array, bias: Array, act: _Act | None) -> Step:
    share = np.float32(1 / len(scale))
    add, multiply = np.add, np.multiply

    def run(x: Array) -> Array:
        h = x - add.reduce(x, -1, keepdims=True) * share
        spread = add.reduce(h * h, -1, keepdims=True) * share
        multiply(h, 1 / np.sqrt(spread + NORM_EPSILON), h)
        multiply(h, scale, h)
        add(h, bias, h)
        return h if act is None else act(h, h)

    return run


def _observation_norm(mean: Array, var: Array) -> Step:
    scale = 1 / np.sqrt(var + np.float32(OBSERVATION_EPSILON))
    low, high = np.float32(-OBSERVATION_LIMIT), np.float32(OBSERVATION_LIMIT)

    def run(x: Array) -> Array:
        h: Array = x - mean
        np.multiply(h, scale, h)
        np.maximum(h, low, out=h)
        return np.minimum(h, high, out=h)

    return run


def _channels(layer: Channels) -> Step:
    def run(x: Array) -> Array:
        order = (0, *(axis + 1 for axis in layer.order(x.ndim - 1)))
        kept = tuple(x.shape[axis] for axis in order[: x.ndim - len(layer.axes)])
        return x.transpose(order).reshape(*kept, -1) if layer.axes else x[..., None]

    return run


def _to_float32(x: Array) -> Array:
    return x if x.dtype is F32 else x.astype(F32)


def _scale_image(x: Array) -> Array:
    scaled: Array = np.multiply(x, _BYTE, dtype=F32, casting="unsafe")
    return scaled


# --- Activations: (x, out) -> result; out is x itself where x may be overwritten ------------------------------------

_ZERO = np.zeros((), F32)
_BYTE = np.asarray(1 / 255, F32)


def _relu(x: Array, out: Array | None) -> Array:
    return np.maximum(x, _ZERO, out=out)


def _tanh(x: Array, out: Array | None) -> Array:
    return np.tanh(x, out)


def _sigmoid(x: Array, out: Array | None) -> Array:
    # Through tanh, since exp(-x) overflows where x is far below 0.
    h = np.tanh(np.multiply(x, 0.5, out), out)
    return np.multiply(np.add(h, 1, h), 0.5, h)


def _silu(x: Array, out: Array | None) -> Array:
    return np.multiply(x, _sigmoid(x, None), out)


def _gelu(x: Array, out: Array | None) -> Array:
    inner = np.tanh(GELU[0] * (x + GELU[1] * (x * x * x)))
    return np.multiply(x, 0.5 * (1 + inner), out)


def _elu(x: Array, out: Array | None) -> Array:
    low = np.expm1(np.minimum(x, _ZERO))
    return np.add(np.maximum(x, _ZERO), low, out)


ACTS: Mapping[str, _Act] = {
    "relu": _relu, "tanh": _tanh, "sigmoid": _sigmoid, "silu": _silu, "gelu": _gelu, "elu": _elu,
}  # fmt: skip
