"""Quota: how much of what is played the platform asks for, so that many players cost each of them little.

Each send is answered with `keep_share`. A client keeps whole episodes with that probability, and says with its next
send how many steps it did not record: so what is played is known exactly, whatever share is sent.
"""

import math

from understudy.core.clock import Clock
from understudy.core.errors import ConfigError

_WINDOW_S = 20.0
"""How fast the estimate follows: what was played this long ago counts a third."""


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
