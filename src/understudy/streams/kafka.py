"""A stream in Apache Kafka: a topic, whose partitions hold whole sessions; positions are kept by
our store.

Records are frames, keyed by session, with a header that says over how many partitions sessions are
spread. That number must not change: a topic that was given more partitions is refused until the
address says how many to go on with.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
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

_SLICE_S = 0.1
_PARTITIONS = 4
"""Of a topic that is made where nobody says how many."""
_UNDERSTOOD_S = 2.0
"""How long a listener may speak another language than we do: one that is just ending may seem
to."""
_MAKING = "creating"
_OPENING = "opening"
_ASK_EVERY_S = 0.02
"""How often the end of a partition is asked for, at most, while nothing comes."""
_HEAR_EVERY_S = 1.0
"""How often it is asked for while records come."""
SPREAD = "partitions"
"""The header of a record that says over how many partitions sessions were spread."""
GRACE_S = 2.0
"""How much later than its timeout a frame's end may be told: the library looks for it once a
second."""
_RETRY_S = 1.0
_POLL_S = 0.1
_DURABLE = Ack(True)
_TOO_LARGE = Ack(False, refused=f"too_large: a frame takes at most {MAX_FRAME_BYTES} bytes")


def open_kafka(location: Location, *, clock: Clock | None = None) -> "KafkaStream":
    """The stream of an address; one error says why not, within its open_timeout_s."""
    return KafkaStream(kafka_config(location), clock=clock)


def create_kafka(location: Location, *, partitions: int | None = None, replication: int = 1) -> int:
    """Make the topic of an address, for development; over how many partitions sessions are spread.

    One that is there stays as it is: fine when it has the number asked for, when none is asked for,
    or when the address names the first ones of it. A frame is durable when all brokers that hold it
    but one have it.
    """
    config = kafka_config(location)
    if partitions and config.partitions not in (0, partitions):
        raise ConfigError(
            f"the address says partitions={config.partitions}, and {partitions} were asked for "
            "besides; give one of "
            "the two"
        )
    kafka = kafka_library()
    last_error = LastError(config)
    admin = _admin(kafka, config, last_error)
    in_sync = {"min.insync.replicas": str(max(1, replication - 1))}
    wanted = partitions or config.partitions or _PARTITIONS
    topic = kafka.admin.NewTopic(config.topic, wanted, replication, config=in_sync)
    try:
        future = admin.create_topics([topic], request_timeout=config.open_timeout_s)[config.topic]
        _answer(admin, future, last_error, doing=_MAKING, timeout_s=config.open_timeout_s)
    except kafka.KafkaException as error:
        if error.args[0].name() != "TOPIC_ALREADY_EXISTS":
            raise last_error.explained(_MAKING, error.args[0], at_start=True) from None
    there = _count_when_known(kafka, config)
    if there < config.partitions or (partitions and there != partitions):
        first = (
            f", add partitions={wanted} to the address to use the first {wanted}"
            if there > wanted
            else ""
        )
        raise ConfigError(
            f"topic {config.topic!r} at {config.where} is there with {there} partitions, and "
            f"{wanted} were asked for; "
            f"name no number to use it as it is{first}, or take another topic: the number is for "
            "good"
        )
    return config.partitions or there


def _count_when_known(kafka: Any, config: KafkaConfig) -> int:
    """How many partitions a new topic has: it is made before every broker has heard of it."""
    give_up_s = time.monotonic() + config.open_timeout_s
    while True:
        try:
            return _describe(kafka, config, LastError(config))[1]
        except ConfigError:
            if time.monotonic() > give_up_s:
                raise
            time.sleep(_SLICE_S)


class KafkaStream:
    """A topic as a stream; any number of processes append and read."""

    def __init__(self, config: KafkaConfig, *, clock: Clock | None = None) -> None:
        self._config = config
        kafka = kafka_library()
        topic_id, there = _describe(kafka, config, LastError(config))
        self.count = config.partitions or there
        """Over how many partitions sessions are spread."""
        if self.count > there:
            raise ConfigError(
                f"topic {config.topic!r} at {config.where} has {there} partitions, and "
                f"partitions={self.count} is "
                "asked for; give that many or fewer, or none for all"
            )
        self._bounds = OffsetBounds(config)
        try:
            spreads = _newest_spreads(kafka, config, there, bounds=self._bounds)
            if others := spreads - {self.count}:
                raise changed_count(config.topic, held=min(others), count=self.count)
        except BaseException:
            self._bounds.close()
            raise
        self._closed = threading.Event()
        clock = clock or SystemClock()
        self._writer = KafkaWriter(config, self.count, clock=clock)
        # A topic that is deleted and made again has another id, so that no old position is mistaken
        # for one of its own.
        self._lanes = {
            f"{config.topic}-{number}@{topic_id}": KafkaLane(
                config, number, self.count, bounds=self._bounds, clock=clock, closed=self._closed
            )
            for number in range(self.count)
        }

    def append(self, frames: Sequence[Frame]) -> Sequence[Ack]:
        if self._closed.is_set():
            raise Closed("the stream was closed")
        return self._writer.append(frames) if frames else []

    def partitions(self) -> Sequence[Partition]:
        return [Partition(name) for name in self._lanes]

    def read(
        self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float
    ) -> Read:
        lane = self._lanes.get(partition)
        if lane is None:
            raise ConfigError(
                f"{partition!r} is no partition of this stream; ask partitions() for them"
            )
        return lane.read(after, max_bytes=max_bytes, wait_s=wait_s)

    def close(self) -> None:
        """Let running appends and reads end, then let go of every connection."""
        self._closed.set()
        self._writer.close()
        for lane in self._lanes.values():
            lane.close()
        self._bounds.close()

    def __enter__(self) -> "KafkaStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _admin(kafka: Any, config: KafkaConfig, last_error: LastError) -> Any:
    try:
        return kafka.admin.AdminClient({**config.client(), "error_cb": last_error.note})
    except kafka.KafkaException as error:
        raise ConfigError(
            f"the Kafka library rejects the settings: {error.args[0].str()}; correct the address"
        ) from None


def _answer(admin: Any, future: Any, last_error: LastError, *, doing: str, timeout_s: float) -> Any:
    """What a request to the brokers gave; an error at once when they refuse us, and in time when
    none is there."""
    slices = max(1, round(timeout_s / _SLICE_S))
    for number in range(slices):
        try:
            return future.result(timeout=_SLICE_S)
        except NotYet:
            admin.poll(0.0)
            # A broker that refuses us has answered; one that is just ending may seem to speak
            # another language.
            patience_s = 0.0 if last_error.condition == "_AUTHENTICATION" else _UNDERSTOOD_S
            if last_error.condition and number * _SLICE_S >= patience_s:
                break
    raise last_error.explained(doing, at_start=True)


def _describe(kafka: Any, config: KafkaConfig, last_error: LastError) -> tuple[str, int]:
    """The topic's own id, and how many partitions it has."""
    admin = _admin(kafka, config, last_error)
    topics = kafka.TopicCollection([config.topic])
    future = admin.describe_topics(topics, request_timeout=config.open_timeout_s)[config.topic]
    try:
        found = _answer(admin, future, last_error, doing=_OPENING, timeout_s=config.open_timeout_s)
    except kafka.KafkaException as error:
        raise last_error.explained(_OPENING, error.args[0], at_start=True) from None
    return str(found.topic_id).replace("+", "-").replace("/", "_"), len(found.partitions)


