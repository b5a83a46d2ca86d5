"""CartPole: a pole on a cart that is pushed left or right, bit-equal to Gymnasium's CartPole-v1.

A state is `float[4, ...]`: position, velocity, angle and angular velocity, each for any number of
envs. The functions are pure and have the array module as an argument, so that they run with NumPy
(float64, bit-equal to Gymnasium) and inside jax.jit. The limit of 500 steps is part of the env, not
of the physics.
"""

import math
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    """float64[4]: Gymnasium's first state for this seed, or a random one without a seed."""
    rng = np.random.Generator(np.random.PCG64(seed))
    return rng.uniform(-RESET_BOUND, RESET_BOUND, 4)


def reset_many(seeds: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
    """float64[4, seeds]: the result of `reset` for each 32-bit seed, in a fraction of the time."""
    states: NDArray[np.float64] = first_state(first_uniforms(seeds, N_FIRST))
    return states


N_FIRST = 4
"""How many random numbers a first state needs."""


def first_state(uniforms: Any) -> Any:
    """float[4, envs]: first states, from random numbers in [0, 1) of this shape."""
    return -RESET_BOUND + 2 * RESET_BOUND * uniforms


def step(xp: Any, state: Any, action: Any) -> tuple[Any, Any, Any]:
    """The next state, its reward and whether the episode terminated.

    Action 1 pushes right, 0 left. The episode ends when the pole falls or the cart leaves the
    track.
    """
    _, velocity, angle, spin = state
    push = xp.where(action == 1, PUSH, -PUSH)
    cosine = xp.cos(angle)
    sine = xp.sin(angle)
    # The order of operations is Gymnasium's, since floating-point results depend on it.
    pull = (push + POLE_MOMENT * (spin * spin) * sine) / TOTAL_MASS
    turn = (GRAVITY * sine - cosine * pull) / (
        HALF_POLE * (4.0 / 3.0 - POLE_MASS * (cosine * cosine) / TOTAL_MASS)
    )
    shove = pull - POLE_MOMENT * turn * cosine / TOTAL_MASS
    state = state + STEP_S * xp.asarray([velocity, shove, spin, turn])
    has_left = xp.abs(state[0]) > MAX_POSITION
    has_fallen = xp.abs(state[2]) > MAX_ANGLE
    return state, xp.ones_like(state[0]), has_left | has_fallen


class Carts:
    """Many carts in NumPy, updated in place: bit-equal to `step` in two thirds of its time."""

    def __init__(self, n: int) -> None:
        self.state = state = np.zeros((4, n))
        """float64[4, n]; write into this array and never replace it, since views refer to it."""
        rates = np.empty((4, n))
        far = np.empty((2, n))
        beyond = np.empty((2, n), np.bool_)
        self._whole = rates, rates[::2], state[1::2], state[::2], far, beyond
        self._rows = *state[2:], *rates[1::2], *np.empty((5, n)), *beyond

    def step(self, action: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """Push every cart and return which episodes terminated."""
        rates, moves, speeds, places, far, beyond = self._whole
        angle, spin, shove, turn, cosine, sine, pull, a, b, has_left, has_fallen = self._rows
        add = np.add
        subtract = np.subtract
        multiply = np.multiply
        divide = np.divide
        np.cos(angle, cosine)
        np.sin(angle, sine)
        # The operations of `step`, in the same order; constants are arrays, which need no
        # conversion.
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
    np.array(value)
    for value in (GRAVITY, TOTAL_MASS, POLE_MASS, HALF_POLE, POLE_MOMENT, 4.0 / 3.0, STEP_S)
)


# --- The first random numbers of many NumPy generators at once ------------------------------------

# Creating one `np.random.default_rng(seed)` takes as long as several steps of a cheap game. This
# code computes its numbers for hundreds of seeds at once: a SeedSequence spreads each seed over a
# pool of four words, the pool determines the state of a PCG64, and jumping ahead yields the
# following states. The tests compare the bits with NumPy's.

Words = NDArray[np.uint32]
Longs = NDArray[np.uint64]

_POOL = 4
_HALF = np.uint32(16)
_MIX_OLD = np.uint32(0xCA01F9DD)
_MIX_NEW = np.uint32(0x4973F715)
_PCG64 = 0x2360ED051FC65DA44385DF649FCCF645
_LOW = np.uint64(0xFFFFFFFF)
_1, _11, _32, _58, _63, _64 = (np.uint64(bits) for bits in (1, 11, 32, 58, 63, 64))


def first_uniforms(seeds: NDArray[np.integer[Any]], n: int) -> NDArray[np.float64]:
    """float64[n, seeds]: the first `n` numbers in [0, 1) of `default_rng(seed)`; seed < 2^32."""
    pool = _pool(np.asarray(seeds, np.uint32))
    words = _hashed(np.concatenate([pool, pool]), _STATE).astype(np.uint64)
    start_high, start_low, stream_high, stream_low = words[::2] | words[1::2] << _32
    step = (stream_high << _1 | stream_low >> _63, stream_low << _1 | _1)
    start = _plus((start_high, start_low), step)
    factors, addends = _jumps(n)
    high, low = _plus(_times(start, factors), _times(step, addends))
    mixed = high ^ low
    turn = high >> _58
    turned = mixed >> turn | mixed << (_64 - turn & _63)
    uniforms: NDArray[np.float64] = (turned >> _11).astype(np.float64) * 2.0**-53
    return uniforms


def _constants(first: int, factor: int, n: int) -> Words:
    """The constants of n hashes, uint32[n + 1, 1]; each hash uses two neighbouring ones."""
    return np.array([first * pow(factor, k) & 0xFFFFFFFF for k in range(n + 1)], np.uint32)[:, None]


_SPREAD = _constants(0x43B0D7E5, 0x931E8875, _POOL * _POOL)
_STATE = _constants(0x8B51F9DD, 0x58F38DED, 2 * _POOL)


def _hashed(words: Words, constants: Words) -> Words:
    words = (words ^ constants[:-1]) * constants[1:]
    return words ^ words >> _HALF


def _pool(seeds: Words) -> Words:
    """NumPy's SeedSequence pool of each seed, uint32[4, seeds]."""
    words = np.zeros((_POOL, len(seeds)), np.uint32)
    words[0] = seeds
    pool = _hashed(words, _SPREAD[: _POOL + 1])
    for source in range(_POOL):
        others = [target for target in range(_POOL) if target != source]
        first = _POOL + source * len(others)
        mixed = _MIX_OLD * pool[others] - _MIX_NEW * _hashed(
            pool[source], _SPREAD[first : first + _POOL]
        )
        pool[others] = mixed ^ mixed >> _HALF
    return pool


# --- Whole numbers modulo 2^128, as (high, low) ---------------------------------------------------

Wide = tuple[Longs, Longs]


@cache
def _jumps(n: int) -> tuple[Wide, Wide]:
    """Multipliers of `start` and of `step` for states 1 to n; a seeded PCG64 is one step ahead."""
    factors = [pow(_PCG64, k + 2, 1 << 128) for k in range(n)]
    addends = [sum(pow(_PCG64, j, 1 << 128) for j in range(k + 2)) % (1 << 128) for k in range(n)]
    return _wide(factors), _wide(addends)


def _wide(numbers: list[int]) -> Wide:
    halves = [[number >> 64, number & (1 << 64) - 1] for number in numbers]
    table = np.array(halves, np.uint64)
    return table[:, :1], table[:, 1:]


def _plus(left: Wide, right: Wide) -> Wide:
    low = left[1] + right[1]
    return left[0] + right[0] + (low < right[1]), low


def _times(left: Wide, right: Wide) -> Wide:
    a_high, a = left
    b_high, b = right
    a1 = a >> _32
    a0 = a & _LOW
    b1 = b >> _32
    b0 = b & _LOW
    cross = a1 * b0 + (a0 * b0 >> _32)
    carry = (cross & _LOW) + a0 * b1
    return a1 * b1 + (cross >> _32) + (carry >> _32) + a_high * b + a * b_high, a * b
