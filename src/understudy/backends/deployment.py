"""A deployment: signing key, models, access keys and stream, shared by a data folder's roles."""

import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from understudy.backends.addresses import open_stream
from understudy.backends.data import DataFolder
from understudy.client.local import LocalLink
from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import ConfigError
from understudy.core.log import make_folder
from understudy.core.signed import KEY_BYTES, Signer, Trusted
from understudy.experience.game import GameSpec
from understudy.experience.intake import Intake, create_once, deployment_key, key_fingerprint
from understudy.models.keys import Keys
from understudy.models.objects import open_objects
from understudy.models.registry import Registry
from understudy.ports import Objects

_FIRST_ENTRY = "keys/0000000001.json"
_FINGERPRINTS = "deployment.json"
"""Object with fingerprints of the keys, which must be equal on all machines that share models."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """An open deployment; it holds no locks, so any number of processes may have it open."""

    data: DataFolder
    objects: Objects
    signer: Signer
    trusted: Trusted
    registry: Registry
    keys: Keys
    clock: Clock


def open_deployment(
    data: DataFolder, *, models: str = "", clock: Clock | None = None
) -> Deployment:
    """Open a data folder's deployment; `models`: URL of models, specs and keys if remote."""
    clock = clock or SystemClock()
    objects = open_objects(models or models_folder(data))
    signer = _share(data.root, objects) if models else _signer(data.root, objects)
    trusted = {signer.key_id: signer.public}
    return Deployment(
        data,
        objects,
        signer,
        trusted,
        Registry(objects, trusted=trusted, signer=signer, clock=clock),
        Keys(objects, trusted=trusted, signer=signer, clock=clock),
        clock,
    )


def models_folder(data: DataFolder) -> Path:
    """Return the folder of models, specs and keys, for deployments without a models URL."""
    return data.root / "models"


def signing_key(data: DataFolder) -> Path:
    """Return the path of the private key that signs models and keys."""
    return data.root / "signing.key"


def _signer(root: Path, objects: Objects) -> Signer:
    """Return the folder's own signer, created on first use; concurrent processes share it."""
    path = signing_key(DataFolder(root))
    if not path.exists():
        # The path is checked twice: a process that starts at the same time creates the key before
        # the first entry.
        if objects.get(_FIRST_ENTRY) is not None and not path.exists():
            raise ConfigError(
                f"{path} is missing: keys and models of this deployment were signed with it and "
                "would not verify with a new one; copy the file from the machine that created it, "
                "or restore it from a backup"
            )
        make_folder(root)
        create_once(path, secrets.token_bytes(KEY_BYTES))
    raw = path.read_bytes()
    if len(raw) != KEY_BYTES:
        raise ConfigError(
            f"{path} has {len(raw)} bytes, expected {KEY_BYTES}; restore it from a backup"
        )
    return Signer(raw)


def _share(root: Path, objects: Objects) -> Signer:
    """Return the signer of machines that share models; ConfigError if this machine's keys differ.

    With two keys a player would have two pseudonyms and could not be erased, and each machine would
    reject the other's models.
    """
    files = {"pseudonyms": root / "key", "signatures": signing_key(DataFolder(root))}
    shared = objects.get(_FINGERPRINTS)
    if shared is not None and (
        missing := [str(path) for path in files.values() if not path.exists()]
    ):
        raise ConfigError(
            f"missing {' and '.join(missing)}, which the other machines of this deployment have; "
            "copy it from one of them"
        )
    signer = _signer(root, objects)
    own = {"pseudonyms": key_fingerprint(deployment_key(root)), "signatures": signer.key_id}
    if shared is None:
        objects.create(_FINGERPRINTS, json.dumps(own).encode())
        shared = objects.get(_FINGERPRINTS) or b"{}"
    expected = json.loads(shared)
    for what, path in files.items():
        if expected.get(what) != own[what]:
            raise ConfigError(
                f"{path} differs from the key of the other machines of this deployment; copy "
                "their key here, or set models.url to a location that no other deployment uses"
            )
    return signer


def open_link(data: DataFolder, spec: GameSpec, *, stream: str, clock: Clock) -> LocalLink:
    """Return a link into the stream at this URL, with the same checks as a game's link."""
    intake = Intake(deployment_key(data.root), spec.game, clock)
    return LocalLink(open_stream(stream, data), intake=intake, specs_folder=data.games)


def register(data: DataFolder, spec: GameSpec, link: LocalLink, *, models: str) -> None:
    """Register a spec, so that ingest accepts its frames; `models`: URL of a remote registry."""
    if models:
        open_deployment(data, models=models).registry.register(spec)
    else:
        link.register(spec)
