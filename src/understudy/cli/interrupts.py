"""Interrupts: Ctrl-C that is never missed, also where other people's code catches everything."""

import _thread
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

_AGAIN_S = 0.05


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask to stop: Ctrl-C, SIGTERM, and a terminal that closes, unless `nohup` says to ignore that."""
    if sys.platform == "win32" or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return (signal.SIGINT, signal.SIGTERM)
    return (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """While it is entered, being asked to stop ends the block with KeyboardInterrupt, at once or at the next check.

    An interrupt may come up inside an import that makes another error of it, or inside a callback of the garbage
    collector (JAX has one), where Python prints it and goes on; there it is raised again a moment later.
    """

    def __init__(self, *, hurry: Callable[[], None] | None = None) -> None:
        """With `hurry` only the first one is raised; later ones call it, so that nothing stops the cleaning up."""
        self.is_asked, self._hurry = False, hurry
        self._before: Mapping[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        self._before = {number: signal.signal(number, self._ask) for number in stop_signals()}
        self._hook, sys.unraisablehook = sys.unraisablehook, self._swallowed
        return self

    def _ask(self, _number: int, _frame: object) -> None:
        if self.is_asked and self._hurry is not None:
            self._hurry()
            return
        self.is_asked = True
        raise KeyboardInterrupt

    def _swallowed(self, lost: "sys.UnraisableHookArgs") -> None:
        if lost.exc_type is not KeyboardInterrupt or not self.is_asked:
            self._hook(lost)
            return
        again = threading.Timer(_AGAIN_S, _thread.interrupt_main)
        again.daemon = True
        again.start()

    def check(self) -> None:
        """KeyboardInterrupt when somebody has asked."""
        if self.is_asked:
            raise KeyboardInterrupt

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.unraisablehook = self._hook
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.is_asked and kind is not KeyboardInterrupt:
            raise KeyboardInterrupt from None
