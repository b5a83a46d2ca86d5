"""Backoff: when a link that did not answer, or said later, may be tried again."""

import random

from understudy.core.clock import Clock


class Backoff:
    """Waits are random between 0 and a bound that doubles with each failure, up to `cap_s`."""

    def __init__(self, clock: Clock, rng: random.Random, *, first_s: float, cap_s: float) -> None:
        self._clock, self._rng, self._first_s, self._cap_s = clock, rng, first_s, cap_s
        self._failures = 0
        self._not_before_s = clock.monotonic()

    @property
    def left_s(self) -> float:
        """Seconds until the next try is due; 0 or less when it is."""
        return self._not_before_s - self._clock.monotonic()

    def succeeded(self) -> None:
        """Everything was answered for good; the next failure starts small."""
        self._failures = 0

    def failed(self, *, wholly: bool, retry_after_s: float) -> None:
        """Some of what was sent (`wholly`: all of it) must go again, no sooner than the platform said."""
        self._failures = self._failures + 1 if wholly else 1
        bound_s = min(self._cap_s, self._first_s * 2.0 ** min(self._failures - 1, 16))
        delay_s = max(self._rng.uniform(0.0, bound_s), min(retry_after_s, self._cap_s))
        self._not_before_s = self._clock.monotonic() + delay_s
