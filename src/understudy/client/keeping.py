"""Keeping: which episodes are recorded when the platform asks for a share only, and what the others amount to."""

import random
from threading import Lock

from understudy.core.block import Block, BlockPool


class Keeping:
    """Whole episodes are kept with the platform's `share`; the others are played into here, counted and forgotten."""

    def __init__(self, pool: BlockPool, rng: random.Random) -> None:
        self._pool, self._rng = pool, rng
        self._lock = Lock()
        self.share = 1.0
        """By the platform's last answer."""
        self.skipped_steps = 0
        """Played and not recorded; `Sessions.skipped_steps` knows of those too that are still with the game's side."""
        self.told_steps = 0
        """Those of them that the platform has heard of."""

    def keeps(self) -> bool:
        """Whether the episode that begins now is recorded."""
        return self.share >= 1.0 or self._rng.random() < self.share

    def put(self, owner: object, block: Block) -> None:
        """What `Handoff.put` is to episodes that are kept."""
        with self._lock:
            self.skipped_steps += block.n_steps
        self._pool.give(block.columns)

    def told(self, n_steps: int, *, share: float) -> None:
        """The platform has heard of so many more, and answered with the share it wants from now on."""
        self.told_steps += n_steps
        self.share = share

    def abandon(self) -> None:
        """In a forked child: the lock may be held by a thread that is not here."""
        self._lock = Lock()
