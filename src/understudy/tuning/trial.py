"""Trials, and the interfaces between the parts of a study. Read this file first.

    Searcher.ask ─► Trial ─► a slot's process: Trainable.run ─► TrialResult ─► Searcher.tell
                                     │  ▲
                             reports ▼  │ stop or continue
                                StoppingRule

A study decides in the order of trials, not of time: the searcher is told the results of all trials
up to `trial_no - lag` before it is asked for trial `trial_no`, and a stopping rule compares with
these trials only. So the same seed and lag give the same table of trials on any number of slots.
Everything here is data or an interface, and imports neither JAX nor a game.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

Values = Mapping[str, Any]
"""Settings by name: JSON numbers, texts, truth values, or lists of them."""

TrialState = Literal["done", "stopped", "failed"]
"""`done`: trained to its end; `stopped`: ended early by the stopping rule; `failed`: an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One point of the space."""

    trial_no: int
    """Counts from 0."""
    values: Values
    """What the searcher chose; the study's fixed settings are not repeated here."""
    seed: int
    """Of envs, weights and sampling; computed from the study's seed and `trial_no`."""


class Report(NamedTuple):
    """An intermediate value of the metric, while a trial trains."""

    trial_no: int
    step: int
    """How far the training is, in its own unit, such as env steps."""
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """How a trial ended."""

    trial_no: int
    state: TrialState
    metrics: Mapping[str, float] = field(default_factory=dict)
    """At the end of the training, or at the last report of a stopped trial. Empty if failed."""
    reports: Sequence[tuple[int, float]] = ()
    """Step and value of every report, in order."""
    seconds: float = 0.0
    error: str = ""
    """Why the trial failed, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """What a study compares trials by."""

    name: str = "reward"
    criteria: Literal["max", "min"] = "max"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainableSpec:
    """What every trial of a study runs, as data, from which each slot's process creates it."""

    path: str
    """`module:Class` of a Trainable; it is created with `TrainableSpec.config`."""
    config: Mapping[str, Any]
    """JSON: game, algorithm, fixed settings, folders."""


class Trainable(Protocol):
    """Trains and evaluates one trial at a time, in a slot's process."""

    metrics: Sequence[str]
    """The names of what `run` returns."""

    def run(self, trial: Trial, report: Callable[[int, float], bool]) -> Mapping[str, float]:
        """Return the metrics. `report(step, value)` returns True if the trial must end now.

        Raises what went wrong; the study records it and continues with the next trial.
        """
        ...


class LaneTrainable(Protocol):
    """Trains several trials at once in one program; each lane has its own trial."""

    lanes: int
    metrics: Sequence[str]

    def bucket(self, trial: Trial) -> str:
        """Trials of one bucket can share a program: their arrays have the same shapes."""
        ...

    def start(self, trial: Trial) -> None:
        """Put a trial into a free lane; all trials in the lanes are of one bucket."""
        ...

    def step(self) -> Sequence[Report | TrialResult]:
        """Train all lanes a little; return their reports, and the results of those that ended.

        A failed trial is a result, too. A lane that reported trains no further until `answer`.
        """
        ...

    def answer(self, trial_no: int, *, must_stop: bool) -> None:
        """Continue a trial that reported, or end it: its result is returned by a later `step`."""
        ...


class Searcher(Protocol):
    """Chooses the points of a space; a pure function of its space, seed and what it was told."""

    def ask(self, trial_no: int) -> Values | None:
        """Return the values of the next trial; None if there are no more (a grid ends)."""
        ...

    def tell(self, trial: Trial, result: TrialResult) -> None:
        """Receive a result, in the order of `trial_no`."""
        ...


class StoppingRule(Protocol):
    """Decides at a report whether a trial ends early; a pure function of its arguments."""

    def must_stop(self, reports: Sequence[float], earlier: Sequence[Sequence[float]]) -> bool:
        """`reports` are the trial's values so far, of which larger is better, as in `earlier`.

        `earlier` has, for each trial that counts, its values up to as many reports; trials that
        were stopped or failed before have fewer.
        """
        ...
