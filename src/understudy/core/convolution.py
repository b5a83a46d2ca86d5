"""Convolutions in NumPy: a view of every patch, whose copy a matrix product reads; and images with channels last."""

from collections.abc import Callable
from math import prod

import numpy as np

from understudy.core.activations import Act
from understudy.core.layers import Channels, Conv
from understudy.core.network import aligned
from understudy.core.tensors import Array

Step = Callable[[Array], Array]
"""What runs a layer: float32[batch, ...] or one row to float32; an input's first step takes the column's own dtype."""

_FEW_CHANNELS = 16
"""Up to here, copying one channel after another is quicker than copying a transposed view, element by element."""


def convolution(layer: Conv, kernel: Array, bias: Array, act: Act | None, *, lead: int) -> Step:
    """The layer as a step; `lead` is the number of axes before a row's own: 1 for a batch, 0 for one row."""
    size, stride, width = layer.kernel, layer.stride, layer.channels
    kernel = aligned(kernel.reshape(-1, width))
    n_taps, dot, matmul, add = len(kernel), np.dot, np.matmul, np.add

    def run(x: Array) -> Array:
        x = np.ascontiguousarray(x)
        *batch, high, wide, channels = x.shape
        c = x.itemsize  # strides are worked out, since those of axes of length 1 may be anything
        w, h, image = c * channels, c * channels * wide, c * channels * wide * high
        high, wide = (high - size) // stride + 1, (wide - size) // stride + 1
        shape, strides = (high, wide, size, size * channels), (h * stride, w * stride, h, c)
        patches: Array = np.ndarray((*batch, *shape), x.dtype, x, 0, (*(image for _ in batch), *strides))
        # One row takes a product for each line of the image: OpenBLAS packs only large matrices, and that costs more.
        rows = dot(patches.reshape(-1, n_taps), kernel) if lead else matmul(patches.reshape(high, wide, n_taps), kernel)
        add(rows, bias, rows)
        rows = rows if act is None else act(rows, rows)
        return rows.reshape(*batch, high, wide, width)

    return run


def channels_last(layer: Channels, *, lead: int) -> Step:
    """The layer as a step."""
    if not layer.axes:
        return lambda x: x[..., None]
    n_axes = len(layer.axes)

    def run(x: Array) -> Array:
        order = (*range(lead), *(axis + lead for axis in layer.order(x.ndim - lead)))
        moved = x.transpose(order)
        kept, last = moved.shape[:-n_axes], moved.shape[-n_axes:]
        if moved.flags.c_contiguous or prod(last) > _FEW_CHANNELS:
            return moved.reshape(*kept, -1)
        out = np.empty(moved.shape, x.dtype)
        for at in np.ndindex(last):
            out[(..., *at)] = moved[(..., *at)]
        return out.reshape(*kept, -1)

    return run
