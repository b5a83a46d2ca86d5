"""Algorithms by name: which class a short name or an import path stands for."""

import dataclasses
import difflib
import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from understudy.core.errors import ConfigError

ALGORITHMS: Mapping[str, str] = {
    "bc": "understudy.learn.algorithms.bc:Bc",
    "dqn": "understudy.learn.algorithms.dqn:Dqn",
    "ppo": "understudy.learn.algorithms.ppo:Ppo",
}
"""Short names; any other algorithm is named by its import path, `module:Class`."""


def algorithm_class(name: str | type) -> Any:
    """The class behind a short name or an import path; ConfigError names the nearest."""
    found = load(ALGORITHMS.get(name, name), what="algorithm", known=ALGORITHMS) if isinstance(name, str) else name
    for part in ("Config", "Knobs"):
        if not dataclasses.is_dataclass(getattr(found, part, None)):
            raise ConfigError(
                f"algorithm {name!r} has no dataclass {part}; give a class that keeps to understudy.core.algorithm"
            )
    return found


def algorithm_name(algorithm: str | type) -> str:
    """What a run's folder calls an algorithm: its short name, or its import path."""
    path = algorithm if isinstance(algorithm, str) else f"{algorithm.__module__}:{algorithm.__qualname__}"
    return next((short for short, known in ALGORITHMS.items() if known == path), path)


def load(path: str, *, what: str, known: Iterable[str] = ()) -> Any:
    """What an import path `module:Name` stands for."""
    module, _, attribute = path.partition(":")
    if not attribute:
        names = sorted(known)
        near = difflib.get_close_matches(path, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(names)}" if names else ""
        raise ConfigError(f"there is no {what} {path!r}{hint} (or name your own as module:Class)")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{what} {path!r} cannot be imported: {error}; give module:Class on the Python path"
        ) from None
