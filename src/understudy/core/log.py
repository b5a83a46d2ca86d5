"""The log format of the spool and the file stream: append-only files of checksummed entries.

    entry = magic "ulog", length u32, crc u32 (of offset, length and payload), payload, end mark
    end mark = magic "uend", offset of the entry u64, its zero pages u32,
               crc u32 (of these two and the mark's own offset)

Only the process that created a file appends to it; a later process creates a new file. One entry is
one commit: it is written at once and synced (unless the log was opened with `no_sync`) before it is
acknowledged and before the next one is written. So an unreadable entry at the end of a file is
either a torn write that was never acknowledged, or damage. A torn write lacks its end, or whole
pages, which then read as zeros. The end mark, synced together with its entry, counts the pages that
have only zeros: an entry with its end mark and no more zero pages than that was complete. An
unreadable entry before a readable one is always damage. Checksums cover offsets, so that payload
bytes that look like an entry or a mark are not mistaken for one.
"""

import contextlib
import errno
import os
import re
import secrets
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar
from zlib import crc32

from understudy.core.errors import Closed, Locked, Refused, StorageFailed, StorageFull

_MAGIC = b"ulog"
_HEAD = struct.Struct("<4sII")
_PLACE = struct.Struct("<QI")
HEAD_BYTES = _HEAD.size
_END_MAGIC = b"uend"
_END = struct.Struct("<4sQII")
_END_PLACE = struct.Struct("<QIQ")
END_BYTES = _END.size
_EITHER_MAGIC = re.compile(_MAGIC + b"|" + _END_MAGIC)
_SEARCH_BYTES = 1 << 20
_PAGE_BYTES = 4096
_ZEROS = bytes(_PAGE_BYTES)
MAX_ENTRY_BYTES = 256 * 1024 * 1024
_BINARY = getattr(os, "O_BINARY", 0)
"""Without it, Windows writes two bytes for each newline byte."""

Sync = Callable[[int], None]
"""Makes a file descriptor's bytes durable; tests pass variants that count, delay or fail."""


def sync_data(descriptor: int) -> None:
    """Make a file's bytes durable."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(descriptor)
    else:
        os.fsync(descriptor)


def no_sync(descriptor: int) -> None:
    """Do nothing, for logs that need not survive a power cut."""


def sync_folder(folder: Path) -> None:
    """Make a folder's entries durable (a no-op on Windows, which has no such call)."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents durably, so that they survive a power cut."""
    if not folder.parent.exists():
        make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    # Also if the folder existed: the process that created it may have died before syncing.
    sync_folder(folder.parent)


def write_file(path: Path, raw: bytes, *, mode: int = 0o600) -> None:
    """Replace a small file atomically and durably."""
    with _draft(path, raw, mode) as draft:
        os.replace(draft, path)
    sync_folder(path.parent)


def create_once(path: Path, raw: bytes) -> None:
    """Create a small secret file (0600) atomically and durably; never replaces an existing one."""
    with _draft(path, raw, 0o600) as draft, contextlib.suppress(FileExistsError):
        # A link, unlike a rename, never replaces a file that another process has just created.
        os.link(draft, path)
    sync_folder(path.parent)


