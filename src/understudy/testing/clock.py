"""A clock that moves only when a test moves it."""

import time
from threading import Event

START_S = 1_760_000_000.0
"""The start of a ManualClock: a day in 2025, so that session ids created from it are plausible."""


class ManualClock:
    """A Clock whose time moves only by `advance` and by waiting.

    With `waits_in_real_time`, only `now` is manual: `monotonic` and `wait` follow the real time.
    """

    def __init__(self, now_s: float = START_S, *, waits_in_real_time: bool = False) -> None:
        self._now_s = now_s
        self._waits_in_real_time = waits_in_real_time

    def now(self) -> float:
        return self._now_s

    def monotonic(self) -> float:
        return time.monotonic() if self._waits_in_real_time else self._now_s

    def wait(self, event: Event, timeout_s: float) -> bool:
        """Advance the time without waiting, unless the event is set; return whether it is set."""
        if self._waits_in_real_time:
            return event.wait(timeout_s)
        if not event.is_set():
            self._now_s += timeout_s
        return event.is_set()

    def advance(self, seconds: float) -> None:
        """Move the time forward (or back, like a machine with a wrong clock)."""
        self._now_s += seconds
