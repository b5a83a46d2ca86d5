"""understudy up."""

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
from understudy.cli.interrupts import INTERRUPTED, stop_signals
from understudy.cli.options import config_option, console, count, data_option, examples
from understudy.core.errors import ConfigError
from understudy.platform.config import FILE_NAME as CONFIG_FILE
from understudy.platform.config import (
    HERE,
    Config,
    hidden,
    keep_used,
    moved,
    read_used,
    resolve,
    used_by,
)
from understudy.platform.platform import GAME, DevelopmentKeys, Platform, RoleStatus
from understudy.platform.play_page import PAGES, for_others, openable, page_address


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
    help="Where the gateway listens; 0: any free port (default 8600).",
)
@click.option(
    "--host",
    metavar="HOST",
    help="The address it listens on (default 127.0.0.1: this machine only).",
)
@click.option(
    "--role", "roles", metavar="ROLES", help="Only these of gateway,ingest,learner (default: all)."
)
@click.option(
    "--stream",
    "stream_url",
    metavar="URL",
    help="kinesis://STREAM, kafka://HOST:PORT/TOPIC, or file.",
)
@click.option(
    "--store", "store_url", metavar="URL", help="cassandra://HOST:PORT/KEYSPACE, or local."
)
@click.option("--models", "models_url", metavar="URL", help="s3://BUCKET/PATH, or folder.")
@click.option(
    "--ingest", "engine", type=click.Choice(["native", "spark"]), help="What stores the stream."
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
    """Run the platform: gateway, ingest and learner, each in a process that is restarted when it
    crashes.

    Ctrl-C or SIGTERM stops it without losing anything: the gateway takes no more, what it
    acknowledged is stored, the learner keeps what it learned. A second Ctrl-C ends it at once,
    which loses nothing that was acknowledged either.

    Where stream, store and models lie, and what stores, is kept in the data folder: later starts
    and other commands go on with it until they are told otherwise. `file`, `local` and `folder`
    mean: in the data folder, where they begin.
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
    asked = Asked()
    _say_where(config, out)
    view = _View(out, is_json=config.log.json)
    with (
        contextlib.closing(view),
        asked,
        Platform(config, tell=view.tell, log=view.log) as platform,
    ):
        view.standings = platform.supervisor.standings
        is_told = False

        def each() -> None:
            nonlocal is_told
            if not is_told and platform.supervisor.is_ready:
                is_told = True
                _keep_where(config, out)
                _say_ready(platform, out, json_ready=json_ready)
                view.begin()
            view.refresh()

        try:
            platform.supervisor.run(asked.stop, each)
        except ConfigError as error:
            view.drop(str(error))
            raise
        finally:
            view.end()
        finished = platform.supervisor.stop(asked.at_once)
    if asked.number == signal.SIGINT:
        return INTERRUPTED
    return 0 if finished else 1


def _say_where(config: Config, out: Console) -> None:
    """Name what lies elsewhere, and what lay elsewhere at the last start."""
    for said in moved(read_used(config.folder.root), config):
        out.print(f"[yellow]![/] {escape(said)}", soft_wrap=True)
    for name, url in used_by(config).items():
        if url:
            out.print(f"{name.partition('.')[0]} at {escape(hidden(url))}", soft_wrap=True)


def _keep_where(config: Config, out: Console) -> None:
    """From now on every command on this folder looks where this platform writes; where one will
    not, say so."""
    try:
        keep_used(config)
        others = used_by(resolve({"data": config.data}).config)
    except (ConfigError, OSError) as error:
        out.print(
            f"[yellow]![/] where stream, store and models are was not kept: {escape(str(error))}",
            soft_wrap=True,
        )
        return
    for name, url in used_by(config).items():
        if others[name] != url:
            said = (
                f"other commands on this folder go by {name} of its {CONFIG_FILE}, or of the "
                "environment"
            )
            out.print(
                f"[yellow]![/] {escape(said)}: {escape(hidden(others[name])) or HERE[name]}",
                soft_wrap=True,
            )


class Asked:
    """Being asked to stop: the first time gently, the second time at once."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.at_once = threading.Event()
        self.number = 0

    def __enter__(self) -> "Asked":
        self._before = {one: signal.signal(one, self._ask) for one in stop_signals()}
        return self

    def _ask(self, number: int, _frame: FrameType | None) -> None:
        if self.stop.is_set():
            self.at_once.set()
        self.number = self.number or number
        self.stop.set()

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _say_ready(platform: Platform, out: Console, *, json_ready: bool) -> None:
    url = platform.url
    keys = platform.keys
    pages = dict[str, str]()
    if url is not None and keys is not None:
        # Where games are played in a browser with the development key: those that are registered
        # and have a page.
        games = open_deployment(platform.data, models=platform.config.models.url).registry.games()
        pages = {game: page_address(url, game, key=keys.key) for game in PAGES if game in games}
    if json_ready:
        fields = {**platform.ready_line(), "url": url and openable(url), "pages": pages}
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()
    elif url is not None:
        others = for_others(url, platform.config.gateway.hosts)
        _print_ready(out, openable(url), keys, pages=pages, others=others)


def _print_ready(
    out: Console,
    url: str,
    keys: DevelopmentKeys | None,
    *,
    pages: Mapping[str, str],
    others: str = "",
) -> None:
    out.print(f"[bold]ready[/] at {url}; Ctrl-C stops it without losing anything", soft_wrap=True)
    if others:
        out.print(escape(others), soft_wrap=True)
    if keys is None:
        out.print("next: understudy keys create --scopes play --game GAME", soft_wrap=True)
        return
    for game in PAGES:
        where = pages.get(game, f"'understudy play {game} --web' on this folder says where")
        out.print(f"play {game} in a browser: {escape(where)}", soft_wrap=True)
    out.print(f"\nexport UNDERSTUDY_URL={url}\nexport UNDERSTUDY_KEY={keys.key}", soft_wrap=True)
    out.print(f"\n[dim]# the admin's key: {keys.admin_key}[/]", soft_wrap=True)
    out.print("[dim]# a game to start from; with the key above it registers itself:[/]")
    out.print(GAME, markup=False, soft_wrap=True)


class _Lines:
    """Lines on their way to standard error; while they are not read the newest are dropped, and
    nothing waits."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[str | None] = queue.Queue(maxsize=1000)
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def put(self, line: str | None) -> None:
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(line)

    def _write(self) -> None:
        while (line := self._waiting.get()) is not None:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(f"{line}\n")
                sys.stderr.flush()

    def close(self) -> None:
        self.put(None)
        self._thread.join(1.0)


class _View:
    """Roles as a table in a terminal, as a line for each change elsewhere."""

    def __init__(self, out: Console, *, is_json: bool) -> None:
        """`is_json`: roles' events stay lines of JSON in a terminal, too."""
        self._out = out
        self._is_json = is_json
        self._lines = None if out.is_terminal else _Lines()
        self._live: Live | None = None
        self._held: dict[str, str] | None = {}
        """Until everything runs: the last line of each role, which may be the error that ends
        the command."""
        self.standings: dict[str, RoleStatus] = {}
        self._next_s = 0.0

    def begin(self) -> None:
        """Everything runs: from now on a table, where there is a terminal."""
        self._release()
        self._held = None
        if self._out.is_terminal:
            self._live = Live(console=self._out, auto_refresh=False, transient=True)
            self._live.start()

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def tell(self, standing: RoleStatus, said: str) -> None:
        """What became of a role; its own last line is left out where that is the reason."""
        if (
            self._held
            and (line := self._held.get(standing.role.name))
            and line[:300] in standing.last_error
        ):
            del self._held[standing.role.name]
        self._release(standing.role.name)
        if self._lines is not None:
            self._lines.put(f"{standing.role.name:<8} {said}")
            return
        colour = {"waiting": "yellow", "running": "green"}.get(standing.state, "dim")
        self._out.print(f"[{colour}]{standing.role.name:<8}[/] {escape(said)}", soft_wrap=True)

    def log(self, role: str, line: str) -> None:
        """What a role wrote to standard error: as it is for programs, as words in a terminal."""
        # Why a role ended is told already.
        if (
            (standing := self.standings.get(role)) is not None
            and line
            and line[:300] in standing.last_error
        ):
            return
        self._release(role)
        if self._held is None:
            self._put(role, line)
        else:
            self._held[role] = line

    def drop(self, error: str) -> None:
        """Do not show what a role said last when the command itself ends with just that."""
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
            said = line if self._is_json else _words(line)
            self._out.print(f"[dim]{role:<8} {escape(said[:400])}[/]", soft_wrap=True)

    def refresh(self) -> None:
        if self._live is not None and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + 0.5
            self._live.update(_table(self.standings), refresh=True)

    def close(self) -> None:
        self._release()
        self.end()
        if self._lines is not None:
            self._lines.close()


def _words(line: str) -> str:
    """An event's line of JSON as words; any other line as it is."""
    try:
        fields = json.loads(line)
        event = fields.pop("event")
    except (ValueError, AttributeError, KeyError, TypeError):
        return line
    shown = {name: value for name, value in fields.items() if name not in ("timestamp", "level")}
    return " ".join([str(event), *(f"{name}={value}" for name, value in shown.items())])


def _table(standings: dict[str, RoleStatus]) -> Table:
    table = Table("role", "state", "since", "restarts", "a second", "lag", min_width=64)
    for standing in standings.values():
        rates = ", ".join(
            f"{count(rate)} {name}" for name, rate in standing.rates().items() if rate
        )
        lag_s = standing.report.get("lag_s")
        table.add_row(
            standing.role.name,
            standing.state,
            f"{max(0, time.time() - standing.since_s):.0f} s",
            str(standing.restarts or ""),
            rates,
            "" if lag_s is None else f"{lag_s * 1000:.0f} ms",
        )
    return table
