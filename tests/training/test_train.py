"""understudy.train as a user calls it: arguments, results and errors."""

import functools
import inspect
import shutil
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import understudy
from tests.learn.replays import WithFaults
from tests.platform.switches import GAME, QUICK, Brighter, Switches
from tests.training.arguments import with_options
from understudy.act.evaluate import evaluate
from understudy.act.vector import make_envs
from understudy.act.vector_envs import CartPoleVector
from understudy.core.errors import ConfigError, GameFailed, LearningFailed, Locked, MissingExtra
from understudy.core.log import FileLock
from understudy.experience.spaces import Box
from understudy.learn.algorithms.dqn import Dqn
from understudy.learn.algorithms.ppo import Ppo
from understudy.learn.architecture import network_for
from understudy.nn.network import Dense
from understudy.nn.policy import Policy
from understudy.training.env_info import GameChoice, choice_of
from understudy.training.evaluation import AT_THE_END, evaluate_run, held_out_seeds
from understudy.training.events import (
    CheckpointSaved,
    Compiling,
    EpisodeEnded,
    Evaluation,
    Event,
    Started,
    Update,
)
from understudy.training.folder import RunFolder
from understudy.training.train import Run

LIT_LEFT = np.array([1, 0], np.float32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run."""
    return train(tmp_path_factory.mktemp("trained") / "R", algorithm="dqn", seed=3, steps=2_000)


def train(out: Path, game: Any = GAME, **asked: Any) -> Run:
    asked["settings"] = QUICK | asked.get("settings", {})
    return understudy.train(game, out=out, **with_options(asked))


class Crash(Exception):
    pass


def crash_at(env_steps: int) -> Any:
    def handle_event(event: Event) -> None:
        if isinstance(event, Update) and event.env_steps >= env_steps:
            raise Crash

    return handle_event


def crash_at_start(event: Event) -> None:
    if isinstance(event, Started):
        raise Crash


# --- Arguments ------------------------------------------------------------------------------------


def test_an_id_is_enough_for_a_policy_that_plays(trained: Run):
    assert trained.policy.act(LIT_LEFT) == 0
    assert trained.policy.act(LIT_LEFT[::-1]) == 1
    assert trained.result["return_mean"] == 10.0
    assert trained.result["env_class"] == "tests.platform.switches:Switches"
    assert {path.name for path in trained.folder.iterdir()} >= {
        "best.safetensors",
        "last.safetensors",
        "curve.csv",
        "curve.png",
        "preset.toml",
        "run.json",
        "result.json",
    }
    assert "return 10.0" in repr(trained)
    assert len(repr(trained)) < 500


def test_an_env_is_copied_and_never_touched(tmp_path: Path):
    env = Switches(presses=5)
    run = train(tmp_path / "R", env, steps=512)
    assert not env.is_closed
    assert env.resets == 0
    assert run.result["return_mean"] <= 5
    assert run.result["game"] == "Switches"


def test_a_registered_env_is_trained_on_unchanged(tmp_path: Path):
    env: Any = Brighter(gymnasium.make("Switches-v0"))
    env.unwrapped._presses = 3
    run = train(tmp_path / "R", env, steps=256)
    assert run.result["return_mean"] <= 3
    assert run.policy.game.obs[""] == Box((2,), np.dtype(np.float32), 0.0, 2.0)
    assert env.unwrapped.resets == 0


def test_a_registered_env_a_function_and_a_class_are_games_too(tmp_path: Path):
    for number, game in enumerate([gymnasium.make("Switches-v0"), lambda: Switches(), Switches]):
        run = train(tmp_path / str(number), game, steps=256)
        assert run.policy.act(LIT_LEFT) in (0, 1)
        assert run.result["game"] in ("Switches", "Switches-v0")


def test_an_env_that_cannot_be_copied_asks_for_a_function(tmp_path: Path):
    env = Switches()
    env.grip = threading.Lock()
    with pytest.raises(ConfigError, match="pass a function that creates one"):
        train(tmp_path / "R", env, steps=256)


def test_an_algorithm_may_be_a_class_that_no_import_reaches(tmp_path: Path):
    class Mine(Ppo):
        pass

    run = train(tmp_path / "R", algorithm=Mine, steps=512, until=100, on_event=stop_at(256))
    assert run.result["algorithm"].endswith(
        ":test_an_algorithm_may_be_a_class_that_no_import_reaches.<locals>.Mine"
    )
    (run.folder / "result.json").unlink()
    with pytest.raises(ConfigError, match="cannot be imported"):
        train(tmp_path / "R", None, resume=True)
    assert train(tmp_path / "R", algorithm=Mine, resume=True).result["env_steps"] == 512


def test_an_algorithm_may_be_an_import_path_and_keeps_its_short_name(tmp_path: Path):
    run = train(tmp_path / "R", algorithm="understudy.learn.algorithms.ppo:Ppo", steps=256)
    assert run.result["algorithm"] == "ppo"
    assert "rollout = 32" in (run.folder / "preset.toml").read_text()


def test_a_network_may_be_widths_or_a_spec_and_is_restored_after_a_crash(
    tmp_path: Path, trained: Run
):
    heads = {"logits": (Dense(2),), "value": (Dense(1),)}
    spec = network_for(trained.policy.game, heads=heads, widths=(7, 6))
    with pytest.raises(Crash):
        train(tmp_path / "R", algorithm="ppo", network=spec, steps=1_024, on_event=crash_at(512))
    assert train(tmp_path / "R", None, resume=True).policy.network == spec
    # Too short for an update: nothing has to be compiled.
    widths = train(tmp_path / "W", algorithm="dqn", network="7,6", steps=256).policy.weights
    assert {7, 6} <= {array.shape[-1] for array in widths.values()}


def test_wrappers_settings_of_the_env_and_frame_skip_reach_the_env(tmp_path: Path):
    run = train(
        tmp_path / "R",
        wrapper="tests.platform.switches:Brighter",
        env_kwargs={"presses": 4},
        frame_skip=2,
        steps=256,
    )
    assert run.policy.game.obs[""] == Box((2,), np.dtype(np.float32), 0.0, 2.0)
    assert run.result["return_mean"] <= 4
    again = train(
        tmp_path / "S", wrapper=[Brighter], env_kwargs={"presses": 4}, frame_skip=2, steps=256
    )
    assert again.policy.weights.keys() == run.policy.weights.keys()
    assert all(
        (again.policy.weights[name] == run.policy.weights[name]).all()
        for name in run.policy.weights
    )


def test_a_run_may_start_from_the_policy_of_another_run(tmp_path: Path, trained: Run):
    run = train(
        tmp_path / "R",
        algorithm="dqn",
        init_from=trained.folder,
        steps=256,
        settings={"min_inserts": 10_000},
    )
    assert run.policy.weights.keys() == trained.policy.weights.keys()
    assert run.result["return_mean"] == 10.0
    init = run.result["init_from"]
    assert (init["run"], init["new"]) == (str(trained.folder), [])
    assert set(init["fit"]) == trained.policy.weights.keys()
    assert trained.result["init_from"] is None


def test_a_run_that_starts_from_another_one_reports_which_weights_did_not_fit(
    tmp_path: Path, trained: Run
):
    heard: list[Event] = []
    train(
        tmp_path / "R",
        algorithm="dqn",
        network="64,7",
        init_from=trained.folder,
        steps=256,
        on_event=heard.append,
    )
    assert isinstance(heard[0], Started)
    init = heard[0].init_from
    assert init is not None
    assert init.fit == ["trunk.0.kernel", "trunk.0.bias", "heads.q.0.bias"]
    assert set(init.new) == trained.policy.weights.keys() - set(init.fit)


@pytest.fixture(scope="module")
def cloned(trained: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that cloned the finished one, with normalised observations."""
    out = tmp_path_factory.mktemp("cloned") / "R"
    return train(out, algorithm="bc", from_store=trained.folder, steps=200)


def body(policy: Policy) -> tuple[Any, Any]:
    return policy.network.inputs, policy.network.trunk


def test_a_run_that_starts_from_a_clone_keeps_its_network_and_statistics(
    tmp_path: Path, cloned: Run
):
    settings = {"learning_rate": 0.0}
    run = train(
        tmp_path / "R", algorithm="ppo", init_from=cloned.folder, steps=256, settings=settings
    )
    init = run.result["init_from"]
    assert set(init["fit"]) == cloned.policy.weights.keys()
    assert (init["new"], init["unused"]) == ([], [])
    assert body(run.policy) == body(cloned.policy)
    last = RunFolder(run.folder).policy("last").weights
    for name, weights in cloned.policy.weights.items():
        is_statistic = name.startswith("inputs.")
        assert (last[name] == weights).all() != is_statistic, "only the statistics have moved on"
    (run.folder / "result.json").unlink()
    assert train(run.folder, None, resume=True).policy == run.policy
    again = understudy.train(
        GAME,
        out=tmp_path / "S",
        options=understudy.TrainOptions(preset=str(run.folder / "preset.toml")),
    )
    assert RunFolder(again.folder).policy("last").weights.keys() == last.keys()


def test_weights_of_a_clone_without_a_place_in_the_new_network_are_named(
    tmp_path: Path, cloned: Run
):
    run = train(tmp_path / "R", algorithm="dqn", init_from=cloned.folder, steps=256)
    assert body(run.policy) == body(cloned.policy)
    init = run.result["init_from"]
    assert init["new"] == [name for name in run.policy.weights if name.startswith("heads.q")]
    assert init["unused"] == ["heads.logits.0.kernel", "heads.logits.0.bias"]
    assert len(init["fit"]) + len(init["unused"]) == len(cloned.policy.weights)


def test_a_run_with_another_stack_copies_the_weights_whose_shapes_match(
    tmp_path: Path, cloned: Run
):
    run = train(
        tmp_path / "R",
        algorithm="dqn",
        init_from=cloned.folder,
        steps=256,
        settings={"stack": 2, "min_inserts": 10_000},
    )
    assert (run.policy.stack, cloned.policy.stack) == (2, 1)
    assert run.policy.network.trunk == cloned.policy.network.trunk
    init = run.result["init_from"]
    assert init["fit"] == ["trunk.0.bias", "trunk.2.kernel", "trunk.2.bias"]
    norm = [f"inputs.obs.0.{part}" for part in ("mean", "var", "count")]
    assert {*norm, "trunk.0.kernel"} <= {*init["new"]} & {*init["unused"]}
    # Statistics of other inputs start anew, so their count does too.
    assert run.policy.weights[norm[2]] == 0 < cloned.policy.weights[norm[2]]

    again = train(tmp_path / "S", algorithm="ppo", init_from=run.folder, steps=256)
    assert again.policy.stack == 2, "the stack is that of the run's input layers"
    assert body(again.policy) == body(run.policy)
    assert set(again.result["init_from"]["new"]) == {
        name for name in again.policy.weights if name.startswith("heads.logits")
    }


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"observation_norm": False}, r"inputs\.obs\.0 is Flatten in .* ObservationNorm there"),
        ({"observation_norm": True}, r"trunk\.1 is tanh in this network and relu there"),
    ],
)
def test_a_network_in_which_copied_weights_compute_something_else_is_rejected(
    settings: dict[str, Any], said: str, tmp_path: Path, cloned: Run
):
    with pytest.raises(ConfigError, match=f"cannot start from .*{said}.*omit .*activation"):
        train(
            tmp_path / "R", algorithm="ppo", init_from=cloned.folder, steps=256, settings=settings
        )
    assert not (tmp_path / "R").exists()


