"""Algorithms by name: which class a short name or an import path stands for."""

import ast
import dataclasses
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from understudy.core.algorithm import Schedule, setting
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
    body = ast.parse(Path(str(spec.origin)).read_text(encoding="utf-8")).body
    classes = {one.name: one for one in body if isinstance(one, ast.ClassDef)}
    parts = {part: _fields_only(classes[title + part]) for part in ("Config", "Knobs")}
    return SimpleNamespace(**parts, __doc__=ast.get_docstring(classes[title]))


def _fields_only(written: ast.ClassDef) -> type:
    fields = [
        (one.target.id, Any, _value(one.value))
        for one in written.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and one.value is not None
    ]
    return dataclasses.make_dataclass(written.name, fields)


def _value(written: ast.expr) -> Any:
    """What a default means: a literal, or one of the two calls that settings are written with; nothing else is run."""
    if isinstance(written, ast.Call) and isinstance(written.func, ast.Name):
        call: Any = {"setting": setting, "Schedule": Schedule}[written.func.id]
        return call(*map(_value, written.args))
    return ast.literal_eval(written)


def algorithm_name(algorithm: str | type) -> str:
    """What a run's folder calls an algorithm: its short name, or its import path."""
    path = algorithm if isinstance(algorithm, str) else f"{algorithm.__module__}:{algorithm.__qualname__}"
    return next((short for short, known in ALGORITHMS.items() if known == path), path)
