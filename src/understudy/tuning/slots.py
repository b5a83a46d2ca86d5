"""Slots: processes that run trials. The study sends trials and answers, a slot reports and results.

    study ──start, answer, bucket──► slot
          ◄──ready, refused, bucket, report, result──

A slot creates its Trainable once and runs trial after trial, or several at once if it has lanes.
"""

import contextlib
import math
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, Protocol

from understudy.core.child_process import THREADS, ChildProcess, parent_connection, receive, send
from understudy.core.errors import ConfigError, LearningFailed, UnderstudyError
from understudy.core.settings import load_object
from understudy.core.wording import shortened
from understudy.tuning.journal import finished_fields
from understudy.tuning.trial import (
    LaneTrainable,
    Report,
    Trainable,
    TrainableSpec,
    Trial,
    TrialResult,
)

Fields = Mapping[str, Any]
PLACE_S = 60.0
"""How long a study waits for the first place of a slot on a cluster."""
REPLACE_S = 600.0
"""How long it waits for another place when all slots are lost."""
_ERROR_CHARS = 300


class SlotLost(Exception):
    """A slot's process ended; the message states how."""


class Slot(Protocol):
    """The way to one slot."""

    def send(self, message: Fields) -> None:
        """Queue a message; SlotLost if the slot has ended."""
        ...

    def receive(self) -> Fields:
        """Wait for the next message; SlotLost if the slot ended before it."""
        ...

    def kill(self) -> None:
        """End the slot and what it has started, also in the middle of a trial."""
        ...


class Slots(Protocol):
    """Starts slots somewhere."""

    def open(self, index: int, request: Fields) -> Slot:
        """Start a slot, which sends `ready` or `refused`; `request` is that of `slot_request`."""
        ...

    def wait(self, slots: Sequence[Any], timeout_s: float | None) -> Sequence[Any]:
        """The slots with a message, or that ended; none after the timeout."""
        ...

    def close(self) -> None:
        """End what it has started itself, besides slots; may be called twice."""
        ...


def slot_request(spec: TrainableSpec, *, waits: bool) -> dict[str, Any]:
    """What a slot is started with; `waits`: whether a report waits for an answer."""
    return {"path": spec.path, "config": dict(spec.config), "waits": waits}


