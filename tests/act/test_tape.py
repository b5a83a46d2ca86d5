"""Episode counts and first priorities equal those of plain loops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.act.tape import EpisodeProgress, best_value, n_step_td, q_of, track_episodes
from understudy.core.errors import ConfigError


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 4),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
)
def test_episodes_are_counted_across_collects(seed: int, num_envs: int, collects: list[int]):
    rng = np.random.default_rng(seed)
    progress = EpisodeProgress(np.zeros(num_envs), np.zeros(num_envs, np.int64))
    total = [0.0] * num_envs
    length = [0] * num_envs
    for steps in collects:
        reward = rng.integers(-5, 6, (steps, num_envs)) / 4
        ended = rng.random((steps, num_envs)) < 0.4
        wanted = []
        for t in range(steps):
            for env in range(num_envs):
                total[env] += reward[t, env]
                length[env] += 1
                if ended[t, env]:
                    wanted.append((total[env], length[env]))
                    total[env] = 0.0
                    length[env] = 0
        given_reward = reward.copy()
        given_ended = ended.copy()
        progress, returns, lengths = track_episodes(reward, ended, progress)
        assert (reward == given_reward).all(), "the caller's tape was changed"
        assert (ended == given_ended).all()
        assert list(zip(returns.tolist(), lengths.tolist(), strict=True)) == wanted
        assert (progress.return_.tolist(), progress.length.tolist()) == (total, length)


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 12))
def test_windows_stop_at_ends_and_at_the_last_step(seed: int, n: int, steps: int):
    rng = np.random.default_rng(seed)
    reward, taken, after = rng.normal(size=(3, steps, 2))
    ended = rng.random((steps, 2)) < 0.25
    got = n_step_td(taken, after, reward=reward, ended=ended, n_step=n, discount=0.9)
    assert got.dtype == np.float32
    for t in range(steps):
        for env in range(2):
            target = 0.0
            k = 0
            while True:
                target += 0.9**k * reward[t + k, env]
                if ended[t + k, env] or k == n - 1 or t + k == steps - 1:
                    break
                k += 1
            target += 0.9 ** (k + 1) * after[t + k, env]
            np.testing.assert_allclose(
                got[t, env], abs(target - taken[t, env]), rtol=1e-5, atol=1e-6
            )


def test_the_best_value_is_that_of_a_valid_action():
    q = np.array([[1.0, 5.0, 3.0]], np.float32)
    assert best_value(q, None).tolist() == [5.0]
    assert best_value(q, np.array([[True, False, True]])).tolist() == [3.0]


def test_if_a_mask_allows_nothing_every_action_counts():
    q = np.array(
        [[[1.0, 5.0, 3.0], [-2.0, -9.0, -4.0]], [[0.0, -1e25, 7.0], [1.0, 2.0, 3.0]]], np.float32
    )
    action_mask = np.array([[[0, 0, 0], [0, 1, 1]], [[0, 0, 0], [1, 0, 0]]], np.bool_)
    assert best_value(q, action_mask).tolist() == [[5.0, -4.0], [7.0, 1.0]]


def test_a_network_without_action_values_is_rejected():
    with pytest.raises(ConfigError, match="need a head 'q'"):
        q_of({"logits": np.zeros((1, 2))})
