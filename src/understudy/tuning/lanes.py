"""Lanes of a study (level 0): several trials at once in one compiled program.

    start(trial) ─► a lane ─► step: rounds of all lanes ─► reports, results ─► a free lane

A trial's result depends on its values, its seed and the number of lanes only, neither on the other
lanes' trials nor on its own lane.
"""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from understudy.algorithm import Schedule
from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import ConfigError, UnderstudyError
from understudy.learn.compile_cache import use_compile_cache
from understudy.learn.lanes import LanePlan, LaneProgram, Rounds, why_not
from understudy.learn.learner import LearnerConfig
from understudy.nn.policy import Policy
from understudy.training.env_info import EnvInfo, GameChoice, inspect_env
from understudy.training.evaluation import AT_THE_END, WHILE_TRAINING, Evaluator, make_evaluator
from understudy.training.settings import RunSettings
from understudy.training.train_request import TrainRequest, resolve
from understudy.tuning.trainables import LANE_METRICS, rliable_settings
from understudy.tuning.trial import Report, Trial, TrialResult, TrialState, Values

DEFAULT_LANES = 8
_MAX_SKIPS = LearnerConfig().max_skips
_MAX_PROGRAMS = 16
"""Compiled at one time; a bucket that returns later is read from the compilation cache."""
_STEPS_PER_CALL = 256
"""Env steps of each lane in one compiled call; at least one round."""


