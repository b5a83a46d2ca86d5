"""understudy models: list, show, add, promote, roll back, export and hand out models."""

import time
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from understudy.app.export import export
from understudy.app.service.gatekeeper import model_rows, release_run
from understudy.cli.deployed import deployment
from understudy.cli.options import console, count, data_option, examples, finish, json_option, size
from understudy.core.errors import ConfigError
from understudy.core.manifest import open_policy
from understudy.models.cloud import CloudObjects


@click.group(epilog=examples("understudy models list --data D", "understudy models rollback my-game --data D"))
def models() -> None:
    """List, show, add, promote, roll back and export models."""


@models.command(
    name="list", epilog=examples("understudy models list --data D", "understudy models list my-game --data D --json")
)
@click.argument("game", required=False)
@data_option
@json_option
def list_models(data_text: str | None, as_json: bool, game: str | None) -> int:
    """List models, of one game or of all, with what points to them."""
    where = deployment(data_text, must_exist=True)
    games = [game] if game else where.registry.games()
    rows = model_rows(where, games)
    journals = {one: why for one in games if (why := where.registry.damage(one).get("journal"))}
    if not as_json:
        table = Table("model", "points here", "algorithm", "steps learnt from", "size")
        for row in rows:
            learnt = count(row["steps"]) if row["steps"] else ""
            points = ", ".join(row["aliases"]) + (" [red](damaged)[/]" if row["damage"] else "")
            table.add_row(row["model"], points, row["algorithm"], learnt, size(row["bytes"]))
        console().print(table if rows else "no models yet; next: understudy models add RUN, or let people play")
        for said in (*journals.values(), *(row["damage"] for row in rows if row["damage"])):
            console().print(f"[red]![/] {escape(said)}", soft_wrap=True)
    return finish({"models": rows, "journals": journals}, as_json=as_json)


@models.command(
    epilog=examples("understudy models show my-game/7 --data D", "understudy models show my-game/7 --data D --json")
)
@click.argument("model")
@data_option
@json_option
def show(data_text: str | None, as_json: bool, model: str) -> int:
    """Show a model's facts, and prove that its bytes are the ones that were signed."""
    registry = deployment(data_text, must_exist=True).registry
    manifest = registry.find(model)
    open_policy(manifest, registry.policy_bytes(manifest))
    champions = registry.catalogue(manifest.game).history
    history = [
        {"since_s": one.at_s, "why": one.why} for one in champions if one.model_no == manifest.model_no
    ]  # fmt: skip
    fields = {**manifest.to_json(), "model": manifest.name, "champion_since": history}
    del fields["golden"]
    if not as_json:
        _print(fields)
    return finish(fields, as_json=as_json)


def _print(fields: dict[str, Any]) -> None:
    out, lineage = console(), fields["lineage"]
    out.print(f"{fields['model']}: {size(fields['policy_bytes'])}, bytes and signature fit")
    parent = f", from model {lineage['parent']}" if lineage["parent"] else ""
    out.print(f"  {lineage['algorithm'] or 'by hand'}, seed {lineage['seed']}{parent}, {lineage['code_version']}")
    if lineage["steps"]:
        out.print(f"  learnt from {count(lineage['steps'])} steps")
    for name, value in lineage["metrics"].items():
        out.print(f"  {name} {value:g}")
    for one in fields["champion_since"]:
        out.print(f"  champion since {time.strftime('%Y-%m-%d %H:%M', time.localtime(one['since_s']))}: {one['why']}")


@models.command(
    epilog=examples("understudy models add runs/CartPole-v1-ppo-1 --data D", "understudy models add R --data D --json")
)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--policy", "which", type=click.Choice(["best", "last"]), default="best", show_default=True,
              help="Which of the run's policies.")  # fmt: skip
@data_option
@json_option
def add(data_text: str | None, as_json: bool, run: Path, which: str) -> int:
    """Release a finished run's policy as a model; it becomes champion at once where the game has none."""
    released = release_run(deployment(data_text), run, which=which)
    name = released.manifest.name
    if not as_json:
        console().print(f"released {name}" + (f"; champion: {released.verdict.why}" if released.is_champion else ""))
        if not released.is_champion:
            console().print(f"[dim]the champion stays; next: understudy models promote {name}[/]")
    fields = {"model": name, "model_no": released.manifest.model_no, "is_champion": released.is_champion}
    return finish({**fields, "why": released.verdict.why}, as_json=as_json)


