"""A random action that a game allows: what players get while there is no bot."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from understudy.core.game import GameSpec
from understudy.core.heads import OPEN
from understudy.core.spaces import Box, Discrete, MultiDiscrete, Space
from understudy.core.tensors import Array


def random_action(spec: GameSpec, rng: np.random.Generator, *, legal: Array | None = None) -> Any:
    """An action as the game takes it: a number, an array, or parts by their path; among `legal` where that is given."""
    discrete = spec.discrete
    if discrete is not None:
        return _draw(discrete, rng) if legal is None else int(rng.choice(np.flatnonzero(legal))) + discrete.start
    parts = {path: _draw(space, rng) for path, space in spec.action.items()}
    return parts[""] if parts.keys() == {""} else nested(parts)


def _draw(space: Space, rng: np.random.Generator) -> Any:
    if isinstance(space, Discrete):
        return int(rng.integers(space.n - 1, dtype=np.uint64, endpoint=True)) + space.start
    if isinstance(space, MultiDiscrete):
        most = np.array([count - 1 for count in space.counts], np.uint64)
        return rng.integers(most, dtype=np.uint64, endpoint=True).astype(space.dtype).reshape(space.shape)
    if not isinstance(space, Box):
        return rng.integers(0, 2, space.shape).astype(space.dtype)
    low, high = _ends(space)
    if space.dtype.kind != "f":
        dtype = np.dtype(np.uint8) if space.dtype.kind == "b" else space.dtype
        return rng.integers(low, high, dtype=dtype, endpoint=True).astype(space.dtype).reshape(space.shape)
    is_closed = np.isfinite(low) & np.isfinite(high)
    drawn = np.where(
        is_closed,
        rng.uniform(np.where(is_closed, low, 0), np.where(is_closed, high, 1)),
        np.clip(rng.standard_normal(len(low)), low, high),
    )
    return drawn.astype(space.dtype).reshape(space.shape)


def _ends(space: Box) -> tuple[Array, Array]:
    """Bounds for each number, flat; floats are infinite where they are open, or as good as that."""
    low, high = (bound.reshape(-1) for bound in space.ends())
    if space.dtype.kind != "f":
        return low, high
    low, high = low.astype(np.float64), high.astype(np.float64)
    return np.where(abs(low) < OPEN, low, -np.inf), np.where(abs(high) < OPEN, high, np.inf)


def nested(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Parts by their dotted path as the mapping of mappings that a game takes and gives."""
    tree: dict[str, Any] = {}
    for path, value in parts.items():
        *above, last = path.split(".")
        at = tree
        for name in above:
            at = at.setdefault(name, {})
        at[last] = value
    return tree
