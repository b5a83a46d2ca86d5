"""One partition of a topic, read from any place; going on where the last read ended costs no jump."""

import math
import threading
from typing import Any

from understudy.core.clock import Clock
from understudy.core.errors import Closed, ConfigError, PositionGone, StorageFailed, Unreachable
from understudy.core.ports import Position, Read, Record
from understudy.streams.kafka_bounds import Bounds
from understudy.streams.kafka_config import KafkaConfig
from understudy.streams.kafka_trouble import Trouble, kafka_library

_ASK_EVERY_S = 0.02
"""How often the end of a partition is asked for, at most, while nothing comes."""
_HEAR_EVERY_S = 1.0
"""How often it is asked for while records come."""
_SLICE_S = 0.1


def position_text(offset: int, count: int) -> Position:
    """Behind a record; it carries over how many partitions sessions are spread, so that a change is noticed."""
    return Position(f"{offset}/{count}")


def offset_behind(position: Position, count: int, *, topic: str) -> int:
    """Where to read on; ConfigError when sessions were spread over another number of partitions."""
    offset, _, spread = position.partition("/")
    if not (offset.removeprefix("-").isdigit() and spread.isdigit()):
        raise ConfigError(f"{position!r} is no position of a Kafka stream")
    if int(spread) != count:
        raise changed_count(topic, held=int(spread), count=count)
    return int(offset) + 1


def changed_count(topic: str, *, held: int, count: int) -> ConfigError:
    """Refuses a topic whose partitions were changed, since sessions would move between them."""
    return ConfigError(
        f"topic {topic!r} is used with {count} partitions, and sessions were spread over {held} before, so they would "
        f"move between partitions; add partitions={held} to the address to go on as before, or make a new topic"
    )


