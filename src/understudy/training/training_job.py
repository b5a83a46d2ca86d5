"""TrainingJob: an engine with its checkpoints, used by runs and by the learner service.

FOLDER/000000004096.safetensors     a checkpoint, named after its step;
                                    the newest readable one is used

A job that is killed at any moment resumes from the newest checkpoint, with the same weights, rows
and position in its data.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from understudy.core import tensors
from understudy.core.canonical import canonical_json
from understudy.core.errors import ConfigError, Corrupt, LearningFailed, Refused
from understudy.core.log import make_folder, storage_error, write_file
from understudy.core.tensors import Array
from understudy.learn.learner import Learner
from understudy.nn.policy import Policy
from understudy.training.events import Guarded, OnEvent

MAX_RESTORES = 3
"""Restores of a checkpoint before a training fails."""
FORMAT = "understudy-checkpoint/1"
_NAME = re.compile(r"(\d{12})\.safetensors")
_MAX_HEADER_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a training at a step: arrays by name, and facts as JSON."""

    env_steps: int
    arrays: Mapping[str, Array]
    facts: Mapping[str, Any]

    def encode(self) -> bytes:
        facts = canonical_json(dict(self.facts)).decode()
        metadata = {"format": FORMAT, "env_steps": str(self.env_steps), "facts": facts}
        raw = tensors.encode(self.arrays, metadata | {"digest": _digest(self.arrays, metadata)})
        if (size_bytes := int.from_bytes(raw[:8], "little")) > _MAX_HEADER_BYTES:
            raise ConfigError(
                f"the checkpoint's header has {size_bytes} bytes; at most {_MAX_HEADER_BYTES} can "
                "be read; store large state in arrays, not in facts"
            )
        return raw


def decode_checkpoint(raw: bytes) -> Checkpoint:
    """Decode a checkpoint; Corrupt unless every byte is intact."""
    try:
        arrays, metadata = tensors.decode(raw, max_header_bytes=_MAX_HEADER_BYTES)
        facts = json.loads(metadata["facts"])
        env_steps = int(metadata["env_steps"])
    except (Refused, KeyError, ValueError) as error:
        raise Corrupt(f"a checkpoint cannot be read: {error}") from None
    digest = metadata.pop("digest", "")
    if metadata.get("format") != FORMAT or digest != _digest(arrays, metadata):
        raise Corrupt(
            f"a checkpoint of format {metadata.get('format')!r} is damaged or from another version"
        )
    return Checkpoint(env_steps, arrays, facts)


def _digest(arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256(canonical_json(dict(metadata)))
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype.str} {arrays[name].shape};".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


class Checkpoints:
    """A folder of checkpoints; keeps the newest `keep`."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self._folder = folder
        self._keep = keep

    def save(self, checkpoint: Checkpoint) -> Path:
        """Store it durably, then delete old ones; a crash or full disk leaves the previous ones."""
        make_folder(self._folder)
        for partial in self._folder.glob(".*.tmp"):
            partial.unlink(missing_ok=True)  # from a process that was killed while writing
        path = self._folder / f"{checkpoint.env_steps:012d}.safetensors"
        try:
            write_file(path, checkpoint.encode())
        except OSError as error:
            raise storage_error(
                error, f"the checkpoint of step {checkpoint.env_steps}", then="resume the run"
            ) from error
        for old in self._paths()[: -self._keep]:
            old.unlink(missing_ok=True)
        return path

    def latest(self) -> Checkpoint | None:
        """The newest readable checkpoint, or None without any; Corrupt if none is readable."""
        errors = []
        for path in reversed(self._paths()):
            try:
                return decode_checkpoint(path.read_bytes())
            except Corrupt as error:
                errors.append(f"{path.name}: {error}")
        if errors:
            raise Corrupt(
                f"no checkpoint in {self._folder} can be read: {'; '.join(errors)}; restore one "
                "from a backup, or start again in another folder"
            )
        return None

    def delete(self) -> None:
        """Delete all of them, and the folder unless it contains other files."""
        for path in (*self._paths(), *self._folder.glob(".*.tmp")):
            path.unlink(missing_ok=True)
        if not any(self._folder.iterdir()):
            self._folder.rmdir()

    def _paths(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return sorted(path for path in self._folder.iterdir() if _NAME.fullmatch(path.name))


class Engine(Protocol):
    """Runs rounds of training; `steps` counts env steps, or updates if nothing is played."""

    learner: Learner
    policy: Policy

    @property
    def steps(self) -> int: ...
    @property
    def env_steps(self) -> int: ...
    @property
    def is_done(self) -> bool: ...
    def step(self) -> bool: ...
    def checkpoint(self) -> tuple[dict[str, Array], dict[str, Any]]: ...
    def restore(self, arrays: Mapping[str, Array], facts: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class TrainingJob:
    """Runs an engine's rounds; `on_event` is called when a checkpoint is restored."""

    def __init__(self, engine: Engine, folder: Path, *, on_event: OnEvent) -> None:
        self.engine = engine
        self._on_event = on_event
        self._checkpoints = Checkpoints(folder)
        self.restores = 0
        """How often a checkpoint was restored."""
        self.saved_steps = -1
        """The step of the newest checkpoint; -1 if there is none."""

    def step(self) -> None:
        """One round; after too many non-finite updates, the last checkpoint's weights are restored.

        The learning rate is then halved.
        """
        if self.engine.step():
            return
        self.restores += 1
        checkpoint = self._checkpoints.latest()
        if checkpoint is None or self.restores > MAX_RESTORES:
            raise LearningFailed(
                f"updates are still not finite after {self.restores - 1} restores; check the "
                "rewards and observations of the reported chunks, or lower learning_rate"
            )
        self.engine.learner.restore_weights(checkpoint.arrays)
        self.engine.policy = self.engine.learner.publish()
        what = (
            f"too many updates in a row were not finite: weights of step {checkpoint.env_steps} "
            "restored, learning rate halved"
        )
        self._on_event(Guarded(env_steps=self.engine.steps, what=what))

    def save(
        self, arrays: Mapping[str, Array] | None = None, facts: Mapping[str, Any] | None = None
    ) -> Path:
        """Save the engine's state, and the caller's arrays and facts; returns the file."""
        engine_arrays, engine_facts = self.engine.checkpoint()
        path = self._checkpoints.save(
            Checkpoint(
                self.engine.steps,
                {**engine_arrays, **(arrays or {})},
                {**engine_facts, "restores": self.restores, **(facts or {})},
            )
        )
        self.saved_steps = self.engine.steps
        return path

    def resume(self) -> Checkpoint | None:
        """Resume from the newest checkpoint and return it; None if there is none yet."""
        checkpoint = self._checkpoints.latest()
        if checkpoint is not None:
            self.restore(checkpoint)
        return checkpoint

    def restore(self, checkpoint: Checkpoint) -> None:
        """Resume from this checkpoint."""
        self.engine.restore(checkpoint.arrays, checkpoint.facts)
        self.restores = checkpoint.facts.get("restores", 0)  # older runs stored it elsewhere
        self.saved_steps = checkpoint.env_steps
