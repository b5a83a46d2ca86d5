"""Flat weights: all arrays of a network as one vector.

An optimiser, a target update or a check for NaN then needs a few operations, not a few per array,
which halves both compilation time and the update time of a small network.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from understudy.core.tensors import Array
from understudy.learn import networks
from understudy.learn.warm_start import fitting_weights
from understudy.nn.heads import Decision, Head
from understudy.nn.network import NetworkSpec, ObservationNorm


def pack(spec: NetworkSpec, weights: Mapping[str, Any]) -> jax.Array:
    """float32[size]: the arrays concatenated in the spec's order."""
    return jnp.concatenate([jnp.ravel(weights[name]) for name in spec.shapes()])


def unpack(spec: NetworkSpec, flat: Any) -> dict[str, Any]:
    """The arrays by name; NumPy arrays if the vector is a NumPy array."""
    weights = {}
    at = 0
    for name, shape in spec.shapes().items():
        size = math.prod(shape)
        weights[name] = flat[at : at + size].reshape(shape)
        at += size
    return weights


def first_weights(
    key: Any, spec: NetworkSpec, start: Mapping[str, Array] | None = None
) -> jax.Array:
    """New weights, replaced by those of `start` that fit."""
    fresh = networks.init_weights(key, spec)
    if start is not None:
        fresh |= {name: start[name] for name in fitting_weights(start, spec)}
    if any(isinstance(array, jax.core.Tracer) for array in fresh.values()):
        return pack(spec, fresh)
    # NumPy packs them: JAX would compile an operation for the shape of each array.
    return jnp.asarray(np.concatenate([np.ravel(fresh[name]) for name in spec.shapes()]))


def decide(
    spec: NetworkSpec,
    flat: Any,
    head: Head,
    *,
    obs: Mapping[str, Any],
    key: Any,
    explore: Any,
    action_mask: Any,
) -> Decision:
    """The decisions of a policy with these weights, one per row of the observations."""
    outputs = networks.apply(spec, unpack(spec, flat), obs)
    noise = networks.noise(key, head, next(iter(outputs.values())).shape[0])
    return networks.sample(head, outputs, noise, explore=explore, action_mask=action_mask)


def observe(
    spec: NetworkSpec,
    flat: Any,
    obs: Mapping[str, Any],
    *,
    limits: Mapping[str, Any] | None = None,
) -> Any:
    """The weights after these observations have updated the ObservationNorms, if any.

    `limits`: as in `networks.observe`.
    """
    layers = [layer for column in spec.inputs.values() for layer in column.layers]
    if not any(isinstance(layer, ObservationNorm) for layer in layers):
        return flat
    return pack(spec, networks.observe(spec, unpack(spec, flat), obs, limits=limits))


def kernel_mask(spec: NetworkSpec) -> Array:
    """float32[size]: 1 for kernels, 0 elsewhere; a mask for weight decay."""
    parts = [
        np.full(math.prod(shape), name.endswith("kernel")) for name, shape in spec.shapes().items()
    ]
    return np.concatenate(parts).astype(np.float32)
