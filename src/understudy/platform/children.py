"""Child processes that report progress as JSON lines and never outlive their parent."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.core.errors import ConfigError, UnderstudyError

if TYPE_CHECKING:
    from understudy.backends.data import DataFolder
    from understudy.platform.config import Config

USAGE_ERROR = 2
FAILED = 3
FENCED = 4
"""Exit codes of a child: invalid settings, a failure, or another process took over its work."""


_HEARTBEAT_S = 0.5

_living: set["Child"] = set()
"""Children that were started here and are not known to have ended."""


class Child:
    """A running process; `latest` is the newest JSON line that it printed, decoded."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        on_log: Callable[[str], None] | None = None,
        first_line: str = "",
    ) -> None:
        """`on_log` is called in a thread with every line of the process's standard error.

        `first_line` is written to its standard input. Pass secrets there: every user of the
        machine can read a command line.
        """
        self.name = name
        self._on_log = on_log
        self.latest: Mapping[str, Any] = {}
        self.heartbeats = 0
        """Lines that it printed; a role that has nothing to report yet prints empty reports."""
        self._errors: list[str] = []
        self._readers: list[threading.Thread] = []
        # Its standard input stays open as long as this process lives; the child stops when it
        # closes.
        with _ignoring_interrupts():
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
            # `kill_children` finds the child here, even if this constructor is interrupted.
            _living.add(self)
        if first_line and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(f"{first_line}\n")
                self._process.stdin.flush()
        self._readers += [
            threading.Thread(target=self._follow, daemon=True),
            threading.Thread(target=self._collect_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    @property
    def errors(self) -> str:
        """The last lines of its standard error."""
        return "".join(self._errors[-20:])

    def _follow(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.heartbeats += 1
            with contextlib.suppress(ValueError):
                self.latest = json.loads(line) or self.latest

    def _collect_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors.append(line)
            del self._errors[:-200]
            if self._on_log is not None:
                self._on_log(line.rstrip("\n"))

    def stop(self) -> None:
        """Ask the process to finish its work and exit."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def kill(self) -> None:
        """Kill the process immediately, as a crash would."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the process to exit; return its exit code, or None if it is still running."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
            for reader in self._readers:
                if reader.ident is not None:
                    reader.join(1.0)
            for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
                if pipe is not None:
                    pipe.close()
            _living.discard(self)
        return self.exit_code


def kill_children() -> None:
    """Kill every child that this process started; safe to call from a signal handler."""
    for child in list(_living):
        child.kill()


def end_children(timeout_s: float = 5.0) -> None:
    """Kill every child and wait until all have exited, so that their files may be removed."""
    kill_children()
    for child in list(_living):
        child.wait(timeout_s)


@contextlib.contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Block signals for children started in this block: only the parent handles them."""
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    )
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_reporting = threading.Lock()


def report(fields: Mapping[str, Any]) -> None:
    """In a child: report progress to the parent; without fields, only that the child is alive."""
    with _reporting:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()


def stop_with_parent() -> threading.Event:
    """In a child: return an event that is set when the parent requests a stop or has exited."""
    stop = threading.Event()

    def watch() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=watch, daemon=True).start()
    return stop


@contextlib.contextmanager
def reporting(fields: Callable[[], Mapping[str, Any]], *, every_s: float = 0.25) -> Iterator[None]:
    """In a child: report regularly while the block runs, from a thread of its own."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError):  # the parent has exited
                report(fields())
            is_over.wait(every_s)

    reporter = threading.Thread(target=repeat, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        is_over.set()
        reporter.join()


def run_role(main: Callable[["DataFolder", "Config"], int | None]) -> int:
    """In a child with the command line `DATA [CONFIG]`: run a role and return its exit code.

    CONFIG is the file that `up` wrote. An expected error is printed as one line. A thread reports
    that the process is alive, so that the supervisor can distinguish a busy role from one that is
    stopped.
    """
    # Imported late: simulated players use this module too, and need neither of these.
    from understudy.backends.data import DataFolder
    from understudy.platform.config import Config, read_config

    log_to_stderr()
    folder, *config = map(Path, sys.argv[1:])
    try:
        with reporting(dict, every_s=_HEARTBEAT_S):
            return main(DataFolder(folder), read_config(config[0]) if config else Config()) or 0
    except UnderstudyError as error:
        sys.stderr.write(f"{error}\n")
        return USAGE_ERROR if isinstance(error, ConfigError) else FAILED


def log_to_stderr(*, as_json: bool = True) -> None:
    """Log events to standard error, as JSON lines or as text; standard output is for results."""
    import structlog

    renderer = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            renderer,
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def python_module(name: str, *arguments: str) -> list[str]:
    """Return the command line that runs a Python module as a program."""
    return [sys.executable, "-m", name, *arguments]
