"""Estimates with their intervals: means and interquartile means."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from understudy.core.errors import ConfigError

Sample = Sequence[float] | NDArray[np.floating] | NDArray[np.integer]

MIN_FOR_INTERVAL = 5
"""With fewer runs or values, intervals are far too narrow, so there are none."""
FEW = 10
"""With fewer, intervals are somewhat too narrow."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95 % interval; low and high are None with too little data."""

    value: float
    low: float | None = None
    high: float | None = None
    is_few: bool = False
    """The interval comes from 5 to 9 runs or values, and is somewhat too narrow."""


def iqm(sample: Sample) -> float:
    """The mean of the middle half: as robust as a median, but based on half of the sample."""
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
    """A figure over all groups (seeds, runs), with an interval from resampling groups and values.

    With fewer than 5 groups there is no interval: so few say too little about other seeds.
    """
    samples = [_checked(group) for group in groups]
    value = figure(np.concatenate(samples))
    if len(samples) < MIN_FOR_INTERVAL:
        return Estimate(value)
    rng = np.random.default_rng(0)
    drawn = [
        figure(
            np.concatenate(
                [
                    rng.choice(samples[at], len(samples[at]))
                    for at in rng.integers(0, len(samples), len(samples))
                ]
            )
        )
        for _ in range(resamples)
    ]
    low, high = np.quantile(drawn, [0.025, 0.975]).tolist()
    return Estimate(value, low, high, is_few=len(samples) < FEW)


def mean(sample: Sample, *, resamples: int = 500) -> Estimate:
    """The mean with its bootstrap interval; no interval with fewer than 5 values."""
    values = _checked(sample)
    if len(values) < MIN_FOR_INTERVAL:
        return Estimate(float(values.mean()))
    drawn = np.random.default_rng(0).choice(values, (resamples, len(values))).mean(axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975]).tolist()
    return Estimate(float(values.mean()), low, high, is_few=len(values) < FEW)


def _checked(sample: Sample) -> NDArray[np.float64]:
    values = np.asarray(sample, np.float64).ravel()
    if values.size == 0 or not np.isfinite(values).all():
        raise ConfigError(
            f"a sample of {values.size} numbers is empty or not finite; give at least one finite "
            "number"
        )
    return values
