"""Adam on clipped gradients, whose bits are the same alone and in a lane.

The usual form divides by 1 - decay^count; a power of one count and a power of many differ in their
last bit. Here that share is kept in the state, and grows by the same products and sums as the
moments it belongs to.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

DECAYS = np.array([0.9, 0.999], np.float32)
"""How much of the mean and of the square stays from one step to the next."""
REST = np.array([0.1, 0.001], np.float32)


class AdamState(NamedTuple):
    """Moments of the gradients so far."""

    mean: Any
    square: Any
    share: Any  # float32[2]: how much of mean and square is filled; 1 after many steps


@dataclass(frozen=True, slots=True)
class Adam:
    """An optimiser; `update` gives moves to subtract, after they are multiplied by a learning
    rate."""

    max_gradient: float
    """Longer gradients, by norm over all arrays, are shortened to this."""
    epsilon: float = 1e-5

    def init(self, weights: Any) -> AdamState:
        """The state before the first step; works on the shapes alone."""

        def zeros() -> Any:
            return jax.tree.map(lambda leaf: jnp.asarray(np.zeros(leaf.shape, leaf.dtype)), weights)

        return AdamState(zeros(), zeros(), jnp.asarray(np.zeros(2, np.float32)))

    def update(self, gradient: Any, state: AdamState) -> tuple[Any, AdamState]:
        """The moves of one step, in the structure of the gradient."""
        shorten = jnp.minimum(1.0, self.max_gradient / jnp.maximum(norm_of(gradient), 1e-20))

        def averaged(old: Any, new: Any, which: int) -> Any:
            return DECAYS[which] * old + REST[which] * new

        clipped = jax.tree.map(lambda leaf: leaf * shorten, gradient)
        mean = jax.tree.map(lambda old, new: averaged(old, new, 0), state.mean, clipped)
        square = jax.tree.map(lambda old, new: averaged(old, new * new, 1), state.square, clipped)
        share = DECAYS * state.share + REST

        def move(mean: Any, square: Any) -> Any:
            return mean / share[0] / (jnp.sqrt(square / share[1]) + self.epsilon)

        return jax.tree.map(move, mean, square), AdamState(mean, square, share)


def norm_of(tree: Any) -> Any:
    """The length of all arrays together, as if they were one vector."""
    return jnp.sqrt(
        sum((jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(tree)), start=jnp.float32(0))
    )
