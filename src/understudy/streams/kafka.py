"""A stream in Apache Kafka: a topic, whose partitions hold whole sessions; positions are kept by our store.

Records are frames, keyed by session, with a header that says over how many partitions sessions are spread. That number
must not change: a topic that was given more partitions is refused until the address says how many to go on with.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import TimeoutError as NotYet
from typing import Any

from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import Closed, ConfigError
from understudy.core.frame import Frame
from understudy.core.location import Location
from understudy.core.ports import Ack, Partition, Position, Read
from understudy.streams.kafka_bounds import Bounds
from understudy.streams.kafka_config import KafkaConfig, kafka_config
from understudy.streams.kafka_lane import KafkaLane, changed_count
from understudy.streams.kafka_trouble import Trouble, kafka_library
from understudy.streams.kafka_writer import SPREAD, KafkaWriter

_SLICE_S = 0.1
_PARTITIONS = 4
"""Of a topic that is made where nobody says how many."""
_UNDERSTOOD_S = 2.0
"""How long a listener may speak another language than we do: one that is just ending may seem to."""
_MAKING, _OPENING = "making a Kafka topic", "opening a Kafka stream"


def open_kafka(location: Location, *, clock: Clock | None = None) -> "KafkaStream":
    """The stream of an address; one error says why not, within its open_timeout_s."""
    return KafkaStream(kafka_config(location), clock=clock)


def create_kafka(location: Location, *, partitions: int | None = None, replication: int = 1) -> int:
    """Make the topic of an address, for development; over how many partitions sessions are spread.

    One that is there stays as it is: fine when it has the number asked for, when none is asked for, or when the address
    names the first ones of it. A frame is durable when all brokers that hold it but one have it.
    """
    config = kafka_config(location)
    if partitions and config.partitions not in (0, partitions):
        raise ConfigError(
            f"the address says partitions={config.partitions}, and {partitions} were asked for besides; give one of "
            "the two"
        )
    kafka, trouble = kafka_library(), Trouble(config)
    admin = _admin(kafka, config, trouble)
    in_sync = {"min.insync.replicas": str(max(1, replication - 1))}
    wanted = partitions or config.partitions or _PARTITIONS
    topic = kafka.admin.NewTopic(config.topic, wanted, replication, config=in_sync)
    try:
        future = admin.create_topics([topic], request_timeout=config.open_timeout_s)[config.topic]
        _answer(admin, future, trouble, doing=_MAKING, timeout_s=config.open_timeout_s)
    except kafka.KafkaException as error:
        if error.args[0].name() != "TOPIC_ALREADY_EXISTS":
            raise trouble.explained(_MAKING, error.args[0], at_start=True) from None
    there = _count_when_known(kafka, config)
    if there < config.partitions or (partitions and there != partitions):
        raise _other_count(config, there, wanted=wanted)
    return config.partitions or there


def _other_count(config: KafkaConfig, there: int, *, wanted: int) -> ConfigError:
    first = f", add partitions={wanted} to the address to use the first {wanted}" if there > wanted else ""
    return ConfigError(
        f"topic {config.topic!r} at {config.where} is there with {there} partitions, and {wanted} were asked for; name "
        f"no number to use it as it is{first}, or take another topic: the number is for good"
    )


def _count_when_known(kafka: Any, config: KafkaConfig) -> int:
    """How many partitions a new topic has: it is made before every broker has heard of it."""
    give_up_s = time.monotonic() + config.open_timeout_s
    while True:
        try:
            return _describe(kafka, config, Trouble(config))[1]
        except ConfigError:
            if time.monotonic() > give_up_s:
                raise
            time.sleep(_SLICE_S)


class KafkaStream:
    """A topic as a stream; any number of processes append and read."""

    def __init__(self, config: KafkaConfig, *, clock: Clock | None = None) -> None:
        self._config = config
        kafka = kafka_library()
        topic_id, there = _describe(kafka, config, Trouble(config))
        self.count = config.partitions or there
        """Over how many partitions sessions are spread."""
        if self.count > there:
            raise ConfigError(
                f"topic {config.topic!r} at {config.where} has {there} partitions, and partitions={self.count} is "
                "asked for; give that many or fewer, or none for all"
            )
        self._bounds = Bounds(config)
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
        # A topic that is deleted and made again has another id, so that no old position is mistaken for one of its own.
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

    def read(self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float) -> Read:
        lane = self._lanes.get(partition)
        if lane is None:
            raise ConfigError(f"{partition!r} is no partition of this stream; ask partitions() for them")
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


def _admin(kafka: Any, config: KafkaConfig, trouble: Trouble) -> Any:
    try:
        return kafka.admin.AdminClient({**config.client(), "error_cb": trouble.note})
    except kafka.KafkaException as error:
        raise ConfigError(
            f"the Kafka library takes no such settings: {error.args[0].str()}; mend the address"
        ) from None


def _answer(admin: Any, future: Any, trouble: Trouble, *, doing: str, timeout_s: float) -> Any:
    """What a request to the brokers gave; an error at once when they refuse us, and in time when none is there."""
    slices = max(1, round(timeout_s / _SLICE_S))
    for number in range(slices):
        try:
            return future.result(timeout=_SLICE_S)
        except NotYet:
            admin.poll(0.0)
            if trouble.is_refusal or (trouble.is_misunderstood and number >= _UNDERSTOOD_S / _SLICE_S):
                break
    raise trouble.explained(doing, at_start=True)


def _describe(kafka: Any, config: KafkaConfig, trouble: Trouble) -> tuple[str, int]:
    """The topic's own id, and how many partitions it has."""
    admin = _admin(kafka, config, trouble)
    topics = kafka.TopicCollection([config.topic])
    future = admin.describe_topics(topics, request_timeout=config.open_timeout_s)[config.topic]
    try:
        found = _answer(admin, future, trouble, doing=_OPENING, timeout_s=config.open_timeout_s)
    except kafka.KafkaException as error:
        raise trouble.explained(_OPENING, error.args[0], at_start=True) from None
    return str(found.topic_id).replace("+", "-").replace("/", "_"), len(found.partitions)


def _newest_spreads(kafka: Any, config: KafkaConfig, there: int, *, bounds: Bounds) -> set[int]:
    """What the newest record of each partition says about how many there are; records of others say nothing."""
    wanted = {}
    for number in range(there):
        first, end = bounds.ask(number, timeout_s=config.open_timeout_s, at_start=True)
        if end > first:
            wanted[number] = kafka.TopicPartition(config.topic, number, end - 1)
    spreads: set[int] = set()
    if not wanted:
        return spreads
    trouble = Trouble(config)
    consumer = kafka.Consumer({**config.consumer(), "error_cb": trouble.note})
    try:
        consumer.assign(list(wanted.values()))
        for _ in range(max(1, round(config.open_timeout_s / _SLICE_S))):
            message = consumer.poll(_SLICE_S)
            if message is not None and message.error() in (None, kafka.KafkaError._PARTITION_EOF):
                wanted.pop(message.partition(), None)
                headers = message.headers() or ()
                spreads |= {int(value) for name, value in headers if name == SPREAD and value and value.isdigit()}
            if not wanted:
                return spreads
        raise trouble.explained(_OPENING, at_start=True)
    finally:
        consumer.close()
