"""A policy with noise or at a temperature: its probabilities, masks and bounds."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from tests.act.policies import random_policy
from tests.client.platforms import constant_policy
from understudy.core.errors import ConfigError
from understudy.core.tensors import DTYPES
from understudy.experience.game import game_spec
from understudy.experience.skill import BotSkill
from understudy.experience.spaces import Box
from understudy.nn.policy import Policy

SPEC = game_spec("doors", obs=2, actions=4)
OBS = np.array([0.5, -1.0], np.float32)


def chances(policy: Policy, skill: BotSkill, **how: Any) -> dict[int, float]:
    """The probability of each action that was drawn, as recorded."""
    rng = np.random.default_rng(0)
    drawn: list[Any] = [policy.choose(OBS, rng=rng, skill=skill, **how)[:2] for _ in range(4_000)]
    counts = Counter(action for action, _ in drawn)
    counted = {action: count / len(drawn) for action, count in counts.items()}
    recorded = {action: math.exp(logp) for action, logp in drawn}
    assert counted == pytest.approx(recorded, abs=0.04)
    return recorded


def softmax(policy: Policy, temperature: float) -> list[float]:
    logits = policy.outputs({"obs": OBS[None]})["logits"][0].astype(np.float64) / temperature
    return [float(share) for share in np.exp(logits) / np.exp(logits).sum()]


@pytest.mark.parametrize("kind", ["argmax", "categorical"])
def test_noise_is_the_probability_of_a_random_valid_action(kind: str):
    policy = constant_policy(2, SPEC, kind)
    for noise in (0.0, 0.4, 1.0):
        skill = BotSkill("even", noise)
        wanted = dict.fromkeys((0, 1, 3), noise / 4) | {2: 1 - 0.75 * noise}
        seen = {at: p for at, p in wanted.items() if p}
        assert chances(policy, skill, deterministic=False) == pytest.approx(seen)
        assert chances(policy, skill, deterministic=True) == pytest.approx(seen)
        mask = [True, False, False, True]
        masked = chances(policy, skill, deterministic=True, action_mask=mask)
        assert masked == pytest.approx(
            {0: 1 - noise / 2, 3: noise / 2} if noise else {0: 1.0}, abs=1e-9
        )


def test_a_temperature_divides_the_logits_and_leaves_values_alone():
    policy = random_policy(SPEC, "categorical", seed=3)
    for temperature in (0.25, 1.0, 5.0, 100.0):
        skill = BotSkill(temperature=temperature)
        wanted = dict(enumerate(softmax(policy, temperature)))
        assert chances(policy, skill, deterministic=False) == pytest.approx(wanted, abs=1e-5)
    best = policy.act(OBS)
    assert chances(policy, skill, deterministic=True) == {best: 1.0}
    assert len(chances(random_policy(SPEC, "argmax"), skill, deterministic=False)) == 1


@pytest.mark.parametrize("kind", ["gaussian_clipped", "gaussian_tanh"])
@pytest.mark.parametrize("dtype", ["F32", "F64"])
def test_box_actions_move_towards_random_ones_and_stay_within_bounds(kind: str, dtype: str):
    box = Box((2, 1), DTYPES[dtype], (-0.1, -3.0), (0.1, 0.7))
    spec = game_spec("slide", obs=2, actions=box)
    policy = random_policy(spec, kind)
    rng = np.random.default_rng(0)
    released = policy.act(OBS)
    for noise in (0.1, 0.5, 1.0):
        drawn = np.array(
            [
                policy.choose(OBS, deterministic=True, rng=rng, skill=BotSkill("easy", noise))[0]
                for _ in range(2_000)
            ]
        )
        assert drawn.dtype == DTYPES[dtype]
        assert (drawn >= np.array([[-0.1], [-3.0]], DTYPES[dtype])).all()
        assert (drawn <= np.array([[0.1], [0.7]], DTYPES[dtype])).all()
        middle = np.array([[0.0], [-1.15]])
        assert drawn.mean(0) == pytest.approx((1 - noise) * released + noise * middle, abs=0.1)
        width = noise * np.array([[0.2], [3.7]]) / math.sqrt(12)
        assert drawn.std(0) == pytest.approx(width, rel=0.1), "noise 1 is a random action"
    choice = policy.choose(OBS, deterministic=False, rng=rng, skill=BotSkill("easy", 0.5))
    assert choice[1:] == (None, None), "its density is not known"


def test_a_temperature_widens_a_gaussian():
    spec = game_spec("slide", obs=2, actions=Box((1,), DTYPES["F32"], -1e3, 1e3))
    policy = random_policy(spec, "gaussian_clipped")
    rng = np.random.default_rng(0)
    widths = [
        np.std(
            [
                policy.choose(OBS, deterministic=False, rng=rng, skill=BotSkill(temperature=t))[2]
                for t in [temperature] * 2_000
            ]
        )
        for temperature in (0.5, 1.0, 2.0)
    ]
    assert widths[1] / widths[0] == pytest.approx(2, rel=0.1)
    assert widths[2] / widths[1] == pytest.approx(2, rel=0.1)


def test_a_skill_needs_an_rng():
    with pytest.raises(ConfigError, match="a skill needs an rng"):
        constant_policy(1, SPEC).choose(OBS, skill=BotSkill("even", 0.2))
