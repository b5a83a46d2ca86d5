"""Trainables that cost nothing and always measure the same; and studies of them."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from understudy.core.errors import ConfigError
from understudy.tuning.space import Space, read_space
from understudy.tuning.study_config import SearchConfig, StudyConfig
from understudy.tuning.trial import Report, TrainableSpec, Trial, TrialResult

SPACE = {"x": {"min": 0.0, "max": 1.0}, "width": [16, 32, 64]}


def space() -> Space:
    return read_space(SPACE)


class Quadratic:
    """Best at x = 0.3; a trial reports its value `reports` times, more exactly each time."""

    metrics = ("reward", "cost")

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def run(self, trial: Trial, report: Callable[[int, float], bool]) -> Mapping[str, float]:
        rng = np.random.default_rng(trial.seed)
        target = 1 - (trial.values["x"] - 0.3) ** 2
        for number in range(self._config.get("reports", 0)):
            if report(number + 1, target - rng.random() / (number + 1)):
                break
        if wait_s := self._config.get("wait_s"):
            time.sleep(wait_s)
        return {"reward": target + 0.01 * rng.random(), "cost": float(trial.values["width"])}


class Fragile(Quadratic):
    """Trials fail in several ways, by number."""

    def run(self, trial: Trial, report: Callable[[int, float], bool]) -> Mapping[str, float]:
        match trial.trial_no % 8:
            case 1:
                raise RuntimeError("the door\nis stuck")
            case 2:
                raise SystemExit(5)
            case 3:
                return {"reward": float("nan"), "cost": 1.0}
            case 4:
                return {"cost": 1.0}
            case 5:
                report(1, float("inf"))
            case 6:
                raise EOFError("a file of the trial ended")
        return super().run(trial, report)


class Mortal(Quadratic):
    """The process of trial `victim` ends as often as `deaths` says, counted in `folder`."""

    def run(self, trial: Trial, report: Callable[[int, float], bool]) -> Mapping[str, float]:
        if trial.trial_no == self._config["victim"]:
            marks = Path(self._config["folder"], "deaths")
            marks.mkdir(exist_ok=True)
            count = len(list(marks.iterdir()))
            if count < self._config["deaths"]:
                (marks / str(count)).touch()
                os._exit(7)
        return super().run(trial, report)


class Endless(Quadratic):
    """Every third trial never ends."""

    def run(self, trial: Trial, report: Callable[[int, float], bool]) -> Mapping[str, float]:
        while trial.trial_no % 3 == 1:
            time.sleep(60)
        return super().run(trial, report)


class Impossible:
    metrics = ("reward",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        raise ConfigError("the game is missing; install it")


class Model:
    """As the classes of the original: what its files name."""

    def __init__(self, sc: Any, cfg: Mapping[str, Any]) -> None:
        self._values = cfg["hp_params"]

    def train(self, data: Any) -> None:
        if self._values["x"] > 0.9:
            raise RuntimeError("x is too large")

    def evaluate(self, data: Any) -> tuple[list[float], float]:
        return [], 1 - (self._values["x"] - self._values["best"]) ** 2


class Napping(Model):
    """Its training takes a while; x above 0.9 fails."""

    def train(self, data: Any) -> None:
        time.sleep(0.4)
        super().train(data)


class Slow(Model):
    """Its second trial never ends."""

    n_trained = 0

    def train(self, data: Any) -> None:
        Slow.n_trained += 1
        while Slow.n_trained > 1:
            time.sleep(60)


class Lanes:
    """Quadratic trials in lanes; those of one width share a program."""

    metrics = ("reward", "cost")

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.lanes: int = config["lanes"]
        self._n_reports: int = config["reports"]
        self._trials: dict[int, Trial] = {}
        self._reports: dict[int, list[tuple[int, float]]] = {}
        self._answered: set[int] = set()
        self._stopped: set[int] = set()

    def bucket(self, trial: Trial) -> str:
        if trial.values["width"] == 64 and trial.trial_no == 5:
            raise ValueError("no program has this width")
        return str(trial.values["width"])

    def start(self, trial: Trial) -> None:
        assert len(self._trials) < self.lanes
        assert {self.bucket(other) for other in self._trials.values()} <= {self.bucket(trial)}
        self._trials[trial.trial_no] = trial
        self._reports[trial.trial_no] = []
        self._answered.add(trial.trial_no)

    def step(self) -> Sequence[Report | TrialResult]:
        events: list[Report | TrialResult] = []
        for trial_no, trial in list(self._trials.items()):
            if trial_no not in self._answered:
                continue
            target = 1 - (trial.values["x"] - 0.3) ** 2
            reports = self._reports[trial_no]
            if len(reports) == self._n_reports or trial_no in self._stopped:
                del self._trials[trial_no]
                state = "stopped" if trial_no in self._stopped else "done"
                metrics = {"reward": target, "cost": float(trial.values["width"])}
                events.append(
                    TrialResult(trial_no=trial_no, state=state, metrics=metrics)  # type: ignore[arg-type]
                )
                continue
            value = float("nan") if trial_no == 3 else target - 1 / (len(reports) + 1)
            reports.append((len(reports) + 1, value))
            self._answered.discard(trial_no)
            events.append(Report(trial_no, *reports[-1]))
        return events

    def answer(self, trial_no: int, *, must_stop: bool) -> None:
        self._answered.add(trial_no)
        if must_stop:
            self._stopped.add(trial_no)


class DeadlyBucket(Lanes):
    """Its process ends when the first trial's bucket is computed."""

    def bucket(self, trial: Trial) -> str:
        if trial.trial_no == 0:
            os._exit(7)
        return "one"


def study(folder: Path, kind: type = Quadratic, **changes: Any) -> StudyConfig:
    """A study of one of these classes; `config` is added to what the class is created with."""
    config = {"folder": str(folder), **changes.pop("config", {})}
    spec = TrainableSpec(path=f"tests.tuning.cheap:{kind.__name__}", config=config)
    changes.setdefault("max_trials", 12)
    search = changes.pop("search", SearchConfig())
    changes["search"] = replace(search, test_seeds=changes.pop("test_seeds", 0))
    return StudyConfig(name="cheap", space=space(), trainable=spec, **changes)
