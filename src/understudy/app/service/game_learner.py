"""One game's way from people's steps to its champion: what the schedule says, done piece by piece."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from understudy.app.data import DataFolder
from understudy.app.runs.wanted import Wanted, resolve
from understudy.app.service.course import Course, CoursePlan
from understudy.app.service.gatekeeper import Gatekeeper, fitting_champion
from understudy.app.service.held_out import held_out
from understudy.app.service.model_check import Budget
from understudy.app.service.schedule import LearningSchedule, Next, Standing, algorithm_for, next_action, written
from understudy.app.service.tally import Played, Tally
from understudy.core.clock import Clock
from understudy.core.errors import ConfigError, Fenced, UnderstudyError
from understudy.core.events import Guarded
from understudy.core.game import GameSpec
from understudy.core.manifest import model_name
from understudy.core.meta import CONSENTS
from understudy.models.catalogue import Catalogue
from understudy.models.gate import Bounds, Verdict
from understudy.models.registry import Registry

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
    """Gymnasium ids by game: candidates of these are judged on held-out seeds instead of by live play."""
    checkpoint_every_s: float = 10.0

    def __post_init__(self) -> None:
        if not self.learn_from or not set(self.learn_from) <= set(CONSENTS) - {"denied"}:
            raise ConfigError(f"learn_from is {self.learn_from}; give 'granted', or 'granted' and 'unknown'")
        if unknown := self.settings.keys() - {"bc", "dqn"}:
            raise ConfigError(f"settings are given for {sorted(unknown)}; the schedule knows bc and dqn")
        if not 0 < self.checkpoint_every_s < 1e6:
            raise ConfigError(f"checkpoint_every_s is {self.checkpoint_every_s}; give seconds, such as 10")


@dataclass(frozen=True, slots=True)
class Means:
    """What every game's learner works with."""

    data: DataFolder
    registry: Registry
    keeper: Gatekeeper
    tally: Tally
    config: LearnerServiceConfig
    clock: Clock


