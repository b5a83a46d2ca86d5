"""Studies under kills: the process of the study, and its slots in the middle of their trials."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.card import Card
from tests.faults.processes import environment
from tests.faults.profiles import sizes
from understudy.tuning.journal import NAME, read_journal, table

NAPS = """
[study]
class = "tests.tuning.cheap:Napping"
environment = "rows.csv"
max_trials = {trials}
[settings]
best = 0.3
[space]
x = {{ min = 0.0, max = 1.0 }}
[search]
test_seeds = 0
[slots]
slots = 2
"""
DQN = """
[study]
game = "CartPole-v1"
algorithm = "dqn"
max_trials = {trials}
[settings]
steps = 6_000
until = 1e9
eval_every = 2_000
eval_episodes = 5
test_episodes = 10
checkpoint_every = 1_000
[space]
learning_rate = {{ min = 1e-4, max = 1e-2 }}
[search]
test_seeds = 0
[stopping]
rule = "median"
[slots]
slots = 2
"""


@sizes("kills", short=2, full=30)
def test_a_study_whose_processes_are_killed_every_2_s_ends_with_the_quiet_table(
    tmp_path: Path, card: Card, seed: int, kills: int
):
    # Two slots nap 0.4 s a trial, so there are trials for as long as the kills last.
    n_kills = survive(tmp_path, NAPS, trials=10 * kills, every_s=2, kills=kills, seed=seed)
    assert n_kills >= kills - kills // 3
    card.line("kill -9 of a study or a slot every 2 s", tried=n_kills, held=n_kills)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_study_of_dqn_whose_processes_are_killed_every_10_s_ends_with_the_quiet_table(
    tmp_path: Path, card: Card, seed: int
):
    n_kills = survive(tmp_path, DQN, trials=60, every_s=10, kills=12, seed=seed)
    assert n_kills >= 8
    card.line("kill -9 of a study of dqn or a slot every 10 s", tried=n_kills, held=n_kills)


def survive(folder: Path, text: str, *, trials: int, every_s: float, kills: int, seed: int) -> int:
    """Run a study undisturbed and under kills, and compare tables; returns how many kills."""
    (folder / "rows.csv").write_text("x\n1\n")
    (folder / "study.toml").write_text(text.format(trials=trials))
    quiet = start(folder, "quiet")
    assert quiet.wait(900) == 0, (folder / "quiet.log").read_text()
    rng = random.Random(seed)
    n_kills = 0
    study = start(folder, "killed")
    try:
        began_s = time.monotonic()
        next_s = began_s + every_s
        while (code := study.poll()) != 0:
            if code is not None:
                assert code == -signal.SIGKILL, (folder / "killed.log").read_text()
                study = start(folder, "killed")
            now_s = time.monotonic()
            if n_kills < kills and next_s <= now_s and kill_one(study, n_kills, rng):
                n_kills += 1
                next_s = now_s + every_s
            assert now_s < began_s + 900 + kills * every_s
            with contextlib.suppress(subprocess.TimeoutExpired):
                study.wait(0.05)
    finally:
        study.kill()
        study.wait()
    rows = timeless(folder / "killed")
    assert [row["trial_no"] for row in rows] == list(range(trials))
    assert rows == timeless(folder / "quiet")
    return n_kills


def start(folder: Path, name: str) -> "subprocess.Popen[bytes]":
    """Start or resume a study."""
    words = ("tune", "study.toml", "--out", name, "--resume", "--oversubscribe")
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "understudy.cli.main", *words],
            cwd=folder,
            env=environment(),
            stdout=log,
            stderr=log,
        )


def kill_one(study: "subprocess.Popen[bytes]", number: int, rng: random.Random) -> bool:
    """Kill the study's process or a slot, at first one after the other; False if neither runs."""
    slots: list[int] = []
    for children in Path(f"/proc/{study.pid}/task").glob("*/children"):
        slots += map(int, children.read_text().split())
    if not slots:
        return False
    victims = {0: slots, 1: [study.pid]}.get(number, [study.pid, *slots])
    try:
        os.kill(rng.choice(victims), signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def timeless(folder: Path) -> list[dict[str, Any]]:
    """The table of trials without what depends on time."""
    times = ("train_s", "compile_s", "eval_s")
    return [
        {
            **row,
            "seconds": 0.0,
            "metrics": {name: row["metrics"][name] for name in row["metrics"].keys() - times},
        }
        for row in table(read_journal(folder / NAME).state.rows())
    ]
