"""Advantages and n-step returns against plain loops that read like their definitions."""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.learn.worlds import Move, chunk_of
from understudy.algorithm import Rollout, Transitions
from understudy.experience.game import game_spec
from understudy.learn.algorithms.ppo import advantages
from understudy.learn.replay import HostReplay
from understudy.learn.rows import windows_of
from understudy.replay import ReplayConfig

STEPS = 8
ENVS = 3
GAME = game_spec("line", obs=1, actions=2)

found_by_scan = jax.jit(advantages)
numbers = hnp.arrays(np.float32, (STEPS, ENVS), elements=st.integers(-8, 8).map(lambda n: n / 4))
flags = hnp.arrays(np.bool_, (STEPS, ENVS))
shares = st.sampled_from([0.0, 0.5, 0.9, 1.0])


def rollout(reward: Any, terminated: Any, truncated: Any) -> Rollout:
    return Rollout({}, None, reward, {}, terminated, truncated, None)


def by_definition(
    played: Rollout, values: Any, after: Any, *, discount: float, gae_lambda: float
) -> Any:
    """Each advantage as a sum over what follows, until an episode ends or the rollout does."""
    found = np.zeros((STEPS, ENVS))
    for t in range(STEPS):
        for env in range(ENVS):
            weight = 1.0
            for later in range(t, STEPS):
                ahead = (
                    0.0 if played.terminated[later, env] else discount * float(after[later, env])
                )
                found[t, env] += weight * (played.reward[later, env] + ahead - values[later, env])
                if played.terminated[later, env] or played.truncated[later, env]:
                    break
                weight *= discount * gae_lambda
    return found


@settings(max_examples=150, deadline=None)
@given(numbers, numbers, numbers, flags, flags, shares, shares)
def test_advantages_equal_a_plain_loop(
    reward, values, after, terminated, truncated, discount, gae_lambda
):
    played = rollout(reward, terminated, truncated)
    wanted = by_definition(played, values, after, discount=discount, gae_lambda=gae_lambda)
    found = found_by_scan(played, values, after, discount=discount, gae_lambda=gae_lambda)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_a_truncated_step_is_still_worth_what_it_led_to():
    nothing = np.zeros((STEPS, ENVS), np.bool_)
    reward = np.ones((STEPS, ENVS), np.float32)
    values = np.zeros((STEPS, ENVS), np.float32)
    after = np.full((STEPS, ENVS), 10.0, np.float32)
    ends = nothing.copy()
    ends[3] = True
    truncated = found_by_scan(
        rollout(reward, nothing, ends), values, after, discount=0.9, gae_lambda=1.0
    )
    terminated = found_by_scan(
        rollout(reward, ends, nothing), values, after, discount=0.9, gae_lambda=1.0
    )
    both = found_by_scan(rollout(reward, ends, ends), values, after, discount=0.9, gae_lambda=1.0)
    assert truncated[3, 0] == pytest.approx(10.0)
    assert terminated[3, 0] == both[3, 0] == pytest.approx(1.0)


@pytest.mark.parametrize("gae_lambda", [0.0, 1.0])
def test_gae_lambda_reaches_from_one_step_to_the_whole_rollout(gae_lambda):
    rng = np.random.default_rng(0)
    nothing = np.zeros((STEPS, ENVS), np.bool_)
    reward, values = (rng.normal(size=(STEPS, ENVS)).astype(np.float32) for _ in range(2))
    after = np.concatenate([values[1:], rng.normal(size=(1, ENVS)).astype(np.float32)])
    found = found_by_scan(
        rollout(reward, nothing, nothing), values, after, discount=0.9, gae_lambda=gae_lambda
    )
    if gae_lambda == 0:
        wanted = reward + 0.9 * after - values
    else:
        powers = 0.9 ** np.arange(STEPS)[:, None]
        wanted = np.array([(powers[: STEPS - t] * reward[t:]).sum(0) for t in range(STEPS)])
        wanted += 0.9 ** (STEPS - np.arange(STEPS))[:, None] * after[-1] - values
    np.testing.assert_allclose(found, wanted, atol=1e-5)


# --- n steps --------------------------------------------------------------------------------------

ends = st.lists(
    st.sampled_from([None, None, None, "terminated", "truncated", "cut"]), min_size=1, max_size=14
)


def moves_of(how: list[Any], rewards: list[float]) -> list[Move]:
    """Steps numbered by what they see; behind each end a number is left out, for what was seen
    last."""
    moves: list[Move] = []
    at = 0
    is_first = True
    for end, reward in zip(how, rewards, strict=False):
        moves.append(Move([float(at)], 0, reward, [float(at + 1)], end, is_first))
        at = at + (2 if end else 1)
        is_first = end is not None
    return moves


def naive(moves: list[Move], start: int, n: int, discount: float) -> tuple[float, float, float]:
    """(return, discount, observation at the end) of the window from this move on."""
    total = 0.0
    power = 1.0
    for move in moves[start : start + n]:
        total += power * move.reward
        power *= discount
        if move.end is not None:
            break
    return total, 0.0 if move.end == "terminated" else power, move.after[0]


@settings(max_examples=150, deadline=None)
@given(ends, st.lists(st.integers(-4, 4), min_size=14, max_size=14), st.integers(1, 5), shares)
def test_n_step_windows_equal_a_plain_loop(how, rewards, n, discount):
    moves = moves_of(how, rewards)
    columns = chunk_of(GAME, moves).columns
    wanted = [naive(moves, start, n, discount) for start in range(len(moves))]
    weighted = {**columns, "weight": np.ones(len(columns["row"]), np.float32)}
    windows = windows_of(weighted, 0, needs=Transitions(batch=1, n_step=n, discount=discount))
    at = np.flatnonzero(columns["row"] == 0)
    np.testing.assert_allclose(windows.returns[at], [one[0] for one in wanted], atol=1e-5)
    np.testing.assert_allclose(windows.discount[at], [one[1] for one in wanted], atol=1e-6)
    np.testing.assert_array_equal(
        columns["obs"][at + windows.ahead[at], 0], [one[2] for one in wanted]
    )


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_what_a_replay_hands_to_an_update_equals_a_plain_loop(n):
    rng = np.random.default_rng(n)
    how = rng.choice(np.array([None, None, None, "terminated", "truncated"], object), 60).tolist()
    moves = moves_of(how, rng.normal(size=60).tolist())
    replay = HostReplay(
        GAME, Transitions(batch=256, n_step=n, discount=0.9), ReplayConfig(capacity=512)
    )
    for number, cut in enumerate(range(0, 60, 7)):
        replay.insert(chunk_of(GAME, moves[cut : cut + 7], chunk_no=number))
    replay.close(chunk_of(GAME, moves[:1]).meta.session)
    batch = replay.draw(1, rng=rng).batches
    start_of = {move.obs[0]: at for at, move in enumerate(moves)}
    starts = [start_of[float(obs)] for obs in batch.obs["obs"][0, :, 0]]
    assert len(set(starts)) > 50
    wanted = np.array([naive(moves, start, n, 0.9) for start in starts])
    np.testing.assert_allclose(batch.reward[0], wanted[:, 0], atol=1e-5)
    np.testing.assert_allclose(batch.discount[0], wanted[:, 1], atol=1e-6)
    alive = wanted[:, 1] > 0
    np.testing.assert_array_equal(batch.next_obs["obs"][0, alive, 0], wanted[alive, 2])
