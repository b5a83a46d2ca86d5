"""StudyConfig: everything that defines a study, as data; `study_file.py` reads it from files."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from understudy.core.errors import ConfigError
from understudy.core.settings import setting
from understudy.tuning.space import Space, read_space
from understudy.tuning.trial import Metric, TrainableSpec

METHODS = ("random", "grid", "sobol", "tpe", "gp", "cma")
RULES = ("none", "asha", "median")
ENGINES = ("local", "ray", "spark")
MAX_TRIALS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A metric that the winner must have within bounds, both included."""

    metric: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig:
    """How the points of the space are chosen."""

    method: str = setting("random", description="how points are chosen", choices=METHODS)
    lag: int = setting(
        0, 0, MAX_TRIALS, "a trial is chosen knowing all results up to so many trials before it"
    )
    points: int = setting(0, 0, MAX_TRIALS, "grid: values of an interval without a step")
    test_seeds: int = setting(
        10, 0, 1_000, "held-out seeds that the best trial and the runner-up are trained on again"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingConfig:
    """Which trials end early."""

    rule: str = setting("none", description="which trials end early", choices=RULES)
    min_reports: int = setting(1, 1, MAX_TRIALS, "reports of a trial before it may be stopped")
    reduction: int = setting(3, 2, 100, "asha: one of so many trials continues at each rung")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvergenceConfig:
    """When the study ends before `max_trials`."""

    threshold: float | None = setting(
        None, 0.0, math.inf, "the study ends if the best value improved by at most this"
    )
    """None: never."""
    patience: int = setting(10, 1, MAX_TRIALS, "over so many trials")
    is_legacy: bool = setting(
        False, 0, 1, "RLiable's rule: two trials after another differ by at most the threshold"
    )
    legacy_batch: int = setting(
        1, 1, MAX_TRIALS, "trials of a batch of RLiable's: 1 if serial, else its num_workers"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsConfig:
    """Where trials run, and how many at a time; the table of trials does not depend on `slots`."""

    slots: int = setting(1, 1, 4_096, "processes that run trials (level 1)")
    rollout_workers: int = setting(
        0, 0, 1_024, "processes per trial that play its episodes (level 2); 0: the trial's own"
    )
    lanes: int = setting(
        0, 0, 65_536, "trials per slot that train in one program (level 0); 0: one after the other"
    )
    engine: str = setting("local", description="what runs the slots", choices=ENGINES)
    address: str = setting("", description="of the Ray or Spark cluster; empty: a local one")
    trial_timeout_s: float = setting(
        0.0, 0.0, 1e9, "seconds after which a trial fails; 0: no limit"
    )

    def __post_init__(self) -> None:
        if self.engine == "local" and self.address:
            raise ConfigError(
                f"address is {self.address}, but the engine local has none; give the engine, ray "
                "or spark, or omit address"
            )
        if self.engine == "spark" and self.rollout_workers:
            raise ConfigError(
                f"rollout_workers is {self.rollout_workers}, but a Spark task has one core; set it "
                "to 0, or use the engine local or ray"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyConfig:
    """Everything that defines a study."""

    name: str
    space: Space
    trainable: TrainableSpec
    """What a trial runs; `config["folder"]` is the study's folder."""
    metric: Metric = field(default_factory=Metric)
    constraints: Sequence[Constraint] = ()
    max_trials: int = setting(20, 1, MAX_TRIALS, "trials of the study")
    """Exactly so many, unless a grid, the convergence or `max_seconds` ends the study earlier."""
    max_seconds: float = setting(
        0.0, 0.0, 1e9, "seconds of the search, after which its running trials end; 0: no limit"
    )
    """Counted while a process runs the study: time between a kill and a resume does not count."""
    seed: int = setting(0, 0, (1 << 32) - 1, "the seed of the search and of all trials")
    search: SearchConfig = SearchConfig()
    stopping: StoppingConfig = StoppingConfig()
    convergence: ConvergenceConfig = ConvergenceConfig()
    slots: SlotsConfig = SlotsConfig()
    notes: Sequence[str] = ()
    """What the file's author should know, one line each: hints, and differences from RLiable."""

    def to_json(self) -> dict[str, Any]:
        """This study as JSON, for its journal; `study_from_json` reads it."""
        return {
            **{name: getattr(self, name) for name in ("name", "max_trials", "max_seconds", "seed")},
            "space": self.space.to_json(),
            "trainable": dataclasses.asdict(self.trainable),
            "metric": dataclasses.asdict(self.metric),
            "constraints": [dataclasses.asdict(constraint) for constraint in self.constraints],
            **{name: dataclasses.asdict(getattr(self, name)) for name in PARTS},
            "notes": list(self.notes),
        }


PARTS: Mapping[str, Any] = {
    "search": SearchConfig,
    "stopping": StoppingConfig,
    "convergence": ConvergenceConfig,
    "slots": SlotsConfig,
}
"""The parts of a study, by the name of their section in a TOML file."""


def study_from_json(fields: Mapping[str, Any]) -> StudyConfig:
    """The study that `StudyConfig.to_json` wrote."""
    return StudyConfig(
        **{name: fields[name] for name in ("name", "max_trials", "seed", "notes")},
        max_seconds=fields.get("max_seconds", 0.0),  # not in journals of earlier versions
        space=read_space(fields["space"]),
        trainable=TrainableSpec(**fields["trainable"]),
        metric=Metric(**fields["metric"]),
        constraints=tuple(Constraint(**constraint) for constraint in fields["constraints"]),
        **{name: part(**fields[name]) for name, part in PARTS.items()},
    )
