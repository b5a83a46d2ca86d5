"""Estimates with their intervals: means and interquartile means."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from understudy.core.errors import ConfigError

Sample = Sequence[float] | NDArray[np.floating] | NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 95 % interval; the ends are None where there is too little to say."""

    value: float
    low: float | None = None
    high: float | None = None


def iqm(sample: Sample) -> float:
    """The mean of the middle half: as steady as a median, and it does not throw half the sample
    away."""
    values = np.sort(_checked(sample))
    cut = len(values) / 4
    weights = np.clip(
        np.minimum(np.arange(1, len(values) + 1) - cut, len(values) - cut - np.arange(len(values))),
        0,
        1,
    )
    return float((values * weights).sum() / weights.sum())


def bootstrap(
    groups: Sequence[Sample], figure: Callable[[Sample], float], *, resamples: int = 2_000
) -> Estimate:
    """A figure over all groups (seeds, runs) together, and its interval from resampling within and
    among them.

    Below 5 groups there is no interval: too few seeds say nothing about other seeds.
    """
    whole = [_checked(group) for group in groups]
    value = figure(np.concatenate(whole))
    if len(whole) < 5:
        return Estimate(value)
    rng = np.random.default_rng(0)
    drawn = [
        figure(
            np.concatenate(
                [
                    rng.choice(whole[at], len(whole[at]))
                    for at in rng.integers(0, len(whole), len(whole))
                ]
            )
        )
        for _ in range(resamples)
    ]
    low, high = np.quantile(drawn, [0.025, 0.975]).tolist()
    return Estimate(value, low, high)


def mean(sample: Sample, *, resamples: int = 500) -> Estimate:
    """The mean with its bootstrap interval; below 5 values there is none."""
    values = _checked(sample)
    if len(values) < 5:
        return Estimate(float(values.mean()))
    drawn = np.random.default_rng(0).choice(values, (resamples, len(values))).mean(axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975]).tolist()
    return Estimate(float(values.mean()), low, high)


def _checked(sample: Sample) -> NDArray[np.float64]:
    values = np.asarray(sample, np.float64).ravel()
    if values.size == 0 or not np.isfinite(values).all():
        raise ConfigError(
            f"a sample of {values.size} numbers is empty or not finite; measure at least once"
        )
    return values
