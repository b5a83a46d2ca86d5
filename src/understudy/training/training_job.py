"""TrainingJob: an engine with its checkpoints, the same for a run and for the learner service.

FOLDER/000000004096.safetensors     a checkpoint, named by the steps it was taken at;
                                    the newest that reads is the one

Killed at any moment it resumes from its newest checkpoint: with the same weights, rows and place in
its data.
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
"""How often a training goes back to a checkpoint before it is given up."""
FORMAT = "understudy-checkpoint/1"
_NAME = re.compile(r"(\d{12})\.safetensors")
_MAX_HEADER_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Arrays by name and facts as JSON, taken at a number of env steps."""

    env_steps: int
    arrays: Mapping[str, Array]
    facts: Mapping[str, Any]

    def encode(self) -> bytes:
        facts = canonical_json(dict(self.facts)).decode()
        metadata = {"format": FORMAT, "env_steps": str(self.env_steps), "facts": facts}
        raw = tensors.encode(self.arrays, metadata | {"digest": _digest(self.arrays, metadata)})
        if (size_bytes := int.from_bytes(raw[:8], "little")) > _MAX_HEADER_BYTES:
            raise ConfigError(
                f"the checkpoint's header has {size_bytes} bytes, and at most {_MAX_HEADER_BYTES} "
                "are read again; keep "
                "large state in arrays, not in facts"
            )
        return raw


def decode_checkpoint(raw: bytes) -> Checkpoint:
    """The checkpoint in these bytes; Corrupt unless every byte is as it was written."""
    try:
        arrays, metadata = tensors.decode(raw, max_header_bytes=_MAX_HEADER_BYTES)
        facts = json.loads(metadata["facts"])
        env_steps = int(metadata["env_steps"])
    except (Refused, KeyError, ValueError) as error:
        raise Corrupt(f"a checkpoint cannot be read: {error}") from None
    digest = metadata.pop("digest", "")
    if metadata.get("format") != FORMAT or digest != _digest(arrays, metadata):
        raise Corrupt(
            f"a checkpoint of format {metadata.get('format')!r} is damaged or of another build"
        )
    return Checkpoint(env_steps, arrays, facts)


def _digest(arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256(canonical_json(dict(metadata)))
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype.str} {arrays[name].shape};".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


class Checkpoints:
    """A folder of checkpoints; the newest `keep` stay."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self._folder = folder
        self._keep = keep

    def save(self, checkpoint: Checkpoint) -> Path:
        """Make it durable, then drop the oldest; a crash or a full disk at any moment leaves the
        one before."""
        make_folder(self._folder)
        for left in self._folder.glob(".*.tmp"):
            left.unlink(missing_ok=True)  # of a process that was killed while it wrote
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
        """The newest checkpoint that reads, or None; Corrupt when there are some and none reads."""
        errors = []
        for path in reversed(self._paths()):
            try:
                return decode_checkpoint(path.read_bytes())
            except Corrupt as error:
                errors.append(f"{path.name}: {error}")
        if errors:
            raise Corrupt(
                f"no checkpoint in {self._folder} can be read: {'; '.join(errors)}; put one back "
                "from a backup, or "
                "begin anew in another folder"
            )
        return None

    def _paths(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return sorted(path for path in self._folder.iterdir() if _NAME.fullmatch(path.name))


class Engine(Protocol):
    """What turns rounds into weights; `steps` are env steps, or updates where nothing is played."""

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
    """Rounds of an engine; `on_event` hears when it goes back to a checkpoint."""

    def __init__(self, engine: Engine, folder: Path, *, on_event: OnEvent) -> None:
        self.engine = engine
        self._on_event = on_event
        self._checkpoints = Checkpoints(folder)
        self.restores = 0
        """How often it went back to a checkpoint."""
        self.saved_steps = -1
        """Where the newest checkpoint was taken; -1 while there is none."""

    def step(self) -> None:
        """One round; where too many updates were not finite, back to the newest checkpoint at
        half the rate."""
        if self.engine.step():
            return
        self.restores += 1
        checkpoint = self._checkpoints.latest()
        if checkpoint is None or self.restores > MAX_RESTORES:
            raise LearningFailed(
                f"updates stay not finite after {self.restores - 1} restores; look at the rewards "
                "and observations of "
                "the chunks that were named, or lower learning_rate"
            )
        self.engine.learner.go_back(checkpoint.arrays)
        self.engine.policy = self.engine.learner.publish()
        what = (
            f"too many updates in a row were not finite: weights of step {checkpoint.env_steps} "
            "restored, "
            "learning rate halved"
        )
        self._on_event(Guarded(env_steps=self.engine.steps, what=what))

    def save(
        self, arrays: Mapping[str, Array] | None = None, facts: Mapping[str, Any] | None = None
    ) -> Path:
        """Make everything durable, with what else the caller wants to find again; the file that
        holds it."""
        learned, known = self.engine.checkpoint()
        known |= {"restores": self.restores, **(facts or {})}
        path = self._checkpoints.save(
            Checkpoint(self.engine.steps, {**learned, **(arrays or {})}, known)
        )
        self.saved_steps = self.engine.steps
        return path

    def resume(self) -> Checkpoint | None:
        """Go on from the newest checkpoint and return it; None when there is none yet."""
        checkpoint = self._checkpoints.latest()
        if checkpoint is not None:
            self.restore(checkpoint)
        return checkpoint

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from this checkpoint of the folder."""
        self.engine.restore(checkpoint.arrays, checkpoint.facts)
        self.restores = checkpoint.facts.get("restores", 0)  # older runs wrote it elsewhere
        self.saved_steps = checkpoint.env_steps
