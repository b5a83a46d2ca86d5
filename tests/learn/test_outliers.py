"""False numbers of a few players decide neither the scale of rewards nor that of observations."""

import numpy as np
import pytest

from tests.learn.sessions import GAME, Piece, session_id
from tests.learn.test_replay import steps
from understudy.algorithm import Transitions
from understudy.learn.outliers import (
    believable,
    is_believable,
    obs_limits,
    reward_size,
    step_weights,
)
from understudy.learn.replay import HostReplay, ReplayConfig, ReplaySource


@pytest.mark.parametrize(
    ("sizes", "largest"),
    [
        ([], 0.0),
        ([0.0, 0.0], 0.0),
        ([1e12], 1e12),
        ([1.0, 1e12], 1e12),  # of two players, neither is the odd one
        ([1.0, 1e12, 2.0], 2.0),
        ([0.0, 0.0, 5.0], 5.0),  # the only reward there is
        ([1.0] * 18 + [1e9, 1e12], 1.0),
    ],
)
def test_the_largest_size_is_that_of_most_players(sizes: list[float], largest: float):
    assert believable(sizes) == largest


@pytest.mark.parametrize(
    ("n_steps", "share"),
    [
        ([100] + [10] * 29, 0.1),
        ([60, 60, 50] + [10] * 27, 0.1),
        ([60, 10, 10, 10, 10], 0.4),
        ([5, 1], 5 / 6),
        ([7] * 30, 1 / 30),
        ([9], 1.0),
        ([0, 0, 9], 1.0),
    ],
)
def test_no_player_has_more_than_a_tenth_of_what_is_learned(n_steps: list[int], share: float):
    learned = np.array(n_steps) * step_weights(n_steps)
    assert max(learned) / sum(learned) == pytest.approx(share)
    assert step_weights([]) == []


@pytest.mark.parametrize(
    ("n_steps", "n_main", "most"),
    [
        ([10_000, 10, 10], 1, 0.01),
        ([10_000] + [1] * 10, 1, 0.005),
        ([3_000] * 9 + [5] * 11, 9, 0.011),
    ],
)
def test_a_few_steps_of_other_names_do_not_decide_what_is_learned(
    n_steps: list[int], n_main: int, most: float
):
    learned = np.array(n_steps) * step_weights(n_steps)
    assert learned[n_main:].sum() / learned.sum() < most


def test_steps_of_who_plays_most_weigh_less_in_a_draw():
    replay = HostReplay(GAME, Transitions(batch=256), ReplayConfig(capacity=4_096))
    source = ReplaySource(replay, None, updates=8, batch=256, root_seed=0)
    lengths = [200, *[20] * 29]
    for session, length in enumerate(lengths):
        replay.insert(Piece(session, 0, steps(length)).chunk())
        replay.close(session_id(session))
    players = {session_id(session): bytes([session]) for session in range(30)}
    source.measure(players)
    batch = source.draw(0, importance_exponent=0.0)
    of_first = batch.obs["obs"][..., 1] == 0
    share = batch.weight[of_first].sum() / batch.weight.sum()
    assert share == pytest.approx(0.1, abs=0.02)
    assert of_first.mean() == pytest.approx(200 / sum(lengths), abs=0.05)
    # All by one player, or by players who play alike: nothing is changed.
    replay.evict(session_id(29), 0)
    source.measure(dict.fromkeys(players, b"one"))
    assert (source.draw(1, importance_exponent=0.0).weight == 1).all()


def test_a_rare_prize_is_believed_and_an_absurd_one_is_not():
    assert is_believable(50.0, 1.0)
    assert not is_believable(1e9, 1.0)
    assert is_believable(1e9, 0.0)


def test_a_players_own_absurd_rewards_do_not_count():
    rewards = np.full(1_000, -0.01, np.float32)
    rewards[::100] = 100.0  # a goal, which counts
    rewards[7] = 1e12
    assert reward_size(rewards) == 100.0
    assert reward_size(np.zeros(5, np.float32)) == 0.0


def test_one_bad_player_of_three_and_a_third_of_bad_rows_leave_the_limits_as_they_are():
    rng = np.random.default_rng(0)
    good = [rng.normal(size=(300, 2)) for _ in range(3)]
    low, high = obs_limits(good)
    assert (low > -20).all()
    assert (high < 20).all()
    spoiled = [good[0], good[1], np.full((300, 2), 1e6)]
    thirds = [np.where(rng.random((300, 1)) < 1 / 3, 1e6, rows) for rows in good]
    for bad in (spoiled, thirds, [thirds[0]]):
        low, high = obs_limits(bad)
        assert (low > -40).all()
        assert (high < 40).all()
        assert (low < -4).all()
        assert (high > 4).all()


def test_a_flag_that_few_rows_have_is_no_outlier():
    rows = (np.random.default_rng(0).random((256, 1)) < 0.05).astype(np.float32)
    low, high = obs_limits([rows])
    assert low[0] <= 0
    assert high[0] >= 1
    assert np.isinf(obs_limits([np.ones((10, 1))])).all(), "nothing to tell a range from"
