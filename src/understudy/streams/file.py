"""The embedded stream: a folder of logs, one per appending process.

    STREAM/<partition>/.lock            held while its process lives
    STREAM/<partition>/00000001.log     entries of core/log: append time (f64) and whole frames

A partition whose lock is free has ended: its process closed it or died. Positions name file, entry and frame.
"""

import contextlib
import os
import shutil
import struct
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import Closed, ConfigError, PositionGone, StorageFailed, StorageFull
from understudy.core.frame import HEADER_BYTES, MAX_FRAME_BYTES, Frame
from understudy.core.group import GroupCommit
from understudy.core.lock import FileLock, is_locked
from understudy.core.log import Entry, LogFile, LogReader, Sync, make_folder, remove, sync_data, sync_folder
from understudy.core.ports import Outcome, Partition, Position, Read, Record

_TIME = struct.Struct("<d")
_POLL_S = 0.004
_MOST_BYTES = 16 * 1024 * 1024
ROLL_BYTES = 32 * 1024 * 1024
_TOO_LARGE = Outcome(durable=False, error=f"too_large: a frame takes at most {MAX_FRAME_BYTES} bytes")


def _is_too_large(frame: Frame) -> bool:
    return frame.size_bytes > MAX_FRAME_BYTES


class FileStream:
    """A durable stream on local disk; any number of processes append, one reads."""

    def __init__(
        self, folder: Path, *, sync: Sync = sync_data, roll_bytes: int = ROLL_BYTES, clock: Clock | None = None
    ) -> None:
        if sys.platform == "win32":
            raise ConfigError("the file stream runs on Linux and macOS only; on Windows connect to a gateway instead")
        self._folder = folder
        self._sync = sync
        self._roll_bytes = roll_bytes
        self._clock = clock or SystemClock()
        self._writer: _PartitionWriter | None = None
        self._opening = threading.Lock()
        self._closed = False
        self._group = GroupCommit[Sequence[bytes], Outcome](
            self._commit, size=lambda parts: sum(map(len, parts)), most=_MOST_BYTES
        )

    def append(self, frames: Sequence[Frame]) -> Sequence[Outcome]:
        if self._closed:
            raise Closed("the stream was closed")
        # Encoded here, so that a frame that cannot be encoded fails its own caller only.
        parts = [part for frame in frames if not _is_too_large(frame) for part in (frame.header(), frame.body)]
        outcome = self._group.submit(parts) if parts else Outcome(durable=True)
        return [_TOO_LARGE if _is_too_large(frame) else outcome for frame in frames]

    def _commit(self, groups: Sequence[Sequence[bytes]]) -> Sequence[Outcome]:
        parts = [_TIME.pack(self._clock.now()), *(part for group in groups for part in group)]
        try:
            if self._closed:
                raise Closed("the stream was closed")
            self._own_partition().append(parts)
            outcome = Outcome(durable=True)
        except (StorageFull, StorageFailed) as error:
            outcome = Outcome(durable=False, error=str(error), retry_after_s=1.0)
        return [outcome] * len(groups)

    def _own_partition(self) -> "_PartitionWriter":
        with self._opening:
            if self._writer is None or self._writer.pid != os.getpid():
                try:
                    self._writer = _PartitionWriter(self._folder, sync=self._sync, roll_bytes=self._roll_bytes)
                except OSError as error:
                    raise StorageFull(f"no room for a stream partition: {error.strerror}; free some space") from error
            return self._writer

    def partitions(self) -> Sequence[Partition]:
        if not self._folder.exists():
            return []
        return [Partition(path.name) for path in sorted(self._folder.iterdir()) if not path.name.startswith(".")]

    def read(self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float) -> Read:
        folder = self._folder / partition
        deadline = time.monotonic() + wait_s
        while True:
            # Asked before reading: a lock seen free now means that whatever was appended is already there.
            ended = not is_locked(folder / ".lock")
            records, following = _read_from(folder, after, max_bytes=max_bytes)
            if records or ended or time.monotonic() >= deadline:
                return Read(records, following, ended and not records)
            time.sleep(_POLL_S)

    def trim(self, stored: Mapping[str, Position | None], *, before_s: float) -> int:
        """Delete files that are wholly stored and last written before a time; how many bytes went."""
        freed = 0
        for partition in self.partitions():
            position = stored.get(partition.id)
            folder = self._folder / partition.id
            numbers = _file_numbers(folder)
            if position is None or not numbers:
                continue
            ended = not is_locked(folder / ".lock")
            at = _Place.parse(position)
            for number in numbers:
                path = _file(folder, number)
                if path.stat().st_mtime >= before_s or number > at.file:
                    break
                if number < at.file or (ended and number == numbers[-1] and _is_read_out(path, at)):
                    freed += path.stat().st_size
                    remove(path)
            if ended and not _file_numbers(folder):
                shutil.rmtree(folder, ignore_errors=True)
        return freed

    def close(self) -> None:
        self._closed = True
        with self._opening:
            if self._writer is not None and self._writer.pid == os.getpid():
                self._writer.close()
            self._writer = None


