"""Backup and restore: a verified copy of a platform's store, models, keys and secrets.

DIR/backup.json           table of contents with the SHA-256 of every file; written last, so a
                          folder without it is not a backup
DIR/store/                a snapshot from after the start of the backup; it holds everything stored
                          before the start
DIR/models/               specs, keys and models; journals are copied before the policies they name
DIR/key, signing.key      secrets, with which anyone can act as the deployment
DIR/development.json      the keys that `up` creates for development; a secret, too
DIR/understudy.toml       the config file
DIR/backends.json         locations of stream, store and models; of those on other machines, only
                          the models are copied
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import understudy
from understudy.backends.data import DataFolder
from understudy.backends.deployment import open_deployment, signing_key
from understudy.backends.local import audit_store, summary
from understudy.core.clock import SystemClock
from understudy.core.errors import ConfigError, Corrupt, Refused
from understudy.core.log import FileLock, make_folder, sync_folder, write_file
from understudy.core.signed import Signer
from understudy.experience.intake import (
    BACKUP_FILE,
    KEY_ID_FILE,
    RESTORING,
    check_key_id,
    read_key,
)
from understudy.models.keys import Keys
from understudy.models.objects import FolderObjects, open_objects
from understudy.models.registry import Registry
from understudy.models.shared import Journal
from understudy.platform.config import FILE_NAME as CONFIG_FILE
from understudy.platform.config import LAST_START_FILE, Config, restore_last_start
from understudy.platform.ingest import open_own_ingest, open_own_store
from understudy.platform.requests import send_request
from understudy.ports import Objects

FORMAT = "understudy-backup/1"
_FACTS = BACKUP_FILE
_FILES = ("key", KEY_ID_FILE, "signing.key", "development.json", "understudy.toml", LAST_START_FILE)
_JOURNALS = ("keys", "registry")
_PREFIXES = (*_JOURNALS, "games", "blobs")
_RESTORE_LOCK = ".restore.lock"
_STAGE_FILE = ".stage"
_IN_TARGETS = (_RESTORE_LOCK, RESTORING, CONFIG_FILE, "lost+found", ".DS_Store")
"""Names in a folder that may be restored to; systems create the last two by themselves."""
_SNAPSHOT = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Proof:
    """The verified contents of a backup, or of a restored data folder."""

    steps: int
    chunks: int
    models: int
    keys: int
    files: int
    size_bytes: int
    at_s: float
    damaged: tuple[str, ...] = ()
    """Models and journals that were damaged before the backup; everything else is intact."""


def back_up(
    data: DataFolder, target: Path, *, config: Config | None = None, timeout_s: float = 600.0
) -> Proof:
    """Copy a deployment to an empty folder and verify the copy; the platform may be running.

    `config` locates stream and models; by default they are in the data folder.
    """
    config = config or Config()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(
            f"{target} is a file, or a folder that is not empty; pass a folder that does not "
            "exist yet"
        )
    if data.root.resolve() in (target.resolve(), *target.resolve().parents):
        raise ConfigError(
            f"{target} is inside the data folder {data.root}; pass a folder outside it"
        )
    if not data.has_store() and not signing_key(data).exists():
        raise ConfigError(f"{data.root} holds nothing to back up; check --data")
    make_folder(target.absolute())
    os.chmod(target, 0o700)
    try:
        with _snapshot(data, config, timeout_s) as snapshot:
            if snapshot is not None:
                _copy_tree(snapshot, target / "store")
        _copy_objects(
            open_objects(config.models.url or data.root / "models"),
            FolderObjects(target / "models"),
        )
        for name in _FILES:
            if (data.root / name).exists():
                _copy_file(data.root / name, target / name)
        files = {name: _digest(target / name) for name in _names(target)}
        facts = {
            "format": FORMAT,
            "version": understudy.__version__,
            "at_s": round(time.time(), 3),
            "files": files,
        }
        _sync_tree(target)
        write_file(target / _FACTS, json.dumps(facts, indent=1).encode())
        return verify_backup(target)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


def restore(
    source: Path, data: DataFolder, *, models: str = "", revoke_keys: bool = False
) -> Proof:
    """Verify a backup and restore it to a new folder, or one that holds at most a config file.

    `models`: the URL to restore models to, or "" for the data folder; `revoke_keys`: whether to
    revoke every key, since keys that were revoked after the backup are valid again.
    """
    proof = verify_backup(source)
    if source.resolve() in (data.root.resolve(), *data.root.resolve().parents):
        raise ConfigError(
            f"{data.root} is inside the backup {source}, which it would damage; pass a folder "
            "outside of it with --data"
        )
    staged = DataFolder(data.restoring)
    what = f"{_digest(source / _FACTS)[1]} {models} {revoke_keys}"
    # Before the first write to it: the folder may have another purpose.
    _check_target(data, _Restore(staged.root, what))
    make_folder(data.root)
    with FileLock(data.root / _RESTORE_LOCK, what=f"a restore to {data.root}"):
        progress = _Restore(staged.root, what)
        _check_target(data, progress)  # another restore may just have finished
        try:
            if not progress.stage:
                shutil.rmtree(staged.root, ignore_errors=True)
                make_folder(staged.root)
                _copy_to(staged, source, models)
                progress.reach("verified")
            if progress.stage == "verified":
                if signing_key(staged).exists():
                    _restart_journals(staged, models, revoke_keys=revoke_keys)
                progress.reach("ready")
        except BaseException:
            shutil.rmtree(staged.root, ignore_errors=True)
            raise
        # The signing key comes last: without it, a folder with models or keys is refused.
        names = [path.name for path in staged.root.iterdir() if path.name != _STAGE_FILE]
        for name in sorted(names, key=lambda name: name == signing_key(data).name):
            if name != CONFIG_FILE and (data.root / name).exists():
                raise ConfigError(
                    f"{data.root / name} was created after this restore was interrupted, and its "
                    "contents would be lost; move it elsewhere, then repeat the restore"
                )
            if not (data.root / name).exists():
                (staged.root / name).rename(data.root / name)
        sync_folder(data.root)
        shutil.rmtree(staged.root)
    return dataclasses.replace(proof, keys=0) if revoke_keys else proof


class _Restore:
    """How far a restore has come, in a file, so that one that was killed continues from there."""

    def __init__(self, folder: Path, what: str) -> None:
        """`what`: the backup and the options; another restore that was killed does not continue."""
        self._folder = folder
        self._what = what
        self.stage = ""
        """Empty, `verified` (copied and verified) or `ready` (to be moved to the data folder)."""
        with contextlib.suppress(OSError, ValueError):
            self.stage, before = (folder / _STAGE_FILE).read_text().split("\n")
            if before != what and self.stage == "ready":
                raise ConfigError(
                    f"a restore of another backup, or with other options, to {folder.parent} did "
                    "not finish; repeat that one first, or pass another folder with --data"
                )
            if before != what:
                self.stage = ""

    def reach(self, stage: str) -> None:
        """Note durably that this stage is reached."""
        write_file(self._folder / _STAGE_FILE, f"{stage}\n{self._what}".encode())
        self.stage = stage


def _check_target(data: DataFolder, progress: _Restore) -> None:
    """Raise ConfigError if a folder holds more than a config file and this unfinished restore."""
    if progress.stage == "ready" or not data.root.exists():
        return
    names = sorted(path.name for path in data.root.iterdir() if path.name not in _IN_TARGETS)
    if {"store", "models", signing_key(data).name} & set(names):
        raise ConfigError(
            f"{data.root} holds a deployment already; pass a folder that does not exist yet with "
            "--data"
        )
    # What came after an unfinished restore, such as a folder for logs, is kept.
    if names and not data.restoring.exists():
        raise ConfigError(
            f"{data.root} holds other files ({', '.join(names[:3])}); pass an empty folder, or one "
            "that does not exist yet, with --data"
        )


def _copy_to(staged: DataFolder, source: Path, models: str) -> None:
    """Copy a backup to a new folder and verify the copy."""
    if (source / "store").exists():
        _copy_tree(source / "store", staged.store)
    _copy_objects(FolderObjects(source / "models"), open_objects(models or staged.root / "models"))
    for name in _FILES:
        if (source / name).exists():
            _copy_file(source / name, staged.root / name)
    restore_last_start(staged.root, models=models)
    _sync_tree(staged.root)
    if _contents(staged, models) != _contents(DataFolder(source), ""):
        raise Corrupt(
            f"{staged.root.parent} differs from the backup {source}; check the disk and restore "
            "again"
        )


def _restart_journals(data: DataFolder, models: str, *, revoke_keys: bool) -> None:
    """Make machines that have read newer entries accept those of the backup."""
    opened = open_deployment(data, models=models)
    opened.keys.restart(revoke=revoke_keys)
    for game in {name.split("/")[1] for name in opened.objects.list("registry")}:
        opened.registry.restart(game)


def verify_backup(backup: Path) -> Proof:
    """Read every byte of a backup and return its figures.

    Raises Corrupt if a file is missing or changed, and ConfigError if the folder is not a backup.
    """
    try:
        facts = json.loads((backup / _FACTS).read_text())
        at_s = float(facts["at_s"])
        files = {str(name): list(digest) for name, digest in dict(facts["files"]).items()}
        if facts["format"] != FORMAT:
            raise ConfigError(
                f"{backup} has format {facts['format']!r}, but this version reads {FORMAT!r}; use "
                "the version that wrote it"
            )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{backup} is not a backup ({error}); pass a folder that 'understudy backup' created"
        ) from None
    for name, digest in files.items():
        if not (backup / name).is_file() or _digest(backup / name) != digest:
            raise Corrupt(f"{name} in {backup} is missing or was changed; create another backup")
    unknown = sorted(set(_names(backup)) - files.keys() - {_FACTS})
    # SQLite leaves files next to a database that was read.
    unknown = [name for name in unknown if not name.endswith(("-wal", "-shm", ".lock"))]
    if unknown:
        raise Corrupt(
            f"{unknown[0]} in {backup} is not part of the backup; remove it, or create another "
            "backup"
        )
    contents = _contents(DataFolder(backup), "")
    size = sum(size_bytes for size_bytes, _ in files.values())
    return Proof(*contents[:4], len(files), size, at_s, contents[4])


def _contents(data: DataFolder, models: str) -> tuple[int, int, int, int, tuple[str, ...]]:
    """Return how many steps, chunks, models and keys a folder holds, and what of them is damaged.

    Raises Corrupt if the store is damaged, and ConfigError if a secret is. Writes nothing.
    """
    steps = chunks = n_models = n_keys = 0
    damaged: list[str] = []
    if data.store.exists():
        totals = summary(audit_store(data.store, is_alone=True))
        if totals.corrupt or totals.duplicate_steps:
            raise Corrupt(
                f"the store in {data.root} is damaged: "
                f"{(*totals.corrupt, 'steps stored twice')[0]}; check the original with "
                "'understudy data verify', or use another backup"
            )
        steps = totals.steps
        chunks = totals.chunks
    if (data.root / "key").exists():
        check_key_id(data.root, read_key(data.root / "key"))
    if signing_key(data).exists():
        signer = Signer(read_key(signing_key(data)))
        trusted = {signer.key_id: signer.public}
        objects = open_objects(models or data.root / "models")
        keys = Keys(objects, trusted=trusted, signer=None, clock=SystemClock())
        n_keys = len(keys.all())
        damaged += ["keys"] if keys.damage() else []
        registry = Registry(objects, trusted=trusted)
        for game in registry.games():
            catalogue = registry.catalogue(game)
            n_models += len(catalogue.models)
            problems = registry.damage(game)
            damaged += [f"the {part} of {game}" for part in ("journal", "spec") if part in problems]
            for manifest in catalogue.models.values():
                try:
                    raw = registry.policy_bytes(manifest)
                except Corrupt:
                    raw = b""
                if hashlib.sha256(raw).hexdigest() != manifest.policy_sha256:
                    damaged.append(manifest.name)
    return steps, chunks, n_models, n_keys, tuple(damaged)


# --- Copying --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _snapshot(data: DataFolder, config: Config, timeout_s: float) -> Iterator[Path | None]:
    """Yield a snapshot of the store, taken here or by the process that has the store open."""
    if not data.has_store():
        yield None
        return
    folder = data.root / "snapshots"
    make_folder(folder)
    with FileLock(folder / ".lock", what=f"a backup of {data.root}"):
        delete_snapshots(folder)
        target = folder / secrets.token_hex(8)
        make_folder(target)
        try:
            if data.has_writer():
                send_request(data.requests, "snapshot", timeout_s=timeout_s, name=target.name)
            elif config.stream.url:
                # Frames that are only in a remote stream are not part of a backup.
                with open_own_store(data, config) as store:
                    store.back_up(target)
            else:
                with open_own_ingest(data, config) as role:
                    role.snapshot(target)
            yield target
        finally:
            shutil.rmtree(target, ignore_errors=True)


def delete_snapshots(folder: Path) -> None:
    """Delete what killed backups left; the caller holds the folder's lock."""
    for path in folder.iterdir():
        if path.is_dir() and _SNAPSHOT.fullmatch(path.name):
            shutil.rmtree(path)