def _newest_spreads(
    kafka: Any, config: KafkaConfig, there: int, *, bounds: OffsetBounds
) -> set[int]:
    """What the newest record of each partition says about how many there are; records of others
    say nothing."""
    wanted = {}
    for number in range(there):
        first, end = bounds.ask(number, timeout_s=config.open_timeout_s, at_start=True)
        if end > first:
            wanted[number] = kafka.TopicPartition(config.topic, number, end - 1)
    spreads: set[int] = set()
    if not wanted:
        return spreads
    last_error = LastError(config)
    consumer = kafka.Consumer({**config.consumer(), "error_cb": last_error.note})
    try:
        consumer.assign(list(wanted.values()))
        for _ in range(max(1, round(config.open_timeout_s / _SLICE_S))):
            message = consumer.poll(_SLICE_S)
            if message is not None and message.error() in (None, kafka.KafkaError._PARTITION_EOF):
                wanted.pop(message.partition(), None)
                headers = message.headers() or ()
                spreads |= {
                    int(value)
                    for name, value in headers
                    if name == SPREAD and value and value.isdigit()
                }
            if not wanted:
                return spreads
        raise last_error.explained(_OPENING, at_start=True)
    finally:
        consumer.close()


# --- Appending ------------------------------------------------------------------------------------


