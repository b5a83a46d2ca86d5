"""Pace: rounds of play at a given rate until somebody asks to stop, with a report now and then."""

import math
import threading
import time
from collections.abc import Callable

_REPORT_EVERY_S = 0.1


def rounds(
    play: Callable[[], None], tell: Callable[[int], None], *, stop: threading.Event, rate: float,
    seconds: float = math.inf,
) -> int:  # fmt: skip
    """Play round after round, `rate` of them a second (0: as fast as they go), and tell how many; their number."""
    began_s = report_s = time.monotonic()
    played = 0
    while not stop.is_set() and (now_s := time.monotonic()) - began_s < seconds:
        if now_s >= report_s:
            report_s = now_s + _REPORT_EVERY_S
            tell(played)
        if rate and played > (now_s - began_s) * rate:
            stop.wait(min(0.5 / rate, 0.05))
            continue
        play()
        played += 1
    return played
