"""Killed and resumed trainings: the same bits as without a kill, from files that are readable."""

import contextlib
import functools
import json
import random
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.card import Card
from tests.faults.forker import Fault
from tests.faults.profiles import sizes
from tests.faults.trainings import (
    PLAYERS,
    Forker,
    chunks_in,
    differences,
    every_file_reads,
    fill_store,
    store_audit,
    traces,
)
from understudy.act import actor as actor_module
from understudy.backends.data import DataFolder
from understudy.ingest.specs import SpecFolder
from understudy.learn import learner as learner_module
from understudy.learn.learner import Learner
from understudy.learn.replay import HostReplay
from understudy.stores.local import LocalStore
from understudy.training.folder import RunFolder
from understudy.training.train import TrainOptions, train
from understudy.training.training import Training

# the last checkpoint is taken behind 95 % of the steps
ROUND = 64
EVERY = 320
STEPS = 2368


@dataclass(frozen=True, slots=True)
class Case:
    """A training of CartPole-v1, as small as it can be and still do everything."""

    algorithm: str
    steps: int
    every: int
    settings: Mapping[str, Any]
    is_stored: bool = False
    """Learns from a store and plays nothing; then steps are updates."""

    def words(self, store: Path) -> list[str]:
        """The command line, but for the folder."""
        settings = {
            "steps": self.steps,
            "checkpoint_every": self.every,
            "eval_every": 2 * self.every,
            "eval_episodes": 5,
            "widths": [8],
            **self.settings,
        }
        words = ["CartPole-v1", "--algorithm", self.algorithm, "--seed", "3", "--until", "400"]
        words += [
            word
            for name, value in settings.items()
            for word in ("--set", f"{name}={json.dumps(value)}")
        ]
        return [*words, "--from-store", str(store)] if self.is_stored else words


# A replay that wraps around several times; updates that begin between two checkpoints.
DQN = {
    "envs": 4,
    "collect": 16,
    "capacity": 768,
    "min_inserts": 256,
    "samples_per_insert": 4.0,
    "updates_per_call": 8,
    "batch": 16,
}
PPO = {"envs": 4, "rollout": 16, "epochs": 2, "minibatches": 2}
CASES = {
    "dqn by priority": Case("dqn", STEPS, EVERY, {**DQN, "prioritised": True}),
    "ppo with stacks and norms": Case(
        "ppo", STEPS, EVERY, {**PPO, "stack": 3, "observation_norm": True}
    ),
    "bc from a store": Case("bc", 592, 80, {"updates_per_call": 16, "batch": 16}, is_stored=True),
    "iql from a store": Case(
        "iql", 592, 80, {"updates_per_call": 16, "batch": 16, "n_step": 3}, is_stored=True
    ),
    "dqn uniform": Case("dqn", STEPS, EVERY, {**DQN, "prioritised": False, "stack": 2}),
    "ppo": Case("ppo", STEPS, EVERY, PPO),
}
SHORT = ["dqn by priority", "dqn by priority", "ppo with stacks and norms", "bc from a store"]


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    forker = Forker(tmp_path_factory.mktemp("forker"))
    yield forker
    forker.close()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataFolder:
    data = DataFolder(tmp_path_factory.mktemp("data"))
    fill_store(data, steps=256)
    return data