@models.command(
    epilog=examples("understudy models promote my-game/7 --data D", "understudy models promote g/7 --why 'fun' --json")
)
@click.argument("model")
@click.option("--why", default="by hand", show_default=True, help="Kept in the model's history.")
@data_option
@json_option
def promote(data_text: str | None, as_json: bool, model: str, why: str) -> int:
    """Make a model the champion; players get it with their next episode."""
    registry = deployment(data_text, must_exist=True).registry
    manifest = registry.find(model)
    game, number = str(manifest.game), manifest.model_no
    registry.policy(game, number)  # its bytes are checked before anybody is sent to them
    before = registry.catalogue(game).points_to("champion")
    registry.point(game, "champion", number, why=why)
    return _pointed(game, number, before, as_json=as_json)


@models.command(
    epilog=examples("understudy models rollback my-game --data D", "understudy models rollback my-game --data D --json")
)
@click.argument("game")
@click.option("--why", default="by hand", show_default=True, help="Kept in the model's history.")
@data_option
@json_option
def rollback(data_text: str | None, as_json: bool, game: str, why: str) -> int:
    """Make the champion before this one champion again."""
    registry = deployment(data_text, must_exist=True).registry
    before = registry.catalogue(game).points_to("champion")
    return _pointed(game, registry.rollback(game, why=why), before, as_json=as_json)


@models.command(
    name="export",
    epilog=examples(
        "understudy models export rally/3 --safetensors --data D", "understudy models export rally/3 --json"
    ),
)
@click.argument("model")
@click.option(
    "--safetensors", "as_tensors", is_flag=True, help="The very bytes that were signed (this is the default)."
)
@click.option("--json", "as_json", is_flag=True, help="Everything as JSON; also prints facts as a line of JSON.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Where to (default: GAME-NUMBER.KIND).")
@data_option
def export_model(data_text: str | None, as_json: bool, as_tensors: bool, model: str, out: Path | None) -> int:
    """Write a model's policy into a file, with its SHA-256 beside it.

    MODEL is GAME/NUMBER, GAME/champion or GAME/canary.
    """
    if as_json and as_tensors:
        raise ConfigError("--json and --safetensors were given together; export once with each")
    registry = deployment(data_text, must_exist=True).registry
    done = export(registry, registry.find(model), kind="json" if as_json else "safetensors", out=out)
    console(as_json=as_json).print(
        f"{done.manifest.name} is in {done.path} ({size(done.size_bytes)}), SHA-256 {done.sha256}", soft_wrap=True
    )
    fields = {"model": done.manifest.name, "path": str(done.path), "bytes": done.size_bytes, "sha256": done.sha256}
    return finish(fields | {"policy_sha256": done.manifest.policy_sha256}, as_json=as_json)


@models.command(
    name="url",
    epilog=examples(
        "understudy models url rally/champion --data D", "understudy models url rally/3 --minutes 60 --data D --json"
    ),
)
@click.argument("model")
@click.option("--minutes", type=click.FloatRange(1, 7 * 24 * 60), default=15.0, show_default=True,
              help="How long the address works.")  # fmt: skip
@data_option
@json_option
def url_of_model(data_text: str | None, as_json: bool, model: str, minutes: float) -> int:
    """Sign an address from which anybody may fetch a model's policy for a while; for models in S3 and other clouds.

    MODEL is GAME/NUMBER, GAME/champion or GAME/canary. Whoever fetches it compares the SHA-256.
    """
    opened = deployment(data_text, must_exist=True)
    if not isinstance(opened.objects, CloudObjects):
        raise ConfigError("these models are in a folder, which has no addresses; give models.url, such as s3://BUCKET")
    manifest = opened.registry.find(model)
    address = opened.objects.signed_url(opened.registry.policy_object(manifest), for_s=minutes * 60)
    fields = {"model": manifest.name, "url": address, "policy_sha256": manifest.policy_sha256}
    if not as_json:
        console().print(f"{address}\n{manifest.name}, for {minutes:g} minutes; SHA-256 {manifest.policy_sha256}",
                        soft_wrap=True, markup=False)  # fmt: skip
    return finish(fields, as_json=as_json)


def _pointed(game: str, number: int, before: int, *, as_json: bool) -> int:
    if not as_json:
        was = f" (before: {game}/{before})" if before and before != number else ""
        console().print(f"champion of {game} is {game}/{number}{was}")
    return finish({"game": game, "champion": number, "before": before}, as_json=as_json)
