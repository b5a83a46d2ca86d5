"""ChildProcess: a new interpreter that runs a module, and the socket to it.

It is started as a new interpreter, never forked, and ends when the socket closes, so that it never
outlives its parent.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any

from understudy.core.canonical import canonical_json, strict_json

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""They share the cores, so each computes in one thread unless these variables say otherwise."""
_END_S = 10.0

Message = tuple[Mapping[str, Any], Sequence[bytes]]
"""An object for JSON, and parts of bytes."""


class ChildProcess:
    """A process and the socket to it."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        lost: type[Exception],
        output: IO[bytes] | None = None,
        descriptors: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Run a module, with these further arguments, whose `main` calls `parent_connection`.

        `lost` is raised when the process has ended; its message says how. The process has `output`
        as standard output and error, keeps `descriptors` open, such as that of a lock, and has
        `environment` besides the variables of this process.
        """
        self._lost = lost
        ours, theirs = Pipe()
        self.connection: Connection[Any, Any] = ours
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), *arguments],
                pass_fds=[theirs.fileno(), *descriptors],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Not that of the terminal, whose Ctrl-C is for the parent.
                process_group=0,
                env={
                    **dict.fromkeys(THREADS, "1"),
                    **os.environ,
                    **(environment or {}),
                    "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                },
            )
        with contextlib.suppress(lost):
            self.send({"python_path": os.environ.get("PYTHONPATH")})

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Mapping[str, Any], *parts: bytes) -> None:
        try:
            send(self.connection, message, *parts)
        except OSError:
            raise self._lost(self._how_it_ended()) from None

    def receive(self) -> Message:
        try:
            return receive(self.connection)
        except (EOFError, OSError):
            raise self._lost(self._how_it_ended()) from None

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return "its socket closed"
        return f"it was ended by signal {-code}" if code < 0 else f"it exited with code {code}"

    def hang_up(self) -> None:
        """Close the socket for both ends; a thread that waits for a result is woken."""
        if not self.connection.closed:
            ours = socket.socket(fileno=os.dup(self.connection.fileno()))
            with ours, contextlib.suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)
            self.connection.close()

    def kill(self) -> None:
        """End the process at once, with what it has started in its process group."""
        self._kill_group()
        self.end()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Hang up, and wait until the process has ended."""
        self.hang_up()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._kill_group()
            self._process.wait()


def send(connection: "Connection[Any, Any]", message: Mapping[str, Any], *parts: bytes) -> None:
    connection.send_bytes(canonical_json({**message, "parts": len(parts)}))
    for part in parts:
        connection.send_bytes(part)


def receive(connection: "Connection[Any, Any]") -> Message:
    message = strict_json(connection.recv_bytes())
    return message, [connection.recv_bytes() for _ in range(message["parts"])]


# --- In the process -------------------------------------------------------------------------------


def parent_connection(*, close_s: float) -> "Connection[Any, Any]":
    """The socket to the parent; when it closes, this process ends, also in the middle of its work.

    Its main thread has `close_s` to end by itself. Then the process is killed with its group.
    """
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    threading.Thread(target=_end_with, args=(connection, close_s), daemon=True).start()
    first, _ = receive(connection)
    # It had the paths of the parent; what this process starts has the user's own.
    os.environ.pop("PYTHONPATH", None)
    if first["python_path"] is not None:
        os.environ["PYTHONPATH"] = first["python_path"]
    return connection


def _end_with(connection: "Connection[Any, Any]", close_s: float) -> None:
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLHUP)
    poll.poll()
    threading.main_thread().join(close_s)
    os.killpg(0, signal.SIGKILL)
