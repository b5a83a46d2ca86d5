"""Exporting a model: its policy as a file for other programs, with a checksum beside it."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from understudy.core.canonical import canonical_json
from understudy.core.errors import ConfigError
from understudy.core.heads import head_to_json
from understudy.core.log import write_file
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
    path = (out or Path(name)).absolute()
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give a file, such as {path / name}")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent}; make it first")
    digest = hashlib.sha256(raw).hexdigest()
    write_file(path, raw, mode=0o644)
    write_file(path.with_name(f"{path.name}.sha256"), f"{digest}  {path.name}\n".encode(), mode=0o644)
    return Exported(path, len(raw), digest, manifest)


def plain(policy: Policy, manifest: Manifest) -> dict[str, object]:
    """Everything a program needs to play this bot, as plain values; weights as nested lists."""
    return {
        "format": "understudy-policy-json/1", "model": manifest.name, "policy_sha256": manifest.policy_sha256,
        "game": json.loads(policy.game.to_json()), "network": json.loads(network_to_json(policy.network)),
        "head": head_to_json(policy.head), "stack": policy.stack,
        "weights": {name: array.tolist() for name, array in sorted(policy.weights.items())},
    }  # fmt: skip
