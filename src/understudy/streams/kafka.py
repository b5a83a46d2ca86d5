"""A stream in an Apache Kafka topic: each session is in one partition; the store keeps positions.

Records are frames, keyed by session. A record header holds the number of partitions over which
sessions are spread. That number must not change: after partitions were added to a topic, it is
rejected until the address sets how many of them to use, as `partitions=`.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from functools import partial
from typing import Any
from zlib import crc32

from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import Closed, ConfigError, PositionGone, StorageFailed, Unreachable
from understudy.core.location import Location
from understudy.experience.frame import MAX_FRAME_BYTES, Frame
from understudy.ports import Ack, Partition, Position, Read, Record
from understudy.streams.kafka_client import (
    KafkaConfig,
    LastError,
    OffsetBounds,
    kafka_config,
    kafka_library,
)

_POLL_SLICE_S = 0.1
_DEFAULT_PARTITIONS = 4
"""Partitions of a new topic when no number is requested."""
_PROTOCOL_ERROR_S = 2.0
"""How long protocol errors are tolerated: a broker that is shutting down may cause them."""
_CREATING = "creating"
_OPENING = "opening"
_IDLE_QUERY_S = 0.02
"""Shortest time between two queries of a partition's end while no records arrive."""
_BUSY_QUERY_S = 1.0
"""Time between two queries of a partition's end while records arrive."""
PARTITION_COUNT = "partitions"
"""The record header with the number of partitions over which sessions are spread."""
GRACE_S = 2.0
"""How long after its timeout a frame may be reported as failed: the library checks every second."""
_RETRY_S = 1.0
_POLL_S = 0.1
_DURABLE = Ack(True)
_TOO_LARGE = Ack(False, refused=f"too_large: the limit is {MAX_FRAME_BYTES} bytes per frame")


def open_kafka(location: Location, *, clock: Clock | None = None) -> "KafkaStream":
    """Open the stream at a `kafka://` address; waits up to its open_timeout_s per request."""
    return KafkaStream(kafka_config(location), clock=clock)


def create_kafka(location: Location, *, partitions: int | None = None, replication: int = 1) -> int:
    """Create a topic for development; return the number of partitions that sessions use.

    An existing topic is not changed. It is accepted if it has the requested number of partitions,
    if no number is requested, or if `partitions=` of the address selects the first ones of it. A
    new topic has min.insync.replicas = `replication` - 1, but at least 1.
    """
    config = kafka_config(location)
    if partitions and config.partitions not in (0, partitions):
        raise ConfigError(
            f"the address has partitions={config.partitions}, but {partitions} were requested; "
            "use only one of the two"
        )
    kafka = kafka_library()
    in_sync = {"min.insync.replicas": str(max(1, replication - 1))}
    requested = partitions or config.partitions or _DEFAULT_PARTITIONS
    topic = kafka.admin.NewTopic(config.topic, requested, replication, config=in_sync)
    last_error = LastError(config)
    try:
        _admin_request(
            kafka,
            config,
            last_error,
            doing=_CREATING,
            call=lambda admin: admin.create_topics([topic], request_timeout=config.open_timeout_s),
        )
    except kafka.KafkaException as error:
        if error.args[0].name() != "TOPIC_ALREADY_EXISTS":
            raise last_error.explained(_CREATING, error.args[0], at_start=True) from None
    existing = _count_when_known(kafka, config)
    if existing < config.partitions or (partitions and existing != partitions):
        first = (
            f", add partitions={requested} to the address to use the first {requested}"
            if existing > requested
            else ""
        )
        raise ConfigError(
            f"topic {config.topic!r} at {config.where} already exists with {existing} partitions, "
            f"but {requested} were requested; omit the number to use it as it is{first}, or use "
            "another topic: the number cannot change later"
        )
    return config.partitions or existing


