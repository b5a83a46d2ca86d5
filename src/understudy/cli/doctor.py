"""understudy doctor: checks whether this machine and a data folder are fit for the platform."""

import contextlib
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import click

from understudy.backends.addresses import open_store, open_stream
from understudy.backends.data import DataFolder, data_folder, stored_schemas
from understudy.backends.deployment import (
    has_deployment,
    inspect_deployment,
    signing_key,
    spec_registry,
)
from understudy.backends.local import open_file_stream, open_view
from understudy.backends.specs import RegistrySpecs, games_without_spec
from understudy.cli.certificates import certificates, check_certificate
from understudy.cli.deployed import waiting_for_spec
from understudy.cli.options import common_options, console, count_of, examples, finish
from understudy.client.spool import count_spooled
from understudy.core.errors import ConfigError, StorageFailed, UnderstudyError
from understudy.core.log import sync_data
from understudy.core.plural import plural
from understudy.experience.intake import check_key_id, read_key, why_unusable
from understudy.platform.config import Config, mask_secrets, resolve
from understudy.ports import DAMAGED_STREAM

Colour = Literal["green", "yellow", "red"]
_MARKS = {"green": "[green]ok  [/]", "yellow": "[yellow]note[/]", "red": "[red]BAD [/]"}
_NEEDED = (
    "numpy",
    "safetensors",
    "urllib3",
    "cryptography",
    "click",
    "rich",
    "gymnasium",
    "msgspec",
    "structlog",
)
_FREE_BYTES = 1024**3


@dataclass(frozen=True, slots=True)
class DoctorCheck:
    """A line of the output: what was checked, the result, and the next step if one is needed."""

    name: str
    colour: Colour
    result: str
    next: str = ""


@click.command(epilog=examples("understudy doctor", "understudy doctor --data D --json"))
@common_options
def doctor(data_text: str | None, as_json: bool) -> int:
    """Check this machine and a data folder; `note` and `BAD` lines name a fix. Exits 1 on `BAD`."""
    data = data_folder(data_text) if data_text or os.environ.get("UNDERSTUDY_DATA") else None
    out = console(as_json=as_json)
    checks = []
    for check in _checks(data, data_text):
        checks.append(check)
        advice = f"  → {check.next}" if check.next else ""
        out.print(f"{_MARKS[check.colour]} {check.name:<15} {check.result}{advice}", soft_wrap=True)
    code = 1 if any(check.colour == "red" for check in checks) else 0
    return finish(
        {"checks": [asdict(check) for check in checks], "ok": code == 0}, as_json=as_json, code=code
    )


def _checks(data: DataFolder | None, data_text: str | None) -> Iterator[DoctorCheck]:
    """Run every check; an unreadable config is a failed check."""
    config = Config()
    if data is not None:
        try:
            config = resolve({"data": data_text}).config
            config.check()
        except ConfigError as error:
            yield DoctorCheck("config", "red", str(error), "run: understudy config check")
    yield DoctorCheck("python", "green", platform.python_version())
    if sys.platform == "win32":
        advice = "games can record here; run the platform on Linux or macOS"
        yield DoctorCheck("system", "yellow", platform.platform(), advice)
    else:
        yield DoctorCheck("system", "green", platform.platform())
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        yield DoctorCheck(
            "packages", "red", f"missing {', '.join(missing)}", "pip install 'understudy[platform]'"
        )
    else:
        yield DoctorCheck("packages", "green", f"all {len(_NEEDED)} are installed")
    yield from _disk(data.root if data is not None else Path(tempfile.gettempdir()))
    if data is not None:
        yield from _certificates(config)
        if not data.root.exists():
            yield DoctorCheck(
                "data folder",
                "yellow",
                f"{data.root} does not exist",
                f"check --data, or create it: understudy up --data {data.root}",
            )
            return
        if reason := why_unusable(data.root):
            yield DoctorCheck("data folder", "red", reason)  # the message names the next step
            return
        stream = config.stream.url
        store = config.store.url
        models = config.models.url
        yield from _key_files(data)
        yield from _stream(data, stream) if stream else _own_stream(data)
        yield from _store(data, store, models) if store else _folder(data)
        yield from _models(data, models)


def _disk(where: Path) -> Iterator[DoctorCheck]:
    while not where.exists():
        where = where.parent
    free = shutil.disk_usage(where).free
    yield DoctorCheck(
        "free disk",
        "green" if free >= _FREE_BYTES else "red",
        f"{free / 1024**3:.1f} GiB at {where}",
        ""
        if free >= _FREE_BYTES
        else "free disk space: the stream stops acknowledging when the disk is full",
    )
    times_s = []
    try:
        with tempfile.NamedTemporaryFile(dir=where, prefix=".understudy-doctor-") as file:
            for _ in range(9):
                began_s = time.perf_counter()
                os.write(file.fileno(), bytes(16384))
                sync_data(file.fileno())
                times_s.append(time.perf_counter() - began_s)
    except OSError as error:
        yield DoctorCheck(
            "writing",
            "red",
            f"{where}: {error.strerror}",
            "give a writable folder with --data",
        )
        return
    took_ms = sorted(times_s)[4] * 1000
    slow = took_ms > 20
    advice = "acknowledgements wait for this; a local SSD is faster" if slow else ""
    yield DoctorCheck(
        "sync of 16 KiB", "yellow" if slow else "green", f"{took_ms:.2f} ms (median of 9)", advice
    )


def _certificates(config: Config) -> Iterator[DoctorCheck]:
    for path in certificates(config):
        is_valid, advice = check_certificate(path, now_s=time.time())
        colour: Colour = "red" if not is_valid else "yellow" if advice else "green"
        yield DoctorCheck("certificate", colour, advice or f"{path} is valid")


