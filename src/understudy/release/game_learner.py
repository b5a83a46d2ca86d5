"""Learns one game: trains, releases and promotes its bots, one step of the schedule at a time.

The calls from the learner service down to an algorithm's update; each calls the next at most once,
except where noted:

    LearnerRole.run         repeats the next until it is stopped
    LearnerRole.step        calls the next for every game; one that gets its first bot goes first
    GameLearner.step        does one action of the schedule; catches this game's errors
    GameTraining.step       saves a first checkpoint, after `prepare`
    TrainingJob.step        restores a checkpoint after too many non-finite updates
    FromStore.step          reads what is new in the store, for about a second
    Learner.run             repeats the next until one compiled call was made; publishes the weights
    Learner.step            draws `updates_per_call` batches and makes one compiled call
    Algorithm.update        makes one update, for each of the batches
"""

import math
from dataclasses import replace
from typing import Any

import structlog

from understudy.core.errors import (
    ConfigError,
    Corrupt,
    Fenced,
    LearningFailed,
    Refused,
    UnderstudyError,
)
from understudy.core.plural import plural
from understudy.core.wording import shortened
from understudy.experience.game import GameSpec
from understudy.learn.symmetry import may_mirror
from understudy.models.catalogue import Alias, Catalogue
from understudy.models.gate import (
    GateDecision,
    ModelCheck,
    Played,
    compared_with_champion,
    of_trial,
)
from understudy.models.manifest import Lineage, model_name, number_of
from understudy.nn.policy import Policy
from understudy.release.candidate_ranking import MAX_STEPS, CandidateRanking, may_rank
from understudy.release.forgets import Forgets, is_replacement, learned_before, replacements
from understudy.release.game_training import (
    GameTraining,
    ServiceContext,
    network_bytes,
)
from understudy.release.gatekeeper import (
    Returns,
    follows_carried_over,
    held_out_play,
)
from understudy.release.schedule import (
    LearnerStatus,
    Next,
    algorithm_for,
    next_action,
    schedule_text,
)
from understudy.release.skills import Skills
from understudy.training.events import Guarded
from understudy.training.train_request import TrainRequest, resolve

