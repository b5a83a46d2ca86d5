"""Time as an argument, so that tests hold it still."""

import time
from threading import Event
from typing import Protocol


class Clock(Protocol):
    """Where a component reads the time and waits."""

    def now(self) -> float:
        """Seconds since 1970."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back."""
        ...

    def wait(self, event: Event, timeout_s: float) -> bool:
        """Wait until the event is set or the time is over; says whether it was set."""
        ...


class SystemClock:
    """The machine's own time."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def wait(self, event: Event, timeout_s: float) -> bool:
        return event.wait(timeout_s)
