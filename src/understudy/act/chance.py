"""Where an actor's chance comes from: pure functions of the run's root seed, so that no generator needs saving."""

import hashlib
import uuid

import numpy as np

from understudy.core.names import new_session


def episode_seed(root_seed: int, *, env: int, episode: int) -> int:
    """The 32-bit seed an env is reset with for its nth episode."""
    return int.from_bytes(_digest(f"episode/{root_seed}/{env}/{episode}", 4), "little")


def noise_rng(root_seed: int, *, env: int, round_no: int) -> np.random.Generator:
    """The generator of one round's noise, for the envs from `env` on."""
    key = int.from_bytes(_digest(f"noise/{root_seed}/{env}/{round_no}", 16), "little")
    return np.random.Generator(np.random.Philox(key=key))


def actor_session(created_ms: int, *, root_seed: int, env: int, incarnation: int) -> uuid.UUID:
    """The session of one env's episodes; a new incarnation starts a new one."""
    return new_session(created_ms / 1000, _digest(f"session/{root_seed}/{env}/{incarnation}", 10))


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=size).digest()
