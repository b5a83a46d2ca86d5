"""Adam against optax's, and against itself in lanes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from understudy.learn.adam import Adam, norm_of


def gradients(steps: int, *lanes: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return (rng.normal(0, 3, (steps, *lanes, 40)) * rng.gamma(0.3, 1.0, 40)).astype(np.float32)


@pytest.mark.parametrize("max_gradient", [0.5, 1e6])
def test_moves_are_those_of_optax(max_gradient):
    ours = Adam(epsilon=1e-5)
    given = {"a": gradients(200)[:, :10], "b": gradients(200)[:, 10:]}
    theirs = optax.chain(optax.clip_by_global_norm(max_gradient), optax.scale_by_adam(eps=1e-5))
    first = {"a": jnp.zeros(10), "b": jnp.zeros(30)}
    _, mine = jax.lax.scan(
        lambda state, g: ours.update(g, state, max_gradient)[::-1], ours.init(first), given
    )
    _, others = jax.lax.scan(
        lambda state, g: theirs.update(g, state)[::-1], theirs.init(first), given
    )
    for name in first:
        np.testing.assert_allclose(mine[name], others[name], atol=2e-4)


def test_a_lane_moves_as_the_run_alone_does():
    ours = Adam()
    limits = np.array([3.0, 2.0, 1.0, 0.5, 1e6], np.float32)
    given = gradients(50, 5)
    alone = jax.jit(ours.update)
    lanes = jax.jit(jax.vmap(ours.update))
    state = ours.init(jnp.zeros(40))
    states = jax.vmap(ours.init)(jnp.zeros((5, 40)))
    for step in given:
        move, state = alone(step[2], state, limits[2])
        moves, states = lanes(step, states, limits)
        np.testing.assert_array_equal(move, moves[2])


def test_what_is_not_finite_stays_visible():
    ours = Adam()
    for bad in (np.nan, np.inf):
        gradient = np.ones(40, np.float32)
        gradient[3] = bad
        move, _ = ours.update(gradient, ours.init(gradient), 1.0)
        assert not np.isfinite(move).all()


def test_the_norm_is_over_all_arrays():
    assert float(norm_of({"a": jnp.full(9, 2.0), "b": jnp.full((4, 4), 2.0)})) == pytest.approx(
        10.0
    )
