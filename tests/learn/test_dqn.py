"""DQN's single update against sums by hand, on tables: no layer between what is seen and the
values."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from understudy.algorithm import Batch, Transitions
from understudy.core.errors import ConfigError
from understudy.core.tensors import DTYPES
from understudy.experience.game import game_spec
from understudy.experience.spaces import Box, Discrete
from understudy.learn import flat
from understudy.learn.algorithms.dqn import Dqn, DqnConfig, DqnState
from understudy.nn.network import Dense, Dueling, Input, NetworkSpec, OneHot
from understudy.nn.policy import InitialPriority

STATES = 4
ACTIONS = 3
ROWS = 6
GAME = game_spec("table", obs=Discrete(STATES), actions=ACTIONS)
TABLE = DqnConfig(widths=(), batch=ROWS, dueling=False, prioritised=False)
KNOBS = {
    "learning_rate": np.float32(0.01),
    "target_rate": np.float32(1.0),
    "target_period": np.float32(2),
    "max_gradient": np.float32(1e6),
    "huber_delta": np.float32(1),
    "epsilon": np.float32(0),
}

algorithms = {double: Dqn(GAME, replace(TABLE, double=double)) for double in (True, False)}
update = {double: jax.jit(algorithm.update) for double, algorithm in algorithms.items()}


def state_of(q: Any, target: Any) -> DqnState:
    """A state whose online and target values are these tables, float[states, actions]."""
    algorithm = algorithms[True]

    def vector(table: Any) -> Any:
        kernel = np.asarray(table, np.float32)
        return flat.pack(
            algorithm.network,
            {"heads.q.0.kernel": kernel, "heads.q.0.bias": np.zeros(ACTIONS, np.float32)},
        )

    return algorithm.init(jax.random.PRNGKey(0))._replace(weights=vector(q), target=vector(target))


def table_of(vector: Any) -> Any:
    weights = flat.unpack(algorithms[True].network, np.asarray(vector))
    return weights["heads.q.0.kernel"] + weights["heads.q.0.bias"]


def tables(seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(STATES, ACTIONS)), rng.normal(size=(STATES, ACTIONS))


def batch(seed: int = 0, **changes: Any) -> Batch:
    rng = np.random.default_rng(seed)
    made = Batch(
        obs={"obs": rng.integers(0, STATES, ROWS)},
        action=rng.integers(0, ACTIONS, ROWS).astype(np.int32),
        reward=rng.normal(size=ROWS).astype(np.float32),
        next_obs={"obs": rng.integers(0, STATES, ROWS)},
        discount=np.array([0.9, 0.81, 0.0, 0.9, 0.729, 0.9], np.float32),
        weight=np.ones(ROWS, np.float32),
    )
    return made._replace(**changes)


def errors(q: Any, target: Any, given: Batch, *, double: bool) -> Any:
    """What the update's errors must be, row by row."""
    found = []
    for row in range(ROWS):
        after = given.next_obs["obs"][row]
        best = int(np.argmax((q if double else target)[after]))
        wanted = given.reward[row] + given.discount[row] * target[after][best]
        found.append(wanted - q[given.obs["obs"][row]][given.action[row]])
    return np.array(found)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize(("seed", "delta"), [(0, 1.0), (1, 1.0), (2, 0.5), (3, 1e6)])
def test_errors_and_loss_are_those_of_the_definition(double, seed, delta):
    (q, target), given = tables(seed), batch(seed)
    knobs = {**KNOBS, "huber_delta": np.float32(delta)}
    _, told = update[double](state_of(q, target), given, knobs)
    wanted = errors(q, target, given, double=double)
    np.testing.assert_allclose(told.priorities, np.abs(wanted) + 1e-6, atol=1e-5)
    size = np.abs(wanted)
    huber = np.where(size <= delta, size**2 / 2, delta * (size - delta / 2))
    assert float(told.metrics["loss"]) == pytest.approx(huber.mean(), abs=1e-5)
    assert float(told.metrics["error"]) == pytest.approx(np.abs(wanted).mean(), abs=1e-5)


def test_double_values_what_the_online_network_chooses_with_the_target():
    q = np.zeros((STATES, ACTIONS))
    target = np.tile([1.0, 5.0, 2.0], (STATES, 1))
    q[:, 2] = 1.0  # the online network prefers 2, the target 1
    given = batch(
        reward=np.zeros(ROWS, np.float32),
        discount=np.ones(ROWS, np.float32),
        action=np.zeros(ROWS, np.int32),
    )
    for double, worth in ((True, 2.0), (False, 5.0)):
        _, told = update[double](state_of(q, target), given, KNOBS)
        np.testing.assert_allclose(told.priorities, worth, atol=1e-5)


