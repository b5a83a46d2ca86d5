"""Calibration: finds with pure functions the noise at which a bot is as good as people.

    returns of people ─► a target for each skill
    returns of the bot at a skill and their noise ─► mean noise, corrected by what its mean return
        lacks to the target, divided by how much return noise costs ─► the skill's next noise

The target of `even` is the mean of people's returns, that of `easy` the mean of the lower half of
people; each person counts once. A bot that does not reach a target as released gets no noise. This
is stochastic approximation: the newest half of a skill's episodes is averaged, so an estimate from
noises that were far off is forgotten, and the error falls with the root of the episodes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from understudy.experience.skill import DEFAULT_NOISE
from understudy.models.gate import Played

MIN_EPISODES = 20
"""Episodes with noise before the first calibration of a model."""
_GROWTH = 1.25
"""Episodes, as a multiple of those at the last calibration, before the next one. So noise is
published at most about ten times while a model's episodes grow tenfold."""
_MIN_PEOPLE = 10
"""Episodes of people that tell a target."""
_MIN_SKILLED = 5
"""Episodes of a skill from which its noise may move."""
_EXTREMES = (1.0, 99.0)
"""The bot's returns are clipped to these percentiles, so that a few false ones cannot decide."""
_NEAR = 0.3
"""Episodes with a noise this close to the current one tell what more noise costs there."""
_MIN_COST = 0.1
"""Going from no noise to random actions costs at least this share of the spread of returns."""
_SMALLEST = 0.01
"""The smallest noise, and the smallest change of it, that a game would notice."""


class SkillPlayed(NamedTuple):
    """A finished episode of a bot at a skill."""

    skill: str
    noise: float
    return_: float
    player: str = ""


def is_due(episodes: int, before: int) -> bool:
    """Whether to calibrate with this many episodes, after `before` at the last calibration."""
    return episodes >= max(MIN_EPISODES, _GROWTH * before)


def targets(people: Sequence[Played]) -> dict[str, float]:
    """The mean return that each skill aims at; empty without enough episodes of people.

    From ten people on, the highest and the lowest tenth do not count, since they may lie. A single
    person is no lower half, so then `easy` has no target.
    """
    if len(people) < _MIN_PEOPLE:
        return {}
    by_player: dict[str, list[float]] = {}
    for episode in people:
        by_player.setdefault(episode.player, []).append(episode.return_)
    means = sorted(float(np.mean(returns)) for returns in by_player.values())
    n_liars = len(means) // 10
    means = means[n_liars : len(means) - n_liars]
    even = {"even": float(np.mean(means))}
    return even if len(means) < 2 else even | {"easy": float(np.mean(means[: len(means) // 2]))}


def calibrate(
    before: Mapping[str, float],
    people: Sequence[Played],
    released: Sequence[Played],
    skilled: Sequence[SkillPlayed],
) -> dict[str, float]:
    """The next noise of each skill, which is `before` where there is too little play.

    `released` and `skilled` are episodes of one bot, as released and with noise, oldest first.
    """
    goals = targets(people)
    returns = _clipped(
        [*(episode.return_ for episode in released), *(episode.return_ for episode in skilled)]
    )
    noise = np.array([0.0] * len(released) + [episode.noise for episode in skilled])
    skills = np.array(["hard"] * len(released) + [episode.skill for episode in skilled])
    may_release = len(released) >= MIN_EPISODES
    levels = dict(before)
    for skill, goal in goals.items():
        mine = _newest_half(np.flatnonzero(skills == skill))
        if len(mine) < _MIN_SKILLED:
            continue
        at = float(noise[mine].mean())
        excess = float(returns[mine].mean()) - goal
        # At most half the way to an end, unless the bot is known to be no better as released.
        lowest = 0.0 if may_release and returns[: len(released)].mean() <= goal else at / 2
        level = at + excess / _cost(noise, returns, at=at) if excess else at
        levels[skill] = _rounded(min(max(level, lowest), (at + 1) / 2))
    if goals and "easy" not in goals:
        levels["easy"] = (levels["even"] + 1) / 2
    levels["easy"] = max(levels["easy"], levels["even"])
    return levels


def measured(
    noise: Mapping[str, float], people: Sequence[Played], skilled: Sequence[SkillPlayed]
) -> dict[str, Any]:
    """By skill: its noise, target, and the bot's newest episodes with their mean, for display."""
    goals = targets(people)
    rows = {}
    for skill in sorted(noise):
        newest = _newest_half([episode for episode in skilled if episode.skill == skill])
        returns = [episode.return_ for episode in newest]
        rows[skill] = {
            "noise": noise[skill],
            "target": goals.get(skill),
            "episodes": len(returns),
            "mean": float(np.mean(returns)) if returns else None,
        }
    return rows


def has_moved(noise: Mapping[str, float], before: Mapping[str, float]) -> bool:
    """Whether the change is large enough to be published."""
    return any(abs(noise[skill] - before[skill]) >= _SMALLEST for skill in DEFAULT_NOISE)


def _cost(noise: NDArray[np.float64], returns: NDArray[np.float64], *, at: float) -> float:
    """How much return a noise of 1 costs: by all episodes, then by those with noise near `at`."""
    low, high = np.percentile(returns, (5, 95))
    least = max(_MIN_COST * float(high - low), 1e-9)
    cost = max(-_slope(noise, returns), least)
    near = (np.abs(noise - at) <= _NEAR) & (noise > 0)
    if near.sum() > 2:
        # As if the estimate by all were known up to its own size.
        doubt = float(returns[near].var()) / cost**2
        cost = max(-_slope(noise[near], returns[near], prior=-cost, weight=doubt), cost / 4, least)
    return cost


def _slope(
    x: NDArray[np.float64], y: NDArray[np.float64], *, prior: float = 0.0, weight: float = 0.0
) -> float:
    """The slope of the line through these points, drawn to a prior one by its weight."""
    dx = x - x.mean()
    spread = float(dx @ dx) + weight
    return (float(dx @ (y - y.mean())) + weight * prior) / spread if spread > 1e-12 else prior


def _newest_half(episodes: Any) -> Any:
    return episodes[len(episodes) // 2 :]


def _clipped(returns: Sequence[float]) -> NDArray[np.float64]:
    return np.clip(returns, *np.percentile(returns, _EXTREMES)) if returns else np.zeros(0)


def _rounded(noise: float) -> float:
    """Three digits; 0 or 1 close to these ends."""
    if noise < _SMALLEST or noise > 1 - _SMALLEST:
        return float(round(noise))
    return round(noise, 3)
