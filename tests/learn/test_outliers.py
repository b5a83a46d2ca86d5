"""False numbers of a few players decide neither the scale of rewards nor that of observations."""

import numpy as np
import pytest

from understudy.learn.outliers import believable, is_believable, obs_limits, reward_size


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
