"""One game's way from people's steps to its champion: what the schedule says, done piece by
piece."""

import hashlib
import math
import shutil
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
from understudy.models.gate import Bounds, GateDecision
from understudy.models.manifest import Lineage, model_name
from understudy.models.registry import Registry
from understudy.release.gatekeeper import Gatekeeper, fitting_champion, held_out
from understudy.release.model_check import Budget
from understudy.release.schedule import (
    LearnerStatus,
    LearningSchedule,
    Next,
    algorithm_for,
    next_action,
    written,
)
from understudy.release.store_stats import Played, StoreStats
from understudy.training.events import Event, Guarded, Update
from understudy.training.follower import StoreFollower
from understudy.training.from_store import FromStore
from understudy.training.settings import RunSettings, TrainRequest, resolve
from understudy.training.training_job import Checkpoints, TrainingJob

_log = structlog.get_logger("understudy.learner")
_AGAIN_S = 30.0
"""How long a game that failed is left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerServiceConfig:
    """How a learner serves all games of a deployment."""

    learn_from: tuple[str, ...] = ("granted",)
    """Whose steps may teach, by consent; under a development key `unknown` as well."""
    schedule: LearningSchedule = field(default_factory=LearningSchedule)
    bounds: Bounds = field(default_factory=Bounds)
    budget: Budget = field(default_factory=Budget)
    seed: int = 0
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings of bc and dqn by their bare names, over what the preset says."""
    envs: Mapping[str, str] = field(default_factory=dict)
    """Gymnasium ids by game: candidates of these are judged on held-out seeds instead of by live
    play."""
    checkpoint_every_s: float = 10.0

    def __post_init__(self) -> None:
        if not self.learn_from or not set(self.learn_from) <= set(CONSENTS) - {"denied"}:
            raise ConfigError(
                f"learn_from is {self.learn_from}; give 'granted', or 'granted' and 'unknown'"
            )
        if unknown := self.settings.keys() - {"bc", "dqn"}:
            raise ConfigError(
                f"settings are given for {sorted(unknown)}; the schedule knows bc and dqn"
            )
        if not 0 < self.checkpoint_every_s < 1e6:
            raise ConfigError(
                f"checkpoint_every_s is {self.checkpoint_every_s}; give seconds, such as 10"
            )


@dataclass(frozen=True, slots=True)
class ServiceContext:
    """What every game's learner works with."""

    data: DataFolder
    registry: Registry
    keeper: Gatekeeper
    follower: StoreFollower
    store_stats: StoreStats
    config: LearnerServiceConfig
    clock: Clock


# --- learning one game with one algorithm ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Marks:
    """What a course remembers of its releases, besides what it learned."""

    model_no: int = 0
    """Its newest release, from which it went on."""
    updates: int = 0
    steps: int = 0


