"""Status: how a platform stands, from what its roles leave in the data folder; it disturbs nobody."""

import json
from pathlib import Path
from typing import Any

from understudy.app.data import DataFolder
from understudy.app.deployment import open_deployment, signing_key
from understudy.app.roles.platform import roles_folder
from understudy.app.stats import count_store, no_counts
from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import StorageFailed
from understudy.core.log import is_locked
from understudy.models.registry import Registry
from understudy.stores.view import StoreView

_SILENT_S = 5.0
"""A supervisor writes every second; after this it hangs."""

_WAITS = {"gateway": "stores nothing, clients keep their steps", "ingest": "waits", "learner": "waits"}


def status(data: DataFolder, *, models: str = "", store: str = "", clock: Clock | None = None) -> dict[str, Any]:
    """Roles, rates, lag, games with their schedule, models, and what to do next; addresses of what lies elsewhere."""
    now_s = (clock or SystemClock()).now()
    roles = [_role(path, now_s) for path in sorted(roles_folder(data).glob("*.json")) if _is_standing(path)]
    counts = _counts(data, store)
    learner = next((role for role in roles if role["role"] == "learner"), None)
    games, away = _games(data, models, counts["games"], learner)
    gateway = next((role for role in roles if role["role"] == "gateway" and role["alive"]), None)
    has_damage = any(game.get("damage", {}).keys() & {"champion", "journal"} for game in games)
    is_stuck = any(_storage_error(role) or _window_error(role) for role in roles)
    return {
        "ok": bool(roles) and all(role["alive"] for role in roles) and not has_damage and not is_stuck and not away,
        "url": gateway["report"].get("url") if gateway else None,
        "roles": roles,
        "lag_s": next((role["report"].get("lag_s") for role in roles if role["role"] == "ingest"), None),
        "steps": counts["steps"], "quarantined": counts["quarantined"], "parked": counts["parked"], "games": games,
        "next": [*([f"models cannot be read: {away}"] if away else []), *_next(data, roles, counts, games)],
    }  # fmt: skip


def _is_standing(path: Path) -> bool:
    return (path.parent / f"{path.stem}.lock").exists()


def _role(path: Path, now_s: float) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        found = {"role": path.stem, "state": "unknown", "at_s": 0.0, "report": {}, "rates": {}}
    is_watched = is_locked(path.parent / f"{path.stem}.lock")
    is_silent = is_watched and now_s - found["at_s"] > _SILENT_S
    alive = is_watched and not is_silent and found["state"] in ("starting", "running", "stopping")
    state = "silent" if is_silent else found["state"] if is_watched else "not running"
    return {
        "role": found["role"], "alive": alive, "state": state, "pid": found.get("pid") if is_watched else None,
        "since_s": found.get("since_s", 0.0), "restarts": found.get("restarts", 0),
        "last_error": found.get("last_error", ""), "rates": found["rates"] if alive else {}, "report": found["report"],
    }  # fmt: skip


def _storage_error(role: dict[str, Any]) -> str:
    """Why a role that runs cannot write just now; empty where it can."""
    return str(role["report"].get("storage_error", "")) if role["alive"] else ""


def _window_error(role: dict[str, Any]) -> str:
    """Why a learner gets nothing new from a store elsewhere just now; empty where it does."""
    return str(role["report"].get("window", {}).get("error", "")) if role["alive"] else ""


def _counts(data: DataFolder, store: str) -> dict[str, Any]:
    """Of the store, or of the learner's copy where experience is kept elsewhere."""
    counts = no_counts()
    for one in (() if store else (data,)) + (DataFolder(data.root, store_name="window"),):
        if one.has_store():
            with StoreView(one.store) as view:
                count_store(view, counts)
            break
    return counts


def _games(
    data: DataFolder, models: str, steps: dict[str, int], learner: dict[str, Any] | None
) -> tuple[list[dict[str, Any]], str]:
    """What is known of each game, and why its models cannot be read just now; empty where they can."""
    learnt = learner["report"].get("games", {}) if learner else {}
    away = ""
    if signing_key(data).exists():
        try:
            registry = open_deployment(data, models=models).registry
            return [_game(registry, name, steps.get(name, 0), learnt.get(name, {})) for name in registry.games()], ""
        except StorageFailed as error:
            away = str(error)
    names = sorted(steps.keys() | learnt.keys())
    return [{"game": name, "steps": steps.get(name, 0), **_taken(learnt.get(name, {}))} for name in names], away


def _game(registry: Registry, name: str, steps: int, learnt: dict[str, Any]) -> dict[str, Any]:
    catalogue = registry.catalogue(name)
    champion = catalogue.aliases.get("champion")
    return {
        "game": name, "steps": steps, "models": len(catalogue.models), "champion": catalogue.points_to("champion"),
        "champion_why": champion.why if champion else "", "canary": catalogue.points_to("canary"),
        "bad_entries": catalogue.bad_entries, "damage": registry.damage(name),
        **_taken(learnt),
    }  # fmt: skip


def _taken(learnt: dict[str, Any]) -> dict[str, Any]:
    taken = ("phase", "doing", "why", "error", "schedule", "updates", "usable_steps", "consent_unknown_steps",
             "canary_episodes", "verdict", "next")  # fmt: skip
    return {field: learnt[field] for field in taken if field in learnt}


def _next(
    data: DataFolder, roles: list[dict[str, Any]], counts: dict[str, Any], games: list[dict[str, Any]]
) -> list[str]:
    """What an operator might do, most urgent first."""
    said = [
        f"{role['role']} {role['state']}: {role['last_error'] or 'see its log'}"
        for role in roles if not role["alive"] and role["state"] != "not running"
    ]  # fmt: skip
    said += [
        f"{role['role']} {_WAITS[role['role']]}: {error}" for role in roles
        if (error := _storage_error(role))
    ]  # fmt: skip
    said += [
        f"{role['role']} gets no new steps and learns from those it has: {error}" for role in roles
        if (error := _window_error(role))
    ]  # fmt: skip
    if not any(role["alive"] for role in roles):
        said.append(f"nothing runs here; next: understudy up --data {data.root}")
    if counts["quarantined"]:
        said.append(f"{sum(counts['quarantined'].values())} frames were refused; next: understudy data quarantine list")
    if counts["parked"]:
        said.append(f"{counts['parked']} frames wait for their game's spec; next: understudy games add GAME")
    for game in games:
        if game.get("next"):
            said.append(f"{game['game']}: {game['next']}")
        said += [f"{game['game']}: its {alias} is damaged: {why}" for alias, why in game.get("damage", {}).items()]
    return said
