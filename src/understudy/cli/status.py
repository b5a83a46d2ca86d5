"""understudy status."""

import time
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from understudy.app.config import hidden, resolve
from understudy.app.status import status as look
from understudy.cli.options import common_options, count, examples, finish, results

_COLOURS = {"running": "green", "not running": "dim", "starting": "yellow", "stopping": "yellow"}


@click.command(epilog=examples("understudy status --data D", "understudy status --data D --json"))
@common_options
def status(data_text: str | None, as_json: bool) -> int:
    """Show roles, rates, lag, games and models; exits 1 unless roles run and are well, and every champion is whole."""
    config = resolve({"data": data_text}).config
    places = {"stream": config.stream.url, "store": config.store.url, "models": config.models.url}
    fields = look(config.folder, models=config.models.url, store=config.store.url)
    fields["elsewhere"] = {part: hidden(url) for part, url in places.items() if url}
    _print(results(as_json=as_json), fields)
    return finish(fields, as_json=as_json, code=0 if fields["ok"] else 1)


def _print(out: Console, fields: dict[str, Any]) -> None:
    if fields["url"]:
        out.print(f"listening at {fields['url']}")
    for part, url in fields["elsewhere"].items():
        out.print(f"{part} at {escape(url)}", soft_wrap=True)
    if fields["roles"]:
        out.print(_roles(fields["roles"]))
    out.print(f"{count(fields['steps'])} steps stored")
    for game in fields["games"]:
        _print_game(out, game)
    for said in fields["next"]:
        out.print(f"[yellow]![/] {escape(said)}", soft_wrap=True)


def _roles(roles: list[dict[str, Any]]) -> Table:
    table = Table("role", "state", "since", "restarts", "a second", "lag", "last error")
    for role in roles:
        rates = ", ".join(f"{count(rate)} {name}" for name, rate in role["rates"].items())
        lag_s = role["report"].get("lag_s") if role["alive"] else None
        since = time.strftime("%H:%M:%S", time.localtime(role["since_s"])) if role["since_s"] else ""
        table.add_row(
            role["role"], f"[{_COLOURS.get(role['state'], 'red')}]{role['state']}[/]", since,
            str(role["restarts"] or ""), rates, "" if lag_s is None else f"{lag_s * 1000:.0f} ms",
            escape(role["last_error"]),
        )  # fmt: skip
    return table


def _print_game(out: Console, game: dict[str, Any]) -> None:
    name = escape(game["game"])
    bots = f"champion {name}/{game['champion']}" if game.get("champion") else "no bot yet"
    if game.get("canary"):
        bots += f", canary {name}/{game['canary']} ({game.get('canary_episodes', 0)} episodes)"
    models = f"{game['models']} models, {bots}" if "models" in game else "models unknown"
    out.print(f"[bold]{name}[/]: {count(game['steps'])} steps, {models}")
    if game.get("phase"):
        out.print(f"  {game['phase']}, {game['doing']}: {escape(game['why'])}", soft_wrap=True)
    for line in game.get("schedule", ()):
        out.print(f"  [dim]{escape(line)}[/]", soft_wrap=True)
    if game.get("error"):
        out.print(f"  [red]{escape(game['error'])}[/]", soft_wrap=True)
