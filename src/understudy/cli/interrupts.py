"""Ctrl-C handling that works even where third-party code catches every exception."""

import _thread
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

INTERRUPTED = 130
_AGAIN_S = 0.05
_SERVES = ({"up"}, {"ingest"}, {"play", "--web"})
"""Commands that run until they are stopped: SIGTERM is a normal end, even during startup."""


class StopSignal(KeyboardInterrupt):
    """Ctrl-C, SIGTERM or SIGHUP."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def raise_stop_signal(number: int, _frame: object) -> None:
    """Signal handler that raises StopSignal."""
    raise StopSignal(number)


def interrupted(error: BaseException, arguments: Sequence[str]) -> int:
    """Print "interrupted" and return the exit code of a command that did not handle the signal."""
    cause = error if isinstance(error, StopSignal) else error.__context__
    command = next((word for word in arguments if not word.startswith("-")), "")
    serves = any(command in words and words <= set(arguments) for words in _SERVES)
    if serves and isinstance(cause, StopSignal) and cause.number == signal.SIGTERM:
        return 0
    with contextlib.suppress(OSError):  # the terminal may be closed
        print("interrupted", file=sys.stderr)
    return INTERRUPTED


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that stop a command: SIGINT, SIGTERM, and SIGHUP unless `nohup` ignores it."""
    if sys.platform == "win32" or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return (signal.SIGINT, signal.SIGTERM)
    return (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Context manager that ends its block with KeyboardInterrupt on a signal, or at the next check.

    An interrupt can be raised inside an import that turns it into another error, or inside a
    garbage-collector callback (JAX has one), where Python prints it and continues; in that case it
    is raised again a moment later.
    """

    def __init__(self, *, hurry: Callable[[], None] | None = None) -> None:
        """Later signals call `hurry`, if set, instead of raising, so that cleanup completes."""
        self._number = 0
        self._hurry = hurry
        self._before: Mapping[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        self._before = {number: signal.signal(number, self._handle) for number in stop_signals()}
        self._hook = sys.unraisablehook
        sys.unraisablehook = self._raise_again
        return self

    def _handle(self, number: int, _frame: object) -> None:
        if self._number and self._hurry is not None:
            self._hurry()
            return
        self._number = self._number or number
        raise StopSignal(self._number)

    def _raise_again(self, unraisable: "sys.UnraisableHookArgs") -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt) or not self._number:
            self._hook(unraisable)
            return
        timer = threading.Timer(_AGAIN_S, _thread.interrupt_main)
        timer.daemon = True
        timer.start()

    def check(self) -> None:
        """Raise KeyboardInterrupt if a stop signal was received."""
        if self._number:
            raise StopSignal(self._number)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        sys.unraisablehook = self._hook
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._number and not (kind and issubclass(kind, KeyboardInterrupt)):
            raise StopSignal(self._number) from None
