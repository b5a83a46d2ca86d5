"""Lanes against the same runs alone, and what they draw against windows by hand.

Updates alone are compared, for every algorithm, by the contract in `understudy.testing`.
"""

from typing import Any

import jax
import numpy as np
import pytest

from understudy.act.vector import game_of, make_envs
from understudy.algorithm import Batch, Feedback, Transitions
from understudy.core.errors import ConfigError
from understudy.learn.algorithms.dqn import Dqn, DqnConfig
from understudy.learn.algorithms.ppo import Ppo
from understudy.learn.lanes import LanePlan, LaneProgram, Rounds, why_not

GAME = game_of(make_envs("CartPole-v0", 1))
PLAIN = DqnConfig(widths=(64,), batch=64, n_step=1, dueling=False, prioritised=False)
LANES = 3
ROUNDS = 24
RATES = np.array([1e-3, 4e-3, 2e-4], np.float32)
PERIODS = np.array([4, 3, 50], np.float32)


def knobs_of(lanes: Any) -> dict[str, Any]:
    """Different knobs for each lane."""
    n = len(RATES[lanes])
    return {
        "learning_rate": RATES[lanes],
        "target_rate": np.ones(n, np.float32),
        "target_period": PERIODS[lanes],
        "max_gradient": np.full(n, 10, np.float32),
        "huber_delta": np.full(n, 1, np.float32),
        "epsilon": np.full(n, 0.5, np.float32),
        "importance_exponent": np.ones(n, np.float32),
    }


def rounds_of(lanes: Any, n_rounds: int = ROUNDS) -> Rounds:
    def repeated(row: Any) -> Any:
        return np.tile(row, (n_rounds, 1))

    n = len(RATES[lanes])
    knobs = {name: repeated(row) for name, row in knobs_of(lanes).items()}
    return Rounds(knobs["epsilon"], np.ones((n_rounds, n), np.int32), knobs)


PROGRAMS: dict[Any, LaneProgram] = {}


def program_of(lanes: int, *, n_step: int = 1, **plan: int) -> LaneProgram:
    """A program with lanes that were never started, compiled once for all tests."""
    sizes = {"envs": 1, "collect": 1, "capacity": 48, "max_rounds": ROUNDS, **plan}
    key = (lanes, n_step, *sorted(sizes.items()))
    known = PROGRAMS.get(key)
    config = DqnConfig(widths=(64,), batch=64, n_step=n_step, dueling=False, prioritised=False)
    made = LaneProgram(Dqn(GAME, config), LanePlan(lanes=lanes, **sizes))
    if known is not None:
        made._call = known._call
    PROGRAMS[key] = made
    return made


def alone(lane: int, seed: int, calls: int = 4) -> Any:
    """The state of the lane's run in a program of one lane."""
    program = program_of(1)
    program.start(0, seed=seed, discount=0.9 + lane / 100)
    for _ in range(calls):
        program.run(rounds_of([lane]), np.ones(1, np.bool_))
    return program.state(0)


def check_equal(one: Any, other: Any) -> None:
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(left, right)


# --- Whole programs -------------------------------------------------------------------------------


def test_every_lane_equals_the_run_alone_and_so_does_a_refilled_one():
    program = program_of(LANES)
    everyone = np.ones(LANES, np.bool_)
    for lane in range(LANES):
        program.start(lane, seed=lane, discount=0.9 + lane / 100)
    for call in range(4):
        if call == 2:  # lane 1 starts again while the others are half-way
            program.start(1, seed=7, discount=0.91)
        program.run(rounds_of(slice(None)), everyone)
    for lane in (0, 2):
        check_equal(program.state(lane), alone(lane, seed=lane))
    check_equal(program.state(1), alone(1, seed=7, calls=2))


def test_all_lanes_started_at_once_equal_lanes_started_one_by_one():
    one = program_of(LANES)
    other = program_of(LANES)
    discounts = [0.9 + lane / 100 for lane in range(LANES)]
    for lane, discount in enumerate(discounts):
        one.start(lane, seed=lane, discount=discount)
    other.start(1, seed=99, discount=0.1)  # what a program had before is replaced
    other.start_all(range(LANES), discounts)
    for _ in range(2):
        for program in (one, other):
            program.run(rounds_of(slice(None)), np.ones(LANES, np.bool_))
    for lane in range(LANES):
        check_equal(one.state(lane), other.state(lane))
    with pytest.raises(ConfigError, match="2 seeds and 2 discounts for 3 lanes"):
        other.start_all([1, 2], [0.9, 0.9])


def test_loops_of_compiled_length_compute_what_other_loops_compute():
    """Calls of two lengths, a lane that waits, and rounds without an update."""
    everyone = np.array([1, 1, 0], np.bool_)
    programs = (program_of(LANES), program_of(LANES, updates=1))
    for program in programs:
        program.start_all(range(LANES), [0.9, 0.91, 0.92])
        for n_rounds in (ROUNDS, 5):
            rounds = rounds_of(slice(None), n_rounds)
            rounds.updates[::3, 0] = 0
            program.run(rounds, everyone)
        program.wait()
    for lane in range(LANES):
        one, other = (program.state(lane) for program in programs)
        assert (one.rounds, one.steps) == (other.rounds, other.steps)
        assert one.learner.updates == other.learner.updates
        np.testing.assert_allclose(one.learner.weights, other.learner.weights, atol=1e-5)
        np.testing.assert_allclose(one.game, other.game, atol=1e-5)


