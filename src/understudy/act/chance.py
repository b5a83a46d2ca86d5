"""Where an actor's chance comes from: pure functions of the run's root seed, so that no generator needs saving."""

import hashlib
import uuid

import numpy as np
from numpy.typing import NDArray

from understudy.core.names import new_session


def episode_starts(root_seed: int, *, first_env: int, num_envs: int, incarnation: int = 0) -> NDArray[np.uint64]:
    """uint64[envs]: from where each env counts its seeds; a new incarnation plays other episodes."""
    names = [f"episodes/{root_seed}/{env}/{incarnation}" for env in range(first_env, first_env + num_envs)]
    return np.array([int.from_bytes(_digest(name, 8), "little") for name in names], np.uint64)


def episode_seeds(starts: NDArray[np.uint64], first: NDArray[np.int64], *, n: int) -> NDArray[np.uint32]:
    """uint32[envs, n], below 2^31: what each env is reset with for its episodes from its `first` on.

    Seeds from 2^31 on are held out: no actor ever plays them.
    """
    number = (first[:, None] + np.arange(1, n + 1)).astype(np.uint64)
    # A counter through a mixing function (Steele's splitmix64): any episode's seed without those before it.
    z: NDArray[np.uint64] = starts[:, None] + number * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    seeds: NDArray[np.uint32] = (z >> np.uint64(33)).astype(np.uint32)
    return seeds


def noise_rng(root_seed: int, *, env: int, round_no: int) -> np.random.Generator:
    """The generator of one round's noise, for the envs from `env` on."""
    key = int.from_bytes(_digest(f"noise/{root_seed}/{env}/{round_no}", 16), "little")
    return np.random.Generator(np.random.Philox(key=key))


def actor_session(created_ms: int, *, root_seed: int, env: int, incarnation: int) -> uuid.UUID:
    """The session of one env's episodes; a new incarnation starts a new one."""
    return new_session(created_ms / 1000, _digest(f"session/{root_seed}/{env}/{incarnation}", 10))


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=size).digest()