def _count_when_known(kafka: Any, config: KafkaConfig) -> int:
    """Number of partitions of a topic; retries while the brokers do not know a new topic yet."""
    give_up_s = time.monotonic() + config.open_timeout_s
    while True:
        try:
            return _describe(kafka, config, LastError(config))[1]
        except ConfigError:
            if time.monotonic() > give_up_s:
                raise
            time.sleep(_POLL_SLICE_S)


class KafkaStream:
    """A topic as a stream; any number of processes may append and read."""

    def __init__(self, config: KafkaConfig, *, clock: Clock | None = None) -> None:
        self._config = config
        kafka = kafka_library()
        topic_id, existing = _describe(kafka, config, LastError(config))
        self.count = config.partitions or existing
        """Number of partitions over which sessions are spread."""
        if self.count > existing:
            raise ConfigError(
                f"topic {config.topic!r} at {config.where} has {existing} partitions, but the "
                f"address has partitions={self.count}; use {existing} or fewer, or omit it to use "
                "all"
            )
        self._bounds = OffsetBounds(config)
        try:
            counts = _newest_counts(kafka, config, existing, bounds=self._bounds)
            if others := counts - {self.count}:
                raise changed_count(config.topic, old_count=min(others), count=self.count)
        except BaseException:
            self._bounds.close()
            raise
        self._closed = threading.Event()
        clock = clock or SystemClock()
        self._writer = KafkaWriter(config, self.count, clock=clock)
        # Named with the topic's id, so that positions of a deleted topic are not used for a new
        # topic of the same name.
        self._readers = {
            f"{config.topic}-{number}@{topic_id}": PartitionReader(
                config, number, self.count, bounds=self._bounds, clock=clock, closed=self._closed
            )
            for number in range(self.count)
        }

    def append(self, frames: Sequence[Frame]) -> Sequence[Ack]:
        if self._closed.is_set():
            raise Closed("the stream was closed")
        return self._writer.append(frames) if frames else []

    def partitions(self) -> Sequence[Partition]:
        return [Partition(name) for name in self._readers]

    def read(
        self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float
    ) -> Read:
        reader = self._readers.get(partition)
        if reader is None:
            raise ConfigError(
                f"{partition!r} is not a partition of this stream; use one from partitions()"
            )
        return reader.read(after, max_bytes=max_bytes, wait_s=wait_s)

    def close(self) -> None:
        """Wait for running appends and reads, then close every connection."""
        self._closed.set()
        self._writer.close()
        for reader in self._readers.values():
            reader.close()
        self._bounds.close()

    def __enter__(self) -> "KafkaStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _admin_request(
    kafka: Any,
    config: KafkaConfig,
    last_error: LastError,
    *,
    doing: str,
    call: Callable[[Any], Any],
) -> Any:
    """The result of an admin request; raises on timeout, and earlier if waiting does not help.

    The library reports a Ctrl-C within its C code as a wrong argument. Its calls, which return at
    once, are therefore made in a thread: Python handles signals in the main one.
    """
    settings = {**config.client(), "error_cb": last_error.note}
    executor = ThreadPoolExecutor(1)
    admin = None
    try:
        try:
            admin = executor.submit(kafka.admin.AdminClient, settings).result()
        except kafka.KafkaException as error:
            raise ConfigError(
                f"the Kafka library rejects the settings: {error.args[0].str()}; correct the "
                "address"
            ) from None
        future = executor.submit(call, admin).result()[config.topic]
        for number in range(max(1, round(config.open_timeout_s / _POLL_SLICE_S))):
            try:
                return future.result(timeout=_POLL_SLICE_S)
            except NotYet:
                admin.poll(0.0)
                # A denied login is final. Other errors may come from a broker that shuts down.
                is_login = last_error.condition == "_AUTHENTICATION"
                tolerated_s = 0.0 if is_login else _PROTOCOL_ERROR_S
                if last_error.condition and number * _POLL_SLICE_S >= tolerated_s:
                    break
    finally:
        # Free the client here, not with the traceback of an error: the garbage collector may run in
        # the client's own thread, and the library aborts the process if the client is freed there.
        del admin
        executor.shutdown(wait=False)
    raise last_error.explained(doing, at_start=True)