_log = structlog.get_logger("understudy.learner")
_SMALL_WIDTHS = [64, 64]
"""For games with so many inputs that the preset's network would exceed the budget."""
_RETRY_S = 30.0
"""Pause before a game is tried again after an error."""
_MAX_FAILURES = 3
"""Failures in a row after which bc replaces an algorithm."""
_READ_CANARY_EVERY_S = 60.0
"""How often the file of a canary that is being compared is verified."""


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
        self._next = Next(
            "wait", "the learner has just found this game and reads what is recorded", None
        )
        self._decision: tuple[str, GateDecision] | None = None
        self._guarded: list[str] = []
        self._n_guarded = 0
        self._error = ""
        self._logged_error = ""
        """The last error since a release; the same one is logged once, however often it occurs."""
        self._n_failures = 0
        """Failures of the current algorithm since its last release."""
        self._algorithm = ""
        self.has_bot = False
        """Whether there is a champion for the schema recorded now, as of the last step."""
        self._recorded_steps = 0
        self._given_up: tuple[str, int] | None = None
        """An algorithm whose training kept failing, and the steps with which it is tried again."""
        self._gave_up_why = ""
        self._not_ranked = ""
        """Why the last candidate of iql was released without a ranking."""
        self._retry_at_s = 0.0
        self._read_canary_s = 0.0
        self._forgets = Forgets(game, context.store_stats)
        self._skills = Skills(game, context, epoch=self.epoch)

    def step(self, *, may_train: bool = True) -> bool:
        """Do the schedule's next action; False if there was none, or an error, which is logged.

        Without `may_train`, a training or ranking is paused as it is between any two of its calls.
        """
        if self._context.clock.monotonic() < self._retry_at_s:
            return False
        try:
            has_worked = self._step(may_train=may_train)
        except Fenced:
            raise
        except UnderstudyError as error:
            if str(error) != self._logged_error:
                _log.error(
                    "learning_failed",
                    game=self.game,
                    error=shortened(str(error), 500),
                    retry_in_s=_RETRY_S,
                )
            self._error = self._logged_error = str(error)
            self._next = Next(
                "wait", f"the last attempt failed; it is repeated every {_RETRY_S:.0f} s", None
            )
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
        _log.error("algorithm_given_up", game=self.game, why=shortened(self._gave_up_why, 500))

    def _step(self, *, may_train: bool) -> bool:
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
            # Only this one is read: an earlier one may be damaged.
            registered = context.registry.spec(self.game, schema) if schema else None
            is_intact = registered is not None and registered.schema == schema
            self._spec = registered if is_intact else None
        spec = self._spec
        if spec is None:
            self._next = Next(
                "wait", "the spec of the steps that are recorded is not registered", None
            )
            return False
        champion = now.model_of("champion", spec.schema)
        self.has_bot = champion > 0
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
        self._forgets.delete_checkpoints(
            context.data.root / "learner" / self.game,
            in_use=[
                folder
                for training in (self._training, self._clone)
                if training is not None
                for folder in training.folders
            ],
        )
        # Reads what is new in the store, and evicts what was erased from it.
        training.engine.follow()
        if self._judge_canaries():
            return True
        for pointer in now.live("champion"):
            self._skills.publish(now, pointer)
        if self._must_replace(now, training):
            why = self._forgotten(now, spec.schema) or "a forget after the training began"
            _log.info("replacement", game=self.game, why=why)
            training.renew()
        elif self._has_forgotten_start(now, training):
            _log.info("new_weights", game=self.game, why=f"a forget after {training.started_from}")
            training.renew()
        if not training.marks.is_admitted:
            # A learner was stopped, or failed, after a release.
            self._admit(training)
            return True
        status = LearnerStatus(
            algorithm=training.algorithm,
            has_champion=champion > 0,
            has_canary=now.model_of("canary", spec.schema) > 0,
            canary_evidence=context.keeper.evidence(self.game, spec.schema),
            may_judge_canary=self._canary_episodes(now, spec.schema)
            >= context.keeper.bounds.min_episodes,
            usable_steps=training.engine.n_usable,
            steps=training.steps,
            updates=training.updates,
            released_steps=training.marks.steps,
            released_updates=training.marks.updates,
        )
        self._next = next_action(status, context.config.schedule)
        is_ranked = self._next.action == "release" and self._may_rank(training)
        if not may_train and (self._next.action == "train" or is_ranked):
            why = f"paused while another game gets its first bot: {self._next.why}"
            self._next = replace(self._next, action="wait", why=why)
        if self._next.action == "train":
            is_prepared = training.prepare(is_first=not champion)
            if not is_prepared:
                self._next = replace(self._next, why=training.choosing)
            elif training.carries_over and not champion:
                self._carry_over(now, training)
            else:
                training.step()
            if context.clock.monotonic() - training.saved_s >= context.config.checkpoint_every_s:
                training.save_if_moved()
        elif is_ranked and self._next.action == "release":
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
        grid = str(overrides.get("centre", "none")).partition(" ")[0]
        if grid not in ("", "none", *spec.obs_columns):
            # Settings are those of all games, and this one has no such grid, or other actions.
            del overrides["centre"]
        if not may_mirror(spec, str(overrides.get("symmetry", ""))):
            del overrides["symmetry"]
        preset = None
        if algorithm != "dqn":
            preset = f"{algorithm}-people"
            overrides.setdefault("steps", getattr(config.schedule, f"{algorithm}_updates"))
        if "steps" in overrides:
            # The service trains without an end: `steps` is only the length of the schedules.
            overrides.setdefault("horizon", overrides["steps"])
        request = TrainRequest(algorithm=algorithm, preset=preset, settings=overrides)
        try:
            settings = resolve(request, spec)
            if network_bytes(settings, spec) > config.budget.max_bytes:
                widths = {"widths": _SMALL_WIDTHS}
                settings = resolve(replace(request, settings=widths | overrides), spec)
        except ConfigError as error:
            if not config.settings.get(algorithm):
                raise
            raise ConfigError(
                f"learner.settings of {algorithm} do not fit {self.game}: {error}"
            ) from None
        return GameTraining(
            spec,
            settings,
            self._context,
            on_guarded=self._record_guarded,
            start=self._champion_before(spec) if algorithm == "bc" else None,
        )

    def _champion_before(self, spec: GameSpec) -> tuple[str, Policy] | None:
        """The champion of an earlier schema, from which the first bot of this one starts."""
        registry = self._context.registry
        now = registry.catalogue(self.game)
        model_no = now.model_of("champion")
        if not model_no or now.model_of("champion", spec.schema):
            return None
        if learned_before(now, model_no, self._forgets.of(now, now.models[model_no].schema)):
            return None
        try:
            policy = registry.policy(self.game, model_no)
        except UnderstudyError as error:  # only time is lost
            _log.warning("no_warm_start", game=self.game, why=shortened(str(error), 500))
            return None
        temperature = registry.manifest(self.game, model_no).lineage.config.get("temperature", 1.0)
        return model_name(self.game, model_no), policy.at_temperature(1 / temperature)

    def _carry_over(self, now: Catalogue, training: GameTraining) -> None:
        """Release the last schema's champion for this one, where it plays in the same way."""
        model_no = number_of(training.started_from)
        old = now.models[model_no].lineage
        temperature = old.config.get("temperature", 1.0)
        config = {
            **old.config,
            "started_from": training.started_from,
            "carried_over": True,
            "read_no": training.marks.read_no,
            "temperature": temperature,
        }
        lineage = replace(old, parent=model_no, config=config)
        self._release(training, training.engine.policy.at_temperature(temperature), lineage)

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

        After a restart, the ranking starts anew; the clone continues from its checkpoint. If the
        clone cannot be trained, iql is released without a ranking.
        """
        context = self._context
        schedule = context.config.schedule
        try:
            clone = self._clone_beside(training)
            if clone.updates < schedule.bc_updates or clone.marks.updates:
                if clone.prepare(is_first=False):
                    clone.step()
                if context.clock.monotonic() - clone.saved_s >= context.config.checkpoint_every_s:
                    clone.save_if_moved()
                made = f"{clone.updates} of {schedule.bc_updates} updates"
                self._next = Next("train", f"{made} of a clone, to rank with iql")
                return
        except (LearningFailed, ConfigError) as error:
            why = shortened(str(error), 500)
            self._not_ranked = f"no clone was trained: {why}"
            _log.warning("not_ranked", game=self.game, why=self._not_ranked)
            self._end_ranking()
            self._release(training, training.candidate, training.lineage())
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
            lineage = replace(
                source.lineage(temperature=best.temperature, ranking=self._ranking.facts()),
                parent=training.marks.model_no,
            )
        clone.ranked()
        self._not_ranked = ""
        self._end_ranking()
        self._release(training, policy, lineage)

    def _clone_beside(self, training: GameTraining) -> GameTraining:
        """The training of the clone that is ranked; ConfigError if people have too few steps."""
        clone = self._clone
        if clone is None:
            training.save_if_moved()
            clone = self._clone = self._create_training(training.spec, "bc")
            clone.engine.follow()
            forgotten = self._context.store_stats.forgotten(self.game, training.spec.schema)
            has_read = clone.updates and clone.marks.read_no < max(forgotten, default=0)
            if clone.started_from or has_read:
                clone.renew()
        n_steps = clone.engine.n_usable
        first_steps = self._context.config.schedule.first_steps
        if n_steps < first_steps:
            # Some were erased.
            raise ConfigError(f"{n_steps} of {first_steps} steps of people with consent are left")
        return clone

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
                people=self._check_with_people(training) if is_first else None,
                returns=self._returns,
                margin=self._margin(now, model_no),
            )
        training.admitted()
        self._record(model_no, decision)

    def _check_with_people(self, training: GameTraining) -> ModelCheck | None:
        """How the training's last release compares with the held-out steps of people."""
        try:
            policy = self._context.registry.policy(self.game, training.marks.model_no)
        except (Corrupt, Refused, ConfigError):
            return None  # the gate rejects a model that is damaged or lost
        return training.check_with_people(policy)

    def _judge_canaries(self) -> bool:
        """Compare each schema's canary with its champion; return whether one was decided."""
        now = self._context.registry.catalogue(self.game)
        canaries = now.live("canary")
        if not canaries:
            return False
        now_s = self._context.clock.monotonic()
        reads_file = now_s >= self._read_canary_s
        if reads_file:
            self._read_canary_s = now_s + _READ_CANARY_EVERY_S
        has_decided = False
        for canary in canaries:
            decision = self._context.keeper.judge(
                self.game,
                self._settled_returns(canary.schema),
                epoch=self.epoch,
                schema=canary.schema,
                people=self._context.store_stats.people(canary.schema),
                reads_file=reads_file,
                margin=self._margin(now, canary.model_no),
            )
            if decision is not None and decision.decision != "wait":
                self._record(canary.model_no, decision)
                has_decided = True
        return has_decided

    # --- After a forget ---------------------------------------------------------------------------

    def _margin(self, now: Catalogue, model_no: int) -> float:
        """By how much a candidate may be worse than the champion: none, unless it replaces it."""
        forgotten = self._forgets.of(now, now.models[model_no].schema)
        if is_replacement(now, model_no, forgotten) or follows_carried_over(now, model_no):
            return self._context.keeper.bounds.forget_margin
        return 0.0

    def _has_forgotten_start(self, now: Catalogue, training: GameTraining) -> bool:
        """Whether the first weights, which no update has changed, are from a forgotten player."""
        if not training.started_from or training.updates or not training.marks.is_admitted:
            return False
        start = number_of(training.started_from)
        return start not in now.models or bool(
            learned_before(now, start, self._forgets.behind(now, start))
        )

    def _must_replace(self, now: Catalogue, training: GameTraining) -> bool:
        """Whether to train anew, since the champion, or dqn, learned from a forgotten player.

        A training that is under way, and the trial of an earlier replacement, end first: otherwise
        frequent events would let no training and no trial end.
        """
        schema = training.spec.schema
        forgotten = self._forgets.of(now, schema)
        champion = now.model_of("champion", schema)
        canary = now.model_of("canary", schema)
        newest = max(forgotten, default=0)
        if champion and training.algorithm != "dqn":
            newest = learned_before(now, champion, forgotten)
        return bool(
            newest
            and training.marks.read_no < newest
            and (training.marks.updates or (training.algorithm == "dqn" and training.updates))
            and training.marks.is_admitted
            and self._clone is None
            and not (canary and is_replacement(now, canary, forgotten))
        )

    def _forgotten(self, now: Catalogue, schema: str) -> str:
        """What a schema's champion still has of forgotten players, and what is done about it."""
        forgotten = self._forgets.of(now, schema)
        champion = now.model_of("champion", schema)
        if not champion or not (newest := learned_before(now, champion, forgotten)):
            return ""
        replacement = max(replacements(now, schema, forgotten), default=0)
        name = model_name(self.game, replacement)
        training = self._training
        is_waiting = (
            training is not None
            and training.spec.schema == schema
            and not training.marks.updates
            and self._next.action == "wait"
        )
        is_busy = (
            training is not None
            and training.spec.schema == schema
            and training.algorithm != "dqn"
            and training.updates > 0
            and not training.marks.updates
            and training.marks.read_no < newest
        )
        is_due = not replacement or learned_before(now, replacement, {newest: forgotten[newest]})
        if replacement and now.model_of("canary", schema) == replacement:
            outcome = f"its replacement {name} is on trial"
            if is_due:
                outcome += ", and the next one is trained once that is decided"
        elif is_due and (self._spec is None or self._spec.schema != schema):
            outcome = "it stays, since only the newest schema that is played is trained"
        elif is_due:
            outcome = "a replacement is trained"
            if is_waiting and (missing := self._next.missing_steps):
                outcome = f"a replacement waits for {missing} more {plural(missing, 'step')}"
            elif is_busy:
                outcome = "a replacement is trained after the training that is under way"
        else:
            outcome = f"its replacement {name} was not promoted, so it stays"
        return (
            f"{model_name(self.game, champion)} may contain what it learned from players who were "
            f"forgotten since; {outcome}"
        )

    def _canary_episodes(self, now: Catalogue, schema: str) -> int:
        """Episodes of a schema's canary that are compared with its champion; 0 without one."""
        canary = now.pointer("canary", schema)
        if canary is None or not canary.model_no:
            return 0
        settled = self._settled_returns(schema)(model_name(self.game, canary.model_no), canary.at_s)
        drawn = of_trial(settled, canary.first_no)
        return len(compared_with_champion(drawn, self._context.keeper.bounds))

    def _why_not_judged(self, canary: Alias | None) -> str:
        """Why a canary cannot be judged: no episode of its schema has ended; else empty."""
        schemas = self._context.store_stats.schemas.get(self.game, {})
        recorded = schemas.get(canary.schema) if canary is not None and canary.model_no else None
        if recorded is None or recorded.has_end:
            return ""
        return (
            "the canary cannot be judged: the gate compares the returns of whole episodes, and no "
            "episode has ended so far; next: end episodes in the game, in an endless one from time "
            "to time with ep.end(obs, truncated=True)"
        )

    def _not_compared(self, now: Catalogue, canary: Alias | None) -> dict[str, int]:
        """Episodes whose draw was not believed, by reason, or is of a trial before this one."""
        reasons = self._context.store_stats.not_compared(self.game)
        if canary is not None and canary.model_no:
            champion = model_name(self.game, now.model_of("champion", canary.schema))
            n_earlier = sum(
                0 < episode.entry < canary.first_no
                for episode in self._returns(champion, canary.at_s)
            )
            if n_earlier:
                reasons["earlier_trial"] = n_earlier
        return reasons

    def _settled_returns(self, schema: str) -> Returns:
        """Episodes of a model before which none started that is still played."""
        until_s = self._context.store_stats.settled_until_s(schema)

        def returns(model: str, since_s: float) -> list[Played]:
            played = self._returns(model, since_s)
            return [episode for episode in played if episode.started_s < until_s]

        return returns

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
        control = now.control_of(on_trial)
        unknown = 0
        if spec is not None and "unknown" not in context.config.learn_from:
            unknown = context.store_stats.schemas[self.game][spec.schema].steps["unknown"]
        advice = (
            f"{unknown} {plural(unknown, 'step is', 'steps are')} not learned from: consent "
            "unknown; next: ask players and record with consent='granted', "
            'or set learn_from = ["granted", "unknown"] and restart the learner'
        )
        last = self._decision
        schemas = context.store_stats.schemas.get(self.game, {})
        return {
            "game": self.game,
            "schema": spec.schema if spec else None,
            "schema_steps": {name: stored.n_stored for name, stored in schemas.items()},
            "phase": training.algorithm if training else "",
            "doing": self._next.action,
            "why": self._next.why,
            "missing_steps": self._next.missing_steps,
            "error": self._error,
            # Between two failures a training may work for a while.
            "failing": self._error or (self._logged_error if self._n_failures > 1 else ""),
            "gave_up": self._gave_up_why
            or (self._not_ranked and f"iql was released without a ranking: {self._not_ranked}"),
            "schedule": schedule_text(
                context.config.schedule,
                is_discrete=spec is None or spec.discrete is not None,
                may_rank=spec is None
                or may_rank(spec, stack=context.config.settings.get("iql", {}).get("stack", 1)),
            ),
            "steps": training.steps if training else 0,
            "usable_steps": training.engine.n_usable if training else 0,
            "updates": training.updates if training else 0,
            # While a clone is trained beside iql, those that it learns from.
            **(training.engine.best_of if training else {}),
            **(self._clone.engine.best_of if self._clone else {}),
            "version": training.engine.learner.counts.version if training else 0,
            "models": len(now.models),
            "champion": now.model_of("champion"),
            "canary": canary,
            "canary_evidence": context.keeper.evidence(self.game, spec.schema) if spec else 0.0,
            "canary_episodes": self._canary_episodes(now, spec.schema) if spec else 0,
            # Above 0: it replaces the champion after a forget, and need not be better.
            "canary_margin": self._margin(now, on_trial.model_no) if on_trial and canary else 0.0,
            "canary_waits": self._why_not_judged(on_trial),
            "control": control.model_no if control else 0,
            "not_compared": self._not_compared(now, on_trial),
            **(context.store_stats.progress(self.game, spec.schema) if spec else {}),
            "skills": self._skills.status(now, spec.schema) if spec else {},
            "forgotten": "\n".join(
                text
                for pointer in now.live("champion")
                if spec and (text := self._forgotten(now, pointer.schema))
            ),
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
