"""understudy ingest: follow a stream and store each step once."""

import contextlib
import dataclasses
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import click
from rich.console import Console

from understudy.backends.data import DataFolder, data_folder
from understudy.cli.interrupts import INTERRUPTED
from understudy.cli.options import (
    common_options,
    console,
    count_of,
    examples,
    finish,
    results,
    store_option,
)
from understudy.core.errors import ConfigError
from understudy.experience.intake import BACKUP_FILE, RESTORING
from understudy.platform.children import log_to_stderr
from understudy.platform.config import FILE_NAME, Config, mask_secrets, resolve
from understudy.platform.ingest import open_ingest

_OF_DATA_FOLDERS = {
    "key",
    "signing.key",
    "models",
    "spool",
    "store",
    "stream",
    FILE_NAME,
    BACKUP_FILE,
    RESTORING,
}
"""A folder with one of these is a data folder, or is rejected with a reason of its own."""
_OF_SYSTEMS = {"lost+found", ".DS_Store"}
"""Names of operating systems, which may be in an empty folder."""
_INTERRUPTED = (
    b"interrupted; steps that are not stored yet stay in the stream until the next start\n"
)


@click.command(
    epilog=examples(
        "understudy ingest --data D",
        "understudy ingest --data D --keep-days 90",
        "understudy ingest --data D --until-empty --json",
        "understudy ingest --data D --engine spark --stream kafka://HOST/TOPIC --store "
        "cassandra://HOST/KEYSPACE",
    )
)
@click.option("--until-empty", is_flag=True, help="Store what is in the stream, then exit.")
@click.option(
    "--retention",
    "retention_s",
    type=float,
    help="Seconds that a local stream keeps frames after they are stored (default: as in the "
    "config, 3600).",
)
@click.option(
    "--keep-days",
    type=float,
    help="Expire steps in the local store after this many days (default: as in the config, never).",
)
@click.option(
    "--stream",
    "stream_url",
    metavar="URL",
    help="kinesis://STREAM, kafka://HOST:PORT/TOPIC, or file (default: the deployment's own).",
)
@store_option
@click.option(
    "--engine", type=click.Choice(["native", "spark"]), help="The built-in service, or a Spark job."
)
@click.option(
    "--master", metavar="MASTER", help="Spark master, such as local[2] or spark://HOST:7077."
)
@common_options
def ingest(data_text: str | None, as_json: bool, until_empty: bool, **flags: Any) -> int:
    """Follow a stream and store each step exactly once.

    Ctrl-C or SIGTERM stores what is in the stream, for at most 15 seconds, and exits. A second
    signal exits immediately; nothing is lost, because the rest stays in the stream.
    """
    data = data_folder(data_text)
    out = console(as_json=as_json)
    stop = threading.Event()
    config = _config(data_text, flags)
    log_to_stderr(as_json=not out.is_terminal)
    _check_folder(data, is_remote=bool(config.stream.url), out=out)
    # Signals are handled before the store opens, so that an early stop drains, too.
    signals = contextlib.nullcontext() if until_empty else _stopped_by_signals(stop)
    with signals, open_ingest(config.folder, config) as role:
        if until_empty:
            role.store_all()
        else:
            stream = mask_secrets(config.stream.url) or data.stream
            out.print(f"following {stream}; Ctrl-C drains and exits", soft_wrap=True, markup=False)
            role.run(stop)
        stats = role.service.stats
    fields = {
        "steps": stats.steps,
        "frames": stats.frames,
        "fates": dict(stats.fates),
        "refusals": dict(stats.refusals),
    }
    results(as_json=as_json).print(
        f"stored {count_of(stats.steps, 'step')} of {count_of(stats.frames, 'frame')}; "
        f"rejected {sum(stats.refusals.values())}"
        + "".join(f", {reason} {count}" for reason, count in stats.refusals.items())
    )
    return finish({**fields, **role.spark_figures()}, as_json=as_json)


def _check_folder(data: DataFolder, *, is_remote: bool, out: Console) -> None:
    """Raise ConfigError unless the folder is a data folder or empty; create a remote stream's."""
    if data.root.is_dir():
        names = sorted({path.name for path in data.root.iterdir()} - _OF_SYSTEMS)
        if names and not _OF_DATA_FOLDERS & set(names):
            raise ConfigError(
                f"{data.root} is not a data folder: it holds other files ({', '.join(names[:3])}); "
                "pass the folder of the recorded steps with --data, or an empty one"
            )
    elif is_remote:
        data.root.mkdir(parents=True)
        out.print(f"created {data.root}", soft_wrap=True, markup=False)
    else:
        raise ConfigError(
            f"{data.root} does not exist, so it has no stream to store; pass the folder of the "
            "recorded steps with --data, or create it first if a game is to record into it"
        )


def _config(data_text: str | None, flags: dict[str, Any]) -> Config:
    """The config from flags, environment and file; only what ingest needs is checked."""
    names = {
        "stream_url": "stream.url",
        "store_url": "store.url",
        "engine": "ingest.engine",
        "master": "ingest.master",
        "retention_s": "ingest.retention_s",
        "keep_days": "ingest.keep_days",
    }
    overrides = {name: flags[flag] for flag, name in names.items()}
    config = dataclasses.replace(
        resolve({"data": data_text, **overrides}).config, roles=("ingest",)
    ).check()
    if flags["master"] is not None and config.ingest.engine != "spark":
        raise ConfigError(
            "--master needs the Spark engine, but ingest.engine is native; omit it, or give "
            "--engine spark"
        )
    if flags["retention_s"] is not None and config.stream.url:
        raise ConfigError(
            "--retention applies to a stream in the data folder only; omit it: for a remote "
            "stream, see docs/kinesis.md and docs/kafka.md"
        )
    return config


@contextlib.contextmanager
def _stopped_by_signals(stop: threading.Event) -> Iterator[None]:
    """Set `stop` on the first stop signal; on the second, exit at once, as `kill -9` would."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            with contextlib.suppress(OSError):  # the terminal may be closed
                os.write(2, _INTERRUPTED)
            # No cleanup, whatever is still pending; Spark's processes end with this one.
            os._exit(INTERRUPTED)
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
