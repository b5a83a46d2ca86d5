"""StudyResult: what a study found, and how the best trials did on held-out seeds.

The best of many noisy numbers is too good to be true: its trial was lucky, too (the winner's
curse). So the best trial and the runner-up, the finalists, are trained again with seeds that the
search has never used. Their test is a small study of its own in STUDY/test-A-B, for the trials A
and B, so it is resumed and survives kills as the search does.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from understudy.arena.statistics import compare
from understudy.core.errors import ConfigError
from understudy.core.statistics import MIN_FOR_INTERVAL, Estimate, mean
from understudy.tuning.journal import NAME, Row, SlotTime, read_journal, table
from understudy.tuning.search import HELD_OUT, branch
from understudy.tuning.study_config import (
    ConvergenceConfig,
    StoppingConfig,
    StudyConfig,
    study_from_json,
)
from understudy.tuning.trial import Metric, Trial, TrialResult, Values

FINALISTS = 2


def signed(metric: Metric, value: float) -> float:
    """The value, so that larger is better."""
    return value if metric.criteria == "max" else -value


def score(config: StudyConfig, result: TrialResult) -> float | None:
    """The metric, so that larger is better; None if the trial cannot be the best.

    Only a trial that was trained to its end, and has all constrained metrics in bounds, can be.
    """
    if result.state != "done":
        return None
    for constraint in config.constraints:
        value = result.metrics.get(constraint.metric, math.nan)
        low = -math.inf if constraint.low is None else constraint.low
        high = math.inf if constraint.high is None else constraint.high
        if not low <= value <= high:
            return None
    return signed(config.metric, result.metrics[config.metric.name])


def ranked(config: StudyConfig, rows: Sequence[Row]) -> list[Row]:
    """The trials that can be the best, best first; of equal ones, the first trial."""
    scores = {row.trial.trial_no: score(config, row.result) for row in rows}
    able = [row for row in rows if scores[row.trial.trial_no] is not None]
    return sorted(able, key=lambda row: -(scores[row.trial.trial_no] or 0.0))


class Finalist(NamedTuple):
    """A trial that was trained again."""

    trial: Trial
    tuned: float
    """Its metric in the search."""
    scores: Sequence[float]
    """Its metric with each held-out seed; a training that failed is missing."""
    n_failed: int

    @property
    def estimate(self) -> Estimate | None:
        """The mean of its scores; None if all failed."""
        return mean(self.scores) if self.scores else None


@dataclass(frozen=True, slots=True)
class WinnerTest:
    """How the finalists did on held-out seeds; the first was the best of the search."""

    metric: Metric
    finalists: Sequence[Finalist]
    probability: Estimate | None
    """That one training of the first is better than one of the second; None if there is one."""

    @property
    def improvement(self) -> float:
        return 1.0 if self.probability is None else self.probability.value

    @property
    def is_decided(self) -> bool:
        """Whether these seeds can tell the finalists apart."""
        if self.probability is None:
            return bool(self.finalists[0].scores)
        low, high = self.probability.low, self.probability.high
        return low is not None and high is not None and (low > 0.5 or high < 0.5)

    @property
    def gap(self) -> float | None:
        """By how much the search's number of its best trial was too good."""
        first = self.finalists[0]
        if first.estimate is None:
            return None
        return signed(self.metric, first.tuned) - signed(self.metric, first.estimate.value)

    @property
    def verdict(self) -> str:
        """What these seeds tell, in one sentence."""
        first = self.finalists[0]
        if self.probability is None:
            works = "has no rival" if first.scores else "failed with every held-out seed"
            return f"trial {first.trial.trial_no} {works}"
        second = self.finalists[1]
        names = [f"trial {finalist.trial.trial_no}" for finalist in (first, second)]
        if self.is_decided:
            better, worse = names if self.improvement > 0.5 else names[::-1]
            return f"{better} is better than {worse}"
        if self.probability.low is None:
            n_seeds = len(first.scores) + first.n_failed
            return (
                f"no winner yet: {n_seeds} seeds cannot tell {names[0]} from {names[1]}; give "
                f"test_seeds of {MIN_FOR_INTERVAL} or more"
            )
        return f"no winner yet: these seeds cannot tell {names[0]} from {names[1]}"

    @property
    def summary(self) -> list[str]:
        """The verdict, its probability and the winner's curse, in a line or two."""
        first = self.finalists[0].trial.trial_no
        lines = [self.verdict]
        if self.probability is not None:
            lines[0] += (
                f"; a training of trial {first} beats one of trial "
                f"{self.finalists[1].trial.trial_no} with probability "
                f"{interval_text(self.probability)}"
            )
        if self.gap is not None:
            direction = "too good" if self.gap >= 0 else "too low"
            lines.append(
                f"the search's number of trial {first} was {abs(self.gap):.4g} {direction}"
            )
        return lines

    def to_json(self) -> dict[str, Any]:
        estimates = [finalist.estimate for finalist in self.finalists]
        return {
            "verdict": self.verdict,
            "is_decided": self.is_decided,
            "gap": self.gap,
            "probability": estimate_fields(self.probability),
            "finalists": [
                {
                    "trial_no": finalist.trial.trial_no,
                    "tuned": finalist.tuned,
                    "held_out": estimate_fields(estimate),
                    "scores": list(finalist.scores),
                    "failed": finalist.n_failed,
                }
                for finalist, estimate in zip(self.finalists, estimates, strict=True)
            ],
        }


