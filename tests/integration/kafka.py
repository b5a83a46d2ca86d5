"""Topics on a Kafka server of the tests, and operations of an administrator."""

import uuid
from typing import Any

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions

from understudy.core.clock import SystemClock
from understudy.core.location import Location, parse_location
from understudy.ports import Position
from understudy.streams.kafka import KafkaStream, create_kafka, open_kafka
from understudy.streams.kafka_client import kafka_config

WAIT_TIMEOUT_S = 60.0


class Topic:
    """A topic for one test."""

    def __init__(self, server: Any, *, partitions: int = 3, replication: int = 1) -> None:
        self.server = server
        self.name = f"test-{uuid.uuid4().hex[:12]}"
        self.admin = AdminClient(kafka_config(self.location()).client())
        create_kafka(self.location(), partitions=partitions, replication=replication)

    def location(self, **more: object) -> Location:
        options = "".join(f"&{name}={value}" for name, value in more.items())
        return parse_location(
            f"kafka://{self.server.address}/{self.name}?credentials={self.server.credentials_file}{options}"
        )

    def open(self, **options: object) -> KafkaStream:
        return open_kafka(self.location(**options))

    def trim(self, partition: str, last: Position) -> None:
        """Let everything up to a record go, as retention does."""
        offset = int(last.partition("/")[0]) + 1
        place = TopicPartition(self.name, number_of(partition), offset)
        self.admin.delete_records([place])[place].result(WAIT_TIMEOUT_S)

    def grow(self, partitions: int) -> None:
        self.admin.create_partitions([NewPartitions(self.name, partitions)])[self.name].result(
            WAIT_TIMEOUT_S
        )

    def delete(self) -> None:
        self.admin.delete_topics([self.name])[self.name].result(WAIT_TIMEOUT_S)


def number_of(partition: str) -> int:
    """The number that Kafka knows a partition by."""
    return int(partition.partition("@")[0].rpartition("-")[2])


class Skewed(SystemClock):
    """The clock of a gateway that is set wrong."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_s = ahead_s

    def now(self) -> float:
        return super().now() + self._ahead_s
