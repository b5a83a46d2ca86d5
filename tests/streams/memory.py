"""A stream in memory: nothing survives the process."""

import threading
from collections.abc import Sequence

from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import Closed, ConfigError, PositionGone
from understudy.experience.frame import MAX_FRAME_BYTES, Frame
from understudy.ports import Ack, Partition, Position, Read, Record


class MemoryStream:
    """Partitions by session; `split` and `trim` imitate what real streams do by themselves."""

    def __init__(self, num_partitions: int = 1, *, clock: Clock | None = None) -> None:
        if num_partitions < 1:
            raise ConfigError(f"num_partitions is {num_partitions}; use 1 or more")
        self._clock = clock or SystemClock()
        self._changed = threading.Condition()
        self._records: dict[str, list[Record]] = {f"p{n}": [] for n in range(num_partitions)}
        self._parents: dict[str, tuple[str, ...]] = dict.fromkeys(self._records, ())
        self._open = list(self._records)
        self._trimmed = dict.fromkeys(self._records, 0)
        self._closed = False

    def append(self, frames: Sequence[Frame]) -> Sequence[Ack]:
        with self._changed:
            if self._closed:
                raise Closed("the stream was closed")
            accepted = [frame for frame in frames if frame.size_bytes <= MAX_FRAME_BYTES]
            for frame in accepted:
                partition = self._open[hash(frame.session) % len(self._open)]
                records = self._records[partition]
                number = self._trimmed[partition] + len(records)
                records.append(Record(Position(str(number)), self._clock.now(), frame.encode()))
            self._changed.notify_all()
        too_large = Ack(False, refused=f"too_large: the limit is {MAX_FRAME_BYTES} bytes per frame")
        return [Ack(True) if frame.size_bytes <= MAX_FRAME_BYTES else too_large for frame in frames]

    def partitions(self) -> Sequence[Partition]:
        with self._changed:
            return [Partition(name, self._parents[name]) for name in self._records]

    def read(
        self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float
    ) -> Read:
        with self._changed:
            start = 0 if after is None else int(after) + 1
            if start < self._trimmed[partition] and after is not None:
                raise PositionGone(after, earliest=str(self._trimmed[partition] - 1))
            self._changed.wait_for(
                lambda: self._has(partition, start) or self._is_ended(partition), timeout=wait_s
            )
            records: list[Record] = []
            size = 0
            for record in self._records[partition][max(0, start - self._trimmed[partition]) :]:
                size += len(record.raw)
                if records and size > max_bytes:
                    break
                records.append(record)
            following = records[-1].position if records else after
            rest = int(following) + 1 if following is not None else 0
            return Read(
                records, following, self._is_ended(partition) and not self._has(partition, rest)
            )

    def _has(self, partition: str, start: int) -> bool:
        return self._trimmed[partition] + len(self._records[partition]) > start

    def _is_ended(self, partition: str) -> bool:
        return partition not in self._open or self._closed

    def split(self, partition: str) -> None:
        """End a partition and open two children."""
        with self._changed:
            children = [f"{partition}a", f"{partition}b"]
            self._open = [name for name in self._open if name != partition] + children
            for child in children:
                self._records[child] = []
                self._parents[child] = (partition,)
                self._trimmed[child] = 0
            self._changed.notify_all()

    def trim(self, partition: str, keep_last: int) -> None:
        """Drop all but the newest records of a partition."""
        with self._changed:
            records = self._records[partition]
            gone = max(0, len(records) - keep_last)
            del records[:gone]
            self._trimmed[partition] += gone

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
