"""Learns one game: trains, releases and promotes its bots, one step of the schedule at a time.

The calls from the learner service down to an algorithm's update; each calls the next at most once,
except where noted:

    LearnerRole.run         repeats the next until it is stopped
    LearnerRole.step        calls the next for every game
    GameLearner.step        does one action of the schedule; catches this game's errors
    GameTraining.step       saves a first checkpoint
    TrainingJob.step        restores a checkpoint after too many non-finite updates
    FromStore.step          reads what is new in the store
    Learner.run             repeats the next until one compiled call was made; publishes the weights
    Learner.step            draws `updates_per_call` batches and makes one compiled call
    Algorithm.update        makes one update, for each of the batches
"""

import hashlib
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import structlog

import understudy
from understudy.backends.data import DataFolder
from understudy.core.clock import Clock
from understudy.core.errors import ConfigError, Corrupt, Fenced, UnderstudyError
from understudy.experience.chunk import CONSENTS
from understudy.experience.game import GameSpec
from understudy.learn.learner import Learner
from understudy.models.catalogue import Catalogue
from understudy.models.gate import Bounds, GateDecision, Played
from understudy.models.manifest import Lineage, model_name
from understudy.models.registry import Registry
from understudy.release.gatekeeper import Gatekeeper, champion_for_schema, held_out_play
from understudy.release.model_check import Budget
from understudy.release.schedule import (
    LearnerStatus,
    LearningSchedule,
    Next,
    algorithm_for,
    next_action,
    schedule_text,
)
from understudy.release.store_stats import StoreStats
from understudy.training.events import Event, Guarded, Update
from understudy.training.follower import StoreFollower
from understudy.training.from_store import FromStore
from understudy.training.settings import RunSettings, TrainRequest, resolve
from understudy.training.training_job import Checkpoints, TrainingJob

_log = structlog.get_logger("understudy.learner")
_RETRY_S = 30.0
"""Pause before a game is tried again after an error."""
_READ_CANARY_EVERY_S = 60.0
"""How often the file of a canary that is being compared is verified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerServiceConfig:
    """The settings of the learner service, for all games of a deployment."""

    learn_from: tuple[str, ...] = ("granted",)
    """Consents whose steps are learned from: `granted`, `unknown` or both, never `denied`."""
    schedule: LearningSchedule = field(default_factory=LearningSchedule)
    bounds: Bounds = field(default_factory=Bounds)
    budget: Budget = field(default_factory=Budget)
    seed: int = 0
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings by algorithm (bc, dqn) and by name; they override the preset."""
    envs: Mapping[str, str] = field(default_factory=dict)
    """Gymnasium id by game; candidates of these games play held-out seeds instead of live games."""
    checkpoint_every_s: float = 10.0

    def __post_init__(self) -> None:
        if not self.learn_from or not set(self.learn_from) <= set(CONSENTS) - {"denied"}:
            raise ConfigError(
                f"learn_from is {self.learn_from}; give 'granted', or 'granted' and 'unknown'"
            )
        if unknown := self.settings.keys() - {"bc", "dqn"}:
            raise ConfigError(
                f"settings are given for {sorted(unknown)}; give only those of bc and dqn"
            )
        if not 0 < self.checkpoint_every_s < 1e6:
            raise ConfigError(
                f"checkpoint_every_s is {self.checkpoint_every_s}; give seconds, such as 10"
            )


@dataclass(frozen=True, slots=True)
class ServiceContext:
    """What the learners of all games share."""

    data: DataFolder
    registry: Registry
    keeper: Gatekeeper
    follower: StoreFollower
    store_stats: StoreStats
    config: LearnerServiceConfig
    clock: Clock


# --- Training one game with one algorithm ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Marks:
    """The last release of a training, and the training's counts at that time."""

    model_no: int = 0
    """The last released model, the parent of the next one; 0: none yet."""
    updates: int = 0
    steps: int = 0


