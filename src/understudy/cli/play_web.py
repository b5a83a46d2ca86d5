"""understudy play GAME --web."""

import contextlib
import json
import signal
import sys
import tempfile
import webbrowser
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape

from understudy.app.config import Config
from understudy.app.deployment import open_deployment
from understudy.app.origins import resolve
from understudy.app.play_web import check_game, page_address, play_key, running_url
from understudy.app.roles.platform import Platform
from understudy.app.roles.supervise import Standing
from understudy.cli.options import console
from understudy.cli.up import INTERRUPTED, Asked

_KEPT = "Ctrl-C ends it; what was acknowledged is stored."
_GONE = "Ctrl-C ends it, and what was played and learnt is gone with it; --data D keeps both."


def play_web(data_text: str | None, game: str, *, bot: str, opens: bool, as_json: bool) -> int:
    """Give the address of the page; where no platform runs on the folder, be one until Ctrl-C.

    Without a data folder it plays in one of its own, which goes with it.
    """
    check_game(game)
    config, out = resolve({"data": data_text, "gateway.port": 0}).config, console(as_json=as_json)
    with contextlib.ExitStack() as opened:
        ends = _KEPT if config.data else _GONE
        if not config.data:
            scratch = opened.enter_context(tempfile.TemporaryDirectory(prefix="understudy-play-"))
            config = msgspec.structs.replace(config, data=str(Path(scratch) / "D"))
        url = running_url(config.folder, models=config.models.url)
        key = play_key(open_deployment(config.folder, models=config.models.url), game)

        def say(url: str) -> None:
            address = page_address(url, game, key=key, bot=bot)
            if as_json:
                sys.stdout.write(json.dumps({"url": url, "game": game, "key": key, "page": address}) + "\n")
                sys.stdout.flush()
            out.print(f"play {game} at\n\n  {escape(address)}\n", soft_wrap=True)
            if opens and not webbrowser.open(address):
                out.print("no browser could be opened from here; open the address by hand", soft_wrap=True)

        if url is None:
            return _run(config, say, ends, out)
        say(url)
    return 0


def _run(config: Config, say: Callable[[str], None], ends: str, out: Console) -> int:
    """Be the platform until somebody asks to stop; the exit code."""
    asked, is_told = Asked(), False

    def tell(standing: Standing, said: str) -> None:
        if standing.state == "waiting":
            out.print(f"[yellow]{standing.role.name}[/] {escape(said)}", soft_wrap=True)

    with asked, Platform(config, tell=tell) as platform:

        def each() -> None:
            nonlocal is_told
            if not is_told and platform.supervisor.is_ready and platform.url is not None:
                is_told = True
                say(platform.url)
                out.print(f"[dim]{ends}[/]", soft_wrap=True)

        platform.supervisor.run(asked.stop, each)
        finished = platform.supervisor.stop(asked.at_once)
    if asked.number == signal.SIGINT:
        return INTERRUPTED
    return 0 if finished else 1
