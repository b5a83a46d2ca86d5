"""Appending to Kafka: frames in, one outcome each by the brokers' own word, in bounded time."""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from zlib import crc32

from understudy.core.clock import Clock
from understudy.core.errors import Closed
from understudy.core.frame import MAX_FRAME_BYTES, Frame
from understudy.core.ports import Ack
from understudy.streams.kafka_config import KafkaConfig
from understudy.streams.kafka_trouble import Trouble, kafka_library

SPREAD = "partitions"
"""The header of a record that says over how many partitions sessions were spread."""
GRACE_S = 2.0
"""How much later than its timeout a frame's end may be told: the library looks for it once a second."""
_RETRY_S = 1.0
_POLL_S = 0.1
_DURABLE = Ack(True)
_TOO_LARGE = Ack(False, refused=f"too_large: a frame takes at most {MAX_FRAME_BYTES} bytes")


def lane_of(session: bytes, count: int) -> int:
    """The partition of a session: the same one for as long as the count stays."""
    return crc32(session) % count


class KafkaWriter:
    """Appends to a topic; its connection is made with the first frame, and anew after a fatal error."""

    def __init__(self, config: KafkaConfig, count: int, *, clock: Clock) -> None:
        self._config, self._count, self._clock = config, count, clock
        self._headers = [(SPREAD, str(count).encode())]
        self._lock = threading.Condition()
        self._sender: _Sender | None = None
        self._running = 0
        self._is_closed = False

    def append(self, frames: Sequence[Frame]) -> list[Ack]:
        """One outcome per frame, after at most the timeout and 2 s; many threads may call at once."""
        # Encoded before the first is sent, so that a frame that cannot be encoded fails its own caller only.
        raws = [None if frame.size_bytes > MAX_FRAME_BYTES else frame.encode() for frame in frames]
        sender = self._begin()
        try:
            return self._append(sender, frames, raws)
        finally:
            self._end()

    def _append(self, sender: "_Sender", frames: Sequence[Frame], raws: Sequence[bytes | None]) -> list[Ack]:
        waiting = Waiting(len(frames))
        time_ms = int(self._clock.now() * 1000)
        for index, (frame, raw) in enumerate(zip(frames, raws, strict=True)):
            if raw is None:
                waiting.settle(index, _TOO_LARGE)
            else:
                lane = lane_of(frame.session.bytes, self._count)
                report = partial(self._report, sender, waiting, index)
                sender.send(
                    raw, key=frame.session.bytes, lane=lane, headers=self._headers, time_ms=time_ms, on_end=report
                )
        return waiting.outcomes(self._config.timeout_s + GRACE_S, unanswered=lambda: self._unanswered(sender))

    def _report(self, sender: "_Sender", waiting: "Waiting", index: int, error: Any, _: Any = None) -> None:
        """What became of a frame; `error` is None once every replica in sync has it."""
        if error is None:
            sender.trouble.clear()
            waiting.settle(index, _DURABLE)
            return
        if error.fatal():
            sender.fail(error)
        problem = sender.trouble.explained("appending", sender.fatal or error)
        waiting.settle(index, Ack(False, retry_after_s=_RETRY_S, error=str(problem)))

    def _unanswered(self, sender: "_Sender") -> Ack:
        error = str(sender.trouble.explained("appending", sender.fatal))
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
            sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()


class Waiting:
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
        """All of them; whoever has no answer by then may still be stored, and is never called durable."""
        with self._changed:
            if self._changed.wait_for(lambda: not self._left, timeout=timeout_s):
                return [one for one in self._outcomes if one is not None]
            silent = unanswered()
            return [silent if one is None else one for one in self._outcomes]


class _Sender:
    """A producer of the library and the thread that hears what it has to tell."""

    def __init__(self, config: KafkaConfig) -> None:
        kafka = kafka_library()
        self.trouble = Trouble(config)
        self.fatal: Any = None
        """Why nothing can be sent by this connection any more."""
        self._topic = config.topic
        self._errors = kafka.KafkaException, kafka.KafkaError
        self._producer = kafka.Producer({**config.producer(), "error_cb": self.trouble.note})
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="understudy-kafka", daemon=True)
        self._thread.start()

    def send(
        self, raw: bytes, *, key: bytes, lane: int, headers: list[tuple[str, bytes]], time_ms: int, on_end: Any
    ) -> None:
        """Hand a frame over; `on_end` is called once, here or by the thread."""
        exception, error = self._errors
        try:
            self._producer.produce(
                self._topic, value=raw, key=key, partition=lane, headers=headers, timestamp=time_ms, on_delivery=on_end
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
        """The library has given this connection up, and says so from now on to whatever is asked."""
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