def test_a_lane_that_waits_changes_nothing_and_then_continues_as_if_it_had_not():
    program = program_of(LANES)
    for lane in range(LANES):
        program.start(lane, seed=lane, discount=0.9 + lane / 100)
    for is_active in ([1, 1, 1], [1, 0, 1], [0, 0, 1], [1, 1, 1], [0, 1, 0], [1, 1, 0]):
        before = program.state(1)
        program.run(rounds_of(slice(None)), np.array(is_active, np.bool_))
        if not is_active[1]:
            check_equal(program.state(1), before)
    for lane in range(LANES):
        check_equal(program.state(lane), alone(lane, seed=lane))


def test_a_trial_computes_the_same_in_any_lane():
    states = []
    for lane in range(LANES):
        program = program_of(LANES)
        program.start(lane, seed=5, discount=0.95)
        for other in set(range(LANES)) - {lane}:
            program.start(other, seed=100 + other, discount=0.5)
        rounds = rounds_of([0, 0, 0])
        for _ in range(3):
            program.run(rounds, np.ones(LANES, np.bool_))
        states.append(program.state(lane))
    check_equal(states[0], states[1])
    check_equal(states[0], states[2])


def test_a_lane_whose_updates_are_not_finite_keeps_its_weights_and_changes_no_other():
    program = program_of(LANES)
    for lane in range(LANES):
        program.start(lane, seed=lane, discount=0.9 + lane / 100)
    before = program.state(1).learner
    rounds = rounds_of(slice(None))
    rounds.knobs["learning_rate"][:, 1] = np.nan
    for _ in range(4):
        program.run(rounds, np.ones(LANES, np.bool_))
    assert program.skips.tolist() == [0, 4 * ROUNDS, 0]
    check_equal(program.state(1).learner, before)
    for lane in (0, 2):
        check_equal(program.state(lane), alone(lane, seed=lane))


def test_batches_are_windows_of_what_was_played():
    """Every drawn row is a window of the game's own steps, and truncations bootstrap."""
    n_step = 3
    batches = []

    def update(state: Any, batch: Batch, knobs: Any) -> tuple[Any, Feedback]:
        jax.debug.callback(lambda batch: batches.append(jax.tree.map(np.array, batch)), batch)
        return state, Feedback({}, np.True_, np.ones(64, np.bool_))

    config = DqnConfig(widths=(), batch=64, n_step=n_step, prioritised=False)
    algorithm = Dqn(GAME, config)
    object.__setattr__(algorithm, "update", update)
    program = LaneProgram(algorithm, LanePlan(lanes=1, envs=2, collect=5, capacity=400))
    program.start(0, seed=3, discount=0.5)
    played = rounds_of([0], 100)
    updates = np.zeros((100, 1), np.int32)
    updates[-1] = 3
    program.run(Rounds(played.explore, updates, played.knobs), np.ones(1, np.bool_))
    jax.effects_barrier()
    ring = np.asarray(program._ring)[0]  # [times, envs, width]; 500 steps went through 200 times
    assert len(batches) == 3
    times = np.roll(ring, -(500 % 200), axis=0)  # oldest first
    first = {times[t, env, :4].tobytes(): (t, env) for t in range(200) for env in range(2)}
    seen_terminal = 0
    for batch in batches:
        for row in range(64):
            t, env = first[batch.obs["obs"][row].tobytes()]
            reward, factor, goes_on = 0.0, 1.0, 1.0
            assert t <= 200 - n_step
            for later in range(n_step):
                step = times[t + later, env]
                reward += factor * step[9]
                factor *= 0.5
                goes_on = step[10]
                if not step[11]:
                    break
            assert batch.action[row] == times[t, env, 8]
            assert batch.reward[row] == np.float32(reward)
            assert batch.discount[row] == np.float32(factor * goes_on)
            np.testing.assert_array_equal(batch.next_obs["obs"][row], step[4:8])
            seen_terminal += not goes_on
    assert seen_terminal
    for t in range(199):
        goes_on = times[t, :, 11] > 0
        np.testing.assert_array_equal(times[t, goes_on, 4:8], times[t + 1, goes_on, :4])


# --- Refusals -------------------------------------------------------------------------------------


def test_what_lanes_cannot_train_is_named():
    needs = Dqn(GAME, DqnConfig()).needs
    assert isinstance(needs, Transitions)
    assert "prioritised=false" in why_not(Dqn(GAME, DqnConfig()))
    assert "on-policy" in why_not(Ppo(GAME))
    other = game_of(make_envs("Acrobot-v1", 1))
    assert "Acrobot-v1" in why_not(Dqn(other, PLAIN))
    with pytest.raises(ConfigError, match="train it alone"):
        LaneProgram(Ppo(GAME), LanePlan(lanes=1, envs=1, collect=1, capacity=64))
    with pytest.raises(ConfigError, match="give at least 96"):
        LaneProgram(Dqn(GAME, PLAIN), LanePlan(lanes=1, envs=32, collect=2, capacity=64))