def _describe(kafka: Any, config: KafkaConfig, last_error: LastError) -> tuple[str, int]:
    """The topic's id and its number of partitions."""
    topics = kafka.TopicCollection([config.topic])
    try:
        topic = _admin_request(
            kafka,
            config,
            last_error,
            doing=_OPENING,
            call=lambda admin: admin.describe_topics(topics, request_timeout=config.open_timeout_s),
        )
    except kafka.KafkaException as error:
        raise last_error.explained(_OPENING, error.args[0], at_start=True) from None
    return str(topic.topic_id).replace("+", "-").replace("/", "_"), len(topic.partitions)


def _newest_counts(
    kafka: Any, config: KafkaConfig, existing: int, *, bounds: OffsetBounds
) -> set[int]:
    """The partition counts in the header of each partition's newest record, if it has one."""
    unread = {}
    for number in range(existing):
        first, end = bounds.query(number, timeout_s=config.open_timeout_s, at_start=True)
        if end > first:
            unread[number] = kafka.TopicPartition(config.topic, number, end - 1)
    counts: set[int] = set()
    if not unread:
        return counts
    last_error = LastError(config)
    consumer = kafka.Consumer({**config.consumer(), "error_cb": last_error.note})
    try:
        consumer.assign(list(unread.values()))
        for _ in range(max(1, round(config.open_timeout_s / _POLL_SLICE_S))):
            message = consumer.poll(_POLL_SLICE_S)
            error = message.error() if message is not None else None
            # The last offsets of a partition may have no record.
            if message is not None and (error is None or error.name() == "_PARTITION_EOF"):
                unread.pop(message.partition(), None)
                headers = message.headers() or ()
                counts |= {
                    int(value)
                    for name, value in headers
                    if name == PARTITION_COUNT and value and value.isdigit()
                }
            if not unread:
                return counts
        raise last_error.explained(_OPENING, at_start=True)
    finally:
        consumer.close()


# --- Appending ------------------------------------------------------------------------------------


def partition_of(session: bytes, count: int) -> int:
    """The partition of a session, which depends only on the session and the count."""
    return crc32(session) % count


class KafkaWriter:
    """Appends to a topic; connects at the first append and reconnects after a fatal error."""

    def __init__(self, config: KafkaConfig, count: int, *, clock: Clock) -> None:
        self._config = config
        self._count = count
        self._clock = clock
        self._headers = [(PARTITION_COUNT, str(count).encode())]
        self._lock = threading.Condition()
        self._sender: _Sender | None = None
        self._running = 0
        self._is_closed = False

    def append(self, frames: Sequence[Frame]) -> list[Ack]:
        """Return one ack per frame, at most 2 s after the timeout; thread-safe."""
        # Encode all frames before sending the first, so that an invalid one fails its caller only.
        raws = [None if frame.size_bytes > MAX_FRAME_BYTES else frame.encode() for frame in frames]
        sender = self._begin()
        try:
            return self._append(sender, frames, raws)
        finally:
            self._end()

    def _append(
        self, sender: "_Sender", frames: Sequence[Frame], raws: Sequence[bytes | None]
    ) -> list[Ack]:
        waiting = PendingAppend(len(frames))
        time_ms = int(self._clock.now() * 1000)
        for index, (frame, raw) in enumerate(zip(frames, raws, strict=True)):
            if raw is None:
                waiting.settle(index, _TOO_LARGE)
            else:
                sender.send(
                    raw,
                    key=frame.session.bytes,
                    partition=partition_of(frame.session.bytes, self._count),
                    headers=self._headers,
                    time_ms=time_ms,
                    on_end=partial(self._report, sender, waiting, index),
                )
        return waiting.outcomes(
            self._config.timeout_s + GRACE_S, unanswered=lambda: self._unanswered(sender)
        )

    def _report(
        self, sender: "_Sender", waiting: "PendingAppend", index: int, error: Any, _: Any = None
    ) -> None:
        """Record a frame's outcome; `error` is None once every in-sync replica has the frame."""
        if error is None:
            sender.last_error.clear()
            waiting.settle(index, _DURABLE)
            return
        if error.fatal():
            sender.fail(error)
        problem = sender.last_error.explained("appending", sender.fatal or error)
        waiting.settle(index, Ack(False, retry_after_s=_RETRY_S, error=str(problem)))

    def _unanswered(self, sender: "_Sender") -> Ack:
        error = str(sender.last_error.explained("appending", sender.fatal))
        return Ack(False, retry_after_s=_RETRY_S, error=error)

    def _begin(self) -> "_Sender":
        with self._lock:
            if self._is_closed:
                raise Closed("the stream was closed")
            if self._sender is None or self._sender.fatal is not None:
                self._sender = _Sender(self._config)
            self._running += 1
            return self._sender

    def _end(self) -> None:
        with self._lock:
            self._running -= 1
            self._lock.notify_all()

    def close(self) -> None:
        """Reject new appends and wait for running ones."""
        with self._lock:
            self._is_closed = True
            self._lock.wait_for(lambda: not self._running, timeout=self._config.timeout_s + GRACE_S)
            sender = self._sender
            self._sender = None
        if sender is not None:
            sender.close()


