"""Slots on Spark: one job, whose tasks connect back to the study and run slots until its end.

    study ──job: address, key──────► task ──socket: each proves to have the key──► study
    study ──request, start, answer─► task ──► the process of a slot, beside the task

There is no barrier: a task joins when it starts, also one that Spark retries, and no task waits for
another one. After the proof, messages are JSON; nothing from the network is unpickled.
"""

import contextlib
import functools
import secrets
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Pipe,
    answer_challenge,
    deliver_challenge,
    wait,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.core.child_process import receive, send
from understudy.core.errors import ConfigError
from understudy.core.plural import plural
from understudy.ingest.spark import (
    check_master,
    failure_reason,
    open_spark,
    refuse_speculation,
    require_spark,
)
from understudy.tuning.slots import Fields, Places, SlotLost, host_slot, hosted_request

if TYPE_CHECKING:
    from pyspark import SparkContext

_FAILURES = 8
"""Of one task, after which a Spark of our own ends the job; the study then starts another."""
_KEY_BYTES = 32
_PROOF_S = 10.0
_CLOSE_S = 10.0
_NO_LIMIT = struct.pack("ll", 0, 0)
_KEEP_ALIVE = {"SO_KEEPALIVE": 1, "TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""A machine that is lost without a word is noticed after 30 s."""


def active_context() -> "SparkContext | None":
    """That of this program's SparkSession, if it has one."""
    if "pyspark.sql" not in sys.modules:
        return None
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    return None if session is None else session.sparkContext


@contextlib.contextmanager
def spark_context(folder: Path, *, address: str, num_slots: int) -> Iterator["SparkContext"]:
    """The context of the program's SparkSession; without one, a Spark that ends with the block.

    Its log is written to `folder`. `address` is its master; empty: this machine.
    """
    require_spark("a study on Spark")
    if (context := active_context()) is not None:
        if address not in ("", context.master):
            raise ConfigError(
                f"address is {address}, but this program has a SparkSession with the master "
                f"{context.master}, which the study uses; omit address, or stop the session"
            )
        refuse_speculation(context)
        yield context
        return
    master = address or f"local[{num_slots},{_FAILURES}]"
    check_master(master)
    stderr = sys.stderr
    with (
        open_spark(folder, threading.Event(), master=master, app="understudy tune") as spark,
        contextlib.redirect_stderr(stderr),  # where the command shows its progress
    ):
        yield spark.context


class SparkSlots:
    """The study's end: starts the job, accepts its tasks, and assigns them to slots."""

    def __init__(self, context: "SparkContext", folder: Path, *, num_tasks: int) -> None:
        """A slot's output is in a file of `folder` on the machine of its task."""
        self._context = context
        self._folder = folder
        self._num_tasks = num_tasks
        self._places = Places()
        self._key = secrets.token_bytes(_KEY_BYTES)
        settings = context.getConf()
        host = settings.get("spark.driver.host", "") or "127.0.0.1"
        bound = settings.get("spark.driver.bindAddress", "") or host
        self._server = socket.create_server((bound, 0))
        self.address = (host, self._server.getsockname()[1])
        self._free: deque[Connection[Any, Any]] = deque()
        """Tasks without a slot."""
        self._waiting: list[_SparkSlot] = []
        """Slots without a task."""
        self._bell, self._ringer = Pipe(duplex=False)
        self._ringing = threading.Lock()
        self._group = f"understudy tune {secrets.token_hex(8)}"
        self._job: threading.Thread | None = None
        self._is_running = False
        self._has_joined = False
        self._failure = ""
        self._is_closed = False
        self._joining = threading.Lock()
        """Held while a task is added, and while the rest are closed: no task is closed twice."""
        threading.Thread(target=self._accept, daemon=True).start()

    def open(self, index: int, request: Fields) -> "_SparkSlot":
        slot = _SparkSlot(hosted_request(request, index=index, folder=self._folder))
        self._waiting.append(slot)
        self._start_job()
        return slot

    def wait(self, slots: Sequence["_SparkSlot"], timeout_s: float | None) -> list["_SparkSlot"]:
        """As Slots.wait; ConfigError if the job fails at once, or no task joins in time."""
        self._assign()
        by_connection = {slot.connection: slot for slot in slots if slot.connection is not None}
        if not by_connection:
            timeout_s = self._places.limited(timeout_s, self._no_place)
        ready = wait([*by_connection, self._bell], timeout_s)
        if by_connection:
            self._places.note()
        if self._bell in ready:
            self._bell.recv_bytes()
            self._start_job()
        return [by_connection[each] for each in ready if each is not self._bell]  # type: ignore[index]

    def _assign(self) -> None:
        self._waiting = [slot for slot in self._waiting if not slot.is_killed]
        while self._waiting and self._free:
            task = self._free.popleft()
            if task.poll(0):  # it has ended
                task.close()
            else:
                self._waiting.pop(0).start(task)

    def _no_place(self) -> str:
        cpus = int(self._context.getConf().get("spark.task.cpus", "1"))
        return (
            f"no task of the study runs on {self._context.master}: a slot needs {cpus} free "
            f"{plural(cpus, 'core')} of an executor; check in the Spark UI "
            f"({self._context.uiWebUrl}) that a worker has so many and accepts this application"
        )

    def close(self) -> None:
        """Cancel the job, and hang up; may be called twice."""
        if self._is_closed:
            return
        with self._joining:
            self._is_closed = True
            while self._free:
                self._free.popleft().close()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._server.close()
        if self._job is not None:
            with contextlib.suppress(Exception):  # the JVM has exited
                self._context.cancelJobGroup(self._group)
            self._job.join(_CLOSE_S)

    # --- The job ----------------------------------------------------------------------------------

    def _start_job(self) -> None:
        """Start the job, again if it has ended after tasks joined; ConfigError if none did."""
        if self._is_running:
            return
        if self._failure and not self._has_joined:
            raise ConfigError(
                f"the tasks of the study fail on {self._context.master}: {self._failure}; install "
                "understudy in the Python of PYSPARK_PYTHON on every worker, and check that they "
                "reach the study at spark.driver.host"
            )
        self._has_joined = False
        self._is_running = True
        self._job = threading.Thread(target=self._run_job, daemon=True)
        self._job.start()

    def _run_job(self) -> None:
        try:
            self._context.setJobGroup(self._group, "understudy tune", interruptOnCancel=True)
            tasks = self._context.parallelize(range(self._num_tasks), self._num_tasks)
            tasks.foreachPartition(functools.partial(_serve, self.address, self._key))
            self._failure = "they ended by themselves"
        except Exception as error:
            self._failure = failure_reason(str(getattr(error, "java_exception", error)))
        self._is_running = False
        self._ring()

    def _ring(self) -> None:
        """Wake `wait`."""
        with self._ringing:
            self._ringer.send_bytes(b".")

    # --- Tasks that join --------------------------------------------------------------------------

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                task, _ = self._server.accept()
                threading.Thread(target=self._admit, args=(task,), daemon=True).start()

    def _admit(self, task: socket.socket) -> None:
        """Add a task that proves in time to have the key, after which we prove the same."""
        with task:
            connection = Connection(task.dup().detach())
            limit = struct.pack("ll", int(_PROOF_S), 0)
            task.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            try:
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
                task.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _NO_LIMIT)
                for name, value in _KEEP_ALIVE.items():
                    if hasattr(socket, name):
                        level = socket.SOL_SOCKET if name[0] == "S" else socket.IPPROTO_TCP
                        task.setsockopt(level, getattr(socket, name), value)
            except (AuthenticationError, EOFError, OSError):
                connection.close()
                return
        with self._joining:
            if self._is_closed:
                connection.close()
                return
            self._has_joined = True
            self._free.append(connection)
        self._ring()