@contextlib.contextmanager
def _draft(path: Path, raw: bytes, mode: int) -> Iterator[Path]:
    """A synced file beside `path`, which is removed at the end unless it was renamed."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.{os.getpid()}.tmp")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, mode)
    try:
        try:
            view = memoryview(raw)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        yield draft
    finally:
        remove(draft)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REMEDIES = {
    errno.EACCES: "grant this user write permission there",
    errno.EPERM: "grant this user write permission there",
    errno.EROFS: "mount that disk for writing",
    errno.EMFILE: "raise this process's limit of open files (ulimit -n)",
    errno.ENFILE: "raise the machine's limit of open files",
    errno.ENOLCK: "use a file system that supports locks",
    errno.ENOTSUP: "use a file system that supports locks",
}


def storage_error(
    error: OSError, doing: str, *, then: str = "try again"
) -> StorageFull | StorageFailed:
    """Return StorageFull if the disk is full, else StorageFailed; the message says what to fix.

    `doing` names the failed action, such as `writing x.log`; `then` is the advice that follows the
    fix.
    """
    why = error.strerror or str(error)
    if error.filename is not None:
        why += f" ({error.filename})"
    if error.errno in _FULL:
        return StorageFull(f"no room for {doing}: {why}; free some space and try again")
    remedy = _REMEDIES.get(error.errno or 0)
    return StorageFailed(f"{doing} failed: {why}; {f'{remedy}, then {then}' if remedy else then}")


class LogFile:
    """The appending side of one log file; create it once, never reopen it."""

    def __init__(self, path: Path, *, sync: Sync = sync_data) -> None:
        self.path = path
        self._sync = sync
        self.size_bytes = 0
        self._failed: str | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor: int | None = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o600
        )
        if sync is not no_sync:
            try:
                sync_folder(path.parent)
            except OSError:
                self.close()
                remove(path)
                raise

    def append(self, parts: Sequence[bytes | memoryview]) -> "Entry":
        """Write one entry that consists of these parts and sync it.

        After StorageFull, the entry is not stored, and the call may be repeated. After
        StorageFailed, it may or may not be stored: continue in a new file.
        """
        if self._descriptor is None:
            raise Closed(f"log {self.path.name} is closed; open a new one to append")
        if self._failed:
            raise StorageFailed(self._failed)
        payload = b"".join(parts)
        if len(payload) > MAX_ENTRY_BYTES:
            raise Refused(
                "too_large",
                f"an entry of {len(payload)} bytes; a log accepts at most {MAX_ENTRY_BYTES}",
            )
        start = at = self.size_bytes
        raw = bytearray(_HEAD.pack(_MAGIC, len(payload), _checksum(payload, start)))
        raw += payload
        # Written together, so that no page has the end mark but not the bytes before it.
        raw += _end_mark(start, _zero_pages(raw, start), start + len(raw))
        view = memoryview(raw)
        try:
            while view:
                written = _pwrite(self._descriptor, view, at)
                view = view[written:]
                at += written
            self._sync(self._descriptor)
        except OSError as error:
            failure = storage_error(
                error, f"writing {self.path.name}", then="open a new file to continue"
            )
            if isinstance(failure, StorageFull):
                try:
                    os.ftruncate(self._descriptor, start)
                except OSError:
                    self._failed = (
                        f"log {self.path.name} could not be truncated after the disk was full; "
                        "open a new one"
                    )
            else:
                # A failed sync may have dropped the pages that it could not write, so the same
                # bytes are never synced again.
                self._failed = str(failure)
            raise failure from error
        self.size_bytes = at
        return Entry(start, at, payload)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


if hasattr(os, "pwrite"):

    def _pwrite(descriptor: int, view: memoryview, at: int) -> int:
        return os.pwrite(descriptor, view, at)
else:

    def _pwrite(descriptor: int, view: memoryview, at: int) -> int:
        os.lseek(descriptor, at, os.SEEK_SET)
        return os.write(descriptor, view)


def _checksum(payload: bytes, start: int) -> int:
    return crc32(payload, crc32(_PLACE.pack(start, len(payload))))


def _end_mark(start: int, zero_pages: int, at: int) -> bytes:
    """The end mark at offset `at` of the entry that starts at `start`."""
    return _END.pack(_END_MAGIC, start, zero_pages, crc32(_END_PLACE.pack(start, zero_pages, at)))


def _zero_pages(raw: bytes | bytearray, start: int) -> int:
    """How many pages of a file have only zeros in these bytes, without the page of the end mark."""
    first = -start % _PAGE_BYTES  # where the first page begins in these bytes
    last = len(raw) - (start + len(raw)) % _PAGE_BYTES
    pages = range(first, last, _PAGE_BYTES)
    is_first_zero = 0 < first <= last and not any(raw[:first])
    return sum(raw.startswith(_ZEROS, at) for at in pages) + is_first_zero


@dataclass(frozen=True, slots=True)
class Entry:
    """One commit in a file: its payload, its start, and its end, where the next one starts."""

    start: int
    end: int
    payload: bytes


class LogReader:
    """Reads the entries of one file in order; safe while another process appends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = os.open(path, os.O_RDONLY | _BINARY)

    def at(self, start: int) -> Entry | None:
        """The entry that starts at this offset, or None if there is no complete, readable one."""
        descriptor = self._usable()
        head = _pread(descriptor, HEAD_BYTES, start)
        if len(head) < HEAD_BYTES:
            return None
        magic, length, crc = _HEAD.unpack(head)
        if magic != _MAGIC or length > MAX_ENTRY_BYTES:
            return None
        payload = _pread(descriptor, length, start + HEAD_BYTES)
        if len(payload) < length or _checksum(payload, start) != crc:
            return None
        end = start + HEAD_BYTES + length + END_BYTES
        # The end mark must be there, but may be damaged: the payload is not.
        return Entry(start, end, payload) if _pread(descriptor, 1, end - 1) else None

    def entries(self) -> Iterator[Entry]:
        """Yield the readable entries up to the first unreadable one."""
        entry = self.at(0)
        while entry is not None:
            yield entry
            entry = self.at(entry.end)

    def damage_end(self, start: int) -> int | None:
        """Where the damage that starts at an unreadable entry ends.

        It ends at the next readable entry, or after the end mark of an unreadable one. None if
        there is neither: the rest of the file is a torn write.
        """
        size = self.size_bytes
        at = start + 1
        while at < size:
            window = _pread(self._usable(), _SEARCH_BYTES, at)
            if not window:
                return None  # the file was cut in the meantime
            for match in _EITHER_MAGIC.finditer(window):
                offset = at + match.start()
                if match[0] == _END_MAGIC:
                    if self._was_complete(start, offset):
                        return offset + END_BYTES
                elif self._has_end_mark(offset) and self.at(offset) is not None:
                    return offset
            at += max(1, len(window) - len(_MAGIC) + 1)
        return None

    def _has_end_mark(self, start: int) -> bool:
        """Whether an entry that seems to start here is complete, without reading its payload.

        Payloads may hold any number of bytes that look like entries; reading each to its end would
        take time without limit.
        """
        head = _pread(self._usable(), HEAD_BYTES, start)
        if len(head) < HEAD_BYTES:
            return False
        mark = self._end_mark_at(start + HEAD_BYTES + _HEAD.unpack(head)[1])
        return mark is not None and mark[0] == start

    def _was_complete(self, start: int, at: int) -> bool:
        """Whether an entry from `start` on has its end mark at this offset, and no page is lost."""
        mark = self._end_mark_at(at)
        if mark is None or not start <= mark[0] <= at:
            return False
        raw = _pread(self._usable(), at - mark[0], mark[0])
        return _zero_pages(raw, mark[0]) <= mark[1]

    def _end_mark_at(self, at: int) -> tuple[int, int] | None:
        """Start and zero pages of the entry whose end mark is at this offset, if there is one."""
        raw = _pread(self._usable(), END_BYTES, at)
        if len(raw) < END_BYTES:
            return None
        _, start, zero_pages, _ = _END.unpack(raw)
        return (start, zero_pages) if raw == _end_mark(start, zero_pages, at) else None

    @property
    def size_bytes(self) -> int:
        return os.fstat(self._usable()).st_size

    def _usable(self) -> int:
        if self._descriptor is None:
            raise Closed(f"reader of {self.path.name} is closed")
        return self._descriptor

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> "LogReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


