"""A duel: two bots at the two seats of one game, on serves that both play from either side."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from understudy.core.errors import ConfigError
from understudy.core.statistics import mean
from understudy.games import rally
from understudy.games.rally import Court

MAX_SERVES = 100_000
Decide = Callable[[Court, int, NDArray[np.int64], int], NDArray[np.int64]]
"""Actions for a court's seat; by the serves' seeds and the decision's number, where there is
chance."""


@dataclass(frozen=True, slots=True)
class Side:
    """Somebody who can sit at a court."""

    name: str
    decide: Decide
    model: str | None = None
    """The registered model that an alias stood for then, such as rally/3."""
    policy_sha256: str | None = None
    """Of the policy's bytes, wherever they lay; a script has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Duel:
    """What a duel came to; shares are of all serves, and one that nobody won is half a point for
    both."""

    a: str
    b: str
    serves: int
    share: float
    """Of points that A won."""
    low: float | None
    """The 95 % interval, over pairs of serves."""
    high: float | None
    won: int
    lost: int
    undecided: int


def duel(a: Side, b: Side, *, serves: int, seed: int = 0) -> Duel:
    """Play; every seed twice, with the seats swapped, so that neither side gets the easier
    serves."""
    if not 2 <= serves <= MAX_SERVES or serves % 2:
        raise ConfigError(
            f"serves is {serves}; give an even number from 2 to {MAX_SERVES}, such as 400: half of "
            "them from each side"
        )
    seeds = np.arange(serves // 2, dtype=np.int64) + 1_000_003 * seed
    points = np.concatenate([_played(a, b, seeds), -_played(b, a, seeds)])
    shares = (1 + points) / 2
    found = mean(shares.reshape(2, -1).mean(axis=0))
    return Duel(
        a=a.name,
        b=b.name,
        serves=serves,
        share=found.value,
        low=found.low,
        high=found.high,
        won=int((points > 0).sum()),
        lost=int((points < 0).sum()),
        undecided=int((points == 0).sum()),
    )


def _played(left: Side, right: Side, seeds: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64[serves]: 1 where the left side got the point, -1 where the right did, 0 where
    nobody."""
    court = rally.serve(seeds)
    got = np.zeros(len(seeds), np.int64)
    for decision in range(rally.MAX_DECISIONS):
        actions = left.decide(court, 0, seeds, decision), right.decide(court, 1, seeds, decision)
        court, got = rally.step(np, court, *actions)
        if got.all():
            break
    return got
