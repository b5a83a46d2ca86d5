"""The packages of the extra `export`, imported when a file of their kind is opened."""

import importlib
from typing import Any

from understudy.core.errors import MissingExtra


def extra(module: str) -> Any:
    """The module, or MissingExtra with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise MissingExtra(
            f"this format needs the package {error.name or name}; pip install 'understudy[export]'"
        ) from error


def one_line(error: BaseException, *, most: int = 160) -> str:
    """What a library said, as one line."""
    text = " ".join(str(error).split())
    if isinstance(error, KeyError):
        text = f"{text} is missing"
    text = text or f"it is not as the library wants it ({type(error).__name__})"
    return text if len(text) <= most else f"{text[: most - 1]}…"
