"""What a disk that refuses means for the store: no room (a retry helps), or failure (only reopening tells)."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from understudy.core.errors import StorageFailed, StorageFull
from understudy.core.log import storage_error


@contextmanager
def disk(doing: str) -> Iterator[None]:
    """StorageFull or StorageFailed instead of whatever the system or SQLite raises inside."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, doing, then="reopen the store") from error
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL:
            raise StorageFull(f"no room for {doing}: {error}; free some space and try again") from error
        raise StorageFailed(f"{doing} failed: {error}; reopen the store") from error