class GameTraining:
    """Trains one algorithm on one game from the store, from new weights or its last checkpoint."""

    def __init__(
        self,
        spec: GameSpec,
        settings: RunSettings,
        context: ServiceContext,
        *,
        on_guarded: Callable[[Guarded], object],
    ) -> None:
        self.spec = spec
        self.algorithm = settings.algorithm
        self.marks = Marks()
        self.settings = settings
        self._context = context
        self._on_guarded = on_guarded
        self._metrics: Mapping[str, float] = {}
        # Another schema, setting or seed is another training, in another folder.
        config = context.config
        identity = f"{spec.schema} {settings.to_toml()} {config.learn_from} {config.seed}"
        name = f"{settings.algorithm}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
        self._folder = context.data.root / "learner" / spec.game / name
        checkpoint = None
        try:
            checkpoint = Checkpoints(self._folder).latest()
        except Corrupt as error:
            self._set_aside(error)
        self._create_engine()
        try:
            if checkpoint is not None:
                self._job.restore(checkpoint)
                self.marks = Marks(**checkpoint.facts["marks"])
        except (ConfigError, KeyError, TypeError) as error:  # written by another version
            self.engine.close()
            self._set_aside(error)
            self._create_engine()
        except BaseException:  # includes a damaged store: the checkpoint is good and is kept
            self.engine.close()
            raise
        self.saved_s = context.clock.monotonic()

    def _set_aside(self, error: Exception) -> None:
        """Rename the folder of unusable checkpoints; only time is lost, the store has the steps."""
        aside = self._folder.with_name(f"{self._folder.name}.unusable-{secrets.token_hex(4)}")
        self._folder.rename(aside)
        what = f"{error}; the training restarts, the old checkpoints are in {aside}"
        self._on_guarded(Guarded(env_steps=0, what=what))

    def _create_engine(self) -> None:
        settings = self.settings
        context = self._context
        algorithm = settings.algorithm_type(self.spec, settings.config)
        config = replace(settings.learner_config(), limiter=None)
        self.engine = FromStore(
            Learner(algorithm, settings.knobs, root_seed=context.config.seed, config=config),
            context.follower,
            steps=settings.run.steps,
            horizon=settings.run.horizon,
            clock=context.clock,
            on_event=self._handle_event,
            learn_from=context.config.learn_from,
            only_people=bool(algorithm.needs.is_cloning),
        )
        self._job = TrainingJob(self.engine, self._folder, on_event=self._handle_event)

    @property
    def updates(self) -> int:
        return self.engine.steps

    @property
    def steps(self) -> int:
        """Steps inserted into the replay so far, including those that have left it."""
        return self.engine.learner.counts.inserted_steps

    def lineage(self) -> Lineage:
        """How the current policy was trained, for its manifest."""
        config = self._context.config
        metrics = {name: value for name, value in self._metrics.items() if math.isfinite(value)}
        return Lineage(
            algorithm=self.algorithm,
            seed=config.seed,
            parent=self.marks.model_no,
            code_version=understudy.__version__,
            cursor_to=self.engine.position.cursor or "",
            steps=self.steps,
            config={"settings": self.settings.to_toml(), "learn_from": list(config.learn_from)},
            metrics=metrics | {"updates": float(self.updates)},
        )

    def step(self) -> None:
        """Run one compiled call (`updates_per_call` updates)."""
        if self._job.saved_steps < 0:
            self._save()  # so that there is a checkpoint to restore
        self._job.step()

    def released(self, model_no: int, *, steps: int) -> None:
        """Record that the current policy was released."""
        self.marks = Marks(model_no, self.updates, steps)
        self._job.restores = 0
        self._save()

    def save_if_moved(self) -> None:
        """Save a checkpoint if there were updates since the last one."""
        if self.updates != self._job.saved_steps and self.updates:
            self._save()

    def _save(self) -> None:
        self._job.save(facts={"marks": asdict(self.marks)})
        self.saved_s = self._context.clock.monotonic()

    def _handle_event(self, event: Event) -> None:
        if isinstance(event, Update):
            self._metrics = dict(event.metrics)
        elif isinstance(event, Guarded):
            self._on_guarded(event)


