"""A first bot must choose people's actions more often than one that observes nothing."""

from typing import Any

import numpy as np
import pytest

from understudy.algorithm import Batch
from understudy.experience.game import GameSpec, game_spec
from understudy.experience.spaces import Box
from understudy.models.gate import ModelCheck
from understudy.nn.heads import head_for
from understudy.nn.network import Dense, Input, NetworkSpec
from understudy.nn.policy import Policy
from understudy.release.people_check import check_with_people

DISCRETE = game_spec("sign", obs=1, actions=3)
MASKED = game_spec("masked", obs=1, actions=3, has_action_mask=True)
CONTINUOUS = game_spec("pull", obs=1, actions=Box((1,), np.dtype(np.float32), -1.0, 1.0))


def policy_of(game: GameSpec, slope: float) -> Policy:
    """A policy whose first action, or mean, grows with the observation."""
    head = head_for(game)
    outputs = {"logits": 3} if head.is_discrete else {"mean": 1, "log_std": 1}
    network = NetworkSpec(
        {"obs": Input((1,), np.dtype(np.float32))},
        (),
        {name: (Dense(width),) for name, width in outputs.items()},
    )
    weights = {name: np.zeros(shape, np.float32) for name, shape in network.shapes().items()}
    first = "logits" if head.is_discrete else "mean"
    weights[f"heads.{first}.0.kernel"][0, 0] = slope
    if head.is_discrete:
        weights["heads.logits.0.bias"][2] = -5.0
    return Policy(game, network, weights, head)


def steps(game: GameSpec, n: int = 200, *, seed: int = 0) -> Batch:
    """People choose the first action if what they see is positive, else the second."""
    rng = np.random.default_rng(seed)
    obs = rng.normal(size=(n, 1)).astype(np.float32)
    is_discrete = game.discrete is not None
    action: Any = (obs[:, 0] < 0).astype(np.int32) if is_discrete else np.tanh(obs)
    mask = None
    if game.has_action_mask:
        mask = np.tile([True, True, False], (n, 1))
    columns = {"obs": obs}
    return Batch(columns, action, np.zeros(n), columns, np.ones(n), np.ones(n), mask)


def compared(policy: Policy, *, learned: Batch, held_out: list[Batch]) -> ModelCheck:
    check = check_with_people(policy, learned=learned, held_out=held_out)
    assert check is not None
    return check


@pytest.mark.parametrize("game", [DISCRETE, MASKED, CONTINUOUS], ids=lambda game: game.game)
def test_a_bot_that_plays_like_held_out_people_passes_and_others_do_not(game: GameSpec):
    held_out = [steps(game, seed=1), steps(game, seed=2)]
    good = compared(policy_of(game, 1.0), learned=steps(game), held_out=held_out)
    assert good.passed, good.detail
    assert "400 held-out steps of 2 players" in good.detail
    for slope in (0.0, -1.0):
        assert not compared(policy_of(game, slope), learned=steps(game), held_out=held_out).passed


def test_a_bot_that_always_does_what_people_mostly_do_fails():
    def mostly(seed: int) -> Batch:
        batch = steps(DISCRETE, seed=seed)
        lots = np.random.default_rng(seed).random(200)
        return batch._replace(action=(lots < 0.1).astype(np.int32))

    network = policy_of(DISCRETE, 0.0)
    weights = dict(network.weights)
    weights["heads.logits.0.bias"] = np.log(np.array([0.9, 0.1, 1e-3], np.float32))
    bot = Policy(DISCRETE, network.network, weights, network.head)
    assert not compared(bot, learned=mostly(0), held_out=[mostly(1)]).passed


def test_the_median_player_decides():
    odd = steps(DISCRETE, seed=3)
    odd = odd._replace(action=1 - odd.action)
    bot = policy_of(DISCRETE, 3.0)
    held_out = [steps(DISCRETE, seed=1), steps(DISCRETE, seed=2), odd]
    assert compared(bot, learned=steps(DISCRETE), held_out=held_out).passed
    assert not compared(bot, learned=steps(DISCRETE), held_out=[odd]).passed


@pytest.mark.parametrize("held_out", [[], [steps(DISCRETE, 10), steps(DISCRETE, 9)]])
def test_too_few_steps_are_not_compared(held_out: list[Batch]):
    bot = policy_of(DISCRETE, 3.0)
    assert check_with_people(bot, learned=steps(DISCRETE), held_out=held_out) is None
