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
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import structlog

import understudy
from understudy.backends.data import DataFolder
from understudy.core.clock import Clock
from understudy.core.errors import ConfigError, Corrupt, Fenced, LearningFailed, UnderstudyError
from understudy.experience.chunk import CONSENTS
from understudy.experience.game import GameSpec
from understudy.experience.skill import DEFAULT_NOISE
from understudy.learn.centre import find_centre, may_have_centre
from understudy.learn.learner import Learner
from understudy.models.calibration import calibrate, has_moved, is_due, measured
from understudy.models.catalogue import Alias, Catalogue
from understudy.models.gate import Bounds, GateDecision, ModelCheck, Played
from understudy.models.manifest import Lineage, model_name
from understudy.models.registry import Registry
from understudy.nn.policy import Policy
from understudy.release.candidate_ranking import MAX_STEPS, CandidateRanking, may_rank
from understudy.release.gatekeeper import Gatekeeper, held_out_play
from understudy.release.model_check import Budget
from understudy.release.people_check import check_with_people
from understudy.release.schedule import (
    ALGORITHMS,
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
_SMALL_WIDTHS = [64, 64]
"""For games with so many inputs that the preset's network would exceed the budget."""
_RETRY_S = 30.0
"""Pause before a game is tried again after an error."""
_MAX_FAILURES = 3
"""Failures in a row after which bc replaces an algorithm."""
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
    """Settings by algorithm (bc, iql, dqn) and by name; they override the preset."""
    envs: Mapping[str, str] = field(default_factory=dict)
    """Gymnasium id by game; candidates of these games play held-out seeds instead of live games."""
    checkpoint_every_s: float = 10.0

    def __post_init__(self) -> None:
        if not self.learn_from or not set(self.learn_from) <= set(CONSENTS) - {"denied"}:
            raise ConfigError(
                f"learn_from is {self.learn_from}; give 'granted', or 'granted' and 'unknown'"
            )
        if unknown := self.settings.keys() - set(ALGORITHMS):
            raise ConfigError(
                f"settings are given for {sorted(unknown)}; give only those of "
                f"{', '.join(ALGORITHMS)}"
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
    is_admitted: bool = True
    """Whether the gate has decided what becomes of it."""


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
        # Another schema, setting or seed is another training, in another folder; one of an earlier
        # version, which had no centre, is continued.
        config = context.config
        text = settings.to_toml().replace('centre = ""\n', "")
        identity = f"{spec.schema} {text} {config.learn_from} {config.seed}"
        name = f"{settings.algorithm}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
        self._folder = context.data.root / "learner" / spec.game / name
        self._before = self._folder.with_name(f"{name}.before")
        """The checkpoints of the last training, until there is one of the next."""
        self._end_restart()
        checkpoint = None
        try:
            checkpoint = Checkpoints(self._folder).latest()
        except Corrupt as error:
            self._set_aside(error)
        has_network = getattr(settings.config, "network", None) is not None
        self._finds_centre = getattr(settings.config, "centre", None) == "" and not has_network
        self._create_engine()
        try:
            if checkpoint is not None:
                if self._finds_centre and (centre := checkpoint.facts.get("centre")):
                    self._show_from(centre)
                self._job.restore(checkpoint)
                self.marks = Marks(**checkpoint.facts["marks"])
        except (ConfigError, KeyError, TypeError) as error:  # written by another version
            self.engine.close()
            self._set_aside(error)
            self.settings = settings
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

    def lineage(
        self, *, temperature: float | None = None, ranking: Sequence[Mapping[str, Any]] = ()
    ) -> Lineage:
        """How the current policy was trained, for its manifest.

        `temperature`: at which it is released, if not the schedule's. `ranking`: the estimates by
        which it was chosen.
        """
        config = self._context.config
        if temperature is None:
            temperature = 1.0 if self.algorithm == "dqn" else config.schedule.temperature
        metrics = {name: value for name, value in self._metrics.items() if math.isfinite(value)}
        return Lineage(
            algorithm=self.algorithm,
            seed=config.seed,
            parent=self.marks.model_no,
            code_version=understudy.__version__,
            cursor_to=self.engine.position.cursor or "",
            steps=self.steps,
            config={
                "settings": self.settings.to_toml(),
                "learn_from": list(config.learn_from),
                "temperature": temperature,
            }
            | ({"ranking": list(ranking)} if ranking else {}),
            metrics=metrics | {"updates": float(self.updates)},
        )

    def step(self, *, is_first: bool) -> None:
        """Run one compiled call of updates; bc and iql first restart after a release.

        `is_first`: some steps are held out, to compare the first bot of a schema with.
        """
        if self.marks.updates and self.algorithm != "dqn":
            self._restart()
        if not self.updates and self._finds_centre:
            self._find_centre()
        if is_first and not self.updates and not self.engine.has_held_out:
            self.engine.hold_out()
            self._save()
        if self._job.saved_steps < 0:
            self._save()  # so that there is a checkpoint to restore
        self._job.step()

    def _find_centre(self) -> None:
        """Show the game's grid from the player's cell, if the steps tell which one that is."""
        if not may_have_centre(self.spec) or not self.engine.learner.may_step:
            return
        centre = find_centre(self.spec, self.engine.learned_sample())
        if centre != self.settings.config.centre:
            self._show_from(centre)
            self.engine.follow()

    def _show_from(self, centre: str) -> None:
        """Replace the engine, which has not trained yet, by one whose network has this centre."""
        config = replace(self.settings.config, centre=centre)
        settings = replace(self.settings, config=config)
        if network_bytes(settings, self.spec) <= self._context.config.budget.max_bytes:
            self.engine.close()
            self.settings = settings
            self._create_engine()

    def check_with_people(self) -> ModelCheck | None:
        """How the current policy compares with the held-out steps; None if they are too few."""
        held_out = self.engine.held_out()
        if not held_out or not self.engine.learner.may_step:  # others may have been erased since
            return None
        return check_with_people(
            self.candidate, learned=self.engine.learned_sample(), held_out=held_out
        )

    def _restart(self) -> None:
        """Train from new weights, on the newest steps that the store holds now."""
        self.engine.close()
        self._folder.rename(self._before)
        self._create_engine()
        self.marks = replace(self.marks, updates=0)
        self._save()
        self._end_restart()
        self.engine.follow()

    def _end_restart(self) -> None:
        """Remove the checkpoints of the last training; keep them if the next one has none yet."""
        if not self._before.exists():
            return
        if any(self._folder.glob("*.safetensors")):
            shutil.rmtree(self._before)
        else:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._before.rename(self._folder)

    @property
    def candidate(self) -> Policy:
        """The current policy as it is released."""
        if self.algorithm == "dqn":
            return self.engine.policy
        return self.engine.policy.at_temperature(self._context.config.schedule.temperature)

    def released(self, model_no: int) -> None:
        """Record that the current policy was released, but not yet judged by the gate."""
        self.marks = Marks(model_no, self.updates, self.steps, is_admitted=False)
        self._job.restores = 0
        self._save()

    def ranked(self) -> None:
        """Record that the current policy was ranked, so that the next one starts anew."""
        self.marks = replace(self.marks, updates=self.updates, steps=self.steps)
        self._save()

    def admitted(self) -> None:
        """Record that the gate has decided about the last release."""
        self.marks = replace(self.marks, is_admitted=True)
        self._save()

    def save_if_moved(self) -> None:
        """Save a checkpoint if there were updates since the last one."""
        if self.updates != self._job.saved_steps and self.updates:
            self._save()

    def _save(self) -> None:
        centre = getattr(self.settings.config, "centre", "")
        self._job.save(facts={"marks": asdict(self.marks), "centre": centre})
        self.saved_s = self._context.clock.monotonic()

    def _handle_event(self, event: Event) -> None:
        if isinstance(event, Update):
            self._metrics = dict(event.metrics)
        elif isinstance(event, Guarded):
            self._on_guarded(event)


def network_bytes(settings: RunSettings, spec: GameSpec) -> int:
    """The size of the weights that these settings give a game's policy."""
    network = settings.algorithm_type(spec, settings.config).network
    return 4 * sum(map(math.prod, network.shapes().values()))


# --- The game -------------------------------------------------------------------------------------


class GameLearner:
    """Runs the schedule for one game; raises Fenced once another learner has taken over.

    Each algorithm is a training of its own: iql and dqn start from new weights, not from those of
    the clone (bc) before them.
    """

    def __init__(self, game: str, context: ServiceContext, *, owner: str) -> None:
        self.game = game
        self._context = context
        self.epoch = context.registry.takeover(game, owner=owner)
        self._training: GameTraining | None = None
        self._clone: GameTraining | None = None
        """A training of bc, whose candidates are ranked with those of the current training."""
        self._ranking: CandidateRanking | None = None
        self._spec: GameSpec | None = None
        self._next = Next("wait", "the learner has just started and reads what is recorded", None)
        self._decision: tuple[str, GateDecision] | None = None
        self._guarded: list[str] = []
        self._n_guarded = 0
        self._error = ""
        self._logged_error = ""
        """The last error since a release; the same one is logged once, however often it occurs."""
        self._n_failures = 0
        """Failures of the current algorithm since its last release."""
        self._algorithm = ""
        self._recorded_steps = 0
        self._given_up: tuple[str, int] | None = None
        """An algorithm whose training kept failing, and the steps with which it is tried again."""
        self._gave_up_why = ""
        self._retry_at_s = 0.0
        self._read_canary_s = 0.0
        self._calibrated: dict[str, int] = {}
        """Episodes at a skill at the last calibration, by model."""

    def step(self) -> bool:
        """Do the schedule's next action; False if there was none, or an error, which is logged."""
        if self._context.clock.monotonic() < self._retry_at_s:
            return False
        try:
            has_worked = self._step()
        except Fenced:
            raise
        except UnderstudyError as error:
            if str(error) != self._logged_error:
                _log.error(
                    "learning_failed", game=self.game, error=str(error)[:300], retry_in_s=_RETRY_S
                )
            self._error = self._logged_error = str(error)
            self._retry_at_s = self._context.clock.monotonic() + _RETRY_S
            self._leave()
            if isinstance(error, LearningFailed | ConfigError):
                self._count_failure(str(error))
            return False
        self._error = ""
        return has_worked

    def _count_failure(self, error: str) -> None:
        """After a few failures in a row, train clones until there are far more steps."""
        self._n_failures += 1
        if self._n_failures < _MAX_FAILURES or self._algorithm in ("", "bc"):
            return
        schedule = self._context.config.schedule
        due_steps = math.ceil(schedule.growth * self._recorded_steps)
        self._given_up = (self._algorithm, due_steps)
        self._gave_up_why = (
            f"{self._algorithm} failed {self._n_failures} times and is tried again from "
            f"{due_steps} steps on; until then, bc trains the candidates: {error}"
        )
        self._n_failures = 0
        self._error = ""
        self._retry_at_s = 0.0
        _log.error("algorithm_given_up", game=self.game, why=self._gave_up_why[:500])

    def _step(self) -> bool:
        context = self._context
        now = context.registry.catalogue(self.game)
        if now.epoch != self.epoch:
            raise Fenced(
                f"{now.owner} has taken over {self.game} (epoch {now.epoch}, this learner has "
                f"epoch {self.epoch}); this learner stops"
            )
        schema = context.store_stats.schema(
            self.game,
            min_steps=context.config.schedule.first_steps,
            learn_from=context.config.learn_from,
        )
        if self._spec is None or self._spec.schema != schema:
            self._spec = next(
                (spec for spec in context.registry.specs(self.game) if spec.schema == schema), None
            )
        spec = self._spec
        if spec is None:
            self._next = Next(
                "wait", "the spec of the steps that are recorded is not registered", None
            )
            return False
        champion = now.model_of("champion", spec.schema)
        recorded = context.store_stats.schemas[self.game][spec.schema].steps
        self._recorded_steps = sum(recorded[consent] for consent in context.config.learn_from)
        algorithm = algorithm_for(
            context.config.schedule,
            is_discrete=spec.discrete is not None,
            has_champion=champion > 0,
            steps=self._recorded_steps,
        )
        if self._given_up is not None and self._recorded_steps >= self._given_up[1]:
            self._given_up = None
            self._gave_up_why = ""
        if self._given_up is not None and self._given_up[0] == algorithm:
            algorithm = "bc"
        if algorithm != self._algorithm:
            self._algorithm = algorithm
            self._n_failures = 0
        training = self._training_for(spec, algorithm)
        # Reads what is new in the store, and evicts what was erased from it.
        training.engine.follow()
        if self._judge_canaries():
            return True
        for pointer in now.live("champion"):
            self._calibrate(now, pointer)
        if not training.marks.is_admitted:
            # A learner was stopped, or failed, after a release.
            self._admit(training)
            return True
        status = LearnerStatus(
            algorithm=training.algorithm,
            has_champion=champion > 0,
            has_canary=now.model_of("canary", spec.schema) > 0,
            canary_evidence=context.keeper.evidence(self.game, spec.schema),
            usable_steps=training.engine.n_usable,
            steps=training.steps,
            updates=training.updates,
            released_steps=training.marks.steps,
            released_updates=training.marks.updates,
        )
        self._next = next_action(status, context.config.schedule)
        if self._next.action == "train":
            training.step(is_first=not champion)
            if context.clock.monotonic() - training.saved_s >= context.config.checkpoint_every_s:
                training.save_if_moved()
        elif self._next.action == "release" and self._may_rank(training):
            self._rank(training)
        elif self._next.action == "release":
            self._release(training, training.candidate, training.lineage())
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
        training = self._create_training(spec, algorithm)
        self._training = training
        _log.info("game_training", game=self.game, algorithm=algorithm, updates=training.updates)
        return training

    def _create_training(self, spec: GameSpec, algorithm: str) -> GameTraining:
        config = self._context.config
        overrides = dict(config.settings.get(algorithm, {}))
        preset = None
        if algorithm != "dqn":
            preset = f"{algorithm}-people"
            overrides.setdefault("steps", getattr(config.schedule, f"{algorithm}_updates"))
        if "steps" in overrides:
            # The service trains without an end: `steps` is only the length of the schedules.
            overrides.setdefault("horizon", overrides["steps"])
        settings = resolve(
            TrainRequest(algorithm=algorithm, preset=preset, settings=overrides), spec
        )
        if network_bytes(settings, spec) > config.budget.max_bytes:
            overrides.setdefault("widths", _SMALL_WIDTHS)
            settings = resolve(
                TrainRequest(algorithm=algorithm, preset=preset, settings=overrides), spec
            )
        return GameTraining(spec, settings, self._context, on_guarded=self._record_guarded)

    # --- The ranking ------------------------------------------------------------------------------

    def _may_rank(self, training: GameTraining) -> bool:
        stack = getattr(training.settings.config, "stack", 1)
        return (
            training.algorithm == "iql"
            and self._context.config.schedule.ranking_updates > 0
            and may_rank(training.spec, stack=stack)
        )

    def _rank(self, training: GameTraining) -> None:
        """Train a clone, rank its candidates with those of iql, and release the best; by steps.

        After a restart, the ranking starts anew; the clone continues from its checkpoint.
        """
        context = self._context
        schedule = context.config.schedule
        clone = self._clone
        if clone is None:
            training.save_if_moved()
            clone = self._clone = self._create_training(training.spec, "bc")
            clone.engine.follow()
        if clone.engine.n_usable < schedule.first_steps:  # people's steps were erased
            self._end_ranking()
            self._release(training, training.candidate, training.lineage())
            return
        if clone.updates < schedule.bc_updates or clone.marks.updates:
            clone.step(is_first=False)
            if context.clock.monotonic() - clone.saved_s >= context.config.checkpoint_every_s:
                clone.save_if_moved()
            why = f"{clone.updates} of {schedule.bc_updates} updates of a clone, to rank with iql"
            self._next = Next("train", why)
            return
        if self._ranking is None:
            self._ranking = CandidateRanking(
                {"bc": clone.engine.policy, "iql": training.engine.policy},
                training.engine.learned_sample(MAX_STEPS),
                temperature=schedule.temperature,
                updates=schedule.ranking_updates,
                seed=context.config.seed,
            )
        if self._ranking.step():
            why = "candidates of bc and iql are ranked on recorded steps; the best is released"
            self._next = Next("train", why)
            return
        best = self._ranking.best()
        policy = training.candidate
        lineage = training.lineage(ranking=self._ranking.facts())
        if best is not None:
            policy = best.policy
            source = clone if best.algorithm == "bc" else training
            lineage = source.lineage(temperature=best.temperature, ranking=self._ranking.facts())
        clone.ranked()
        self._end_ranking()
        self._release(training, policy, lineage)

    def _end_ranking(self) -> None:
        self._ranking = None
        if self._clone is not None:
            self._clone.engine.close()
            self._clone = None

    # --- The gate ---------------------------------------------------------------------------------

    def _release(self, training: GameTraining, policy: Policy, lineage: Lineage) -> None:
        manifest = self._context.registry.release(policy, lineage, epoch=self.epoch)
        training.released(manifest.model_no)
        self._n_failures = 0
        self._logged_error = ""
        self._admit(training)

    def _admit(self, training: GameTraining) -> None:
        """Let the gate decide about the training's last release."""
        context = self._context
        model_no = training.marks.model_no
        with held_out_play(
            context.config.envs.get(self.game),
            training.spec,
            attempt=model_no,
            max_steps=training.settings.run.eval_max_steps,
        ) as play:
            now = context.registry.catalogue(self.game)
            is_first = not now.model_of("champion", training.spec.schema)
            decision = context.keeper.admit(
                self.game,
                model_no,
                epoch=self.epoch,
                play=play,
                people=training.check_with_people() if is_first else None,
            )
        training.admitted()
        self._record(model_no, decision)

    def _judge_canaries(self) -> bool:
        """Compare each schema's canary with its champion; return whether one was decided."""
        canaries = self._context.registry.catalogue(self.game).live("canary")
        if not canaries:
            return False
        now_s = self._context.clock.monotonic()
        reads_file = now_s >= self._read_canary_s
        if reads_file:
            self._read_canary_s = now_s + _READ_CANARY_EVERY_S
        has_decided = False
        for canary in canaries:
            settled_until_s = self._context.store_stats.settled_until_s(canary.schema)

            def returns(
                model: str, since_s: float, until_s: float = settled_until_s
            ) -> list[Played]:
                played = self._returns(model, since_s)
                return [episode for episode in played if episode.started_s < until_s]

            decision = self._context.keeper.judge(
                self.game,
                returns,
                epoch=self.epoch,
                schema=canary.schema,
                people=self._context.store_stats.people(canary.schema),
                reads_file=reads_file,
            )
            if decision is not None and decision.decision != "wait":
                self._record(canary.model_no, decision)
                has_decided = True
        return has_decided

    def _calibrate(self, now: Catalogue, champion: Alias) -> None:
        """Publish the noise of each skill, if enough was played at the last one."""
        model = model_name(self.game, champion.model_no)
        stats = self._context.store_stats
        n_episodes, skilled = stats.skilled(model)
        last = now.noise.get(champion.schema)
        n_before = self._calibrated.get(model, 0)
        if last is not None and last.model_no == champion.model_no:
            n_before = max(n_before, last.episodes)
        if not is_due(n_episodes, n_before):
            return
        self._calibrated[model] = n_episodes
        before = DEFAULT_NOISE if last is None else last.noise
        released = self._returns(model, 0.0)[-len(skilled) :]
        noise = calibrate(before, stats.newest_people(champion.schema), released, skilled)
        if has_moved(noise, before):
            self._context.registry.set_noise(
                self.game, champion.model_no, noise, episodes=n_episodes, epoch=self.epoch
            )
            _log.info("skills_calibrated", model=model, episodes=n_episodes, noise=noise)

    def _skills(self, now: Catalogue, schema: str) -> dict[str, Any]:
        """The noise, target and returns of each skill of a schema's champion, for display."""
        stats = self._context.store_stats
        last = now.noise.get(schema)
        model = model_name(self.game, now.model_of("champion", schema))
        noise = DEFAULT_NOISE if last is None else last.noise
        return measured(noise, stats.newest_people(schema), stats.skilled(model)[1])

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
        on_trial = now.pointer("canary")
        canary = on_trial.model_no if on_trial else 0
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
            "missing_steps": self._next.missing_steps,
            "error": self._error,
            "gave_up": self._gave_up_why,
            "schedule": schedule_text(
                context.config.schedule, is_discrete=spec is None or spec.discrete is not None
            ),
            "steps": training.steps if training else 0,
            "usable_steps": training.engine.n_usable if training else 0,
            "updates": training.updates if training else 0,
            "version": training.engine.learner.counts.version if training else 0,
            "models": len(now.models),
            "champion": now.model_of("champion"),
            "canary": canary,
            "canary_evidence": context.keeper.evidence(self.game, spec.schema) if spec else 0.0,
            "canary_episodes": len(self._returns(model_name(self.game, canary), on_trial.at_s))
            if on_trial and canary
            else 0,
            **(context.store_stats.progress(self.game, spec.schema) if spec else {}),
            "skills": self._skills(now, spec.schema) if spec else {},
            "decision": last
            and {"model": last[0], "decision": last[1].decision, "why": last[1].why},
            "guarded_chunks": self._n_guarded,
            "guarded": self._guarded,
            "consent_unknown_steps": unknown,
            "next": advice if unknown else "",
        }

    def save(self) -> None:
        """Save a checkpoint of each training that has progressed since its last one."""
        for training in (self._training, self._clone):
            if training is not None:
                training.save_if_moved()

    def close(self) -> None:
        self._end_ranking()
        if self._training is not None:
            self._training.engine.close()
            self._training = None

    def _leave(self) -> None:
        """Close the training; a failed one is not saved, since its last checkpoint is good."""
        if not self._error:
            self.save()
        self.close()
