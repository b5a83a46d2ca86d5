"""Runs the commands of docs/scale.md; the Ray cluster and CarRacing are in tests/integration."""

import contextlib
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.platforms import wait_for
from tests.docs.machines import Machines, environment, unavailable_reason
from tests.docs.scale_page import PAGE, commands_of

LEARNER = "learner.example"
WORKERS = ("worker-1.example", "worker-2.example")


def test_the_page_is_short():
    assert len(PAGE.read_text().splitlines()) <= 130


def test_a_run_uses_more_cores(tmp_path: Path):
    (command,) = commands_of("1.")
    done = subprocess.run(
        ["sh", "-c", command.text],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "steps/s" in done.stdout + done.stderr
    assert (tmp_path / "runs" / "CartPole-v1-dqn-1" / "result.json").exists()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    if reason := unavailable_reason():
        pytest.skip(reason)
    with contextlib.closing(Machines(tmp_path, LEARNER, *WORKERS)) as machines:
        yield machines


def test_workers_on_two_machines_train_for_a_learner_on_a_third(machines: Machines):
    """Joining, metrics, leaving, and a learner that is killed; `scp` is a copy of the files."""
    commands = [each for each in commands_of("2.") if "car_racing" not in each.text]
    certificate, train, *copies, work, metrics, resume = (each.text for each in commands)
    assert [each.place.partition(",")[0] for each in commands] == [
        *([f"on {LEARNER}"] * 4),
        f"on {WORKERS[0]} and {WORKERS[1]}",
        *([f"on {LEARNER}"] * 2),
    ]
    machines.run(LEARNER, certificate)
    learner = machines.start(LEARNER, train)
    key = machines.folder(LEARNER) / "R" / "worker.key"
    wait_for(lambda: key.exists() or learner.poll() is not None)
    for copy in copies:
        scp, *files, target = shlex.split(copy)
        assert scp == "scp"
        for file in files:
            shutil.copy(machines.folder(LEARNER) / file, machines.folder(target.removesuffix(":")))
    workers = [machines.start(name, work) for name in WORKERS]
    for name in WORKERS:
        wait_for(lambda name=name: "joined CartPole-v1" in machines.output(name))  # type: ignore[misc]
    wait_for(lambda: saved_steps(machines) >= 2_000)
    text = machines.run(LEARNER, metrics)
    assert float(re.search(r"^understudy_arrived_steps_total (\S+)", text, re.M)[1]) >= 2_000  # type: ignore[index]
    assert "understudy_learner_load" in text
    # One leaves; the learner is killed and resumed; the other one joins it again.
    workers[0].terminate()
    assert workers[0].wait(30) == 0
    assert re.search(r"left the run: \d+ rounds", machines.output(WORKERS[0]))
    learner.kill()
    learner.wait()
    saved = saved_steps(machines)
    learner = machines.start(LEARNER, resume)
    wait_for(lambda: saved_steps(machines) > saved)
    assert f"resumed at step {saved:,}".replace(",", " ") in machines.output(LEARNER)
    assert machines.output(WORKERS[1]).count("joined CartPole-v1") >= 2
    workers[1].terminate()
    assert workers[1].wait(30) == 0


def saved_steps(machines: Machines) -> int:
    folder = machines.folder(LEARNER) / "R" / "checkpoints"
    return max((int(path.stem) for path in folder.glob("*") if path.stem.isdigit()), default=0)