if hasattr(os, "pread"):

    def _pread(descriptor: int, length: int, at: int) -> bytes:
        raw = os.pread(descriptor, length, at)
        while 0 < len(raw) < length:
            more = os.pread(descriptor, length - len(raw), at + len(raw))
            if not more:
                break
            raw += more
        return raw
else:

    def _pread(descriptor: int, length: int, at: int) -> bytes:
        os.lseek(descriptor, at, os.SEEK_SET)
        return os.read(descriptor, length)


def erase_before(path: Path, end: int) -> int:
    """Overwrite the entries before an offset with one entry of zeros; return the bytes erased.

    Another process may append meanwhile: offsets stay the same. Bytes that were erased by an
    earlier call are not counted again.
    """
    descriptor = os.open(path, os.O_RDWR | _BINARY)
    try:
        head = _pread(descriptor, HEAD_BYTES, 0)
        length = end - HEAD_BYTES - END_BYTES
        if len(head) < HEAD_BYTES or length <= 0:
            return 0
        _, zeros, crc = _HEAD.unpack(head)
        is_erased = zeros <= MAX_ENTRY_BYTES and crc == _checksum(bytes(zeros), 0)
        erased: int = HEAD_BYTES + zeros + END_BYTES if is_erased else 0
        if erased >= end:
            return 0
        payload = bytes(length)
        raw = _HEAD.pack(_MAGIC, length, _checksum(payload, 0)) + payload
        raw += _end_mark(0, _zero_pages(raw, 0), len(raw))
        # The head is written last: until then, a later call erases all of it again.
        for first, last in ((HEAD_BYTES, end), (0, HEAD_BYTES)):
            view = memoryview(raw)[first:last]
            while view:
                view = view[_pwrite(descriptor, view, last - len(view)) :]
            sync_data(descriptor)
        return end - erased
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a file if it exists."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


