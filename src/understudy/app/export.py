"""Exporting a model: its policy as a file for other programs, with a checksum beside it."""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from understudy.core.canonical import canonical_json
from understudy.core.errors import ConfigError
from understudy.core.heads import head_to_json
from understudy.core.log import storage_error
from understudy.core.manifest import Manifest, open_policy
from understudy.core.network import network_to_json
from understudy.core.policy import Policy
from understudy.models.registry import Registry

Kind = Literal["safetensors", "json"]


@dataclass(frozen=True, slots=True)
class Exported:
    """A file that was written, and what proves it."""

    path: Path
    size_bytes: int
    sha256: str
    manifest: Manifest


def export(registry: Registry, manifest: Manifest, *, kind: Kind, out: Path | None = None) -> Exported:
    """Write a model's policy as the bytes that were signed, or as JSON for those who read no safetensors.

    The checksum goes beside it, in the form that `sha256sum --check` reads.
    """
    name, raw = f"{manifest.game}-{manifest.model_no}.{kind}", registry.policy_bytes(manifest)
    policy = open_policy(manifest, raw)
    if kind == "json":
        raw = canonical_json(plain(policy, manifest))
    path = (out or Path(name)).resolve()
    sums, digest = path.with_name(f"{path.name}.sha256"), hashlib.sha256(raw).hexdigest()
    _put({path: raw, sums: f"{digest}  {path.name}\n".encode()}, instead=path / name)
    return Exported(path, len(raw), digest, manifest)


def _put(files: Mapping[Path, bytes], *, instead: Path) -> None:
    """Put files where they belong, each whole; what goes wrong on the way leaves all of them as they were."""
    halves = {path: path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in files}
    try:
        for path in files:
            if path.is_dir():
                raise ConfigError(f"{path} is a folder; give a file, such as {instead}")
            if path.exists() and not path.is_file():
                raise ConfigError(f"{path} is a device or a pipe, which would be replaced; give a file")
            if not path.parent.is_dir():
                raise ConfigError(f"there is no folder {path.parent}; make it first")
        for path, raw in files.items():
            with halves[path].open("wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
        for path, half in halves.items():
            os.replace(half, path)
    except OSError as error:
        raise storage_error(error, f"writing {', '.join(path.name[:80] for path in files)}") from None
    finally:
        for half in halves.values():
            with contextlib.suppress(OSError):
                half.unlink()


def plain(policy: Policy, manifest: Manifest) -> dict[str, object]:
    """Everything a program needs to play this bot, as plain values; weights as nested lists."""
    return {
        "format": "understudy-policy-json/1", "model": manifest.name, "policy_sha256": manifest.policy_sha256,
        "game": json.loads(policy.game.to_json()), "network": json.loads(network_to_json(policy.network)),
        "head": head_to_json(policy.head), "stack": policy.stack,
        "weights": {name: array.tolist() for name, array in sorted(policy.weights.items())},
    }  # fmt: skip
