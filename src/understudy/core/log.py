"""The one framed log under spool, stream and store: append-only files of checksummed entries.

    entry = magic "ulog", length u32, crc u32 (of offset, length and payload), payload

A file is appended to only by the process that created it; whoever comes later starts a new file. One entry is one
commit: written at once, synced (unless the log says otherwise) before it is acknowledged and before the next one is
written. So an unreadable entry at the end of a file is a torn write that nobody was promised, and an unreadable entry
with a readable one behind it is damage. The checksum covers the entry's offset, so that bytes of a payload that look
like an entry are none.
"""

import contextlib
import errno
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from understudy.core.errors import Closed, Corrupt, Refused, StorageFailed, StorageFull

_MAGIC = b"ulog"
_HEAD = struct.Struct("<4sII")
_PLACE = struct.Struct("<QI")
HEAD_BYTES = _HEAD.size
MAX_ENTRY_BYTES = 256 * 1024 * 1024
_BINARY = getattr(os, "O_BINARY", 0)
"""Without it Windows would write two bytes for each newline byte."""

Sync = Callable[[int], None]
"""Makes a file descriptor's bytes durable; tests pass others to count, delay or sabotage."""


def sync_data(descriptor: int) -> None:
    """Make a file's bytes durable."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(descriptor)
    else:
        os.fsync(descriptor)


def no_sync(descriptor: int) -> None:
    """For logs that promise nothing across a power cut."""


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
    """Create a folder and what is missing above it, so that a power cut takes neither away."""
    if not folder.parent.exists():
        make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    # Also where it was there already: whoever made it may not have come this far.
    sync_folder(folder.parent)


def write_file(path: Path, raw: bytes, *, mode: int = 0o600) -> None:
    """Replace a small file atomically and durably."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _BINARY, mode)
    try:
        try:
            view = memoryview(raw)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except OSError:
        remove(temporary)
        raise
    sync_folder(path.parent)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REMEDIES = {
    errno.EACCES: "give this user the right to write there",
    errno.EPERM: "give this user the right to write there",
    errno.EROFS: "mount that disk for writing",
    errno.EMFILE: "raise this process's limit of open files (ulimit -n)",
    errno.ENFILE: "raise the machine's limit of open files",
}


def storage_error(error: OSError, doing: str, *, then: str = "try again") -> StorageFull | StorageFailed:
    """What a refusing disk means: no room (a retry helps), or a failure that says what to mend before `then`."""
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
        self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o600)
        if sync is not no_sync:
            try:
                sync_folder(path.parent)
            except OSError:
                self.close()
                remove(path)
                raise

    def append(self, parts: Sequence[bytes | memoryview]) -> "Entry":
        """Write one entry made of these parts and sync it.

        StorageFull leaves the file as it was. After StorageFailed nobody knows about the last entry: start a new file.
        """
        descriptor = self._usable()
        payload = b"".join(parts)
        if len(payload) > MAX_ENTRY_BYTES:
            raise Refused("too_large", f"an entry of {len(payload)} bytes; a log takes at most {MAX_ENTRY_BYTES}")
        start, end = self.size_bytes, self.size_bytes + HEAD_BYTES + len(payload)
        try:
            self._write(_HEAD.pack(_MAGIC, len(payload), _checksum(payload, start)) + payload, start)
            self._sync(descriptor)
        except OSError as error:
            raise self._gave_up(error, start) from error
        self.size_bytes = end
        return Entry(start, end, payload)

    def _usable(self) -> int:
        if self._descriptor is None:
            raise Closed(f"log {self.path.name} was closed")
        if self._failed:
            raise StorageFailed(self._failed)
        return self._descriptor

    def _write(self, raw: bytes, at: int) -> None:
        assert self._descriptor is not None
        view = memoryview(raw)
        while view:
            written = _pwrite(self._descriptor, view, at)
            view, at = view[written:], at + written

    def _gave_up(self, error: OSError, start: int) -> StorageFull | StorageFailed:
        assert self._descriptor is not None
        failure = storage_error(error, f"writing {self.path.name}", then="open a new file to go on")
        if isinstance(failure, StorageFull):
            try:
                os.ftruncate(self._descriptor, start)
            except OSError:
                self._failed = f"log {self.path.name} could not be cut back after a full disk; open a new one"
        else:
            # A failed sync may have dropped the pages it could not write: never sync the same bytes again.
            self._failed = str(failure)
        return failure

    def sync_with(self, sync: Sync) -> None:
        """Sync everything so far, and each entry from now on, this way."""
        descriptor = self._usable()
        self._sync = sync
        try:
            sync(descriptor)
            sync_folder(self.path.parent)
        except OSError as error:
            raise self._gave_up(error, self.size_bytes) from error

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


