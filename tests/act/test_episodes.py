"""Returns and lengths over several collects are those of a plain count."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from understudy.act.episodes import Standing, count


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_episodes_are_counted_across_collects(seed: int, num_envs: int, collects: list[int]):
    rng = np.random.default_rng(seed)
    standing = Standing(np.zeros(num_envs), np.zeros(num_envs, np.int64))
    total, length = [0.0] * num_envs, [0] * num_envs
    for steps in collects:
        reward, ended = rng.integers(-5, 6, (steps, num_envs)) / 4, rng.random((steps, num_envs)) < 0.4
        wanted = []
        for t in range(steps):
            for env in range(num_envs):
                total[env] += reward[t, env]
                length[env] += 1
                if ended[t, env]:
                    wanted.append((total[env], length[env]))
                    total[env], length[env] = 0.0, 0
        given_reward, given_ended = reward.copy(), ended.copy()
        standing, returns, lengths = count(reward, ended, standing)
        assert (reward == given_reward).all(), "the caller's tape was changed"
        assert (ended == given_ended).all()
        assert list(zip(returns.tolist(), lengths.tolist(), strict=True)) == wanted
        assert (standing.return_.tolist(), standing.length.tolist()) == (total, length)
