"""CartPole's physics: Gymnasium's bits in NumPy, close to them in jax.numpy."""

from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.games import cartpole


def test_ten_thousand_random_steps_have_gymnasiums_bits():
    env: Any = gymnasium.make("CartPole-v1").unwrapped
    rng = np.random.default_rng(1)
    seed = 0
    env.reset(seed=seed)
    state = cartpole.reset(seed)
    for action in rng.integers(2, size=10_000):
        obs, reward, terminated, _, _ = env.step(action)
        state, our_reward, our_terminated = cartpole.step(np, state, action)
        assert state.tobytes() == env.state.tobytes()
        assert state.astype(np.float32).tobytes() == obs.tobytes()
        assert (our_reward, our_terminated) == (reward, terminated)
        if terminated:
            seed += 1
            first, _ = env.reset(seed=seed)
            state = cartpole.reset(seed)
            assert state.astype(np.float32).tobytes() == first.tobytes()
    assert seed > 300


@pytest.mark.parametrize("num_envs", [1, 3, 64])
def test_carts_updated_in_place_have_gymnasiums_bits(num_envs: int):
    rng = np.random.default_rng(5)
    carts = cartpole.Carts(num_envs)
    n_ended = 0
    envs: list[Any] = [gymnasium.make("CartPole-v1").unwrapped for _ in range(num_envs)]
    for i, env in enumerate(envs):
        env.reset(seed=i)
        carts.state[:, i] = env.state
    for _ in range(10_000 // num_envs):
        actions = rng.integers(2, size=num_envs)
        theirs = [env.step(action) for env, action in zip(envs, actions, strict=True)]
        terminated = carts.step(actions)
        assert terminated.tolist() == [step[2] for step in theirs]
        assert carts.state.T.tobytes() == np.array([env.state for env in envs]).tobytes()
        for i in np.flatnonzero(terminated).tolist():
            n_ended += 1
            envs[i].reset(seed=n_ended)
            carts.state[:, i] = cartpole.reset(n_ended)
    assert n_ended > 300


def test_envs_in_a_batch_have_the_bits_of_each_alone():
    rng = np.random.default_rng(2)
    for num_envs in (1, 2, 3, 7, 8, 9, 64):
        together = rng.uniform(-1, 1, (4, num_envs)) * np.array([2.5, 3, 0.25, 3])[:, None]
        action = rng.integers(2, size=num_envs)
        state, reward, terminated = cartpole.step(np, together, action)
        for i in range(num_envs):
            alone = cartpole.step(np, together[:, i].copy(), action[i])
            assert state[:, i].tobytes() == alone[0].tobytes()
            assert (reward[i], terminated[i]) == alone[1:]


def test_the_jax_version_is_close_and_compiles():
    rng = np.random.default_rng(3)
    states = rng.uniform(-1, 1, (4, 500)) * np.array([2.5, 3, 0.25, 3])[:, None]
    action = rng.integers(2, size=500)
    state, reward, terminated = jax.jit(lambda s, a: cartpole.step(jnp, s, a))(
        states.astype(np.float32), action
    )
    expected, _, ended = cartpole.step(np, states, action)
    np.testing.assert_allclose(state, expected, rtol=1e-4, atol=1e-5)
    assert (np.asarray(terminated) == ended).mean() > 0.99
    assert state.dtype == jnp.float32
    assert (np.asarray(reward) == 1).all()


def test_leaving_the_track_or_the_angle_ends_the_episode():
    centre = np.zeros(4)
    assert not cartpole.step(np, centre, 1)[2]
    for place in (0, 2):
        for side in (-3.0, 3.0):
            state = centre.copy()
            state[place] = side
            assert cartpole.step(np, state, 1)[2]


def test_without_a_seed_each_episode_differs():
    assert cartpole.reset().tobytes() != cartpole.reset().tobytes()
    assert np.abs(cartpole.reset()).max() <= cartpole.RESET_BOUND


def test_many_first_states_have_the_bits_of_each_alone():
    seeds = np.random.default_rng(4).integers(1 << 32, size=500)
    assert (
        cartpole.reset_many(seeds).T.tobytes()
        == np.array([cartpole.reset(int(seed)) for seed in seeds]).tobytes()
    )


# --- Many generators' first numbers at once -------------------------------------------------------


def test_numbers_have_numpys_bits():
    seeds = np.concatenate(
        [[0, 1, 1 << 31, (1 << 32) - 1], np.random.default_rng(0).integers(1 << 32, size=2_000)]
    )
    expected = np.array([np.random.default_rng(int(seed)).random(4) for seed in seeds])
    assert cartpole.first_uniforms(seeds, 4).T.tobytes() == expected.tobytes()


@given(st.integers(0, (1 << 32) - 1), st.integers(1, 20))
def test_any_seed_and_any_count_work(seed: int, n: int):
    got = cartpole.first_uniforms(np.array([seed]), n)
    assert got[:, 0].tobytes() == np.random.default_rng(seed).random(n).tobytes()
