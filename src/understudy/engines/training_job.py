"""TrainingJob: an engine with its checkpoints, the same for a run and for the learner service.

FOLDER/000000004096.safetensors     checkpoints, named by the steps they were taken at

Killed at any moment it resumes from its newest checkpoint: with the same weights, rows and place in its data.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from understudy.core.errors import LearningFailed
from understudy.core.events import Guarded, OnEvent
from understudy.core.policy import Policy
from understudy.core.tensors import Array
from understudy.learn.checkpoint import Checkpoint, Checkpoints
from understudy.learn.learner import Learner

MAX_RESTORES = 3
"""How often a training goes back to a checkpoint before it is given up."""


class Engine(Protocol):
    """What turns rounds into weights; `steps` are env steps, or updates where nothing is played."""

    learner: Learner

    @property
    def steps(self) -> int: ...
    @property
    def env_steps(self) -> int: ...
    @property
    def policy(self) -> Policy: ...
    @property
    def is_done(self) -> bool: ...
    def step(self) -> bool: ...
    def checkpoint(self) -> tuple[dict[str, Array], dict[str, Any]]: ...
    def restore(self, arrays: Mapping[str, Array], facts: Mapping[str, Any]) -> None: ...
    def go_back(self, arrays: Mapping[str, Array]) -> None: ...
    def close(self) -> None: ...


class TrainingJob:
    """Rounds of an engine; `on_event` hears when it goes back to a checkpoint."""

    def __init__(self, engine: Engine, folder: Path, *, on_event: OnEvent) -> None:
        self.engine, self._on_event = engine, on_event
        self._checkpoints = Checkpoints(folder)
        self.restores = 0
        """How often it went back to a checkpoint."""
        self.saved_steps = -1
        """Where the newest checkpoint was taken; -1 while there is none."""

    def step(self) -> None:
        """One round; where too many updates were not finite, back to the newest checkpoint at half the rate."""
        if self.engine.step():
            return
        self.restores += 1
        checkpoint = self._checkpoints.latest()
        if checkpoint is None or self.restores > MAX_RESTORES:
            raise LearningFailed(
                f"updates stay not finite after {self.restores - 1} restores; look at the rewards and observations of "
                "the chunks that were named, or lower learning_rate"
            )
        self.engine.go_back(checkpoint.arrays)
        what = (
            f"too many updates in a row were not finite: weights of step {checkpoint.env_steps} restored, "
            "learning rate halved"
        )
        self._on_event(Guarded(env_steps=self.engine.steps, what=what))

    def save(self, arrays: Mapping[str, Array] | None = None, facts: Mapping[str, Any] | None = None) -> Path:
        """Make everything durable, with what else the caller wants to find again; the file that holds it."""
        learned, known = self.engine.checkpoint()
        known |= {"restores": self.restores, **(facts or {})}
        path = self._checkpoints.save(Checkpoint(self.engine.steps, {**learned, **(arrays or {})}, known))
        self.saved_steps = self.engine.steps
        return path

    def resume(self) -> Checkpoint | None:
        """Go on from the newest checkpoint and return it; None when there is none yet."""
        checkpoint = self._checkpoints.latest()
        if checkpoint is not None:
            self.engine.restore(checkpoint.arrays, checkpoint.facts)
            self.restores = checkpoint.facts.get("restores", 0)  # older runs wrote it elsewhere
            self.saved_steps = checkpoint.env_steps
        return checkpoint
