"""The NumPy vector env gives what a loop over Gymnasium's own envs gives."""

from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from understudy.act.cartpole import CartPoleVector
from understudy.act.vector import make_envs
from understudy.core.errors import ConfigError


@pytest.mark.parametrize("num_envs", [1, 5, 16])
def test_every_step_has_the_bits_of_gymnasiums_vector_env(num_envs: int):
    ours, theirs = CartPoleVector(num_envs), make_envs("CartPole-v1", num_envs, builtin=False)
    assert isinstance(theirs, SyncVectorEnv)
    assert ours.single_observation_space == theirs.single_observation_space
    assert ours.single_action_space == theirs.single_action_space
    rng, n_ended = np.random.default_rng(num_envs), 0
    obs, _ = ours.reset(seed=7)
    assert obs.tobytes() == theirs.reset(seed=7)[0].tobytes()
    for _ in range(300):
        action = rng.integers(2, size=num_envs)
        got: tuple[Any, ...] = ours.step(action)
        wanted: tuple[Any, ...] = theirs.step(action)
        for one, other in zip(got[:4], wanted[:4], strict=True):
            assert one.dtype == other.dtype
            assert one.tobytes() == other.tobytes()
        ended = got[2] | got[3]
        n_ended += int(ended.sum())
        if ended.any():
            seeds = rng.integers(1 << 32, size=num_envs).tolist()
            after = [envs.reset(seed=seeds, options={"reset_mask": ended})[0] for envs in (ours, theirs)]
            assert after[0].tobytes() == after[1].tobytes()
    assert n_ended > 5


def test_an_episode_is_truncated_at_its_500th_step():
    ours, theirs = CartPoleVector(1), make_envs("CartPole-v1", 1, builtin=False)
    obs, _ = ours.reset(seed=3)
    theirs.reset(seed=3)
    for number in range(1, 501):
        action = np.array([int(obs[0, 2] + 0.3 * obs[0, 3] + 0.05 * obs[0, 0] + 0.1 * obs[0, 1] > 0)])
        obs, _, terminated, truncated, _ = ours.step(action)
        assert truncated[0] == theirs.step(action)[3][0] == (number == 500)
        assert not terminated[0]


def test_a_masked_reset_leaves_the_others_alone():
    envs = CartPoleVector(3)
    before, _ = envs.reset(seed=[1, 2, 3])
    after, _ = envs.reset(seed=[9, 9, 9], options={"reset_mask": np.array([False, True, False])})
    assert after[[0, 2]].tobytes() == before[[0, 2]].tobytes()
    assert (after[1] != before[1]).all()


def test_the_wrong_number_of_seeds_is_refused():
    with pytest.raises(ConfigError, match="2 seeds for 3 envs"):
        CartPoleVector(3).reset(seed=[1, 2])


def test_it_says_that_it_does_not_reset_by_itself():
    assert CartPoleVector(1).metadata["autoreset_mode"] is AutoresetMode.DISABLED


def test_prepared_seeds_begin_the_same_episodes():
    plain, prepared = CartPoleVector(3), CartPoleVector(3)
    prepared.prepare(np.array([8, 9, 4_000_000_000], np.uint32))
    for seeds in ([8, 9, 4_000_000_000], [8, 1, 2]):
        assert plain.reset(seed=seeds)[0].tobytes() == prepared.reset(seed=seeds)[0].tobytes()
