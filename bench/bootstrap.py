"""How many times better: the ratio of two medians with its 95 % bootstrap interval."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from understudy.core.errors import ConfigError

RESAMPLES = 10_000
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Times:
    """How many times better we are, with the 95 % interval; above 1 means that we are better."""

    ratio: float
    low: float
    high: float

    def meets(self, goal: float) -> bool:
        """A goal is met if the lower end reaches it."""
        return self.low >= goal


def times_better(ours: Sequence[float], theirs: Sequence[float], *, more_is_better: bool) -> Times:
    """The ratio of medians, resampled 10,000 times; an infinite time of ours counts as 0."""
    if not ours or not theirs:
        raise ConfigError(
            f"cannot compare {len(ours)} and {len(theirs)} values; measure each side at least once"
        )
    rng = np.random.default_rng(0)
    better, worse = (ours, theirs) if more_is_better else (theirs, ours)
    drawn = _ratio(_resampled(better, rng), _resampled(worse, rng))
    low, high = np.quantile(drawn, np.array([0.025, 0.975]), method="nearest").tolist()
    return Times(float(_ratio(np.median(better), np.median(worse))), low, high)


def _resampled(side: Sequence[float], rng: np.random.Generator) -> Floats:
    values = np.asarray(side, np.float64)
    medians: Floats = np.median(rng.choice(values, (RESAMPLES, values.size)), axis=1)
    return medians


def _ratio(above: Any, below: Any) -> Any:
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(above / below, nan=0.0, posinf=np.inf)
