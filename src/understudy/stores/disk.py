"""What a disk that refuses means for the store: no room (a retry helps), or failure (only reopening tells)."""

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from understudy.core.errors import StorageFailed, StorageFull

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def disk(doing: str) -> Iterator[None]:
    """StorageFull or StorageFailed instead of whatever the system or SQLite raises inside."""
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError) or error.errno not in _FULL:
            raise StorageFailed(f"{doing} failed: {error}; reopen the store") from error
        raise StorageFull(f"no room for {doing}: {error.strerror}; free some space and try again") from error
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL:
            raise StorageFull(f"no room for {doing}: {error}; free some space and try again") from error
        raise StorageFailed(f"{doing} failed: {error}; reopen the store") from error