class Lanes:
    """Trains and evaluates trials of our algorithms in lanes: a LaneTrainable."""

    metrics = LANE_METRICS

    def __init__(self, config: Mapping[str, Any], *, clock: Clock | None = None) -> None:
        """`config`: game, algorithm, preset, settings, and how many lanes there are."""
        use_compile_cache()
        self.lanes = int(config.get("lanes") or DEFAULT_LANES)
        self._config = config
        self._clock = clock or SystemClock()
        self._choice = GameChoice(game=config["game"])
        self._env_info = inspect_env(self._choice)
        self._opened = contextlib.ExitStack()
        self._evaluator: Evaluator | None = None
        self._programs: dict[str, LaneProgram] = {}
        self._program: LaneProgram | None = None
        self._training: dict[int, _Training] = {}
        self._ended: list[TrialResult] = []

    def bucket(self, trial: Trial) -> str:
        """What the trial's program is compiled for: its algorithm and plan, as text."""
        try:
            return self._bucket(self._settings(trial))
        except UnderstudyError:
            return ""  # a trial that fails when it is started

    def start(self, trial: Trial) -> None:
        """Put a trial into a free lane; one with invalid values fails."""
        started_s = self._clock.monotonic()
        try:
            settings = self._settings(trial)
            bucket = self._bucket(settings)
            if not self._training:
                self._choose_program(bucket, settings)
            program = self._program
            assert program is not None
            assert program is self._programs[bucket], "trials in the lanes are of one bucket"
            lane = min(set(range(self.lanes)) - self._training.keys())
            discount = settings.algorithm_type(self._env_info.spec, settings.config).needs.discount
            program.start(lane, seed=trial.seed, discount=discount)
            self._training[lane] = _Training(trial, settings, started_s)
        except UnderstudyError as error:
            self._ended.append(
                TrialResult(trial_no=trial.trial_no, state="failed", error=_one_line(error))
            )

    def step(self) -> Sequence[Report | TrialResult]:
        """Train the lanes that do not wait for an answer; return what there is to tell."""
        events: list[Report | TrialResult] = [*self._ended]
        self._ended = []
        active = {lane: own for lane, own in self._training.items() if not own.is_waiting}
        if not active:
            return events
        program = self._program
        assert program is not None
        n_rounds = min(own.rounds_to_mark for own in active.values())
        n_rounds = min(n_rounds, program.plan.max_rounds)
        program.run(_rounds(active, n_rounds, self.lanes), np.isin(range(self.lanes), [*active]))
        skips = program.skips
        for lane, own in active.items():
            own.rounds += n_rounds
            if skips[lane] >= _MAX_SKIPS:
                error = f"its last {skips[lane]} updates were not finite; lower its learning rate"
                events.append(self._result(lane, "failed", error=error))
            elif own.rounds == own.n_rounds:
                events.append(self._finish(lane))
            elif own.rounds % own.rounds_per_report == 0:
                events.append(self._report(lane))
        return events

    def answer(self, trial_no: int, *, must_stop: bool) -> None:
        """Continue a trial that reported, or end it with the metrics of its last report."""
        lane, own = next(
            (lane, own) for lane, own in self._training.items() if own.trial.trial_no == trial_no
        )
        own.is_waiting = False
        if must_stop:
            self._ended.append(self._result(lane, "stopped", metrics=own.last_metrics))

    def close(self) -> None:
        self._opened.close()

    def _settings(self, trial: Trial) -> RunSettings:
        return _settings(self._config, trial.values, self._env_info)

    def _bucket(self, settings: RunSettings) -> str:
        if reason := _why_not(settings, self._env_info):
            raise ConfigError(f"this trial cannot train in lanes: {reason}; set lanes=0")
        return repr((settings.algorithm, _shared_config(settings), _plan(settings, self.lanes)))

    def _choose_program(self, bucket: str, settings: RunSettings) -> None:
        """Use a bucket's program; the others keep what is compiled, but no memory for lanes."""
        program = self._programs.pop(bucket, None) or self._new_program(settings)
        if self._program is not None and self._program is not program:
            self._program.free()
        self._program = program
        self._programs[bucket] = program  # the last used is the last
        while len(self._programs) > _MAX_PROGRAMS:
            del self._programs[next(iter(self._programs))]

    def _new_program(self, settings: RunSettings) -> LaneProgram:
        algorithm = settings.algorithm_type(self._env_info.spec, _shared_config(settings))
        return LaneProgram(algorithm, _plan(settings, self.lanes))

    # --- Ends and reports -------------------------------------------------------------------------

    def _report(self, lane: int) -> Report | TrialResult:
        """An evaluation, as `understudy.train` makes them; the best policy of them is kept."""
        own = self._training[lane]
        returns = self._evaluate(lane, own)
        value = float(returns.mean())
        if not np.isfinite(value):
            return self._result(lane, "failed", error="returns of an evaluation are not finite")
        own.reports.append((own.env_steps, value))
        own.last_metrics = own.metrics(returns)
        own.is_waiting = True
        return Report(own.trial.trial_no, own.env_steps, value)

    def _finish(self, lane: int) -> TrialResult:
        """The final test of the best policy, on episodes that no evaluation has played."""
        own = self._training[lane]
        if own.best is not None:
            own.reports.append((own.env_steps, float(self._evaluate(lane, own).mean())))
        assert self._program is not None
        policy = own.best or self._program.policy(lane)
        episodes = own.settings.run.test_episodes
        returns = self._played(policy, own, episodes=episodes, series=AT_THE_END)
        if not np.isfinite(returns).all():
            return self._result(lane, "failed", error="returns of the final test are not finite")
        return self._result(lane, "done", metrics=own.metrics(returns))

    def _evaluate(self, lane: int, own: "_Training") -> NDArray[np.float64]:
        assert self._program is not None
        policy = self._program.policy(lane)
        episodes = own.settings.run.eval_episodes
        returns = self._played(policy, own, episodes=episodes, series=WHILE_TRAINING)
        if returns.mean() > own.best_value:
            own.best_value = float(returns.mean())
            own.best = policy
        return returns

    def _played(
        self, policy: Policy, own: "_Training", *, episodes: int, series: int
    ) -> NDArray[np.float64]:
        run = own.settings.run
        if self._evaluator is None:
            self._evaluator = make_evaluator(
                self._choice,
                self._env_info,
                episodes=episodes,
                max_steps=run.eval_max_steps,
                opened=self._opened,
            )
        played = self._evaluator.play(policy, episodes=episodes, series=series)
        assert played is not None
        return played.returns

    def _result(
        self,
        lane: int,
        state: TrialState,
        *,
        metrics: Mapping[str, float] | None = None,
        error: str = "",
    ) -> TrialResult:
        own = self._training.pop(lane)
        return TrialResult(
            trial_no=own.trial.trial_no,
            state=state,
            metrics=metrics or {},
            reports=own.reports,
            seconds=self._clock.monotonic() - own.started_s,
            error=error,
        )