class GameTraining:
    """One algorithm that learns one game from the store for as long as there is something to
    learn."""

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
        self._settings = settings
        self._context = context
        self._on_guarded = on_guarded
        self._metrics: Mapping[str, float] = {}
        # Another schema, setting or seed is another course, in another folder.
        config = context.config
        identity = f"{spec.schema} {settings.to_toml()} {config.learn_from} {config.seed}"
        name = f"{settings.algorithm}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
        self._folder = context.data.root / "learner" / spec.game / name
        checkpoint = None
        try:
            checkpoint = Checkpoints(self._folder).latest()
        except Corrupt as error:
            self._remove(error)
        self._begin()
        try:
            if checkpoint is not None:
                self._job.restore(checkpoint)
                self.marks = Marks(**checkpoint.facts["marks"])
        except (ConfigError, KeyError, TypeError) as error:  # it is of another build
            self.engine.close()
            self._remove(error)
            self._begin()
        except BaseException:  # also where the store is damaged: the checkpoint is good, and stays
            self.engine.close()
            raise
        self.saved_s = context.clock.monotonic()

    def _remove(self, error: Exception) -> None:
        """Remove checkpoints that cannot be used. Nothing but time is lost: the store has every
        step."""
        shutil.rmtree(self._folder)
        self._on_guarded(Guarded(env_steps=0, what=f"{error}; the course begins again"))

    def _begin(self) -> None:
        settings = self._settings
        context = self._context
        algorithm = settings.algorithm_type(self.spec, settings.config)
        config = replace(settings.learner_config(), limiter=None)
        self.engine = FromStore(
            Learner(algorithm, settings.knobs, root_seed=context.config.seed, config=config),
            context.follower,
            steps=settings.run.steps,
            clock=context.clock,
            on_event=self._hear,
            learn_from=context.config.learn_from,
            only_people=bool(algorithm.needs.is_cloning),
        )
        self._job = TrainingJob(self.engine, self._folder, on_event=self._hear)

    @property
    def updates(self) -> int:
        return self.engine.steps

    @property
    def steps(self) -> int:
        """Steps ever taken in."""
        return self.engine.learner.counts.inserted_steps

    def lineage(self) -> Lineage:
        """Where the policy of this moment comes from."""
        config = self._context.config
        metrics = {name: value for name, value in self._metrics.items() if math.isfinite(value)}
        return Lineage(
            algorithm=self.algorithm,
            seed=config.seed,
            parent=self.marks.model_no,
            code_version=understudy.__version__,
            cursor_to=self.engine.place.cursor or "",
            steps=self.steps,
            config={"settings": self._settings.to_toml(), "learn_from": list(config.learn_from)},
            metrics=metrics | {"updates": float(self.updates)},
        )

    def step(self) -> None:
        """One call of updates."""
        if self._job.saved_steps < 0:
            self._save()  # something to go back to
        self._job.step()

    def released(self, model_no: int, *, steps: int) -> None:
        """The policy of this moment is a model now: write that down."""
        self.marks = Marks(model_no, self.updates, steps)
        self._job.restores = 0
        self._save()

    def save_if_moved(self) -> None:
        """Make durable what was learned since the last time, if anything was."""
        if self.updates != self._job.saved_steps and self.updates:
            self._save()

    def _save(self) -> None:
        self._job.save(facts={"marks": asdict(self.marks)})
        self.saved_s = self._context.clock.monotonic()

    def _hear(self, event: Event) -> None:
        if isinstance(event, Update):
            self._metrics = dict(event.metrics)
        elif isinstance(event, Guarded):
            self._on_guarded(event)


# --- the game -------------------------------------------------------------------------------------


