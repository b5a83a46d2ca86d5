"""Trainings by our command line, each in its own process that dies where a test requests.

Run as `python -m tests.faults.forker`. It imports once and forks a process for each job it reads
from standard input, a line of JSON each; JAX starts no thread before its first computation, so that
a fork is as good as a start.
"""

import contextlib
import errno
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to a training once it has come to a step."""

    step: int
    how: str
    """`kill` after `delay_s`; `call`: in the middle of the disk call number `calls` from there
    on; `checkpoint`: at the disk call number `calls` on a checkpoint; `full`: there is no room
    for checkpoints; `stop`: SIGSTOP."""
    delay_s: float = 0.0
    calls: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training."""

    arguments: list[str]
    answer: str
    """Where its output goes; its errors go beside it, and beside them where it was when it died."""
    fault: dict[str, Any] = field(default_factory=dict)

    @property
    def errors(self) -> Path:
        return Path(f"{self.answer}.errors")

    @property
    def died(self) -> Path:
        return Path(f"{self.answer}.died")


class Sabotage:
    """Lets a fault happen in this process."""

    def __init__(self, fault: Fault, died: Path) -> None:
        self._fault = fault
        self._died = died
        self._step = self._calls = 0
        self._is_armed = False

    def handle_event(self, event: Any) -> None:
        """Receives every event of the training first."""
        self._step = event.env_steps
        if self._is_armed or self._step < self._fault.step:
            return
        self._is_armed = True
        if self._fault.how == "kill":
            threading.Thread(target=self._kill_later, daemon=True).start()
        elif self._fault.how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)

    def _kill_later(self) -> None:
        time.sleep(self._fault.delay_s)
        self._die("anywhere")

    def _die(self, where: str) -> None:
        descriptor = os.open(self._died, os.O_WRONLY | os.O_CREAT)
        real_write(descriptor, json.dumps({"step": self._step, "where": where}).encode())
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The disk call, with this fault inside."""

        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            if self._meets(name, arguments):
                if name in ("write", "pwrite"):
                    descriptor, view, *at = arguments
                    call(descriptor, view[: len(view) // 2], *at)
                if self._fault.how == "full":
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(_path(arguments[0])))
                self._die(f"{name} of {_path(arguments[0])}")
            return call(*arguments, **keywords)

        return wrapped

    def _meets(self, name: str, arguments: tuple[Any, ...]) -> bool:
        fault = self._fault
        if not self._is_armed or fault.how not in ("call", "checkpoint", "full"):
            return False
        if fault.how != "call" and "/checkpoints/" not in _path(arguments[0]):
            return False
        if fault.how == "full":
            return name in ("write", "pwrite")
        self._calls += 1
        return self._calls > fault.calls


real_write = os.write


def _path(target: Any) -> str:
    return os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)


def _sabotage(fault: Fault, died: Path) -> None:
    from understudy.training.training import Training

    sabotage = Sabotage(fault, died)
    handle_event = Training.handle_event

    def overheard(self: Training, event: Any) -> None:
        sabotage.handle_event(event)
        handle_event(self, event)

    Training.handle_event = overheard  # type: ignore[method-assign]
    for name in ("write", "pwrite", "fsync", "fdatasync", "replace", "unlink"):
        setattr(os, name, sabotage.wrap(name, getattr(os, name)))


def work(job: Job) -> int:
    """The training, in the process that was forked for it; its exit code."""
    from understudy.cli.root import run

    for path, stream in ((job.answer, sys.stdout), (job.errors, sys.stderr)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, stream.fileno())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if job.fault:
        _sabotage(Fault(**job.fault), job.died)
    return run(job.arguments)


def _forked(job: Job) -> int:
    child = os.fork()
    if child:
        return child
    code = 70
    with contextlib.suppress(BaseException):
        code = work(job)
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _waited(child: int) -> Mapping[str, Any]:
    _, status = os.waitpid(child, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        return {"is_stopped": True}
    return {"is_stopped": False, "code": os.waitstatus_to_exitcode(status)}


def main() -> None:
    _preload()
    print(json.dumps({"pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        answer = _waited(order["wait"]) if "wait" in order else {"pid": _forked(Job(**order))}
        print(json.dumps(answer), flush=True)


def _preload() -> None:
    """Import what a training does; nothing may compute, or a fork would not be safe."""
    for name in (
        "matplotlib.figure",
        "matplotlib.backends.backend_agg",
        "understudy.learn.sum_tree",  # loads what numba compiled, which takes 2 s
        "understudy.training.train",
        "understudy.cli.train",
        *(f"understudy.learn.algorithms.{one}" for one in ("bc", "dqn", "iql", "ppo")),
    ):
        importlib.import_module(name)
    bridge = importlib.import_module("jax._src.xla_bridge")
    assert not bridge.backends_are_initialized()


if __name__ == "__main__":
    main()