def lane_of(session: bytes, count: int) -> int:
    """The partition of a session: the same one for as long as the count stays."""
    return crc32(session) % count


class KafkaWriter:
    """Appends to a topic; its connection is made with the first frame, and anew after a fatal
    error."""

    def __init__(self, config: KafkaConfig, count: int, *, clock: Clock) -> None:
        self._config = config
        self._count = count
        self._clock = clock
        self._headers = [(SPREAD, str(count).encode())]
        self._lock = threading.Condition()
        self._sender: _Sender | None = None
        self._running = 0
        self._is_closed = False

    def append(self, frames: Sequence[Frame]) -> list[Ack]:
        """One outcome per frame, after at most the timeout and 2 s; many threads may call at
        once."""
        # Encoded before the first is sent, so that a frame that cannot be encoded fails its own
        # caller only.
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
                lane = lane_of(frame.session.bytes, self._count)
                report = partial(self._report, sender, waiting, index)
                sender.send(
                    raw,
                    key=frame.session.bytes,
                    lane=lane,
                    headers=self._headers,
                    time_ms=time_ms,
                    on_end=report,
                )
        return waiting.outcomes(
            self._config.timeout_s + GRACE_S, unanswered=lambda: self._unanswered(sender)
        )

    def _report(
        self, sender: "_Sender", waiting: "PendingAppend", index: int, error: Any, _: Any = None
    ) -> None:
        """What became of a frame; `error` is None once every replica in sync has it."""
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
        """Take no more, and let running appends end."""
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
        """All of them; whoever has no answer by then may still be stored, and is never called
        durable."""
        with self._changed:
            if self._changed.wait_for(lambda: not self._left, timeout=timeout_s):
                return [one for one in self._outcomes if one is not None]
            silent = unanswered()
            return [silent if one is None else one for one in self._outcomes]


class _Sender:
    """A producer of the library and the thread that hears what it has to tell."""

    def __init__(self, config: KafkaConfig) -> None:
        kafka = kafka_library()
        self.last_error = LastError(config)
        self.fatal: Any = None
        """Why nothing can be sent by this connection any more."""
        self._topic = config.topic
        self._errors = kafka.KafkaException, kafka.KafkaError
        self._producer = kafka.Producer({**config.producer(), "error_cb": self.last_error.note})
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="understudy-kafka", daemon=True)
        self._thread.start()

    def send(
        self,
        raw: bytes,
        *,
        key: bytes,
        lane: int,
        headers: list[tuple[str, bytes]],
        time_ms: int,
        on_end: Any,
    ) -> None:
        """Hand a frame over; `on_end` is called once, here or by the thread."""
        exception, error = self._errors
        try:
            self._producer.produce(
                self._topic,
                value=raw,
                key=key,
                partition=lane,
                headers=headers,
                timestamp=time_ms,
                on_delivery=on_end,
            )
        except BufferError:
            on_end(error(error._QUEUE_FULL, "too many frames wait for the brokers"))
        except exception as failure:
            on_end(failure.args[0])

    def _listen(self) -> None:
        while not (self._stop.is_set() and not len(self._producer)):
            try:
                self._producer.poll(_POLL_S)
            except self._errors[0] as failure:
                self.fail(failure.args[0])
                time.sleep(_POLL_S / 10)

    def fail(self, error: Any) -> None:
        """The library has given this connection up, and says so from now on to whatever is
        asked."""
        self.fatal = error
        self.give_up()

    def give_up(self) -> None:
        """Let everything that waits fail now, and end the thread."""
        self._stop.set()
        self._producer.purge(in_queue=True, in_flight=True, blocking=False)

    def close(self) -> None:
        """End the connection; whoever appended has their answers."""
        self.give_up()
        self._thread.join(1.0)


