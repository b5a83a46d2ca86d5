"""Evaluation returns the same for a seed, whatever other seeds are played beside it."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import NormalizeReward

from tests.act.envs import MaskedEnv, MixedEnv, PlainEnv
from tests.act.policies import random_policy
from understudy.act.actor import Actor
from understudy.act.evaluate import evaluate
from understudy.act.vector import game_of, make_envs
from understudy.core.errors import ConfigError
from understudy.nn.policy import Policy

SEEDS = [11, 5, 17, 3, 8, 29, 41]


def by_hand(policy: Policy, env: Any, seed: int) -> float:
    """Play one episode with the policy's player and return its return."""
    (obs, info), player, total, ended = env.reset(seed=seed), policy.player(), 0.0, False
    player.reset()
    while not ended:
        action = player.act(obs, action_mask=info.get("action_mask"))
        obs, reward, terminated, truncated, info = env.step(action)
        total = total + float(reward)
        ended = terminated or truncated
    return total


@pytest.mark.parametrize(
    ("make", "kind", "stack"),
    [
        (PlainEnv, "epsilon_greedy", 1),
        (PlainEnv, "categorical", 3),
        (MaskedEnv, "categorical", 1),
        (MixedEnv, "gaussian_tanh", 1),
    ],
)
@pytest.mark.parametrize("num_envs", [1, 3, 9])
def test_returns_are_those_of_episodes_played_alone(
    make: Any, kind: str, stack: int, num_envs: int
):
    policy = random_policy(game_of(make_envs(make, 1)), kind, stack=stack)
    got = evaluate(policy, make_envs(make, num_envs), seeds=SEEDS, episodes=7)
    assert got.returns.dtype == np.float64
    assert got.n_cut == 0
    # The rounding of a row's float32 sums may depend on the batch size; discrete games hide that, a
    # reward that depends on a continuous action shows it.
    rtol = 1e-5 if kind == "gaussian_tanh" else 1e-9
    expected = [by_hand(policy, make(), seed) for seed in SEEDS]
    np.testing.assert_allclose(got.returns, expected, rtol=rtol)


def test_noise_is_a_function_of_the_seeds():
    policy = random_policy(game_of(make_envs(PlainEnv, 1)), "categorical")
    first, second = (
        evaluate(policy, make_envs(PlainEnv, 4), seeds=SEEDS, deterministic=False).returns
        for _ in range(2)
    )
    assert first.tobytes() == second.tobytes()
    greedy = evaluate(policy, make_envs(PlainEnv, 4), seeds=SEEDS).returns
    assert first.tobytes() != greedy.tobytes()


@pytest.mark.parametrize(("seeds", "episodes"), [([], None), ([1, 2], 3)])
def test_seeds_and_episodes_must_agree(seeds: list[int], episodes: int | None):
    policy = random_policy(game_of(make_envs(PlainEnv, 1)), "categorical")
    with pytest.raises(ConfigError, match="one seed per episode"):
        evaluate(policy, make_envs(PlainEnv, 1), seeds=seeds, episodes=episodes)


