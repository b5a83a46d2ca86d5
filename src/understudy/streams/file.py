"""The embedded stream: a folder of logs, one per appending process.

    STREAM/<partition>/.lock            held while the appending process has it open
    STREAM/<partition>/00000001.log     entries of core/log: append time (f64) and whole frames

A partition whose lock is free has ended: its process closed it or died. A position FILE:ENTRY:INDEX
points just past frame INDEX of the entry that starts at byte ENTRY. INDEX -1 points before the
first frame, so a reader that waits at the end of a file does not read an old entry again. An entry
of zeros replaces what was trimmed of a file that may still grow.

Files are numbered without gaps, so a missing one is noticed. If a file's first entry could not be
written, the file is removed, and the first entry of the next file (append time 0) has the number of
the file before.
"""

import contextlib
import os
import re
import shutil
import struct
import sys
import threading
import uuid
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import Closed, ConfigError, PositionGone, StorageFailed, StorageFull
from understudy.core.log import (
    Entry,
    FileLock,
    GroupCommit,
    LogFile,
    LogReader,
    Sync,
    erase_before,
    is_locked,
    make_folder,
    remove,
    storage_error,
    sync_data,
    sync_folder,
)
from understudy.experience.frame import MAX_FRAME_BYTES, Frame, announced_size
from understudy.ports import DAMAGED_ENTRY, Ack, Partition, Position, Read, Record

_TIME = struct.Struct("<d")
_FOLLOWS = struct.Struct("<dI")
"""An entry that explains missing numbers: append time 0 and the number of the file before."""
_FILE_NAME = re.compile(r"[0-9]{8}\.log")
_POLL_S = 0.004
_MOST_BYTES = 16 * 1024 * 1024
ROLL_BYTES = 32 * 1024 * 1024
ROLL_S = 60.0
"""No entry is added to a file older than this, so that files with frames of a forgotten player can
be deleted while others play."""
_TOO_LARGE = Ack(False, refused=f"too_large: the limit is {MAX_FRAME_BYTES} bytes per frame")


def _is_too_large(frame: Frame) -> bool:
    return frame.size_bytes > MAX_FRAME_BYTES


