"""importances: how much of a study's metric each setting explains, alone."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MIN_TRIALS = 10
"""Fewer say nothing."""
MAX_BINS = 8
_MIN_PER_BIN = 4
"""Trials, on average."""
_SHUFFLES = 200


class Importance(NamedTuple):
    """How much of the metric a setting explains."""

    name: str
    share: float
    """Of the variance of the metric's ranks, from 0 to 1."""
    chance: float
    """What a setting without any effect reaches in 1 of 20 studies: less means nothing."""


def importances(
    columns: Mapping[str, Sequence[Any]], metric: Sequence[float], *, rng: np.random.Generator
) -> list[Importance]:
    """The importance of each setting, largest first; empty if there are fewer than MIN_TRIALS.

    `columns` has the value of each setting in each trial. The trials are divided into bins by a
    setting: numbers into up to MAX_BINS of about as many trials each, other values into one bin
    each. The share is that of the variance between the bins, corrected for the number of bins,
    which explain something by chance (epsilon squared). The metric counts by its rank, so that one
    diverged trial does not decide. What two settings do only together counts for neither.
    """
    if len(metric) < MIN_TRIALS:
        return []
    ranks = _ranks(np.asarray(metric, np.float64))
    shuffled = rng.permuted(np.tile(ranks, (_SHUFFLES, 1)), axis=1)
    ranking = []
    for name, column in columns.items():
        bins = bins_of(column)
        share = float(_shares(ranks[None], bins)[0])
        chance = float(np.quantile(_shares(shuffled, bins), 0.95))
        ranking.append(Importance(name, max(0.0, share), max(0.0, chance)))
    return sorted(ranking, key=lambda importance: -importance.share)


def bins_of(column: Sequence[Any]) -> npt.NDArray[np.intp]:
    """The bin of each value: numbers by quantiles if many differ, else one bin per value."""
    is_numeric = all(type(value) in (int, float) for value in column)
    if not is_numeric:
        return np.unique([repr(value) for value in column], return_inverse=True)[1]
    numbers = np.asarray(column, np.float64)
    distinct, inverse = np.unique(numbers, return_inverse=True)
    n_bins = max(2, min(MAX_BINS, len(numbers) // _MIN_PER_BIN))
    if len(distinct) <= n_bins:
        return inverse
    # By the mean rank of equal values, which keeps a value of most trials apart from the others.
    shares = (_ranks(numbers) + 0.5) / len(numbers)
    return np.unique((shares * n_bins).astype(int), return_inverse=True)[1]


def _ranks(values: Floats) -> Floats:
    """From 0; equal values have the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    first = np.cumsum(counts) - counts
    means = first + (counts - 1) / 2
    return np.asarray(means[inverse], np.float64)


def _shares(rows: Floats, bins: npt.NDArray[np.intp]) -> Floats:
    """Epsilon squared of each row: the share of its variance that lies between the bins."""
    n_trials = rows.shape[1]
    counts = np.bincount(bins)
    if len(counts) < 2 or len(counts) >= n_trials:
        return np.zeros(len(rows))
    centred = rows - rows.mean(axis=1, keepdims=True)
    total = (centred**2).sum(axis=1)
    sums = centred @ np.eye(len(counts))[bins]
    between = (sums**2 / counts).sum(axis=1)
    within = (total - between) / (n_trials - len(counts))
    explained = between - (len(counts) - 1) * within
    shares: Floats = np.divide(explained, total, out=np.zeros(len(rows)), where=total > 0)
    return shares
