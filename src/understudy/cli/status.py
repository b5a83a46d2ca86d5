"""understudy status: the state of a platform, read from the files of its data folder."""

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from understudy.backends.data import DataFolder, count_store, stored_schemas
from understudy.backends.deployment import has_deployment, inspect_deployment
from understudy.cli.certificates import certificates, check_certificate
from understudy.cli.options import (
    common_options,
    count_of,
    examples,
    finish,
    format_count,
    paragraph,
    results,
)
from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import ConfigError, Corrupt, StorageFailed
from understudy.experience.intake import why_unusable
from understudy.models.catalogue import Catalogue
from understudy.models.registry import SCHEMA_CHARS, Registry
from understudy.platform.config import mask_secrets, resolve
from understudy.platform.platform import read_roles
from understudy.ports import DAMAGED_STREAM

_BLOCKED = {
    "gateway": "accepts nothing, clients keep their steps",
    "ingest": "is waiting",
    "learner": "is waiting",
}
_SHOWN_VERDICTS = 3
"""The newest verdicts of a game; `models list` shows all."""
_MOSTLY = 0.9
"""From this share of the stored steps on, the learner counts as up to date."""
_COLOURS = {"running": "green", "not running": "dim", "starting": "yellow", "stopping": "yellow"}


@click.command(epilog=examples("understudy status --data D", "understudy status --data D --json"))
@common_options
def status(data_text: str | None, as_json: bool) -> int:
    """Show roles, rates, lag, games and models; exits 1 if something is wrong or nothing runs."""
    config = resolve({"data": data_text}).config
    root = config.folder.root
    if not root.exists():
        raise ConfigError(
            f"{root} does not exist; pass the data folder of a platform with --data, or create one "
            f"with 'understudy up --data {root}'"
        )
    urls = {"stream": config.stream.url, "store": config.store.url, "models": config.models.url}
    fields = platform_status(
        config.folder,
        models=config.models.url,
        store=config.store.url,
        certificates=certificates(config),
    )
    fields["elsewhere"] = {part: mask_secrets(url) for part, url in urls.items() if url}
    _print(results(as_json=as_json), fields)
    return finish(fields, as_json=as_json, code=0 if fields["ok"] else 1)


def _print(out: Console, fields: dict[str, Any]) -> None:
    if fields["url"]:
        out.print(f"listening at {fields['url']}")
    for part, url in fields["elsewhere"].items():
        _print_line(out, f"{part} at {url}")
    if fields["roles"]:
        out.print(_roles(fields["roles"]))
    stored = f"{count_of(fields['steps'], 'step')} stored"
    if fields["read_steps"] is not None and fields["read_steps"] < _MOSTLY * fields["steps"]:
        stored += f", of which the learner has read {format_count(fields['read_steps'])} so far"
    out.print(stored)
    schedules: dict[tuple[str, ...], str] = {}
    for game in fields["games"]:
        _print_game(out, game)
        _print_schedule(out, game, schedules)
        for problem in ("forgotten", "gave_up"):
            for line in game.get(problem, "").splitlines():
                _print_line(out, line, indent="  ", style="red")
    for advice in fields["next"]:
        # Not wrapped, since it names commands to copy.
        out.print(f"[yellow]![/] {escape(advice)}", soft_wrap=True)


def _print_line(
    out: Console, text: str, *, indent: str = "", style: str = "", first_style: str = ""
) -> None:
    """Print a text as lines of the console's width; `first_style` is that of its first word."""
    lines = Text(paragraph(text, width=out.width, indent=indent), style=style)
    lines.stylize(first_style, 0, len(indent) + len(text.partition(" ")[0]))
    out.print(lines, soft_wrap=True)


