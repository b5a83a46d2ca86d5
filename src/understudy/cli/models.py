"""understudy models: list, show, add, promote, roll back, withdraw, export and share models."""

import contextlib
import hashlib
import json
import math
import os
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import click
from rich.markup import escape

from understudy.backends.data import DataFolder
from understudy.cli.deployed import deployment
from understudy.cli.options import (
    PATH,
    FiniteRange,
    ResultTable,
    common_options,
    console,
    count_of,
    data_option,
    examples,
    finish,
    format_count,
    format_size,
    paragraph,
    results,
)
from understudy.core.canonical import canonical_json
from understudy.core.errors import ConfigError
from understudy.core.log import storage_error
from understudy.core.plural import plural
from understudy.models.cloud import CloudObjects
from understudy.models.manifest import Manifest, open_policy
from understudy.models.registry import SCHEMA_CHARS, Registry
from understudy.nn.heads import head_to_json
from understudy.nn.network import Centre, network_to_json
from understudy.nn.policy import Policy
from understudy.platform.platform import read_roles
from understudy.release.gatekeeper import model_rows, release_run

Kind = Literal["safetensors", "json"]


@click.group(
    epilog=examples(
        "understudy models list --data D", "understudy models rollback my-game --data D"
    )
)
def models() -> None:
    """List, show, add, promote, roll back, withdraw and export models."""


@models.command(
    name="list",
    epilog=examples(
        "understudy models list --data D", "understudy models list my-game --data D --json"
    ),
)
@click.argument("game", required=False)
@common_options
def list_models(data_text: str | None, as_json: bool, game: str | None) -> int:
    """List the models of GAME, or of all games: aliases, returns (episodes) and verdicts.

    Exits 1 if a journal or a model is damaged.
    """
    opened = deployment(data_text, must_exist=True)
    if game:
        opened.registry.check_game(game)
    games = [game] if game else opened.registry.games()
    rows = model_rows(opened, games)
    returns = _returns(opened.data)
    for row in rows:
        row["returns"] = returns.get(row["model"])
    journals = {
        name: damage for name in games if (damage := opened.registry.damage(name).get("journal"))
    }
    table = ResultTable("model", "alias", "algorithm", "training steps", "return", "size", "schema")
    for row in rows:
        steps = format_count(row["steps"]) if row["steps"] else ""
        aliases = ", ".join(row["aliases"]) + (" [red](damaged)[/]" if row["damage"] else "")
        size = format_size(row["bytes"])
        schema = row["schema"][:SCHEMA_CHARS]
        played = row["returns"]
        return_ = f"{played['mean']:.4g} ({format_count(played['episodes'])})" if played else ""
        table.add_row(row["model"], aliases, row["algorithm"], steps, return_, size, schema)
    out = results(as_json=as_json)
    out.print(
        table if rows else "no models yet; next: understudy models add RUN, or let people play"
    )
    for row in rows:
        if row["verdict"]:
            text = f"{row['model']}: {row['verdict']}"
            out.print(paragraph(text, width=out.width), soft_wrap=True, markup=False)
    damaged = [*journals.values(), *(row["damage"] for row in rows if row["damage"])]
    for damage in damaged:
        out.print(f"[red]![/] {escape(damage)}", soft_wrap=True)
    fields = {"models": rows, "journals": journals}
    return finish(fields, as_json=as_json, code=1 if damaged else 0)


def _returns(data: DataFolder) -> dict[str, Any]:
    """Mean return and number of episodes of each model that has played, as the learner reports."""
    learners = [role for role in read_roles(data, time.time()) if role["role"] == "learner"]
    games = learners[0]["report"].get("games", {}) if learners else {}
    return {
        model: played
        for game in games.values()
        for model, played in game.get("returns", {}).items()
    }


