"""Fitted Q evaluation of policies on recorded steps, in a chain of states with known values."""

import re
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from understudy.algorithm import Batch
from understudy.core.errors import ConfigError
from understudy.experience.game import game_spec
from understudy.experience.spaces import Discrete
from understudy.learn.algorithms.bc import Bc
from understudy.learn.ranking import (
    Choices,
    Estimate,
    Ranking,
    RankingConfig,
    best_of,
    choices_of,
    estimates,
)
from understudy.nn.heads import head_for
from understudy.nn.policy import Policy

LENGTH = 5
DISCOUNT = 0.9
N = 4_000
GAME = game_spec("chain", obs=Discrete(LENGTH), actions=2)
QUICK = RankingConfig(updates=1_024, batch=128, widths=(32,), learning_rate=3e-3, target_rate=0.05)
RIGHT = (0.05, 0.35, 0.65, 0.95)
"""The policies: the probability of a move to the right, everywhere."""


def walked(*, goes_left: float = 0.5, bonus: float = 0.0) -> Batch:
    """Single moves: leaving on the right is worth 1, on the left -1; both end the game.

    `bonus` is what every move is worth besides. Recordings stop anywhere, which ends no game.
    """
    rng = np.random.default_rng(0)
    state = rng.integers(LENGTH, size=N)
    action = (rng.random(N) >= goes_left).astype(np.int32)
    after = state + 2 * action - 1
    is_over = (after < 0) | (after >= LENGTH)
    reward = bonus + np.where(is_over, np.sign(after), 0)
    return Batch(
        {"obs": state},
        action,
        reward.astype(np.float32),
        {"obs": np.clip(after, 0, LENGTH - 1)},
        np.where(is_over, 0.0, DISCOUNT).astype(np.float32),
        np.ones(N, np.float32),
    )


def going(*rights: float) -> Choices:
    chances = np.array([[1 - right, right] for right in rights], np.float32)
    everywhere = np.broadcast_to(chances[:, None], (len(rights), N, 2))
    return Choices(everywhere, everywhere)


def true_value(right: float, *, bonus: float = 0.0) -> float:
    """The mean value of all states, from Bellman's equations."""
    moves = np.diag([right] * (LENGTH - 1), 1) + np.diag([1 - right] * (LENGTH - 1), -1)
    rewards = np.full(LENGTH, bonus)
    rewards[0] -= 1 - right
    rewards[-1] += right
    return float(np.linalg.solve(np.eye(LENGTH) - DISCOUNT * moves, rewards).mean())


def even() -> NDArray[np.float32]:
    return np.full((N, 2), 0.5, np.float32)


def test_recorded_steps_are_no_part_of_the_compiled_program():
    """It is cached on disk, where nothing erases a player's steps."""
    ranking = Ranking(GAME, walked(), going(*RIGHT), recorded=even(), config=QUICK, seed=0)
    rows = np.zeros((64, QUICK.batch), np.int64)
    rates = np.zeros(64, np.float32)
    program = ranking._call.lower(ranking._state, ranking._data, ranking._ends, rows, rates)
    longest = max(map(len, re.findall(r"dense<(.*?)>", program.as_text())))
    assert longest < N


def test_steps_without_weight_do_not_count():
    steps = walked(goes_left=0.5)
    weight = np.where(steps.obs["obs"] == 0, 1, 0).astype(np.float32)
    choices = going(*RIGHT)
    is_first = steps.obs["obs"] == 0
    recorded = np.where(is_first[:, None], [0.0, 1.0], [1.0, 0.0]).astype(np.float32)
    ranked = estimates(
        GAME,
        steps._replace(weight=weight),
        choices,
        recorded=recorded,
        config=replace(QUICK, updates=64),
        seed=0,
    )
    assert [estimate.support for estimate in ranked] == pytest.approx(RIGHT, abs=1e-5)
    none = steps._replace(weight=0 * weight)
    with pytest.raises(ConfigError, match="no recorded step has a weight"):
        estimates(GAME, none, choices, recorded=recorded, config=QUICK, seed=0)


@pytest.mark.parametrize("bonus", [0.0, 1.0])
def test_values_are_those_of_bellmans_equations(bonus: float):
    ranked = estimates(
        GAME, walked(bonus=bonus), going(*RIGHT), recorded=even(), config=QUICK, seed=0
    )
    truth = [true_value(right, bonus=bonus) for right in RIGHT]
    np.testing.assert_allclose([estimate.value for estimate in ranked], truth, atol=0.12)
    assert best_of(ranked) == int(np.argmax(truth))


def test_the_same_seed_returns_the_same_bits():
    first, again, other = (
        estimates(GAME, walked(), going(0.2, 0.8), recorded=even(), config=QUICK, seed=seed)
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_a_policy_that_does_what_was_not_recorded_is_never_the_best():
    steps = walked(goes_left=1.0)
    recorded = np.tile(np.array([0.99, 0.01], np.float32), (N, 1))
    ranked = estimates(GAME, steps, going(0.05, 0.95), recorded=recorded, config=QUICK, seed=0)
    assert [estimate.is_supported for estimate in ranked] == [True, False]
    assert [estimate.support for estimate in ranked] == pytest.approx([0.95, 0.05])
    assert best_of(ranked) == 0


def test_without_a_supported_policy_there_is_no_best_one():
    assert best_of([Estimate(3.0, 0.1, is_supported=False)]) is None
    assert best_of([Estimate(float("nan"), 1.0, is_supported=True)]) is None
    assert best_of([]) is None


def test_choices_obey_masks_and_temperatures():
    algorithm = Bc(GAME)
    weights = {
        name: np.ones(shape, np.float32) for name, shape in algorithm.network.shapes().items()
    }
    weights["heads.logits.0.bias"] = np.array([0.0, 1.0], np.float32)
    policy = Policy(GAME, algorithm.network, weights, algorithm.head)
    mask = np.ones((N, 2), np.bool_)
    mask[0] = (True, False)
    mask[1] = (False, False)  # the end of an episode that was stopped
    steps = walked()._replace(action_mask=mask, next_action_mask=mask)
    now = choices_of([policy, policy.at_temperature(0.5)], steps).now
    assert now.shape == (2, N, 2)
    np.testing.assert_allclose(now[0, :3, 1], [0.0, 1 / (1 + np.exp(-1)), 1 / (1 + np.exp(-1))])
    np.testing.assert_allclose(now[1, 2, 1], 1 / (1 + np.exp(-2)), rtol=1e-6)


def test_a_policy_without_probabilities_is_rejected():
    algorithm = Bc(GAME)
    weights = {
        name: np.ones(shape, np.float32) for name, shape in algorithm.network.shapes().items()
    }
    policy = Policy(GAME, algorithm.network, weights, algorithm.head)
    object.__setattr__(policy, "head", head_for(GAME, "argmax"))
    with pytest.raises(ConfigError, match="cannot be ranked"):
        choices_of([policy], walked())


@pytest.mark.parametrize(
    "wrong",
    [
        {"updates": 0},
        {"batch": 0},
        {"learning_rate": 0.0},
        {"target_rate": 2.0},
        {"min_support": 2},
    ],
)
def test_wrong_settings_are_rejected(wrong: dict[str, float]):
    with pytest.raises(ConfigError, match="give"):
        RankingConfig(**wrong)  # type: ignore[arg-type]
