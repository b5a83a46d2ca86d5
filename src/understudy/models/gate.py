"""The gate: decides with one pure function whether players may get a model.

    evidence (checks, returns of candidate and champion) ─► decision: promote, wait or reject

The caller collects the evidence: from a simulator all at once, or from live play as it arrives.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from understudy.core.errors import ConfigError
from understudy.core.statistics import Sample

Decision = Literal["promote", "wait", "reject"]


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """The result of one check of the model itself, without playing."""

    name: str
    passed: bool
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How good a candidate must be, and with what certainty."""

    min_episodes: int = 30
    """Episodes that candidate and champion must each have before their returns are compared."""
    max_episodes: int = 480
    """After this many episodes of its own, an undecided candidate is rejected."""
    worse_by: float = 0.05
    """How much lower the candidate's mean return may be, as a fraction of the champion's returns:
    of the absolute value of their mean or of their standard deviation, whichever is larger."""
    error: float = 0.01
    """Highest probability that a candidate worse than that is promoted, over all comparisons."""

    def __post_init__(self) -> None:
        if not 2 <= self.min_episodes <= self.max_episodes:
            raise ConfigError(
                f"min_episodes is {self.min_episodes} and max_episodes {self.max_episodes}; use 2 "
                "or more, with min_episodes not above max_episodes"
            )
        if not 0 <= self.worse_by < 1 or not 0 < self.error < 0.5:
            raise ConfigError(
                f"worse_by is {self.worse_by} and error {self.error}; use a worse_by from 0 to "
                "below 1 and an error above 0 and below 0.5"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Checks and returns of a candidate, and returns of the champion it would replace."""

    checks: Sequence[ModelCheck]
    has_champion: bool
    candidate: Sample = ()
    """Returns of the candidate's episodes."""
    champion: Sample = ()
    """Returns of the champion's episodes, from the same period or the same seeds."""


@dataclass(frozen=True, slots=True)
class GateDecision:
    """The decision about a candidate, and the reason as text."""

    decision: Decision
    why: str


def decision(evidence: Evidence, bounds: Bounds) -> GateDecision:
    """Whether to promote, reject or wait, and why; promotes only what is proven not worse."""
    for check in evidence.checks:
        if not check.passed:
            return GateDecision("reject", f"{check.name}: {check.detail}")
    if not evidence.has_champion:
        return GateDecision("promote", "the first bot, which passed every check")
    candidate = np.asarray(evidence.candidate, float)
    champion = np.asarray(evidence.champion, float)
    if not (np.isfinite(candidate).all() and np.isfinite(champion).all()):
        return GateDecision("reject", "a return of the candidate or the champion is not finite")
    n_episodes = min(len(candidate), len(champion))
    if n_episodes < bounds.min_episodes:
        return GateDecision("wait", f"{n_episodes} of {bounds.min_episodes} episodes of each bot")
    return _compare(candidate, champion, bounds)


def _compare(
    candidate: NDArray[np.float64], champion: NDArray[np.float64], bounds: Bounds
) -> GateDecision:
    gain = float(candidate.mean() - champion.mean())
    half = _confidence(bounds) * math.sqrt(
        candidate.var(ddof=1) / len(candidate) + champion.var(ddof=1) / len(champion)
    )
    allowed = bounds.worse_by * max(abs(float(champion.mean())), float(champion.std()))
    why = (
        f"mean return {candidate.mean():.4g} over {len(candidate)} episodes, the champion's "
        f"{champion.mean():.4g} over {len(champion)}; the difference is {gain:.3g} ± {half:.2g}"
    )
    if gain - half >= -allowed:
        return GateDecision("promote", why)
    if gain + half < -allowed:
        return GateDecision("reject", f"{why}, more than {allowed:.2g} worse")
    if len(candidate) >= bounds.max_episodes:
        return GateDecision(
            "reject", f"{why}, still undecided after {bounds.max_episodes} episodes"
        )
    return GateDecision("wait", why)


def looks(bounds: Bounds) -> list[int]:
    """The episode counts at which returns are compared; each comparison spends part of `error`."""
    counts = [bounds.min_episodes]
    while counts[-1] < bounds.max_episodes:
        counts.append(min(counts[-1] * 2, bounds.max_episodes))
    return counts


def _confidence(bounds: Bounds) -> float:
    """Half the width of the confidence interval, in standard errors; all looks share `error`."""
    return NormalDist().inv_cdf(1 - bounds.error / len(looks(bounds)))