class FileStream:
    """A durable stream on local disk; any number of processes append, one reads."""

    def __init__(
        self,
        folder: Path,
        *,
        sync: Sync = sync_data,
        roll_bytes: int = ROLL_BYTES,
        roll_s: float = ROLL_S,
        clock: Clock | None = None,
    ) -> None:
        if sys.platform == "win32":
            raise ConfigError(
                "the file stream runs on Linux and macOS only; on Windows connect to a gateway "
                "instead"
            )
        self._folder = folder
        self._clock = clock or SystemClock()
        self._new_partition = partial(
            _PartitionWriter,
            folder,
            sync=sync,
            roll_bytes=roll_bytes,
            roll_s=roll_s,
            clock=self._clock,
        )
        self._writer: _PartitionWriter | None = None
        self._closed = threading.Event()
        self._group = GroupCommit[Sequence[bytes], Ack](
            self._commit, size=lambda parts: sum(map(len, parts)), most=_MOST_BYTES
        )

    def append(self, frames: Sequence[Frame]) -> Sequence[Ack]:
        if self._closed.is_set():
            raise Closed("the stream was closed")
        # Encoded here, so that a frame that cannot be encoded fails its own caller only.
        parts = [
            part
            for frame in frames
            if not _is_too_large(frame)
            for part in (frame.header(), frame.body)
        ]
        outcome = self._group.submit(parts) if parts else Ack(True)
        return [_TOO_LARGE if _is_too_large(frame) else outcome for frame in frames]

    def _commit(self, groups: Sequence[Sequence[bytes]]) -> Sequence[Ack]:
        parts = [_TIME.pack(self._clock.now()), *(part for group in groups for part in group)]
        try:
            # Checked again here, where `close` cannot run between this check and the write.
            if self._closed.is_set():
                raise Closed("the stream was closed")
            self._own_partition().append(parts)
            outcome = Ack(True)
        except (StorageFull, StorageFailed) as error:
            outcome = Ack(False, retry_after_s=1.0, error=str(error))
        return [outcome] * len(groups)

    def _own_partition(self) -> "_PartitionWriter":
        if self._writer is None or self._writer.pid != os.getpid():
            try:
                self._writer = self._new_partition()
            except OSError as error:
                raise storage_error(error, "opening a stream partition") from error
        return self._writer

    def partitions(self) -> Sequence[Partition]:
        if not self._folder.exists():
            return []
        return [
            Partition(path.name)
            for path in sorted(self._folder.iterdir())
            if not path.name.startswith(".") and path.is_dir()
        ]

    def read(
        self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float
    ) -> Read:
        folder = self._folder / partition
        deadline = self._clock.monotonic() + wait_s
        while True:
            # Checked before reading: if the lock is free now, every append is already visible.
            ended = not is_locked(folder / ".lock")
            records, following = _read_from(folder, after, max_bytes=max_bytes)
            if records or ended or self._closed.is_set() or self._clock.monotonic() >= deadline:
                return Read(records, following, ended and not records)
            self._clock.wait(self._closed, _POLL_S)

    def state(self, *, without: Container[str] = ()) -> Hashable:
        """A value that changes with every append and every new partition, except those `without`.

        It costs a fraction of a read, so that a reader of all partitions can wait for a change.
        """
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return ()
        state: list[Hashable] = [tuple(names)]
        for name in names:
            if name.startswith(".") or name in without:
                continue
            folder = os.path.join(self._folder, name)
            with contextlib.suppress(OSError, ValueError):  # not a folder, or an empty one
                newest = max(filter(_FILE_NAME.fullmatch, os.listdir(folder)))
                state.append((name, newest, os.stat(os.path.join(folder, newest)).st_size))
        return tuple(state)

    def folders(self, *, without: Container[str] = ()) -> list[str]:
        """The folders in which something changes when `state` does."""
        names = os.listdir(self._folder) if self._folder.is_dir() else []
        live = [name for name in names if not name.startswith(".") and name not in without]
        folders = (os.path.join(self._folder, name) for name in live)
        return [str(self._folder), *filter(os.path.isdir, folders)]

    def damage(self) -> list[str]:
        """One line per damaged entry; reads every file."""
        lines: list[str] = []
        for partition in self.partitions():
            folder = self._folder / partition.id
            numbers = _file_numbers(folder)
            previous = numbers[0] - 1 if numbers else 0
            for number in numbers:
                path = _file(folder, number)
                with contextlib.suppress(FileNotFoundError), LogReader(path) as reader:
                    for entry in _entries(reader, 0):
                        if missing := _missing(folder, previous, number, entry):
                            lines.append(missing)
                        if not entry.payload:
                            lines.append(_damage(path, entry))
                        previous = number
                    previous = number
        return lines

    def trim(self, stored: Mapping[str, Position | None], *, before_s: float) -> int:
        """Delete stored frames from files last written before `before_s`; return their bytes.

        Of a file with later frames, and of one that may still grow, the stored part is overwritten.
        """
        freed = 0
        for partition in self.partitions():
            position = stored.get(partition.id)
            folder = self._folder / partition.id
            numbers = _file_numbers(folder)
            if position is None or not numbers:
                continue
            ended = not is_locked(folder / ".lock")
            place = _Place.parse(position)
            is_fully_read = ended and _is_fully_read(folder, position)
            for number in numbers:
                path = _file(folder, number)
                if path.stat().st_mtime >= before_s:
                    break
                if number < place.file or is_fully_read:
                    freed += path.stat().st_size
                    remove(path)
                elif number == place.file:
                    freed += erase_before(path, place.entry)
            if ended and not _file_numbers(folder):
                remove(folder / ".lock")
                with contextlib.suppress(OSError):
                    folder.rmdir()  # a folder with files of other programs stays
        return freed

    def close(self) -> None:
        """Wait for a running append, end this process's partition and wake waiting reads."""
        with self._group.alone:
            self._closed.set()
            if self._writer is not None and self._writer.pid == os.getpid():
                self._writer.close()
            self._writer = None


