"""Waiting: frames between their spool and their acknowledgement, in the order they are sent."""

from collections import deque
from collections.abc import Iterable, Iterator

from understudy.client.spool import Entry
from understudy.core.frame import FrameKind


class Waiting:
    """Entries of every session; their frames stay in memory while there is room, and on disk anyway."""

    def __init__(self, *, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._kept_bytes = 0
        self._entries: deque[Entry] = deque()

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """Whatever is not done, in order."""
        while self._entries and self._entries[0].is_done:
            self._entries.popleft()
        return (entry for entry in self._entries if not entry.is_done)

    def add(self, entry: Entry) -> None:
        """Take the next entry; its frame is let go when memory is full and the disk has it."""
        if entry.file is not None and self._kept_bytes + entry.size_bytes > self._memory_bytes:
            entry.frame = None
        if entry.frame is not None:
            self._kept_bytes += entry.size_bytes
        if entry.kind is FrameKind.DROP:
            # Ahead of the data: without it the numbers behind a long gap would be too far ahead to be taken.
            self._entries.appendleft(entry)
        else:
            self._entries.append(entry)

    def adopt(self, entries: Iterable[Entry]) -> None:
        """Take entries that another process spooled; their frames are on disk alone."""
        self._entries.extend(entries)

    def finish(self, entry: Entry, *, arrived: bool) -> None:
        """The entry was acknowledged, or refused or dropped."""
        if entry.frame is not None:
            self._kept_bytes -= entry.size_bytes
        entry.spool.done(entry, arrived=arrived)

    def drop_oldest(self, disk_bytes: int, memory_bytes: int) -> list[Entry]:
        """Finish the oldest data until so much of disk and memory is free; what was dropped."""
        dropped: list[Entry] = []
        for entry in self:
            if disk_bytes <= 0 and memory_bytes <= 0:
                break
            # What was handed to the link may have arrived, so calling it dropped could be wrong.
            if entry.tried or not entry.is_data:
                continue
            if entry.file is None:
                memory_bytes -= entry.size_bytes
            self.finish(entry, arrived=False)
            if entry.file is not None and entry.file.n_live == 0:
                disk_bytes -= entry.file.size_bytes
            dropped.append(entry)
        return dropped

    def clear(self) -> None:
        self._entries.clear()
