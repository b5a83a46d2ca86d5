"""Adam against its definition in plain NumPy, and against itself in lanes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from understudy.learn.adam import Adam, norm_of


def gradients(steps: int, *lanes: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return (rng.normal(0, 3, (steps, *lanes, 40)) * rng.gamma(0.3, 1.0, 40)).astype(np.float32)


def by_definition(given: np.ndarray, *, max_gradient: float, epsilon: float) -> np.ndarray:
    """Kingma and Ba's algorithm 1 on clipped gradients, in float64."""
    mean, square, moves = np.zeros(40), np.zeros(40), []
    for count, gradient in enumerate(given.astype(np.float64), 1):
        clipped = gradient * min(1.0, max_gradient / np.linalg.norm(gradient))
        mean, square = 0.9 * mean + 0.1 * clipped, 0.999 * square + 0.001 * clipped**2
        moves.append(mean / (1 - 0.9**count) / (np.sqrt(square / (1 - 0.999**count)) + epsilon))
    return np.array(moves)


@pytest.mark.parametrize("max_gradient", [0.5, 1e6])
def test_moves_are_those_of_the_definition(max_gradient):
    ours, given = Adam(max_gradient, epsilon=1e-5), gradients(200)
    first = {"a": jnp.zeros(10), "b": jnp.zeros(30)}
    parts = {"a": given[:, :10], "b": given[:, 10:]}
    _, moves = jax.lax.scan(lambda state, g: ours.update(g, state)[::-1], ours.init(first), parts)
    wanted = by_definition(given, max_gradient=max_gradient, epsilon=1e-5)
    np.testing.assert_allclose(np.concatenate([moves["a"], moves["b"]], 1), wanted, atol=2e-4)


def test_a_lane_moves_as_the_run_alone_does():
    ours, given = Adam(1.0), gradients(50, 5)
    alone, lanes = jax.jit(ours.update), jax.jit(jax.vmap(ours.update))
    state, states = ours.init(jnp.zeros(40)), jax.vmap(ours.init)(jnp.zeros((5, 40)))
    for step in given:
        move, state = alone(step[2], state)
        moves, states = lanes(step, states)
        np.testing.assert_array_equal(move, moves[2])


def test_what_is_not_finite_stays_visible():
    ours = Adam(1.0)
    for bad in (np.nan, np.inf):
        gradient = np.ones(40, np.float32)
        gradient[3] = bad
        move, _ = ours.update(gradient, ours.init(gradient))
        assert not np.isfinite(move).all()


def test_the_norm_is_over_all_arrays():
    assert float(norm_of({"a": jnp.full(9, 2.0), "b": jnp.full((4, 4), 2.0)})) == pytest.approx(10.0)
