"""The study's end and the tasks' end of Spark slots; jobs run in threads of this process."""

import contextlib
import multiprocessing.connection
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tuning.cheap import Lanes, Mortal, Quadratic, study
from tests.tuning.test_study import ASHA, timeless
from understudy.core.errors import ConfigError
from understudy.tuning import slots as slots_module
from understudy.tuning.journal import NAME, Journal, Row, create_journal
from understudy.tuning.slots import SlotLost, slot_request
from understudy.tuning.spark_slots import SparkSlots
from understudy.tuning.study import Study
from understudy.tuning.study_config import SearchConfig, StudyConfig
from understudy.tuning.tune import tune


class ThreadSpark:
    """As much of a SparkContext as slots use; a job ends when one of its tasks fails."""

    master = "threads"
    uiWebUrl = "http://127.0.0.1:4040"  # noqa: N815

    def __init__(self, *, num_cores: int = 2) -> None:
        self.num_cores = num_cores
        self.n_jobs = 0
        self.cancelled: list[str] = []

    def getConf(self) -> dict[str, str]:  # noqa: N802
        return {"spark.driver.host": "127.0.0.1"}

    def setJobGroup(self, group: str, what: str, *, interruptOnCancel: bool) -> None:  # noqa: N802,N803
        assert interruptOnCancel

    def cancelJobGroup(self, group: str) -> None:  # noqa: N802
        self.cancelled.append(group)

    def parallelize(self, items: Any, num_tasks: int) -> "ThreadSpark":
        return self

    def foreachPartition(self, task: Callable[[Any], None]) -> None:  # noqa: N802
        self.n_jobs += 1
        threads = [
            threading.Thread(target=task, args=(iter(()),), daemon=True)
            for _ in range(self.num_cores)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def opened(context: Any, folder: Path, *, num_tasks: int = 2) -> SparkSlots:
    return SparkSlots(context, folder / "slots", num_tasks=num_tasks)


def rows_of(config: StudyConfig, folder: Path, context: Any, *, num_slots: int = 2) -> list[Row]:
    create_journal(folder / NAME, study=config.to_json(), versions={})
    with (
        contextlib.closing(Journal(folder / NAME)) as journal,
        contextlib.closing(
            Study(config, journal, opened(context, folder), num_slots=num_slots)
        ) as running,
    ):
        running.run()
        return journal.state.rows()


@pytest.mark.parametrize("kind", [Quadratic, Lanes])
def test_the_table_is_that_of_local_slots_also_with_fewer_tasks_than_slots(
    tmp_path: Path, kind: type
):
    changes: dict[str, Any] = {
        "config": {"reports": 4, "lanes": 2},
        "max_trials": 10,
        "search": SearchConfig(lag=4),
        "stopping": ASHA,
    }
    local = tune(study(tmp_path / "local", kind, **changes), out=tmp_path / "local")
    config = study(tmp_path / "spark", kind, **changes)
    context = ThreadSpark(num_cores=1)
    rows = rows_of(config, tmp_path / "spark", context, num_slots=3)
    assert timeless(rows) == timeless(local.trials)
    assert context.n_jobs == 1
    assert len(context.cancelled) == 1


def test_a_trial_whose_process_ends_starts_again_in_the_same_task(tmp_path: Path):
    config = study(tmp_path, Mortal, config={"victim": 2, "deaths": 2}, max_trials=4)
    context = ThreadSpark()
    rows = rows_of(config, tmp_path, context)
    assert [row.result.state for row in rows] == ["done"] * 4
    assert context.n_jobs == 1


@contextlib.contextmanager
def joined(slots: SparkSlots, folder: Path) -> Iterator[Any]:
    """A slot that is ready."""
    config = study(folder, Quadratic, config={"wait_s": 60})
    slot = slots.open(0, slot_request(config.trainable, waits=False))
    try:
        assert receive(slots, slot)["is"] == "ready"
        yield slot
    finally:
        slot.kill()


def receive(slots: SparkSlots, slot: Any) -> Any:
    while not slots.wait([slot], 30.0):
        pass
    return slot.receive()


def test_a_lost_process_is_reported_with_its_output_and_machine(tmp_path: Path):
    with (
        contextlib.closing(opened(ThreadSpark(), tmp_path)) as slots,
        joined(slots, tmp_path) as slot,
    ):
        trial = {"trial_no": 0, "values": {"x": 0.3, "width": 16}, "seed": 0}
        slot.send({"do": "start", "trial": trial})
        (pid,) = slot_processes(tmp_path)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(SlotLost, match=rf"signal 9; .*slot-0.log, on {socket.gethostname()}"):
            receive(slots, slot)


def slot_processes(folder: Path) -> list[int]:
    """The processes whose output is in the study's folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(process / "fd" / "1").startswith(f"{folder}/slots/"):
                found.append(int(process.name))
    return found


def test_nothing_is_left_of_a_slot_that_is_killed(tmp_path: Path):
    with contextlib.closing(opened(ThreadSpark(), tmp_path)) as slots:
        with joined(slots, tmp_path):
            assert len(slot_processes(tmp_path)) == 1
        deadline_s = time.monotonic() + 30
        while slot_processes(tmp_path):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


@pytest.mark.parametrize("stranger", ["wrong key", "pickle", "nothing", "huge"])
def test_a_stranger_without_the_key_is_hung_up_on_and_disturbs_no_study(
    tmp_path: Path, stranger: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("understudy.tuning.spark_slots._PROOF_S", 1.0)
    with contextlib.closing(opened(ThreadSpark(), tmp_path)) as slots:
        address = slots.address
        if stranger == "wrong key":
            with pytest.raises(multiprocessing.AuthenticationError):
                multiprocessing.connection.Client(address, authkey=b"0" * 32)
        else:
            with socket.create_connection(address, timeout=30.0) as connection:
                # Creates the file when it is unpickled.
                message = f"cposix\nsystem\n(S'touch {tmp_path}/was-here'\ntR.".encode()
                if stranger == "pickle":
                    connection.sendall(len(message).to_bytes(4, "big") + message)
                elif stranger == "huge":
                    connection.sendall((1 << 30).to_bytes(4, "big"))
                with contextlib.suppress(ConnectionResetError):
                    while connection.recv(4_096):
                        pass
        with joined(slots, tmp_path):
            pass
    assert not (tmp_path / "was-here").exists()


class FailingSpark(ThreadSpark):
    """Its jobs fail, the first one after a task has joined."""

    def __init__(self, *, joins: bool) -> None:
        super().__init__(num_cores=1)
        self._joins = joins

    def foreachPartition(self, task: Callable[[Any], None]) -> None:  # noqa: N802
        if self._joins and not self.n_jobs:
            self.n_jobs += 1
            address, key = task.args  # type: ignore[attr-defined]
            with multiprocessing.connection.Client(address, authkey=key) as connection:
                connection.recv_bytes()  # it has a slot
        elif self._joins:
            super().foreachPartition(task)
            return
        raise RuntimeError("Traceback\n  File x\nModuleNotFoundError: No module named 'understudy'")


def test_a_job_that_fails_at_once_is_an_error_and_another_is_started_again(tmp_path: Path):
    config = study(tmp_path / "never", max_trials=3)
    with pytest.raises(ConfigError, match=r"fail on threads: ModuleNotFoundError.*PYSPARK_PYTHON"):
        rows_of(config, tmp_path / "never", FailingSpark(joins=False))
    context = FailingSpark(joins=True)
    rows = rows_of(study(tmp_path / "again", max_trials=3), tmp_path / "again", context)
    assert len(rows) == 3
    assert context.n_jobs == 2


def test_a_study_without_a_place_ends_with_what_a_slot_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(slots_module, "PLACE_S", 0.5)
    blocked = threading.Event()
    context = ThreadSpark()
    context.foreachPartition = lambda task: blocked.wait(30.0)  # type: ignore[method-assign,assignment]
    context.cancelJobGroup = lambda group: blocked.set()  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"no task .* threads: a slot needs 1 free .*0\.5 s"):
        rows_of(study(tmp_path, max_trials=3), tmp_path, context)
