"""Checkpoints: a run's private state, complete or not there at all.

FOLDER/000000012800.safetensors     named by the env steps it was taken at; the newest that reads is the one
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from understudy.core import tensors
from understudy.core.canonical import canonical_json
from understudy.core.errors import ConfigError, Corrupt, Refused
from understudy.core.log import make_folder, storage_error, write_file
from understudy.core.tensors import Array

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
                f"the checkpoint's header has {size_bytes} bytes, and at most {_MAX_HEADER_BYTES} are read again; keep "
                "large state in arrays, not in facts"
            )
        return raw


def decode_checkpoint(raw: bytes) -> Checkpoint:
    """The checkpoint in these bytes; Corrupt unless every byte is as it was written."""
    try:
        arrays, metadata = tensors.decode(raw, max_header_bytes=_MAX_HEADER_BYTES)
        facts, env_steps = json.loads(metadata["facts"]), int(metadata["env_steps"])
    except (Refused, KeyError, ValueError) as error:
        raise Corrupt(f"a checkpoint cannot be read: {error}") from None
    digest = metadata.pop("digest", "")
    if metadata.get("format") != FORMAT or digest != _digest(arrays, metadata):
        raise Corrupt(f"a checkpoint of format {metadata.get('format')!r} is damaged or of another build")
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
        self._folder, self._keep = folder, keep

    def save(self, checkpoint: Checkpoint) -> Path:
        """Make it durable, then drop the oldest; a crash or a full disk at any moment leaves the one before."""
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
                f"no checkpoint in {self._folder} can be read: {'; '.join(errors)}; put one back from a backup, or "
                "begin anew in another folder"
            )
        return None

    def _paths(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return sorted(path for path in self._folder.iterdir() if _NAME.fullmatch(path.name))


def state_to_arrays(state: Any) -> dict[str, Array]:
    """The leaves of a pytree as NumPy arrays, numbered in JAX's order."""
    return {f"leaf{at:04d}": np.asarray(leaf) for at, leaf in enumerate(jax.tree.leaves(state))}


def state_from_arrays(template: Any, arrays: Mapping[str, Array]) -> Any:
    """The pytree again, in the structure, shapes and types of `template`; ConfigError when they do not fit."""
    leaves, structure = jax.tree.flatten(template)
    loaded = [arrays.get(f"leaf{at:04d}") for at in range(len(leaves))]
    for at, (leaf, found) in enumerate(zip(leaves, loaded, strict=True)):
        if found is None or found.shape != leaf.shape or found.dtype != leaf.dtype or len(arrays) != len(leaves):
            got = "nothing" if found is None else f"{found.dtype}{list(found.shape)}"
            raise ConfigError(
                f"the checkpoint's state does not fit: leaf {at} is {got}, wanted {leaf.dtype}{list(leaf.shape)}; "
                "resume with the settings the run was started with"
            )
    return jax.tree.unflatten(structure, [jax.numpy.array(found) for found in loaded])