# --- Reading --------------------------------------------------------------------------------------


def position_text(offset: int, count: int) -> Position:
    """Behind a record; it carries over how many partitions sessions are spread, so that a change
    is noticed."""
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
        f"topic {topic!r} is used with {count} partitions, and sessions were spread over {held} "
        "before, so they would "
        f"move between partitions; add partitions={held} to the address to go on as before, or "
        "make a new topic"
    )


class KafkaLane:
    """A partition and its consumer, made by the first read; one read at a time."""

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
        """The offset that comes next; -1: nowhere yet."""
        self._origin = -1
        """Our place when reading began at the start: whoever waits there for a first record asks
        for it again."""
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
            start = (
                None
                if after is None
                else offset_behind(after, self._count, topic=self._config.topic)
            )
            if self._place < 0 or self._place != (self._origin if start is None else start):
                self._jump(start, after)
            elif (
                self._place >= self._end and self._clock.monotonic() - self._asked_s > _HEAR_EVERY_S
            ):
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
            self._consumer = self._kafka.Consumer(
                {**self._config.consumer(), "error_cb": self._last_error.note}
            )
        self._consumer.assign(
            [self._kafka.TopicPartition(self._config.topic, self._number, self._place)]
        )

    def _first(self, deadline_s: float) -> Any:
        """The record at our place, waiting for it; None when nothing came. What was appended
        before comes for sure."""
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
        """The record that is there; Unreachable when it does not come. None: nothing but gaps up
        to the end."""
        give_up_s = self._clock.monotonic() + self._config.timeout_s
        while not self._closed.is_set() and self._place < self._end:
            if (message := self._next(_SLICE_S)) is not None:
                return message
            if self._clock.monotonic() > give_up_s:
                self._place = -1
                raise self._last_error.explained("reading")
        return None

    def _gather(self, first: Any, max_bytes: int) -> list[Record]:
        """Records up to the end that is known, or to the bytes wanted; the first one always."""
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
                message = self._next(_SLICE_S if self._place < self._end else 0.0)
            except (PositionGone, Unreachable):
                break  # what we have is handed out; the next read jumps, and is told
        return records

    def _next(self, wait_s: float) -> Any:
        """The next record, if one comes in time."""
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
            # Behind the last record there may be places that hold none.
            self._place = max(self._place, message.offset())
        elif error.name() in ("_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE"):
            after = position_text(self._place - 1, self._count)
            self._place = -1
            first, _ = self._ask()
            raise PositionGone(after, earliest=position_text(first - 1, self._count))
        elif error.name().endswith("_AUTHORIZATION_FAILED") or error.name().startswith(
            "UNKNOWN_TOPIC"
        ):
            self._place = -1
            raise self._last_error.explained("reading", error)
        else:
            self._last_error.note(error)
        return None

    def _ask(self) -> tuple[int, int]:
        """First offset and end of the partition, as its leader says now."""
        self._asked_s = self._clock.monotonic()
        first, self._end = self._bounds.ask(self._number, timeout_s=self._config.timeout_s)
        return first, self._end

    def _ask_again(self) -> None:
        """Hear of a new end; StorageFailed when it lies before our place, where records would
        come in unseen."""
        place = self._place
        (_, end) = self._ask()
        if end < place:
            self._place = -1
            raise self._lost(place, end)

    def _lost(self, place: int, end: int) -> StorageFailed:
        return StorageFailed(
            f"partition {self._number} of topic {self._config.topic!r} ends at {end}, and was read "
            f"up to {place}: "
            "brokers lost what they had acknowledged; see their logs, then let gateways and ingest "
            "use a new topic"
        )

    def close(self) -> None:
        """Let go of the consumer; a read that waits returns first."""
        with self._lock:
            if self._consumer is not None:
                self._consumer.close()
                self._consumer = None
                self._place = -1