def _roles(roles: list[dict[str, Any]]) -> Table:
    table = Table("role", "state", "since", "restarts", "rates per s", "lag", "last error")
    for role in roles:
        rates = ", ".join(f"{format_count(rate)} {name}" for name, rate in role["rates"].items())
        lag_s = role["lag_s"]
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
    name = game["game"]
    bots = f"champion {name}/{game['champion']}" if game.get("champion") else "no bot yet"
    if game.get("canary"):
        evidence = min(max(game.get("canary_evidence", 0.0), 0.0), 1.0)
        claim = "it is better"
        if margin := game.get("canary_margin"):
            claim = f"this replacement is at most {margin:g} of the range worse"
        bots += (
            f", canary {name}/{game['canary']} "
            f"({count_of(game.get('canary_episodes', 0), 'episode')}, "
            f"{evidence:.0%} of the way to a proof that {claim})"
        )
    if game.get("control"):
        bots += f", control {name}/{game['control']}"
    models = (
        f"{count_of(game['models'], 'model')}, {bots}" if "models" in game else "models unknown"
    )
    _print_line(out, f"{name}: {count_of(game['steps'], 'step')}, {models}", first_style="bold")
    lines = _schemas(game)
    if game.get("canary_waits"):
        lines.append(game["canary_waits"])
    if game.get("why"):
        phase = f"{game['phase']}, " if game["phase"] else ""
        lines.append(f"{phase}{game['doing']}: {game['why']}")
    if known := game.get("known_episodes"):
        best = format_count(game["best_episodes"])
        lines.append(f"clones the best {best} of {count_of(known, 'whole episode')}")
    if missing_steps := game.get("missing_steps"):
        what = "next candidate" if game.get("champion") else "first bot"
        lines.append(f"{what}: after {count_of(missing_steps, 'more step')}")
    verdicts = list(game.get("verdicts", {}).items())[-_SHOWN_VERDICTS:]
    lines += [f"{model}: {verdict}" for model, verdict in verdicts]
    if reasons := game.get("not_compared"):
        counts = ", ".join(f"{n} {reason}" for reason, n in sorted(reasons.items()))
        lines.append(f"episodes that the gate does not compare: {counts}")
    if returns := _returns(game):
        lines.append(f"returns: {returns}")
    if skills := _skills(game):
        lines.append(f"skills: {skills}")
    for line in lines:
        _print_line(out, line, indent="  ")


def _print_schedule(
    out: Console, game: dict[str, Any], schedules: dict[tuple[str, ...], str]
) -> None:
    """Print a game's schedule, or the name of the game for which the same one was printed."""
    schedule = tuple(game.get("schedule", ()))
    same = schedules.setdefault(schedule, game["game"])
    lines = schedule
    if schedule and same != game["game"]:
        lines = (f"schedule: the same as that of {same}",)
    for line in lines:
        _print_line(out, line, indent="  ", style="dim")


def _schemas(game: dict[str, Any]) -> list[str]:
    """A line for each schema of a game that has several: its steps and its champion."""
    champions = game.get("champions", {})
    steps = game.get("schema_steps", {})
    schemas = list(dict.fromkeys((*steps, *reversed(champions))))
    if len(schemas) < 2:
        return []
    return [
        f"schema {schema[:SCHEMA_CHARS]}: {count_of(steps.get(schema, 0), 'step')}, "
        + (f"champion {game['game']}/{champions[schema]}" if schema in champions else "no bot yet")
        + (", trained now" if schema == game.get("schema") else "")
        for schema in schemas
    ]


def _returns(game: dict[str, Any]) -> str:
    """Mean returns of people, and of champion, canary and control."""
    parts = []
    people = game.get("people", {})
    if people.get("episodes"):
        parts.append(
            f"people {people['mean']:.4g} on average and {people['best']:.4g} for the best of "
            f"{people['players']} (first {count_of(people['episodes'], 'episode')}"
            + (
                f", without {people['left_out']} far from all others"
                if people.get("left_out")
                else ""
            )
            + ")"
        )
    for alias in ("champion", "canary", "control"):
        played = game.get("returns", {}).get(f"{game['game']}/{game.get(alias)}")
        if played:
            parts.append(
                f"{alias} {played['mean']:.4g} ({count_of(played['episodes'], 'episode')})"
            )
    return ", ".join(parts)