class GameLearner:
    """Follows the schedule for one game; raises Fenced once somebody else has taken over."""

    def __init__(self, game: str, means: Means, *, owner: str) -> None:
        self.game, self._means = game, means
        self.epoch = means.registry.takeover(game, owner=owner)
        self._course: Course | None = None
        self._spec: GameSpec | None = None
        self._next = Next("wait", "nothing is recorded yet")
        self._verdict: tuple[str, Verdict] | None = None
        self._guarded: list[str] = []
        self._n_guarded = 0
        self._error, self._again_s = "", 0.0

    def step(self) -> bool:
        """One piece of work, if there is one; what goes wrong with this game alone is told, and tried again later."""
        if self._means.clock.monotonic() < self._again_s:
            return False
        try:
            did = self._step()
        except Fenced:
            raise
        except UnderstudyError as error:
            self._error, self._again_s = str(error), self._means.clock.monotonic() + _AGAIN_S
            _log.error("learning_failed", game=self.game, error=str(error)[:300], again_in_s=_AGAIN_S)
            self._leave()
            return False
        self._error = ""
        return did

    def _step(self) -> bool:
        now = self._catalogue()
        spec = self._newest_spec()
        if spec is None:
            return False
        champion = fitting_champion(now, spec.schema)
        course = self._attend(spec, algorithm_for(is_discrete=spec.discrete is not None, has_champion=champion > 0))
        course.follow()
        if self._judge():
            return True
        standing = Standing(
            algorithm=course.algorithm, has_champion=champion > 0, has_canary=now.points_to("canary") > 0,
            usable_steps=course.usable_steps, steps=course.steps, updates=course.updates,
            released_steps=course.marks.steps, released_updates=course.marks.updates,
        )  # fmt: skip
        self._next = next_action(standing, self._means.config.schedule)
        if self._next.action == "train":
            course.step()
            if self._means.clock.monotonic() - course.saved_s >= self._means.config.checkpoint_every_s:
                course.save_if_moved()
        elif self._next.action == "release":
            self._release(course)
        return self._next.action != "wait"

    def _catalogue(self) -> Catalogue:
        now = self._means.registry.catalogue(self.game)
        if now.epoch != self.epoch:
            raise Fenced(
                f"{now.owner} has taken over {self.game} (epoch {now.epoch}, ours was {self.epoch}); this learner stops"
            )
        return now

    def _newest_spec(self) -> GameSpec | None:
        schema = self._means.tally.schema(self.game, min_steps=self._means.config.schedule.first_steps)
        if self._spec is None or self._spec.schema != schema:
            self._spec = next((one for one in self._means.registry.specs(self.game) if one.schema == schema), None)
        return self._spec

    def _attend(self, spec: GameSpec, algorithm: str) -> Course:
        """The course of this algorithm, from its last checkpoint if it had begun."""
        course = self._course
        if course is not None and (course.plan.spec.schema, course.algorithm) == (spec.schema, algorithm):
            return course
        self._leave()
        config = self._means.config
        given = dict(config.settings.get(algorithm, {}))
        if algorithm == "bc":
            given.setdefault("steps", config.schedule.bc_updates)
        plan = CoursePlan(
            spec=spec, settings=resolve(Wanted(algorithm=algorithm, settings=given), spec), seed=config.seed,
            store=self._means.data.store, learn_from=config.learn_from,
        )  # fmt: skip
        folder = self._means.data.root / "learner" / self.game
        self._course = Course(plan, folder, clock=self._means.clock, on_guarded=self._hear)
        _log.info("course", game=self.game, algorithm=algorithm, updates=self._course.updates)
        return self._course

    # --- the gate ---------------------------------------------------------------------------------------------------

    def _release(self, course: Course) -> None:
        means, config = self._means, self._means.config
        manifest = means.registry.release(course.policy, course.lineage(), epoch=self.epoch)
        course.released(manifest.model_no, steps=course.usable_steps if course.algorithm == "bc" else course.steps)
        with held_out(config.envs.get(self.game), course.plan.spec, attempt=manifest.model_no) as play:
            found = means.keeper.admit(self.game, manifest.model_no, epoch=self.epoch, play=play)
        self._tell(manifest.model_no, found)

    def _judge(self) -> bool:
        """Whether the canary's time is over."""
        canary = self._means.registry.catalogue(self.game).points_to("canary")
        found = self._means.keeper.judge(self.game, self._returns, epoch=self.epoch) if canary else None
        if found is None or found.decision == "wait":
            return False
        self._tell(canary, found)
        return True

    def _returns(self, model: str, since_s: float) -> list[Played]:
        return self._means.tally.returns(model, since_s=since_s)

    def _tell(self, model_no: int, found: Verdict) -> None:
        self._verdict = (model_name(self.game, model_no), found)
        _log.info("verdict", model=self._verdict[0], decision=found.decision, why=found.why)

    def _hear(self, event: Guarded) -> None:
        self._n_guarded += len(event.chunks)
        self._guarded = [*self._guarded, *event.chunks][-20:]
        _log.warning("guarded", game=self.game, what=event.what, chunks=list(event.chunks)[:20])

    # --- telling and ending -----------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Where the game stands, as plain values."""
        means, course, spec = self._means, self._course, self._spec
        now = means.registry.catalogue(self.game)
        champion, canary = (now.points_to(alias) for alias in ("champion", "canary"))
        since_s = now.aliases["canary"].at_s if canary else 0.0
        unknown = 0
        if spec is not None and "unknown" not in means.config.learn_from:
            unknown = means.tally.schemas[self.game][spec.schema].steps["unknown"]
        told = self._verdict
        return {
            "game": self.game, "phase": course.algorithm if course else "", "doing": self._next.action,
            "why": self._next.why, "error": self._error,
            "schedule": written(means.config.schedule, is_discrete=spec is None or spec.discrete is not None),
            "steps": course.steps if course else 0, "usable_steps": course.usable_steps if course else 0,
            "updates": course.updates if course else 0, "version": course.version if course else 0,
            "models": len(now.models), "champion": champion, "canary": canary,
            "canary_episodes": len(self._returns(model_name(self.game, canary), since_s)) if canary else 0,
            "verdict": {"model": told[0], "decision": told[1].decision, "why": told[1].why} if told else None,
            "guarded_chunks": self._n_guarded, "guarded": self._guarded,
            "consent_unknown_steps": unknown, "next": _advice(unknown),
        }  # fmt: skip

    def save(self) -> None:
        """Keep what was learned so far."""
        if self._course is not None:
            self._course.save_if_moved()

    def close(self) -> None:
        if self._course is not None:
            self._course.close()
            self._course = None

    def _leave(self) -> None:
        """Close the course; one that failed is not saved: its last checkpoint is good."""
        if not self._error:
            self.save()
        self.close()


def _advice(unknown_steps: int) -> str:
    if not unknown_steps:
        return ""
    return (
        f"{unknown_steps} steps not learnt from: consent unknown; next: ask players and record with consent='granted', "
        'or set learn_from = ["granted", "unknown"] and start the learner again'
    )
