"""understudy up: run the platform."""

import contextlib
import json
import queue
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import click
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from understudy.backends.deployment import open_deployment
from understudy.cli.certificates import warnings
from understudy.cli.interrupts import INTERRUPTED, stop_signals
from understudy.cli.options import (
    config_option,
    console,
    data_option,
    examples,
    format_count,
    print_json,
)
from understudy.core.errors import ConfigError
from understudy.platform.config import FILE_NAME as CONFIG_FILE
from understudy.platform.config import (
    HERE,
    Config,
    backend_urls,
    location_changes,
    mask_secrets,
    read_last_start,
    resolve,
    save_last_start,
)
from understudy.platform.platform import GAME, DevelopmentKeys, Platform, RoleStatus
from understudy.platform.play_page import PAGES, browser_url, network_url_text, page_address


@click.command(
    epilog=examples(
        "understudy up --data D",
        "understudy up --data D --port 8600 --json-ready",
        "understudy up --data D --role gateway,ingest",
        "understudy up --data D --stream kinesis://games --store cassandra://db/games --models "
        "s3://bots",
    )
)
@config_option
@click.option(
    "--port",
    type=int,
    metavar="P",
    help="Port of the gateway; 0: any free port (default 8600).",
)
@click.option(
    "--host",
    metavar="HOST",
    help="Address that the gateway listens on (default 127.0.0.1: this machine only).",
)
@click.option(
    "--role",
    "roles",
    metavar="ROLES",
    help="Run only these of gateway,ingest,learner (default: all).",
)
@click.option(
    "--stream",
    "stream_url",
    metavar="URL",
    help="Where the stream is: kinesis://STREAM, kafka://HOST:PORT/TOPIC, or the word `file` for "
    "the data folder.",
)
@click.option(
    "--store",
    "store_url",
    metavar="URL",
    help="Where the store is: cassandra://HOST:PORT/KEYSPACE, or the word `local` for the data "
    "folder.",
)
@click.option(
    "--models",
    "models_url",
    metavar="URL",
    help="Where models are: s3://BUCKET/PATH, or the word `folder` for the data folder.",
)
@click.option(
    "--ingest", "engine", type=click.Choice(["native", "spark"]), help="The ingest engine."
)
@click.option(
    "--json-ready", is_flag=True, help="Print one JSON line when ready: url, admin_key, key, pages."
)
@data_option
def up(
    data_text: str | None,
    file: Path | None,
    port: int | None,
    host: str | None,
    roles: str | None,
    stream_url: str | None,
    store_url: str | None,
    models_url: str | None,
    engine: str | None,
    json_ready: bool,
) -> int:
    """Run the platform: gateway, ingest and learner as processes that are restarted on a crash.

    Ctrl-C or SIGTERM stops the platform without loss: the gateway accepts no more frames, ingest
    stores the acknowledged ones, the learner saves its state. A second Ctrl-C exits immediately,
    which also loses nothing that was acknowledged.

    The URLs of stream, store and models and the ingest engine are saved in the data folder: later
    starts and other commands use them until they are changed. `file`, `local` and `folder` switch
    back to the data folder, the default.
    """
    flags = {
        "data": data_text,
        "gateway.port": port,
        "gateway.host": host,
        "roles": roles,
        "stream.url": stream_url,
        "store.url": store_url,
        "models.url": models_url,
        "ingest.engine": engine,
    }
    config = resolve(flags, file=file).config
    out = console(as_json=json_ready)
    request = StopRequest()
    view = _View(out, is_json=config.log.json)
    with (
        contextlib.closing(view),
        request,
        Platform(config, on_state_change=view.show_state, log=view.log) as platform,
    ):
        # Printed once the config has been checked, and before anything starts.
        _print_urls(config, out)
        for warning in warnings(config, now_s=time.time()):
            out.print(f"[yellow]![/] {escape(warning)}", soft_wrap=True)
        view.statuses = platform.supervisor.statuses
        is_announced = False

        def each() -> None:
            nonlocal is_announced
            if not is_announced and platform.supervisor.is_ready:
                is_announced = True
                _save_urls(config, out)
                _announce(platform, out, json_ready=json_ready)
                view.begin()
            view.refresh()

        try:
            platform.supervisor.run(request.stop, each)
        except ConfigError as error:
            view.drop(str(error))
            raise
        finally:
            view.end()
        finished = platform.supervisor.stop(request.at_once)
    if request.number == signal.SIGINT:
        return INTERRUPTED
    return 0 if finished else 1


