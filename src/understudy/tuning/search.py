"""Searchers choose the points of a space, stopping rules end poor trials early.

SEARCHERS   random, grid, sobol; tpe, gp and cma are Optuna's (extra `optuna`)
RULES       none, asha, median
"""

import importlib
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from understudy.core.errors import ConfigError, MissingExtra
from understudy.core.settings import load_object
from understudy.tuning.space import Choice, Interval, Space
from understudy.tuning.trial import Metric, Searcher, StoppingRule, Trial, TrialResult, Values

if TYPE_CHECKING:
    from understudy.tuning.study_config import Constraint, ConvergenceConfig, StoppingConfig

SEARCHERS: Mapping[str, str] = {
    "random": f"{__name__}:RandomSearch",
    "grid": f"{__name__}:GridSearch",
    "sobol": f"{__name__}:SobolSearch",
    "tpe": f"{__name__}:OptunaSearch",
    "gp": f"{__name__}:OptunaSearch",
    "cma": f"{__name__}:OptunaSearch",
}
RULES: Mapping[str, str] = {
    "none": f"{__name__}:NeverStop",
    "asha": f"{__name__}:Asha",
    "median": f"{__name__}:MedianStop",
}
_SOBOL_BITS = 32
"""More than the trials of any study."""
_MIN_PEERS = 5
"""Trials that a median is computed of, at least."""

# The branches of a study's seed.
VALUES = 0
TRIALS = 1
HELD_OUT = 2


def branch(seed: int, kind: int, number: int) -> np.random.SeedSequence:
    """The random bits of one purpose and number, independent of all others."""
    return np.random.SeedSequence(seed, spawn_key=(kind, number))


