"""A game's spaces as Gymnasium's, for formats that describe them in that way."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from understudy.core.errors import ConfigError
from understudy.core.game import nested
from understudy.core.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space
from understudy.core.tensors import Array


def gym_space(leaves: Mapping[str, Space]) -> spaces.Space[Any]:
    """The one space, or a Dict of those whose paths part at the dots."""
    if set(leaves) == {""}:
        return _leaf(leaves[""])
    return spaces.Dict({
        key: part if isinstance(part, spaces.Space) else gym_space(part) for key, part in _tree(leaves).items()
    })  # fmt: skip


def _tree(leaves: Mapping[str, Space]) -> dict[str, Any]:
    parts: dict[str, dict[str, Space]] = {}
    for path, space in leaves.items():
        head, _, rest = path.partition(".")
        parts.setdefault(head, {})[rest] = space
    return {head: _only(head, inner) for head, inner in parts.items()}


def _only(head: str, inner: Mapping[str, Space]) -> Any:
    if "" in inner and len(inner) > 1:
        raise ConfigError(f"{head!r} is a part of its own and has parts, which no Dict space can be; rename one")
    return _leaf(inner[""]) if "" in inner else dict(inner)


def _leaf(space: Space) -> spaces.Space[Any]:
    match space:
        case Discrete(n=n, start=start):
            return spaces.Discrete(n, start=start)
        case MultiDiscrete(counts=counts, shape=shape) if shape:
            return spaces.MultiDiscrete(np.reshape(counts, shape), dtype=space.dtype.type)
        case MultiBinary(shape=shape) if shape:
            return spaces.MultiBinary(shape)
        case Box():
            return _box(space)
    return _box(Box(space.shape, space.dtype))


def _box(space: Box) -> spaces.Space[Any]:
    low, high = space.ends()
    return spaces.Box(low, high, shape=space.shape, dtype=low.dtype.type)


def unflattened(columns: Mapping[str, Array], head: str) -> Any:
    """Columns `head.a.b` as dictionaries inside one another; the only column `head` as it is."""
    return (
        columns[head] if head in columns else nested({name.partition(".")[2]: rows for name, rows in columns.items()})
    )


def flattened(value: Any, head: str) -> dict[str, Array]:
    """Arrays in dictionaries and tuples by their dotted name."""
    if isinstance(value, Mapping):
        parts: list[tuple[str, Any]] = [(str(key), part) for key, part in value.items()]
    elif isinstance(value, tuple):
        parts = [(str(index), part) for index, part in enumerate(value)]
    else:
        return {head: np.asarray(value)}
    return {name: rows for key, part in parts for name, rows in flattened(part, f"{head}.{key}").items()}
