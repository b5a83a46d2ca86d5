"""How much is accepted: the rate of a key, and the share of episodes that a game's players should record.

Each send is answered with `keep_share`. A client keeps whole episodes with that probability, and says with its next
send how many steps it did not record: so what is played is known exactly, whatever share is sent.
"""

import math
from dataclasses import dataclass

from understudy.core.clock import Clock
from understudy.core.errors import ConfigError
from understudy.serve.keys import Key

BURST_S = 2.0
"""A bucket holds what its rate gives in this time, so that a short rush passes."""
_MAX_BUCKETS = 100_000
_WINDOW_S = 20.0
"""How fast the estimate follows: what was played this long ago counts a third."""


@dataclass(slots=True)
class _Bucket:
    """Requests and bytes that are left; below zero, they are owed."""

    requests: float
    size_bytes: float
    at_s: float


class Limits:
    """One pair of buckets per key, on one gateway; not thread-safe, for the event loop alone."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    def take(self, key: Key, size_bytes: int) -> float:
        """Count a request of this size: 0 when it may pass, else after how many seconds to try again."""
        now_s = self._clock.monotonic()
        bucket = self._buckets.get(key.id)
        if bucket is None:
            if len(self._buckets) >= _MAX_BUCKETS:
                self._buckets.clear()
            bucket = self._buckets[key.id] = _Bucket(key.requests_s * BURST_S, key.bytes_s * BURST_S, now_s)
        passed_s = max(0.0, now_s - bucket.at_s)
        bucket.at_s = now_s
        bucket.requests = min(key.requests_s * BURST_S, bucket.requests + passed_s * key.requests_s)
        bucket.size_bytes = min(key.bytes_s * BURST_S, bucket.size_bytes + passed_s * key.bytes_s)
        wait_s = max(_until_one(bucket.requests, key.requests_s), _until_one(bucket.size_bytes, key.bytes_s))
        if wait_s <= 0:
            bucket.requests -= 1
            bucket.size_bytes -= size_bytes
        return wait_s

    def owe(self, key: Key, size_bytes: int) -> None:
        """Count bytes that came beyond those that were announced; later requests wait for them."""
        bucket = self._buckets.get(key.id)
        if bucket is not None and size_bytes > 0:
            bucket.size_bytes -= size_bytes


def _until_one(left: float, rate: float) -> float:
    # A little less is enough, since a time that was waited for is rounded.
    return 0.0 if left > 1 - 1e-6 else (1 - left) / rate


class Quota:
    """One game's target of steps a second, and the share that meets it; for the event loop alone."""

    def __init__(self, target_steps_s: float | None, clock: Clock) -> None:
        """No target: everything is wanted."""
        if target_steps_s is not None and not 0 < target_steps_s < 1e12:
            raise ConfigError(f"a quota of {target_steps_s} steps/s; give a number above 0, or none for no limit")
        self._target, self._clock = target_steps_s, clock
        self._steps, self._weight_s = 0.0, 0.0
        self._at_s = clock.monotonic()

    def saw(self, kept_steps: int, skipped_steps: int) -> float:
        """Count what a client sent and left out; the share to keep from now on."""
        self._fade()
        self._steps += kept_steps + skipped_steps
        return self.keep_share

    @property
    def keep_share(self) -> float:
        """The probability with which a client should record its next episode."""
        if self._target is None:
            return 1.0
        # Until the window has filled a little, a first burst of spooled chunks says nothing about a rate.
        played = self._steps / max(self._weight_s, 1.0)
        return min(1.0, self._target / played) if played > 0 else 1.0

    def _fade(self) -> None:
        now_s = self._clock.monotonic()
        passed_s, self._at_s = max(0.0, now_s - self._at_s), now_s
        fade = math.exp(-passed_s / _WINDOW_S)
        self._steps *= fade
        self._weight_s = self._weight_s * fade + _WINDOW_S * (1 - fade)
