"""Time as an argument, so that tests can control it."""

import time
from threading import Event
from typing import Protocol


class Clock(Protocol):
    """The source of time for a component, and how it waits."""

    def now(self) -> float:
        """Seconds since 1970."""
        ...

    def monotonic(self) -> float:
        """Seconds that never decrease."""
        ...

    def wait(self, event: Event, timeout_s: float) -> bool:
        """Wait until the event is set or the timeout expires; return whether it was set."""
        ...


class SystemClock:
    """The time of this machine."""

    def now(self) -> float:
        return time.time()

    monotonic = staticmethod(time.monotonic)

    def wait(self, event: Event, timeout_s: float) -> bool:
        return event.wait(timeout_s)