def _copy_tree(source: Path, target: Path) -> None:
    for path in sorted(source.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            _copy_file(path, target / path.relative_to(source))


def _copy_file(source: Path, target: Path) -> None:
    make_folder(target.parent)
    shutil.copyfile(source, target)
    os.chmod(target, 0o600)


def _copy_objects(source: Objects, target: Objects) -> None:
    """Copy every object; journals first, since the objects they name were written before them."""
    for prefix in _PREFIXES:
        names = list(source.list(prefix))
        if prefix in _JOURNALS:
            names = list(_in_order(names, source))
        for name in names:
            raw = source.get(name)
            if raw is None:
                raise Corrupt(f"{name} was removed while it was copied; try again")
            if not target.create(name, raw) and target.get(name) != raw:
                raise Refused(
                    "taken",
                    f"{name} exists already with other contents; set models.url to an empty "
                    "location",
                )


def _in_order(names: list[str], source: Objects) -> Iterator[str]:
    """Yield journal entries in order; a missing one is part of what the backup says is damaged."""
    for folder in sorted({name.rpartition("/")[0] for name in names}):
        journal = Journal(source, folder)
        # An entry written during the listing may not be in the list.
        for number, raw in journal.read(last=journal.last_number()):
            if raw is not None:
                yield journal.object_name(number)


def _names(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


def _digest(path: Path) -> list[Any]:
    """Return size and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return [file.tell(), digest]


def _sync_tree(folder: Path) -> None:
    """Make everything in a folder durable."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)
