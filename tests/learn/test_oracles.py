"""Worlds whose values are known exactly: what every value algorithm must learn, through replay
or rollout."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.learn.worlds import (
    CHAIN,
    ONE_STATE,
    Move,
    chain_episodes,
    chain_values,
    chunk_of,
    episode,
    one_state,
)
from understudy.algorithm import Schedule
from understudy.experience.game import GameSpec
from understudy.learn import flat, networks
from understudy.learn.algorithms.dqn import Dqn, DqnConfig, DqnKnobs
from understudy.learn.algorithms.ppo import Ppo, PpoConfig, PpoKnobs
from understudy.learn.learner import Learner, LearnerConfig
from understudy.replay import ReplayConfig

SWITCHES: dict[str, dict[str, Any]] = {
    "none": {},
    "double": {"double": True},
    "dueling": {"dueling": True},
    "n-step": {"n_step": 3},
    "prioritised": {"prioritised": True},
    "all": {"double": True, "dueling": True, "n_step": 3, "prioritised": True},
}
OFF = {"double": False, "dueling": False, "n_step": 1, "prioritised": False}
PROGRAMS: dict[Any, Any] = {}


def dqn(
    game: GameSpec,
    *,
    rate: Schedule,
    importance_exponent: float = 1.0,
    alpha: float = 0.6,
    **config: Any,
) -> Learner:
    """A learner whose network is a table: no layer between what is seen and the values."""
    settings: dict[str, Any] = {
        "widths": (),
        "batch": 32,
        "discount": 0.9,
        **config,
    }
    knobs = DqnKnobs(learning_rate=rate, importance_exponent=importance_exponent, target_period=1)
    replay = ReplayConfig(capacity=1_024, alpha=alpha)
    how = LearnerConfig(limiter=None, updates_per_call=50, replay=replay)
    learner = Learner(Dqn(game, DqnConfig(**settings)), knobs, root_seed=0, config=how)
    # How rows are drawn is the replay's business: learners that differ in nothing else share one
    # compilation.
    program = game.game, settings["double"], settings["dueling"]
    learner._call = PROGRAMS.setdefault(program, learner._call)
    return learner


def learn(learner: Learner, episodes: Sequence[list[Move]], *, calls: int) -> None:
    for number, moves in enumerate(episodes):
        learner.insert(chunk_of(learner.algorithm.game, moves, session=number))
    for call in range(calls):
        learner.step(call / calls)
    assert learner.counts.skipped_updates == 0


def values(learner: Learner, states: Any) -> Any:
    return learner.current().outputs({"obs": np.asarray(states)})["q"]


# --- One state, reward 1, truncated at 10: worth 10, for ever; the ten rewards seen come to 6.5


@pytest.mark.parametrize("name", SWITCHES)
def test_dqn_bootstraps_after_a_truncation(name):
    learner = dqn(ONE_STATE, rate=Schedule(0.2, 0.001), **OFF | SWITCHES[name])
    learn(learner, [one_state()], calls=20)
    np.testing.assert_allclose(values(learner, np.ones((1, 1), np.float32)), 10.0, atol=0.05)


def ppo(game: GameSpec, *, steps: int, gae_lambda: float) -> Learner:
    config = PpoConfig(widths=(), rollout=steps, envs=1, epochs=50)
    knobs = PpoKnobs(
        learning_rate=Schedule(0.2, 0.001),
        discount=0.9,
        gae_lambda=gae_lambda,
        max_gradient=100.0,
    )
    return Learner(Ppo(game, config), knobs, root_seed=0)


def play_and_learn(learner: Learner, moves: list[Move], *, rounds: int) -> None:
    """The same moves each round; both actions do the same, so the policy may choose as it likes."""
    obs = np.array([move.obs for move in moves], learner.algorithm.game.obs_columns["obs"].dtype)
    for number in range(rounds):
        policy = learner.publish()
        decision = policy.decide(
            {"obs": obs}, policy.head.noise(np.random.default_rng(number), len(moves))
        )
        chosen = [
            Move(one.obs, a, one.reward, one.after, one.end, one.is_first)
            for one, a in zip(moves, decision.action, strict=True)
        ]
        version = policy.version
        game = learner.algorithm.game
        learner.insert(chunk_of(game, chosen, chunk_no=number, version=version, logp=decision.logp))
        learner.step(number / rounds)


def state_values(learner: Learner, states: Any) -> Any:
    algorithm = learner.algorithm
    assert isinstance(algorithm, Ppo)
    weights = flat.unpack(algorithm.value_network, learner.state.value)
    return np.asarray(networks.apply(algorithm.value_network, weights, {"obs": states})["value"])[
        :, 0
    ]


def test_ppo_bootstraps_after_a_truncation():
    learner = ppo(ONE_STATE, steps=10, gae_lambda=0.8)
    play_and_learn(learner, one_state(), rounds=30)
    np.testing.assert_allclose(state_values(learner, np.ones((1, 1), np.float32)), 10.0, atol=0.05)


def test_ppo_does_not_bootstrap_after_a_termination():
    learner = ppo(ONE_STATE, steps=10, gae_lambda=0.8)
    play_and_learn(learner, one_state("terminated"), rounds=30)
    # The last of ten steps is worth 1, each before it 1 + 0.9 (0.2 V + 0.8 times the one after); V
    # is their mean.
    parts = [(1.0, 0.0)]
    for _ in range(9):
        parts.append((1 + 0.72 * parts[-1][0], 0.18 + 0.72 * parts[-1][1]))
    rewards, share = np.mean(parts, axis=0)
    wanted = rewards / (1 - share)
    assert wanted < 6.5
    np.testing.assert_allclose(
        state_values(learner, np.ones((1, 1), np.float32)), wanted, atol=0.05
    )


# --- Five states in a row -------------------------------------------------------------------------


@pytest.mark.parametrize("n_step", [1, 2, 3, 4, 5])
def test_dqn_finds_the_exact_values_of_the_chain(n_step):
    switches = OFF if n_step % 2 else SWITCHES["all"]
    learner = dqn(CHAIN, rate=Schedule(0.05, 0.0005), **{**switches, "n_step": n_step})
    learn(learner, chain_episodes(0.9), calls=25)
    np.testing.assert_allclose(values(learner, np.arange(5)), chain_values(0.9), atol=0.01)


def test_ppo_finds_the_exact_values_of_the_chain():
    learner = ppo(CHAIN, steps=5, gae_lambda=0.5)
    moves = episode([0, 1, 2, 3, 4, 5], [0] * 5, [0.0] * 4 + [1.0], "terminated")
    play_and_learn(learner, moves, rounds=30)
    np.testing.assert_allclose(
        state_values(learner, np.arange(5)), 0.9 ** np.arange(4, -1, -1), atol=0.02
    )


# --- A state whose reward is mostly chance --------------------------------------------------------

REWARDS = [0.9] + [0.0] * 9
"""Worth 0.09 on average. Sampled by error alone it seems worth q where 0.1 (0.9 - q)^2 = 0.9
q^2: 0.225."""


def noisy_value(**how: Any) -> float:
    learner = dqn(ONE_STATE, rate=Schedule(0.01, 0.0001), **OFF | how)
    learn(
        learner, [episode([[1.0]] * 2, [0], [reward], "terminated") for reward in REWARDS], calls=60
    )
    return float(values(learner, np.ones((1, 1), np.float32))[0, 0])


def test_a_noisy_state_is_wrong_without_importance_weights_and_right_with_them():
    assert noisy_value() == pytest.approx(0.09, abs=0.01)
    assert noisy_value(prioritised=True, alpha=1.0, importance_exponent=0.0) == pytest.approx(
        0.225, abs=0.03
    )
    assert noisy_value(prioritised=True, alpha=1.0, importance_exponent=1.0) == pytest.approx(
        0.09, abs=0.015
    )