class _SparkSlot:
    """A slot, and the socket to its task once it has one."""

    def __init__(self, request: Fields) -> None:
        self._request = request
        self.connection: Connection[Any, Any] | None = None
        self.is_killed = False

    def start(self, task: "Connection[Any, Any]") -> None:
        self.connection = task
        with contextlib.suppress(SlotLost):  # `receive` raises it again
            self.send(self._request)

    def send(self, message: Fields) -> None:
        assert self.connection is not None, "the study sends only to slots that are ready"
        try:
            send(self.connection, message)
        except OSError:
            raise SlotLost("its Spark task ended") from None

    def receive(self) -> Fields:
        assert self.connection is not None
        try:
            message = receive(self.connection)[0]
        except (EOFError, OSError):
            raise SlotLost("its Spark task ended") from None
        if message["is"] == "lost":
            raise SlotLost(message["why"])
        return message

    def kill(self) -> None:
        self.is_killed = True
        if self.connection is not None:
            self.connection.close()


# --- In a task ------------------------------------------------------------------------------------


def _serve(address: tuple[str, int], key: bytes, _: object) -> None:
    """Run slots, one after the other, until the study is over."""
    is_first = True
    while True:
        try:
            connection = Client(address, authkey=key)
        except (AuthenticationError, EOFError, OSError) as error:
            if not is_first:
                return
            raise ConfigError(
                f"a task on {socket.gethostname()} cannot connect to the study at {address[0]}, "
                f"port {address[1]}: {error}; set spark.driver.host to an address of its machine"
            ) from None
        is_first = False
        with connection:
            _run_slot(connection)


def _run_slot(study: "Connection[Any, Any]") -> None:
    """Start the process of a slot, and forward messages until it or the study hangs up."""
    try:
        slot = host_slot(receive(study)[0])
    except (EOFError, OSError):
        return
    try:
        while True:
            for ready in wait([study, slot.process.connection]):
                if ready is study:
                    slot.send(receive(study)[0])
                else:
                    send(study, slot.receive())
    except SlotLost as error:
        with contextlib.suppress(OSError):
            send(study, {"is": "lost", "why": f"{error}, on {socket.gethostname()}"})
    except (EOFError, OSError):
        pass
    finally:
        slot.kill()
