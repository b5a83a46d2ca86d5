"""Honest statistics of scores float64[runs, tasks]: figures over all tasks, with their intervals.

A run is one training with its own seed, and a task is a game or another measure that all runs
share. The scores of one task may be given as float64[runs]. The definitions are those of the
library rliable (Agarwal et al., NeurIPS 2021); a test compares its numbers with ours bit by bit.

    estimate(scores, iqm, rng)            how good is it, with a 95 % interval
    compare(scores, other_scores, rng)    how likely is it better than the other
    profile(scores, thresholds, rng)      which share of the runs is above each threshold

An interval tells what other seeds would have given. It comes from a stratified bootstrap: each
resample draws as many runs as there are, with replacement, for each task apart, and the interval
holds the middle 95 % of the resamples' figures. With fewer than 5 runs such intervals are far too
narrow, so there are none; with 5 to 9 they are still somewhat too narrow, and `is_few` says so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from understudy.core.errors import ConfigError
from understudy.core.statistics import FEW, MIN_FOR_INTERVAL, Estimate

Floats = NDArray[np.float64]
Figure = Callable[[Floats], Floats]
"""float64[..., runs, tasks] to float64[...]: it computes the figures of many resamples at once."""

BLOCK_BYTES = 1 << 20
"""Of scores that are resampled at once; some copies of them fit into the processor's cache."""
_TAIL = (1 - 0.95) / 2
_PERCENTILES = (100 * _TAIL, 100 * (1 - _TAIL))
"""2.5 and 97.5, rounded as rliable does: the exact numbers can change an interval's last bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The share of scores above each threshold, with 95 % intervals; None with too few runs."""

    thresholds: Floats
    shares: Floats
    low: Floats | None
    high: Floats | None
    is_few: bool
    """There are 5 to 9 runs: the intervals are somewhat too narrow."""


# --- Figures --------------------------------------------------------------------------------------


def mean(scores: ArrayLike) -> Floats:
    """The mean over tasks of each task's mean over runs."""
    return np.asarray(_checked(scores).mean(axis=-2).mean(axis=-1))


def median(scores: ArrayLike) -> Floats:
    """The median over tasks of each task's mean over runs; a few extreme tasks do not matter."""
    return np.asarray(np.median(_checked(scores).mean(axis=-2), axis=-1))


def iqm(scores: ArrayLike) -> Floats:
    """The mean of the middle half of all scores: robust, but based on more than a median.

    A quarter of the scores, rounded down, is cut from each end. `core.statistics.iqm` cuts a
    fraction of a score instead; the two agree if the number of scores is a multiple of 4.
    """
    flat = _flat(_checked(scores))
    first = flat.shape[-1] // 4
    last = flat.shape[-1] - first - 1
    middle = np.partition(flat, (first, last), axis=-1)[..., first : last + 1]
    return np.asarray(middle.mean(axis=-1))


def optimality_gap(scores: ArrayLike, *, target: float = 1.0) -> Floats:
    """How much the scores lack to the target on average; a score above it counts as the target."""
    return np.asarray(target - _flat(np.minimum(_checked(scores), target)).mean(axis=-1))


def probability_of_improvement(x: ArrayLike, y: ArrayLike) -> Floats:
    """How likely a run of x scores higher than one of y on the same task; a tie counts half."""
    ours, theirs = _checked(x), _checked(y)
    if ours.shape[-1] != theirs.shape[-1]:
        raise ConfigError(
            f"scores to compare: {ours.shape[-1]} and {theirs.shape[-1]} tasks; both need the same "
            "tasks, in the same order: leave out the tasks that only one of them has"
        )
    # Runs first: each run is compared with all others in long rows, which is ten times as fast.
    our_runs, their_runs = (np.moveaxis(side, -2, 0).copy() for side in (ours, theirs))
    half_wins = np.zeros(our_runs.shape[1:])
    for run in our_runs:
        half_wins += (run > their_runs).sum(axis=0) + (run >= their_runs).sum(axis=0)
    return np.asarray((half_wins / 2 / (len(our_runs) * len(their_runs))).mean(axis=-1))


def run_score_profile(scores: ArrayLike, thresholds: ArrayLike) -> Floats:
    """The share of all scores above each threshold: float64[..., thresholds]."""
    flat = _flat(_checked(scores))
    return np.stack([(flat > threshold).mean(axis=-1) for threshold in _line(thresholds)], axis=-1)


def mean_score_profile(scores: ArrayLike, thresholds: ArrayLike) -> Floats:
    """The share of tasks whose mean over runs is above each threshold: float64[..., thresholds]."""
    means = _checked(scores).mean(axis=-2)
    return np.stack([(means > threshold).mean(axis=-1) for threshold in _line(thresholds)], axis=-1)


# --- Intervals ------------------------------------------------------------------------------------


def estimate(
    scores: ArrayLike,
    figure: Figure,
    rng: np.random.Generator,
    *,
    resamples: int = 50_000,
    resample_tasks: bool = False,
) -> Estimate:
    """A figure, such as `iqm`, with its 95 % interval.

    `resample_tasks` draws the tasks, too: the interval then tells what other tasks of their kind
    would have given, and is wider.
    """
    sample = _matrix(scores)
    interval = _interval([sample], figure, rng, resamples, resample_tasks=resample_tasks)
    return _estimate(float(figure(sample)), interval, len(sample))


