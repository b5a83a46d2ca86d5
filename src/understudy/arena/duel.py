"""A duel: two bots at the two seats of one game, with every serve played from both seats."""

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
"""Called with the court, a seat, the serves' seeds and the number of the decision; returns the
actions of that seat. Randomness must depend only on the seeds and the number of the decision."""


@dataclass(frozen=True, slots=True)
class Side:
    """A bot or script that plays one seat."""

    name: str
    decide: Decide
    model: str | None = None
    """The registered model that an alias referred to, such as rally/3."""
    policy_sha256: str | None = None
    """The hash of the policy's bytes; a script has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Duel:
    """The result of a duel; an undecided serve counts as half a point for each side."""

    a: str
    b: str
    serves: int
    share: float
    """A's points divided by the number of serves."""
    low: float | None
    """The lower end of the share's 95 % interval, from pairs of serves; None with too few pairs."""
    high: float | None
    """The upper end of that interval."""
    won: int
    lost: int
    undecided: int


def duel(a: Side, b: Side, *, serves: int, seed: int = 0) -> Duel:
    """Return the result of playing every seed twice: swapped seats give both sides equal serves."""
    if not 2 <= serves <= MAX_SERVES or serves % 2:
        raise ConfigError(
            f"serves is {serves}; use an even number from 2 to {MAX_SERVES}, such as 400: every "
            "seed is played twice, with swapped seats"
        )
    seeds = np.arange(serves // 2, dtype=np.int64) + 1_000_003 * seed
    points = np.concatenate([_played(a, b, seeds), -_played(b, a, seeds)])
    shares = (1 + points) / 2
    estimate = mean(shares.reshape(2, -1).mean(axis=0))
    return Duel(
        a=a.name,
        b=b.name,
        serves=serves,
        share=estimate.value,
        low=estimate.low,
        high=estimate.high,
        won=int((points > 0).sum()),
        lost=int((points < 0).sum()),
        undecided=int((points == 0).sum()),
    )


def _played(left: Side, right: Side, seeds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return int64[serves]: 1 if the left side won the point, -1 if the right side did, else 0."""
    court = rally.serve(seeds)
    points = np.zeros(len(seeds), np.int64)
    for decision in range(rally.MAX_DECISIONS):
        left_actions = left.decide(court, 0, seeds, decision)
        right_actions = right.decide(court, 1, seeds, decision)
        court, points = rally.step(np, court, left_actions, right_actions)
        if points.all():
            break
    return points
