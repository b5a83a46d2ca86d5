"""A picture of what a command printed, as SVG: whoever opens it loads nothing from elsewhere and learns no key."""

import re
from pathlib import Path

from rich.console import Console

from understudy.core.errors import ConfigError

_FONT = re.compile(r"\s*@font-face\s*\{[^}]*https?://[^}]*\}")
_COMMENT = re.compile(r"\s*<!--.*?-->", re.DOTALL)
_KEY = re.compile(r"(?<=key=)[^\s<>&\"']+")


def check_picture(path: Path) -> None:
    """ConfigError where no picture can be written; leaves no file that was not there."""
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--svg {path}: there is no folder {path.absolute().parent}; make it first")
    try:
        was_there = path.exists()
        with path.open("ab"):
            pass
        if not was_there:
            path.unlink()
    except OSError as error:
        raise ConfigError(
            f"--svg {path} cannot be written: {error.strerror}; give a file in a folder of yours"
        ) from None


def write_picture(path: Path, out: Console, *, title: str) -> None:
    """Write what a recording console printed."""
    path.write_text(shareable(out.export_svg(title=title)), encoding="utf-8")


def shareable(svg: str) -> str:
    """The picture without fonts from elsewhere (any monospace one is taken) and without the keys in addresses."""
    # As long as before: each text of the picture has its length beside it, and would be stretched to it.
    return _KEY.sub(lambda key: "…" + "&#160;" * (len(key[0]) - 1), _COMMENT.sub("", _FONT.sub("", svg)))