def test_a_terminated_step_does_not_bootstrap():
    given = batch(discount=np.zeros(ROWS, np.float32))
    (q, target), (_, far) = tables(1), tables(2)
    ends = [
        update[True](state_of(q, table), given, KNOBS)[1].priorities
        for table in (target, 1e6 * far)
    ]
    np.testing.assert_array_equal(*ends)


def test_a_step_moves_q_of_the_taken_actions_towards_the_td_target():
    q, target = tables(3)
    given = batch(3)
    after, _ = update[True](state_of(q, target), given, KNOBS)
    moved = table_of(after.weights) - q
    wanted = errors(q, target, given, double=True)
    for row, error in enumerate(wanted):
        same = [
            r
            for r in range(ROWS)
            if (given.obs["obs"][r], given.action[r]) == (given.obs["obs"][row], given.action[row])
        ]
        if len(same) == 1:
            assert np.sign(moved[given.obs["obs"][row], given.action[row]]) == np.sign(error)


def test_a_row_with_weight_zero_changes_nothing():
    (q, target), weight = tables(4), np.ones(ROWS, np.float32)
    weight[2:] = 0
    given = batch(4, weight=weight)
    other = given._replace(reward=np.where(weight > 0, given.reward, 50.0).astype(np.float32))
    states = [update[True](state_of(q, target), one, KNOBS)[0] for one in (given, other)]
    np.testing.assert_array_equal(states[0].weights, states[1].weights)


@pytest.mark.parametrize("rate", [1.0, 0.25])
def test_the_target_moves_every_period_by_its_rate(rate):
    q, target = tables(5)
    state = state_of(q, target)
    knobs = KNOBS | {"target_rate": np.float32(rate)}
    for number in range(1, 5):
        before = state
        state, _ = update[True](before, batch(number), knobs)
        share = rate if number % 2 == 0 else 0.0
        np.testing.assert_allclose(
            state.target,
            before.target + share * (np.asarray(state.weights) - before.target),
            atol=1e-6,
        )
    assert int(state.updates) == 4


def test_the_conservative_term_is_the_gap_between_the_soft_maximum_and_the_recorded_action():
    (q, target), given = tables(6), batch(6)
    state = state_of(q, target)
    _, without = update[True](state, given, KNOBS)
    conservative = Dqn(GAME, replace(TABLE, conservative=2.0))
    _, told = jax.jit(conservative.update)(state, given, KNOBS)
    rows = q[given.obs["obs"]]
    gap = np.log(np.exp(rows).sum(1)) - rows[np.arange(ROWS), given.action]
    added = float(told.metrics["loss"]) - float(without.metrics["loss"])
    assert added == pytest.approx(2.0 * gap.mean(), abs=1e-5)
    np.testing.assert_array_equal(told.priorities, without.priorities)
    # Without it, no operation of the program belongs to it: its bits are those of plain DQN.
    programs = [
        str(jax.make_jaxpr(one.update)(state, given, KNOBS))
        for one in (algorithms[True], conservative)
    ]
    assert ["exp" in program for program in programs] == [False, True]


# --- As data --------------------------------------------------------------------------------------


def test_needs_and_policy_say_what_the_settings_say():
    config = DqnConfig(batch=8, n_step=4, discount=0.5, prioritised=True)
    algorithm = Dqn(GAME, config)
    assert algorithm.needs == Transitions(batch=8, n_step=4, discount=0.5, prioritised=True)
    policy = algorithm.policy(algorithm.init(jax.random.PRNGKey(0)))
    assert policy.priority == InitialPriority(n_step=4, discount=0.5)
    assert policy.head.kind == "epsilon_greedy"
    plain = Dqn(GAME, TABLE)
    assert plain.policy(plain.init(jax.random.PRNGKey(0))).priority is None


def test_the_network_is_dueling_or_plain_or_ones_own():
    assert isinstance(Dqn(GAME, DqnConfig(dueling=True)).network.heads["q"][-1], Dueling)
    assert isinstance(Dqn(GAME, DqnConfig(dueling=False)).network.heads["q"][-1], Dense)
    own = NetworkSpec(
        {"obs": Input((), DTYPES["I64"], (OneHot(STATES),))}, (Dense(5),), {"q": (Dense(ACTIONS),)}
    )
    assert Dqn(GAME, DqnConfig(network=own)).network is own


def test_a_run_may_start_from_given_weights():
    algorithm = algorithms[True]
    kernel = np.full((STATES, ACTIONS), 7.0, np.float32)
    given = {"heads.q.0.kernel": kernel, "heads.q.0.bias": np.zeros(9, np.float32), "other": kernel}
    state = algorithm.init(jax.random.PRNGKey(0), given)
    np.testing.assert_array_equal(table_of(state.weights), kernel)
    np.testing.assert_array_equal(state.weights, state.target)


def test_a_game_without_discrete_actions_is_rejected():
    with pytest.raises(ConfigError, match="use ppo"):
        Dqn(game_spec("pull", obs=2, actions=Box((1,), DTYPES["F32"], -1.0, 1.0)))
