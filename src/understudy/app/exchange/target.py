"""Where an export goes: written under a temporary name beside it, and renamed when it is whole."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from understudy.core.errors import ConfigError
from understudy.core.log import sync_folder


def must_be_free(path: Path) -> None:
    """ConfigError when something is there already: an export never replaces what somebody may have named by mistake."""
    path = path.absolute()
    if path.exists() or path.is_symlink():
        raise ConfigError(f"{path} is there already; remove it, or give another name")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent}; make it first")


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A temporary path to write to; it becomes `path` if the block ends well, and is removed otherwise."""
    must_be_free(path)
    path = path.absolute()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    _remove(temporary)
    try:
        yield temporary
        for one in [temporary, *temporary.rglob("*")] if temporary.is_dir() else [temporary]:
            _sync(one)
        temporary.rename(path)
        sync_folder(path.parent)
    except BaseException:
        _remove(temporary)
        raise


def _sync(path: Path) -> None:
    if path.is_dir():
        sync_folder(path)
        return
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    with suppress(FileNotFoundError):
        path.unlink()
