"""understudy games: register, list and check games."""

import difflib
from pathlib import Path
from typing import Any

import click
from rich.markup import escape

from understudy.backends.data import stored_schemas
from understudy.backends.specs import RegistrySpecs, games_without_spec
from understudy.cli.deployed import config_of, deployment, readable_registry, waiting_for_spec
from understudy.cli.options import (
    ResultTable,
    common_options,
    console,
    examples,
    finish,
    import_from_here,
    results,
)
from understudy.core.errors import ConfigError, Corrupt
from understudy.experience.game import GameSpec, game_spec, spec_from_json
from understudy.experience.spaces import describe
from understudy.models.catalogue import Catalogue
from understudy.models.registry import Registry
from understudy.platform.config import resolve
from understudy.training.env_info import GameChoice, inspect_env

_GAME_HELP = (
    "GAME is a Gymnasium id, a name with --obs and --actions for your own game, or a .json file "
    "with a game spec (written by `spec.to_json()`)."
)
_obs_option = click.option(
    "--obs",
    type=click.IntRange(1, 1_000_000),
    metavar="N",
    help="Number of values in an observation of your own game.",
)
_actions_option = click.option(
    "--actions", metavar="N|NAMES", help="Number of actions, or their names, comma-separated."
)


@click.group(
    epilog=examples(
        "understudy games add CartPole-v1 --data D", "understudy games list --data D --json"
    )
)
def games() -> None:
    """Register, list and check games."""


@games.command(
    epilog=examples(
        "understudy games add CartPole-v1 --data D",
        "understudy games add my-game --obs 6 --actions up,stay,down --data D --json",
    ),
    help=f"Register a game, so that keys without --registers can send its steps.\n\n{_GAME_HELP}",
)
@click.argument("game")
@_obs_option
@_actions_option
@common_options
def add(
    data_text: str | None, as_json: bool, game: str, obs: int | None, actions: str | None
) -> int:
    spec = _spec(game, obs, actions)
    registry = deployment(data_text).registry
    schemas = {known.schema for known in registry.specs(spec.game, skips_damaged=True)}
    registry.register(spec)
    out = results(as_json=as_json)
    result = "was already registered" if spec.schema in schemas else "is registered"
    out.print(f"{spec.game} {result} ({_summary(spec)}, schema {spec.schema[:12]})")
    out.print(f"[dim]next: understudy keys create --scopes play --game {spec.game}[/]")
    return finish({**_fields(spec), "is_new": spec.schema not in schemas}, as_json=as_json)


@games.command(
    name="list",
    epilog=examples("understudy games list --data D", "understudy games list --data D --json"),
)
@common_options
def list_games(data_text: str | None, as_json: bool) -> int:
    """List registered games with their schemas and bots; exits 1 if something is damaged."""
    config = config_of(data_text)
    registry = readable_registry(config)
    rows: list[dict[str, Any]] = []
    stored = stored_schemas(config.folder)
    for name in sorted({*registry.games(), *stored}):
        specs = registry.specs(name, skips_damaged=True)
        try:
            catalogue = registry.catalogue(name)
        except Corrupt:
            catalogue = Catalogue(name)  # `damage` has the reason
        rows.append(
            {
                "game": name,
                "schemas": [_fields(spec) for spec in specs],
                "models": len(catalogue.models),
                "champion": catalogue.model_of("champion"),
                "canary": catalogue.model_of("canary"),
                "damage": registry.damage(name, schemas=stored.get(name, ())),
            }
        )
    table = ResultTable(
        "game", "observations", "actions", "schemas", "models", "champion", "canary"
    )
    for row in rows:
        first = next(iter(row["schemas"]), {"observation": "", "actions": ""})
        numbers = [row[name] for name in ("models", "champion", "canary")]
        table.add_row(
            row["game"],
            first["observation"],
            first["actions"],
            str(len(row["schemas"])),
            *(str(number or "") for number in numbers),
        )
    out = results(as_json=as_json)
    out.print(table if rows else "no games yet; next: understudy games add GAME")
    damaged = [
        f"{row['game']}: its {part} is damaged: {damage}"
        for row in rows
        for part, damage in row["damage"].items()
    ]
    for line in damaged:
        out.print(f"[red]![/] {escape(line)}", soft_wrap=True)
    without_spec = games_without_spec(config.folder, RegistrySpecs(registry))
    if without_spec:
        problem, advice = waiting_for_spec(without_spec)
        out.print(f"[yellow]![/] {escape(problem)}; next: {escape(advice)}", soft_wrap=True)
    fields = {"games": rows, "without_spec": without_spec}
    return finish(fields, as_json=as_json, code=1 if damaged else 0)


