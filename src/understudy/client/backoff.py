"""Backoff: random waits before retries, as of requests to the platform."""

import random

from understudy.core.clock import Clock


class Backoff:
    """Random waits between 0 and a bound that doubles with each failure, up to `cap_s`."""

    def __init__(self, clock: Clock, rng: random.Random, *, first_s: float, cap_s: float) -> None:
        self._clock = clock
        self._rng = rng
        self._first_s = first_s
        self._cap_s = cap_s
        self._failures = 0
        self._not_before_s = clock.monotonic()

    @property
    def remaining_s(self) -> float:
        """Seconds until the next attempt; 0 or less if it is due."""
        return self._not_before_s - self._clock.monotonic()

    def succeeded(self) -> None:
        """Reset the bound after a success."""
        self._failures = 0

    def failed(self, *, wholly: bool, retry_after_s: float) -> None:
        """Schedule a retry of some frames, or of all (`wholly`), after `retry_after_s` or later."""
        self._failures = self._failures + 1 if wholly else 1
        bound_s = min(self._cap_s, self._first_s * 2.0 ** min(self._failures - 1, 16))
        delay_s = max(self._rng.uniform(0.0, bound_s), min(retry_after_s, self._cap_s))
        self._not_before_s = self._clock.monotonic() + delay_s