def _folder(data: DataFolder) -> Iterator[DoctorCheck]:
    if not data.has_store():
        yield DoctorCheck(
            "store",
            "yellow",
            f"none in {data.root}",
            f"understudy up --data {data.root}",
        )
        return
    yield DoctorCheck(
        "writer",
        "green",
        "a process has the store open" if data.has_writer() else "no process has the store open",
    )
    try:
        with open_view(data.store) as view:
            damage = view.damage()
            arrivals = view.next_arrival - 1
            lost = view.counts().quarantined.get(DAMAGED_STREAM, 0)
    except StorageFailed as error:
        yield DoctorCheck("store", "red", str(error))  # the message names the next step
        return
    except (UnderstudyError, OSError) as error:
        yield DoctorCheck("store", "red", str(error), f"understudy data verify --data {data.root}")
        return
    if damage:
        yield DoctorCheck("store", "red", f"database: {damage}", "restore the folder from a backup")
    else:
        yield DoctorCheck(
            "store", "green", f"the database is intact; {arrivals} frames and events arrived so far"
        )
    if lost:
        yield DoctorCheck(
            "lost frames",
            "red",
            f"{count_of(lost, 'entry', 'entries')} of the stream {plural(lost, 'was', 'were')} "
            "damaged before being stored",
            f"understudy data verify --data {data.root}",
        )
    yield from _unsent_frames(data)


def _key_files(data: DataFolder) -> Iterator[DoctorCheck]:
    for path in (data.root / "key", signing_key(data)):
        if path.exists():
            try:
                key = read_key(path)
                if path.name == "key":
                    check_key_id(data.root, key)
            except (ConfigError, OSError) as error:
                yield DoctorCheck(path.name, "red", str(error))  # the message names the next step
            else:
                yield DoctorCheck(path.name, "green", "intact")
        elif path.name == "key" and (data.has_store() or data.stream.exists()):
            advice = "restore it from a backup: recording and erasing need it"
            yield DoctorCheck("key", "red", f"{path} is missing", advice)


def _own_stream(data: DataFolder) -> Iterator[DoctorCheck]:
    if not data.stream.exists():
        return
    try:
        with contextlib.closing(open_file_stream(data.stream)) as stream:
            damage = stream.damage()
            partitions = len(stream.partitions())
    except OSError as error:
        advice = "let this user read the stream's folder"
        yield DoctorCheck("stream", "red", f"cannot be read: {error}", advice)
        return
    if damage:
        entries = count_of(len(damage), "damaged entry", "damaged entries")
        result = f"{entries}: {'; '.join(damage[:3])}"
        advice = (
            "acknowledged frames in them are lost unless the files are restored from a copy of the "
            "disk; without them, ingest skips the damaged entries"
        )
        yield DoctorCheck("stream", "red", result, advice)
    else:
        yield DoctorCheck(
            "stream", "green", f"{count_of(partitions, 'partition')}; every entry is intact"
        )


def _stream(data: DataFolder, url: str) -> Iterator[DoctorCheck]:
    try:
        with contextlib.closing(open_stream(url, data)) as stream:
            partitions = count_of(len(stream.partitions()), "partition")
            yield DoctorCheck("stream", "green", f"{partitions} at {mask_secrets(url)}")
    except UnderstudyError as error:
        yield DoctorCheck("stream", "red", str(error))  # the message names the next step


def _store(data: DataFolder, url: str, models: str) -> Iterator[DoctorCheck]:
    try:
        specs = RegistrySpecs(inspect_deployment(data, models=models).registry)
        with contextlib.closing(open_store(url, specs=specs)) as store:
            store.tail(None, max_items=1, wait_s=0.0)
            yield DoctorCheck("store", "green", f"responds at {mask_secrets(url)}")
    except UnderstudyError as error:
        yield DoctorCheck("store", "red", str(error))
    yield from _unsent_frames(data)


def _unsent_frames(data: DataFolder) -> Iterator[DoctorCheck]:
    sessions = count_spooled(data.spool)
    if sessions:
        yield DoctorCheck(
            "spool",
            "yellow",
            f"unsent frames of {count_of(sessions, 'session')}",
            f"understudy data verify --data {data.root}",
        )
    else:
        yield DoctorCheck("spool", "green", "empty")


def _models(data: DataFolder, models: str) -> Iterator[DoctorCheck]:
    try:
        stored = stored_schemas(data)
        is_deployed = has_deployment(data, models=models)
        deployment = inspect_deployment(data, models=models) if is_deployed else None
        registry = deployment.registry if deployment else spec_registry(data, models=models)
        games = sorted({*registry.games(), *stored})
        damaged = [
            f"{game} ({part}): {damage}"
            for game in games
            for part, damage in registry.damage(
                game, every=True, schemas=stored.get(game, ())
            ).items()
        ]
        if deployment is not None and (damage := deployment.keys.damage()):
            damaged.append(f"keys: {damage}")
        without_spec = games_without_spec(data, RegistrySpecs(registry))
    except (UnderstudyError, OSError) as error:
        yield DoctorCheck("models", "red", str(error))  # the message names the next step
        return
    if without_spec:
        yield DoctorCheck("specs", "yellow", *waiting_for_spec(without_spec))
    if damaged:
        yield DoctorCheck("models", "red", "; ".join(damaged))
    elif deployment is not None:
        yield DoctorCheck(
            "models",
            "green",
            f"{count_of(len(games), 'game')}, {count_of(len(deployment.keys.all()), 'key')}; "
            "journals and models are intact, and contain every entry that this machine has read",
        )