class EndlessEnv(PlainEnv):
    """Never ends."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, _, _, _, info = super().step(action)
        return obs, 1.0, False, False, info


def test_an_endless_episode_is_cut_and_counted():
    policy = random_policy(game_of(make_envs(EndlessEnv, 1)), "categorical")
    got = evaluate(policy, make_envs(EndlessEnv, 2), seeds=[1, 2, 3], max_steps=25)
    assert got.returns.tolist() == [25.0] * 3
    assert got.n_cut == 3


def test_only_episodes_that_had_not_ended_count_as_cut():
    policy = random_policy(game_of(make_envs(PlainEnv, 1)), "categorical")
    lengths = []
    for seed in SEEDS:
        env = PlainEnv()
        by_hand(policy, env, seed)
        lengths.append(env.n_steps)
    limit = sorted(lengths)[3]
    got = evaluate(policy, make_envs(PlainEnv, 2), seeds=SEEDS, max_steps=limit)
    assert got.n_cut == sum(length > limit for length in lengths) > 0


class LimitedEnv(EndlessEnv):
    """Never ends, but has a step limit."""

    spec = EnvSpec("Limited-v0", max_episode_steps=7)


def test_an_episode_that_ends_at_the_limit_of_its_game_is_not_cut():
    policy = random_policy(game_of(make_envs(LimitedEnv, 1)), "categorical")
    got = evaluate(policy, make_envs(LimitedEnv, 2), seeds=[1, 2, 3], max_steps=5)
    assert got.returns.tolist() == [7.0] * 3
    assert got.n_cut == 0


# --- Wrappers -------------------------------------------------------------------------------------


class Twice(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Repeats each action, and returns a reward of its own."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        for _ in range(2):
            obs, _, terminated, truncated, info = super().step(action)
            if terminated or truncated:
                break
        return obs, -1000.0, terminated, truncated, info


class Clipped(gymnasium.RewardWrapper[Any, Any]):
    """Returns only the sign of a reward."""

    def reward(self, reward: Any) -> float:
        return float(np.sign(reward))


def normalized() -> Any:
    return NormalizeReward(PlainEnv())


@pytest.mark.parametrize(
    ("make", "wrappers"),
    [
        (PlainEnv, [NormalizeReward]),
        (PlainEnv, ["gymnasium.wrappers:NormalizeReward", Clipped]),
        (normalized, []),
        (normalized, [Clipped]),
    ],
)
@pytest.mark.parametrize("num_envs", [1, 3])
def test_returns_are_those_of_the_game_whatever_its_wrappers_make_of_rewards(
    make: Any, wrappers: list[Any], num_envs: int
):
    policy = random_policy(game_of(make_envs(PlainEnv, 1)), "categorical")
    expected = [by_hand(policy, PlainEnv(), seed) for seed in SEEDS]
    envs = make_envs(make, num_envs, wrappers=wrappers)
    for _ in range(2):  # the statistics of the wrappers move on
        got = evaluate(policy, envs, seeds=SEEDS)
        np.testing.assert_allclose(got.returns, expected, rtol=1e-9)


def test_rewards_of_steps_inside_a_wrapper_are_counted():
    policy = random_policy(game_of(make_envs(PlainEnv, 1)), "categorical")
    expected = evaluate(policy, make_envs(PlainEnv, 2, frame_skip=2), seeds=SEEDS).returns
    got = evaluate(policy, make_envs(PlainEnv, 2, wrappers=[Twice]), seeds=SEEDS).returns
    np.testing.assert_allclose(got, expected, rtol=1e-9)


# --- Vector envs ----------------------------------------------------------------------------------


def vectors(
    num_envs: int, make: Any = PlainEnv, mode: AutoresetMode = AutoresetMode.DISABLED
) -> Any:
    return SyncVectorEnv([make] * num_envs, autoreset_mode=mode)


def normalized_inside(num_envs: int, **options: Any) -> Any:
    return gymnasium.wrappers.vector.RecordEpisodeStatistics(
        vectors(num_envs, normalized, **options)
    )


def normalized_in_some(num_envs: int, mode: AutoresetMode = AutoresetMode.DISABLED) -> Any:
    makes = [normalized if env == 0 else PlainEnv for env in range(num_envs)]
    return SyncVectorEnv(makes, autoreset_mode=mode)


def normalized_around(num_envs: int, **options: Any) -> Any:
    return gymnasium.wrappers.vector.NormalizeReward(vectors(num_envs, **options))


def normalized_twice(num_envs: int, **options: Any) -> Any:
    return gymnasium.wrappers.vector.NormalizeReward(normalized_inside(num_envs, **options))


NORMALIZED: list[Any] = [
    normalized_inside,
    normalized_in_some,
    normalized_around,
    normalized_twice,
]


@pytest.mark.parametrize("make", NORMALIZED)
def test_returns_of_a_vector_env_are_those_below_a_normalization_of_rewards(make: Any):
    policy = random_policy(game_of(make_envs(PlainEnv, 1)), "categorical")
    expected = [by_hand(policy, PlainEnv(), seed) for seed in SEEDS]
    for game in (make, make(3)):
        for _ in range(2):  # a vector env that was passed is used again
            got = evaluate(policy, make_envs(game, 3), seeds=SEEDS)
            np.testing.assert_allclose(got.returns, expected, rtol=1e-9)


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("make", NORMALIZED)
def test_returns_of_training_episodes_are_those_below_a_normalization_of_rewards(
    make: Any, mode: AutoresetMode
):
    game = game_of(make_envs(PlainEnv, 1))
    policy = random_policy(game, "categorical")

    def returns(make: Any) -> list[float]:
        envs = make_envs(make(3, mode=mode), 3, may_autoreset=True)
        actor = Actor(envs, game, root_seed=1, created_ms=0)
        played = actor.collect(policy, 100, round_no=0).episodes
        return [episode.return_ for episode in played]

    expected = returns(vectors)
    assert len(expected) > 5
    np.testing.assert_allclose(returns(make), expected, rtol=1e-9)


def test_a_normalization_of_rewards_in_other_processes_is_rejected():
    def parallel(num_envs: int, make: Any = normalized) -> Any:
        return AsyncVectorEnv([make] * num_envs, autoreset_mode=AutoresetMode.DISABLED)

    with pytest.raises(ConfigError, match=r"NormalizeReward inside .*AsyncVectorEnv.*around"):
        make_envs(parallel, 2)
    policy = random_policy(game_of(make_envs(PlainEnv, 1)), "categorical")
    around = gymnasium.wrappers.vector.NormalizeReward(parallel(2, PlainEnv))
    got = evaluate(policy, make_envs(around, 2), seeds=SEEDS)
    around.close()
    expected = [by_hand(policy, PlainEnv(), seed) for seed in SEEDS]
    np.testing.assert_allclose(got.returns, expected, rtol=1e-9)
