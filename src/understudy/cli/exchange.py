"""understudy data export and understudy data import."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import Progress

from understudy.backends.addresses import check_backends
from understudy.backends.data import data_folder
from understudy.backends.local import open_view
from understudy.backends.specs import registered_specs
from understudy.cli.deployed import config_of, store_elsewhere
from understudy.cli.options import (
    PATH,
    common_options,
    console,
    count,
    examples,
    finish,
    results,
    size,
    store_option,
)
from understudy.core.errors import ConfigError
from understudy.core.names import game_name, player_name
from understudy.exchange.exporting import ExportFilter, OnSteps, copied, must_be_free, open_history
from understudy.experience.chunk import CONSENTS
from understudy.platform.config import resolve

if TYPE_CHECKING:
    from understudy.exchange.destination import Destination

_LINE_EVERY_S = 2.0


@click.command(
    name="export",
    epilog=examples(
        "understudy data export steps.parquet --data D --format parquet",
        "understudy data export people-v0 --data D --format minari --game CartPole-v1 --json",
    ),
)
@click.argument("out", type=PATH, metavar="OUT")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["parquet", "minari"]),
    required=True,
    help="What to write.",
)
@click.option("--game", help="Which game, where there are several.")
@click.option(
    "--schema", default="", help="The beginning of a schema's id, where a game has several."
)
@click.option("--player", help="Only steps of this player (the name the game gave).")
@click.option(
    "--consent",
    type=click.Choice(CONSENTS),
    multiple=True,
    help="Only steps under this consent; may be given twice. Default: any for parquet, granted for "
    "minari.",
)
@click.option(
    "--since",
    help="Only what came at this time or later, such as 2026-11-01 or 2026-11-01T12:00 (UTC).",
)
@click.option(
    "--with-player", is_flag=True, help="Add a column with each player's pseudonym (parquet)."
)
@store_option
@common_options
def export_data(
    data_text: str | None,
    as_json: bool,
    store_url: str | None,
    out: Path,
    kind: str,
    consent: tuple[str, ...],
    since: str | None,
    with_player: bool,
    **chosen: Any,
) -> int:
    """Write stored steps to OUT: a Parquet file with a row for each step, or a Minari dataset of
    whole episodes.

    OUT appears when it is whole, and never replaces anything.
    """
    if kind == "minari" and with_player:
        raise ConfigError("--with-player is for parquet; a Minari dataset has no place for players")
    # A Minari dataset is made to learn from, and does not tell consent apart.
    consent = consent or (("granted",) if kind == "minari" else ())
    wanted = ExportFilter(consent=consent, since_s=_since(since), **chosen)
    must_be_free(out)
    more: dict[str, Any] = {}
    with ExitStack() as opened:
        there = opened.enter_context(store_elsewhere(data_text, store_url))
        data = there.data if there else data_folder(data_text).must_exist()
        if there:
            view = opened.enter_context(copied(there.store, there.specs, wanted, beside=out))
        else:
            view = opened.enter_context(open_view(data.store))
        specs = (
            there.specs if there else registered_specs(data, models=config_of(data_text).models.url)
        )
        history = open_history(data, view, wanted, specs=specs)
        with _progress(console(as_json=as_json), f"exporting {history.spec.game}") as show:
            if kind == "parquet":
                from understudy.exchange.parquet import write_parquet

                written = write_parquet(history, out, with_player=with_player, on_steps=show)
            else:
                from understudy.exchange.minari import write_minari

                dataset = write_minari(history, out, on_steps=show)
                written = dataset.written
                more = {"dataset_id": dataset.dataset_id, "left_out": dict(dataset.left)}
    fields = {
        "out": str(written.path),
        "format": kind,
        "game": history.spec.game,
        "schema": history.spec.schema,
        "steps": written.steps,
        "episodes": written.episodes,
        "sessions": written.sessions,
        "size_bytes": written.size_bytes,
        "left_out_steps": dict(history.left_out),
        "gone_chunks": history.gone_chunks,
        **more,
    }
    if as_json:
        return finish(fields, as_json=True)
    say = console()
    say.print(
        f"wrote {count(written.steps)} steps in {count(written.episodes)} episodes of "
        f"{history.spec.game}, "
        f"{size(written.size_bytes)}: {written.path}",
        soft_wrap=True,
    )
    for name, steps in history.left_out.items():
        say.print(f"left out {count(steps)} steps with consent {name}; --consent {name} takes them")
    if history.gone_chunks:
        say.print(f"{history.gone_chunks} chunks were forgotten or expired meanwhile")
    if left := more.get("left_out"):
        say.print(
            f"left out {sum(left.values())} episodes that are not whole: {left['cut']} cut, "
            f"{left['unfinished']} "
            f"unfinished, {left['gaps']} with gaps"
        )
        say.print(f"open it: minari.MinariDataset({str(written.path / 'data')!r})", soft_wrap=True)
    return finish(fields, as_json=False)


@click.command(
    name="import",
    epilog=examples(
        "understudy data import steps.parquet --data D --format parquet",
        "understudy data import people-v0 --data D --format minari --game my-game --consent "
        "granted",
        "understudy data import records.jsonl --data D --format seed-a --repair-shift --consent "
        "granted",
    ),
)
@click.argument("files", type=PATH, nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["parquet", "minari", "seed-a"]),
    required=True,
    help="What the files are.",
)
@click.option("--game", help="The game's name here; default is what the files say.")
@click.option(
    "--player",
    help="Whose steps they are; default is 'imported', or what a file with pseudonyms says.",
)
@click.option(
    "--consent",
    type=click.Choice(CONSENTS),
    help="What the players agreed to; parquet files know it.",
)
@click.option(
    "--repair-shift",
    is_flag=True,
    help="seed-a: put each state before the action that it belongs to.",
)
@click.option(
    "--as-is", is_flag=True, help="seed-a: keep the records as they are, out of learners' reach."
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    help="seed-a: steps after which the game stops by itself.",
)
@click.option(
    "--actions",
    type=click.IntRange(min=1),
    help="seed-a: how many actions the game has, if nothing says so.",
)
@click.option("--game-id", help="seed-a: only records with this game id.")
@click.option(
    "--stream",
    "stream_url",
    metavar="URL",
    help="A stream elsewhere to send them by (default: the deployment's own).",
)
@store_option
@click.option(
    "--models",
    "models_url",
    metavar="URL",
    help="Where games are registered (default: the deployment's own).",
)
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="With a store elsewhere: seconds to wait for its ingest while nothing gets on.",
)
@common_options
def import_data(
    data_text: str | None,
    as_json: bool,
    files: tuple[Path, ...],
    kind: str,
    player: str | None,
    stream_url: str | None,
    store_url: str | None,
    models_url: str | None,
    wait_s: float,
    **options: Any,
) -> int:
    """Store the steps of FILES, each once, as if they had been recorded here.

    Files are read and judged as a whole first: a bad one stores nothing. The command may be killed
    at any moment and run again, and what is in the store already is left out.
    """
    from understudy.exchange.destination import Destination
    from understudy.exchange.importing import import_files

    flags = {
        "data": data_text,
        "stream.url": stream_url,
        "store.url": store_url,
        "models.url": models_url,
    }
    data = data_folder(data_text)
    config = resolve(flags).config
    check_backends(stream=config.stream.url, store=config.store.url)
    place = Destination(data, config, wait_s)
    name = None if player is None else player_name(player)
    incoming = _incoming(files, kind, place=place, **options)
    with _progress(console(as_json=as_json), f"importing {incoming[0].spec.game}") as show:
        result = import_files(place, incoming, player=name, on_steps=show)
    fields = {
        "format": kind,
        **result.to_json(),
        "next": place.next_step() if result.waiting_steps else "",
    }
    _print_import(results(as_json=as_json), fields, data_text or str(data.root))
    is_fine = not (result.refused_steps or result.waiting_steps or fields.get("refused_episodes"))
    return finish(fields, as_json=as_json, code=0 if is_fine else 1)


def _incoming(
    files: tuple[Path, ...],
    kind: str,
    *,
    place: "Destination",
    game: str | None,
    consent: str | None,
    repair_shift: bool,
    as_is: bool,
    **seed: Any,
) -> list[Any]:
    name = None if game is None else game_name(game)
    only_seed = {"repair_shift": repair_shift, "as_is": as_is, **seed}
    if kind != "seed-a" and (
        given := [one.replace("_", "-") for one, value in only_seed.items() if value]
    ):
        raise ConfigError(f"--{', --'.join(given)} only make sense with --format seed-a")
    if kind == "parquet":
        from understudy.exchange.parquet import ParquetFile

        return [ParquetFile(one, game=name, consent=consent) for one in files]
    if kind == "seed-a" and repair_shift == as_is:
        raise ConfigError(
            "the records' state is the one after the action; say --repair-shift to put that right "
            "(the first step of "
            "each episode is lost), or --as-is to keep them, out of learners' reach"
        )
    if consent is None and not as_is:
        raise ConfigError(
            f"{kind} files do not say what their players agreed to; give --consent "
            f"{', '.join(CONSENTS)} (learners "
            "read granted)"
        )
    if kind == "minari":
        from understudy.exchange.minari import MinariDataset

        return [MinariDataset(one, game=name, consent=str(consent)) for one in files]
    from understudy.exchange.seed_a import SeedA, SeedOptions

    mode: Any = "as-is" if as_is else "repair-shift"
    return [
        SeedA(
            files,
            SeedOptions(mode=mode, game=name, consent=consent or "unknown", **seed),
            registered=place.specs,
        )
    ]


def _print_import(out: Console, fields: dict[str, Any], data_text: str) -> None:
    out.print(
        f"{count(fields['steps'])} steps of {fields['game']} in {count(fields['sessions'])} "
        "sessions: stored "
        f"{count(fields['stored_steps'])}, there already {count(fields['there_steps'])}"
    )
    if fields["format"] == "seed-a":
        _print_seed(out, fields)
    elif fields.get("episodes_without_end"):
        out.print(f"{fields['episodes_without_end']} episodes have no end and were taken as cut")
    if fields["refused_steps"]:
        out.print(
            f"[red]{count(fields['refused_steps'])} steps were refused[/]: "
            f"{dict(fields['refusals'])}; next: "
            f"understudy data quarantine list --data {data_text}",
            soft_wrap=True,
        )
    if fields["waiting_steps"]:
        out.print(
            f"[yellow]{count(fields['waiting_steps'])} steps are in the stream and not stored "
            "yet[/]: "
            f"{fields['next']}",
            soft_wrap=True,
        )


def _print_seed(out: Console, fields: dict[str, Any]) -> None:
    out.print(
        f"{count(fields['records'])} records of {fields['game_id']!r}, {fields['duplicates']} of "
        "them doubled; "
        f"{fields['episodes']} episodes, {fields['episodes_without_end']} without an end, "
        f"{fields['gaps']} gaps"
    )
    if fields["mode"] == "as-is":
        out.print("kept as they are: misaligned, under consent denied, which no learner reads")
    else:
        out.print(
            f"lost {fields['lost_first_steps']} first steps, whose state before the action nobody "
            "recorded"
        )
    limit = "no limit is known" if fields["limit"] is None else f"the limit is {fields['limit']}"
    out.print(
        f"{fields['derived_truncations']} ends taken as truncations, derived from the step count "
        f"({limit})"
    )
    if fields["looks_aligned"]:
        out.print(
            "[yellow]these records look as if they had no shift: next_state is the following "
            "record's state[/]"
        )
    for name, why in list(fields["refused_episodes"].items())[:20]:
        out.print(f"[red]refused[/] {name}: {why}")


def _since(text: str | None) -> float:
    if text is None:
        return 0.0
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"--since is {text[:40]!r}; give a day or time, such as 2026-11-01 or 2026-11-01T12:00"
        ) from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


@contextmanager
def _progress(out: Console, title: str) -> Iterator[OnSteps]:
    """Shows how many steps are done: a bar in a terminal, a line now and then elsewhere."""
    if out.is_terminal:
        with Progress(console=out, transient=True) as bar:
            task = bar.add_task(title, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total or None)
        return
    next_s = time.monotonic() + _LINE_EVERY_S

    def line(done: int, total: int) -> None:
        nonlocal next_s
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + _LINE_EVERY_S
            out.print(
                f"{title}: {count(done)} of {count(total)} steps"
                if total
                else f"read {count(done)} steps"
            )

    yield line
