"""Algorithms by name: which class a short name or an import path stands for."""

import ast
import dataclasses
import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from understudy.core.errors import ConfigError
from understudy.core.import_path import load

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


def described(name: str) -> Any:
    """What `algorithm_class` gives for a short name, as far as settings go, read from the source.

    Importing an algorithm brings JAX, which takes seconds; a wrong setting is refused, and a list is shown, without.
    """
    module, _, title = ALGORITHMS[name].partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    source = Path(str(spec.origin))
    body = ast.parse(source.read_text(encoding="utf-8")).body
    space: dict[str, Any] = {"__name__": module}
    exec(compile(ast.Module([one for one in body if _is_light(one)], []), source, "exec"), space)
    says = next(ast.get_docstring(one) for one in body if isinstance(one, ast.ClassDef) and one.name == title)
    return SimpleNamespace(Config=space[f"{title}Config"], Knobs=space[f"{title}Knobs"], __doc__=says)


def _is_light(one: ast.stmt) -> bool:
    if isinstance(one, ast.ImportFrom):
        return one.module in ("dataclasses", "typing") or (one.module or "").startswith("understudy.core.")
    return isinstance(one, ast.ClassDef) and one.name.endswith(("Config", "Knobs"))


def algorithm_name(algorithm: str | type) -> str:
    """What a run's folder calls an algorithm: its short name, or its import path."""
    path = algorithm if isinstance(algorithm, str) else f"{algorithm.__module__}:{algorithm.__qualname__}"
    return next((short for short, known in ALGORITHMS.items() if known == path), path)
