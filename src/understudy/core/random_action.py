"""A random action that a game allows: what players get while there is no bot."""

from typing import Any

import numpy as np

from understudy.core.game import GameSpec
from understudy.core.spaces import Box, Discrete, MultiDiscrete, Space
from understudy.core.tensors import Array

_FAR = 1e6
"""Bounds beyond this are taken as none: a number from all of float32 would be no sensible action."""


def random_action(spec: GameSpec, rng: np.random.Generator, *, legal: Array | None = None) -> Any:
    """An action as the game takes it: a number, an array, or parts by their path; among `legal` where that is given."""
    discrete = spec.discrete
    if discrete is not None:
        choices = np.arange(discrete.n) if legal is None else np.flatnonzero(legal)
        return int(rng.choice(choices)) + discrete.start
    parts = {path: _draw(space, rng) for path, space in spec.action.items()}
    return parts[""] if parts.keys() == {""} else _nested(parts)


def _draw(space: Space, rng: np.random.Generator) -> Any:
    if isinstance(space, Discrete):
        return int(rng.integers(space.n)) + space.start
    if isinstance(space, MultiDiscrete):
        return rng.integers(np.zeros(space.shape, np.int64), np.reshape(space.counts, space.shape)).astype(space.dtype)
    if not isinstance(space, Box):
        return rng.integers(0, 2, space.shape).astype(space.dtype)
    low, high = (np.broadcast_to(_ends(space, end), (int(np.prod(space.shape)),)) for end in (0, 1))
    if space.dtype.kind == "f":
        drawn = np.where(
            np.isfinite(low) & np.isfinite(high),
            rng.uniform(np.where(np.isfinite(low), low, 0), np.where(np.isfinite(high), high, 1)),
            np.clip(rng.standard_normal(len(low)), low, high),
        )
        return np.clip(drawn, low, high).astype(space.dtype).reshape(space.shape)
    return (
        rng.integers(low.astype(np.int64), high.astype(np.int64), endpoint=True)
        .astype(space.dtype)
        .reshape(space.shape)
    )


def _ends(space: Box, end: int) -> Array:
    given = (space.low, space.high)[end]
    info = np.iinfo(space.dtype) if space.dtype.kind in "iu" else None
    default = (-np.inf, np.inf)[end] if info is None else (info.min, info.max)[end]
    values = np.asarray(default if given is None else given, np.float64).ravel()
    return np.where(np.abs(values) > _FAR, (-np.inf, np.inf)[end], values) if info is None else values


def _nested(parts: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in parts.items():
        *above, last = path.split(".")
        at = tree
        for name in above:
            at = at.setdefault(name, {})
        at[last] = value
    return tree