# --- Group commit ---------------------------------------------------------------------------------

Item = TypeVar("Item")
Result = TypeVar("Result")


class _PendingCommit(Generic[Item, Result]):
    __slots__ = ("done", "error", "item", "result", "size")

    def __init__(self, item: Item, size: int) -> None:
        self.item = item
        self.size = size
        self.done = False
        self.result: Result | None = None
        self.error: BaseException | None = None


class GroupCommit(Generic[Item, Result]):
    """Merges concurrent `submit` calls into few `commit` calls, which share one sync."""

    def __init__(
        self,
        commit: Callable[[Sequence[Item]], Sequence[Result]],
        *,
        size: Callable[[Item], int],
        most: int,
    ):
        self._commit = commit
        self._size = size
        self._most = most
        self._waiting: deque[_PendingCommit[Item, Result]] = deque()
        self.alone = threading.Lock()
        """While this lock is held, no commit runs and callers of `submit` wait."""

    def submit(self, item: Item) -> Result:
        """Return the commit's result for this item once it is durable, or raise its error."""
        pending: _PendingCommit[Item, Result] = _PendingCommit(item, self._size(item))
        self._waiting.append(pending)
        while not pending.done:
            # The holder of the lock commits every queued item; the next holder usually finds its
            # own item done.
            with self.alone:
                if not pending.done:
                    self._commit_waiting()
        if pending.error is not None:
            raise pending.error
        assert pending.result is not None
        return pending.result

    def _commit_waiting(self) -> None:
        group = [self._waiting.popleft()]
        total = group[0].size
        while self._waiting and total + self._waiting[0].size <= self._most:
            group.append(self._waiting.popleft())
            total += group[-1].size
        try:
            results = self._commit([pending.item for pending in group])
            for pending, result in zip(group, results, strict=True):
                pending.result = result
        except BaseException as error:
            for pending in group:
                pending.error = error
            if not isinstance(error, Exception):
                raise
        finally:
            for pending in group:
                pending.done = True


# --- Advisory locks between processes, which the system releases when the holder dies -------------

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
_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK)
"""Errors that say that another process holds a lock; the last two are those of Windows."""


class FileLock:
    """Holds a lock file from construction to close; Locked if another process holds it."""

    def __init__(self, path: Path, *, what: str, timeout_s: float = 0.0) -> None:
        """Retry for up to `timeout_s`; `is_locked` in another process holds the lock briefly."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor: int | None = os.open(
            path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600
        )
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                _take(self._descriptor)
                return
            except OSError as error:
                if error.errno in _HELD and time.monotonic() < deadline:
                    time.sleep(_RETRY_S)
                    continue
                os.close(self._descriptor)
                self._descriptor = None
                if error.errno not in _HELD:
                    raise storage_error(error, f"locking {path}") from None
                raise Locked(
                    f"{what} is in use by another process ({path}); stop that process, or wait for "
                    "it"
                ) from None

    @property
    def descriptor(self) -> int:
        """Of the lock file; a child process that has it open, too, keeps a killed holder's lock."""
        if self._descriptor is None:
            raise Closed("the lock was released")
        return self._descriptor

    def close(self) -> None:
        """Release the lock; the file stays."""
        if self._descriptor is not None:
            # Released explicitly, since a child forked in the meantime may hold the descriptor.
            _release(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def abandon(self) -> None:
        """Close the descriptor in a forked child; the parent still holds the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> "FileLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_locked(path: Path) -> bool:
    """Whether a process holds this lock file now."""
    if not path.exists():
        return False
    try:
        FileLock(path, what="probe").close()
    except Locked:
        return True
    except OSError:
        pass  # a folder without write permission has no writer
    return False