class _PartitionWriter:
    """This process's own partition; starts a new file after `roll_bytes` or `roll_s`."""

    def __init__(
        self, folder: Path, *, sync: Sync, roll_bytes: int, roll_s: float, clock: Clock
    ) -> None:
        self.pid = os.getpid()
        self._sync = sync
        self._roll_bytes = roll_bytes
        self._roll_s = roll_s
        self._clock = clock
        self._number = 0
        self._previous = 0
        """The last file that was not removed."""
        self._log: LogFile | None = None
        self._log_since_s = 0.0
        make_folder(folder)
        name = f"{int(clock.now() * 1e9):016x}-{uuid.uuid4().hex[:8]}"
        self._folder = folder / name
        # Created under a hidden name, so that no reader sees it before its lock is held.
        hidden = folder / f".{name}"
        hidden.mkdir()
        try:
            self._lock = FileLock(hidden / ".lock", what="a stream partition")
            try:
                hidden.rename(self._folder)
                sync_folder(folder)
            except OSError:
                self._lock.close()
                raise
        except OSError:
            # Clean up, since appends are retried: each attempt would leak a folder and descriptor.
            shutil.rmtree(hidden, ignore_errors=True)
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def append(self, parts: Sequence[bytes]) -> None:
        if self._log is None or self._is_done(self._log):
            self._roll()
        assert self._log is not None
        try:
            if not self._log.size_bytes and self._number > self._previous + 1:
                self._log.append([_FOLLOWS.pack(0.0, self._previous)])
            self._log.append(parts)
            self._previous = self._number
        except (StorageFull, StorageFailed):
            # A reader may have seen the failed entry, so its offset must not be reused.
            self._log.close()
            if self._log.size_bytes:
                self._previous = self._number
            else:
                remove(self._log.path)
            self._log = None
            raise

    def _is_done(self, log: LogFile) -> bool:
        is_old = self._clock.monotonic() - self._log_since_s >= self._roll_s
        return log.size_bytes >= self._roll_bytes or (is_old and log.size_bytes > 0)

    def _roll(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None
        number = self._number + 1
        try:
            self._log = LogFile(_file(self._folder, number), sync=self._sync)
        except OSError as error:
            raise storage_error(error, "opening a stream file") from error
        self._number = number
        self._log_since_s = self._clock.monotonic()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
        self._lock.close()


@dataclass(slots=True)
class _Place:
    """A parsed position: file number, byte offset of the entry, and index of the frame in it."""

    file: int
    entry: int
    index: int

    @staticmethod
    def parse(position: Position) -> "_Place":
        try:
            file, entry, index = (int(part) for part in position.split(":"))
        except ValueError:
            raise ConfigError(
                f"{position!r} is not a position of a file stream; pass one that read() returned, "
                "as FILE:ENTRY:INDEX, or None to start at the beginning"
            ) from None
        return _Place(file, entry, index)

    def text(self) -> Position:
        return Position(f"{self.file}:{self.entry}:{self.index}")


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.log"


def _file_numbers(folder: Path) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return sorted(int(path.stem) for path in folder.glob("[0-9]" * 8 + ".log"))
    return []


def _is_fully_read(folder: Path, position: Position) -> bool:
    """Whether a partition has nothing readable after a position."""
    with contextlib.suppress(PositionGone):
        return not _read_from(folder, position, max_bytes=1)[0]
    return False


def _read_from(
    folder: Path, after: Position | None, *, max_bytes: int
) -> tuple[list[Record], Position | None]:
    numbers = _file_numbers(folder)
    place = _Place.parse(after) if after is not None else None
    if place is not None and numbers and numbers[0] > place.file:
        raise PositionGone(after or "", earliest=_Place(numbers[0], 0, -1).text())
    numbers = [number for number in numbers if place is None or number >= place.file]
    # Earlier files may have been trimmed; after the first one to read, none may be missing.
    first = place.file if place is not None else min(numbers, default=1)
    previous = first - 1
    records: list[Record] = []
    size = 0
    for number in numbers:
        with contextlib.suppress(FileNotFoundError), LogReader(_file(folder, number)) as reader:
            start = place if place is not None and place.file == number else None
            for entry in _entries(reader, start.entry if start is not None else 0):
                if missing := _missing(folder, previous, number, entry):
                    if any(previous < other < number for other in _file_numbers(folder)):
                        # Created while the folder was listed; the next read finds it.
                        return _within(records, max_bytes) if records else ([], after)
                    raw = DAMAGED_ENTRY + f": {missing}".encode()
                    time_s = reader.path.stat().st_mtime
                    records.append(Record(_Place(number, 0, -1).text(), time_s, raw))
                previous = number
                entry_records = _records(reader.path, number, entry, start)
                records += entry_records
                size += sum(len(record.raw) for record in entry_records)
                if size >= max_bytes:
                    return _within(records, max_bytes)
            previous = number
    return _within(records, max_bytes) if records else ([], after)


def _entries(reader: LogReader, at: int) -> Iterator[Entry]:
    """Yield entries from an offset on; damage becomes one empty entry, a torn end becomes none."""
    while True:
        entry = reader.at(at)
        if entry is None:
            end = reader.damage_end(at) if at < reader.size_bytes else None
            if end is None:
                return
            # This entry may have been half written at the first read. Its end mark or another entry
            # follows it now, so it is either complete or damaged.
            entry = reader.at(at) or Entry(at, end, b"")
        yield entry
        at = entry.end


def _missing(folder: Path, previous: int, number: int, entry: Entry) -> str:
    """Name the files that are missing before a file, whose first entry this is; "" if none are."""
    if number <= previous + 1:
        return ""
    if len(entry.payload) == _FOLLOWS.size and _FOLLOWS.unpack(entry.payload)[1] <= previous:
        return ""
    return f"{folder.name}, files {previous + 1} to {number - 1}, which are missing"


def _damage(path: Path, entry: Entry) -> str:
    return f"{path.parent.name}/{path.name}, bytes {entry.start} to {entry.end}"


def _records(path: Path, number: int, entry: Entry, start: _Place | None) -> list[Record]:
    """An entry's frames after `start`; a damaged entry becomes one invalid record."""
    skip = start.index if start is not None and entry.start == start.entry else -1
    after_entry = _Place(number, entry.end, -1).text()
    if not entry.payload:
        raw = DAMAGED_ENTRY + f": {_damage(path, entry)}".encode()
        return [Record(after_entry, path.stat().st_mtime, raw)]
    (time_s,) = _TIME.unpack_from(entry.payload)
    if not time_s:
        return []  # trimmed
    view = memoryview(entry.payload)
    at = _TIME.size
    index = 0
    records = []
    while at < len(view):
        # Only the length is read here: an invalid frame must be returned, or it would block others.
        end = at + announced_size(view[at:])
        if index > skip:
            is_last = end >= len(view)
            position = after_entry if is_last else _Place(number, entry.start, index).text()
            records.append(Record(position, time_s, bytes(view[at:end])))
        at = end
        index += 1
    return records


def _within(records: list[Record], max_bytes: int) -> tuple[list[Record], Position | None]:
    size = 0
    count = 0
    for record in records:
        size += len(record.raw)
        if count and size > max_bytes:
            break
        count += 1
    return records[:count], records[count - 1].position
