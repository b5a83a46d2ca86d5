"""One process at a time: an advisory lock on a `.lock` file that the system releases when the holder dies."""

import os
import sys
import time
from pathlib import Path

from understudy.core.errors import Locked

if sys.platform == "win32":
    import msvcrt

    def _take(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

    def _release(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)
else:
    import fcntl

    def _take(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _release(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


_RETRY_S = 0.01


class FileLock:
    """Holds a lock file from construction to close; Locked when another process has it."""

    def __init__(self, path: Path, *, what: str, patience_s: float = 0.0) -> None:
        """`patience_s`: how long to try, since others take the lock for a moment to see whether it is free."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        deadline = time.monotonic() + patience_s
        while True:
            try:
                _take(self._descriptor)
                return
            except OSError:
                if time.monotonic() >= deadline:
                    os.close(self._descriptor)
                    self._descriptor = None
                    raise Locked(
                        f"{what} is in use by another process ({path}); stop that process, or wait for it"
                    ) from None
            time.sleep(_RETRY_S)

    def close(self) -> None:
        """Release the lock; the file stays."""
        if self._descriptor is not None:
            # Said aloud, since a child that was forked meanwhile may still hold the descriptor.
            _release(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> "FileLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_locked(path: Path) -> bool:
    """Whether some process holds this lock file now."""
    if not path.exists():
        return False
    try:
        FileLock(path, what="probe").close()
    except Locked:
        return True
    except OSError:
        pass  # a folder that cannot be written to has no writer
    return False
