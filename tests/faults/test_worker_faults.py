"""Workers under faults: cut and bad networks, stopped and half-open peers, kills of either side."""

import contextlib
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.card import Card
from tests.cli.platforms import wait_for
from tests.faults.cables import Cable, network
from tests.faults.processes import environment
from tests.faults.profiles import sizes
from tests.faults.trainings import chunks_in
from tests.workers.test_processes import free_port
from understudy.training.training_job import decode_checkpoint

CLI = ("-m", "understudy.cli.main")
FEW = ("--set", "envs=8", "--set", "actors=2", "--set", "min_inserts=500")


class Processes:
    """Processes of one test, each with a file for its output; all are killed at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[subprocess.Popen[bytes]] = []
        self._files: list[Path] = []

    def start(self, *words: str, python: Sequence[str] = (sys.executable,)) -> int:
        """Start a Python program; returns its number."""
        number = len(self.running)
        self._files.append(self.folder / f"out-{number}")
        with self._files[number].open("wb") as out:
            command = [*python, *words]
            self.running.append(
                subprocess.Popen(
                    command, cwd=self.folder, env=environment(), stdout=out, stderr=out
                )
            )
        return number

    def kill(self, number: int) -> None:
        self.running[number].kill()
        self.running[number].wait()

    def text(self, number: int) -> str:
        return self._files[number].read_text()

    def answer(self, number: int, timeout_s: float) -> dict[str, Any]:
        """The JSON object that a command prints at its end, which must be a success."""
        code = self.running[number].wait(timeout_s)
        assert code == 0, self.text(number)
        answer: dict[str, Any] = json.loads(self.text(number).splitlines()[-1])
        return answer

    def wait_for_text(self, number: int, text: str, times: int = 1) -> None:
        """Wait until its output has this text so many times; fails at once if it ends before."""

        def is_there() -> bool:
            has_ended = self.running[number].poll() is not None
            if self.text(number).count(text) >= times:
                return True
            assert not has_ended, self.text(number)
            return False

        wait_for(is_there)

    def steps(self, learner: int) -> int:
        """The env steps that a learner has shown last."""
        found = re.findall(r"^([\d ]+) steps;", self.text(learner), re.MULTILINE)
        return int(found[-1].replace(" ", "")) if found else 0

    def is_past(self, learner: int, steps: int) -> bool:
        """Whether a learner has made these steps, or has ended."""
        return self.steps(learner) >= steps or self.running[learner].poll() is not None

    def wait_for_steps(self, learner: int, more: int) -> None:
        """Wait until a learner has made so many more steps; it must still be training."""
        wait_for(partial(self.is_past, learner, self.steps(learner) + more))
        assert self.running[learner].poll() is None, self.text(learner)


@contextlib.contextmanager
def processes(folder: Path) -> Iterator[Processes]:
    started = Processes(folder)
    try:
        yield started
    finally:
        for process in started.running:
            process.kill()
            process.wait()


def timed_learner(
    run: Processes, host: str, port: int, *, python: Sequence[str], **facts: Any
) -> int:
    """Start a learner whose `notes_of` a test can read, and wait until workers can join."""
    usual = {"game": "CartPole-v1", "wrapper": [], "steps": 10**9}
    facts = {**usual, "host": host, "port": port, **facts}
    words = ("-m", "tests.faults.timed_learner", str(run.folder / "R"), json.dumps(facts))
    learner = run.start(*words, python=python)
    key_file = run.folder / "R" / "worker.key"
    wait_for(lambda: key_file.exists() or run.running[learner].poll() is not None)
    assert run.running[learner].poll() is None, run.text(learner)
    return learner


def notes_of(folder: Path) -> list[tuple[float, int, int, str]]:
    """When, env steps, updates (or -1), and what happened, of each event of a learner."""
    file = folder / "notes"
    whole = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
    return [tuple(json.loads(line)) for line in whole]


def wait_for_more_steps(folder: Path) -> None:
    """Wait until a learner has inserted another round."""
    before = notes_of(folder)[-1][1]
    wait_for(lambda: notes_of(folder)[-1][1] > before)


def learner_words(listen: str, *more: str) -> tuple[str, ...]:
    common = ("--engine", "workers", "--listen", listen, "--out", "R", "--json", "--keep-history")
    return (*CLI, "train", "--algorithm", "dqn", *common, *FEW, *more)


def worker_words(url: str, *more: str) -> tuple[str, ...]:
    return (*CLI, "worker", url, "--key-file", "R/worker.key", "--json", *more)


def stored_steps(run: Path) -> int:
    """The steps of a run's history, in which no chunk is twice and none of a session is missing."""
    numbers: dict[Any, list[int]] = {}
    n_steps = 0
    for chunk in chunks_in(run):
        numbers.setdefault(chunk.meta.session, []).append(chunk.meta.chunk_no)
        n_steps += chunk.meta.n_steps
    for session, stored in numbers.items():
        assert sorted(stored) == list(range(len(stored))), f"{session}: {sorted(stored)}"
    return n_steps


