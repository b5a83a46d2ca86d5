"""An actor's randomness: pure functions of the run's root seed, so no generator has to be saved."""

import hashlib
import uuid
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from understudy.core.names import new_session
from understudy.core.tensors import Array
from understudy.nn.heads import Head

Ints = NDArray[np.int64]

_AHEAD = 1024
"""Seeds computed in one batch, over all envs, which makes each of them cheap."""


def episode_starts(
    root_seed: int, *, first_env: int, num_envs: int, incarnation: int = 0
) -> NDArray[np.uint64]:
    """Return uint64[envs], the origin of each env's episode seeds; differs between incarnations."""
    names = [
        f"episodes/{root_seed}/{env}/{incarnation}"
        for env in range(first_env, first_env + num_envs)
    ]
    return np.array([int.from_bytes(_digest(name, 8), "little") for name in names], np.uint64)


def episode_seeds(
    starts: NDArray[np.uint64], first: NDArray[np.int64], *, n: int
) -> NDArray[np.uint32]:
    """Return uint32[envs, n], below 2^31: the seeds of n episodes per env, from number `first` on.

    Seeds from 2^31 on are held out for evaluation: no actor ever plays them.
    """
    number = (first[:, None] + np.arange(1, n + 1)).astype(np.uint64)
    # A counter through a mixing function (Steele's splitmix64) yields any episode's seed directly.
    z: NDArray[np.uint64] = starts[:, None] + number * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    seeds: NDArray[np.uint32] = (z >> np.uint64(33)).astype(np.uint32)
    return seeds


class EpisodeSeeds:
    """Supplies the seed of each env's next episode; `prepare`, if set, gets seeds in advance."""

    def __init__(
        self,
        root_seed: int,
        *,
        first_env: int,
        num_envs: int,
        incarnation: int = 0,
        prepare: Callable[[NDArray[np.uint32]], None] | None = None,
    ) -> None:
        self._starts = episode_starts(
            root_seed, first_env=first_env, num_envs=num_envs, incarnation=incarnation
        )
        self._prepare = prepare
        self._n_ahead = max(4, _AHEAD // num_envs)
        self.begin_at(np.zeros(num_envs, np.int64))

    @property
    def n_begun(self) -> Ints:
        """int64[envs]: how many episodes of each env have received a seed."""
        return self._known_from + self._next

    def begin_at(self, n_begun: Ints) -> None:
        """Continue as if each env had begun this many episodes."""
        self._known_from = n_begun.copy()
        self._next = np.zeros(len(n_begun), np.int64)
        seeds = episode_seeds(self._starts, n_begun, n=self._n_ahead)  # uint32[envs, ahead]
        if self._prepare is not None:
            self._prepare(seeds.ravel())
        self._prepared = seeds.astype(np.int64)

    def take(self, envs: Ints) -> Ints:
        """Return the seeds of the next episodes of these envs."""
        try:
            seeds = self._prepared[envs, self._next[envs]]
        except IndexError:
            # An env has used all computed seeds; a check in advance would cost more.
            self.begin_at(self.n_begun)
            seeds = self._prepared[envs, 0]
        self._next[envs] += 1
        return seeds


def noise_rng(root_seed: int, *, env: int) -> np.random.Generator:
    """Return the generator of one env's noise."""
    key = int.from_bytes(_digest(f"noise/{root_seed}/{env}", 16), "little")
    return np.random.Generator(np.random.Philox(key=key))


class RoundNoise:
    """The noise of envs, by round: the same however envs are divided among actors."""

    def __init__(self, root_seed: int, *, first_env: int, num_envs: int) -> None:
        self._rngs = [
            noise_rng(root_seed, env=env) for env in range(first_env, first_env + num_envs)
        ]
        self._origins = [rng.bit_generator.state for rng in self._rngs]

    def draw(self, head: Head, steps: int, *, round_no: int) -> Array | None:
        """Return the noise of a round, float32[steps, envs, ...]; None for a head without noise."""
        parts = []
        for rng, origin in zip(self._rngs, self._origins, strict=True):
            # The round is the highest word of the generator's counter: no two rounds overlap.
            origin["state"]["counter"][3] = round_no
            rng.bit_generator.state = origin
            noise = head.noise(rng, steps)
            if noise is None:
                return None
            parts.append(noise)
        return np.stack(parts, axis=1)


def actor_session(created_ms: int, *, root_seed: int, env: int, incarnation: int) -> uuid.UUID:
    """Return the session id of one env's episodes; a new incarnation starts a new session."""
    return new_session(created_ms / 1000, _digest(f"session/{root_seed}/{env}/{incarnation}", 10))


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=size).digest()
