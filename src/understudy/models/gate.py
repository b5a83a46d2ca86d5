"""The gate: what must be true of a model before players meet it, decided by one pure function.

    evidence (checks, returns of candidate and champion) ─► verdict: promote, wait or reject

Whoever calls gathers the evidence: from a simulator all at once, or from live play as it comes.
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
    """One thing that was looked at in the model itself, without playing."""

    name: str
    passed: bool
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How good a candidate must be, and how sure."""

    min_episodes: int = 30
    """Of candidate and champion each, before anything is said about their returns."""
    max_episodes: int = 480
    """Of the candidate; undecided by then, it is rejected."""
    worse_by: float = 0.05
    """How much lower the candidate's mean return may be, as a share of the champion's size."""
    error: float = 0.01
    """How often a candidate that is worse than that may pass, over all looks together."""

    def __post_init__(self) -> None:
        if not 2 <= self.min_episodes <= self.max_episodes:
            raise ConfigError(
                f"episodes from {self.min_episodes} to {self.max_episodes}; give 2 or more, rising"
            )
        if not 0 <= self.worse_by < 1 or not 0 < self.error < 0.5:
            raise ConfigError(
                f"worse_by {self.worse_by}, error {self.error}; give shares below 1 and below 0.5"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known about a candidate, and about the champion it would replace."""

    checks: Sequence[ModelCheck]
    has_champion: bool
    candidate: Sample = ()
    """Returns of its episodes."""
    champion: Sample = ()
    """Returns of the champion's, played in the same time or on the same seeds."""


@dataclass(frozen=True, slots=True)
class GateDecision:
    """What becomes of a candidate, and why, in words for people."""

    decision: Decision
    why: str


def verdict(evidence: Evidence, bounds: Bounds) -> GateDecision:
    """Promote what is proven not to be worse, reject what fails a check or cannot be proven,
    wait in between."""
    for check in evidence.checks:
        if not check.passed:
            return GateDecision("reject", f"{check.name}: {check.detail}")
    if not evidence.has_champion:
        return GateDecision("promote", "the first bot, and it passed every check")
    ours = np.asarray(evidence.candidate, float)
    theirs = np.asarray(evidence.champion, float)
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        return GateDecision("reject", "a return is not finite")
    n_looked = min(len(ours), len(theirs))
    if n_looked < bounds.min_episodes:
        return GateDecision("wait", f"{n_looked} of {bounds.min_episodes} episodes of both")
    return _compare(ours, theirs, bounds)


def _compare(
    ours: NDArray[np.float64], theirs: NDArray[np.float64], bounds: Bounds
) -> GateDecision:
    gain = float(ours.mean() - theirs.mean())
    half = _confidence(bounds) * math.sqrt(
        ours.var(ddof=1) / len(ours) + theirs.var(ddof=1) / len(theirs)
    )
    allowed = bounds.worse_by * max(abs(float(theirs.mean())), float(theirs.std()))
    says = (
        f"mean return {ours.mean():.4g} over {len(ours)} episodes, the champion's "
        f"{theirs.mean():.4g} over "
        f"{len(theirs)}; the difference is {gain:.3g} ± {half:.2g}"
    )
    if gain - half >= -allowed:
        return GateDecision("promote", says)
    if gain + half < -allowed:
        return GateDecision("reject", f"{says}, more than {allowed:.2g} worse")
    if len(ours) >= bounds.max_episodes:
        return GateDecision("reject", f"{says}, not proven within {bounds.max_episodes} episodes")
    return GateDecision("wait", says)


def looks(bounds: Bounds) -> list[int]:
    """Numbers of episodes at which returns may be compared; each look costs some of the allowed
    error."""
    counts = [bounds.min_episodes]
    while counts[-1] < bounds.max_episodes:
        counts.append(min(counts[-1] * 2, bounds.max_episodes))
    return counts


def _confidence(bounds: Bounds) -> float:
    """Standard errors on each side: the allowed error is shared out over all looks."""
    return NormalDist().inv_cdf(1 - bounds.error / len(looks(bounds)))