def trial_seed(seed: int, trial_no: int) -> int:
    """The seed of a trial in the study with this seed."""
    return int(branch(seed, TRIALS, trial_no).generate_state(1)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlan:
    """What a searcher is created with."""

    space: Space
    seed: int = 0
    method: str = "random"
    metric: Metric = field(default_factory=Metric)
    constraints: "Sequence[Constraint]" = ()
    points: int = 0
    """On a grid: the values of an interval without a step."""


def make_searcher(plan: SearchPlan) -> Searcher:
    """Create the searcher of a plan: one of SEARCHERS, or `module:Class` of your own."""
    path = SEARCHERS.get(plan.method, plan.method)
    return cast(Searcher, load_object(path, what="search method", known=SEARCHERS)(plan))


def make_rule(config: "StoppingConfig") -> StoppingRule:
    """Create the stopping rule of a study: one of RULES, or `module:Class` of your own."""
    path = RULES.get(config.rule, config.rule)
    return cast(StoppingRule, load_object(path, what="stopping rule", known=RULES)(config))


# --- Searchers ------------------------------------------------------------------------------------


class RandomSearch:
    """Independent random points."""

    def __init__(self, plan: SearchPlan) -> None:
        self._plan = plan

    def ask(self, trial_no: int) -> Values | None:
        rng = np.random.Generator(np.random.PCG64(branch(self._plan.seed, VALUES, trial_no)))
        return self._plan.space.sample(rng)

    def tell(self, trial: Trial, result: TrialResult) -> None:
        """Nothing is learned from results."""


class GridSearch:
    """All combinations of the values, once each."""

    def __init__(self, plan: SearchPlan) -> None:
        self._rest = plan.space.grid(plan.points)
        self._points: list[Values] = []

    def ask(self, trial_no: int) -> Values | None:
        self._points += itertools.islice(self._rest, max(0, trial_no + 1 - len(self._points)))
        return self._points[trial_no] if trial_no < len(self._points) else None

    def tell(self, trial: Trial, result: TrialResult) -> None:
        """Nothing is learned from results."""


_JOE_KUO = (
    (0, 1, 1), (1, 2, 1, 3), (1, 3, 1, 3, 1), (2, 3, 1, 1, 1), (1, 4, 1, 1, 3, 3),
    (4, 4, 1, 3, 5, 13), (2, 5, 1, 1, 5, 5, 17), (4, 5, 1, 1, 5, 5, 5), (7, 5, 1, 1, 7, 11, 19),
    (11, 5, 1, 1, 5, 1, 1), (13, 5, 1, 1, 1, 3, 11), (14, 5, 1, 3, 5, 5, 31),
    (1, 6, 1, 3, 3, 9, 7, 49), (13, 6, 1, 1, 1, 15, 21, 21), (16, 6, 1, 3, 1, 13, 27, 49),
    (19, 6, 1, 1, 1, 15, 7, 5), (22, 6, 1, 3, 1, 15, 13, 25), (25, 6, 1, 1, 5, 5, 19, 61),
    (1, 7, 1, 3, 7, 11, 23, 15, 103), (4, 7, 1, 3, 7, 13, 13, 15, 69),
)  # fmt: skip
"""Of dimensions 2 to 21: coefficients and degree of a primitive polynomial, and the first direction
numbers, as Joe and Kuo chose them (SIAM J. Sci. Comput. 30, 2008)."""


class SobolSearch:
    """A Sobol sequence, shifted at random: it fills the space more evenly than random points."""

    def __init__(self, plan: SearchPlan) -> None:
        self._space = plan.space
        n_dimensions = len(plan.space.dimensions)
        if n_dimensions > len(_JOE_KUO) + 1:
            raise ConfigError(
                f"the space has {n_dimensions} dimensions, and sobol at most {len(_JOE_KUO) + 1}; "
                "search with random"
            )
        rng = np.random.Generator(np.random.PCG64(branch(plan.seed, VALUES, 0)))
        self._shift = rng.integers(1 << _SOBOL_BITS, size=n_dimensions)
        self._directions = [_directions(dimension) for dimension in range(n_dimensions)]

    def ask(self, trial_no: int) -> Values | None:
        gray = trial_no ^ (trial_no >> 1)
        point = []
        for directions, shift in zip(self._directions, self._shift.tolist(), strict=True):
            bits = shift
            for place in range(gray.bit_length()):
                if gray >> place & 1:
                    bits ^= directions[place]
            point.append((bits + 0.5) / (1 << _SOBOL_BITS))
        return self._space.at(point)

    def tell(self, trial: Trial, result: TrialResult) -> None:
        """Nothing is learned from results."""


def _directions(dimension: int) -> Sequence[int]:
    """The direction numbers of a dimension, as integers of `_SOBOL_BITS` bits."""
    if dimension == 0:
        return [1 << (_SOBOL_BITS - 1 - place) for place in range(_SOBOL_BITS)]
    coefficients, degree, *first = _JOE_KUO[dimension - 1]
    directions = [number << (_SOBOL_BITS - 1 - place) for place, number in enumerate(first)]
    for place in range(degree, _SOBOL_BITS):
        number = directions[place - degree] ^ (directions[place - degree] >> degree)
        for back in range(1, degree):
            if coefficients >> (degree - 1 - back) & 1:
                number ^= directions[place - back]
        directions.append(number)
    return directions


_SAMPLERS = {
    "tpe": ("TPESampler", ()),
    "gp": ("GPSampler", ("torch", "scipy")),
    "cma": ("CmaEsSampler", ("cmaes",)),
}
"""Of Optuna, and the packages that each needs besides."""


class OptunaSearch:
    """A sampler of Optuna, which learns from the results that it was told."""

    def __init__(self, plan: SearchPlan) -> None:
        sampler, packages = _SAMPLERS[plan.method]
        for package in ("optuna", *packages):
            try:
                importlib.import_module(package)
            except ImportError:
                extra = " torch" if plan.method == "gp" else ""
                raise MissingExtra(
                    f"the search method {plan.method} needs the package {package}: pip install "
                    f"'understudy[optuna]'{extra}"
                ) from None
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna = optuna
        self._plan = plan
        seed = int(branch(plan.seed, VALUES, 0).generate_state(1)[0])
        is_max = plan.metric.criteria == "max"
        self._study = optuna.create_study(
            sampler=getattr(optuna.samplers, sampler)(seed=seed),
            direction="maximize" if is_max else "minimize",
        )
        self._distributions = {
            name: self._distribution(dimension) for name, dimension in plan.space.dimensions.items()
        }
        self._asked: dict[int, Any] = {}

    def ask(self, trial_no: int) -> Values | None:
        asked = self._study.ask(self._distributions)
        self._asked[trial_no] = asked
        values: dict[str, Any] = {}
        for name, dimension in self._plan.space.dimensions.items():
            drawn = asked.params[name]
            is_value = isinstance(dimension, Interval) and dimension.step is None
            values[name] = drawn if is_value else dimension.at((drawn + 0.5) / dimension.size)
        return values

    def tell(self, trial: Trial, result: TrialResult) -> None:
        asked = self._asked.pop(trial.trial_no)
        states = self._optuna.trial.TrialState
        if result.state == "failed":
            self._study.tell(asked, state=states.FAIL)
            return
        for step, value in result.reports:
            asked.report(value, step)
        if result.state == "stopped":
            self._study.tell(asked, state=states.PRUNED)
            return
        for constraint in self._plan.constraints:
            # Optuna's constraints are satisfied at 0 and below.
            value = result.metrics.get(constraint.metric, math.inf)
            if constraint.high is not None:
                asked.set_constraint(f"{constraint.metric} max", value - constraint.high)
            if constraint.low is not None:
                value = result.metrics.get(constraint.metric, -math.inf)
                asked.set_constraint(f"{constraint.metric} min", constraint.low - value)
        self._study.tell(asked, result.metrics[self._plan.metric.name])

    def _distribution(self, dimension: Any) -> Any:
        kinds = self._optuna.distributions
        if isinstance(dimension, Interval) and dimension.step is None:
            kind = kinds.IntDistribution if dimension.is_integer else kinds.FloatDistribution
            return kind(dimension.low, dimension.high, log=dimension.scale == "log")
        if isinstance(dimension, Choice):
            values = list(dimension.values)
            is_ordered = all(type(value) in (int, float) for value in values)
            if not is_ordered or values != sorted(values):
                return kinds.CategoricalDistribution(range(len(values)))
        return kinds.IntDistribution(0, dimension.size - 1)  # a larger one may be better


# --- Stopping rules -------------------------------------------------------------------------------


class NeverStop:
    """Every trial is trained to its end."""

    def __init__(self, config: "StoppingConfig") -> None:
        pass

    def must_stop(self, reports: Sequence[float], earlier: Sequence[Sequence[float]]) -> bool:
        return False


class Asha:
    """Of the trials that reach a rung, about one of `reduction` continues to the next.

    Rungs are at `min_reports` reports, and at each number `reduction` times the one before.
    """

    def __init__(self, config: "StoppingConfig") -> None:
        self._config = config

    def must_stop(self, reports: Sequence[float], earlier: Sequence[Sequence[float]]) -> bool:
        rung = self._config.min_reports
        while rung < len(reports):
            rung *= self._config.reduction
        if rung != len(reports):
            return False
        values = sorted(
            [reports[-1], *(other[rung - 1] for other in earlier if len(other) >= rung)]
        )
        n_continue = len(values) // self._config.reduction
        return n_continue > 0 and reports[-1] < values[-n_continue]


class MedianStop:
    """A trial ends if its best report is below the median of the mean reports of others."""

    def __init__(self, config: "StoppingConfig") -> None:
        self._config = config

    def must_stop(self, reports: Sequence[float], earlier: Sequence[Sequence[float]]) -> bool:
        count = len(reports)
        peers = [statistics.fmean(other[:count]) for other in earlier if len(other) >= count]
        if count < self._config.min_reports or len(peers) < _MIN_PEERS:
            return False
        return max(reports) < statistics.median(peers)


# --- The end of a study ---------------------------------------------------------------------------


def has_converged(values: Sequence[float | None], config: "ConvergenceConfig") -> bool:
    """Whether a study ends after these trials, of which larger values are better.

    None is a trial that cannot be the best, such as a failed one.
    """
    if config.threshold is None:
        return False
    if config.is_legacy:
        # RLiable compares the last two trials of a batch, from the third batch on.
        batch = config.legacy_batch
        if len(values) % batch or len(values) < 3 * batch:
            return False
        last, before = values[-1], values[-2]
        return last is not None and before is not None and abs(last - before) <= config.threshold
    before_patience = [value for value in values[: -config.patience] if value is not None]
    since = [value for value in values[-config.patience :] if value is not None]
    return bool(before_patience) and max(since, default=-math.inf) <= (
        max(before_patience) + config.threshold
    )