@dataclass(frozen=True, slots=True)
class StudyResult:
    """A study, finished or not."""

    folder: Path
    config: StudyConfig
    trials: Sequence[Row]
    """Those that have ended, in order."""
    ended: str
    """Why the search ended; empty if it can be resumed."""
    test: WinnerTest | None = None
    """The finalists on held-out seeds; None until all of these trainings have ended."""
    max_trials: int = 0
    """Of the search, also if it was extended."""
    leases: Sequence[SlotTime] = ()
    """Which slot ran which trial of the search, and when; empty if the journal has no times."""

    @property
    def best(self) -> Row | None:
        """The trial to use; None if none can be.

        It is the best of the search, unless the test proves the runner-up better.
        """
        rows = ranked(self.config, self.trials)
        is_beaten = self.test is not None and self.test.is_decided and self.test.improvement < 0.5
        return next(iter(rows[is_beaten:]), None)

    @property
    def why_no_best(self) -> str:
        """Why no trial that has ended is the best, and what to do; empty if one is."""
        if self.best is not None:
            return ""
        seconds = self.config.max_seconds
        if self.ended and seconds and all(row.result.state == "stopped" for row in self.trials):
            return (
                f"no trial ended within {seconds:g} s; start another study with a larger "
                "max_seconds, or without one"
            )
        if self.trials:
            return "no trial can be the best: each one failed, or is outside a constraint"
        return ""

    @property
    def tested(self) -> Finalist:
        """The best trial on held-out seeds; ConfigError if it was not trained on them."""
        best = self.best
        if self.test is None or best is None:
            raise ConfigError(
                f"{self.folder} has no trainings on held-out seeds; finish it: understudy tune "
                f"resume {self.folder}, or start a study with test_seeds above 0"
            )
        return next(
            finalist
            for finalist in self.test.finalists
            if finalist.trial.trial_no == best.trial.trial_no
        )

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do, neither in the search nor in the test."""
        return bool(self.ended) and (self.test is not None or not _has_test(self))

    @property
    def warnings(self) -> list[str]:
        """What makes the numbers mean less than they seem to."""
        updates = [row.result.metrics.get("updates", 1.0) for row in self.trials]
        if not (n_untrained := updates.count(0.0)):
            return []
        text = f"{n_untrained} of {len(updates)} trials ended before their first update"
        return [f"{text}, so they learned nothing; raise steps, or lower min_inserts"]

    def __repr__(self) -> str:
        best = self.best
        value = "none" if best is None else f"{best.result.metrics[self.config.metric.name]:g}"
        return f"StudyResult({str(self.folder)!r}, {len(self.trials)} trials, best {value})"

    def to_json(self) -> dict[str, Any]:
        """The study as in STUDY/study.json."""
        best = self.best
        return {
            "name": self.config.name,
            "folder": str(self.folder),
            "ended": self.ended,
            "metric": self.config.metric.name,
            "criteria": self.config.metric.criteria,
            "best": None if best is None else best.trial.trial_no,
            "test": None if self.test is None else self.test.to_json(),
            "trials": table(self.trials),
            "study": self.config.to_json(),
        }


def load_study(folder: str | Path) -> StudyResult:
    """The study in a folder, also while it runs."""
    folder = Path(folder)
    state = read_journal(folder / NAME).state
    config = study_from_json(state.created["study"])
    result = StudyResult(
        folder,
        config,
        state.rows(),
        state.ended if state.is_over else "",
        max_trials=state.max_trials or config.max_trials,
        leases=state.leases,
    )
    return replace(result, test=_load_test(result))


# --- The finalists on held-out seeds --------------------------------------------------------------


def estimate_fields(estimate: Estimate | None) -> dict[str, float | None] | None:
    """An estimate as JSON."""
    if estimate is None:
        return None
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}


def interval_text(estimate: Estimate) -> str:
    """A value with its 95 % interval, if there is one."""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.4g}"
    few = ", few seeds" if estimate.is_few else ""
    return f"{estimate.value:.4g} ({estimate.low:.4g} to {estimate.high:.4g}{few})"


def compare_studies(one: StudyResult, other: StudyResult) -> Estimate:
    """How likely a training of one study's best trial is better than one of the other's."""
    studies = (one, other)
    metrics = [study.config.metric for study in studies]
    if metrics[0] != metrics[1]:
        raise ConfigError(
            f"{one.folder} has the metric {metrics[0].name} ({metrics[0].criteria}), and "
            f"{other.folder} {metrics[1].name} ({metrics[1].criteria}); compare studies of the "
            "same metric"
        )
    finalists = [study.tested for study in studies]
    if not any(finalist.scores for finalist in finalists):
        raise ConfigError(
            f"the best trials of {one.folder} and {other.folder} failed with every held-out seed; "
            "show the studies to see why: understudy tune show"
        )
    return _probability(metrics[0], *finalists)


def _probability(metric: Metric, one: Finalist, other: Finalist) -> Estimate:
    """That a training of one is better; a training that failed is worse than all others."""
    worst = min(signed(metric, value) for value in (*one.scores, *other.scores))
    first, second = (
        [signed(metric, value) for value in finalist.scores]
        + [worst - 1.0 - abs(worst)] * finalist.n_failed
        for finalist in (one, other)
    )
    return compare(first, second, np.random.default_rng(0))


class RepeatSearch:
    """The searcher of a test: each finalist's values, once for each seed."""

    def __init__(self, finalists: Sequence[Values], n_seeds: int) -> None:
        self._finalists = finalists
        self._n_trials = len(finalists) * n_seeds

    def ask(self, trial_no: int) -> Values | None:
        if trial_no >= self._n_trials:
            return None
        return self._finalists[trial_no % len(self._finalists)]

    def tell(self, trial: Trial, result: TrialResult) -> None:
        """Nothing is learned from results."""


