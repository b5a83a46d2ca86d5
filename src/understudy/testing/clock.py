"""A clock that stands still until a test moves it."""

from threading import Event

START_S = 1_760_000_000.0
"""Where a ManualClock starts: some day in 2025, so that session ids made from it are plausible."""


class ManualClock:
    """A Clock whose time moves only by `advance` and by waiting."""

    def __init__(self, now_s: float = START_S) -> None:
        self._now_s = now_s

    def now(self) -> float:
        return self._now_s

    def monotonic(self) -> float:
        return self._now_s

    def wait(self, event: Event, timeout_s: float) -> bool:
        """Returns at once, with the time moved on unless the event was set."""
        if not event.is_set():
            self._now_s += timeout_s
        return event.is_set()

    def advance(self, seconds: float) -> None:
        """Move the time on (or back, as a badly set machine would)."""
        self._now_s += seconds