class PendingAppend:
    """The frames of one append, until each has its outcome."""

    def __init__(self, count: int) -> None:
        self._changed = threading.Condition()
        self._outcomes: list[Ack | None] = [None] * count
        self._left = count

    def settle(self, index: int, outcome: Ack) -> None:
        with self._changed:
            if self._outcomes[index] is None:
                self._outcomes[index] = outcome
                self._left -= 1
                if not self._left:
                    self._changed.notify_all()

    def outcomes(self, timeout_s: float, *, unanswered: Callable[[], Ack]) -> list[Ack]:
        """One ack per frame; on timeout, `unanswered()` for each frame whose outcome is unknown."""
        with self._changed:
            if self._changed.wait_for(lambda: not self._left, timeout=timeout_s):
                return [outcome for outcome in self._outcomes if outcome is not None]
            timed_out = unanswered()
            return [timed_out if outcome is None else outcome for outcome in self._outcomes]


class _Sender:
    """A confluent-kafka producer and the thread that polls it for delivery reports."""

    def __init__(self, config: KafkaConfig) -> None:
        kafka = kafka_library()
        self.last_error = LastError(config)
        self.fatal: Any = None
        """The error after which this connection cannot send any more."""
        self._topic = config.topic
        self._errors = kafka.KafkaException, kafka.KafkaError
        self._producer = kafka.Producer({**config.producer(), "error_cb": self.last_error.note})
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="understudy-kafka", daemon=True)
        self._thread.start()

    def send(
        self,
        raw: bytes,
        *,
        key: bytes,
        partition: int,
        headers: list[tuple[str, bytes]],
        time_ms: int,
        on_end: Any,
    ) -> None:
        """Queue a frame; `on_end` is called once, with an error here or later by the thread."""
        exception, error = self._errors
        try:
            self._producer.produce(
                self._topic,
                value=raw,
                key=key,
                partition=partition,
                headers=headers,
                timestamp=time_ms,
                on_delivery=on_end,
            )
        except BufferError:
            on_end(error(error._QUEUE_FULL, "too many frames are waiting for the brokers"))
        except exception as failure:
            on_end(failure.args[0])

    def _poll(self) -> None:
        while not (self._stop.is_set() and not len(self._producer)):
            try:
                self._producer.poll(_POLL_S)
            except self._errors[0] as failure:
                self.fail(failure.args[0])
                time.sleep(_POLL_S / 10)

    def fail(self, error: Any) -> None:
        """Note a fatal error, after which the library rejects every call on this connection."""
        self.fatal = error
        self.abort()

    def abort(self) -> None:
        """Fail all waiting frames now and tell the thread to end."""
        self._stop.set()
        self._producer.purge(in_queue=True, in_flight=True, blocking=False)

    def close(self) -> None:
        """Close the connection; all appends have their outcomes by now."""
        self.abort()
        self._thread.join(1.0)


