"""Plug-ins by import path, `module:Name`: algorithms, networks, wrappers."""

import difflib
import importlib
from collections.abc import Iterable
from typing import Any

from understudy.core.errors import ConfigError


def load(path: str, *, what: str, known: Iterable[str] = ()) -> Any:
    """What an import path stands for; ConfigError names the nearest of the known short names."""
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
