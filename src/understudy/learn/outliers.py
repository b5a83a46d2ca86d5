"""Outliers: rewards and observations that few players have, and whoever plays most.

A few players' false numbers must decide neither the scale of rewards nor that of observations. So
each player's range is found first, and then that of most players, however many steps one of them
has recorded. Nor must a player who plays much more than the others decide what is learned, one
whose rewards are much larger than the others', nor bots that play much more than people.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from understudy.algorithm import Batch
from understudy.core.tensors import Array

Floats = NDArray[np.float64]

_FAR = 100.0
"""A reward this many times as large as any that most players have is not believed."""
_VERY_FAR = 1e6
"""The same, relative to the median of the player's own rewards. An observation this many times the
range of most players away from its middle is false."""
_LARGEST_REWARD = 1e6
"""Games with larger rewards are scaled down to this: squares of float32 overflow from 1e19 on."""
_MAX_SHARE = 0.1
"""The largest share of the steps that a player has in what is learned, or 2 / players if more."""
_MIN_WEIGHT = 0.2
"""The lowest weight of a step, so that the steps of players who hardly play count five times as
much as others at most."""
_MIN_PLAYERS = 10
"""Below this, no player's rewards are compared with those of the others."""
_USUAL_SHARE = 0.8
"""The share of the steps whose players have rewards of a usual size, or smaller ones."""
_LARGE = 2.0
"""A player's rewards are scaled down to this many times the usual size, if they are larger."""
_TOO_LARGE = 10.0
"""Above this many times the usual size, none of a player's rewards is believed."""
_MOST_ROWS = 0.5
"""A player with more than this share of false observations is not believed."""
_MAX_REPEATS = 4.0
"""How often a step of people is drawn at most, relative to a draw in which all steps are equal.
Where people have stopped playing, their share would be a few steps that are learned by heart."""
_ROOM = 5.0
"""How many times the range of most players an observation may be outside of it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What most players' steps allow to believe."""

    reward: float
    """The largest size of a reward; 0 if there was none."""
    obs: Mapping[str, Array]
    """float32[2, ...] by column: lowest and highest value that the scale of observations uses."""

    @property
    def max_reward(self) -> float:
        """The largest size of a reward that is believed."""
        return _FAR * self.reward if self.reward else math.inf

    def apply(self, batches: Batch) -> Batch:
        """The batches without rewards that are not believed, and scaled down to a million.

        A step whose reward is not believed has no weight: a limited one would still be false.
        """
        reward = batches.reward
        weight = batches.weight
        if self.reward:
            is_far = np.abs(reward) > self.max_reward
            reward = np.where(is_far, 0, reward)
            weight = np.where(is_far, np.float32(0), weight)
        reward = reward / np.float32(max(1.0, self.reward / _LARGEST_REWARD))
        limits = {
            name: np.broadcast_to(ends, (len(reward), *ends.shape))
            for name, ends in self.obs.items()
        }
        return batches._replace(reward=reward.astype(np.float32), weight=weight, obs_limits=limits)


def step_weights(n_steps: Sequence[int] | NDArray[np.float64]) -> list[float]:
    """The weight of each player's steps, from a fifth to 1, so that no player decides alone.

    Where the others have played too little for that, a player keeps a larger share: a few names
    with a few steps must not decide what is learned either.
    """
    steps = np.asarray(n_steps, np.float64)
    share = max(_MAX_SHARE, 2 / max(1, len(steps)))
    weights = np.ones(len(steps))
    is_capped = np.zeros(len(steps), np.bool_)
    # To reduce the share of some increases that of the others, until no more are above the limit.
    while share < 1 and (is_more := steps * weights > share * (steps @ weights) * (1 + 1e-9)).any():
        if not (is_more & ~is_capped).any():
            break
        is_capped |= is_more
        others = steps[~is_capped].sum()
        rest = 1 - share * is_capped.sum()
        each = share * others / rest if rest > 0 else 0.0
        weights = np.where(is_capped, np.maximum(each / np.maximum(steps, 1), _MIN_WEIGHT), 1.0)
    return [float(weight) for weight in weights]


def reward_scales(
    sizes: Sequence[float] | Floats,
    n_steps: Sequence[int] | NDArray[np.int64],
    false_shares: Sequence[float] | Floats,
) -> Floats:
    """By player, the factor of its rewards, from 0 (not believed) to 1.

    `sizes`: the average size of each player's rewards, without steps that have none, which good
    players have less often. `false_shares`: the share of its observations that are false. What is
    usual is decided by steps, not by players, of whom anyone can invent many.
    """
    size = np.asarray(sizes, np.float64)
    steps = np.asarray(n_steps, np.float64) * step_weights(np.asarray(n_steps, np.float64))
    scales = np.ones(len(size))
    if len(size) < _MIN_PLAYERS:
        return scales
    order = np.argsort(size, kind="stable")
    is_usual = np.cumsum(steps[order]) >= _USUAL_SHARE * steps.sum()
    if usual := size[order][np.argmax(is_usual)]:  # else the others' are all that is known
        times = size / usual
        scales = np.where(times > _TOO_LARGE, 0.0, _LARGE / np.maximum(times, _LARGE))
    is_false = np.asarray(false_shares) > _MOST_ROWS
    if steps[is_false].sum() <= (1 - _USUAL_SHARE) * steps.sum():
        scales = np.where(is_false, 0.0, scales)
    return scales


