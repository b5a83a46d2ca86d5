"""Course: one algorithm that learns one game from the store for as long as there is something to learn.

    FOLDER/000000004096.safetensors     checkpoints, named by the updates they were taken at

Killed at any moment it goes on from its newest checkpoint: with the same weights, rows and place in the store.
"""

import hashlib
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from understudy.app.runs.learner_config import learner_config
from understudy.app.runs.settings import Settings
from understudy.core.clock import Clock
from understudy.core.errors import Corrupt, LearningFailed
from understudy.core.events import Event, Guarded, Update
from understudy.core.game import GameSpec
from understudy.core.manifest import Lineage
from understudy.core.policy import Policy
from understudy.core.version import version
from understudy.engines.from_store import FromStore
from understudy.learn.checkpoint import Checkpoint, Checkpoints
from understudy.learn.learner import Learner, LearnerConfig

MAX_RESTORES = 3


@dataclass(frozen=True, slots=True)
class Marks:
    """What a course remembers of its releases, besides what it learned."""

    model_no: int = 0
    """Its newest release, from which it went on."""
    updates: int = 0
    steps: int = 0
    restores: int = 0
    """Since then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoursePlan:
    """What is learned, from what and how."""

    spec: GameSpec
    settings: Settings
    store: Path
    learn_from: tuple[str, ...]
    seed: int

    @property
    def name(self) -> str:
        """The course's folder: another schema, setting or seed is another course."""
        told = f"{self.spec.schema} {self.settings.to_toml()} {self.learn_from} {self.seed}"
        return f"{self.settings.algorithm}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"


class Course:
    """An engine with its checkpoints; `close` keeps what was learned unless the course was fenced."""

    def __init__(
        self, plan: CoursePlan, folder: Path, *, clock: Clock, on_guarded: Callable[[Guarded], object]
    ) -> None:
        settings = plan.settings
        self.plan, self.marks = plan, Marks()
        self._clock, self._on_guarded = clock, on_guarded
        self.algorithm = settings.algorithm
        self._metrics: dict[str, float] = {}
        self._folder = folder / plan.name
        self._checkpoints = Checkpoints(self._folder)
        base = learner_config(settings)
        config = LearnerConfig(updates_per_call=base.updates_per_call, limiter=None, replay=base.replay)
        algorithm = settings.algorithm_type(plan.spec, settings.config)
        self._engine = FromStore(
            Learner(algorithm, settings.knobs, root_seed=plan.seed, config=config), plan.store,
            steps=settings.run.steps, clock=clock, on_event=self._hear, learn_from=plan.learn_from,
            only_people=bool(algorithm.needs.is_cloning),
        )  # fmt: skip
        self.saved_s, self._saved_updates = clock.monotonic(), -1
        self._resume()

    # --- where it stands --------------------------------------------------------------------------------------------

    @property
    def updates(self) -> int:
        return self._engine.steps

    @property
    def steps(self) -> int:
        """Steps ever taken in."""
        return self._engine.learner.counts.inserted_steps

    @property
    def usable_steps(self) -> int:
        return self._engine.n_usable

    @property
    def version(self) -> int:
        return self._engine.learner.counts.version

    @property
    def policy(self) -> Policy:
        return self._engine.policy

    def lineage(self) -> Lineage:
        """Where the policy of this moment comes from."""
        settings, metrics = self.plan.settings, {name: v for name, v in self._metrics.items() if math.isfinite(v)}
        return Lineage(
            algorithm=self.algorithm, seed=self.plan.seed, parent=self.marks.model_no, code_version=version(),
            cursor_to=self._engine.cursor or "", steps=self.steps,
            config={"settings": settings.to_toml(), "learn_from": list(self.plan.learn_from)},
            metrics=metrics | {"updates": float(self.updates)},
        )  # fmt: skip

    # --- learning ---------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Take in what is new in the store, and let go of what was forgotten."""
        self._engine.follow()

    def step(self) -> None:
        """One call of updates; too many that are not finite go back to the last checkpoint, at half the rate."""
        if self._saved_updates < 0:
            self.save()  # something to go back to
        if not self._engine.step():
            self._go_back()

    def released(self, model_no: int, *, steps: int) -> None:
        """The policy of this moment is a model now: write that down."""
        self.marks = Marks(model_no, self.updates, steps)
        self.save()

    def _go_back(self) -> None:
        checkpoint, restores = self._checkpoints.latest(), self.marks.restores + 1
        if checkpoint is None or restores > MAX_RESTORES:
            raise LearningFailed(
                f"{self.algorithm} stays not finite after {restores - 1} restores; look at the chunks that were named"
            )
        self.marks = Marks(self.marks.model_no, self.marks.updates, self.marks.steps, restores)
        self._engine.go_back(checkpoint.arrays)
        self._hear(
            Guarded(env_steps=self.updates, what="too many updates were not finite: weights restored, half rate")
        )

    def _hear(self, event: Event) -> None:
        if isinstance(event, Update):
            self._metrics = dict(event.metrics)
        elif isinstance(event, Guarded):
            self._on_guarded(event)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Make everything durable."""
        arrays, facts = self._engine.checkpoint()
        self._checkpoints.save(Checkpoint(self.updates, arrays, facts | {"marks": asdict(self.marks)}))
        self.saved_s, self._saved_updates = self._clock.monotonic(), self.updates

    def save_if_moved(self) -> None:
        """Save, where something was learned since the last time."""
        if self.updates != self._saved_updates and self.updates:
            self.save()

    def _resume(self) -> None:
        try:
            found = self._checkpoints.latest()
        except Corrupt as error:
            # Nothing but time is lost: the store has every step.
            shutil.rmtree(self._folder)
            self._on_guarded(Guarded(env_steps=0, what=f"{error}; the course begins again"))
            return
        if found is not None:
            facts: Any = found.facts
            self._engine.restore(found.arrays, facts)
            self.marks, self._saved_updates = Marks(**facts["marks"]), self.updates

    def close(self) -> None:
        self._engine.close()
