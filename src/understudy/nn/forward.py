"""A network in NumPy, as actors and games run it: without JAX and in microseconds.

`compile_network` and `compile_row` turn a spec and its weights into closures once; a call then does
only array work. The returned functions are thread-safe: no buffer is shared between calls.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod

import numpy as np

from understudy.core.tensors import Array
from understudy.nn.network import (
    Activation,
    Centre,
    Channels,
    Constant,
    Conv,
    Dense,
    Dueling,
    Flatten,
    Input,
    Layer,
    LayerNorm,
    NetworkSpec,
    ObservationNorm,
    OneHot,
    ScaleImage,
    Weights,
    aligned,
    centre_of,
)

F32 = np.dtype(np.float32)
NORM_EPSILON = 1e-6
OBSERVATION_EPSILON = 1e-8
OBSERVATION_LIMIT = 10.0

Forward = Callable[[Mapping[str, Array]], dict[str, Array]]
Show = Callable[[Array, Mapping[str, Array], Mapping[str, Array]], Array]
"""A Centre: from its input, the observation columns and the rows of other inputs to a grid."""


Act = Callable[[Array, Array | None], Array]
"""An activation function, (x, out) -> result; `out` is x if x may be overwritten, else None."""

GELU = (0.7978845608028654, 0.044715)
ZERO = np.zeros((), np.float32)
_BYTE = np.asarray(1 / 255, F32)


def relu(x: Array, out: Array | None) -> Array:
    return np.maximum(x, ZERO, out=out)


def _tanh(x: Array, out: Array | None) -> Array:
    return np.tanh(x, out)


def _sigmoid(x: Array, out: Array | None) -> Array:
    # Computed with tanh, since exp(-x) overflows for x far below 0.
    h = np.tanh(np.multiply(x, 0.5, out), out)
    return np.multiply(np.add(h, 1, h), 0.5, h)


def _silu(x: Array, out: Array | None) -> Array:
    return np.multiply(x, _sigmoid(x, None), out)


def _gelu(x: Array, out: Array | None) -> Array:
    inner = np.tanh(GELU[0] * (x + GELU[1] * (x * x * x)))
    return np.multiply(x, 0.5 * (1 + inner), out)


def _elu(x: Array, out: Array | None) -> Array:
    low = np.expm1(np.minimum(x, ZERO))
    return np.add(np.maximum(x, ZERO), low, out)


ACTS: Mapping[str, Act] = {
    "relu": relu,
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "silu": _silu,
    "gelu": _gelu,
    "elu": _elu,
}


Step = Callable[[Array], Array]
"""Runs a layer on float32[batch, ...] or on one row; an input's first step accepts the column's own
dtype."""

_FEW_CHANNELS = 16
"""Up to this number, copying channel by channel is faster than copying a transposed view element by
element."""


def convolution(layer: Conv, kernel: Array, bias: Array, act: Act | None, *, lead: int) -> Step:
    """The layer as a step; `lead` axes precede those of a row: 1 in a batch, 0 for a single row."""
    size = layer.kernel
    stride = layer.stride
    width = layer.channels
    kernel = aligned(kernel.reshape(-1, width))
    n_taps = len(kernel)
    dot = np.dot
    matmul = np.matmul
    add = np.add

    def run(x: Array) -> Array:
        x = np.ascontiguousarray(x)
        *batch, high, wide, channels = x.shape
        c = x.itemsize  # strides are computed, since those of axes of length 1 are arbitrary
        w = c * channels
        h = c * channels * wide
        image = c * channels * wide * high
        high = (high - size) // stride + 1
        wide = (wide - size) // stride + 1
        shape = (high, wide, size, size * channels)
        strides = (h * stride, w * stride, h, c)
        patches: Array = np.ndarray(
            (*batch, *shape), x.dtype, x, 0, (*(image for _ in batch), *strides)
        )
        # A single row uses one product per line of the image: OpenBLAS packs only large matrices,
        # and packing costs more.
        rows = (
            dot(patches.reshape(-1, n_taps), kernel)
            if lead
            else matmul(patches.reshape(high, wide, n_taps), kernel)
        )
        add(rows, bias, rows)
        rows = rows if act is None else act(rows, rows)
        return rows.reshape(*batch, high, wide, width)

    return run


def channels_last(layer: Channels, *, lead: int) -> Step:
    """The layer as a step; `lead` as for `convolution`."""
    if not layer.axes:
        return lambda x: x[..., None]
    n_axes = len(layer.axes)

    def run(x: Array) -> Array:
        order = (*range(lead), *(axis + lead for axis in layer.order(x.ndim - lead)))
        moved = x.transpose(order)
        first = moved.shape[:-n_axes]
        last = moved.shape[-n_axes:]
        if moved.flags.c_contiguous or prod(last) > _FEW_CHANNELS:
            return moved.reshape(*first, -1)
        out = np.empty(moved.shape, x.dtype)
        for at in np.ndindex(last):
            out[(..., *at)] = moved[(..., *at)]
        return out.reshape(*first, -1)

    return run


def compile_network(
    spec: NetworkSpec, weights: Weights, *, heads: Iterable[str] | None = None
) -> Forward:
    """A function from observation columns [batch, ...] to the outputs of `heads`, or of all."""
    return _compiled(spec, weights, heads, lead=1)


def compile_row(
    spec: NetworkSpec, weights: Weights, *, heads: Iterable[str] | None = None
) -> Forward:
    """A function from one row of observation columns to the outputs; faster than a batch of 1.

    The columns have no batch axis, and must have exactly the dtypes of the network's inputs.
    """
    return _compiled(spec, weights, heads, lead=0)


def _compiled(
    spec: NetworkSpec, weights: Weights, heads: Iterable[str] | None, *, lead: int
) -> Forward:
    """Compile for arrays with `lead` axes before those of a row: 1 for batches, 0 for one row."""
    inputs = [(name, *_input(name, spec.inputs[name], weights, lead=lead)) for name in spec.order()]
    trunk = _steps("trunk", spec.trunk, weights, lead=lead)
    ends = [
        (name, _steps(f"heads.{name}", spec.heads[name], weights, lead=lead))
        for name in (spec.heads if heads is None else heads)
    ]
    if len(inputs) == 1 and len(ends) == 1 and inputs[0][2] is None:
        ((column, first, _, _),) = inputs
        ((head, last),) = ends
        straight = first + trunk + last

        def run_straight(obs: Mapping[str, Array]) -> dict[str, Array]:
            x = obs[column]
            for step in straight:
                x = step(x)
            return {head: x}

        return run_straight
    names = list(spec.inputs)

    def run(obs: Mapping[str, Array]) -> dict[str, Array]:
        rows: dict[str, Array] = {}
        for column, steps, show, later in inputs:
            x = obs[column]
            for step in steps:
                x = step(x)
            if show is not None:
                x = show(x, obs, rows)
                for step in later:
                    x = step(x)
            rows[column] = x
        features = np.concatenate([rows[name] for name in names], -1) if len(names) > 1 else x
        for step in trunk:
            features = step(features)
        outputs = {}
        for name, steps in ends:
            x = features
            for step in steps:
                x = step(x)
            outputs[name] = x
        return outputs

    return run


def _input(
    name: str, column: Input, weights: Weights, *, lead: int
) -> tuple[list[Step], Show | None, list[Step]]:
    """The steps of an input before its Centre, the Centre, and those after it."""
    if not lead and not column.shape:
        # NumPy turns arrays without an axis into scalars, so this runs as a batch of one.
        steps, _, _ = _input(name, column, weights, lead=1)
        return [lambda x: x[None], *steps, lambda x: x[0]], None, []
    place = f"inputs.{name}"
    layers = column.layers
    at = centre_of(column)
    steps = _steps(place, layers[:at], weights, lead=lead)
    is_cast = bool(layers) and isinstance(layers[0], ScaleImage | OneHot)
    if not is_cast and (lead or column.dtype != F32):
        steps.insert(0, lambda x: x if x.dtype is F32 else x.astype(F32))
    if at is None:
        return steps, None, []
    centre = layers[at]
    assert isinstance(centre, Centre)
    later = _steps(place, layers[at + 1 :], weights, lead=lead, first=at + 1)
    return steps, _centre(centre, lead=lead), later


def _steps(
    place: str, layers: Sequence[Layer], weights: Weights, *, lead: int, first: int = 0
) -> list[Step]:
    """The layers as steps; `first`: the index of the first of them in its place."""
    steps = []
    index = 0
    while index < len(layers):
        layer = layers[index]
        after = layers[index + 1] if index + 1 < len(layers) else None
        prefix = f"{place}.{first + index}."
        own = {
            name.removeprefix(prefix): array
            for name, array in weights.items()
            if name.startswith(prefix)
        }
        # The output of a linear layer or norm is a new array, so the activation after it may work
        # in place.
        fused = isinstance(layer, Dense | Conv | LayerNorm | Dueling) and isinstance(
            after, Activation
        )
        act = ACTS[after.name] if fused and isinstance(after, Activation) else None
        steps.append(_step(layer, own, act, lead=lead))
        index += 2 if fused else 1
    return steps


def _step(layer: Layer, own: Mapping[str, Array], act: Act | None, *, lead: int) -> Step:
    match layer:
        case Dense():
            return _dense(own["kernel"], own["bias"], act, lead=lead)
        case Dueling():
            return _dueling(layer, own, act, lead=lead)
        case Conv():
            return convolution(layer, own["kernel"], own["bias"], act, lead=lead)
        case LayerNorm():
            return _layer_norm(own["scale"], own["bias"], act)
        case ObservationNorm():
            return _observation_norm(own["mean"], own["var"])
        case Activation():
            activation = ACTS[layer.name]
            return lambda x: activation(x, None)
        case Flatten():
            return lambda x: x if x.ndim == lead + 1 else x.reshape(*x.shape[:lead], -1)
        case ScaleImage():
            return lambda x: np.multiply(x, _BYTE, dtype=F32, casting="unsafe")
        case Channels():
            return channels_last(layer, lead=lead)
        case OneHot():
            choices = np.arange(layer.start, layer.start + layer.n)
            return lambda x: (x[..., None] == choices).astype(F32)
        case Constant():
            value = own["constant"]
            return _constant(value) if lead else lambda _: value
        case Centre():
            raise AssertionError("a Centre is no step, since it needs other inputs too")


# --- Linear layers --------------------------------------------------------------------------------


def _dense(kernel: Array, bias: Array, act: Act | None, *, lead: int) -> Step:
    kernel = aligned(kernel)
    bias = bias[None] if lead else bias  # NumPy adds faster with the same number of axes
    add = np.add
    maximum = np.maximum
    zero = ZERO

    def plain(x: Array) -> Array:
        h: Array = x.dot(kernel)
        return add(h, bias, h)

    def rectified(x: Array) -> Array:
        h: Array = x.dot(kernel)
        add(h, bias, h)
        return maximum(h, zero, out=h)

    if act is None or act is relu:
        return rectified if act else plain
    activation = act

    def activated(x: Array) -> Array:
        h: Array = x.dot(kernel)
        return activation(add(h, bias, h), h)

    return activated


def _dueling(layer: Dueling, own: Mapping[str, Array], act: Act | None, *, lead: int) -> Step:
    """Value + advantage - mean is linear in the features, so one precomputed matrix is enough."""
    advantage = own["advantage.kernel"]
    bias = own["advantage.bias"]
    centred = advantage - advantage.mean(1, keepdims=True)
    value = np.repeat(own["value.kernel"], layer.width, 1)
    bias = own["value.bias"] + bias - bias.mean()
    if not layer.hidden:
        return _dense(value + centred, bias, act, lead=lead)
    hidden = _dense(
        np.concatenate([own["value_hidden.kernel"], own["advantage_hidden.kernel"]], 1),
        np.concatenate([own["value_hidden.bias"], own["advantage_hidden.bias"]]),
        relu,
        lead=lead,
    )
    last = _dense(np.concatenate([value, centred]), bias, act, lead=lead)
    return lambda x: last(hidden(x))


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


def _centre(layer: Centre, *, lead: int) -> Show:
    def run(x: Array, obs: Mapping[str, Array], rows: Mapping[str, Array]) -> Array:
        grid = x if lead else x[None]
        n, high, wide, channels = grid.shape
        if layer.row and layer.column:
            row, column = (
                np.asarray(obs[name]).reshape(n, -1)[:, at].clip(0, side - 1).astype(np.intp)
                for (name, at), side in ((layer.row, high), (layer.column, wide))
            )
        else:
            row, column = divmod(grid[..., layer.channel].reshape(n, -1).argmax(1), wide)
        sides = layer.sides((high, wide))
        up, left = (side // 2 for side in sides)
        padded = np.zeros((n, high + 2 * up, wide + 2 * left, channels + 1), F32)
        padded[:, up : up + high, left : left + wide, :channels] = grid
        padded[:, up : up + high, left : left + wide, channels] = 1
        shown = padded[
            np.arange(n)[:, None, None],
            (row[:, None] + np.arange(sides[0]))[:, :, None],
            (column[:, None] + np.arange(sides[1]))[:, None, :],
        ]
        parts = [shown]
        for name in layer.others:
            other = rows[name].reshape(n, 1, 1, -1)
            parts.append(np.broadcast_to(other, (n, *sides, other.shape[-1])))
        shown = np.concatenate(parts, -1)
        return shown if lead else shown[0]

    return run


# --- Norms and shapes -----------------------------------------------------------------------------


def _layer_norm(scale: Array, bias: Array, act: Act | None) -> Step:
    share = np.float32(1 / len(scale))
    add = np.add
    multiply = np.multiply

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
    low = np.float32(-OBSERVATION_LIMIT)
    high = np.float32(OBSERVATION_LIMIT)

    def run(x: Array) -> Array:
        h: Array = x - mean
        np.multiply(h, scale, h)
        np.maximum(h, low, out=h)
        return np.minimum(h, high, out=h)

    return run
