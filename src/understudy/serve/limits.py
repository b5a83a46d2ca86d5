"""Limits: how much a key may ask for, as buckets that fill with time."""

from dataclasses import dataclass

from understudy.core.clock import Clock
from understudy.serve.keys import Key

BURST_S = 2.0
"""A bucket holds what its rate gives in this time, so that a short rush passes."""
_MAX_BUCKETS = 100_000


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
