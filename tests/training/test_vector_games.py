"""Runs on vector envs: those that reset themselves are trained on asynchronously."""

import functools
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper

import understudy
from tests.platform.switches import QUICK, Switches
from tests.training.arguments import with_options
from understudy.act.evaluate import evaluate
from understudy.act.vector import make_envs
from understudy.act.vector_envs import CartPoleVector
from understudy.core.errors import ConfigError
from understudy.experience.chunk import RowKind
from understudy.stores.view import StoreView
from understudy.training.env_info import GameChoice, inspect_env
from understudy.training.evaluation import AT_THE_END, evaluate_run, held_out_seeds
from understudy.training.events import EpisodeEnded
from understudy.training.train import Run

ASYNCHRONOUS = QUICK | {"asynchronous": True}
SELF_RESETTING = [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP]


def switches(num_envs: int, mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> Any:
    return SyncVectorEnv([Switches] * num_envs, autoreset_mode=mode)


def cartpoles(num_envs: int, mode: AutoresetMode) -> Any:
    return gymnasium.make_vec(
        "CartPole-v1", num_envs, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode}
    )


def train(out: Path, game: Any, **asked: Any) -> Run:
    asked["settings"] = ASYNCHRONOUS | asked.get("settings", {})
    return understudy.train(game, out=out, **with_options({"algorithm": "dqn", **asked}))


# What is recorded is compared for both modes in tests/act/test_autoreset.py.
@pytest.mark.parametrize(
    "mode",
    [pytest.param(AutoresetMode.SAME_STEP, marks=pytest.mark.slow), AutoresetMode.NEXT_STEP],
)
def test_dqn_learns_on_a_cartpole_that_resets_itself(mode: AutoresetMode, tmp_path: Path):
    envs = cartpoles(8, mode)
    run = train(tmp_path / "R", envs, steps=12_000, settings={"eval_episodes": 20}, seed=1)
    assert run.result["return_mean"] > 60  # random play: 22
    assert run.result["episodes"] == 100
    assert run.result["env_steps"] >= 12_000
    envs.reset()  # it belongs to the caller, who may use it again


@pytest.mark.parametrize("mode", SELF_RESETTING)
def test_the_store_of_a_run_has_whole_episodes_only(mode: AutoresetMode, tmp_path: Path):
    run = train(tmp_path / "R", functools.partial(switches, mode=mode), steps=2_000)
    with StoreView(run.folder / "store") as view:
        chunks = [item.chunk for item in view.tail(None, max_items=10_000, wait_s=0.0).items]  # type: ignore[union-attr]
    n_steps = 0
    length = dict[Any, int]()
    for chunk in chunks:
        assert chunk is not None
        for row, kind in enumerate(chunk.columns["row"]):
            if chunk.columns["is_first"][row]:
                assert length.get(chunk.meta.session, 10) == 10, "ten presses an episode"
                length[chunk.meta.session] = 0
            n_steps += kind == RowKind.STEP
            length[chunk.meta.session] += kind == RowKind.STEP
    assert n_steps == run.result["env_steps"]
    assert len(length) == 8


@pytest.mark.parametrize("mode", SELF_RESETTING)
@pytest.mark.parametrize("algorithm", ["dqn", "ppo"])
def test_a_lock_step_run_rejects_a_vector_env_that_resets_itself(
    mode: AutoresetMode, algorithm: str, tmp_path: Path
):
    says = r"resets its envs itself.*rebuilt.*asynchronous=true.*off-policy.*DISABLED"
    for game in (switches(8, mode), functools.partial(switches, mode=mode)):
        with pytest.raises(ConfigError, match=says):
            train(tmp_path / "R", game, settings={"asynchronous": False}, algorithm=algorithm)
    assert list(tmp_path.iterdir()) == []


def test_a_vector_env_that_the_run_resets_is_trained_on_in_lock_step(tmp_path: Path):
    lock_step = {"asynchronous": False}
    results = []
    for number, game in enumerate((CartPoleVector(3), CartPoleVector(3), CartPoleVector)):
        more = {"envs": 3} if game is CartPoleVector else {}
        run = train(tmp_path / f"{number}", game, steps=2_048, settings=lock_step | more)
        results.append((run.result["return_mean"], run.result["train_episodes"]))
    assert results[0] == results[1] == results[2]
    single = train(
        tmp_path / "single", "CartPole-v1", steps=2_048, settings=lock_step | {"envs": 3}
    )
    assert results[0] == (single.result["return_mean"], single.result["train_episodes"])


def test_a_run_on_a_vector_env_resumes_when_it_is_passed_again(tmp_path: Path):
    train(tmp_path / "R", switches(4), steps=512)
    run = train(tmp_path / "R", switches(4), steps=1_024, resume=True)
    assert run.result["env_steps"] >= 1_024
    with pytest.raises(ConfigError, match="this one has 5 envs, and 4 were requested"):
        train(tmp_path / "R", switches(5), steps=2_048, resume=True)


# --- Evaluation -----------------------------------------------------------------------------------


def test_evaluations_play_single_envs_of_the_spec(tmp_path: Path):
    make = functools.partial(
        gymnasium.make_vec, "CartPole-v1", vectorization_mode="vector_entry_point"
    )
    run = train(tmp_path / "R", make, steps=512)
    assert 5 < run.result["return_mean"] < 500
    assert run.result["game"] == "CartPole-v1"
    again = evaluate_run(run.folder, episodes=5, seeds=1, game=make(num_envs=2))
    assert again.played == 5
    single = evaluate_run(run.folder, episodes=5, seeds=1, game="CartPole-v1")
    assert single.mean == again.mean