def _skills(game: dict[str, Any]) -> str:
    """Noise of each skill that was played, with the bot's mean return and the one it aims at."""
    parts = []
    for skill, played in game.get("skills", {}).items():
        if played["episodes"]:
            goal = "" if played["target"] is None else f"target {played['target']:.4g}, "
            episodes = count_of(played["episodes"], "episode")
            parts.append(
                f"{skill} {played['mean']:.4g} in its last {episodes} "
                f"({goal}noise now {played['noise']:.3g})"
            )
    return "; ".join(parts)


# --- What is shown --------------------------------------------------------------------------------


def platform_status(
    data: DataFolder,
    *,
    models: str = "",
    store: str = "",
    certificates: Sequence[Path] = (),
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Roles, rates, lag, games with their schedule, models and next steps of a platform.

    `models` and `store` are their URLs, if they are not in the data folder.
    """
    now_s = (clock or SystemClock()).now()
    roles = read_roles(data, now_s)
    # Counts of the store, or of the learner's copy if the store is remote.
    has_own = data.has_store() and not store
    counts = count_store(data if has_own else DataFolder(data.root, store_name="window"))
    learner = next((role for role in roles if role["role"] == "learner"), None)
    games, damage = _games(data, models, counts["games"], learner)
    gateway = next((role for role in roles if role["role"] == "gateway" and role["alive"]), None)
    has_damage = any(
        name.startswith(("champion", "journal", "spec"))
        for game in games
        for name in game.get("damage", {})
    )
    is_stuck = any(_storage_error(role) or _window_error(role) for role in roles)
    tls = [check_certificate(path, now_s=now_s) for path in certificates]
    return {
        "ok": bool(roles)
        and all(role["alive"] for role in roles)
        and not has_damage
        and not is_stuck
        and not damage
        and not any(_failing(game) for game in games)
        and all(is_valid for is_valid, _ in tls),
        "url": gateway["report"].get("url") if gateway else None,
        "roles": roles,
        "lag_s": next((role["lag_s"] for role in roles if role["role"] == "ingest"), None),
        "steps": counts["steps"],
        "read_steps": learner["report"].get("read_steps") if learner and learner["alive"] else None,
        "quarantined": counts["quarantined"],
        "parked": counts["parked"],
        "evicted": counts["evicted"],
        "games": games,
        "next": [
            *damage,
            *(advice for _, advice in tls if advice),
            *_next(data, roles, counts, games),
        ],
    }


def _storage_error(role: dict[str, Any]) -> str:
    """Why a running role cannot write at the moment; empty if it can write."""
    return str(role["report"].get("storage_error", "")) if role["alive"] else ""


def _failing(game: dict[str, Any]) -> str:
    """Why the training of a game fails, now or again and again; empty if it does not."""
    return str(game.get("failing") or game.get("error") or "")


def _window_error(role: dict[str, Any]) -> str:
    """Why a learner cannot read a remote store at the moment; empty if it can read it."""
    return str(role["report"].get("window", {}).get("error", "")) if role["alive"] else ""


def _games(
    data: DataFolder, models: str, steps: dict[str, int], learner: dict[str, Any] | None
) -> tuple[list[dict[str, Any]], list[str]]:
    """The state of each game, and what is wrong with the deployment's models and keys."""
    reports = learner["report"].get("games", {}) if learner else {}
    damage = [reason] if (reason := why_unusable(data.root)) else []
    try:
        if not damage and has_deployment(data, models=models):
            deployment = inspect_deployment(data, models=models)
            if keys := deployment.keys.damage():
                damage.append(f"keys: {keys}")
            stored = stored_schemas(data)
            return [
                _game(
                    deployment.registry,
                    name,
                    steps=steps.get(name, 0),
                    schemas=stored.get(name, ()),
                    report=reports.get(name, {}),
                )
                for name in sorted({*deployment.registry.games(), *stored})
            ], damage
    except (ConfigError, StorageFailed) as error:
        damage.append(f"cannot read models: {error}")
    names = sorted(steps.keys() | reports.keys())
    return [
        {"game": name, "steps": steps.get(name, 0), **_shown(reports.get(name, {}))}
        for name in names
    ], damage


def _game(
    registry: Registry, name: str, *, steps: int, schemas: Collection[str], report: dict[str, Any]
) -> dict[str, Any]:
    try:
        catalogue = registry.catalogue(name)
    except Corrupt:
        catalogue = Catalogue(name)  # `damage` has the reason
    champion = catalogue.pointer("champion")
    control = catalogue.control_of(catalogue.pointer("canary"))
    return {
        "game": name,
        "steps": steps,
        "models": len(catalogue.models),
        "champion": catalogue.model_of("champion"),
        "champion_why": champion.why if champion else "",
        "canary": catalogue.model_of("canary"),
        "control": control.model_no if control else 0,
        "champions": {pointer.schema: pointer.model_no for pointer in catalogue.live("champion")},
        "bad_entries": catalogue.bad_entries,
        "verdicts": {
            catalogue.models[number].name: verdict
            for number, verdict in sorted(catalogue.verdicts.items())
        },
        "damage": registry.damage(name, schemas=schemas),
        **_shown(report),
    }


def _shown(report: dict[str, Any]) -> dict[str, Any]:
    names = (
        "schema",
        "schema_steps",
        "phase",
        "doing",
        "why",
        "missing_steps",
        "error",
        "failing",
        "gave_up",
        "schedule",
        "updates",
        "usable_steps",
        "best_episodes",
        "known_episodes",
        "consent_unknown_steps",
        "canary_episodes",
        "canary_evidence",
        "canary_margin",
        "canary_waits",
        "not_compared",
        "people",
        "returns",
        "skills",
        "forgotten",
        "decision",
        "next",
    )
    return {name: report[name] for name in names if name in report}


def _next(
    data: DataFolder,
    roles: list[dict[str, Any]],
    counts: dict[str, Any],
    games: list[dict[str, Any]],
) -> list[str]:
    """Advice for the operator, most urgent first."""
    advice = [
        f"{role['role']} {role['state']}: {role['last_error'] or 'see its log'}"
        for role in roles
        if not role["alive"] and role["state"] != "not running"
    ]
    advice += [
        f"{role['role']} {_BLOCKED[role['role']]}: {error}"
        for role in roles
        if (error := _storage_error(role))
    ]
    advice += [
        f"{role['role']} receives no new steps and learns from those it has: {error}"
        for role in roles
        if (error := _window_error(role))
    ]
    if not any(role["alive"] for role in roles) and not why_unusable(data.root):
        advice.append(f"nothing is running; next: understudy up --data {data.root}")
    if lost := counts["quarantined"].get(DAMAGED_STREAM, 0):
        advice.append(
            f"{count_of(lost, 'damaged entry', 'damaged entries')} of the stream, so acknowledged "
            f"frames are lost; next: understudy data verify --data {data.root}"
        )
    if counts["quarantined"]:
        advice.append(
            f"{count_of(sum(counts['quarantined'].values()), 'rejected frame')}; next: understudy "
            "data quarantine list"
        )
    if counts["parked"]:
        advice.append(
            f"{count_of(counts['parked'], 'frame')} without a spec of the game; next: understudy "
            "games add GAME, then understudy data quarantine replay"
        )
    if counts["evicted"]:
        advice.append(
            f"deleted {count_of(counts['evicted'], 'frame')} because the quarantine was full; "
            "next: understudy data quarantine list shows what fills it"
        )
    for game in games:
        if error := _failing(game):
            advice.append(
                f"{game['game']}: training fails and is repeated: {error}; if the reason is not "
                f"clear, next: understudy doctor --data {data.root}"
            )
        if game.get("next"):
            advice.append(f"{game['game']}: {game['next']}")
        advice += [
            f"{game['game']}: its {alias} is damaged: {damage}"
            for alias, damage in game.get("damage", {}).items()
        ]
    return advice