class GameLearner:
    """Follows the schedule for one game; raises Fenced once another learner has taken over."""

    def __init__(self, game: str, context: ServiceContext, *, owner: str) -> None:
        self.game = game
        self._context = context
        self.epoch = context.registry.takeover(game, owner=owner)
        self._training: GameTraining | None = None
        self._spec: GameSpec | None = None
        self._next = Next("wait", "nothing is recorded yet")
        self._decision: tuple[str, GateDecision] | None = None
        self._guarded: list[str] = []
        self._n_guarded = 0
        self._error = ""
        self._again_s = 0.0

    def step(self) -> bool:
        """One piece of work, if there is one; what goes wrong with this game alone is told, and
        tried again later."""
        if self._context.clock.monotonic() < self._again_s:
            return False
        try:
            did = self._step()
        except Fenced:
            raise
        except UnderstudyError as error:
            self._error, self._again_s = str(error), self._context.clock.monotonic() + _AGAIN_S
            _log.error(
                "learning_failed", game=self.game, error=str(error)[:300], again_in_s=_AGAIN_S
            )
            self._leave()
            return False
        self._error = ""
        return did

    def _step(self) -> bool:
        context = self._context
        now = context.registry.catalogue(self.game)
        if now.epoch != self.epoch:
            raise Fenced(
                f"{now.owner} has taken over {self.game} (epoch {now.epoch}, ours was "
                f"{self.epoch}); this learner stops"
            )
        schema = context.store_stats.schema(self.game, min_steps=context.config.schedule.first_steps)
        if self._spec is None or self._spec.schema != schema:
            self._spec = next(
                (spec for spec in context.registry.specs(self.game) if spec.schema == schema), None
            )
        spec = self._spec
        if spec is None:
            return False
        champion = fitting_champion(now, spec.schema)
        training = self._attend(
            spec, algorithm_for(is_discrete=spec.discrete is not None, has_champion=champion > 0)
        )
        # takes in what is new in the store, and lets go of what was forgotten
        training.engine.follow()
        if self._judge():
            return True
        standing = LearnerStatus(
            algorithm=training.algorithm,
            has_champion=champion > 0,
            has_canary=now.points_to("canary") > 0,
            usable_steps=training.engine.n_usable,
            steps=training.steps,
            updates=training.updates,
            released_steps=training.marks.steps,
            released_updates=training.marks.updates,
        )
        self._next = next_action(standing, context.config.schedule)
        if self._next.action == "train":
            training.step()
            if context.clock.monotonic() - training.saved_s >= context.config.checkpoint_every_s:
                training.save_if_moved()
        elif self._next.action == "release":
            self._release(training)
        return self._next.action != "wait"

    def _attend(self, spec: GameSpec, algorithm: str) -> GameTraining:
        """The course of this algorithm, from its last checkpoint if it had begun."""
        training = self._training
        if training is not None and (training.spec.schema, training.algorithm) == (
            spec.schema,
            algorithm,
        ):
            return training
        self._leave()
        config = self._context.config
        given = dict(config.settings.get(algorithm, {}))
        if algorithm == "bc":
            given.setdefault("steps", config.schedule.bc_updates)
        settings = resolve(TrainRequest(algorithm=algorithm, settings=given), spec)
        self._training = GameTraining(spec, settings, self._context, on_guarded=self._hear)
        _log.info("game_training", game=self.game, algorithm=algorithm, updates=self._training.updates)
        return self._training

    # --- the gate ---------------------------------------------------------------------------------

    def _release(self, training: GameTraining) -> None:
        context = self._context
        config = self._context.config
        manifest = context.registry.release(training.engine.policy, training.lineage(), epoch=self.epoch)
        training.released(
            manifest.model_no,
            steps=training.engine.n_usable if training.algorithm == "bc" else training.steps,
        )
        with held_out(config.envs.get(self.game), training.spec, attempt=manifest.model_no) as play:
            found = context.keeper.admit(self.game, manifest.model_no, epoch=self.epoch, play=play)
        self._tell(manifest.model_no, found)

    def _judge(self) -> bool:
        """Whether the canary's time is over."""
        canary = self._context.registry.catalogue(self.game).points_to("canary")
        found = (
            self._context.keeper.judge(self.game, self._returns, epoch=self.epoch) if canary else None
        )
        if found is None or found.decision == "wait":
            return False
        self._tell(canary, found)
        return True

    def _returns(self, model: str, since_s: float) -> list[Played]:
        return self._context.store_stats.returns(model, since_s=since_s)

    def _tell(self, model_no: int, found: GateDecision) -> None:
        self._decision = (model_name(self.game, model_no), found)
        _log.info("decision", model=self._decision[0], decision=found.decision, why=found.why)

    def _hear(self, event: Guarded) -> None:
        self._n_guarded += len(event.chunks)
        self._guarded = [*self._guarded, *event.chunks][-20:]
        _log.warning("guarded", game=self.game, what=event.what, chunks=list(event.chunks)[:20])

    # --- telling and ending -----------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Where the game stands, as plain values."""
        context = self._context
        training = self._training
        spec = self._spec
        now = context.registry.catalogue(self.game)
        champion, canary = (now.points_to(alias) for alias in ("champion", "canary"))
        since_s = now.aliases["canary"].at_s if canary else 0.0
        unknown = 0
        if spec is not None and "unknown" not in context.config.learn_from:
            unknown = context.store_stats.schemas[self.game][spec.schema].steps["unknown"]
        advice = (
            f"{unknown} steps not learnt from: consent unknown; next: ask players and record with "
            "consent='granted', "
            'or set learn_from = ["granted", "unknown"] and start the learner again'
        )
        judged = self._decision
        return {
            "game": self.game,
            "phase": training.algorithm if training else "",
            "doing": self._next.action,
            "why": self._next.why,
            "error": self._error,
            "schedule": written(
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
            "decision": judged
            and {"model": judged[0], "decision": judged[1].decision, "why": judged[1].why},
            "guarded_chunks": self._n_guarded,
            "guarded": self._guarded,
            "consent_unknown_steps": unknown,
            "next": advice if unknown else "",
        }

    def save(self) -> None:
        """Keep what was learned so far."""
        if self._training is not None:
            self._training.save_if_moved()

    def close(self) -> None:
        if self._training is not None:
            self._training.engine.close()
            self._training = None

    def _leave(self) -> None:
        """Close the course; one that failed is not saved: its last checkpoint is good."""
        if not self._error:
            self.save()
        self.close()
