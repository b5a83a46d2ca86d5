"""PPO: its update by hand, and through chunks, where the policy that played must be the one that
learns."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from tests.act.envs import PlainEnv
from understudy.act.actor import Actor
from understudy.act.vector import game_of, make_envs
from understudy.algorithm import Rollout, Rollouts
from understudy.core.errors import ConfigError, LearningFailed
from understudy.core.tensors import DTYPES
from understudy.experience.chunk import Chunk
from understudy.experience.game import game_spec
from understudy.experience.spaces import Box, Discrete
from understudy.learn import flat
from understudy.learn.algorithms.ppo import Ppo, PpoConfig, PpoKnobs
from understudy.learn.learner import Learner
from understudy.testing.algorithm import random_rollout

STATES = 3
STEPS = 6
ENVS = 2
GAME = game_spec("table", obs=Discrete(STATES), actions=2)
CONFIG = PpoConfig(widths=(), rollout=STEPS, envs=ENVS, epochs=1)
KNOBS = {
    name: np.float32(value)
    for name, value in {
        "learning_rate": 0.01,
        "clip": 0.2,
        "discount": 0.9,
        "gae_lambda": 0.8,
        "entropy": 0.1,
        "value": 0.5,
        "max_gradient": 1e6,
    }.items()
}

algorithm = Ppo(GAME, CONFIG)
update = jax.jit(algorithm.update)


def tables(state: Any) -> tuple[Any, Any]:
    """Logits float[states, 2] and values float[states]."""
    policy = flat.unpack(algorithm.network, np.asarray(state.policy))
    value = flat.unpack(algorithm.value_network, np.asarray(state.value))
    logits = policy["heads.logits.0.kernel"] + policy["heads.logits.0.bias"]
    return logits, (value["heads.value.0.kernel"] + value["heads.value.0.bias"])[:, 0]


def losses(state: Any, rollout: Rollout) -> dict[str, float]:
    """The loss and its parts, with plain loops."""
    logits, values = tables(state)
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    advantage = np.zeros((STEPS, ENVS))
    for env in range(ENVS):
        later = 0.0
        for t in reversed(range(STEPS)):
            obs = rollout.obs["obs"][t, env]
            after = rollout.next_obs["obs"][t, env]
            ahead = 0.0 if rollout.terminated[t, env] else 0.9 * values[after]
            error = rollout.reward[t, env] + ahead - values[obs]
            ends = rollout.terminated[t, env] or rollout.truncated[t, env]
            later = error + (0.0 if ends else 0.9 * 0.8 * later)
            advantage[t, env] = later
    seen = rollout.obs["obs"]
    wanted = advantage + values[rollout.obs["obs"]]
    unit = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    ratio = np.exp(
        np.take_along_axis(logs[seen], rollout.action[..., None], -1)[..., 0] - rollout.logp
    )
    gain = np.minimum(ratio * unit, np.clip(ratio, 0.8, 1.2) * unit).mean()
    entropy = -(np.exp(logs) * logs).sum(1)[seen].mean()
    value_loss = ((wanted - values[seen]) ** 2).mean()
    return {
        "loss": -gain - 0.1 * entropy + 0.5 * value_loss,
        "entropy": entropy,
        "value_loss": value_loss,
    }


def lively(seed: int) -> Any:
    """A state whose tables are far from 0."""
    state = algorithm.init(jax.random.PRNGKey(seed))
    rng = np.random.default_rng(seed)
    return state._replace(
        **{
            name: rng.normal(0, 1.5, getattr(state, name).shape).astype(np.float32)
            for name in ("policy", "value")
        }
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_off", [False, True], ids=["on policy", "beyond the clip"])
def test_loss_is_that_of_the_definition(seed, is_off):
    state = lively(seed)
    rollout = random_rollout(algorithm, state, np.random.default_rng(seed))
    if is_off:
        off = np.random.default_rng(seed).normal(0, 0.5, rollout.logp.shape)
        rollout = rollout._replace(logp=(rollout.logp + off).astype(np.float32))
    _, told = update(state, rollout, KNOBS)
    for name, value in losses(state, rollout).items():
        assert float(told.metrics[name]) == pytest.approx(value, rel=1e-4, abs=1e-5), name
    worst = np.abs(np.exp(-off) - 1).max() if is_off else 0.0
    assert float(told.ratio_error) == pytest.approx(worst, rel=1e-3, abs=1e-5)


def test_every_row_is_used_once_in_each_epoch():
    config = replace(CONFIG, epochs=3, minibatches=4)
    several = Ppo(GAME, config)
    state = lively(1)
    rollout = random_rollout(several, state, np.random.default_rng(1))
    still = KNOBS | {"learning_rate": np.float32(0)}
    after, told = jax.jit(several.update)(state, rollout, still)
    assert float(told.metrics["value_loss"]) == pytest.approx(
        losses(state, rollout)["value_loss"], rel=1e-4
    )
    np.testing.assert_array_equal(after.policy, state.policy)
    assert (np.asarray(after.key) != np.asarray(state.key)).any()


def test_updates_make_good_actions_likelier():
    state = algorithm.init(jax.random.PRNGKey(0))
    for number in range(60):
        rollout = random_rollout(algorithm, state, np.random.default_rng(number))
        rewards = (rollout.action == rollout.obs["obs"] % 2).astype(np.float32)
        ended = np.ones((STEPS, ENVS), np.bool_)
        state, _ = update(state, rollout._replace(reward=rewards, terminated=ended), KNOBS)
    assert tables(state)[0].argmax(1).tolist() == [0, 1, 0]


# --- Through chunks -------------------------------------------------------------------------------

envs = make_envs(PlainEnv, 2)
PLAIN = game_of(envs)
PLAYED = Ppo(
    PLAIN, PpoConfig(widths=(8,), rollout=16, envs=2, epochs=2, stack=2, observation_norm=True)
)
learners: list[Learner] = []


def learner() -> Learner:
    """A fresh one; all share one compilation."""
    made = Learner(PLAYED, PpoKnobs(), root_seed=1)
    learners.append(made)
    made._call = learners[0]._call
    return made


def rounds(chunks_from: Any, made: Learner, n: int) -> list[float]:
    errors = []
    actor = Actor(make_envs(PlainEnv, 2), PLAIN, root_seed=3, created_ms=1_760_000_000_000)
    for round_no in range(n):
        policy = made.publish()
        for chunk in chunks_from(actor.collect(policy, 16, round_no=round_no).chunks):
            made.insert(chunk)
        before = made._call
        told: list[Any] = []

        def spying(*given: Any, before: Any = before, told: list[Any] = told) -> Any:
            told.append(before(*given))
            return told[-1]

        made._call = spying
        made.step(round_no / n)
        made._call = before
        errors.append(float(told[0][1].ratio_error[0]))
    return errors


def test_the_policy_that_played_is_the_policy_that_learns():
    made = learner()
    errors = rounds(lambda chunks: chunks, made, 5)
    assert max(errors) <= 1e-4
    assert made.counts.updates == 5
    assert made.counts.skipped_updates == 0


def test_a_wrong_logp_ends_the_run():
    def off(chunks: list[Chunk]) -> list[Chunk]:
        return [
            replace(one, columns={**one.columns, "logp": one.columns["logp"] + np.float32(0.01)})
            for one in chunks
        ]

    with pytest.raises(LearningFailed, match="the acting policy differs from the learning policy"):
        rounds(off, learner(), 1)


def test_observation_statistics_travel_with_the_policy():
    made = learner()
    before = made.current().weights["inputs.obs.0.mean"].copy()
    rounds(lambda chunks: chunks, made, 1)
    policy = made.current()
    assert (policy.weights["inputs.obs.0.mean"] != before).any()
    assert float(np.ravel(policy.weights["inputs.obs.0.count"])[0]) == 32


# --- As data --------------------------------------------------------------------------------------


def test_needs_and_heads_follow_game_and_settings():
    assert algorithm.needs == Rollouts(steps=STEPS, envs=ENVS)
    assert algorithm.head.kind == "categorical"
    pull = Ppo(game_spec("pull", obs=2, actions=Box((2,), DTYPES["F32"], -1.0, 1.0)))
    assert (pull.head.kind, set(pull.network.heads)) == ("gaussian_clipped", {"mean", "log_std"})


def test_minibatches_must_divide_the_rollout():
    with pytest.raises(ConfigError, match="minibatches is 5, which does not divide"):
        PpoConfig(rollout=8, envs=2, minibatches=5)
