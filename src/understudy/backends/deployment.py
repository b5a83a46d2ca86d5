"""A deployment: what every role and command of one data folder shares: its signing key, models,
keys and stream."""

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
from understudy.experience.intake import Intake, create_once, deployment_key, key_mark
from understudy.models.keys import Keys
from understudy.models.objects import open_objects
from understudy.models.registry import Registry
from understudy.ports import Objects

_FIRST_ENTRY = "keys/0000000001.json"
_MARKS = "deployment.json"
"""What tells the keys of the machines that share these objects from others, and does not lead to
them."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """One deployment, opened; it holds no locks, so any number of processes may have it open."""

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
    """The deployment of a data folder; `models` is a URL where models, specs and keys lie
    elsewhere."""
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
    """Where models, specs and keys lie when no URL says otherwise."""
    return data.root / "models"


def signing_key(data: DataFolder) -> Path:
    """The file of the private key that signs models and keys."""
    return data.root / "signing.key"


def _signer(root: Path, objects: Objects) -> Signer:
    """The folder's own signer, made on first use; processes that start at once agree on one."""
    path = signing_key(DataFolder(root))
    if not path.exists():
        # Looked for again, since a process that starts at the same time makes the key first and
        # entries then.
        if objects.get(_FIRST_ENTRY) is not None and not path.exists():
            raise ConfigError(
                f"{path} is missing, and keys and models of this deployment were signed with it: "
                "under a new one "
                "nobody would believe them; copy it from the machine that made it, or restore it "
                "from a backup"
            )
        make_folder(root)
        create_once(path, secrets.token_bytes(KEY_BYTES))
    raw = path.read_bytes()
    if len(raw) != KEY_BYTES:
        raise ConfigError(
            f"{path} has {len(raw)} bytes instead of {KEY_BYTES}; restore it from a backup"
        )
    return Signer(raw)


def _share(root: Path, objects: Objects) -> Signer:
    """The signer, where machines share models; ConfigError when this one has other keys than the
    rest.

    With two keys a player would have two pseudonyms and could not be forgotten, and nobody believed
    the other's models.
    """
    files = {"pseudonyms": root / "key", "signatures": signing_key(DataFolder(root))}
    kept = objects.get(_MARKS)
    if kept is not None and (
        missing := [str(path) for path in files.values() if not path.exists()]
    ):
        raise ConfigError(
            f"{' and '.join(missing)} missing, and other machines of this deployment have it; copy "
            "it from one of them"
        )
    signer = _signer(root, objects)
    marks = {"pseudonyms": key_mark(deployment_key(root)), "signatures": signer.key_id}
    if kept is None:
        objects.create(_MARKS, json.dumps(marks).encode())
        kept = objects.get(_MARKS) or b"{}"
    others = json.loads(kept)
    for what, path in files.items():
        if others.get(what) != marks[what]:
            raise ConfigError(
                f"{path} is another key than the other machines of this deployment have; copy "
                "theirs here, or give "
                "models.url a place of its own"
            )
    return signer


def open_link(data: DataFolder, spec: GameSpec, *, stream: str, clock: Clock) -> LocalLink:
    """A link for commands of the deployment: into the stream at this address, past the same
    checks as a game's."""
    door = Intake(deployment_key(data.root), spec.game, clock)
    return LocalLink(open_stream(stream, data), door=door, specs_folder=data.games)


def register(data: DataFolder, spec: GameSpec, link: LocalLink, *, models: str) -> None:
    """Make a spec known to ingest; `models` is a URL where specs lie elsewhere."""
    if models:
        open_deployment(data, models=models).registry.register(spec)
    else:
        link.register(spec)
