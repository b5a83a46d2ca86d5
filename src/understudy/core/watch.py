"""FolderWatch: waits until something in one of several folders changes.

On Linux the kernel reports changes (inotify), so that waiting needs no time of a processor. Other
systems, and folders that cannot be watched, have no such reports: there, the caller polls.
"""

import contextlib
import ctypes
import os
import select
import sys
import threading
from collections.abc import Iterable

_MODIFY = 0x2
_MOVED_TO = 0x80
_CREATE = 0x100
_ONLY_FOLDERS = 0x0100_0000
_MOST_BYTES = 65_536


class FolderWatch:
    """Changes in a set of folders; not thread-safe."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._watched: dict[str, int] = {}
        if sys.platform == "linux":
            with contextlib.suppress(OSError, AttributeError):
                self._libc = ctypes.CDLL(None, use_errno=True)
                # -1 on failure, such as too many of them on this machine
                self._descriptor = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)

    def watch(self, folders: Iterable[str]) -> bool:
        """Watch these folders from now on, instead of others; False if one cannot be watched."""
        if self._descriptor < 0:
            return False
        wanted = set(folders)
        for gone in self._watched.keys() - wanted:
            # Fails if the folder was deleted, which has ended the watch already.
            self._libc.inotify_rm_watch(self._descriptor, self._watched.pop(gone))
        kinds = _MODIFY | _MOVED_TO | _CREATE | _ONLY_FOLDERS
        for folder in wanted - self._watched.keys():
            number = self._libc.inotify_add_watch(self._descriptor, os.fsencode(folder), kinds)
            if number < 0:
                return False
            self._watched[folder] = number
        return True

    def wait(self, stop: threading.Event, wait_s: float) -> None:
        """Return after a change since the last `wait`, or after `wait_s`."""
        if stop.is_set():
            return
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        if poll.poll(1000 * wait_s):
            with contextlib.suppress(BlockingIOError):
                os.read(self._descriptor, _MOST_BYTES)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