@models.command(
    epilog=examples(
        "understudy models show my-game/7 --data D",
        "understudy models show my-game/7 --data D --json",
    )
)
@click.argument("model")
@common_options
def show(data_text: str | None, as_json: bool, model: str) -> int:
    """Show a model's metadata, and verify its bytes and signature."""
    registry = deployment(data_text, must_exist=True).registry
    manifest = registry.find(model)
    policy = open_policy(manifest, registry.policy_bytes(manifest))
    promotions = [
        promotion
        for promotion in registry.catalogue(manifest.game).history
        if promotion.model_no == manifest.model_no
    ]
    history = [{"since_s": promotion.at_s, "why": promotion.why} for promotion in promotions]
    fields = {**manifest.to_json(), "model": manifest.name, "champion_since": history}
    fields["centre"] = _centres(policy)
    fields["symmetry"] = _symmetry(manifest)
    del fields["golden"]
    out = results(as_json=as_json)
    lineage = fields["lineage"]
    out.print(
        f"{manifest.name}: {format_size(fields['policy_bytes'])}, bytes and signature are valid"
    )
    parent = f", from model {lineage['parent']}" if lineage["parent"] else ""
    out.print(
        f"  {lineage['algorithm'] or 'by hand'}, seed {lineage['seed']}{parent}, "
        f"{lineage['code_version']}"
    )
    if lineage["steps"]:
        out.print(f"  trained on {count_of(lineage['steps'], 'step')}")
    if started_from := lineage["config"].get("started_from"):
        out.print(f"  first weights from {started_from}")
    for text in fields["centre"]:
        out.print(f"  sees {text}", soft_wrap=True, markup=False)
    if fields["symmetry"]:
        out.print(f"  learned from mirror images: {fields['symmetry']}", soft_wrap=True)
    for name, value in lineage["metrics"].items():
        out.print(f"  {name} {value:g}")
    for promotion in promotions:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(promotion.at_s))
        text = f"champion since {since}: {promotion.why}"
        out.print(paragraph(text, width=out.width, indent="  "), soft_wrap=True, markup=False)
    return finish(fields, as_json=as_json)


def _symmetry(manifest: Manifest) -> str:
    """The mirror images that a model of the learner service has learned from; empty: none."""
    try:
        settings = tomllib.loads(str(manifest.lineage.config.get("settings", "")))
    except tomllib.TOMLDecodeError:  # of another program
        return ""
    symmetry = settings.get("config", {}).get("symmetry", "")
    return "" if symmetry == "none" else str(symmetry)


def _centres(policy: Policy) -> list[str]:
    """From which cell a policy sees each grid that it does not see as a whole."""

    def number(place: tuple[str, int] | tuple[()]) -> str:
        assert place
        name, index = place
        size = math.prod(policy.game.obs_columns[name].shape)
        return name if size == 1 else f"{name}[{size + index}]"

    texts = []
    for name, column in policy.network.inputs.items():
        for layer in column.layers:
            if isinstance(layer, Centre):
                cell = f"of channel {layer.channel}"
                if layer.channel < 0:
                    cell = f"in row {number(layer.row)}, column {number(layer.column)}"
                texts.append(f"{name} from the cell {cell}, up to {layer.radius} cells away")
    return texts


@models.command(
    epilog=examples(
        "understudy models add runs/CartPole-v1-ppo-1 --data D",
        "understudy models add R --data D --json",
    )
)
@click.argument("run", type=PATH)
@click.option(
    "--policy",
    "which",
    type=click.Choice(["best", "last"]),
    default="best",
    show_default=True,
    help="Which policy of the run to release.",
)
@common_options
def add(data_text: str | None, as_json: bool, run: Path, which: str) -> int:
    """Release a finished run's policy as a model; the first of a schema becomes its champion."""
    released = release_run(deployment(data_text), run, which=which)
    name = released.manifest.name
    why = released.decision.why
    out = results(as_json=as_json)
    out.print(f"released {name}" + (f"; champion: {why}" if released.is_champion else ""))
    if not released.is_champion:
        out.print(f"[dim]the champion is unchanged; next: understudy models promote {name}[/]")
    fields = {
        "model": name,
        "model_no": released.manifest.model_no,
        "is_champion": released.is_champion,
    }
    return finish({**fields, "why": why}, as_json=as_json)


@models.command(
    epilog=examples(
        "understudy models promote my-game/7 --data D",
        "understudy models promote g/7 --why 'fun' --json",
    )
)
@click.argument("model")
@click.option(
    "--why", default="by hand", show_default=True, help="Reason, stored in the model's history."
)
@common_options
def promote(data_text: str | None, as_json: bool, model: str, why: str) -> int:
    """Make a model the champion; players get it in their next episode."""
    registry = deployment(data_text, must_exist=True).registry
    manifest = registry.find(model)
    game = str(manifest.game)
    number = manifest.model_no
    registry.policy(game, number)  # verifies the policy before any player gets it
    before = registry.catalogue(game).model_of("champion", manifest.schema)
    registry.set_alias(game, "champion", number, why=why)
    return _pointed(game, number, before, as_json=as_json)


