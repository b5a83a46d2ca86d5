"""Figures as we report them: percentiles of a sample, a rate with its spread, an estimate with its interval."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from understudy.core.errors import ConfigError

Sample = Sequence[float] | NDArray[np.floating] | NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Percentiles:
    """How a sample is spread; in the sample's own unit."""

    count: int
    p50: float
    p99: float
    p9999: float
    max: float


@dataclass(frozen=True, slots=True)
class Rate:
    """The median of several measurements, and the lowest and highest of them."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a whole with its 95 % interval (Wilson)."""

    share: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 95 % interval; the ends are None where there is too little to say."""

    value: float
    low: float | None = None
    high: float | None = None


def iqm(sample: Sample) -> float:
    """The mean of the middle half: as steady as a median, and it does not throw half the sample away."""
    values = np.sort(_checked(sample))
    cut = len(values) / 4
    weights = np.clip(np.minimum(np.arange(1, len(values) + 1) - cut, len(values) - cut - np.arange(len(values))), 0, 1)
    return float((values * weights).sum() / weights.sum())


def bootstrap(groups: Sequence[Sample], figure: Callable[[Sample], float], *, resamples: int = 2_000) -> Estimate:
    """A figure over all groups (seeds, runs) together, and its interval from resampling within and among them.

    Below 5 groups there is no interval: too few seeds say nothing about other seeds.
    """
    whole = [_checked(group) for group in groups]
    value = figure(np.concatenate(whole))
    if len(whole) < 5:
        return Estimate(value)
    rng = np.random.default_rng(0)
    drawn = [
        figure(
            np.concatenate([rng.choice(whole[at], len(whole[at])) for at in rng.integers(0, len(whole), len(whole))])
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


def percentiles(sample: Sample) -> Percentiles:
    """p50, p99, p99.99 and the maximum; each is a value that was measured, never one between two.

    A sample too small to know its p99.99 answers with its maximum.
    """
    values = _checked(sample)
    p50, p99, p9999 = np.quantile(values, [0.5, 0.99, 0.9999], method="inverted_cdf").tolist()
    return Percentiles(len(values), p50, p99, p9999, float(values.max()))


def rate(measurements: Sample) -> Rate:
    """The median of repeated measurements with their range: what a bench reports when it ran a few times."""
    values = _checked(measurements)
    return Rate(float(np.median(values)), float(values.min()), float(values.max()))


def share(part: int, whole: int) -> Share:
    """Part of whole with its 95 % interval, which is sound for small counts and at 0 and 1."""
    if not 0 <= part <= whole or whole == 0:
        raise ConfigError(f"a share of {part} in {whole}; give a part from 0 to the whole, and a whole from 1")
    z = 1.959964
    mean, spread = part / whole, z * z / whole
    centre = (mean + spread / 2) / (1 + spread)
    half = z * math.sqrt(mean * (1 - mean) / whole + spread / (4 * whole)) / (1 + spread)
    return Share(mean, min(mean, max(0.0, centre - half)), max(mean, min(1.0, centre + half)))


def _checked(sample: Sample) -> NDArray[np.float64]:
    values = np.asarray(sample, np.float64).ravel()
    if values.size == 0 or not np.isfinite(values).all():
        raise ConfigError(f"a sample of {values.size} numbers is empty or not finite; measure at least once")
    return values
