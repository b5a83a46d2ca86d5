"""Evaluation returns the same for a seed, whatever other seeds are played beside it."""

from typing import Any

import numpy as np
import pytest

from tests.act.envs import MaskedEnv, MixedEnv, PlainEnv
from tests.act.policies import random_policy
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
    assert got.dtype == np.float64
    # The rounding of a row's float32 sums may depend on the batch size; discrete games hide that, a
    # reward that depends on a continuous action shows it.
    rtol = 1e-5 if kind == "gaussian_tanh" else 1e-9
    np.testing.assert_allclose(got, [by_hand(policy, make(), seed) for seed in SEEDS], rtol=rtol)


def test_noise_is_a_function_of_the_seeds():
    policy = random_policy(game_of(make_envs(PlainEnv, 1)), "categorical")
    first, second = (
        evaluate(policy, make_envs(PlainEnv, 4), seeds=SEEDS, deterministic=False) for _ in range(2)
    )
    assert first.tobytes() == second.tobytes()
    assert first.tobytes() != evaluate(policy, make_envs(PlainEnv, 4), seeds=SEEDS).tobytes()


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


def test_an_endless_episode_is_cut(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("understudy.act.evaluate.MAX_STEPS", 25)
    policy = random_policy(game_of(make_envs(EndlessEnv, 1)), "categorical")
    assert evaluate(policy, make_envs(EndlessEnv, 2), seeds=[1, 2, 3]).tolist() == [25.0] * 3
