"""Action masks are obeyed everywhere: no invalid action is taken or bootstrapped from."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.act.envs import MaskedEnv
from understudy.act.actor import Actor
from understudy.act.vector import game_of, make_envs
from understudy.algorithm import Batch
from understudy.experience.game import game_spec
from understudy.experience.spaces import Discrete
from understudy.learn import flat
from understudy.learn.algorithms.bc import Bc, BcConfig
from understudy.learn.algorithms.dqn import Dqn, DqnConfig, DqnKnobs
from understudy.learn.algorithms.iql import Iql, IqlConfig, IqlKnobs
from understudy.learn.algorithms.ppo import Ppo, PpoConfig, PpoKnobs
from understudy.learn.learner import Learner, LearnerConfig
from understudy.learn.replay_source import LimiterConfig
from understudy.testing.algorithm import random_rollout

STATES = 5
ACTIONS = 4
ROWS = 16
GAME = game_spec("cards", obs=Discrete(STATES), actions=Discrete(ACTIONS, 3), has_action_mask=True)
ALGORITHMS: Mapping[str, Any] = {
    "dqn": Dqn(GAME, DqnConfig(widths=(), batch=ROWS, dueling=False)),
    "ppo": Ppo(GAME, PpoConfig(widths=(), rollout=8, envs=2, epochs=1)),
    "bc": Bc(GAME, BcConfig(widths=(), batch=ROWS)),
    "iql": Iql(GAME, IqlConfig(widths=(), batch=ROWS)),
}
act = {name: jax.jit(algorithm.act) for name, algorithm in ALGORITHMS.items()}
first = {name: algorithm.init(jax.random.PRNGKey(0)) for name, algorithm in ALGORITHMS.items()}

masks = hnp.arrays(np.bool_, (ROWS, ACTIONS)).map(
    lambda action_mask: action_mask | (~action_mask.any(1, keepdims=True))
)
"""Random masks; a row without a valid action becomes all valid."""
tables = hnp.arrays(
    np.float32,
    (STATES, ACTIONS),
    elements=st.sampled_from([-1e30, -1e3, -1.0, 0.0, 0.5, 2.0, 1e3, 1e30]),
)


def vector(algorithm: Any, table: Any) -> Any:
    """Weights under which the network gives these numbers for each state."""
    name = "q" if isinstance(algorithm, Dqn) else "logits"
    weights = {
        f"heads.{name}.0.kernel": table,
        f"heads.{name}.0.bias": np.zeros(ACTIONS, np.float32),
    }
    return np.asarray(flat.pack(algorithm.network, weights))


def state_with(name: str, table: Any) -> Any:
    algorithm = ALGORITHMS[name]
    field = "policy" if name in ("ppo", "iql") else "weights"
    return first[name]._replace(**{field: vector(algorithm, table)})


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=60, deadline=None)
@given(tables, masks, st.integers(0, 2**31), st.sampled_from([0.0, 0.3, 1.0]))
def test_an_invalid_action_is_never_taken(name, table, action_mask, seed, explore):
    rng = np.random.default_rng(seed)
    state = state_with(name, table)
    obs = {"obs": rng.integers(0, STATES, ROWS)}
    policy = ALGORITHMS[name].policy(state)
    taken = [
        np.asarray(act[name](state, obs, jax.random.PRNGKey(seed), explore, action_mask).action),
        policy.decide(
            obs, policy.head.noise(rng, ROWS), explore=explore, action_mask=action_mask
        ).action,
        policy.decide(obs, None, action_mask=action_mask, deterministic=True).action,
        [policy.act(obs["obs"][row], action_mask=action_mask[row]) - 3 for row in range(ROWS)],
        [
            policy.act(obs["obs"][row], action_mask=action_mask[row], deterministic=False, rng=rng)
            - 3
            for row in range(ROWS)
        ],
    ]
    for actions in taken:
        assert action_mask[np.arange(ROWS), actions].all()


# --- What is learned ------------------------------------------------------------------------------


def batch(action_mask: Any, next_action_mask: Any, *, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    return Batch(
        obs={"obs": rng.integers(0, STATES, ROWS)},
        action=np.where(action_mask, rng.random((ROWS, ACTIONS)), -1).argmax(1).astype(np.int32),
        reward=rng.normal(size=ROWS).astype(np.float32),
        next_obs={"obs": rng.integers(0, STATES, ROWS)},
        discount=np.full(ROWS, 0.9, np.float32),
        weight=np.ones(ROWS, np.float32),
        action_mask=action_mask,
        next_action_mask=next_action_mask,
    )


doubles = {
    double: Dqn(GAME, DqnConfig(widths=(), batch=ROWS, dueling=False, double=double))
    for double in (True, False)
}
update = {double: jax.jit(algorithm.update) for double, algorithm in doubles.items()}
KNOBS = {
    "learning_rate": np.float32(0.1),
    "target_rate": np.float32(1.0),
    "target_period": np.float32(128),
    "max_gradient": np.float32(10),
    "huber_delta": np.float32(1),
}


@pytest.mark.parametrize("double", [True, False])
@settings(max_examples=60, deadline=None)
@given(masks, st.integers(0, 2**31))
def test_an_invalid_action_is_never_bootstrapped_from(double, next_action_mask, seed):
    rng = np.random.default_rng(seed)
    algorithm = doubles[double]
    q, target = (rng.normal(size=(STATES, ACTIONS)).astype(np.float32) for _ in range(2))
    made = batch(np.ones((ROWS, ACTIONS), np.bool_), next_action_mask, seed=seed)
    after = made.next_obs["obs"]
    chooses = np.where(next_action_mask, (q if double else target)[after], -np.inf)
    worth = target[after, chooses.argmax(1)]
    wanted = made.reward + made.discount * worth - q[made.obs["obs"], made.action]
    state = first["dqn"]._replace(weights=vector(algorithm, q), target=vector(algorithm, target))
    _, told = update[double](state, made, KNOBS)
    np.testing.assert_allclose(told.priorities, np.abs(wanted) + 1e-6, atol=1e-5)


def test_with_an_empty_mask_after_termination_the_update_is_finite():
    nothing = np.zeros((ROWS, ACTIONS), np.bool_)
    made = batch(~nothing, nothing)._replace(discount=np.zeros(ROWS, np.float32))
    state, told = update[True](first["dqn"], made, KNOBS)
    assert bool(told.ok)
    assert np.isfinite(state.weights).all()


@pytest.mark.parametrize("double", [True, False])
def test_with_an_empty_mask_after_truncation_every_action_counts(double):
    rng = np.random.default_rng(1)
    nothing = np.zeros((ROWS, ACTIONS), np.bool_)
    q, target = (rng.normal(size=(STATES, ACTIONS)).astype(np.float32) for _ in range(2))
    state = first["dqn"]._replace(
        weights=vector(doubles[double], q), target=vector(doubles[double], target)
    )
    some = nothing.copy()
    some[1::2, 2] = True  # rows with a mask stay bound to it
    wanted = np.where(some.any(1, keepdims=True), some, True)
    (empty, told), (full, same) = (
        update[double](state, batch(~nothing, action_mask), KNOBS) for action_mask in (some, wanted)
    )
    assert bool(told.ok)
    np.testing.assert_array_equal(told.priorities, same.priorities)
    np.testing.assert_array_equal(empty.weights, full.weights)


def test_the_conservative_term_of_dqn_counts_only_valid_actions_and_the_recorded_one():
    rng = np.random.default_rng(2)
    table = rng.normal(size=(STATES, ACTIONS)).astype(np.float32)
    action_mask = np.zeros((ROWS, ACTIONS), np.bool_)
    action_mask[1:, :2] = True
    given = batch(action_mask, action_mask)
    given.action[0] = 3  # a row whose mask allows nothing, not even what was recorded
    losses = []
    conservative = Dqn(GAME, DqnConfig(widths=(), batch=ROWS, dueling=False, conservative=1.0))
    for run in (update[True], jax.jit(conservative.update)):
        state = first["dqn"]._replace(weights=vector(conservative, table))
        losses.append(float(run(state, given, KNOBS)[1].metrics["loss"]))
    rows = table[given.obs["obs"]]
    gap = np.log(np.exp(rows[:, :2]).sum(1)) - rows[np.arange(ROWS), given.action]
    gap[0] = 0.0
    assert losses[1] - losses[0] == pytest.approx(gap.mean(), abs=1e-5)


def test_bc_moves_no_invalid_action_and_counts_only_valid_ones():
    action_mask = np.zeros((ROWS, ACTIONS), np.bool_)
    action_mask[:, :2] = True
    table = np.random.default_rng(0).normal(size=(STATES, ACTIONS)).astype(np.float32)
    made = batch(action_mask, action_mask)
    state = state_with("bc", table)
    knobs = {
        "learning_rate": np.float32(0.1),
        "weight_decay": np.float32(0),
        "entropy": np.float32(0),
        "max_gradient": np.float32(10),
    }
    after, told = jax.jit(ALGORITHMS["bc"].update)(state, made, knobs)
    moved = np.asarray(after.weights) - np.asarray(state.weights)
    kernel = flat.unpack(ALGORITHMS["bc"].network, moved)["heads.logits.0.kernel"]
    assert (kernel[:, 2:] == 0).all()
    assert (kernel[np.unique(made.obs["obs"]), :2] != 0).any()
    logits = table[made.obs["obs"], :2]
    chance = np.exp(logits[np.arange(ROWS), made.action]) / np.exp(logits).sum(1)
    assert float(told.metrics["loss"]) == pytest.approx(-np.log(chance).mean(), rel=1e-5)


def test_iql_moves_no_invalid_action_and_does_not_read_the_next_masks():
    action_mask = np.zeros((ROWS, ACTIONS), np.bool_)
    action_mask[:, :2] = True
    iql = ALGORITHMS["iql"]
    state = first["iql"]
    knobs = {name: np.float32(0.1) for name in IqlKnobs.__dataclass_fields__}
    update = jax.jit(iql.update)
    after, told = update(state, batch(action_mask, action_mask), knobs)
    moved = flat.unpack(iql.network, np.asarray(after.policy) - np.asarray(state.policy))
    kernel = moved["heads.logits.0.kernel"]
    assert bool(told.ok)
    assert (kernel[:, :2] != 0).any()
    # Only the decay, of a 0.01 of each weight, moves what is not valid.
    before = flat.unpack(iql.network, np.asarray(state.policy))["heads.logits.0.kernel"]
    np.testing.assert_allclose(kernel[:, 2:], -0.01 * before[:, 2:], atol=1e-7)
    other, _ = update(state, batch(action_mask, np.zeros_like(action_mask)), knobs)
    for one, same in zip(jax.tree.leaves(after), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(one, same)


def test_ppo_learns_with_the_probabilities_its_masks_gave():
    ppo = ALGORITHMS["ppo"]
    knobs = {
        one: np.float32(value)
        for one, value in {
            "learning_rate": 1e-2,
            "clip": 0.2,
            "discount": 0.9,
            "gae_lambda": 0.9,
            "entropy": 0.01,
            "value": 0.5,
            "max_gradient": 0.5,
        }.items()
    }
    rollout = random_rollout(ppo, first["ppo"], np.random.default_rng(0))
    assert not rollout.action_mask.all()
    _, told = jax.jit(ppo.update)(first["ppo"], rollout, knobs)
    assert bool(told.ok)
    assert float(told.ratio_error) < 1e-5


class Stopped(MaskedEnv):
    """Truncated after five steps, with a mask that allows nothing."""

    def step(self, action: Any) -> Any:
        obs, reward, _, _, info = super().step(action)
        is_over = self.n_steps == 5
        return obs, reward, False, is_over, {"action_mask": info["action_mask"] * (not is_over)}


def test_first_priorities_stay_small_with_an_empty_mask_after_truncation():
    envs = make_envs(Stopped, 2)
    game = game_of(envs)
    policy = (dqn := Dqn(game, DqnConfig(widths=(8,), batch=8))).policy(
        dqn.init(jax.random.PRNGKey(0))
    )
    chunks = (
        Actor(envs, game, root_seed=0, created_ms=1)
        .collect(policy, 16, round_no=0, explore=1.0)
        .chunks
    )
    assert not any(chunk.columns["action_mask"].any(1).all() for chunk in chunks)
    assert max(chunk.columns["priority"].max() for chunk in chunks) < 100


# --- In an env that raises when it is cheated -----------------------------------------------------


@pytest.mark.parametrize("name", ["dqn", "ppo"])
def test_playing_and_learning_never_takes_an_invalid_action(name):
    envs = make_envs(MaskedEnv, 2)
    game = game_of(envs)
    assert game.has_action_mask
    ppo = Ppo(game, PpoConfig(widths=(8,), rollout=16, envs=2, epochs=1)), PpoKnobs()
    dqn = Dqn(game, DqnConfig(widths=(8,), batch=8)), DqnKnobs()
    limiter = LimiterConfig(samples_per_insert=4.0, min_inserts=8)
    how = LearnerConfig(updates_per_call=4, limiter=limiter)
    learner = Learner(*(ppo if name == "ppo" else dqn), root_seed=0, config=how)
    actor = Actor(envs, game, root_seed=0, created_ms=1_760_000_000_000)
    for round_no in range(4):
        explore = 0.5 if name == "dqn" else None
        for chunk in actor.collect(
            learner.publish(), 16, round_no=round_no, explore=explore
        ).chunks:
            learner.insert(chunk)
        while learner.may_step:
            learner.step(0.0)
    assert learner.counts.updates > 3
    assert learner.counts.skipped_updates == 0