def compare(
    x: ArrayLike, y: ArrayLike, rng: np.random.Generator, *, resamples: int = 50_000
) -> Estimate:
    """The probability that a run of x is better than one of y, with its 95 % interval.

    Larger scores are better. At 0.5 both are alike; x is better with some certainty if even `low`
    is above 0.5. The numbers of runs may differ.
    """
    samples = [_matrix(x), _matrix(y)]
    value = float(probability_of_improvement(*samples))
    interval = _interval(samples, probability_of_improvement, rng, resamples)
    return _estimate(value, interval, min(map(len, samples)))


def profile(
    scores: ArrayLike,
    thresholds: ArrayLike,
    rng: np.random.Generator,
    *,
    of: Callable[[Floats, Floats], Floats] = run_score_profile,
    resamples: int = 2_000,
    resample_tasks: bool = False,
) -> Profile:
    """The performance profile of all scores, or of the tasks' means (`of=mean_score_profile`)."""
    sample = _matrix(scores)
    line = _line(thresholds)
    interval = _interval(
        [sample], lambda drawn: of(drawn, line), rng, resamples, resample_tasks=resample_tasks
    )
    return Profile(
        thresholds=line,
        shares=of(sample, line),
        low=None if interval is None else interval[0],
        high=None if interval is None else interval[1],
        is_few=MIN_FOR_INTERVAL <= len(sample) < FEW,
    )


def _interval(
    samples: Sequence[Floats],
    figure: Callable[..., Floats],
    rng: np.random.Generator,
    resamples: int,
    *,
    resample_tasks: bool = False,
) -> Floats | None:
    """float64[2, ...], the interval's ends; None with too few runs."""
    if min(map(len, samples)) < MIN_FOR_INTERVAL:
        return None
    return percentile_interval(
        samples, figure, rng, resamples=resamples, resample_tasks=resample_tasks
    )


def percentile_interval(
    samples: Sequence[Floats],
    figure: Callable[..., Floats],
    rng: np.random.Generator,
    *,
    resamples: int,
    resample_tasks: bool = False,
) -> Floats:
    """float64[2, ...]: the middle 95 % of a figure of resampled samples, however few the runs are.

    Draws in blocks: the indices of all resamples of a block at once, sample after sample.
    """
    if resamples < 1:
        raise ConfigError(
            f"resamples is {resamples}; an interval needs at least 1, and 2,000 to be steady: "
            "leave it out for the default"
        )
    block = max(1, BLOCK_BYTES // sum(sample.nbytes for sample in samples))
    figures = [
        figure(*(_resample(sample, count, rng, resample_tasks) for sample in samples))
        for count in np.diff([*range(0, resamples, block), resamples]).tolist()
    ]
    return np.asarray(np.percentile(np.concatenate(figures), _PERCENTILES, axis=0))


def _resample(sample: Floats, count: int, rng: np.random.Generator, resample_tasks: bool) -> Floats:
    """float64[count, runs, tasks]; each cell is a run that was drawn within the cell's task."""
    runs, tasks = sample.shape
    chosen = rng.integers(0, runs, (count, runs, tasks))
    columns = rng.integers(0, tasks, (count, 1, tasks)) if resample_tasks else np.arange(tasks)
    resampled: Floats = sample.take(chosen * tasks + columns)
    return resampled


def _estimate(value: float, interval: Floats | None, runs: int) -> Estimate:
    if interval is None:
        return Estimate(value)
    low, high = interval.tolist()
    return Estimate(value, low, high, is_few=runs < FEW)


# --- Checks ---------------------------------------------------------------------------------------


def _matrix(scores: ArrayLike) -> Floats:
    """Return the scores as contiguous float64[runs, tasks]."""
    matrix = _checked(scores)
    if matrix.ndim > 2:
        raise ConfigError(
            f"scores: an array of shape {matrix.shape}; wanted are [runs, tasks], or [runs] for "
            "one task: average over the other axes first, such as episodes"
        )
    return np.ascontiguousarray(matrix)


def _checked(scores: ArrayLike) -> Floats:
    try:
        values = np.asarray(scores, np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"scores: {error}; wanted are numbers [runs, tasks], the same tasks for every run: "
            "leave out runs that lack a task"
        ) from error
    values = values[:, None] if values.ndim == 1 else values
    if values.ndim < 2 or values.size == 0 or not np.isfinite(values).all():
        raise ConfigError(
            f"scores: an array of shape {np.shape(scores)} is empty, a single number or not "
            "finite; wanted are finite numbers [runs, tasks] of at least one run and one task: "
            "leave out failed runs, and report how many there were"
        )
    return values


def _line(thresholds: ArrayLike) -> Floats:
    line = np.asarray(thresholds, np.float64)
    if line.ndim != 1 or line.size == 0 or not np.isfinite(line).all():
        raise ConfigError(
            f"thresholds: an array of shape {line.shape}; wanted are finite numbers in a list, "
            "such as np.linspace(0, 1, 101) for scores from 0 to 1"
        )
    return line


def _flat(scores: Floats) -> Floats:
    return scores.reshape(*scores.shape[:-2], -1)
