"""Ctrl-C handling that works even where third-party code catches every exception."""

import _thread
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

INTERRUPTED = 130
_AGAIN_S = 0.05
_HELD = b"\nstopping after this round, with a checkpoint; stop at once with another Ctrl-C\n"
_SERVES = ({"up"}, {"ingest"}, {"play", "--web"}, {"worker"})
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
    """Return the exit code of a command that a signal ended: 130, after printing "interrupted".

    For a command of `_SERVES` that was ended by SIGTERM: 0, and nothing is printed.
    """
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

    An import can turn the interrupt into another error; it is then raised again at the end of the
    block. A garbage-collector callback (JAX has one) can lose it, because Python only prints
    exceptions raised there; it is then raised again a moment later.
    """

    def __init__(self, *, hurry: Callable[[], None] | None = None) -> None:
        """Signals after the first call `hurry`, if set, and do not raise, so cleanup completes."""
        self._number = 0
        self._is_held = False
        self._hurry = hurry
        self._before: Mapping[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        self._before = {number: signal.signal(number, self._handle) for number in stop_signals()}
        self._hook = sys.unraisablehook
        sys.unraisablehook = self._raise_again
        return self

    def _handle(self, number: int, _frame: object) -> None:
        if self._is_held and not self._number:
            self._number = number
            with contextlib.suppress(OSError):  # not print: the signal may have interrupted one
                os.write(2, _HELD)
            return
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
        """Raise KeyboardInterrupt if a stop signal was received, unless it is held back."""
        if self._number and not self._is_held:
            raise StopSignal(self._number)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Let a block complete: the first signal is raised at its end, a second one at once."""
        self._is_held = not self._number
        try:
            yield
        finally:
            self._is_held = False
        self.check()

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
