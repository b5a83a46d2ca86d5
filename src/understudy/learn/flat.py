"""Flat weights: all arrays of a network as one vector.

An optimiser, a target or a guard then does its work in a few operations instead of a few for each
array, which halves both compilation and the time of an update of a small network.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from understudy.core.tensors import Array
from understudy.learn import networks
from understudy.nn.heads import Decision, Head
from understudy.nn.network import NetworkSpec, ObservationNorm


def pack(spec: NetworkSpec, weights: Mapping[str, Any]) -> jax.Array:
    """float32[size]: the arrays behind one another, in the spec's order."""
    return jnp.concatenate([jnp.ravel(weights[name]) for name in spec.shapes()])


def unpack(spec: NetworkSpec, flat: Any) -> dict[str, Any]:
    """The arrays by name again; NumPy's where the vector is NumPy's."""
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
    """Fresh weights, or those of `start` wherever name and shape agree."""
    fresh = networks.init_weights(key, spec)
    for name, shape in spec.shapes().items():
        if start is not None and name in start and start[name].shape == shape:
            fresh[name] = jnp.asarray(start[name])
    return pack(spec, fresh)


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
    """What a policy of these weights does, one decision per row of the observations."""
    outputs = networks.apply(spec, unpack(spec, flat), obs)
    noise = networks.noise(key, head, next(iter(outputs.values())).shape[0])
    return networks.sample(head, outputs, noise, explore=explore, action_mask=action_mask)


def observe(spec: NetworkSpec, flat: Any, obs: Mapping[str, Any]) -> Any:
    """Weights whose ObservationNorms, if there are any, have counted these observations too."""
    layers = [layer for one in spec.inputs.values() for layer in one.layers]
    if not any(isinstance(layer, ObservationNorm) for layer in layers):
        return flat
    return pack(spec, networks.observe(spec, unpack(spec, flat), obs))


def kernels(spec: NetworkSpec) -> Array:
    """float32[size]: 1 where a kernel lies, 0 elsewhere; what a weight decay pulls at."""
    parts = [
        np.full(math.prod(shape), name.endswith("kernel")) for name, shape in spec.shapes().items()
    ]
    return np.concatenate(parts).astype(np.float32)
