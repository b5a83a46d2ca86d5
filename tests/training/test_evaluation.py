"""Evaluations of finished runs: held-out seeds, IQM and interval."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import understudy
from tests.platform.switches import GAME, QUICK, Switches
from understudy.core.errors import ConfigError, GameFailed
from understudy.training.evaluation import (
    AFTERWARDS,
    AT_THE_END,
    CONFIRMING,
    WHILE_TRAINING,
    evaluate_run,
    held_out_seeds,
)
from understudy.training.settings import RunPart
from understudy.training.train_seeds import combined_result, train_seeds


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated") / "R"
    understudy.train(GAME, steps=1_024, settings=QUICK, out=folder)
    return folder


def test_no_two_series_and_no_two_attempts_share_a_seed():
    series = (WHILE_TRAINING, CONFIRMING, AT_THE_END, AFTERWARDS)
    seeds = [
        held_out_seeds(100, series=one, attempt=attempt) for one in series for attempt in range(300)
    ]
    assert len({seed for one in seeds for seed in one}) == 4 * 300 * 100
    assert min(map(min, seeds)) >= 1 << 31
    assert max(map(max, seeds)) < 1 << 32
    assert held_out_seeds(100, series=CONFIRMING, attempt=7) == seeds[300 + 7]


def test_a_policy_is_evaluated_over_its_seeds(run: Path):
    told: list[tuple[int, int]] = []
    result = evaluate_run(run, episodes=20, seeds=5, on_progress=lambda *one: told.append(one))
    assert told == [(number, 5) for number in range(1, 6)]
    assert result.low is not None
    assert result.high is not None
    assert 0 <= result.low <= result.iqm <= result.high <= 10
    assert (result.episodes, result.seeds, result.runs, result.played) == (20, 5, 1, 100)
    assert result == evaluate_run(run, episodes=20, seeds=5)


def test_below_five_seeds_there_is_no_interval(run: Path):
    result = evaluate_run(run, episodes=10, seeds=4, policy="last")
    assert (result.low, result.high) == (None, None)
    assert result.policy == "last"


def test_runs_of_several_seeds_are_evaluated_together(tmp_path: Path):
    begun: list[Path] = []
    asked: dict[str, Any] = {"steps": 256, "settings": QUICK, "out": tmp_path / "S", "seed": 7}
    runs = train_seeds(GAME, seeds=2, on_run=begun.append, **asked)
    assert [path.name for path in begun] == ["seed-7", "seed-8"]
    assert json.loads((tmp_path / "S" / "summary.json").read_text()) == runs.result
    assert (runs.result["seeds"], runs.result["env_steps"], runs.result["return_low"]) == (
        2,
        512,
        None,
    )
    result = evaluate_run(tmp_path / "S", episodes=10, seeds=5)
    assert (result.runs, result.played, result.low) == (2, 100, None)
    with pytest.raises(ConfigError, match="is not empty"):
        train_seeds(GAME, seeds=2, **asked)
    more = train_seeds(GAME, seeds=3, resume=True, **asked)
    assert [one["seed"] for one in more.result["runs"]] == [7, 8, 9]
    assert more.result["runs"][0] == runs.result["runs"][0]


def test_results_of_five_seeds_have_an_interval():
    one = {
        "solved": True,
        "episodes": 100,
        "env_steps": 10,
        "updates": 1,
        "train_s": 0.5,
        "compile_s": 0.1,
        "eval_s": 0.1,
        "startup_s": 1.0,
        "resumed_at_step": 0,
        "env_class": "",
        "algorithm": "dqn",
        "game": "g",
    }
    results = [
        {**one, "return_mean": float(mean), "solved": mean > 0} for mean in (0, 8, 9, 10, 10)
    ]
    found = combined_result(Path("S"), results)
    assert (found["solved"], found["solved_seeds"], found["train_s"]) == (False, 4, 2.5)
    assert found["return_low"] <= found["return_iqm"] <= found["return_high"]
    unknown = combined_result(Path("S"), [{**one, "return_mean": None}])
    assert unknown["return_iqm"] is None


def test_an_env_object_must_be_passed_again(tmp_path: Path):
    understudy.train(Switches(), steps=256, settings=QUICK, out=tmp_path / "R")
    with pytest.raises(ConfigError, match="use Python, where the game can be passed again"):
        evaluate_run(tmp_path / "R")
    assert evaluate_run(tmp_path / "R", episodes=2, seeds=1, game=Switches()).played == 2
    with pytest.raises(ConfigError, match="the spaces of CartPole-v1 differ"):
        evaluate_run(tmp_path / "R", game="CartPole-v1")


def test_invalid_arguments_are_rejected(run: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="does not exist"):
        evaluate_run(tmp_path / "none")
    with pytest.raises(ConfigError, match="is not a run"):
        evaluate_run(tmp_path)
    with pytest.raises(ConfigError, match=f"give the run's folder: understudy evaluate {run}$"):
        evaluate_run(run / "best.safetensors")
    with pytest.raises(
        ConfigError, match=f"give the run's folder: understudy evaluate {run} --policy last$"
    ):
        evaluate_run(run / "last.safetensors")
    with pytest.raises(ConfigError, match="episodes is 0"):
        evaluate_run(run, episodes=0)
    with pytest.raises(ConfigError, match="seeds is -1"):
        evaluate_run(run, seeds=-1)
    with pytest.raises(ConfigError, match="give best or last"):
        evaluate_run(run, policy="first")
    with pytest.raises(ConfigError, match="seeds is 0"):
        train_seeds(GAME, seeds=0)
    with pytest.raises(ConfigError, match="no game was given"):
        train_seeds(None, seeds=2)


def test_evaluating_needs_no_jax():
    code = (
        "import sys, understudy.cli.train, understudy.training.evaluation; print('jax' in "
        "sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


class Unpayable(Switches):
    """Some rewards are no numbers."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, _, *rest = super().step(action)
        return obs, math.nan if self._done == 4 else 1.0, *rest


def test_rewards_that_are_no_numbers_are_named(run: Path):
    says = r"rewards of Unpayable .*20 of 20 episodes are not finite"
    with pytest.raises(GameFailed, match=says):
        evaluate_run(run, episodes=20, seeds=1, game=Unpayable)


def test_episodes_may_be_as_long_as_in_evaluations_of_training(run: Path):
    most = 10**9
    assert evaluate_run(run, episodes=5, seeds=1, max_steps=most).max_steps == most
    assert RunPart(eval_max_steps=most).eval_max_steps == most
    with pytest.raises(ConfigError, match=f"max_steps is {most + 1}; .* from 1 to {most}$"):
        evaluate_run(run, episodes=5, seeds=1, max_steps=most + 1)