def winner_study(result: StudyResult) -> tuple[StudyConfig, RepeatSearch] | None:
    """The test that a study needs, and its searcher; None if it needs none, or has none yet.

    `config["folder"]` of its trainable is the test's folder.
    """
    if not result.ended or not _has_test(result):
        return None
    config = result.config
    finalists = ranked(config, result.trials)[:FINALISTS]
    seed = int(branch(config.seed, HELD_OUT, 0).generate_state(1)[0])
    test = replace(
        config,
        name=f"{config.name} on held-out seeds",
        trainable=replace(
            config.trainable,
            config={**config.trainable.config, "folder": str(_test_folder(result, finalists))},
        ),
        constraints=(),
        max_trials=len(finalists) * config.search.test_seeds,
        max_seconds=0.0,
        seed=seed,
        stopping=StoppingConfig(),
        convergence=ConvergenceConfig(),
        notes=(),
    )
    return test, RepeatSearch([row.trial.values for row in finalists], config.search.test_seeds)


def _has_test(result: StudyResult) -> bool:
    return result.config.search.test_seeds > 0 and bool(ranked(result.config, result.trials))


def _test_folder(result: StudyResult, finalists: Sequence[Row]) -> Path:
    return result.folder / "-".join(["test", *(str(row.trial.trial_no) for row in finalists)])


def _load_test(result: StudyResult) -> WinnerTest | None:
    """The test of a study, if all of its trainings have ended."""
    finalists = ranked(result.config, result.trials)[:FINALISTS]
    path = _test_folder(result, finalists) / NAME
    if not result.ended or not _has_test(result) or not path.exists():
        return None
    rows = read_journal(path).state.rows()
    n_seeds = result.config.search.test_seeds
    if len(rows) < len(finalists) * n_seeds:
        return None
    return winner_test(
        result.config.metric,
        finalists,
        [[row.result for row in rows[index :: len(finalists)]] for index in range(len(finalists))],
    )


def winner_test(
    metric: Metric, finalists: Sequence[Row], results: Sequence[Sequence[TrialResult]]
) -> WinnerTest:
    """The statistics of the finalists' results, one for each held-out seed."""
    tested = []
    for row, own in zip(finalists, results, strict=True):
        scores = [result.metrics[metric.name] for result in own if result.state == "done"]
        tuned = row.result.metrics[metric.name]
        tested.append(Finalist(row.trial, tuned, scores, len(own) - len(scores)))
    if len(tested) < FINALISTS or not any(finalist.scores for finalist in tested):
        return WinnerTest(metric, tested, None)
    return WinnerTest(metric, tested, _probability(metric, *tested))
