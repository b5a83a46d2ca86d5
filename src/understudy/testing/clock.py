"""A clock that moves only when a test moves it."""

from threading import Event

START_S = 1_760_000_000.0
"""The start of a ManualClock: a day in 2025, so that session ids created from it are plausible."""


class ManualClock:
    """A Clock whose time moves only by `advance` and by waiting."""

    def __init__(self, now_s: float = START_S) -> None:
        self._now_s = now_s

    def now(self) -> float:
        return self._now_s

    def monotonic(self) -> float:
        return self._now_s

    def wait(self, event: Event, timeout_s: float) -> bool:
        """Return at once and advance the time, unless the event is set."""
        if not event.is_set():
            self._now_s += timeout_s
        return event.is_set()

    def advance(self, seconds: float) -> None:
        """Move the time forward (or back, like a machine with a wrong clock)."""
        self._now_s += seconds
