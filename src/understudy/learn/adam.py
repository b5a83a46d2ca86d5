"""Adam with gradient clipping, bit-identical in a single run and in a lane (one of many runs that
are trained in one program).

The usual bias correction divides by 1 - decay^count, whose last bit differs between scalar and
vectorised powers. Here the correction is part of the state, and is updated by the same products and
sums as the moments.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

DECAYS = np.array([0.9, 0.999], np.float32)
"""Decay rates of the first and second moments (beta 1 and beta 2)."""
REST = np.array([0.1, 0.001], np.float32)
"""1 - DECAYS."""


class AdamState(NamedTuple):
    """Moments of the gradients, and their bias correction."""

    mean: Any
    square: Any
    share: Any  # float32[2]: 1 - decay^count of mean and square; 1 after many steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """The Adam optimiser; the caller subtracts the moves from `update` times the learning rate."""

    epsilon: float = 1e-5

    def init(self, weights: Any) -> AdamState:
        """The state before the first step; needs only the shapes of the weights."""

        def zeros() -> Any:
            return jax.tree.map(lambda leaf: jnp.asarray(np.zeros(leaf.shape, leaf.dtype)), weights)

        return AdamState(zeros(), zeros(), jnp.asarray(np.zeros(2, np.float32)))

    def update(self, gradient: Any, state: AdamState, max_gradient: Any) -> tuple[Any, AdamState]:
        """The moves of one step, in the structure of the gradient, and the next state.

        Gradients are clipped to the global norm `max_gradient`.
        """
        scale = jnp.minimum(1.0, max_gradient / jnp.maximum(norm_of(gradient), 1e-20))

        def averaged(old: Any, new: Any, which: int) -> Any:
            return DECAYS[which] * old + REST[which] * new

        clipped = jax.tree.map(lambda leaf: leaf * scale, gradient)
        mean = jax.tree.map(lambda old, new: averaged(old, new, 0), state.mean, clipped)
        square = jax.tree.map(lambda old, new: averaged(old, new * new, 1), state.square, clipped)
        share = DECAYS * state.share + REST

        def move(mean: Any, square: Any) -> Any:
            return mean / share[0] / (jnp.sqrt(square / share[1]) + self.epsilon)

        return jax.tree.map(move, mean, square), AdamState(mean, square, share)


def norm_of(tree: Any) -> Any:
    """The global norm: that of all arrays as one vector."""
    return jnp.sqrt(
        sum((jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(tree)), start=jnp.float32(0))
    )