def _print_urls(config: Config, out: Console) -> None:
    """Print the remote stream, store and models, and what changed since the last start."""
    for change in location_changes(read_last_start(config.folder.root), config):
        out.print(f"[yellow]![/] {escape(change)}", soft_wrap=True)
    for name, url in backend_urls(config).items():
        if url:
            out.print(f"{name.partition('.')[0]} at {escape(mask_secrets(url))}", soft_wrap=True)


def _save_urls(config: Config, out: Console) -> None:
    """Save the URLs for later commands on this folder; warn if their config overrides one."""
    try:
        save_last_start(config)
        others = backend_urls(resolve({"data": config.data}).config)
    except (ConfigError, OSError) as error:
        out.print(
            "[yellow]![/] could not save the URLs of stream, store and models: "
            f"{escape(str(error))}",
            soft_wrap=True,
        )
        return
    for name, url in backend_urls(config).items():
        if others[name] != url:
            warning = (
                f"other commands on this folder use {name} of its {CONFIG_FILE} or of the "
                "environment, not of this command"
            )
            out.print(
                f"[yellow]![/] {escape(warning)}: "
                f"{escape(mask_secrets(others[name])) or HERE[name]}",
                soft_wrap=True,
            )


class StopRequest:
    """Collects stop signals: the first stops gracefully, the second immediately."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.at_once = threading.Event()
        self.number = 0

    def __enter__(self) -> "StopRequest":
        self._before = {number: signal.signal(number, self._handle) for number in stop_signals()}
        return self

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.stop.is_set():
            self.at_once.set()
        self.number = self.number or number
        self.stop.set()

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _announce(platform: Platform, out: Console, *, json_ready: bool) -> None:
    url = platform.url
    keys = platform.keys
    pages = dict[str, str]()
    if url is not None and keys is not None:
        # Pages to play registered games in a browser with the development key.
        games = open_deployment(platform.data, models=platform.config.models.url).registry.games()
        pages = {game: page_address(url, game, key=keys.key) for game in PAGES if game in games}
    if json_ready:
        fields = {**platform.ready_line(), "url": url and browser_url(url), "pages": pages}
        print_json(fields)
    elif url is not None:
        others = network_url_text(url, platform.config.gateway.hosts)
        _print_ready(out, browser_url(url), keys, pages=pages, others=others)


def _print_ready(
    out: Console,
    url: str,
    keys: DevelopmentKeys | None,
    *,
    pages: Mapping[str, str],
    others: str = "",
) -> None:
    out.print(
        f"[bold]ready[/] at {url}; Ctrl-C stops the platform without data loss", soft_wrap=True
    )
    if others:
        out.print(escape(others), soft_wrap=True)
    if keys is None:
        out.print("next: understudy keys create --scopes play --game GAME", soft_wrap=True)
        return
    for game in PAGES:
        page = pages.get(game, f"run 'understudy play {game} --web' on this folder for the URL")
        out.print(f"play {game} in a browser: {escape(page)}", soft_wrap=True)
    out.print(f"\nexport UNDERSTUDY_URL={url}\nexport UNDERSTUDY_KEY={keys.key}", soft_wrap=True)
    out.print(f"\n[dim]# admin key: {keys.admin_key}[/]", soft_wrap=True)
    out.print("[dim]# an example game; with the key above it registers itself:[/]")
    out.print(GAME, markup=False, soft_wrap=True)


class _Lines:
    """Writes lines to standard error without blocking; when its queue is full, drops new lines."""

    def __init__(self) -> None:
        self._queue: queue.Queue[str | None] = queue.Queue(maxsize=1000)
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def put(self, line: str | None) -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(line)

    def _write(self) -> None:
        while (line := self._queue.get()) is not None:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(f"{line}\n")
                sys.stderr.flush()

    def close(self) -> None:
        self.put(None)
        self._thread.join(1.0)


class _View:
    """Shows roles as a table in a terminal, as a line per change elsewhere."""

    def __init__(self, out: Console, *, is_json: bool) -> None:
        """`is_json`: also a terminal shows the roles' log events as JSON lines."""
        self._out = out
        self._is_json = is_json
        self._lines = None if out.is_terminal else _Lines()
        self._live: Live | None = None
        self._held: dict[str, str] | None = {}
        """Only during startup: the last line of each role, which may repeat the command's error."""
        self.statuses: dict[str, RoleStatus] = {}
        self._next_s = 0.0

    def begin(self) -> None:
        """Call when all roles run: held lines are printed, and a terminal shows the table."""
        self._release()
        self._held = None
        if self._out.is_terminal:
            self._live = Live(console=self._out, auto_refresh=False, transient=True)
            self._live.start()

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show_state(self, status: RoleStatus, text: str) -> None:
        """Show a role's change of state; its last line is omitted if the text repeats it."""
        name = status.role.name
        if self._held and (line := self._held.get(name)) and line[:300] in status.last_error:
            del self._held[name]
        self._release(name)
        if self._lines is not None:
            self._lines.put(f"{name:<8} {text}")
            return
        colour = {"waiting": "yellow", "running": "green"}.get(status.state, "dim")
        self._out.print(f"[{colour}]{name:<8}[/] {escape(text)}", soft_wrap=True)

    def log(self, role: str, line: str) -> None:
        """Show a role's line of standard error: unchanged for programs, as text in a terminal."""
        # Not shown twice: the line is the error that was shown when the role ended.
        status = self.statuses.get(role)
        if status is not None and line and line[:300] in status.last_error:
            return
        self._release(role)
        if self._held is None:
            self._put(role, line)
        else:
            self._held[role] = line

    def drop(self, error: str) -> None:
        """Discard the last line of a role if it equals the error that ends the command."""
        self._held = {role: line for role, line in (self._held or {}).items() if line != error}

    def _release(self, role: str | None = None) -> None:
        for name in list(self._held or ()):
            if (
                role in (None, name)
                and self._held
                and (line := self._held.pop(name, None)) is not None
            ):
                self._put(name, line)

    def _put(self, role: str, line: str) -> None:
        if self._lines is not None:
            self._lines.put(line)
        else:
            text = line if self._is_json else _text(line)
            self._out.print(f"[dim]{role:<8} {escape(text[:400])}[/]", soft_wrap=True)

    def refresh(self) -> None:
        if self._live is not None and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + 0.5
            self._live.update(_table(self.statuses), refresh=True)

    def close(self) -> None:
        self._release()
        self.end()
        if self._lines is not None:
            self._lines.close()


def _text(line: str) -> str:
    """A JSON event as readable text; any other line unchanged."""
    try:
        fields = json.loads(line)
        event = fields.pop("event")
    except (ValueError, AttributeError, KeyError, TypeError):
        return line
    rest = {name: value for name, value in fields.items() if name not in ("timestamp", "level")}
    return " ".join([str(event), *(f"{name}={value}" for name, value in rest.items())])


def _table(statuses: dict[str, RoleStatus]) -> Table:
    table = Table("role", "state", "since", "restarts", "rates per s", "lag", min_width=64)
    for status in statuses.values():
        rates = ", ".join(
            f"{format_count(rate)} {name}" for name, rate in status.rates().items() if rate
        )
        lag_s = status.report.get("lag_s")
        if lag_s is not None and status.state == "silent":
            lag_s += status.silent_s
        table.add_row(
            status.role.name,
            status.state,
            f"{max(0, time.time() - status.since_s):.0f} s",
            str(status.restarts or ""),
            rates,
            "" if lag_s is None else f"{lag_s * 1000:.0f} ms",
        )
    return table