class LocalSlots:
    """Slots that are processes of this machine."""

    def __init__(
        self,
        folder: Path,
        *,
        descriptors: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """A slot's output is in a file of `folder`.

        It keeps `descriptors` open until it ends, and has `environment` besides this process's.
        """
        self._folder = folder
        self._descriptors = descriptors
        self._environment = environment

    def open(self, index: int, request: Fields) -> "LocalSlot":
        self._folder.mkdir(parents=True, exist_ok=True)
        log = self._folder / f"slot-{index}.log"
        with log.open("ab") as output:
            process = ChildProcess(
                __name__,
                lost=SlotLost,
                output=output,
                descriptors=self._descriptors,
                environment=self._environment,
            )
        with contextlib.suppress(SlotLost):  # `receive` raises it again
            process.send(request)
        return LocalSlot(process, log)

    def wait(self, slots: Sequence["LocalSlot"], timeout_s: float | None) -> list["LocalSlot"]:
        by_connection: dict[Any, LocalSlot] = {slot.process.connection: slot for slot in slots}
        return [by_connection[ready] for ready in wait(list(by_connection), timeout_s)]

    def close(self) -> None:
        """Nothing is left: each process was ended by its slot."""


class LocalSlot:
    """A slot in a process of its own."""

    def __init__(self, process: ChildProcess, log: Path) -> None:
        self.process = process
        self._log = log

    def send(self, message: Fields) -> None:
        with self._with_log():
            self.process.send(message)

    def receive(self) -> Fields:
        with self._with_log():
            return self.process.receive()[0]

    @contextlib.contextmanager
    def _with_log(self) -> Iterator[None]:
        """Names the file with the output of a process that has ended."""
        try:
            yield
        except SlotLost as error:
            raise SlotLost(f"{error}; its output is in {self._log}") from None

    def kill(self) -> None:
        self.process.kill()


class Places:
    """Limits how long a study waits while none of its slots has a place on a cluster."""

    def __init__(self) -> None:
        self._limit_s = PLACE_S
        self._since_s = time.monotonic()

    def note(self) -> None:
        """A slot has a place now."""
        self._limit_s = REPLACE_S
        self._since_s = time.monotonic()

    def limited(self, timeout_s: float | None, why: Callable[[], str]) -> float:
        """The timeout while no slot has a place; ConfigError with `why` at the end of the limit."""
        left_s = self._since_s + self._limit_s - time.monotonic()
        if left_s <= 0:
            raise ConfigError(f"{why()}; nothing changed in {self._limit_s:g} s")
        return left_s if timeout_s is None else min(left_s, timeout_s)


def hosted_request(request: Fields, *, index: int, folder: Path) -> dict[str, Any]:
    """The request of a slot that another process hosts, with what it adopts from this one."""
    return {
        **request,
        "config": {**request["config"], "folder": os.path.abspath(request["config"]["folder"])},
        "index": index,
        "output": os.path.abspath(folder),
        "working_folder": os.getcwd(),
        "paths": [os.path.abspath(path) for path in sys.path],
        "environment": {name: os.environ.get(name, "1") for name in THREADS},
    }


def host_slot(request: Fields) -> LocalSlot:
    """In another process, such as a Ray actor: start the process of a slot beside it.

    It is the same as a local slot, so the same trials end with the same bits, and it ends with the
    process that hosts it.
    """
    slots = LocalSlots(Path(request["output"]), environment=request["environment"])
    return slots.open(request["index"], request)


# --- In the process of a slot ---------------------------------------------------------------------


class StudyGone(BaseException):
    """The study has hung up; not an error that a trial could catch."""


class StudyLink(Protocol):
    """The way from a slot to its study."""

    def send(self, message: Fields) -> None: ...

    def receive(self) -> Fields:
        """Wait for the next message; StudyGone if there will be none."""
        ...

    def has_message(self) -> bool:
        """Whether `receive` would return at once."""
        ...


class _Socket:
    """The link of a local slot.

    A thread reads what arrives, so that the study never waits for a slot in the middle of a trial:
    two processes that only send, each until the other reads, would wait forever.
    """

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection
        self._messages: queue.SimpleQueue[Fields | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="study", daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._messages.put(receive(self._connection)[0])
        self._messages.put(None)

    def send(self, message: Fields) -> None:
        try:
            send(self._connection, message)
        except OSError:
            raise StudyGone from None

    def receive(self) -> Fields:
        message = self._messages.get()
        if message is None:
            self._messages.put(None)
            raise StudyGone
        return message

    def has_message(self) -> bool:
        return not self._messages.empty()


def main() -> None:
    with contextlib.suppress(StudyGone, EOFError):
        link = _Socket(parent_connection(close_s=0.0))
        request = link.receive()
        sys.path += [path for path in request.get("paths", ()) if path not in sys.path]
        with contextlib.suppress(OSError):  # another machine may have no such folder
            os.chdir(request.get("working_folder", "."))
        serve_trials(link, request)


def serve_trials(link: StudyLink, request: Fields) -> None:
    """Run the trials that arrive, until StudyGone is raised."""
    try:
        trainable = load_object(request["path"], what="trainable")(request["config"])
    except Exception as error:
        traceback.print_exc()
        is_config = isinstance(error, ConfigError)
        link.send({"is": "refused", "is_config": is_config, "error": error_line(error)})
        return
    lanes = getattr(trainable, "lanes", 0)
    link.send({"is": "ready", "lanes": lanes, "metrics": list(trainable.metrics)})
    if lanes:
        _serve_lanes(link, trainable, waits=request["waits"])
    while True:
        trial = Trial(**link.receive()["trial"])
        _send_result(link, _run(link, trainable, trial, waits=request["waits"]))


def _run(link: StudyLink, trainable: Trainable, trial: Trial, *, waits: bool) -> TrialResult:
    is_stopped = False

    def report(step: int, value: float) -> bool:
        nonlocal is_stopped
        if error := _not_finite(value, step):
            raise LearningFailed(error)
        _send_report(link, Report(trial.trial_no, step, value))
        if waits and not is_stopped:
            is_stopped = link.receive()["must_stop"]
        return is_stopped

    started_s = time.perf_counter()
    try:
        metrics = {name: float(value) for name, value in trainable.run(trial, report).items()}
    except (Exception, SystemExit) as error:
        return _failed(trial.trial_no, error, time.perf_counter() - started_s)
    return TrialResult(
        trial_no=trial.trial_no,
        state="stopped" if is_stopped else "done",
        metrics=metrics,
        seconds=time.perf_counter() - started_s,
    )


def _serve_lanes(link: StudyLink, trainable: LaneTrainable, *, waits: bool) -> NoReturn:
    running: set[int] = set()
    unanswered: set[int] = set()
    broken: dict[int, str] = {}
    while True:
        while running == unanswered or link.has_message():
            message = link.receive()
            if message["do"] == "answer":
                trainable.answer(message["trial_no"], must_stop=message["must_stop"])
                unanswered.discard(message["trial_no"])
                continue
            trial = Trial(**message["trial"])
            try:
                if message["do"] == "bucket":
                    bucket = trainable.bucket(trial)
                    link.send({"is": "bucket", "trial_no": trial.trial_no, "bucket": bucket})
                else:
                    trainable.start(trial)
                    running.add(trial.trial_no)
            except Exception as error:
                _send_result(link, _failed(trial.trial_no, error, 0.0))
        for event in trainable.step():
            trial_no = event.trial_no
            if isinstance(event, TrialResult):
                running.discard(trial_no)
                if error_text := broken.pop(trial_no, ""):
                    event = replace(event, state="failed", metrics={}, error=error_text)
                _send_result(link, event)
            elif error_text := _not_finite(event.value, event.step):
                broken[trial_no] = error_text
                trainable.answer(trial_no, must_stop=True)
            else:
                _send_report(link, event)
                if waits:
                    unanswered.add(trial_no)
                else:
                    trainable.answer(trial_no, must_stop=False)


def _send_report(link: StudyLink, report: Report) -> None:
    link.send(
        {
            "is": "report",
            "trial_no": report.trial_no,
            "step": int(report.step),
            "value": float(report.value),
        }
    )


def _send_result(link: StudyLink, result: TrialResult) -> None:
    finite = {name: value for name, value in result.metrics.items() if math.isfinite(value)}
    link.send({"is": "result", **finished_fields(replace(result, metrics=finite))})


def _not_finite(value: float, step: int) -> str:
    if math.isfinite(value):
        return ""
    return f"the metric is {value} at step {step}; a smaller learning rate may keep it finite"


def _failed(trial_no: int, error: BaseException, seconds: float) -> TrialResult:
    traceback.print_exception(error)
    return TrialResult(trial_no=trial_no, state="failed", seconds=seconds, error=error_line(error))


def error_line(error: BaseException) -> str:
    """An error in one line of printable characters."""
    text = " ".join(str(error).split())
    text = "".join(each if each.isprintable() else "?" for each in text)
    if not isinstance(error, UnderstudyError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return shortened(text, _ERROR_CHARS)


if __name__ == "__main__":
    main()
