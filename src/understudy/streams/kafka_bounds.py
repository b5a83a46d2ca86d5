"""Where the partitions of a topic begin and end now."""

import contextlib
import threading
import time
from typing import Any

from understudy.streams.kafka_config import KafkaConfig
from understudy.streams.kafka_trouble import Trouble, kafka_library

_AGAIN_S = 0.05
_SLICE_S = 1.0


def _slice_s(left_s: float) -> float:
    return min(_SLICE_S, max(_AGAIN_S, left_s))


class Bounds:
    """Asks leaders on a connection of its own: on one that fetches, every question waits for the fetch before it."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._kafka = kafka_library()
        self._trouble = Trouble(config)
        self._lock = threading.Lock()
        self._consumer: Any = None

    def ask(self, number: int, *, timeout_s: float, at_start: bool = False) -> tuple[int, int]:
        """First offset and end of a partition; Unreachable when its leader says nothing in time."""
        consumer, partition = self._client(), self._kafka.TopicPartition(self._config.topic, number)
        give_up_s = time.monotonic() + timeout_s
        while True:
            left_s = give_up_s - time.monotonic()
            try:
                first, end = consumer.get_watermark_offsets(partition, timeout=_slice_s(left_s))
                self._trouble.clear()
                return int(first), int(end)
            except self._kafka.KafkaException as error:
                consumer.poll(0.0)  # it tells what troubles it only while it is polled
                # A leader that moves, or a topic that not every broker has heard of yet, comes right by itself.
                if left_s < 2 * _AGAIN_S or error.args[0].name().endswith("_AUTHORIZATION_FAILED"):
                    raise self._trouble.explained("reading", error.args[0], at_start=at_start) from None
                self._find_leaders(consumer, _slice_s(left_s))
                time.sleep(_AGAIN_S)

    def _find_leaders(self, consumer: Any, timeout_s: float) -> None:
        """Ask anybody who leads now: by itself the library goes on asking who did."""
        with contextlib.suppress(self._kafka.KafkaException):
            consumer.list_topics(self._config.topic, timeout=timeout_s)

    def _client(self) -> Any:
        with self._lock:
            if self._consumer is None:
                self._consumer = self._kafka.Consumer({**self._config.consumer(), "error_cb": self._trouble.note})
            return self._consumer

    def close(self) -> None:
        """Let go of the connection; nobody asks any more."""
        with self._lock:
            if self._consumer is not None:
                self._consumer.close()
                self._consumer = None