# --- The network ----------------------------------------------------------------------------------


@sizes("n_rounds", short=1, full=6)
def test_workers_rejoin_after_partitions_loss_and_delay_and_no_step_counts_twice(
    tmp_path: Path, card: Card, seed: int, n_rounds: int
):
    """20 s and more: leases that expire and packets that are late cannot be hurried."""
    slow = "train:tests.faults.slow_steps:Slow"
    settings = {"envs": 4, "actors": 2, "min_inserts": 200, "lease_s": 3.0, "keep_history": True}
    settings["prioritised"] = n_rounds > 1  # a prioritised learner loads numba, which takes 2 s
    # A lease must outlast the join, whose policy takes several round trips of 0.4 s and more.
    rng = np.random.default_rng(seed)
    fired: Counter[str] = Counter()
    with network(2, seed=seed) as net, processes(tmp_path) as run:
        learner = timed_learner(
            run,
            "0.0.0.0",
            4444,
            python=net.python("learner"),
            settings=settings,
            wrapper=[slow],
        )
        workers = [
            run.start(
                *worker_words(net.url(number, 4444), "--insecure", "--env-wrapper", slow),
                python=net.python(str(number)),
            )
            for number in range(2)
        ]
        for worker in workers:
            run.wait_for_text(worker, "joined")
        for number in range(n_rounds):
            partition_s = rng.uniform(5, 10) if n_rounds > 1 else 0.0
            cut_off(run, net.cables[number % 2], workers[number % 2], seconds=partition_s)
            fired["partitions"] += 1
            for loss, delay_s in ((0.05, 0.2), (0.3, 0.0)):
                for cable in net.cables:
                    cable.loss = loss
                    cable.delay_s = delay_s
                lost = [cable.fired["lost"] for cable in net.cables]
                wait_for(partial(have_lost, net.cables, lost))
                if delay_s:
                    wait_for_more_steps(tmp_path)
            for cable in net.cables:
                cable.loss = 0.0
            wait_for_more_steps(tmp_path)
        # A run of a fixed number of steps could end during the partition on a slow machine.
        (tmp_path / "stop").touch()
        result = run.answer(learner, 400)
        worked = [run.answer(worker, 90) for worker in workers]
        for cable in net.cables:
            fired += cable.fired
        texts = "".join(map(run.text, range(len(run.running))))
    assert "Traceback" not in texts
    assert min(fired[name] for name in ("partitions", "cut", "lost", "delayed")) > 0, fired
    assert sum(each["joins"] for each in worked) >= 2 + n_rounds
    assert stored_steps(tmp_path / "R") == result["env_steps"] > 0
    assert sum(each["steps"] for each in worked) <= result["env_steps"]
    note = f"{fired['cut']} packets cut, {fired['lost']} lost, {fired['delayed']} delayed"
    card.line(
        "workers rejoin after a partition, loss and delay", tried=n_rounds, held=n_rounds, note=note
    )


def cut_off(run: Processes, cable: Cable, worker: int, *, seconds: float) -> None:
    """A partition that costs a worker its lease, and lasts at least so long; then it rejoins."""
    joins = run.text(worker).count("joined")
    n_lost = count_lost(run.folder)
    until_s = time.monotonic() + seconds
    cable.is_cut = True
    wait_for(lambda: count_lost(run.folder) > n_lost and time.monotonic() > until_s)
    wait_for_more_steps(run.folder)  # the other worker plays
    assert cable.fired["cut"] > 0
    cable.is_cut = False
    run.wait_for_text(worker, "joined", joins + 1)


def count_lost(folder: Path) -> int:
    return sum("lost its place" in what for _, _, _, what in notes_of(folder))


def have_lost(cables: Sequence[Cable], before: Sequence[int]) -> bool:
    """Whether each cable has lost a few packets more than before."""
    return all(cable.fired["lost"] > count + 3 for cable, count in zip(cables, before, strict=True))


