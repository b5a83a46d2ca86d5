import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.tuning.cheap import Fragile, Impossible, Lanes, Quadratic
from understudy.tuning.slots import LocalSlot, LocalSlots, SlotLost, error_line, slot_request
from understudy.tuning.trial import TrainableSpec


@contextmanager
def started(folder: Path, kind: type, *, waits: bool = False, **config: Any) -> Iterator[LocalSlot]:
    spec = TrainableSpec(path=f"tests.tuning.cheap:{kind.__name__}", config=config)
    with closing(LocalSlots(folder)) as slots:
        slot = slots.open(0, slot_request(spec, waits=waits))
        try:
            yield slot
        finally:
            slot.kill()


def start(slot: LocalSlot, trial_no: int, **values: Any) -> None:
    trial = {"trial_no": trial_no, "values": {"x": 0.3, "width": 16, **values}, "seed": trial_no}
    slot.send({"do": "start", "trial": trial})


def test_a_slot_runs_trial_after_trial_with_one_trainable(tmp_path: Path):
    with started(tmp_path, Quadratic) as slot:
        assert slot.receive() == {
            "is": "ready",
            "lanes": 0,
            "metrics": ["reward", "cost"],
            "parts": 0,
        }
        for trial_no in (0, 1):
            start(slot, trial_no)
            result = slot.receive()
            assert (result["is"], result["trial_no"], result["state"]) == (
                "result",
                trial_no,
                "done",
            )
            assert result["metrics"]["cost"] == 16.0


def test_a_report_waits_for_its_answer_and_ends_the_trial_if_told_so(tmp_path: Path):
    with started(tmp_path, Quadratic, waits=True, reports=10) as slot:
        slot.receive()
        start(slot, 0)
        for step in (1, 2, 3):
            report = slot.receive()
            assert (report["is"], report["step"]) == ("report", step)
            slot.send({"do": "answer", "trial_no": 0, "must_stop": step == 3})
        assert slot.receive()["state"] == "stopped"


def test_a_failed_trial_is_a_result_and_the_slot_goes_on(tmp_path: Path):
    with started(tmp_path, Fragile) as slot:
        slot.receive()
        errors = {}
        for trial_no in range(7):
            start(slot, trial_no)
            result = slot.receive()
            errors[trial_no] = result["error"]
            assert (result["state"] == "failed") == (trial_no in (1, 2, 5, 6))
        assert errors[1] == "RuntimeError: the door is stuck"
        assert errors[2] == "SystemExit: 5"
        assert "the metric is inf at step 1" in errors[5]
        assert errors[6] == "EOFError: a file of the trial ended"
        assert 'raise RuntimeError("the door' in (tmp_path / "slot-0.log").read_text()


def test_a_trainable_that_cannot_be_created_is_refused(tmp_path: Path):
    with started(tmp_path, Impossible) as slot:
        message = slot.receive()
        assert message["is"] == "refused"
        assert message["is_config"]
        assert message["error"] == "the game is missing; install it"


def test_a_killed_slot_is_lost_and_leaves_nothing(tmp_path: Path):
    with started(tmp_path, Quadratic, wait_s=60) as slot:
        slot.receive()
        start(slot, 0)
        os.kill(slot.process.pid, signal.SIGKILL)
        with pytest.raises(SlotLost, match=r"ended by signal 9; its output is in .*slot-0.log"):
            slot.receive()


_DRIVER = """
import sys
from pathlib import Path
from tests.tuning.cheap import Quadratic
from tests.tuning.test_slots import start, started

with started(Path(sys.argv[1]), Quadratic, wait_s=600) as slot:
    slot.receive()
    start(slot, 0)
    print(slot.process.pid, flush=True)
    sys.stdin.read()
"""


def test_a_slot_ends_with_a_killed_study_in_the_middle_of_a_trial(tmp_path: Path):
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    with subprocess.Popen(
        [sys.executable, "-c", _DRIVER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
    ) as driver:
        assert driver.stdout is not None
        pid = int(driver.stdout.readline())
        with closing_pidfd(pid) as pidfd:
            driver.kill()
            signal_ended(pidfd)


@contextmanager
def closing_pidfd(pid: int) -> Iterator[int]:
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def signal_ended(pidfd: int) -> None:
    """Wait until a process that is no child of this one has ended."""
    import select

    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(30_000), "the slot outlived its study"


def test_a_slot_computes_in_one_thread_and_loads_no_jax(tmp_path: Path):
    with started(tmp_path, Quadratic) as slot:
        slot.receive()
        environ = Path(f"/proc/{slot.process.pid}/environ").read_bytes()
        assert b"OPENBLAS_NUM_THREADS=1" in environ
        assert "jax" not in Path(f"/proc/{slot.process.pid}/maps").read_text()


def test_lanes_run_several_trials_and_each_has_its_own_end(tmp_path: Path):
    with started(tmp_path, Lanes, waits=True, lanes=3, reports=4) as slot:
        assert slot.receive()["lanes"] == 3
        slot.send({"do": "bucket", "trial": {"trial_no": 0, "values": {"width": 16}, "seed": 0}})
        assert slot.receive()["bucket"] == "16"
        for trial_no in (0, 1, 3):  # 3 reports NaN
            start(slot, trial_no)
        states: dict[int, str] = {}
        while len(states) < 3:
            message = slot.receive()
            if message["is"] == "report":
                must_stop = message["trial_no"] == 1 and message["step"] == 2
                answer = {"do": "answer", "trial_no": message["trial_no"], "must_stop": must_stop}
                slot.send(answer)
            else:
                states[message["trial_no"]] = message["state"]
        assert states == {0: "done", 1: "stopped", 3: "failed"}
        start(slot, 4)  # into a free lane
        for _ in range(4):
            slot.send({"do": "answer", "trial_no": slot.receive()["trial_no"], "must_stop": False})
        assert slot.receive()["state"] == "done"
        slot.send({"do": "bucket", "trial": {"trial_no": 5, "values": {"width": 64}, "seed": 0}})
        assert slot.receive()["error"] == "ValueError: no program has this width"


def test_an_error_is_one_line_of_printable_characters():
    assert error_line(ValueError("bad \x1b[31m\nvalue\t!")) == "ValueError: bad ?[31m value !"
