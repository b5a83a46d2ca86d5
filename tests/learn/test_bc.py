"""Cloning: the policy comes to do what was recorded, whatever it was worth."""

from typing import Any

import jax
import numpy as np
import pytest

from tests.learn.worlds import chunk_of, episode
from understudy.algorithm import Batch, Transitions
from understudy.core.tensors import DTYPES
from understudy.experience.game import GameSpec, game_spec
from understudy.experience.spaces import Box, Discrete
from understudy.learn import flat
from understudy.learn.algorithms.bc import Bc, BcConfig, BcKnobs
from understudy.learn.learner import Learner, LearnerConfig
from understudy.learn.replay_source import ReplaySource

DISCRETE = game_spec("sign", obs=2, actions=Discrete(3, 4))
CONTINUOUS = game_spec("pull", obs=2, actions=Box((1, 2), DTYPES["F64"], -2.0, 6.0))


def learned(
    game: GameSpec, actions_of: Any, *, calls: int, rewards: float = 0.0, n_false: int = 0
) -> Any:
    """The policy after learning from 512 recorded steps whose actions follow from what was seen.

    The first `n_false` observations are replaced by extreme ones.
    """
    rng = np.random.default_rng(0)
    obs = (5 + 3 * rng.normal(size=(513, 2))).astype(np.float32)
    obs[:n_false] = 1e6
    moves = episode(obs.tolist(), list(actions_of(obs[:-1])), [rewards] * 512, None)
    how = LearnerConfig(limiter=None, updates_per_call=50)
    knobs = BcKnobs(learning_rate=0.02, weight_decay=0.0)
    learner = Learner(Bc(game, BcConfig(widths=(16,), batch=64)), knobs, root_seed=0, config=how)
    learner.insert(chunk_of(game, moves))
    assert isinstance(learner.source, ReplaySource)
    learner.source.measure({})
    for call in range(calls):
        report = learner.step(call / calls)
    assert learner.counts.skipped_updates == 0
    return learner.current(), obs[n_false:-1], report


def test_choices_are_cloned():
    def rule(obs: Any) -> Any:
        return 4 + (obs[:, 0] > 5) + (obs[:, 1] > 6)

    policy, obs, report = learned(DISCRETE, rule, calls=12)
    acted = [policy.act(one) for one in obs]
    assert np.mean(acted == rule(obs)) > 0.97
    assert report.metrics["likelihood"] > 0.85


@pytest.mark.parametrize("n_false", [2, 16, 170])
def test_extreme_observations_of_up_to_a_third_of_the_steps_do_not_ruin_a_clone(n_false: int):
    def rule(obs: Any) -> Any:
        return 4 + (obs[:, 0] > 5) + (obs[:, 1] > 6)

    policy, obs, _ = learned(DISCRETE, rule, calls=12, n_false=n_false)
    acted = [policy.act(one) for one in obs]
    assert np.mean(acted == rule(obs)) > 0.95


def test_numbers_are_cloned_in_the_units_of_the_game():
    def rule(obs: Any) -> Any:
        return np.clip(np.stack([obs[:, 0] / 2 - 1, 3 - obs[:, 1] / 3], 1), -2, 6).reshape(-1, 1, 2)

    policy, obs, _ = learned(CONTINUOUS, rule, calls=30)
    acted = np.array([policy.act(one) for one in obs])
    assert acted.shape == (512, 1, 2)
    assert acted.dtype == np.float64
    assert np.abs(acted - rule(obs)).mean() < 0.25


# --- One update -----------------------------------------------------------------------------------

TABLE = game_spec("table", obs=Discrete(3), actions=2)
algorithm = Bc(TABLE, BcConfig(widths=(), batch=8))
update = jax.jit(algorithm.update)


def batch(**changes: Any) -> Batch:
    rng = np.random.default_rng(0)
    made = Batch(
        obs={"obs": np.arange(8) % 3},
        action=(np.arange(8) % 2).astype(np.int32),
        reward=np.zeros(8, np.float32),
        next_obs={"obs": rng.integers(0, 3, 8)},
        discount=np.ones(8, np.float32),
        weight=np.ones(8, np.float32),
    )
    return made._replace(**changes)


def knobs(**changes: float) -> dict[str, np.float32]:
    values = {"learning_rate": 0.1, "weight_decay": 0.0, "entropy": 0.0, "max_gradient": 10.0}
    return {name: np.float32(value) for name, value in {**values, **changes}.items()}


def test_loss_is_the_mean_surprise():
    state = algorithm.init(jax.random.PRNGKey(0))
    weights = flat.unpack(algorithm.network, np.asarray(state.weights))
    logits = (weights["heads.logits.0.kernel"] + weights["heads.logits.0.bias"])[batch().obs["obs"]]
    chance = np.exp(logits[np.arange(8), batch().action]) / np.exp(logits).sum(1)
    _, told = update(state, batch(), knobs())
    assert float(told.metrics["loss"]) == pytest.approx(-np.log(chance).mean(), rel=1e-5)
    assert float(told.metrics["likelihood"]) == pytest.approx(chance.mean(), rel=1e-5)


def test_what_followed_does_not_matter():
    state = algorithm.init(jax.random.PRNGKey(0))
    other = batch(
        reward=np.full(8, 9.0, np.float32),
        next_obs={"obs": np.zeros(8, np.int64)},
        discount=np.zeros(8, np.float32),
    )
    one, two = (update(state, made, knobs())[0] for made in (batch(), other))
    np.testing.assert_array_equal(one.weights, two.weights)


def test_decay_pulls_at_kernels_alone():
    state = algorithm.init(jax.random.PRNGKey(0))
    state = state._replace(weights=state.weights + 1.0)
    plain, decayed = (
        update(state, batch(), knobs(weight_decay=decay))[0].weights for decay in (0.0, 0.5)
    )
    pulled = flat.unpack(algorithm.network, np.asarray(plain) - np.asarray(decayed))
    before = flat.unpack(algorithm.network, np.asarray(state.weights))
    np.testing.assert_allclose(
        pulled["heads.logits.0.kernel"], 0.05 * before["heads.logits.0.kernel"], atol=1e-6
    )
    assert (pulled["heads.logits.0.bias"] == 0).all()


def test_needs_are_single_steps():
    assert algorithm.needs == Transitions(batch=8, is_cloning=True)
    assert Bc(TABLE, BcConfig(stack=4)).needs.stack == 4
