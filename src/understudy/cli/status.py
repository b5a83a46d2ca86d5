"""understudy status: how a platform stands, from what its roles leave in the data folder;
nothing is disturbed."""

import json
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from understudy.backends.data import DataFolder, count_store
from understudy.backends.deployment import open_deployment, signing_key
from understudy.cli.options import common_options, count, examples, finish, results
from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import StorageFailed
from understudy.core.log import is_locked
from understudy.models.registry import Registry
from understudy.platform.config import hidden, resolve
from understudy.platform.platform import roles_folder

_SILENT_S = 5.0
"""A supervisor writes every second; after this it hangs."""
_WAITS = {
    "gateway": "stores nothing, clients keep their steps",
    "ingest": "waits",
    "learner": "waits",
}
_COLOURS = {"running": "green", "not running": "dim", "starting": "yellow", "stopping": "yellow"}


@click.command(epilog=examples("understudy status --data D", "understudy status --data D --json"))
@common_options
def status(data_text: str | None, as_json: bool) -> int:
    """Show roles, rates, lag, games and models; exits 1 unless roles run and are well, and every
    champion is whole."""
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
        since = (
            time.strftime("%H:%M:%S", time.localtime(role["since_s"])) if role["since_s"] else ""
        )
        table.add_row(
            role["role"],
            f"[{_COLOURS.get(role['state'], 'red')}]{role['state']}[/]",
            since,
            str(role["restarts"] or ""),
            rates,
            "" if lag_s is None else f"{lag_s * 1000:.0f} ms",
            escape(role["last_error"]),
        )
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


# --- What is shown --------------------------------------------------------------------------------


def look(
    data: DataFolder, *, models: str = "", store: str = "", clock: Clock | None = None
) -> dict[str, Any]:
    """Roles, rates, lag, games with their schedule, models, and what to do next; addresses of
    what lies elsewhere."""
    now_s = (clock or SystemClock()).now()
    paths = [
        path
        for path in sorted(roles_folder(data).glob("*.json"))
        if path.with_suffix(".lock").exists()
    ]
    roles = [_role(path, now_s) for path in paths]
    # Of the store, or of the learner's copy where experience is kept elsewhere.
    has_own = data.has_store() and not store
    counts = count_store(data if has_own else DataFolder(data.root, store_name="window"))
    learner = next((role for role in roles if role["role"] == "learner"), None)
    games, away = _games(data, models, counts["games"], learner)
    gateway = next((role for role in roles if role["role"] == "gateway" and role["alive"]), None)
    has_damage = any(game.get("damage", {}).keys() & {"champion", "journal"} for game in games)
    is_stuck = any(_storage_error(role) or _window_error(role) for role in roles)
    return {
        "ok": bool(roles)
        and all(role["alive"] for role in roles)
        and not has_damage
        and not is_stuck
        and not away,
        "url": gateway["report"].get("url") if gateway else None,
        "roles": roles,
        "lag_s": next(
            (role["report"].get("lag_s") for role in roles if role["role"] == "ingest"), None
        ),
        "steps": counts["steps"],
        "quarantined": counts["quarantined"],
        "parked": counts["parked"],
        "games": games,
        "next": [
            *([f"models cannot be read: {away}"] if away else []),
            *_next(data, roles, counts, games),
        ],
    }


def _role(path: Path, now_s: float) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        found = {"role": path.stem, "state": "unknown", "at_s": 0.0, "report": {}, "rates": {}}
    is_watched = is_locked(path.with_suffix(".lock"))
    is_silent = is_watched and now_s - found["at_s"] > _SILENT_S
    alive = is_watched and not is_silent and found["state"] in ("starting", "running", "stopping")
    state = "silent" if is_silent else found["state"] if is_watched else "not running"
    return {
        "role": found["role"],
        "alive": alive,
        "state": state,
        "pid": found.get("pid") if is_watched else None,
        "since_s": found.get("since_s", 0.0),
        "restarts": found.get("restarts", 0),
        "last_error": found.get("last_error", ""),
        "rates": found["rates"] if alive else {},
        "report": found["report"],
    }


def _storage_error(role: dict[str, Any]) -> str:
    """Why a role that runs cannot write just now; empty where it can."""
    return str(role["report"].get("storage_error", "")) if role["alive"] else ""


def _window_error(role: dict[str, Any]) -> str:
    """Why a learner gets nothing new from a store elsewhere just now; empty where it does."""
    return str(role["report"].get("window", {}).get("error", "")) if role["alive"] else ""


def _games(
    data: DataFolder, models: str, steps: dict[str, int], learner: dict[str, Any] | None
) -> tuple[list[dict[str, Any]], str]:
    """What is known of each game, and why its models cannot be read just now; empty where they
    can."""
    learnt = learner["report"].get("games", {}) if learner else {}
    away = ""
    if signing_key(data).exists():
        try:
            registry = open_deployment(data, models=models).registry
            return [
                _game(registry, name, steps.get(name, 0), learnt.get(name, {}))
                for name in registry.games()
            ], ""
        except StorageFailed as error:
            away = str(error)
    names = sorted(steps.keys() | learnt.keys())
    return [
        {"game": name, "steps": steps.get(name, 0), **_taken(learnt.get(name, {}))}
        for name in names
    ], away


def _game(registry: Registry, name: str, steps: int, learnt: dict[str, Any]) -> dict[str, Any]:
    catalogue = registry.catalogue(name)
    champion = catalogue.aliases.get("champion")
    return {
        "game": name,
        "steps": steps,
        "models": len(catalogue.models),
        "champion": catalogue.points_to("champion"),
        "champion_why": champion.why if champion else "",
        "canary": catalogue.points_to("canary"),
        "bad_entries": catalogue.bad_entries,
        "damage": registry.damage(name),
        **_taken(learnt),
    }


def _taken(learnt: dict[str, Any]) -> dict[str, Any]:
    taken = (
        "phase",
        "doing",
        "why",
        "error",
        "schedule",
        "updates",
        "usable_steps",
        "consent_unknown_steps",
        "canary_episodes",
        "verdict",
        "next",
    )
    return {field: learnt[field] for field in taken if field in learnt}


def _next(
    data: DataFolder,
    roles: list[dict[str, Any]],
    counts: dict[str, Any],
    games: list[dict[str, Any]],
) -> list[str]:
    """What an operator might do, most urgent first."""
    said = [
        f"{role['role']} {role['state']}: {role['last_error'] or 'see its log'}"
        for role in roles
        if not role["alive"] and role["state"] != "not running"
    ]
    said += [
        f"{role['role']} {_WAITS[role['role']]}: {error}"
        for role in roles
        if (error := _storage_error(role))
    ]
    said += [
        f"{role['role']} gets no new steps and learns from those it has: {error}"
        for role in roles
        if (error := _window_error(role))
    ]
    if not any(role["alive"] for role in roles):
        said.append(f"nothing runs here; next: understudy up --data {data.root}")
    if counts["quarantined"]:
        said.append(
            f"{sum(counts['quarantined'].values())} frames were refused; next: understudy data "
            "quarantine list"
        )
    if counts["parked"]:
        said.append(
            f"{counts['parked']} frames wait for their game's spec; next: understudy games add GAME"
        )
    for game in games:
        if game.get("next"):
            said.append(f"{game['game']}: {game['next']}")
        said += [
            f"{game['game']}: its {alias} is damaged: {why}"
            for alias, why in game.get("damage", {}).items()
        ]
    return said