@dataclass(frozen=True, slots=True)
class Entry:
    """One commit as it lies in a file: payload, where the entry starts, and where the next one does."""

    start: int
    end: int
    payload: bytes


class LogReader:
    """Reads entries of one file in order; safe while another process appends."""

    def __init__(self, path: Path, *, check: bool = True) -> None:
        self.path = path
        self._check = check
        self._descriptor: int | None = os.open(path, os.O_RDONLY | _BINARY)

    def at(self, start: int, *, up_to: int | None = None) -> Entry | None:
        """The entry that starts here, or None when there is no whole, readable one (before `up_to`)."""
        descriptor = self._usable()
        head = _pread(descriptor, HEAD_BYTES, start)
        if len(head) < HEAD_BYTES:
            return None
        magic, length, crc = _HEAD.unpack(head)
        end = start + HEAD_BYTES + length
        if magic != _MAGIC or length > MAX_ENTRY_BYTES or (up_to is not None and end > up_to):
            return None
        payload = _pread(descriptor, length, start + HEAD_BYTES)
        if len(payload) < length or (self._check and _checksum(payload, start) != crc):
            return None
        return Entry(start, end, payload)

    def bytes_at(self, start: int, length: int) -> bytes:
        """Bytes inside an entry that was read before."""
        if self._descriptor is None:
            raise Closed(f"reader of {self.path.name} was closed")
        return _pread(self._descriptor, length, start)

    def entries(self, start: int = 0, *, up_to: int | None = None) -> Iterator[Entry]:
        """Readable entries from an offset to the first unreadable one, or to `up_to`."""
        while up_to is None or start < up_to:
            entry = self.at(start, up_to=up_to)
            if entry is None:
                return
            yield entry
            start = entry.end

    def next_readable(self, start: int) -> int | None:
        """Where the next readable entry behind damage at `start` begins, or None: then it was a torn end."""
        size = self.size_bytes
        at = start + 1
        while at < size:
            window = _pread(self._usable(), 1 << 20, at)
            found = window.find(_MAGIC)
            if found < 0:
                at += max(1, len(window) - len(_MAGIC) + 1)
                continue
            if self.at(at + found) is not None:
                return at + found
            at += found + 1
        return None

    @property
    def size_bytes(self) -> int:
        return os.fstat(self._usable()).st_size

    def _usable(self) -> int:
        if self._descriptor is None:
            raise Closed(f"reader of {self.path.name} was closed")
        return self._descriptor

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> "LogReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def readable_end(reader: LogReader, *, must_reach: int = 0) -> int:
    """Where the readable entries of a finished file end; Corrupt when more follow, or it ends before `must_reach`."""
    end = 0
    for entry in reader.entries():
        end = entry.end
    if end < must_reach or (end < reader.size_bytes and reader.next_readable(end) is not None):
        raise Corrupt(f"log {reader.path.name} is damaged at byte {end}; later entries exist, so this is no torn write")
    return end


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


def remove(path: Path) -> None:
    """Delete a file that may already be gone."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