class NoSpec(VectorEnv[Any, Any, Any]):
    """A vector env without a spec."""

    def __init__(self, num_envs: int) -> None:
        inner = switches(num_envs)
        self.num_envs = num_envs
        self.metadata = inner.metadata
        self.single_observation_space = inner.single_observation_space
        self.single_action_space = inner.single_action_space
        self.observation_space = inner.observation_space
        self.action_space = inner.action_space
        self._inner = inner

    def reset(self, **options: Any) -> Any:
        return self._inner.reset(**options)

    def step(self, actions: Any) -> Any:
        return self._inner.step(actions)


class Negated(VectorWrapper[Any, Any, Any, Any, Any]):
    """Changes observations in a way that no space shows."""

    def reset(self, **options: Any) -> Any:
        obs, infos = self.env.reset(**options)
        return 1 - obs, infos

    def step(self, actions: Any) -> Any:
        obs, *rest = self.env.step(actions)
        return 1 - obs, *rest


def other_spaces(num_envs: int) -> Any:
    envs = NoSpec(num_envs)
    envs.spec = gymnasium.spec("CartPole-v1")
    return envs


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (NoSpec, "has no spec"),
        (lambda num_envs: Negated(switches(num_envs)), "Negated"),
        (other_spaces, "single envs differ from other_spaces: their observations are"),
    ],
)
def test_without_single_envs_there_is_no_evaluation_and_the_reason_is_told(
    make: Any, why: str, tmp_path: Path
):
    run = train(tmp_path / "R", make, steps=512)
    assert run.result["return_mean"] is None
    assert why in run.result["why_no_return"]
    assert run.result["train_episodes"] > 0
    assert run.policy.act(np.array([1, 0], np.float32)) in (0, 1)


def test_a_vector_env_does_not_film_itself(tmp_path: Path):
    with pytest.raises(ConfigError, match="has no spec"):
        train(tmp_path / "R", NoSpec, steps=512, video=1)
    assert list(tmp_path.iterdir()) == []


def normalized_obs() -> Any:
    return gymnasium.wrappers.NormalizeObservation(Switches())


def frozen_obs() -> Any:
    env = gymnasium.wrappers.NormalizeObservation(Switches())
    env.update_running_mean = False
    return env


@pytest.mark.parametrize(
    "make",
    [
        lambda num_envs: gymnasium.wrappers.vector.NormalizeObservation(switches(num_envs)),
        lambda num_envs: gymnasium.wrappers.vector.RecordEpisodeStatistics(
            SyncVectorEnv([normalized_obs] * num_envs)
        ),
        lambda num_envs: AsyncVectorEnv([normalized_obs] * num_envs),
    ],
)
def test_statistics_of_observations_in_or_around_a_vector_env_are_rejected(
    make: Any, tmp_path: Path
):
    with pytest.raises(ConfigError, match=r"NormalizeObservation around .* observation_norm"):
        train(tmp_path / "R", make, steps=512)


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_frozen_statistics_in_a_vector_env_are_a_part_of_the_game(kind: Any):
    choice = GameChoice(game=lambda num_envs: kind([frozen_obs] * num_envs))
    assert inspect_env(choice, is_training=True).spec.obs_columns["obs"].shape == (2,)


def normalized_inside(num_envs: int) -> Any:
    return SyncVectorEnv(
        [lambda: gymnasium.wrappers.NormalizeReward(Switches())] * num_envs,
        autoreset_mode=AutoresetMode.DISABLED,
    )


def normalized_around(num_envs: int) -> Any:
    return gymnasium.wrappers.vector.NormalizeReward(switches(num_envs, AutoresetMode.DISABLED))


@pytest.mark.parametrize("game", [normalized_inside, normalized_around, normalized_inside(4)])
def test_returns_of_a_vector_env_are_sums_of_rewards_below_a_normalization(
    game: Any, tmp_path: Path
):
    heard: list[Any] = []
    settings = {"asynchronous": False, "envs": 4}
    run = train(
        tmp_path / "R",
        game,
        algorithm="ppo",
        steps=512,
        settings=settings,
        on_event=heard.append,
    )
    seeds = held_out_seeds(100, series=AT_THE_END)
    raw = evaluate(run.policy, make_envs(Switches, 10), seeds=seeds).returns
    assert run.result["return_mean"] == raw.mean()
    returns = [event.return_ for event in heard if isinstance(event, EpisodeEnded)]
    assert returns
    assert all(one.is_integer() and 0 <= one <= 10 for one in returns)


def test_actors_in_processes_create_their_vector_envs_and_an_existing_one_is_not_divided(
    tmp_path: Path,
):
    run = train(
        tmp_path / "R", switches, steps=1_000, settings={"envs": 4, "actors": 2}, engine="process"
    )
    assert run.result["env_steps"] >= 1_000
    for arguments in ({"engine": "process"}, {"settings": {"actors": 2}}):
        with pytest.raises(ConfigError, match=r"vector env.*pass a function of num_envs"):
            train(tmp_path / "other", switches(4), steps=1_000, **arguments)
    assert not (tmp_path / "other").exists()