class _PartitionWriter:
    """This process's own partition."""

    def __init__(self, folder: Path, *, sync: Sync, roll_bytes: int) -> None:
        self.pid = os.getpid()
        self._sync = sync
        self._roll_bytes = roll_bytes
        self._number = 0
        self._log: LogFile | None = None
        make_folder(folder)
        name = f"{time.time_ns():016x}-{uuid.uuid4().hex[:8]}"
        # Born under a hidden name, so that nobody sees it before its lock is held.
        hidden = folder / f".{name}"
        hidden.mkdir()
        self._lock = FileLock(hidden / ".lock", what="a stream partition")
        self._folder = folder / name
        hidden.rename(self._folder)
        sync_folder(folder)

    def append(self, parts: Sequence[bytes]) -> None:
        if self._log is None or self._log.size_bytes >= self._roll_bytes:
            self._roll()
        assert self._log is not None
        try:
            self._log.append(parts)
        except (StorageFull, StorageFailed):
            # A reader may have seen the entry that failed: its place is never given to another one.
            self._log.close()
            if not self._log.size_bytes:
                remove(self._log.path)
            self._log = None
            raise

    def _roll(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None
        self._number += 1
        try:
            self._log = LogFile(_file(self._folder, self._number), sync=self._sync)
        except OSError as error:
            raise StorageFull(f"no room for a new stream file: {error.strerror}; free some space") from error

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
        self._lock.close()


class _Place:
    """A position taken apart: file number, where its entry starts, and which frame of the entry."""

    __slots__ = ("entry", "file", "index")

    def __init__(self, file: int, entry: int, index: int) -> None:
        self.file, self.entry, self.index = file, entry, index

    @staticmethod
    def parse(position: Position) -> "_Place":
        try:
            file, entry, index = (int(part) for part in position.split(":"))
        except ValueError:
            raise ConfigError(f"{position!r} is no position of a file stream") from None
        return _Place(file, entry, index)

    def text(self) -> Position:
        return Position(f"{self.file}:{self.entry}:{self.index}")


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.log"


def _file_numbers(folder: Path) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return sorted(int(path.stem) for path in folder.glob("*.log"))
    return []


def _is_read_out(path: Path, at: _Place) -> bool:
    with LogReader(path) as reader:
        entry = reader.at(at.entry)
        return entry is not None and reader.at(entry.end) is None and reader.next_readable(entry.end) is None


def _read_from(folder: Path, after: Position | None, *, max_bytes: int) -> tuple[list[Record], Position | None]:
    numbers = _file_numbers(folder)
    place = _Place.parse(after) if after is not None else None
    if place is not None and place.file not in numbers:
        if numbers and numbers[0] > place.file:
            raise PositionGone(after or "", earliest=_Place(numbers[0], 0, -1).text())
        numbers = [number for number in numbers if number > place.file]
        place = None if numbers else place
    records: list[Record] = []
    size = 0
    for number in numbers:
        if place is not None and number < place.file:
            continue
        with contextlib.suppress(FileNotFoundError), LogReader(_file(folder, number)) as reader:
            start = place if place is not None and place.file == number else None
            for entry in _Entries(reader, start.entry if start is not None else 0):
                found = _records(number, entry, start)
                records += found
                size += sum(len(record.raw) for record in found)
                if size >= max_bytes:
                    return _within(records, max_bytes)
    return _within(records, max_bytes) if records else ([], after)


class _Entries:
    """Entries from an offset on; damage with readable entries behind it comes as one entry of raw bytes."""

    def __init__(self, reader: LogReader, start: int) -> None:
        self._reader, self._at = reader, start

    def __iter__(self) -> "_Entries":
        return self

    def __next__(self) -> Entry:
        entry = self._reader.at(self._at)
        if entry is None:
            following = self._reader.next_readable(self._at) if self._at < self._reader.size_bytes else None
            if following is None:
                raise StopIteration
            # It may have been half written when it was read first: with another one behind it, it is whole or damaged.
            entry = self._reader.at(self._at) or Entry(self._at, following, b"")
        self._at = entry.end
        return entry


def _records(number: int, entry: Entry, start: _Place | None) -> list[Record]:
    """The frames of an entry that lie behind `start`; a damaged entry becomes one record that no check will pass."""
    skip = start.index if start is not None and entry.start == start.entry else -1
    if not entry.payload:
        damage = Record(_Place(number, entry.start, 0).text(), 0.0, b"damaged stream entry")
        return [damage] if skip < 0 else []
    (time_s,) = _TIME.unpack_from(entry.payload)
    view, at, index, records = memoryview(entry.payload), _TIME.size, 0, []
    while at < len(view):
        # Only the length is read here: a frame that no check will pass must come through, or it would stop all others.
        size = HEADER_BYTES + int.from_bytes(view[at + 8 : at + 12], "little")
        if index > skip:
            records.append(Record(_Place(number, entry.start, index).text(), time_s, bytes(view[at : at + size])))
        at, index = at + size, index + 1
    return records


def _within(records: list[Record], max_bytes: int) -> tuple[list[Record], Position | None]:
    size, count = 0, 0
    for record in records:
        size += len(record.raw)
        if count and size > max_bytes:
            break
        count += 1
    return records[:count], records[count - 1].position