class KafkaLane:
    """A partition and its consumer, made by the first read; one read at a time."""

    def __init__(
        self, config: KafkaConfig, number: int, count: int, *, bounds: Bounds, clock: Clock, closed: threading.Event
    ) -> None:
        self._config, self._number, self._count = config, number, count
        self._bounds, self._clock, self._closed = bounds, clock, closed
        self._kafka = kafka_library()
        self._lock = threading.Lock()
        self._trouble = Trouble(config)
        self._consumer: Any = None
        self._place = -1
        """The offset that comes next; -1: nowhere yet."""
        self._origin = -1
        """Our place when reading began at the start: whoever waits there for a first record asks for it again."""
        self._end = -1
        """The partition's end as it was last heard of."""
        self._asked_s = 0.0
        self._held: Any = None
        """A record that did not fit into the last read."""

    def read(self, after: Position | None, *, max_bytes: int, wait_s: float) -> Read:
        with self._lock:
            if self._closed.is_set():
                raise Closed("the stream was closed")
            deadline_s = self._clock.monotonic() + wait_s
            start = None if after is None else offset_behind(after, self._count, topic=self._config.topic)
            if self._place < 0 or self._place != (self._origin if start is None else start):
                self._jump(start, after)
            elif self._place >= self._end and self._clock.monotonic() - self._asked_s > _HEAR_EVERY_S:
                # Records that come without a pause would leave it unknown for ever how far we are.
                self._ask_again()
            first = self._first(deadline_s)
            records = [] if first is None else self._gather(first, max_bytes)
            complete_to_s = self._asked_s if self._place >= self._end else -math.inf
            return Read(records, records[-1].position if records else after, False, complete_to_s)

    def _jump(self, start: int | None, after: Position | None) -> None:
        """Let the consumer go on at another place; PositionGone when that was trimmed."""
        first, end = self._ask()
        if start is not None and start < first:
            raise PositionGone(str(after), earliest=position_text(first - 1, self._count))
        if start is not None and start > end:
            raise self._lost(start, end)
        self._place = first if start is None else start
        self._origin = first if start is None else -1
        self._held = None
        if self._consumer is None:
            self._consumer = self._kafka.Consumer({**self._config.consumer(), "error_cb": self._trouble.note})
        self._consumer.assign([self._kafka.TopicPartition(self._config.topic, self._number, self._place)])

    def _first(self, deadline_s: float) -> Any:
        """The record at our place, waiting for it; None when nothing came. What was appended before comes for sure."""
        message = self._next(0.0)
        while message is None and not self._closed.is_set():
            if self._place >= self._end:
                # Asked anew, but not all the time; a record that comes meanwhile needs no question.
                message = self._next(self._asked_s + _ASK_EVERY_S - self._clock.monotonic())
                if message is None:
                    self._ask_again()
            if message is None and self._place < self._end:
                return self._next_for_sure()
            left_s = deadline_s - self._clock.monotonic()
            if message is None and left_s <= 0:
                return None
            message = message or self._next(min(left_s, _SLICE_S))
        return message

    def _next_for_sure(self) -> Any:
        """The record that is there; Unreachable when it does not come. None: nothing but gaps up to the end."""
        give_up_s = self._clock.monotonic() + self._config.timeout_s
        while not self._closed.is_set() and self._place < self._end:
            if (message := self._next(_SLICE_S)) is not None:
                return message
            if self._clock.monotonic() > give_up_s:
                self._place = -1
                raise self._trouble.explained("reading")
        return None

    def _gather(self, first: Any, max_bytes: int) -> list[Record]:
        """Records up to the end that is known, or to the bytes wanted; the first one always."""
        records: list[Record] = []
        size, message = 0, first
        while message is not None:
            raw = message.value() or b""
            size += len(raw)
            if records and size > max_bytes:
                self._held = message
                break
            records.append(Record(position_text(message.offset(), self._count), message.timestamp()[1] / 1000, raw))
            self._place = message.offset() + 1
            try:
                message = self._next(_SLICE_S if self._place < self._end else 0.0)
            except (PositionGone, Unreachable):
                break  # what we have is handed out; the next read jumps, and is told
        return records

    def _next(self, wait_s: float) -> Any:
        """The next record, if one comes in time."""
        if self._held is not None:
            message, self._held = self._held, None
            return message
        message = self._consumer.poll(max(0.0, wait_s))
        if message is None:
            return None
        error = message.error()
        if error is None:
            self._trouble.clear()
            return message
        if error.name() == "_PARTITION_EOF":
            # Behind the last record there may be places that hold none.
            self._place = max(self._place, message.offset())
        elif error.name() in ("_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE"):
            after, self._place = position_text(self._place - 1, self._count), -1
            first, _ = self._ask()
            raise PositionGone(after, earliest=position_text(first - 1, self._count))
        elif error.name().endswith("_AUTHORIZATION_FAILED") or error.name().startswith("UNKNOWN_TOPIC"):
            self._place = -1
            raise self._trouble.explained("reading", error)
        else:
            self._trouble.note(error)
        return None

    def _ask(self) -> tuple[int, int]:
        """First offset and end of the partition, as its leader says now."""
        self._asked_s = self._clock.monotonic()
        first, self._end = self._bounds.ask(self._number, timeout_s=self._config.timeout_s)
        return first, self._end

    def _ask_again(self) -> None:
        """Hear of a new end; StorageFailed when it lies before our place, where records would come in unseen."""
        place, (_, end) = self._place, self._ask()
        if end < place:
            self._place = -1
            raise self._lost(place, end)

    def _lost(self, place: int, end: int) -> StorageFailed:
        return StorageFailed(
            f"partition {self._number} of topic {self._config.topic!r} ends at {end}, and was read up to {place}: "
            "brokers lost what they had acknowledged; see their logs, then let gateways and ingest use a new topic"
        )

    def close(self) -> None:
        """Let go of the consumer; a read that waits returns first."""
        with self._lock:
            if self._consumer is not None:
                self._consumer.close()
                self._consumer, self._place = None, -1
