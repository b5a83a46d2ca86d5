"""The first random numbers of many NumPy generators at once, for games that begin each episode from a seed.

Making one `np.random.default_rng(seed)` takes as long as several steps of a cheap game. Here the same numbers come for
hundreds of seeds in one go: a SeedSequence spreads each seed over a pool of four words, the pool gives the state of a
PCG64, and the states that follow are found by jumping ahead. The tests hold them to NumPy's own bits.
"""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
Longs = NDArray[np.uint64]

_POOL = 4
_HALF = np.uint32(16)
_MIX_OLD, _MIX_NEW = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
_PCG64 = 0x2360ED051FC65DA44385DF649FCCF645
_LOW = np.uint64(0xFFFFFFFF)
_1, _11, _32, _58, _63, _64 = (np.uint64(bits) for bits in (1, 11, 32, 58, 63, 64))


def first_uniforms(seeds: NDArray[np.integer[Any]], n: int) -> NDArray[np.float64]:
    """float64[n, seeds]: the first `n` numbers in [0, 1) of `default_rng(seed)`; seeds are from 0 below 2^32."""
    start_high, start_low, stream_high, stream_low = _generated(_pool(np.asarray(seeds, np.uint32)))
    step = (stream_high << _1 | stream_low >> _63, stream_low << _1 | _1)
    start = _plus((start_high, start_low), step)
    factors, addends = _jumps(n)
    high, low = _plus(_times(start, factors), _times(step, addends))
    mixed, turn = high ^ low, high >> _58
    turned = mixed >> turn | mixed << (_64 - turn & _63)
    uniforms: NDArray[np.float64] = (turned >> _11).astype(np.float64) * 2.0**-53
    return uniforms


# --- A seed spread over a pool, as a SeedSequence does it -----------------------------------------------------------


def _constants(first: int, factor: int, n: int) -> Words:
    """uint32[n + 1, 1]: each hash takes one of them and the one behind it."""
    return np.array([first * pow(factor, k) & 0xFFFFFFFF for k in range(n + 1)], np.uint32)[:, None]


_SPREAD = _constants(0x43B0D7E5, 0x931E8875, _POOL * _POOL)
_GIVEN = _constants(0x8B51F9DD, 0x58F38DED, 2 * _POOL)


def _hashed(words: Words, constants: Words) -> Words:
    words = (words ^ constants[:-1]) * constants[1:]
    return words ^ words >> _HALF


def _pool(seeds: Words) -> Words:
    """uint32[4, seeds]."""
    words = np.zeros((_POOL, len(seeds)), np.uint32)
    words[0] = seeds
    pool = _hashed(words, _SPREAD[: _POOL + 1])
    for source in range(_POOL):
        others = [target for target in range(_POOL) if target != source]
        first = _POOL + source * len(others)
        mixed = _MIX_OLD * pool[others] - _MIX_NEW * _hashed(pool[source], _SPREAD[first : first + _POOL])
        pool[others] = mixed ^ mixed >> _HALF
    return pool


def _generated(pool: Words) -> Longs:
    """uint64[4, seeds]: the words that seed a PCG64."""
    words = _hashed(np.concatenate([pool, pool]), _GIVEN).astype(np.uint64)
    longs: Longs = words[::2] | words[1::2] << _32
    return longs


# --- Whole numbers modulo 2^128, as (high, low) ---------------------------------------------------------------------

Wide = tuple[Longs, Longs]


@cache
def _jumps(n: int) -> tuple[Wide, Wide]:
    """What start and step are multiplied by for the states 1 to n; a seeded PCG64 has made one step already."""
    factors = [pow(_PCG64, k + 2, 1 << 128) for k in range(n)]
    addends = [sum(pow(_PCG64, j, 1 << 128) for j in range(k + 2)) % (1 << 128) for k in range(n)]
    return _wide(factors), _wide(addends)


def _wide(numbers: list[int]) -> Wide:
    halves = [[number >> 64, number & (1 << 64) - 1] for number in numbers]
    table = np.array(halves, np.uint64)
    return table[:, :1], table[:, 1:]


def _plus(one: Wide, other: Wide) -> Wide:
    low = one[1] + other[1]
    return one[0] + other[0] + (low < other[1]), low


def _times(one: Wide, other: Wide) -> Wide:
    (a_high, a), (b_high, b) = one, other
    a1, a0, b1, b0 = a >> _32, a & _LOW, b >> _32, b & _LOW
    cross = a1 * b0 + (a0 * b0 >> _32)
    carry = (cross & _LOW) + a0 * b1
    return a1 * b1 + (cross >> _32) + (carry >> _32) + a_high * b + a * b_high, a * b
