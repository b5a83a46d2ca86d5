"""The adapters on the local disk: store, read-only view, window, file stream and audit.

Other packages open them here and import their classes for type checking only.
"""

import math
import time
from collections.abc import Callable, Container, Hashable, Mapping
from pathlib import Path

from understudy.experience.chunk import ChunkMeta
from understudy.ports import ExperienceStore, FullStore, Position, Specs, Stream
from understudy.stores.audit import AuditedFrame as AuditedFrame
from understudy.stores.audit import Findings as Findings
from understudy.stores.audit import audit
from understudy.stores.audit import lost_in_stream as lost_in_stream
from understudy.stores.audit import summary as summary
from understudy.stores.database import has_store as has_store
from understudy.stores.local import LocalStore
from understudy.stores.view import EXPIRED as EXPIRED
from understudy.stores.view import FORGOTTEN as FORGOTTEN
from understudy.stores.view import QUARANTINED as QUARANTINED
from understudy.stores.view import STORED as STORED
from understudy.stores.view import StoreView
from understudy.stores.window import PAGE, Window
from understudy.streams.file import FileStream

WINDOW_PAGE = PAGE
"""Maximum number of items that one step of a window copies."""


def open_local_store(folder: Path, *, specs: Specs | None = None) -> LocalStore:
    """Open a store for writing; only one process at a time can."""
    return LocalStore(folder, specs=specs)


def as_local_store(store: FullStore) -> LocalStore:
    """Return the same store, typed as LocalStore; the store must be one."""
    assert isinstance(store, LocalStore)
    return store


def open_view(folder: Path) -> StoreView:
    """Open a store for reading; any number of processes can, also while another one writes."""
    return StoreView(folder)


def open_window(
    remote: ExperienceStore,
    folder: Path,
    *,
    specs: Specs,
    keep_s: float | None = None,
    include: Callable[[ChunkMeta], bool] | None = None,
) -> Window:
    """Open a window: a local copy of a remote store that follows the store's tail.

    `keep_s`: how long the copy keeps chunks, or None for ever; `include`: which chunks to copy, or
    None for all.
    """
    return Window(remote, folder, specs=specs, keep_s=keep_s, include=include)


def open_file_stream(folder: Path) -> FileStream:
    """Open the stream of a data folder."""
    return FileStream(folder)


def audit_store(folder: Path, *, is_alone: bool) -> Findings:
    """Return what a check of every stored byte found.

    `is_alone`: no process writes to the store, so SQLite's own integrity check runs as well.
    """
    with StoreView(folder) as view:
        return audit(view, is_alone=is_alone)


def file_stream_state(stream: Stream, *, without: Container[str]) -> Hashable | None:
    """A value that changes when a file stream does; None for remote streams, which wait by reading.

    `without`: partitions that have ended.
    """
    return stream.state(without=without) if isinstance(stream, FileStream) else None


def file_stream_folders(stream: Stream, *, without: Container[str]) -> list[str]:
    """The folders of a file stream in which something changes with its `file_stream_state`."""
    return stream.folders(without=without) if isinstance(stream, FileStream) else []


def trim_file_stream(
    stream: Stream, positions: Mapping[str, Position | None], *, retention_s: float
) -> int:
    """Delete parts of a file stream older than `retention_s` (0: all); return how many bytes.

    Only frames up to `positions`, which are in the store, are deleted. Remote streams have a
    retention of their own, so nothing happens for them.
    """
    if not isinstance(stream, FileStream):
        return 0
    # A file that is still being written may be newer than any time read before.
    before_s = time.time() - retention_s if retention_s else math.inf
    return stream.trim(positions, before_s=before_s)
