"""understudy ingest."""

import signal
import threading
from types import FrameType

import click

from understudy.app.roles.ingest import RETENTION_S, IngestRole
from understudy.app.roles.logs import log_to_stderr
from understudy.cli.options import console, count, data_option, examples, finish, folder, json_option


@click.command(
    epilog=examples(
        "understudy ingest --data D",
        "understudy ingest --data D --keep-days 90",
        "understudy ingest --data D --until-empty --json",
    )
)
@click.option("--until-empty", is_flag=True, help="Store what is in the stream now, then end.")
@click.option("--retention", "retention_s", default=RETENTION_S, show_default=True,
              help="Seconds the stream keeps what is stored.")  # fmt: skip
@click.option("--keep-days", type=float, help="Expire stored steps older than this (default: keep them for ever).")
@data_option
@json_option
def ingest(data_text: str | None, as_json: bool, until_empty: bool, retention_s: float, keep_days: float | None) -> int:
    """Follow the data folder's stream and store each step exactly once; Ctrl-C or SIGTERM drains and ends."""
    data, out, stop = folder(data_text), console(as_json=as_json), threading.Event()
    log_to_stderr(as_json=not out.is_terminal)
    data.root.mkdir(parents=True, exist_ok=True)
    keep_s = None if keep_days is None else keep_days * 86_400
    if not until_empty:
        _stop_on_signals(stop)  # before the store opens: a stop asked for meanwhile drains too
    with IngestRole(data, retention_s=retention_s, keep_s=keep_s) as role:
        if until_empty:
            role.service.drain()
        else:
            out.print(f"following {data.stream}; Ctrl-C drains and ends")
            role.run(stop)
        stats = role.service.stats
    fields = {
        "steps": stats.steps,
        "frames": stats.frames,
        "fates": dict(stats.fates),
        "refusals": dict(stats.refusals),
    }
    if not as_json:
        out.print(f"stored {count(stats.steps)} steps of {count(stats.frames)} frames; refused {dict(stats.refusals)}")
    return finish(fields, as_json=as_json)


def _stop_on_signals(stop: threading.Event) -> None:
    def ask(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGINT, ask)
    signal.signal(signal.SIGTERM, ask)
