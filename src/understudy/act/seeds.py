"""EpisodeSeeds: which seed each env's next episode gets, known some episodes ahead."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from understudy.act.chance import episode_seeds, episode_starts

Ints = NDArray[np.int64]

_AHEAD = 1024
"""Seeds known at a time, over all envs: one look ahead must cost little for each."""


class EpisodeSeeds:
    """Hands out seeds; `prepare`, where the envs have one, hears of them before they are needed."""

    def __init__(
        self, root_seed: int, *, first_env: int, num_envs: int, incarnation: int = 0,
        prepare: Callable[[NDArray[np.uint32]], None] | None = None,
    ) -> None:  # fmt: skip
        self._starts = episode_starts(root_seed, first_env=first_env, num_envs=num_envs, incarnation=incarnation)
        self._prepare, self._n_ahead = prepare, max(4, _AHEAD // num_envs)
        self.begin_at(np.zeros(num_envs, np.int64))

    @property
    def n_begun(self) -> Ints:
        """int64[envs]: how many episodes got a seed."""
        return self._known_from + self._next

    def begin_at(self, n_begun: Ints) -> None:
        """Go on behind so many episodes of each env."""
        self._known_from, self._next = n_begun.copy(), np.zeros(len(n_begun), np.int64)
        seeds = episode_seeds(self._starts, n_begun, n=self._n_ahead)  # uint32[envs, ahead]
        if self._prepare is not None:
            self._prepare(seeds.ravel())
        self._known = seeds.astype(np.int64)

    def take(self, envs: Ints) -> Ints:
        """The seeds of the next episodes of these envs."""
        try:
            seeds = self._known[envs, self._next[envs]]
        except IndexError:  # one of them has begun all that were known; asking first would cost more
            self.begin_at(self.n_begun)
            seeds = self._known[envs, 0]
        self._next[envs] += 1
        return seeds