# --- The game -------------------------------------------------------------------------------------


class GameLearner:
    """Runs the schedule for one game; raises Fenced once another learner has taken over.

    Each algorithm is a training of its own: dqn starts from new weights, not from those of the
    clone (bc) before it.
    """

    def __init__(self, game: str, context: ServiceContext, *, owner: str) -> None:
        self.game = game
        self._context = context
        self.epoch = context.registry.takeover(game, owner=owner)
        self._training: GameTraining | None = None
        self._spec: GameSpec | None = None
        self._next = Next("wait", "nothing has been recorded yet")
        self._decision: tuple[str, GateDecision] | None = None
        self._guarded: list[str] = []
        self._n_guarded = 0
        self._error = ""
        self._retry_at_s = 0.0
        self._read_canary_s = 0.0

    def step(self) -> bool:
        """Do the schedule's next action; False if there was none, or an error, which is logged."""
        if self._context.clock.monotonic() < self._retry_at_s:
            return False
        try:
            has_worked = self._step()
        except Fenced:
            raise
        except UnderstudyError as error:
            self._error = str(error)
            self._retry_at_s = self._context.clock.monotonic() + _RETRY_S
            _log.error(
                "learning_failed", game=self.game, error=str(error)[:300], retry_in_s=_RETRY_S
            )
            self._leave()
            return False
        self._error = ""
        return has_worked

    def _step(self) -> bool:
        context = self._context
        now = context.registry.catalogue(self.game)
        if now.epoch != self.epoch:
            raise Fenced(
                f"{now.owner} has taken over {self.game} (epoch {now.epoch}, this learner has "
                f"epoch {self.epoch}); this learner stops"
            )
        schema = context.store_stats.schema(
            self.game, min_steps=context.config.schedule.first_steps
        )
        if self._spec is None or self._spec.schema != schema:
            self._spec = next(
                (spec for spec in context.registry.specs(self.game) if spec.schema == schema), None
            )
        spec = self._spec
        if spec is None:
            return False
        champion = champion_for_schema(now, spec.schema)
        training = self._training_for(
            spec, algorithm_for(is_discrete=spec.discrete is not None, has_champion=champion > 0)
        )
        # Reads what is new in the store, and evicts what was erased from it.
        training.engine.follow()
        if self._judge_canary():
            return True
        status = LearnerStatus(
            algorithm=training.algorithm,
            has_champion=champion > 0,
            has_canary=now.model_of("canary") > 0,
            usable_steps=training.engine.n_usable,
            steps=training.steps,
            updates=training.updates,
            released_steps=training.marks.steps,
            released_updates=training.marks.updates,
        )
        self._next = next_action(status, context.config.schedule)
        if self._next.action == "train":
            training.step()
            if context.clock.monotonic() - training.saved_s >= context.config.checkpoint_every_s:
                training.save_if_moved()
        elif self._next.action == "release":
            self._release(training)
        return self._next.action != "wait"

    def _training_for(self, spec: GameSpec, algorithm: str) -> GameTraining:
        """The training of this algorithm, resumed from its last checkpoint if it has one."""
        training = self._training
        if training is not None and (training.spec.schema, training.algorithm) == (
            spec.schema,
            algorithm,
        ):
            return training
        self._leave()
        config = self._context.config
        overrides = dict(config.settings.get(algorithm, {}))
        if algorithm == "bc":
            overrides.setdefault("steps", config.schedule.bc_updates)
        if "steps" in overrides:
            # The service trains without an end: `steps` is only the length of the schedules.
            overrides.setdefault("horizon", overrides["steps"])
        settings = resolve(TrainRequest(algorithm=algorithm, settings=overrides), spec)
        training = GameTraining(spec, settings, self._context, on_guarded=self._record_guarded)
        self._training = training
        _log.info("game_training", game=self.game, algorithm=algorithm, updates=training.updates)
        return training

    # --- The gate ---------------------------------------------------------------------------------

    def _release(self, training: GameTraining) -> None:
        context = self._context
        config = self._context.config
        manifest = context.registry.release(
            training.engine.policy, training.lineage(), epoch=self.epoch
        )
        training.released(
            manifest.model_no,
            steps=training.engine.n_usable if training.algorithm == "bc" else training.steps,
        )
        with held_out_play(
            config.envs.get(self.game),
            training.spec,
            attempt=manifest.model_no,
            max_steps=training.settings.run.eval_max_steps,
        ) as play:
            decision = context.keeper.admit(
                self.game, manifest.model_no, epoch=self.epoch, play=play
            )
        self._record(manifest.model_no, decision)

    def _judge_canary(self) -> bool:
        """Compare the canary, if any, with the champion; return whether it was decided."""
        catalogue = self._context.registry.catalogue(self.game)
        canary = catalogue.model_of("canary")
        if not canary:
            return False
        now_s = self._context.clock.monotonic()
        reads_file = now_s >= self._read_canary_s
        if reads_file:
            self._read_canary_s = now_s + _READ_CANARY_EVERY_S
        decision = self._context.keeper.judge(
            self.game,
            self._returns,
            epoch=self.epoch,
            people=self._context.store_stats.people(catalogue.models[canary].schema),
            reads_file=reads_file,
        )
        if decision is None or decision.decision == "wait":
            return False
        self._record(canary, decision)
        return True

    def _returns(self, model: str, since_s: float) -> list[Played]:
        return self._context.store_stats.returns(model, since_s=since_s)

    def _record(self, model_no: int, decision: GateDecision) -> None:
        name = model_name(self.game, model_no)
        self._decision = (name, decision)
        _log.info("decision", model=name, decision=decision.decision, why=decision.why)

    def _record_guarded(self, event: Guarded) -> None:
        self._n_guarded += len(event.chunks)
        self._guarded = [*self._guarded, *event.chunks][-20:]
        _log.warning("guarded", game=self.game, what=event.what, chunks=list(event.chunks)[:20])

    # --- Status and shutdown ----------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The game's status, as plain values."""
        context = self._context
        training = self._training
        spec = self._spec
        try:
            now = context.registry.catalogue(self.game)
        except Corrupt:
            now = Catalogue(self.game)  # `step` has reported it as the error
        champion, canary = (now.model_of(alias) for alias in ("champion", "canary"))
        since_s = now.aliases["canary"].at_s if canary else 0.0
        unknown = 0
        if spec is not None and "unknown" not in context.config.learn_from:
            unknown = context.store_stats.schemas[self.game][spec.schema].steps["unknown"]
        advice = (
            f"{unknown} steps are not learned from: consent unknown; next: ask players and record "
            "with consent='granted', "
            'or set learn_from = ["granted", "unknown"] and restart the learner'
        )
        last = self._decision
        return {
            "game": self.game,
            "phase": training.algorithm if training else "",
            "doing": self._next.action,
            "why": self._next.why,
            "error": self._error,
            "schedule": schedule_text(
                context.config.schedule, is_discrete=spec is None or spec.discrete is not None
            ),
            "steps": training.steps if training else 0,
            "usable_steps": training.engine.n_usable if training else 0,
            "updates": training.updates if training else 0,
            "version": training.engine.learner.counts.version if training else 0,
            "models": len(now.models),
            "champion": champion,
            "canary": canary,
            "canary_episodes": len(self._returns(model_name(self.game, canary), since_s))
            if canary
            else 0,
            "decision": last
            and {"model": last[0], "decision": last[1].decision, "why": last[1].why},
            "guarded_chunks": self._n_guarded,
            "guarded": self._guarded,
            "consent_unknown_steps": unknown,
            "next": advice if unknown else "",
        }

    def save(self) -> None:
        """Save a checkpoint of the current training, if it has progressed since the last one."""
        if self._training is not None:
            self._training.save_if_moved()

    def close(self) -> None:
        if self._training is not None:
            self._training.engine.close()
            self._training = None

    def _leave(self) -> None:
        """Close the training; a failed one is not saved, since its last checkpoint is good."""
        if not self._error:
            self.save()
        self.close()
