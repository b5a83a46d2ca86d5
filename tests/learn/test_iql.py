"""IQL: values of what was recorded, and a policy that plays better than those who taught it."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from tests.learn.worlds import Move, chunk_of, episode
from understudy.algorithm import Batch, Schedule, Transitions
from understudy.core.tensors import DTYPES
from understudy.experience.game import game_spec
from understudy.experience.spaces import Box, Discrete
from understudy.learn import flat, networks
from understudy.learn.algorithms.bc import Bc, BcConfig, BcKnobs
from understudy.learn.algorithms.iql import Iql, IqlConfig, IqlKnobs
from understudy.learn.learner import Learner, LearnerConfig

STATES = 6
GAME = game_spec("stairs", obs=Discrete(STATES + 1), actions=3, has_action_mask=True)
"""Stairs: 0 rests, 1 climbs, and 2 jumps down, which is valid only above the ground."""
TABLE: dict[str, Any] = {"widths": (), "batch": 64}
HOW = LearnerConfig(limiter=None, updates_per_call=100)
RATE = Schedule(0.05, 0.0005)
PROGRAMS: dict[Any, Any] = {}
"""Learners of one kind share a compilation: their networks are tables of the same size."""


def learner_of(algorithm: Any, knobs: Any) -> Learner:
    learner = Learner(algorithm, knobs, root_seed=0, config=HOW)
    learner._call = PROGRAMS.setdefault((type(algorithm), algorithm.game.game), learner._call)
    return learner


def iql(**knobs: Any) -> Learner:
    settings = {"learning_rate": RATE, "weight_decay": 0.0, "target_rate": 0.05, **knobs}
    return learner_of(Iql(GAME, IqlConfig(**TABLE, discount=0.9)), IqlKnobs(**settings))


def learn(learner: Learner, episodes: Sequence[list[Move]], *, calls: int) -> Learner:
    for number, moves in enumerate(episodes):
        masks = [mask_at(move.obs) for move in moves]
        learner.insert(chunk_of(GAME, moves, session=number, action_mask=masks))
    for call in range(calls):
        learner.step(call / calls)
    assert learner.counts.skipped_updates == 0
    return learner


def values_of(learner: Learner) -> Any:
    """V of each state, in the units of the rewards: float32[states]."""
    algorithm = learner.algorithm
    assert isinstance(algorithm, Iql)
    state = learner.state
    weights = flat.unpack(algorithm.value_network, state.value)
    v = networks.apply(algorithm.value_network, weights, {"obs": np.arange(STATES)})["value"]
    return np.asarray(v)[:, 0] * np.sqrt(state.reward_square)


# --- People and their bots ------------------------------------------------------------------------


def mask_at(state: int) -> Any:
    return np.array([True, True, state > 0])


def play(choose: Any, *, seed: int) -> list[Move]:
    """An episode of at most 20 steps: resting pays 0.1 once in three times, the top 5."""
    rng = np.random.default_rng(seed)
    states = [0]
    actions: list[int] = []
    rewards: list[float] = []
    while len(actions) < 20 and states[-1] < STATES:
        action = int(choose(states[-1], rng))
        assert mask_at(states[-1])[action]
        after = {0: states[-1], 1: states[-1] + 1, 2: states[-1] - 1}[action]
        actions.append(action)
        rewards.append(
            5.0 if after == STATES else 0.1 * float(action == 0 and rng.random() < 1 / 3)
        )
        states.append(after)
    return episode(states, actions, rewards, "terminated" if states[-1] == STATES else "truncated")


def person(skill: float) -> Any:
    """Climbs with this probability; otherwise rests, or jumps down where that is possible."""

    def choose(state: int, rng: np.random.Generator) -> int:
        if rng.random() < skill:
            return 1
        return int(rng.choice([0, 2])) if state > 0 else 0

    return choose


def return_of(learner: Learner, *, deterministic: bool) -> float:
    policy = learner.current()

    def choose(state: int, rng: np.random.Generator) -> int:
        mask = mask_at(state)
        return int(policy.act(state, action_mask=mask, deterministic=deterministic, rng=rng))

    n_episodes = 1 if deterministic else 60
    played = [play(choose, seed=10_000 + number) for number in range(n_episodes)]
    return float(np.mean([sum(move.reward for move in moves) for moves in played]))


@cache
def people() -> list[list[Move]]:
    """What five people played, most of whom seldom climb: together they rest most of the time."""
    skills = (0.1, 0.2, 0.3, 0.4, 0.6)
    return [play(person(skill), seed=seed) for seed in range(30) for skill in skills]


def test_it_plays_better_than_the_people_it_learned_from_and_than_their_clone():
    average = float(np.mean([sum(move.reward for move in moves) for moves in people()]))
    best = float(np.mean([sum(move.reward for move in moves) for moves in people()[4::5]]))
    bot = learn(iql(), people(), calls=15)
    knobs = BcKnobs(learning_rate=RATE, weight_decay=0.0)
    clone = learn(learner_of(Bc(GAME, BcConfig(**TABLE)), knobs), people(), calls=15)
    for deterministic in (True, False):
        reached = return_of(bot, deterministic=deterministic)
        assert reached > best + 0.5 > average + 1.0
        assert reached > return_of(clone, deterministic=deterministic) + 1.0


def test_without_a_preference_by_advantage_it_clones():
    bot = learn(iql(advantage_weight=0.0), people(), calls=4)
    knobs = BcKnobs(learning_rate=RATE, weight_decay=0.0)
    clone = learn(learner_of(Bc(GAME, BcConfig(**TABLE)), knobs), people(), calls=4)
    for obs in range(STATES):
        one, two = (
            learner.current().outputs({"obs": np.array([obs])})["logits"]
            for learner in (bot, clone)
        )
        np.testing.assert_allclose(one - one.mean(), two - two.mean(), atol=0.3)


# --- Values that are known ------------------------------------------------------------------------


@pytest.mark.parametrize("expectile", [0.5, 0.8])
def test_a_value_is_the_expectile_of_what_was_tried(expectile):
    """Two actions, each tried half of the time, are worth 4 and 0: their expectile is 4 * tau."""
    episodes = [
        episode([0, STATES], [number % 2], [4.0 * (number % 2)], "terminated")
        for number in range(2)
    ]
    learner = learn(iql(expectile=expectile), episodes, calls=10)
    assert float(values_of(learner)[0]) == pytest.approx(4 * expectile, abs=0.05)


@pytest.mark.parametrize(("end", "worth"), [("truncated", 10.0), ("terminated", 1.0)])
def test_only_a_truncated_episode_bootstraps(end, worth):
    learner = learn(iql(), [episode([1, 1], [0], [1.0], end)], calls=20)
    assert float(values_of(learner)[1]) == pytest.approx(worth, abs=0.1)


def test_the_size_of_rewards_does_not_matter():
    """Bit for bit: a factor that is a power of two changes no rounding."""
    larger = [
        [
            Move(move.obs, move.action, 1024 * move.reward, move.after, move.end, move.is_first)
            for move in moves
        ]
        for moves in people()
    ]
    one, two = (learn(iql(), episodes, calls=2) for episodes in (people(), larger))
    np.testing.assert_array_equal(one.state.policy, two.state.policy)
    np.testing.assert_array_equal(1024 * values_of(one), values_of(two))


# --- State and policy -----------------------------------------------------------------------------


def test_checkpoints_contain_the_critics_and_a_resumed_learner_continues_bit_for_bit():
    whole = learn(iql(), people(), calls=4)
    half = learn(iql(), people(), calls=0)
    for call in range(2):
        half.step(call / 4)
    arrays, facts = half.checkpoint()
    chunks = {chunk.meta.id: chunk for chunk in map(chunk_at, range(len(people())))}
    resumed = iql()
    resumed.restore(arrays, facts, lambda ids: [chunks[key] for key in ids])
    for call in range(2, 4):
        resumed.step(call / 4)
    for one, two in zip(jax.tree.leaves(whole.state), jax.tree.leaves(resumed.state), strict=True):
        np.testing.assert_array_equal(one, two)


def chunk_at(number: int) -> Any:
    moves = people()[number]
    masks = [mask_at(move.obs) for move in moves]
    return chunk_of(GAME, moves, session=number, action_mask=masks)


def test_the_policy_has_the_weights_of_the_actor_alone():
    learner = iql()
    assert isinstance(learner.algorithm, Iql)
    policy = learner.current()
    assert list(policy.weights) == ["heads.logits.0.kernel", "heads.logits.0.bias"]
    assert policy.head.kind == "categorical"
    assert learner.algorithm.needs == Transitions(batch=64, discount=0.9)


def test_a_recorded_action_that_its_mask_forbids_is_reported_with_its_row():
    mask = np.ones((64, 3), np.bool_)
    mask[7, 2] = False
    action = np.zeros(64, np.int32)
    action[7] = 2
    batch = Batch(
        obs={"obs": np.arange(64) % STATES},
        action=action,
        reward=np.ones(64, np.float32),
        next_obs={"obs": np.arange(64) % STATES},
        discount=np.full(64, 0.9, np.float32),
        weight=np.ones(64, np.float32),
        action_mask=mask,
        next_action_mask=mask,
    )
    learner = iql()
    batches = jax.tree.map(lambda array: np.stack([array] * 100), batch)
    _, feedback = learner._call(learner.state, batches, learner.knobs_at(0.0))
    assert not feedback.ok.any()
    np.testing.assert_array_equal(feedback.row_ok[0], np.arange(64) != 7)


# --- Continuous actions ---------------------------------------------------------------------------


def test_numbers_that_paid_are_preferred_to_the_average():
    """People pull anywhere from -2 to 6; what pays is near 4, or near 0 if the light is on."""
    game = game_spec("pull", obs=1, actions=Box((1,), DTYPES["F32"], -2.0, 6.0))
    rng = np.random.default_rng(0)
    obs = rng.integers(0, 2, (513, 1)).astype(np.float32)
    pulls = rng.uniform(-2, 6, (512, 1)).astype(np.float32)
    paid = 4 - 4 * obs[:-1]
    rewards = -np.abs(pulls - paid)[:, 0]
    config = IqlConfig(widths=(16,), batch=64, discount=0.0)
    knobs = IqlKnobs(learning_rate=Schedule(0.02, 0.0005), target_rate=0.05)
    learner = learner_of(Iql(game, config), knobs)
    learner.insert(chunk_of(game, episode(obs.tolist(), list(pulls), rewards.tolist(), None)))
    for call in range(10):
        learner.step(call / 10)
    policy = learner.current()
    for light, wanted in ((0.0, 4.0), (1.0, 0.0)):
        assert policy.act(np.array([light], np.float32))[0] == pytest.approx(wanted, abs=0.7)
    assert set(policy.network.inputs) == {"obs"}
