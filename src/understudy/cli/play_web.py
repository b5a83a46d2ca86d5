"""understudy play GAME --web."""

import contextlib
import dataclasses
import json
import signal
import sys
import tempfile
import time
import webbrowser
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from understudy.app.addresses import for_others, openable, page_address
from understudy.app.config import Config, Resolved, resolve
from understudy.app.deployment import open_deployment
from understudy.app.play_web import (
    answer_of,
    await_gateway,
    check_bot,
    check_game,
    is_free,
    is_running,
    keep_port,
    kept_port,
    play_key,
)
from understudy.app.roles.platform import Platform, Standing
from understudy.cli.interrupts import INTERRUPTED
from understudy.cli.options import console
from understudy.cli.up import Asked
from understudy.core.errors import ConfigError

_KEPT = "Ctrl-C ends it; what was acknowledged is stored."
_GONE = "Ctrl-C ends it, and what was played and learnt is gone with it; --data D keeps both."
_PATIENCE_S = 20.0


def play_web(data_text: str | None, game: str, *, bot: str, opens: bool, as_json: bool) -> int:
    """Give the address of the page; where no platform runs on the folder, be one until Ctrl-C.

    Without a data folder it plays in one of its own, which goes with it.
    """
    check_game(game)
    resolved, out = resolve({"data": data_text}), console(as_json=as_json)
    config = resolved.config
    if bot != "champion" and not (config.data and config.folder.root.is_dir()):
        raise ConfigError(
            f"--bot is {bot}, but there are no models yet to choose from; leave out --bot, or give --data D, a folder "
            "that has some (see 'understudy models list')"
        )
    with contextlib.ExitStack() as opened:
        is_kept = bool(config.data)
        runs = is_kept and is_running(config.folder)
        if not runs:
            config = _own(resolved)
        if not is_kept:
            scratch = opened.enter_context(tempfile.TemporaryDirectory(prefix="understudy-play-"))
            config = dataclasses.replace(config, data=str(Path(scratch) / "D"))
        deployment = open_deployment(config.folder, models=config.models.url)
        model, key = check_bot(deployment, game, bot), play_key(deployment, game)

        def say(url: str) -> None:
            address = page_address(url, game, key=key, bot=model)
            if as_json:
                sys.stdout.write(json.dumps({"url": openable(url), "game": game, "key": key, "page": address}) + "\n")
                sys.stdout.flush()
            out.print(f"play {game} at\n\n  {escape(address)}\n", soft_wrap=True)
            if others := for_others(url, config.gateway.hosts):
                out.print(f"[dim]{escape(others)}[/]", soft_wrap=True)
            if opens and not webbrowser.open(address):
                out.print("no browser could be opened from here; open the address by hand", soft_wrap=True)

        if not runs:
            return _run(config, say, lambda url: answer_of(url, game, key=key), _KEPT if is_kept else _GONE, out)
        say(await_gateway(config.folder, game, key=key))
    return 0


def _own(resolved: Resolved[Config]) -> Config:
    """The config of a platform that this command runs itself; ConfigError when it would have no page."""
    config = resolved.config
    if "gateway" not in config.roles:
        raise ConfigError(
            f"roles is {','.join(config.roles)} ({resolved.origins['roles']}), but the page is the gateway's and none "
            "runs on this folder; add gateway to roles, or run 'understudy up --role gateway' on it first"
        )
    is_set = resolved.origins["gateway.port"] != "default"
    port = config.gateway.port if is_set else kept_port(config.folder) if config.data else 0
    port = port if port and is_free(config.gateway.host, port) else 0
    return dataclasses.replace(config, gateway=dataclasses.replace(config.gateway, port=port))


def _run(config: Config, say: Callable[[str], None], answer: Callable[[str], str], ends: str, out: Console) -> int:
    """Be the platform until somebody asks to stop; the exit code. `answer` says why a page could not play yet."""
    asked, is_told, late_s = Asked(), False, time.monotonic() + _PATIENCE_S

    def tell(standing: Standing, said: str) -> None:
        if standing.state == "waiting":
            out.print(f"[yellow]{standing.role.name}[/] {escape(said)}", soft_wrap=True)

    with asked, Platform(config, tell=tell) as platform:

        def each() -> None:
            nonlocal is_told, late_s
            url = platform.url
            if is_told or not platform.supervisor.is_ready or url is None:
                return
            why = answer(url)
            if not why:
                is_told = True
                keep_port(config.folder, int(platform.supervisor.standings["gateway"].report["port"]))
                say(url)
                out.print(f"[dim]{ends}[/]", soft_wrap=True)
            elif time.monotonic() > late_s:
                late_s += _PATIENCE_S
                out.print(f"[yellow]the gateway at {url} does not take the page's key yet:[/] {escape(why)}")

        platform.supervisor.run(asked.stop, each)
        finished = platform.supervisor.stop(asked.at_once)
    if asked.number == signal.SIGINT:
        return INTERRUPTED
    return 0 if finished else 1
