"""Interrupts: Ctrl-C that is never missed, also where other people's code catches everything;
and how it ends."""

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
"""Commands that run until they are asked to stop: for them SIGTERM is the way to end well, also
while they start."""


class AskedToStop(KeyboardInterrupt):
    """Ctrl-C, or another signal that asks for the same."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def ask_to_stop(number: int, _frame: object) -> None:
    """A signal's handler."""
    raise AskedToStop(number)


def interrupted(error: BaseException, arguments: Sequence[str]) -> int:
    """The exit code of a command that was asked to stop before it took that into its own hands;
    says so to people."""
    asked = error if isinstance(error, AskedToStop) else error.__context__
    command = next((word for word in arguments if not word.startswith("-")), "")
    serves = any(command in words and words <= set(arguments) for words in _SERVES)
    if serves and isinstance(asked, AskedToStop) and asked.number == signal.SIGTERM:
        return 0
    with contextlib.suppress(OSError):  # a terminal that closed takes no more
        print("interrupted", file=sys.stderr)
    return INTERRUPTED


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask to stop: Ctrl-C, SIGTERM, and a terminal that closes, unless `nohup`
    says to ignore that."""
    if sys.platform == "win32" or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return (signal.SIGINT, signal.SIGTERM)
    return (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """While it is entered, being asked to stop ends the block with KeyboardInterrupt, at once or at
    the next check.

    An interrupt may come up inside an import that makes another error of it, or inside a callback
    of the garbage collector (JAX has one), where Python prints it and goes on; there it is raised
    again a moment later.
    """

    def __init__(self, *, hurry: Callable[[], None] | None = None) -> None:
        """With `hurry` only the first one is raised; later ones call it, so that nothing stops
        the cleaning up."""
        self._number = 0
        self._hurry = hurry
        self._before: Mapping[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        self._before = {number: signal.signal(number, self._ask) for number in stop_signals()}
        self._hook = sys.unraisablehook
        sys.unraisablehook = self._swallowed
        return self

    def _ask(self, number: int, _frame: object) -> None:
        if self._number and self._hurry is not None:
            self._hurry()
            return
        self._number = self._number or number
        raise AskedToStop(self._number)

    def _swallowed(self, lost: "sys.UnraisableHookArgs") -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt) or not self._number:
            self._hook(lost)
            return
        again = threading.Timer(_AGAIN_S, _thread.interrupt_main)
        again.daemon = True
        again.start()

    def check(self) -> None:
        """KeyboardInterrupt when somebody has asked."""
        if self._number:
            raise AskedToStop(self._number)

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
            raise AskedToStop(self._number) from None