# --- Reading --------------------------------------------------------------------------------------


def position_text(offset: int, count: int) -> Position:
    """The position after the record at `offset`; it has the count, so that a change is detected."""
    return Position(f"{offset}/{count}")


def offset_after(position: Position, count: int, *, topic: str) -> int:
    """The next offset to read; ConfigError when the position has another partition count."""
    offset, _, old_count = position.partition("/")
    if not (offset.removeprefix("-").isdigit() and old_count.isdigit()):
        raise ConfigError(
            f"{position!r} is not a position of a Kafka stream; pass one that read() returned, as "
            "OFFSET/PARTITIONS, or None to start at the beginning"
        )
    if int(old_count) != count:
        raise changed_count(topic, old_count=int(old_count), count=count)
    return int(offset) + 1


def changed_count(topic: str, *, old_count: int, count: int) -> ConfigError:
    """The error for a changed number of partitions, which would move sessions to other ones."""
    return ConfigError(
        f"topic {topic!r} is used with {count} partitions, but its sessions are spread over "
        f"{old_count}, so they would move between partitions; add partitions={old_count} to the "
        "address to continue as before, or create a new topic"
    )


class PartitionReader:
    """Reads one partition, one read at a time; the first read creates the consumer."""

    def __init__(
        self,
        config: KafkaConfig,
        number: int,
        count: int,
        *,
        bounds: OffsetBounds,
        clock: Clock,
        closed: threading.Event,
    ) -> None:
        self._config = config
        self._number = number
        self._count = count
        self._bounds = bounds
        self._clock = clock
        self._closed = closed
        self._kafka = kafka_library()
        self._lock = threading.Lock()
        self._last_error = LastError(config)
        self._consumer: Any = None
        self._place = -1
        """The next offset; -1: not assigned yet."""
        self._origin = -1
        """The partition's first offset if reading began there, so that it need not seek again."""
        self._end = -1
        """The partition's end offset as of the last query."""
        self._queried_s = 0.0
        self._held: Any = None
        """A record that did not fit into the last read."""

    def read(self, after: Position | None, *, max_bytes: int, wait_s: float) -> Read:
        with self._lock:
            if self._closed.is_set():
                raise Closed("the stream was closed")
            deadline_s = self._clock.monotonic() + wait_s
            start = (
                None
                if after is None
                else offset_after(after, self._count, topic=self._config.topic)
            )
            if self._place < 0 or self._place != (self._origin if start is None else start):
                self._seek(start, after)
            elif (
                self._place >= self._end
                and self._clock.monotonic() - self._queried_s > _BUSY_QUERY_S
            ):
                # While records arrive without a pause, the end would otherwise never be queried.
                self._refresh_end()
            first = self._first(deadline_s)
            records = [] if first is None else self._gather(first, max_bytes)
            complete_to_s = self._queried_s if self._place >= self._end else -math.inf
            return Read(records, records[-1].position if records else after, False, complete_to_s)

    def _seek(self, start: int | None, after: Position | None) -> None:
        """Move the consumer to another offset; PositionGone when that offset was trimmed."""
        first, end = self._query_bounds()
        if start is not None and start < first:
            raise PositionGone(str(after), earliest=position_text(first - 1, self._count))
        if start is not None and start > end:
            raise self._lost(start, end)
        self._place = first if start is None else start
        self._origin = first if start is None else -1
        self._held = None
        if self._consumer is None:
            self._consumer = self._kafka.Consumer(
                {**self._config.consumer(), "error_cb": self._last_error.note}
            )
        self._consumer.assign(
            [self._kafka.TopicPartition(self._config.topic, self._number, self._place)]
        )

    def _first(self, deadline_s: float) -> Any:
        """Wait for the next record; None on timeout, but only if no existing one is unread."""
        message = self._next(0.0)
        while message is None and not self._closed.is_set():
            if self._place >= self._end:
                # Query the end at intervals only; a record that arrives first saves the query.
                message = self._next(self._queried_s + _IDLE_QUERY_S - self._clock.monotonic())
                if message is None:
                    self._refresh_end()
            if message is None and self._place < self._end:
                return self._next_existing()
            remaining_s = deadline_s - self._clock.monotonic()
            if message is None and remaining_s <= 0:
                return None
            message = message or self._next(min(remaining_s, _POLL_SLICE_S))
        return message

    def _next_existing(self) -> Any:
        """The next existing record; None if the last offsets have none. Unreachable on timeout."""
        give_up_s = self._clock.monotonic() + self._config.timeout_s
        while not self._closed.is_set() and self._place < self._end:
            if (message := self._next(_POLL_SLICE_S)) is not None:
                return message
            if self._clock.monotonic() > give_up_s:
                self._place = -1
                raise self._last_error.explained("reading")
        return None

    def _gather(self, first: Any, max_bytes: int) -> list[Record]:
        """Records from `first` up to the known end or `max_bytes`, but at least the first one."""
        records: list[Record] = []
        size = 0
        message = first
        while message is not None:
            raw = message.value() or b""
            size += len(raw)
            if records and size > max_bytes:
                self._held = message
                break
            records.append(
                Record(
                    position_text(message.offset(), self._count), message.timestamp()[1] / 1000, raw
                )
            )
            self._place = message.offset() + 1
            try:
                message = self._next(_POLL_SLICE_S if self._place < self._end else 0.0)
            except (PositionGone, Unreachable):
                break  # return what was read; the next read seeks and raises the error
        return records

    def _next(self, wait_s: float) -> Any:
        """The next record; None when none arrives within `wait_s`."""
        if self._held is not None:
            message = self._held
            self._held = None
            return message
        message = self._consumer.poll(max(0.0, wait_s))
        if message is None:
            return None
        error = message.error()
        if error is None:
            self._last_error.clear()
            return message
        if error.name() == "_PARTITION_EOF":
            # The last offsets of a partition may have no record.
            self._place = max(self._place, message.offset())
        elif error.name() in ("_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE"):
            after = position_text(self._place - 1, self._count)
            self._place = -1
            first, _ = self._query_bounds()
            raise PositionGone(after, earliest=position_text(first - 1, self._count))
        elif error.name().endswith("_AUTHORIZATION_FAILED") or error.name().startswith(
            "UNKNOWN_TOPIC"
        ):
            self._place = -1
            raise self._last_error.explained("reading", error)
        else:
            self._last_error.note(error)
        return None

    def _query_bounds(self) -> tuple[int, int]:
        """Current first and end offset of the partition, from its leader."""
        self._queried_s = self._clock.monotonic()
        first, self._end = self._bounds.query(self._number, timeout_s=self._config.timeout_s)
        return first, self._end

    def _refresh_end(self) -> None:
        """Update the end; StorageFailed if it is before our offset, since records were lost."""
        place = self._place
        _, end = self._query_bounds()
        if end < place:
            self._place = -1
            raise self._lost(place, end)

    def _lost(self, place: int, end: int) -> StorageFailed:
        return StorageFailed(
            f"partition {self._number} of topic {self._config.topic!r} ends at offset {end}, but "
            f"was read up to {place}: the brokers lost acknowledged records; check their logs, "
            "then configure a new topic for gateways and ingest"
        )

    def close(self) -> None:
        """Close the consumer, after a waiting read has returned."""
        with self._lock:
            if self._consumer is not None:
                self._consumer.close()
                self._consumer = None
                self._place = -1
