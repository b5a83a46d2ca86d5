"""Activations in NumPy: (x, out) -> result, where out is x itself if x may be overwritten, else None."""

from collections.abc import Callable, Mapping

import numpy as np

from understudy.core.tensors import Array

Act = Callable[[Array, Array | None], Array]

GELU = (0.7978845608028654, 0.044715)
ZERO = np.zeros((), np.float32)


def relu(x: Array, out: Array | None) -> Array:
    return np.maximum(x, ZERO, out=out)


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
    low = np.expm1(np.minimum(x, ZERO))
    return np.add(np.maximum(x, ZERO), low, out)


ACTS: Mapping[str, Act] = {
    "relu": relu, "tanh": _tanh, "sigmoid": _sigmoid, "silu": _silu, "gelu": _gelu, "elu": _elu,
}  # fmt: skip