@dataclass(slots=True)
class _Training:
    """A trial in a lane."""

    trial: Trial
    settings: RunSettings
    started_s: float
    rounds: int = 0
    is_waiting: bool = False
    reports: list[tuple[int, float]] = field(default_factory=list)
    last_metrics: Mapping[str, float] = field(default_factory=dict)
    best: Policy | None = None
    best_value: float = -np.inf

    @property
    def steps_per_round(self) -> int:
        return self.settings.run.envs * self.settings.run.collect

    @property
    def n_rounds(self) -> int:
        """Rounds of the whole trial."""
        return -(-self.settings.run.steps // self.steps_per_round)

    @property
    def rounds_per_report(self) -> int:
        return -(-self.settings.run.eval_every // self.steps_per_round)

    @property
    def rounds_to_mark(self) -> int:
        """Rounds to the next report or the end."""
        to_report = self.rounds_per_report - self.rounds % self.rounds_per_report
        return min(to_report, self.n_rounds - self.rounds)

    @property
    def env_steps(self) -> int:
        return self.rounds * self.steps_per_round

    def updates(self, rounds: Any) -> Any:
        """How many updates are due after so many rounds, as the limiter counts them."""
        learner = self.settings.learner
        beyond = np.maximum(0, rounds * self.steps_per_round - learner.min_inserts)
        due = beyond * learner.samples_per_insert / self.settings.config.batch + 1e-9
        return learner.updates_per_call * np.floor(due / learner.updates_per_call).astype(np.int32)

    def knob(self, name: str, rounds: Any) -> Any:
        """float32[rounds]: the value of a knob after these numbers of rounds."""
        knob = getattr(self.settings.knobs, name)
        if not isinstance(knob, Schedule):
            return np.full(len(rounds), knob, np.float32)
        run = self.settings.run
        progress = np.minimum(1.0, rounds * self.steps_per_round / (run.horizon or run.steps))
        share = np.minimum(1.0, progress / knob.until)
        return (knob.start + (knob.end - knob.start) * share).astype(np.float32)

    def metrics(self, returns: NDArray[np.float64]) -> dict[str, float]:
        return {
            "reward": float(returns.mean()),
            "return_std": float(returns.std()),
            "env_steps": float(self.env_steps),
            "updates": float(self.updates(self.rounds)),
        }


def _rounds(active: Mapping[int, _Training], n_rounds: int, lanes: int) -> Rounds:
    """What the lanes do in their next rounds; zeros in lanes that are not active."""
    names = [entry.name for entry in dataclasses.fields(next(iter(active.values())).settings.knobs)]
    explore = np.zeros((n_rounds, lanes), np.float32)
    updates = np.zeros((n_rounds, lanes), np.int32)
    knobs = {name: np.zeros((n_rounds, lanes), np.float32) for name in names}
    for lane, own in active.items():
        before = own.rounds + np.arange(n_rounds)
        updates[:, lane] = own.updates(before + 1) - own.updates(before)
        if "epsilon" in names:
            explore[:, lane] = own.knob("epsilon", before)
        for name in names:
            knobs[name][:, lane] = own.knob(name, before + 1)
    return Rounds(explore, updates, knobs)


def _settings(config: Mapping[str, Any], values: Values, env_info: EnvInfo) -> RunSettings:
    settings = {**config["settings"], **values}
    request = TrainRequest(
        algorithm=config["algorithm"],
        preset=config["preset"],
        settings=rliable_settings(settings) if config.get("is_rliable") else settings,
    )
    return resolve(request, env_info.spec)


def _plan(settings: RunSettings, lanes: int) -> LanePlan:
    run = settings.run
    return LanePlan(
        lanes=lanes,
        envs=run.envs,
        collect=run.collect,
        capacity=settings.learner.capacity,
        max_rounds=max(1, _STEPS_PER_CALL // (run.envs * run.collect)),
    )


def _shared_config(settings: RunSettings) -> Any:
    """The config without the settings that each lane's data has its own of."""
    names = getattr(settings.algorithm_type, "of_source", ())
    usual = settings.algorithm_type.Config()
    return dataclasses.replace(settings.config, **{name: getattr(usual, name) for name in names})


def _why_not(settings: RunSettings, env_info: EnvInfo) -> str:
    if settings.run.asynchronous or settings.run.ladder:
        return "lanes play in lock-step, with one epsilon: set asynchronous=false and ladder=false"
    return why_not(settings.algorithm_type(env_info.spec, settings.config))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