@pytest.fixture(scope="module")
def wholes(
    forker: Forker, data: DataFolder, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Gives the folder of a case's training that nothing happened to."""

    @functools.cache
    def whole(name: str) -> Path:
        run = tmp_path_factory.mktemp("whole") / "run"
        ended = forker.run([*CASES[name].words(data.root), "--out", run])
        assert ended.code == 0, ended.errors
        return run

    return whole


def faults(case: Case, count: int, rng: random.Random) -> list[Fault]:
    """Kills between 5 % and 95 % of the steps, one after the other; a third in a checkpoint."""
    steps = sorted(rng.sample(range(case.steps // 20, case.steps * 19 // 20), count))
    ways = [
        lambda step: Fault(step=step, how="checkpoint", calls=rng.randrange(4)),
        lambda step: Fault(step=step, how="kill", delay_s=rng.uniform(0.0, 0.03)),
        lambda step: Fault(step=step, how="call", calls=rng.randrange(30)),
    ]
    first = rng.randrange(len(ways))
    return [ways[(first + at) % len(ways)](step) for at, step in enumerate(steps)]


@sizes("kills", short=len(SHORT), full=24)
def test_a_training_killed_repeatedly_ends_with_the_same_bits(
    forker: Forker,
    data: DataFolder,
    wholes: Callable[[str], Path],
    tmp_path: Path,
    kills: int,
    seed: int,
    card: Card,
) -> None:
    """20 s and more: ten trainings, each in a process that traces its programs."""
    rng = random.Random(seed)
    names = (
        SHORT
        if kills == len(SHORT)
        else [name for name in CASES for _ in range(kills // len(CASES))]
    )
    places: list[str] = []
    for name in dict.fromkeys(names):
        case = CASES[name]
        run = tmp_path / name
        plan = faults(case, names.count(name), rng)
        places += killed(forker, [*case.words(data.root), "--out", run], case, plan)
        newest = every_file_reads(run)[-1].env_steps
        ended = forker.run(["--resume", "--out", run])
        assert ended.code == 0, ended.errors
        assert ended.result["resumed_at_step"] == newest > 0
        assert not differences(traces(wholes(name)), traces(run)), f"{name}, seed {seed}, {plan}"
    assert len(places) == kills
    inside = sum("/checkpoints/" in place for place in places)
    assert inside > 0
    card.line(
        "kill -9 of a training, resumed to the same bits",
        tried=kills,
        held=kills,
        note=f"{inside} in checkpoints",
    )


def killed(
    forker: Forker, words: Sequence[str | Path], case: Case, plan: Sequence[Fault]
) -> list[str]:
    """Where each fault killed the run, which then resumes from its newest checkpoint."""
    places = []
    run = Path(words[-1])
    for fault in plan:
        ended = forker.run(words, fault)
        assert ended.code == -signal.SIGKILL, ended
        newest = every_file_reads(run)[-1].env_steps
        assert 0 <= ended.died["step"] - newest <= case.every, (
            f"{fault} repeats {ended.died['step']} - {newest}"
        )
        places.append(ended.died["where"])
        words = ["--resume", "--out", run]
    return places


# --- Other ends -----------------------------------------------------------------------------------


@sizes("kills", short=1, full=5)
def test_asynchronous_training_resumes_from_its_checkpoint_and_counts_nothing_twice(
    forker: Forker, data: DataFolder, tmp_path: Path, kills: int, seed: int, card: Card
) -> None:
    rng = random.Random(seed)
    run = tmp_path / "run"
    settings = {**DQN, "prioritised": True, "asynchronous": True, "keep_history": True}
    case = Case("dqn", STEPS, EVERY, settings)
    killed(forker, [*case.words(data.root), "--out", run], case, faults(case, kills, rng))
    saved = checkpoint_after_restore(run, tmp_path / "copy")
    assert not [name for name, (was, now) in saved.items() if was != now]
    ended = forker.run(["--resume", "--out", run])
    assert ended.code == 0, ended.errors
    assert ended.result["resumed_at_step"] > 0
    assert counted_once(run, ended.result["env_steps"]) <= kills * (case.every + 2 * ROUND)
    card.line("kill -9 of an asynchronous training, no step counted twice", tried=kills, held=kills)


def counted_once(run: Path, env_steps: int) -> int:
    """Check the run's store and newest checkpoint; returns the played and lost steps."""
    newest = every_file_reads(run)[-1]
    audit = store_audit(run)
    facts = newest.facts
    assert (
        facts["counts"]["inserted_steps"]
        == facts["source"]["limiter"]["n_inserted"]
        == newest.env_steps
    )
    assert facts["source"]["replay"]["n_steps_inserted"] == newest.env_steps
    assert (audit.duplicate_chunks, audit.duplicate_steps, audit.gap_chunks) == (0, 0, 0)
    stored_steps = sum(chunk.meta.n_steps for chunk in chunks_in(run))
    assert stored_steps >= newest.env_steps > env_steps - EVERY
    return stored_steps - newest.env_steps


def checkpoint_after_restore(run: Path, copy: Path) -> dict[str, tuple[Any, Any]]:
    """(saved, saved again right after restoring) for all parts of the newest checkpoint."""
    shutil.copytree(run, copy)
    before = every_file_reads(copy)[-1]
    found: dict[str, tuple[Any, Any]] = {}

    def resume(self: Training) -> bool:
        real_resume(self)
        arrays, facts = self.engine.checkpoint()
        found.update(
            {
                name: (before.arrays[name].tobytes(), array.tobytes())
                for name, array in arrays.items()
            }
        )
        found.update({name: (before.facts[name], value) for name, value in facts.items()})
        raise Killed

    real_resume = Training.resume
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "resume", resume)
        with pytest.raises(Killed):
            train(out=copy, resume=True)
    return found


def test_a_second_process_on_the_same_run_is_rejected_and_ctrl_c_leaves_a_resumable_run(
    forker: Forker, data: DataFolder, tmp_path: Path, card: Card
) -> None:
    case = CASES["dqn by priority"]
    run = tmp_path / "run"
    first = forker.start([*case.words(data.root), "--out", run], Fault(step=700, how="stop"))
    try:
        assert first.wait() is None  # stopped, with its lock in hand
        second = forker.run(["--resume", "--out", run])
        assert (second.code, "in use by another process" in second.errors) == (3, True), second
        first.signal(signal.SIGINT)
        first.signal(signal.SIGCONT)
        ended = first.wait()
    finally:
        first.kill()
    assert ended is not None
    assert ended.code == 130, ended
    assert f"--resume --out {run}" in ended.errors
    newest = every_file_reads(run)[-1].env_steps
    ended = forker.run(["--resume", "--out", run])
    assert (ended.code, ended.result["resumed_at_step"]) == (0, newest), ended.errors
    assert 700 - case.every <= newest
    card.line("Ctrl-C while training, resumed", tried=1, held=1)
    card.line("a second process on a run is refused", tried=1, held=1)


def test_a_full_disk_during_a_checkpoint_is_reported_and_the_run_resumes_from_the_previous_one(
    forker: Forker, data: DataFolder, wholes: Callable[[str], Path], tmp_path: Path, card: Card
) -> None:
    name = "dqn by priority"
    run = tmp_path / "run"
    ended = forker.run([*CASES[name].words(data.root), "--out", run], Fault(step=1000, how="full"))
    assert ended.code == 3
    assert "no room for the checkpoint of step 1024" in ended.errors
    assert "Traceback" not in ended.errors
    assert every_file_reads(run)[-1].env_steps == 1024 - EVERY
    assert not list(run.rglob(".*.tmp"))
    ended = forker.run(["--resume", "--out", run])
    assert (ended.code, ended.result["resumed_at_step"]) == (0, 1024 - EVERY), ended.errors
    assert not differences(traces(wholes(name)), traces(run))
    card.line("disk full under a checkpoint, resumed to the same bits", tried=1, held=1)


def test_a_player_forgotten_during_training_is_removed_from_the_resumed_training(
    data: DataFolder, tmp_path: Path
) -> None:
    own = DataFolder(tmp_path / "data")
    shutil.copytree(data.root, own.root)
    settings = {
        **CASES["bc from a store"].settings,
        "widths": [8],
        "checkpoint_every": 80,
        "eval_episodes": 5,
    }
    words = {
        "game": "CartPole-v1",
        "algorithm": "bc",
        "options": TrainOptions(from_store=own.root),
        "steps": 192,
        "settings": settings,
    }
    trained_here(tmp_path / "run", kill_at=100, **words)
    sessions = set(map(bytes, every_file_reads(tmp_path / "run")[-1].arrays["source.sessions"]))
    with LocalStore(own.store, specs=SpecFolder(own.games)) as store:
        assert store.forget(PLAYERS[0]) == 4
    trained_here(tmp_path / "run", resume=True)
    left = set(map(bytes, every_file_reads(tmp_path / "run")[-1].arrays["source.sessions"]))
    assert (len(sessions), len(left), left < sessions) == (4, 3, True)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["updates"] == 192


# --- Controls: what is left out of a resume must show ---------------------------------------------


class Killed(BaseException):
    """Ends a training inside this process, as a kill would."""


def trained_here(run: Path, *, kill_at: int | None = None, **words: Any) -> None:
    """A training in this process; it dies after the first events behind `kill_at`."""

    def handle_event(event: Any) -> None:
        if kill_at is not None and event.env_steps > kill_at:
            raise Killed

    with contextlib.suppress(Killed):
        train(out=run, on_event=handle_event, **words)


def without_open_episodes(patch: pytest.MonkeyPatch) -> None:
    def rebuild(live: Any, seen: Any, *, seeds: Sequence[int], actions: Any) -> None:
        live.reset(seeds)

    patch.setattr(actor_module, "_rebuild", rebuild)


def without_priorities(patch: pytest.MonkeyPatch) -> None:
    real = HostReplay.restore

    def restore(self: HostReplay, arrays: Mapping[str, Any], facts: Any, read: Any) -> None:
        real(self, {**arrays, "masses": (arrays["masses"] > 0).astype(float)}, facts, read)

    patch.setattr(HostReplay, "restore", restore)


def without_moments(patch: pytest.MonkeyPatch) -> None:
    real = learner_module.state_from_arrays

    def state_from_arrays(template: Any, arrays: Mapping[str, Any]) -> Any:
        state = real(template, arrays)
        return state._replace(optimiser=template.optimiser)

    patch.setattr(learner_module, "state_from_arrays", state_from_arrays)


def without_call_numbers(patch: pytest.MonkeyPatch) -> None:
    real = Learner.restore

    def restore(self: Learner, arrays: Any, facts: Mapping[str, Any], read: Any) -> None:
        real(self, arrays, {**facts, "counts": {**facts["counts"], "calls": 0}}, read)

    patch.setattr(Learner, "restore", restore)


def without_cutting_the_curve(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunFolder, "cut_curve", lambda self, env_steps: self.curve_rows())


def without_a_thing(patch: pytest.MonkeyPatch) -> None:
    """The control of the controls."""


def test_any_omission_of_a_resume_fails_the_comparison(tmp_path: Path, card: Card) -> None:
    settings = {
        **DQN,
        "prioritised": True,
        "widths": [8],
        "checkpoint_every": EVERY,
        "eval_every": 100,
    }
    words: dict[str, Any] = {
        "game": "CartPole-v1",
        "algorithm": "dqn",
        "seed": 3,
        "steps": 768,
        "settings": settings | {"eval_episodes": 5},
    }
    trained_here(tmp_path / "whole", **words)
    trained_here(tmp_path / "killed", kill_at=600, **words)
    whole = traces(tmp_path / "whole")
    shown = {}
    for leave_out in (
        without_a_thing,
        without_open_episodes,
        without_priorities,
        without_moments,
        without_call_numbers,
        without_cutting_the_curve,
    ):
        run = tmp_path / leave_out.__name__
        shutil.copytree(tmp_path / "killed", run)
        with pytest.MonkeyPatch.context() as patch:
            leave_out(patch)
            trained_here(run, resume=True)
        shown[leave_out.__name__] = differences(whole, traces(run))
    assert not shown.pop("without_a_thing")
    assert all(shown.values()), shown
    card.line("controls: something left out of a resume is seen", tried=len(shown), held=len(shown))