# --- Silent peers ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("window_s", [15])  # a shorter window measures only the machine
def test_stopped_workers_and_half_open_connections_do_not_slow_the_learner(
    tmp_path: Path, card: Card, window_s: int
):
    port = free_port()
    with processes(tmp_path) as run:
        settings = {"envs": 8, "actors": 4, "min_inserts": 500, "eval_every": 10**6}
        learner = timed_learner(run, "127.0.0.1", port, python=[sys.executable], settings=settings)
        key_file = tmp_path / "R" / "worker.key"
        workers = [run.start(*worker_words(f"http://127.0.0.1:{port}")) for _ in range(4)]
        for worker in workers:
            run.wait_for_text(worker, "joined")
        wait_for(lambda: any(note[2] > 2_000 for note in notes_of(tmp_path)))
        rates = []
        silent = 0
        for n_silent in (0, 50, 0) * 3:
            if n_silent:
                words = (str(port), key_file.read_text().strip(), str(n_silent), "200")
                silent = run.start("-m", "tests.faults.silent_workers", *words)
                run.wait_for_text(silent, '"connections": 200')
            rates.append((n_silent, rate_of(tmp_path, window_s)))
            if n_silent:
                run.kill(silent)
        assert run.running[learner].poll() is None, run.text(learner)
    quiet = np.median([rate for n_silent, rate in rates if not n_silent])
    disturbed = np.median([rate for n_silent, rate in rates if n_silent])
    ratio = float(disturbed / quiet)
    shown = f"{disturbed:.0f} of {quiet:.0f} updates/s, {ratio:.2f}"
    assert ratio >= 0.9, shown
    card.line("50 stopped workers and 200 half-open connections", tried=1, held=1, note=shown)


def rate_of(folder: Path, window_s: float) -> float:
    """Updates per second in the next seconds."""
    first_s = time.monotonic()
    wait_for(lambda: time.monotonic() > first_s + window_s, window_s + 60)
    notes = [note for note in notes_of(folder) if note[0] > first_s and note[2] >= 0]
    if len(notes) < 2:
        return 0.0
    return (notes[-1][2] - notes[0][2]) / (notes[-1][0] - notes[0][0])


# --- Kills ----------------------------------------------------------------------------------------


@sizes("n_seeds", short=1, full=3)
def test_cartpole_is_learned_while_workers_and_the_learner_are_killed(
    tmp_path: Path, card: Card, bar: Callable[[float], float], n_seeds: int
):
    """20 s and more: a whole training, whose learner and workers start again after kills."""
    kills = 0
    team = {"max_kills": 3, "n_workers": 2} if n_seeds == 1 else {"max_kills": 40, "n_workers": 4}
    returns_s = []
    for number in range(n_seeds):
        folder = tmp_path / str(number)
        folder.mkdir()
        n_kills, return_s = learn_under_kills(folder, seed=number, every=1_000, **team)
        kills += n_kills
        returns_s.append(return_s)
        assert return_s <= bar(10.0)
    assert kills >= 2 * n_seeds
    note = f"{kills} kills of a worker; workers went on {max(returns_s):.1f} s after its return"
    card.line("CartPole is learned under kills of workers and the learner", tried=n_seeds,
              held=n_seeds, note=note)  # fmt: skip


def learn_under_kills(
    folder: Path, *, seed: int, every: int, max_kills: int, n_workers: int
) -> tuple[int, float]:
    """Kill a worker after so many steps each time, at most `max_kills`, and the learner once.

    Returns the number of killed workers, and how long the first worker needed to go on after the
    learner's return.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    more = ("--seed", str(seed), "--set", "lease_s=1", "--set", "checkpoint_every=1000")
    with processes(folder) as run:
        learner = run.start(*learner_words(f"127.0.0.1:{port}", "CartPole-v1", *more))
        run.wait_for_text(learner, "waiting for workers")
        workers = [run.start(*worker_words(url)) for _ in range(n_workers)]
        n_kills = 0
        while n_kills < 2:  # before the first evaluation, which may end the run
            run.wait_for_steps(learner, every)
            run.kill(workers.pop(0))
            workers.append(run.start(*worker_words(url)))
            n_kills += 1
        run.kill(learner)
        saved = max((folder / "R" / "checkpoints").glob("*.safetensors"))
        unsaved = stored_steps(folder / "R") - decode_checkpoint(saved.read_bytes()).env_steps
        joins = sum(run.text(worker).count("joined") for worker in workers)
        learner = run.start(*CLI, "train", "--resume", "--out", "R", "--json")
        run.wait_for_text(learner, "resumed at step")
        came_back_s = time.monotonic()
        wait_for(lambda: sum(run.text(worker).count("joined") for worker in workers) > joins)
        return_s = time.monotonic() - came_back_s
        while run.running[learner].poll() is None and n_kills < max_kills:
            wait_for(partial(run.is_past, learner, run.steps(learner) + every))
            if run.running[learner].poll() is None:
                run.kill(workers.pop(0))
                workers.append(run.start(*worker_words(url)))
                n_kills += 1
        result = run.answer(learner, 120)
        assert "Traceback" not in "".join(map(run.text, range(len(run.running))))
    assert result["return_mean"] >= 475, result
    assert result["episodes"] == 100  # on held-out seeds
    # Steps that were stored, but in no checkpoint when the learner was killed, do not count.
    assert unsaved >= 0
    assert stored_steps(folder / "R") == result["env_steps"] + unsaved
    return n_kills, return_s