@models.command(
    epilog=examples(
        "understudy models rollback my-game --data D",
        "understudy models rollback my-game --data D --json",
    )
)
@click.argument("game")
@click.option(
    "--why", default="by hand", show_default=True, help="Reason, stored in the model's history."
)
@click.option(
    "--schema",
    metavar="SCHEMA",
    help="Schema of the game, or its first characters (default: the newest with a champion).",
)
@common_options
def rollback(data_text: str | None, as_json: bool, game: str, why: str, schema: str | None) -> int:
    """Make the previous champion of GAME champion again."""
    registry = deployment(data_text, must_exist=True).registry
    registry.check_game(game)
    now = registry.catalogue(game)
    number = registry.rollback(game, why=why, schema=schema)
    before = now.model_of("champion", now.models[number].schema)
    return _pointed(game, number, before, as_json=as_json)


@models.command(
    epilog=examples(
        "understudy models withdraw my-game --data D",
        "understudy models withdraw my-game --why 'it cheats' --data D --json",
    )
)
@click.argument("game")
@click.option(
    "--why", default="by hand", show_default=True, help="Reason, stored in the game's journal."
)
@click.option(
    "--schema",
    metavar="SCHEMA",
    help="Schema of the game, or its first characters (default: the newest with a canary).",
)
@common_options
def withdraw(data_text: str | None, as_json: bool, game: str, why: str, schema: str | None) -> int:
    """Withdraw the canary of GAME: it stops playing, and the next candidate can be tried."""
    registry = deployment(data_text, must_exist=True).registry
    registry.check_game(game)
    number = registry.withdraw(game, why=why, schema=schema)
    results(as_json=as_json).print(f"{game}/{number} is no longer the canary of {game}")
    return finish({"game": game, "withdrawn": number}, as_json=as_json)


@models.command(
    epilog=examples(
        "understudy models repair my-game --data D",
        "understudy models repair my-game --data D --json",
    )
)
@click.argument("game")
@common_options
def repair(data_text: str | None, as_json: bool, game: str) -> int:
    """Accept the journal of GAME although entries of it are damaged or gone.

    Models and promotions in those entries are lost. If there is a backup of models/registry/GAME
    with them, restore them instead: nothing is lost then.
    """
    registry = deployment(data_text, must_exist=True).registry
    registry.check_game(game)
    is_repaired = registry.repair(game)
    now = registry.catalogue(game)
    champion = now.model_of("champion")
    results(as_json=as_json).print(
        f"{game} continues with {count_of(len(now.models), 'model')}; its champion is "
        + (f"{game}/{champion}" if champion else "none")
        if is_repaired
        else f"the journal of {game} needs no repair; nothing was changed"
    )
    fields = {"game": game, "repaired": is_repaired, "models": len(now.models)}
    return finish({**fields, "champion": champion}, as_json=as_json)


@models.command(
    name="export",
    epilog=examples(
        "understudy models export rally/3 --safetensors --data D",
        "understudy models export rally/3 --json",
    ),
)
@click.argument("model")
@click.option(
    "--safetensors",
    "as_tensors",
    is_flag=True,
    help="Write the exact bytes that were signed (the default).",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Write the policy as JSON; also print one JSON object as the last line.",
)
@click.option(
    "--out",
    type=PATH,
    metavar="FILE",
    help="Output file (default: GAME-NUMBER.safetensors or .json).",
)
@data_option
def export_model(
    data_text: str | None, as_json: bool, as_tensors: bool, model: str, out: Path | None
) -> int:
    """Write a model's policy to a file, and its SHA-256 beside it.

    MODEL is GAME/NUMBER, GAME/champion or GAME/canary.
    """
    if as_json and as_tensors:
        raise ConfigError("--json and --safetensors exclude each other; export once with each")
    registry = deployment(data_text, must_exist=True).registry
    manifest = registry.find(model)
    path, size_bytes, sha256 = export(
        registry, manifest, kind="json" if as_json else "safetensors", out=out
    )
    console(as_json=as_json).print(
        f"wrote {manifest.name} to {path} ({format_size(size_bytes)}), SHA-256 {sha256}",
        soft_wrap=True,
    )
    fields = {"model": manifest.name, "path": str(path), "bytes": size_bytes, "sha256": sha256}
    return finish(fields | {"policy_sha256": manifest.policy_sha256}, as_json=as_json)