def false_rows(columns: Mapping[str, Array], limits: Mapping[str, Array]) -> NDArray[np.bool_]:
    """The rows with a false number in a column, by its limits as found by `obs_limits`."""
    is_false = np.zeros(len(next(iter(columns.values()))), np.bool_)
    for name, ends in limits.items():
        with np.errstate(invalid="ignore"):  # a column without limits has no middle
            middle = (ends[0] + ends[1]) / 2
        width = (ends[1] - ends[0]) / (1 + 2 * _ROOM)
        is_far = np.abs(columns[name] - middle) > _VERY_FAR * width
        is_false |= is_far.reshape(len(is_false), -1).any(axis=1)
    return is_false


class SharedWeights(NamedTuple):
    """Weights by which people have a share of what is learned, and each player a limited one."""

    people: Sequence[float]
    """Of the steps that people have decided, by player."""
    bots: Sequence[float]
    """Of the steps that bots have decided in the sessions of a player, by player."""
    bot_rate: float = 1.0
    """How often steps of bots are drawn, relative to those of people: at most 1."""


def shared_weights(
    people: Sequence[int], bots: Sequence[int], *, people_share: float
) -> SharedWeights:
    """The weights with which people have at least `people_share` of what is learned.

    They have less where each of their steps would be drawn more than four times as often as if all
    steps were drawn equally often, unless the share is 1: then only people's steps are learned.
    `people` and `bots`: how many steps of each player's sessions people and bots have decided. If
    bots have no more than the rest, or there are no steps of people, all are drawn equally often.
    Otherwise each player's share of the steps of people is limited, and that of the steps of bots:
    sessions of bots alone must not count as further players, which would limit people's.
    """
    by_people = np.asarray(people, np.float64)
    by_bots = np.asarray(bots, np.float64)
    weights = step_weights(by_people + by_bots)
    room = (1 - people_share) / people_share if people_share else math.inf
    if by_bots @ weights <= room * (by_people @ weights) or not by_people.any():
        return SharedWeights(weights, weights)
    of_people, of_bots = np.ones((2, len(people)))
    of_people[by_people > 0] = step_weights(by_people[by_people > 0])
    of_bots[by_bots > 0] = step_weights(by_bots[by_bots > 0])
    bot_rate = room * (by_people @ of_people) / (by_bots @ of_bots)
    if people_share < 1:
        n_people = by_people.sum()
        n_bots = by_bots.sum()
        bot_rate = max(bot_rate, ((n_people + n_bots) / _MAX_REPEATS - n_people) / n_bots)
    return SharedWeights(of_people.tolist(), of_bots.tolist(), min(1.0, float(bot_rate)))


def n_unlike(n_players: int) -> int:
    """How many players may differ from the others: one from three on, from ten on a tenth."""
    return -(-n_players // 10) if n_players >= 3 else 0


def believable(sizes: Sequence[float]) -> float:
    """The largest size of most players, each of whom has one; 0 without any above 0."""
    ordered = sorted(sizes)
    n_believed = len(ordered) - n_unlike(len(ordered))
    # If most have none, the others' are all that is known.
    return next((size for size in (*ordered[:n_believed][-1:], *ordered[-1:]) if size), 0.0)


def is_believable(size: float, largest: float) -> bool:
    """Whether a size is not far above the largest of most players."""
    return not largest or size <= _FAR * largest


def reward_size(rewards: NDArray[np.float32]) -> float:
    """The largest size of a player's rewards, without those a million times the usual one."""
    sizes = np.abs(rewards[rewards != 0]).astype(np.float64)
    return float(sizes[sizes <= _VERY_FAR * np.median(sizes)].max()) if len(sizes) else 0.0


def obs_limits(by_player: Sequence[Array]) -> Array:
    """float32[2, ...]: the limits of a column, from rows of each player.

    A player's range is twice the median deviation from the median, which bad rows do not change
    unless they are half of all; for a column that has one value in most rows, such as a flag, it
    is what all but a few rows have. The third of the players that differs most does not count. A
    column with one value for all others has no limits.
    """
    ends = np.stack([_range(rows.astype(np.float64)) for rows in by_player], axis=1)
    ends.sort(axis=1)  # float64[2, players, ...]
    n_others = ends.shape[1] // 3
    low = ends[0, n_others]
    high = ends[1, ends.shape[1] - 1 - n_others]
    room = np.where(high > low, _ROOM * (high - low), np.inf)
    return np.stack([low - room, high + room]).astype(np.float32)


def _range(rows: Array) -> Array:
    """float64[2, ...]: the range of most of a player's rows."""
    median = np.median(rows, axis=0)
    deviation = np.median(np.abs(rows - median), axis=0)
    ordered = np.sort(rows, axis=0)
    few = len(rows) // 32
    is_varied = deviation > 0
    return np.stack(
        [
            np.where(is_varied, median - deviation, ordered[few]),
            np.where(is_varied, median + deviation, ordered[len(rows) - 1 - few]),
        ]
    )
