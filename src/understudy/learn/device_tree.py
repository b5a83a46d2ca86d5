"""The 16-ary sum tree as JAX arrays: the same rules as `sum_tree`, usable inside a compiled scan."""

import jax
import jax.numpy as jnp
import numpy as np

WIDTH = 16
NOWHERE = 1 << 30
"""A row that no tree has: what is written there is dropped, at every level."""

Levels = tuple[jax.Array, ...]
"""Leaves first; each further level holds the sums of 16 entries of the one before; the last has 16 entries."""

_UPPER = np.triu(np.ones((WIDTH, WIDTH), np.float32))


def empty_levels(capacity: int) -> Levels:
    """A tree of `capacity` rows without masses."""
    sizes = [-(-capacity // WIDTH) * WIDTH]
    while sizes[-1] > WIDTH:
        sizes.append(-(-(sizes[-1] // WIDTH) // WIDTH) * WIDTH)
    return tuple(jnp.zeros(size, jnp.float32) for size in sizes)


def set_leaves(levels: Levels, rows: jax.Array, masses: jax.Array) -> Levels:
    """The tree in which these rows have these masses; rows that are NOWHERE are left out."""
    changed = [levels[0].at[rows].set(masses, mode="drop")]
    for level in levels[1:]:
        rows = rows // WIDTH
        children = changed[-1].reshape(-1, WIDTH).at[rows].get(mode="clip")
        changed.append(level.at[rows].set(_sum(children), mode="drop"))
    return tuple(changed)


def levels_of(leaves: jax.Array, like: Levels) -> Levels:
    """The tree over these leaves, with the bits that any history of `set_leaves` would have given it."""
    levels = [leaves]
    for level in like[1:]:
        sums = _sum(levels[-1].reshape(-1, WIDTH))
        levels.append(jnp.zeros_like(level).at[: len(sums)].set(sums))
    return tuple(levels)


def find(levels: Levels, key: jax.Array, n: int) -> jax.Array:
    """n rows, int32, drawn in proportion to their masses, one from each n-th part of the total."""
    over, inside = jax.random.uniform(key, (2, n))
    left = (jnp.arange(n) + over) * (_sum(levels[-1]) / n)
    rows = jnp.zeros(n, jnp.int32)
    for depth, level in reversed(list(enumerate(levels))):
        children = level.reshape(-1, WIDTH)[rows]  # float32[n, 16]
        # XLA's cumulative sum is slow on a CPU; a product with a triangle is not, but must not be rounded to TF32.
        prefix = jnp.matmul(children, _UPPER, precision=jax.lax.Precision.HIGHEST)
        if depth == 1 and len(levels) > 2:
            # float32 has 2^24 steps: too few to point into a million rows. Inside 256 rows a fresh number points well.
            left = inside * prefix[:, -1]
        has_mass = children > 0
        passes = (prefix > left[:, None]) & has_mass
        last = WIDTH - 1 - jnp.argmax(has_mass[:, ::-1], axis=1)
        child = jnp.where(passes.any(axis=1), jnp.argmax(passes, axis=1), last)
        below = jnp.take_along_axis(prefix - children, child[:, None], axis=1)[:, 0]
        left = jnp.maximum(left - below, 0.0)
        rows = rows * WIDTH + child.astype(jnp.int32)
    return rows


def _sum(children: jax.Array) -> jax.Array:
    """Sums over the last axis in one fixed order, so that equal leaves give equal bits, whatever XLA fuses."""
    while children.shape[-1] > 1:
        half = children.shape[-1] // 2
        children = children[..., :half] + children[..., half:]
    return children[..., 0]