@games.command(
    epilog=examples(
        "understudy games check CartPole-v1", "understudy games check my-game.json --data D --json"
    ),
    help="Check whether a game can be recorded and, given a data folder, whether it is registered; "
    f"exits 1 if it is not registered.\n\n{_GAME_HELP}",
)
@click.argument("game")
@_obs_option
@_actions_option
@common_options
def check(
    data_text: str | None, as_json: bool, game: str, obs: int | None, actions: str | None
) -> int:
    has_folder = bool(resolve({"data": data_text}).config.data)
    registry = deployment(data_text, must_exist=True).registry if has_folder else None
    if obs is None and actions is None:
        spec = _known_spec(game, registry) or _env_spec(game, registry)
    else:
        spec = _spec(game, obs, actions)
    fields = _fields(spec)
    out = console(as_json=as_json)
    out.print(f"{spec.game} can be recorded: {_summary(spec)}, schema {spec.schema[:12]}")
    if registry is None:
        return finish(fields, as_json=as_json)
    schemas = [known.schema for known in registry.specs(spec.game, skips_damaged=True)]
    is_registered = spec.schema in schemas
    if is_registered:
        out.print("it is registered")
    else:
        prefixes = ", ".join(schema[:12] for schema in schemas[:4])
        others = f", only with schema {prefixes}" if schemas else ""
        out.print(f"it is [yellow]not registered[/]{others}; next: understudy games add {game}")
    return finish(
        {**fields, "is_registered": is_registered}, as_json=as_json, code=0 if is_registered else 1
    )


def _known_spec(game: str, registry: Registry | None) -> GameSpec | None:
    """The spec of a registered game: its env's, or the registered one if it has no env here.

    None for files and unregistered games.
    """
    if registry is None or game.endswith(".json") or game not in registry.games():
        return None
    try:
        return _spec(game, None, None)
    except ConfigError:
        return registry.specs(game)[0]


def _env_spec(game: str, registry: Registry | None) -> GameSpec:
    """The spec of an env or file; if there is none, ConfigError may name a registered game."""
    try:
        return _spec(game, None, None)
    except ConfigError as error:
        known = [] if registry is None or game.endswith(".json") else registry.games()
        near = difflib.get_close_matches(game, known, n=1)
        if not near:
            raise
        raise ConfigError(f"{error}; the registered game is {near[0]!r}") from None


def _spec(game: str, obs: int | None, actions: str | None) -> GameSpec:
    if (obs is None) != (actions is None):
        raise ConfigError(
            "your own game needs both --obs and --actions; give both, or neither for a Gymnasium id"
        )
    if obs is not None and actions is not None:
        if not all(name.strip() for name in actions.split(",")):
            raise ConfigError(
                f"--actions is {actions[:80]!r}; give a count such as 3, or names such as up,down"
            )
        return game_spec(
            game, obs=obs, actions=int(actions) if actions.isdecimal() else actions.split(",")
        )
    if not game.endswith(".json"):
        import_from_here()
        return inspect_env(GameChoice(game=game)).spec
    try:
        return spec_from_json(Path(game).read_bytes())
    except OSError as error:
        raise ConfigError(
            f"cannot read {game}: {error.strerror}; give a .json file with a game spec"
        ) from None


def _fields(spec: GameSpec) -> dict[str, Any]:
    return {
        "game": spec.game,
        "schema": spec.schema,
        "observation": describe(spec.obs),
        "actions": describe(spec.action),
    }


def _summary(spec: GameSpec) -> str:
    return f"observations {describe(spec.obs)}, actions {describe(spec.action)}"
