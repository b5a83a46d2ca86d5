"""Figures as we report them: percentiles of a sample, and a rate with its spread."""

import math
from collections.abc import Sequence
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
