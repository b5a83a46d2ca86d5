"""CartPole: a pole on a cart that is pushed left or right; the same bits as Gymnasium's CartPole-v1.

A state is `float[4, ...]`: position, velocity, angle, angular velocity, each for any number of envs side by side.
The functions are pure and take their array module, so that they run with NumPy (float64, bit-equal to Gymnasium) and
inside jax.jit. The limit of 500 steps belongs to the env, not to the physics.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from understudy.games.seeded import first_uniforms

GRAVITY = 9.8
PUSH = 10.0
CART_MASS = 1.0
POLE_MASS = 0.1
TOTAL_MASS = POLE_MASS + CART_MASS
HALF_POLE = 0.5
POLE_MOMENT = POLE_MASS * HALF_POLE
STEP_S = 0.02

MAX_POSITION = 2.4
MAX_ANGLE = 12 * 2 * math.pi / 360
MAX_EPISODE_STEPS = 500
RESET_BOUND = 0.05


def reset(seed: int | None = None) -> NDArray[np.float64]:
    """The first state of the episode that Gymnasium plays from this seed, or of any; float64[4]."""
    rng = np.random.Generator(np.random.PCG64(seed))
    return rng.uniform(-RESET_BOUND, RESET_BOUND, 4)


def reset_many(seeds: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
    """float64[4, seeds]: what `reset` gives for each of these 32-bit seeds, in a fraction of the time."""
    return -RESET_BOUND + 2 * RESET_BOUND * first_uniforms(seeds, 4)


def step(xp: Any, state: Any, action: Any) -> tuple[Any, Any, Any]:
    """The next state, its reward and whether the pole fell or the cart left; `action` 1 pushes right, 0 left."""
    _, velocity, angle, spin = state
    push = xp.where(action == 1, PUSH, -PUSH)
    cosine, sine = xp.cos(angle), xp.sin(angle)
    # The order of operations is Gymnasium's: floating-point sums depend on it.
    pull = (push + POLE_MOMENT * (spin * spin) * sine) / TOTAL_MASS
    turn = (GRAVITY * sine - cosine * pull) / (HALF_POLE * (4.0 / 3.0 - POLE_MASS * (cosine * cosine) / TOTAL_MASS))
    shove = pull - POLE_MOMENT * turn * cosine / TOTAL_MASS
    state = state + STEP_S * xp.asarray([velocity, shove, spin, turn])
    has_left, has_fallen = xp.abs(state[0]) > MAX_POSITION, xp.abs(state[2]) > MAX_ANGLE
    return state, xp.ones_like(state[0]), has_left | has_fallen


class Carts:
    """Many carts in NumPy that move in place: the bits of `step` without its temporaries, in two thirds of its time."""

    def __init__(self, n: int) -> None:
        self.state = state = np.zeros((4, n))
        """float64[4, n]; write into it, never put another in its place: the views below are of this one."""
        rates, far, beyond = np.empty((4, n)), np.empty((2, n)), np.empty((2, n), np.bool_)
        self._whole = rates, rates[::2], state[1::2], state[::2], far, beyond
        self._rows = *state[2:], *rates[1::2], *np.empty((5, n)), *beyond

    def step(self, action: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """Push every cart; which of them left or let the pole fall."""
        rates, moves, speeds, places, far, beyond = self._whole
        angle, spin, shove, turn, cosine, sine, pull, a, b, has_left, has_fallen = self._rows
        add, subtract, multiply, divide = np.add, np.subtract, np.multiply, np.divide
        np.cos(angle, cosine), np.sin(angle, sine)
        # Each line is one of `step`, in the same order; constants that are arrays need no conversion.
        multiply(multiply(_POLE_MOMENT, multiply(spin, spin, a), a), sine, a)
        divide(add(_PUSHES.take(action, out=pull, mode="clip"), a, pull), _TOTAL_MASS, pull)
        divide(multiply(_POLE_MASS, multiply(cosine, cosine, a), a), _TOTAL_MASS, a)
        multiply(_HALF_POLE, subtract(_FOUR_THIRDS, a, a), a)
        divide(subtract(multiply(_GRAVITY, sine, b), multiply(cosine, pull, turn), b), a, turn)
        divide(multiply(multiply(_POLE_MOMENT, turn, a), cosine, a), _TOTAL_MASS, a)
        subtract(pull, a, shove)
        moves[:] = speeds
        add(self.state, multiply(_STEP_S, rates, rates), self.state)
        np.greater(np.abs(places, far), _LIMITS, beyond)
        ended: NDArray[np.bool_] = np.logical_or(has_left, has_fallen)
        return ended


_PUSHES = np.array([-PUSH, PUSH])
_LIMITS = np.array([[MAX_POSITION], [MAX_ANGLE]])
_GRAVITY, _TOTAL_MASS, _POLE_MASS, _HALF_POLE, _POLE_MOMENT, _FOUR_THIRDS, _STEP_S = (
    np.array(value) for value in (GRAVITY, TOTAL_MASS, POLE_MASS, HALF_POLE, POLE_MOMENT, 4.0 / 3.0, STEP_S)
)