def test_a_run_that_started_from_another_one_resumes_without_it(tmp_path: Path, trained: Run):
    other = tmp_path / "other"
    shutil.copytree(trained.folder, other)
    asked: dict[str, Any] = {"algorithm": "dqn", "steps": 256, "settings": {"min_inserts": 10_000}}
    with pytest.raises(Crash):
        train(tmp_path / "R", init_from=other, **asked, on_event=crash_at_start)
    shutil.rmtree(other)
    assert not list((tmp_path / "R").glob("checkpoints/*"))
    assert (
        train(tmp_path / "R", None, resume=True).policy.weights.keys()
        == trained.policy.weights.keys()
    )
    assert RunFolder(tmp_path / "R").start() == trained.policy
    (tmp_path / "R" / "start.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"start\.safetensors cannot be read"):
        RunFolder(tmp_path / "R").start()


def test_the_policy_of_a_run_without_evaluations_is_its_last(
    tmp_path: Path, trained: Run, monkeypatch: pytest.MonkeyPatch
):
    def not_installed(choice: Any) -> Any:
        raise ConfigError("not installed")

    monkeypatch.setattr("understudy.training.train.inspect_env", not_installed)
    run = train(tmp_path / "R", algorithm="bc", from_store=trained.folder, steps=200)
    assert run.result["return_mean"] is None
    assert run.result["why_no_return"] == "not installed"
    assert Path(run.result["policy"]).read_bytes() == run.policy.encode()


class Broken(Switches):
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        raise RuntimeError("no disc\nin the drive")


def test_a_game_that_fails_in_its_first_reset_is_reported_in_one_line(tmp_path: Path):
    with pytest.raises(
        GameFailed, match="Broken failed in its first reset: RuntimeError: no disc in the drive;"
    ):
        train(tmp_path / "R", Broken, steps=256)
    assert not (tmp_path / "R").exists()


def test_a_store_can_be_learned_from_where_the_game_fails(
    tmp_path: Path, trained: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Switches, "reset", Broken.reset)
    run = train(tmp_path / "R", algorithm="bc", from_store=trained.folder, steps=200)
    assert run.result["return_mean"] is None
    assert "failed in its first reset: RuntimeError: no disc" in run.result["why_no_return"]


def test_a_game_that_was_recorded_with_other_spaces_is_not_evaluated_and_the_reason_is_told(
    tmp_path: Path, trained: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Switches, "action_space", gymnasium.spaces.Discrete(3))
    run = train(tmp_path / "R", algorithm="bc", from_store=trained.folder, steps=200)
    assert run.result["return_mean"] is None
    assert "is not the game that was recorded: its actions are" in run.result["why_no_return"]
    with pytest.raises(ConfigError, match=r"differ from those .* was trained on: actions are"):
        evaluate_run(run.folder)


def test_a_game_recorded_under_another_limit_is_evaluated(
    tmp_path: Path, trained: Run, monkeypatch: pytest.MonkeyPatch
):
    wider = gymnasium.spaces.Box(-1, 2, (2,), np.float32)
    monkeypatch.setattr(Switches, "observation_space", wider)
    monkeypatch.setattr(gymnasium.spec("Switches-v0"), "max_episode_steps", 10)
    run = train(tmp_path / "R", algorithm="bc", from_store=trained.folder, steps=200)
    assert run.result["return_mean"] is not None
    assert run.result["why_no_return"] == ""


@pytest.fixture(scope="module")
def long_played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that is long enough that most of its play is good."""
    out = tmp_path_factory.mktemp("long") / "R"
    return train(out, algorithm="dqn", seed=3, steps=4_000).folder


IQL = {"widths": [8], "batch": 32, "learning_rate": 1e-2, "updates_per_call": 16}


@pytest.mark.parametrize(("algorithm", "settings"), [("bc", {"learning_rate": 1e-2}), ("iql", IQL)])
def test_what_a_run_played_can_be_learned_from_without_playing(
    tmp_path: Path, long_played: Path, algorithm: str, settings: dict[str, Any]
):
    run = train(
        tmp_path / "R",
        algorithm=algorithm,
        from_store=long_played,
        steps=600,
        settings=settings,
    )
    assert run.result["env_steps"] == 0
    assert run.result["updates"] >= 600
    assert run.result["return_mean"] > 8


def test_iql_also_learns_from_its_own_actors(tmp_path: Path):
    run = train(tmp_path / "R", algorithm="iql", steps=3_000, settings=IQL)
    assert run.result["env_steps"] >= 3_000
    assert run.result["return_mean"] > 8


# --- Wrappers -------------------------------------------------------------------------------------


NORMALIZE = "gymnasium.wrappers:NormalizeReward"


def normalized() -> Any:
    return gymnasium.wrappers.NormalizeReward(Switches())


@pytest.mark.parametrize(("game", "wrapper"), [(GAME, NORMALIZE), (normalized, ())])
@pytest.mark.parametrize("algorithm", ["dqn", "ppo"])
def test_returns_are_those_of_the_game_below_its_wrappers(
    algorithm: str, game: Any, wrapper: Any, tmp_path: Path
):
    heard: list[Event] = []
    run = train(
        tmp_path / "R",
        game,
        algorithm=algorithm,
        wrapper=wrapper,
        steps=512,
        on_event=heard.append,
    )
    seeds = held_out_seeds(100, series=AT_THE_END)
    raw = evaluate(run.policy, make_envs(Switches, 10), seeds=seeds).returns
    assert run.result["return_mean"] == raw.mean()
    played = evaluate_run(run.folder, episodes=10, seeds=1, game=None if game == GAME else game)
    assert float(10 * played.mean).is_integer()
    returns = [event.return_ for event in heard if isinstance(event, EpisodeEnded)]
    assert returns
    assert all(one.is_integer() and 0 <= one <= 10 for one in returns)


def test_a_wrapper_may_be_for_training_only(tmp_path: Path):
    heard: list[Event] = []
    wrapper = ["train:tests.platform.switches:Short", "train:tests.platform.switches:Unpaid"]
    run = train(
        tmp_path / "R", wrapper=wrapper[:1], steps=512, settings=QUICK, on_event=heard.append
    )
    assert {event.length for event in heard if isinstance(event, EpisodeEnded)} == {3}
    assert run.policy.game.max_episode_steps is None
    assert run.result["return_mean"] > 3, "an evaluation has ten presses"
    assert RunFolder(run.folder).facts()["wrappers"] == wrapper[:1]
    (run.folder / "result.json").unlink()
    with pytest.raises(ConfigError, match="was started with wrappers"):
        train(run.folder, wrapper=wrapper, resume=True)
    assert train(run.folder, None, resume=True).result["return_mean"] == run.result["return_mean"]
    with pytest.raises(ConfigError, match="in training only, where its policy could not be eval"):
        train(tmp_path / "S", wrapper="train:tests.platform.switches:Brighter", steps=256)


@pytest.mark.parametrize(
    ("game", "wrapper"),
    [
        (GAME, "gymnasium.wrappers:NormalizeObservation"),
        (GAME, "train:gymnasium.wrappers:NormalizeObservation"),
        (GAME, ["gymnasium.wrappers:NormalizeObservation", NORMALIZE]),
        (lambda: gymnasium.wrappers.NormalizeObservation(Switches()), ()),
    ],
)
def test_statistics_of_observations_that_would_stay_in_the_envs_are_rejected(
    game: Any, wrapper: Any, tmp_path: Path
):
    with pytest.raises(
        ConfigError, match=r"NormalizeObservation around .*set observation_norm=true"
    ):
        train(tmp_path / "R", game, wrapper=wrapper, steps=256)
    assert not (tmp_path / "R").exists()


def test_frozen_statistics_are_a_part_of_the_game(tmp_path: Path):
    def frozen() -> Any:
        env = gymnasium.wrappers.NormalizeObservation(Switches())
        env.update_running_mean = False
        return env

    assert train(tmp_path / "R", frozen, steps=256).result["return_mean"] is not None


@pytest.mark.parametrize("algorithm", ["dqn", "ppo"])
def test_statistics_of_observations_travel_with_the_policy(algorithm: str, tmp_path: Path):
    run = train(
        tmp_path / "R", algorithm=algorithm, steps=2_048, settings={"observation_norm": True}
    )
    mean = run.policy.weights["inputs.obs.0.mean"]
    assert np.abs(mean - 0.5).max() < 0.1, "each of two switches is lit half of the time"
    assert run.policy.act(LIT_LEFT) == 0
    assert run.policy.act(LIT_LEFT[::-1]) == 1


# --- Rewards that are no numbers ------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["dqn", "ppo"])
def test_a_run_that_could_not_learn_raises(algorithm: str, tmp_path: Path):
    with pytest.raises(
        LearningFailed, match=r"nothing was learned: \d+ chunks .*R/guarded\.csv has the reasons"
    ):
        train(
            tmp_path / "R",
            algorithm=algorithm,
            wrapper="tests.platform.switches:Unpaid",
            steps=2_048,
        )
    assert (tmp_path / "R" / "guarded.csv").exists()
    assert not (tmp_path / "R" / "result.json").exists()
    with pytest.raises(LearningFailed, match="nothing was learned"):
        train(tmp_path / "R", None, resume=True)


def test_a_run_that_was_stopped_before_it_could_learn_does_not_raise(tmp_path: Path):
    run = train(
        tmp_path / "R",
        wrapper="tests.platform.switches:Unpaid",
        steps=2_048,
        on_event=stop_at(512),
    )
    assert run.result["updates"] == 0


# --- Games without a step limit -------------------------------------------------------------------


def test_episodes_that_do_not_end_are_cut_and_the_run_says_so(tmp_path: Path):
    heard: list[Event] = []
    run = train(
        tmp_path / "R",
        env_kwargs={"presses": 10**9},
        steps=256,
        settings={"eval_max_steps": 30},
        on_event=heard.append,
    )
    assert run.result["return_mean"] <= 30
    assert (run.result["cut_episodes"], run.result["eval_max_steps"]) == (100, 30)
    assert [event.n_cut for event in heard if isinstance(event, Evaluation)] == [5]
    found = evaluate_run(run.folder, episodes=4, seeds=2)
    assert (found.cut, found.max_steps) == (8, 30)
    found = evaluate_run(run.folder, episodes=4, seeds=2, max_steps=20)
    assert (found.cut, found.max_steps) == (8, 20)
    assert found.mean <= 20
    with pytest.raises(ConfigError, match="max_steps is 0"):
        evaluate_run(run.folder, max_steps=0)


def test_episodes_that_end_are_not_cut(trained: Run):
    assert trained.result["cut_episodes"] == 0
    assert evaluate_run(trained.folder, episodes=4, seeds=2).cut == 0


# --- Schedules ------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["dqn", "ppo"])
def test_fewer_steps_do_not_shorten_the_schedules_of_a_preset(algorithm: str, tmp_path: Path):
    settings = {"min_inserts": 256} if algorithm == "dqn" else {}
    heard: list[Event] = []
    whole = train(
        tmp_path / "whole",
        algorithm=algorithm,
        until=np.inf,
        settings=settings,
        on_event=stop_at(1_024),
    )
    cut = train(
        tmp_path / "cut",
        algorithm=algorithm,
        steps=1_024,
        settings=settings,
        on_event=heard.append,
    )
    last = [(run.folder / "last.safetensors").read_bytes() for run in (whole, cut)]
    assert last[0] == last[1]
    name = "epsilon" if algorithm == "dqn" else "learning_rate"
    started = heard[0]
    assert isinstance(started, Started)
    assert (started.steps, started.horizon) == (1_024, 100_000)
    assert started.cut_schedules.keys() >= {name}
    assert cut.result["horizon"] == whole.result["horizon"] == 100_000
    assert cut.result["cut_schedules"][name][0] > cut.result["cut_schedules"][name][1]
    assert whole.result["cut_schedules"] == {}
    fitted = train(
        tmp_path / "fitted",
        algorithm=algorithm,
        steps=1_024,
        settings={**settings, "horizon": 1_024},
    )
    assert fitted.result["cut_schedules"] == {}
    assert (fitted.folder / "last.safetensors").read_bytes() != last[1]


# --- Events ---------------------------------------------------------------------------------------


def stop_at(env_steps: int) -> Any:
    return lambda event: understudy.Stop if event.env_steps >= env_steps else None


def test_events_are_typed_and_come_in_order(tmp_path: Path):
    heard: list[Event] = []
    train(
        tmp_path / "R",
        algorithm="dqn",
        steps=1_536,
        settings={"eval_every": 512},
        on_event=heard.append,
    )
    assert isinstance(heard[0], Started)
    assert (heard[0].run, heard[0].steps, heard[0].until) == (str(tmp_path / "R"), 1_536, None)
    assert {type(event) for event in heard} >= {
        EpisodeEnded,
        Update,
        Evaluation,
        CheckpointSaved,
        Compiling,
    }
    assert [event.env_steps for event in heard] == sorted(event.env_steps for event in heard)
    assert sum(isinstance(event, Evaluation) for event in heard) == 3
    assert understudy.events.Evaluation is Evaluation


def test_stop_ends_a_run_cleanly(tmp_path: Path):
    run = train(tmp_path / "R", steps=100_000, on_event=stop_at(512))
    assert 512 <= run.result["env_steps"] <= 768
    assert run.result["episodes"] == 100
    assert (tmp_path / "R" / "result.json").exists()


# --- Resuming -------------------------------------------------------------------------------------


def test_a_crashed_run_resumes_and_ends_bit_identical(tmp_path: Path, trained: Run):
    with pytest.raises(Crash):
        train(tmp_path / "R", algorithm="dqn", seed=3, steps=2_000, on_event=crash_at(1_500))
    assert not list(tmp_path.rglob("*.tmp"))
    run = train(tmp_path / "R", algorithm="dqn", seed=3, steps=2_000, resume=True)
    assert run.result["resumed_at_step"] > 0
    assert (run.result["env_steps"], run.result["updates"]) == (2_048, 512)
    last, straight = [
        (one / "last.safetensors").read_bytes() for one in (tmp_path / "R", trained.folder)
    ]
    assert last == straight


def test_a_crashed_run_with_a_replay_named_by_import_path_resumes_and_ends_bit_identical(
    tmp_path: Path, trained: Run
):
    asked: dict[str, Any] = {"algorithm": "dqn", "seed": 3, "steps": 2_000}
    asked["settings"] = {"replay": "tests.learn.replays:FifoReplay"}
    straight = train(tmp_path / "S", **asked)
    with pytest.raises(Crash):
        train(tmp_path / "R", **asked, on_event=crash_at(1_500))
    run = understudy.train(out=tmp_path / "R", resume=True)
    assert run.result["resumed_at_step"] > 0
    last, uninterrupted, of_host = [
        (folder / "last.safetensors").read_bytes()
        for folder in (run.folder, straight.folder, trained.folder)
    ]
    assert last == uninterrupted
    assert last != of_host, "another replay draws other steps"
    with pytest.raises(ConfigError, match="started with replay"):
        understudy.train(out=run.folder, resume=True, settings={"replay": "host"})


@pytest.mark.parametrize(
    ("replay", "said"),
    [
        ("fast", "there is no replay 'fast'; known are device, host"),
        ("tests.learn.replays:NeverCreated", "cannot be created: KeyError: 'a mistake'; "),
        ("tests.learn.replays:HalfAReplay", "lacks draw, needed_chunks, state and restore"),
    ],
)
def test_a_run_with_a_replay_that_is_none_leaves_no_folder(replay: str, said: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=said):
        train(tmp_path / "R", algorithm="dqn", settings={"replay": replay})
    assert not (tmp_path / "R").exists()


@pytest.mark.parametrize("part", ["n_sampleable", "insert", "draw", "state"])
def test_an_error_in_a_custom_replay_names_the_class_and_the_method(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(WithFaults, "fails_in", part)
    name = "tests.learn.replays:WithFaults"
    said = rf"replay '{name}' failed in {part}.*: KeyError: 'a mistake in {part}'; .*ReplayContract"
    with pytest.raises(LearningFailed, match=said) as raised:
        train(tmp_path / "R", algorithm="dqn", steps=1_500, settings={"replay": name})
    assert isinstance(raised.value.__cause__, KeyError)


class FailingAlgorithm(Dqn):
    """Fails in the method that its class attribute names."""

    fails_in = ""

    def _fail(self, part: str) -> None:
        if self.fails_in == part:
            raise KeyError(f"a mistake in {part}")

    def init(self, *arguments: Any) -> Any:
        self._fail("init")
        return super().init(*arguments)

    def policy(self, state: Any) -> Policy:
        self._fail("policy")
        return super().policy(state)

    def update(self, *arguments: Any) -> Any:
        self._fail("update")
        return super().update(*arguments)


@pytest.mark.parametrize("part", ["init", "policy", "update"])
def test_an_error_in_a_custom_algorithm_names_the_class_and_the_method(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(FailingAlgorithm, "fails_in", part)
    said = rf"FailingAlgorithm' failed in {part}\(\): KeyError: 'a mistake in {part}'; .*Contract"
    with pytest.raises(LearningFailed, match=said) as raised:
        train(tmp_path / "R", algorithm=FailingAlgorithm, steps=1_500)
    assert isinstance(raised.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("asked", "until"),
    [
        ({}, 9.0),
        ({"steps": 512}, None),
        ({"steps": 512, "until": 8}, 8.0),
        ({"settings": {"until": 7}}, 7.0),
    ],
)
def test_a_preset_of_a_run_has_its_goal_too(
    asked: dict[str, Any], until: float | None, tmp_path: Path
):
    stop = stop_at(256)
    first = train(tmp_path / "R", **asked, on_event=stop)
    preset = str(first.folder / "preset.toml")
    options = understudy.TrainOptions(preset=preset)
    again = understudy.train(GAME, options=options, out=tmp_path / "S", on_event=stop)
    assert (tmp_path / "S" / "preset.toml").read_text() == Path(preset).read_text()
    assert first.result["until"] == again.result["until"] == until
    other = understudy.train(GAME, options=options, until=3.5, out=tmp_path / "T", on_event=stop)
    assert other.result["until"] == 3.5
    (tmp_path / "R" / "result.json").unlink()
    resumed = understudy.train(GAME, options=options, out=first.folder, resume=True, on_event=stop)
    assert resumed.result["until"] == until


def test_a_finished_run_is_returned_unchanged(trained: Run):
    again = understudy.train(out=trained.folder, resume=True)
    assert again.result == trained.result
    assert again.policy == trained.policy


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"game": "CartPole-v1"}, "started with game"),
        ({"seed": 4}, "started with seed 3, not 4"),
        ({"algorithm": "ppo"}, "started with algorithm 'dqn'"),
        ({"steps": 1_000}, "started with steps 2000"),
        ({"until": 5.0}, "started without until, not "),
        ({"network": (9, 9)}, "started with widths"),
        ({"settings": {"learning_rate": 0.5}}, "started with learning_rate"),
        ({"frame_skip": 2}, "started with frame_skip 1"),
        ({"env_kwargs": {"presses": 3}}, "started with env_kwargs"),
        ({"wrapper": "tests.platform.switches:Brighter"}, "started with wrappers"),
        ({"init_from": "elsewhere"}, "started without init_from, not "),
        ({"from_store": "elsewhere"}, "started without from_store, not "),
        ({"preset": "ppo-vector"}, "started with"),
    ],
)
def test_a_run_is_not_resumed_with_other_arguments(trained: Run, asked: dict[str, Any], said: str):
    asked = {"game": GAME, **asked}
    with pytest.raises(ConfigError, match=said):
        understudy.train(asked.pop("game"), out=trained.folder, resume=True, **with_options(asked))


def test_a_run_on_an_env_object_resumes_when_the_object_is_passed_again(tmp_path: Path):
    with pytest.raises(Crash):
        train(tmp_path / "R", Switches(), steps=1_024, on_event=crash_at(512))
    with pytest.raises(
        ConfigError, match=r"use Python, where .*: train\(env, out='.*/R', resume=True\)"
    ):
        understudy.train(out=tmp_path / "R", resume=True)
    assert train(tmp_path / "R", Switches(), resume=True).result["env_steps"] == 1_024


def test_omitted_arguments_of_an_env_object_come_from_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    filmed: list[GameChoice] = []

    def film(choice: GameChoice, *_: Any, **__: Any) -> list[Path]:
        filmed.append(choice)
        return []

    monkeypatch.setattr("understudy.training.train.film", film)

    def lit() -> Switches:
        return Switches(render_mode="rgb_array")

    with pytest.raises(Crash):
        train(
            tmp_path / "R", lit, wrapper=Brighter, frame_skip=2, steps=1_024, on_event=crash_at(512)
        )
    run = train(tmp_path / "R", lit, resume=True, video=1)
    assert run.policy.game.obs[""] == Box((2,), np.dtype(np.float32), 0.0, 2.0)
    assert run.result["env_steps"] == 1_024
    assert [(one.game, one.frame_skip, list(one.wrappers)) for one in filmed] == [
        (lit, 2, ["tests.platform.switches:Brighter"])
    ]
    assert evaluate_run(run.folder, game=lit, episodes=2, seeds=1).played == 2
    other = choice_of(RunFolder(run.folder).facts(), GameChoice(game=lit, frame_skip=3))
    assert (other.frame_skip, other.wrappers) == (3, ["tests.platform.switches:Brighter"])


def test_a_run_killed_before_its_start_starts(tmp_path: Path):
    (tmp_path / "R").mkdir()
    (tmp_path / "R" / "preset.toml").write_text("")
    assert train(tmp_path / "R", steps=256, resume=True).result["resumed_at_step"] == 0


# --- Errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"game": None}, "no game was given"),
        ({"game": 7}, "use a Gymnasium id"),
        ({"game": CartPoleVector(3), "frame_skip": 2}, "a vector env is used unchanged"),
        ({"game": CartPoleVector(3), "settings": {"envs": 4}}, "has 3 envs, and 4 were requested"),
        ({"game": "CartPol-v1"}, "did you mean CartPole-v1"),
        ({"algorithm": "dqm"}, "did you mean 'dqn'"),
        ({"algorithm": "nowhere:Algorithm"}, "cannot be imported"),
        ({"algorithm": "json:JSONDecoder"}, "no dataclass `Config`"),
        ({"algorithm": Switches}, "no dataclass `Config`"),
        ({"preset": "dqn-vecto"}, "did you mean 'dqn-vector'"),
        ({"config": "nothing.toml"}, "cannot be read"),
        ({"settings": {"lerning_rate": 1}}, "did you mean 'learning_rate'"),
        ({"settings": {"learning_rate": 7}}, "give 0 to 1: learning rate of Adam"),
        ({"settings": {"network": "64"}}, "give the widths of its layers"),
        ({"network": "64,x"}, "such as 64,64"),
        ({"network": ()}, "such as 64,64"),
        ({"network": (64, 0)}, "such as 64,64"),
        ({"network": "json:dumps"}, "give the import path of a NetworkSpec"),
        ({"wrapper": "nowhere:Wrapper"}, "cannot be imported"),
        ({"wrapper": "json:dumps"}, "check wrappers"),
        (
            {"wrapper": functools.partial(Brighter)},
            "cannot be imported, .* give a function that creates the wrapped env",
        ),
        ({"wrapper": lambda env: Brighter(env)}, "<lambda>' cannot be imported, so"),
        ({"env_kwargs": {"nope": 1}}, "does not accept"),
        ({"env_kwargs": {"presses": object()}}, "give JSON values"),
        ({"env_kwargs": [1]}, "give an object"),
        ({"frame_skip": 0}, "frame_skip is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"until": float("nan")}, "until is nan"),
        ({"settings": {"until": "soon"}}, "until is 'soon'; give the return to reach"),
        ({"steps": 0}, "steps is 0"),
        ({"settings": {"eval_every": 0}}, "eval_every is 0"),
        ({"init_from": "nowhere"}, "has no policy"),
        ({"from_store": "nowhere"}, "nowhere contains no store"),
        ({"resume": True, "out": None}, "no run to resume was given"),
        ({"resume": True, "game": None}, "is not a run"),
        ({"video": -1}, "video is -1"),
        ({"on_event": "x"}, "on_event is 'x'; give a function that accepts an event"),
        ({"algorithm": 3}, "algorithm is '3'; give a name"),
        ({"out": 3}, "'3' is not a path"),
        ({"log": "tensorbord"}, "give one or more of mlflow, tensorboard, wandb"),
        ({"game": "Pendulum-v1", "algorithm": "dqn"}, "use ppo"),
    ],
)
def test_invalid_arguments_are_rejected_before_anything_is_written(
    asked: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    asked = {"game": GAME, "out": Path("deep/er/R"), "steps": 256, **asked}
    with pytest.raises(ConfigError, match=said):
        understudy.train(asked.pop("game"), **with_options(asked))
    assert list(tmp_path.iterdir()) == []


def test_a_policy_of_another_game_is_rejected_and_an_empty_folder_stays(
    tmp_path: Path, trained: Run
):
    (tmp_path / "R").mkdir()
    with pytest.raises(
        ConfigError,
        match=r"none of its weight matrices .* is 2 x 64 there, and 4 x 9 here\); choos",
    ):
        understudy.train(
            "CartPole-v1",
            algorithm="dqn",
            out=tmp_path / "R",
            options=understudy.TrainOptions(network=(9,), init_from=trained.folder),
        )
    assert list(tmp_path.rglob("*")) == [tmp_path / "R"]
    with pytest.raises(ConfigError, match="learns only from its own play"):
        train(tmp_path / "R", algorithm="ppo", from_store=trained.folder)
    options = understudy.TrainOptions(from_store=trained.folder)
    with pytest.raises(
        ConfigError,
        match=f"no experience of CartPole-v1; .*: understudy data stats --data {trained.folder}; ",
    ):
        understudy.train("CartPole-v1", algorithm="bc", out=tmp_path / "R", options=options)


def test_a_folder_that_cannot_be_removed_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def busy(path: Path) -> None:
        raise OSError(f"{path} is busy")

    monkeypatch.setattr(Path, "rmdir", busy)
    with pytest.raises(ConfigError, match="use ppo"):
        understudy.train("Pendulum-v1", algorithm="dqn", out=tmp_path / "deep" / "R")


def test_a_folder_with_something_in_it_is_never_written_to(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="is not empty"):
        train(tmp_path, steps=256)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_is_rejected_as_folder_of_a_run(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"thesis\.txt is a file; give a folder"):
        train(tmp_path / "thesis.txt", steps=256)


def test_a_run_that_another_process_has_open_is_left_alone(tmp_path: Path):
    with (
        FileLock(tmp_path / "R" / ".lock", what="the run"),
        pytest.raises(Locked, match="in use by another process"),
    ):
        train(tmp_path / "R", steps=256)
    assert [path.name for path in (tmp_path / "R").iterdir()] == [".lock"]


def test_train_has_at_most_ten_parameters():
    assert len(inspect.signature(understudy.train).parameters) <= 10


# --- Importing ------------------------------------------------------------------------------------


def test_importing_understudy_is_cheap_and_stop_needs_no_jax():
    code = "import sys, understudy; understudy.Stop, understudy.events.Update; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert {"jax", "gymnasium", "numba", "click", "rich"}.isdisjoint(loaded)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = understudy.trian


def test_dir_shows_the_public_names_and_each_can_be_loaded():
    assert dir(understudy) == sorted(understudy.__all__)
    for name in dir(understudy):
        assert getattr(understudy, name) is not None


def test_a_missing_package_is_reported_with_its_install_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(understudy._LAZY, "train", f"no_such_package_{uuid.uuid4().hex}:train")
    with pytest.raises(MissingExtra, match=r"pip install 'understudy\[platform\]'"):
        _ = understudy.train