@models.command(
    name="url",
    epilog=examples(
        "understudy models url rally/champion --data D",
        "understudy models url rally/3 --minutes 60 --data D --json",
    ),
)
@click.argument("model")
@click.option(
    "--minutes",
    type=FiniteRange(1, 7 * 24 * 60),
    default=15.0,
    show_default=True,
    help="How long the URL is valid.",
)
@common_options
def url_of_model(data_text: str | None, as_json: bool, model: str, minutes: float) -> int:
    """Print a signed, expiring URL of a model's policy, and its SHA-256 to compare with.

    MODEL is GAME/NUMBER, GAME/champion or GAME/canary. Needs models in object storage, such as S3.
    """
    opened = deployment(data_text, must_exist=True)
    if not isinstance(opened.objects, CloudObjects):
        raise ConfigError(
            "these models are in a folder, which has no URLs; set models.url to object storage, "
            "such as s3://BUCKET"
        )
    manifest = opened.registry.find(model)
    address = opened.objects.signed_url(opened.registry.policy_object(manifest), for_s=minutes * 60)
    fields = {"model": manifest.name, "url": address, "policy_sha256": manifest.policy_sha256}
    results(as_json=as_json).print(
        f"{address}\n{manifest.name}, valid for {minutes:g} {plural(minutes, 'minute')}; SHA-256 "
        f"{manifest.policy_sha256}",
        soft_wrap=True,
        markup=False,
    )
    return finish(fields, as_json=as_json)


def _pointed(game: str, number: int, before: int, *, as_json: bool) -> int:
    previous = f" (before: {game}/{before})" if before and before != number else ""
    results(as_json=as_json).print(f"champion of {game} is {game}/{number}{previous}")
    return finish({"game": game, "champion": number, "before": before}, as_json=as_json)


# --- Export ---------------------------------------------------------------------------------------


def export(
    registry: Registry, manifest: Manifest, *, kind: Kind, out: Path | None = None
) -> tuple[Path, int, str]:
    """Write a model's policy: its signed bytes, or JSON for programs that cannot read safetensors.

    A checksum file for `sha256sum --check` is written beside it. Returns path, size in bytes and
    SHA-256.
    """
    name = f"{manifest.game}-{manifest.model_no}.{kind}"
    raw = registry.policy_bytes(manifest)
    policy = open_policy(manifest, raw)
    if kind == "json":
        # All that a program needs to run this bot, as plain JSON; weights are nested lists.
        raw = canonical_json(
            {
                "format": "understudy-policy-json/1",
                "model": manifest.name,
                "policy_sha256": manifest.policy_sha256,
                "game": json.loads(policy.game.to_json()),
                "network": json.loads(network_to_json(policy.network)),
                "head": head_to_json(policy.head),
                "stack": policy.stack,
                "weights": {name: array.tolist() for name, array in sorted(policy.weights.items())},
            }
        )
    path = (out or Path(name)).resolve()
    sums = path.with_name(f"{path.name}.sha256")
    digest = hashlib.sha256(raw).hexdigest()
    _write({path: raw, sums: f"{digest}  {path.name}\n".encode()}, suggestion=path / name)
    return path, len(raw), digest


def _write(files: Mapping[Path, bytes], *, suggestion: Path) -> None:
    """Write all files, then rename them; an error while writing changes no existing file."""
    drafts = {path: path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in files}
    try:
        for path in files:
            if path.is_dir():
                raise ConfigError(f"{path} is a folder; give a file, such as {suggestion}")
            if path.exists() and not path.is_file():
                raise ConfigError(f"{path} is a device or a pipe, not a file; give a file")
            if not path.parent.is_dir():
                raise ConfigError(f"folder {path.parent} does not exist; create it first")
        for path, raw in files.items():
            with drafts[path].open("wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
        for path, draft in drafts.items():
            os.replace(draft, path)
    except OSError as error:
        raise storage_error(
            error, f"writing {', '.join(path.name[:80] for path in files)}"
        ) from None
    finally:
        for draft in drafts.values():
            with contextlib.suppress(OSError):
                draft.unlink()
