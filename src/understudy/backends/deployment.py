"""A deployment: signing key, models, access keys and stream, shared by a data folder's roles."""

import hashlib
import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from understudy.backends.addresses import open_stream
from understudy.backends.data import DataFolder
from understudy.client.local import LocalLink
from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import ConfigError
from understudy.core.log import create_once, make_folder
from understudy.core.signed import KEY_BYTES, Signer, Trusted
from understudy.experience.game import GameSpec
from understudy.experience.intake import (
    Intake,
    check_data_folder,
    deployment_key,
    key_file,
    key_fingerprint,
    read_key,
)
from understudy.models.keys import Keys
from understudy.models.objects import FolderObjects, open_objects
from understudy.models.registry import Registry
from understudy.ports import Objects

_FINGERPRINTS = "deployment.json"
"""Object with fingerprints of the keys: it distinguishes a lost key from a new deployment, and the
keys of all machines that share models must match it."""
_RECREATE = (
    "compare key and signing.key with those of a backup or of another machine, then run "
    "'understudy keys list', which writes it again"
)
_SEEN = "seen"
"""Folder that records the newest journal entries that this machine has read."""


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
    signer = _signer(data, objects, is_remote=bool(models))
    trusted = {signer.key_id: signer.public}
    # By location: after a move of the models, the new journals start from 1.
    where = hashlib.sha256(models.partition("?")[0].encode()).hexdigest()[:16] if models else "here"
    memory = FolderObjects(data.root / _SEEN / where)
    return Deployment(
        data,
        objects,
        signer,
        trusted,
        Registry(objects, trusted=trusted, signer=signer, clock=clock, memory=memory),
        Keys(objects, trusted=trusted, signer=signer, clock=clock, memory=memory),
        clock,
    )


def inspect_deployment(data: DataFolder, *, models: str = "") -> Deployment:
    """Open a deployment; ConfigError if its fingerprints are lost, which are not created again."""
    objects = open_objects(models or models_folder(data))
    is_used = any(objects.list(prefix) for prefix in ("keys", "registry", "games"))
    if is_used and signing_key(data).exists() and objects.get(_FINGERPRINTS) is None:
        raise ConfigError(
            f"{_FINGERPRINTS} beside the models is missing, with which a wrong key is noticed; "
            f"{_RECREATE}"
        )
    return open_deployment(data, models=models)


def has_deployment(data: DataFolder, *, models: str = "") -> bool:
    """Return whether a deployment was created here or at the URL, even if its key was lost."""
    if signing_key(data).exists():
        return True
    objects = open_objects(models or models_folder(data))
    return bool(objects.get(_FINGERPRINTS) or objects.list("keys") or objects.list("registry"))


def registered_games(data: DataFolder, *, models: str = "") -> list[str]:
    """Return the names of all registered games, in the folder or at the models URL."""
    if not models:
        return data.game_names()
    return open_deployment(data, models=models).registry.games()


def spec_registry(data: DataFolder, *, models: str = "") -> Registry:
    """Return the registry to read specs from; without keys, so it can neither sign nor verify."""
    return Registry(open_objects(models or models_folder(data)), trusted={})


def models_folder(data: DataFolder) -> Path:
    """Return the folder of models, specs and keys, for deployments without a models URL."""
    return data.root / "models"


def signing_key(data: DataFolder) -> Path:
    """Return the path of the private key that signs models and keys."""
    return data.root / "signing.key"


def _signer(data: DataFolder, objects: Objects, *, is_remote: bool) -> Signer:
    """Return the folder's signer, created on first use; concurrent processes share it.

    Raises ConfigError if a key is damaged or lost, or does not match its fingerprint. With two keys
    a player would have two pseudonyms and could not be erased, and each machine would reject the
    other's models.
    """
    path = signing_key(data)
    check_data_folder(data.root)
    files = {"signatures": path, "pseudonyms": data.root / "key"}
    shared = objects.get(_FINGERPRINTS)
    try:
        expected = dict(json.loads(b"{}" if shared is None else shared))
        if not expected.keys() <= files.keys():
            raise ValueError
    except (ValueError, TypeError):
        raise ConfigError(
            f"{_FINGERPRINTS} beside the models is damaged; delete it, then {_RECREATE}"
        ) from None
    if not is_remote and shared is not None and "pseudonyms" not in expected:
        del files["pseudonyms"]  # an earlier version recorded it only for remote models

    def missing() -> list[str]:
        return [str(file) for file in files.values() if not file.exists()]

    # Checked twice: a process that starts at the same time creates the keys before anything else.
    is_used = missing() and (shared or objects.list("keys") or objects.list("registry"))
    if is_used and (names := missing()):
        raise ConfigError(
            f"missing {' and '.join(names)}, which this deployment was created with; a new key "
            "would invalidate its keys, models and players; copy the file from another machine of "
            "the deployment, or restore it from a backup"
        )
    if not path.exists():
        make_folder(data.root)
        create_once(path, key_file(secrets.token_bytes(KEY_BYTES)))
    signer = Signer(read_key(path))
    own = {"signatures": signer.key_id}
    if "pseudonyms" in files:
        if not files["pseudonyms"].exists():
            deployment_key(data.root)
        own["pseudonyms"] = key_fingerprint(read_key(files["pseudonyms"]))
    if shared is None:
        objects.create(_FINGERPRINTS, json.dumps(own).encode())
        expected = dict(json.loads(objects.get(_FINGERPRINTS) or b"{}"))
    for what, file in files.items():
        if expected.get(what, own[what]) != own[what]:
            raise ConfigError(
                f"{file} differs from the key that this deployment was created with; copy the key "
                "of its other machines here, restore it from a backup, or set models.url to a "
                "location that no other deployment uses"
            )
    if "pseudonyms" in files:
        deployment_key(data.root)  # records the key's fingerprint in this folder, too
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
