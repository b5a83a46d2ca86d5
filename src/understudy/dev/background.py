"""Servers that go on when their command has ended: one folder for all of them, one inside it for each."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from understudy.core.log import FileLock
from understudy.dev.packages import cache_root
from understudy.dev.servers import SERVERS, Server, attach, is_ours, last_lines, start, why_not

USUAL = ("cassandra", "kafka", "kinesis", "s3")
"""Those that are started when none is named."""

_OTHER_START_S = 600.0
"""Longer than any start."""

State = Literal["running", "died", "stopped", "unavailable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """How one server stands."""

    name: str
    state: State
    server: Server | None = None
    """Only of one that runs or died."""
    words: str = ""
    """Why it is unavailable, or the last lines of one that died."""


def default_folder() -> Path:
    """Where background servers live unless another folder is named."""
    return cache_root() / "running"


def look(name: str, folder: Path) -> Found:
    """How this server stands in this folder; nothing is changed."""
    server = attach(folder / name)
    if server is None:
        reason = why_not(name)
        return Found(name=name, state="unavailable" if reason else "stopped", words=reason or "")
    if server.is_alive:
        return Found(name=name, state="running", server=server)
    return Found(name=name, state="died", server=server, words=last_lines(folder / name))


def ensure(name: str, folder: Path) -> tuple[Server, bool]:
    """The running server of this folder, and whether it was started now; then it ends with us unless detached."""
    with _alone(name, folder):
        found = look(name, folder)
        if found.state == "running" and found.server is not None:
            return found.server, False
        return start(name, folder / name), True


def stop(name: str, folder: Path, *, erases: bool = False) -> bool:
    """Stop the server of this folder, and remove its data if asked; says whether one ran.

    One that is being started is waited for. What no server of ours has made is never removed.
    """
    place = folder / name
    if not (place.exists() or _lock_file(name, folder).exists()):
        return False
    with _alone(name, folder):
        goes = erases and place.exists() and is_ours(name, place)
        server = attach(place)
        ran = server is not None and server.is_alive
        if server is not None:
            server.stop()
        if goes:
            shutil.rmtree(place)
        return ran


def _alone(name: str, folder: Path) -> FileLock:
    """Held while a server of this folder is started or stopped."""
    return FileLock(
        _lock_file(name, folder), what=f"the start or stop of {name}", patience_s=_OTHER_START_S
    )  # fmt: skip


def _lock_file(name: str, folder: Path) -> Path:
    return folder / f".{name}.lock"


def known(names: Sequence[str]) -> Sequence[str]:
    """The servers of these names in the order they are started; ConfigError for one that there is not."""
    for name in names:
        why_not(name)
    return [name for name in SERVERS if name in names]
