"""understudy data export and understudy data import."""

import json
import shlex
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from understudy.backends.addresses import check_backends
from understudy.backends.data import data_folder
from understudy.backends.local import open_view
from understudy.backends.specs import registered_specs
from understudy.cli.deployed import config_of, remote_store
from understudy.cli.options import (
    PATH,
    FiniteRange,
    common_options,
    console,
    count_of,
    examples,
    finish,
    format_count,
    format_size,
    results,
    store_option,
)
from understudy.core.errors import ConfigError
from understudy.core.names import game_name, player_name
from understudy.core.wording import pairs
from understudy.exchange.exporting import (
    ExportFilter,
    OnSteps,
    check_not_exists,
    local_copy,
    open_history,
)
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
    help="Format of the output.",
)
@click.option("--game", help="The game to export, if the store has several.")
@click.option(
    "--schema", default="", help="A schema id or its first digits, if the game has several schemas."
)
@click.option("--player", help="Only steps of this player (the name that the game uses).")
@click.option(
    "--consent",
    type=click.Choice(CONSENTS),
    multiple=True,
    help="Only steps with this consent; repeatable (default: any for parquet, granted for minari).",
)
@click.option(
    "--since",
    help="Only steps received since this time, such as 2026-11-01 or 2026-11-01T12:00 (UTC).",
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
    """Export stored steps to OUT: a Parquet file of steps, or a Minari dataset of whole episodes.

    OUT is created only when the export is complete, and never replaces an existing file.
    """
    if kind == "minari" and with_player:
        raise ConfigError(
            "--with-player needs --format parquet; a Minari dataset has no column for players"
        )
    # A Minari dataset is meant for learning and does not record consent: export only granted steps.
    consent = consent or (("granted",) if kind == "minari" else ())
    export_filter = ExportFilter(consent=consent, since_s=_since(since), **chosen)
    check_not_exists(out)
    more: dict[str, Any] = {}
    with ExitStack() as opened:
        remote = opened.enter_context(remote_store(data_text, store_url))
        data = remote.data if remote else data_folder(data_text).must_exist()
        if remote:
            specs = remote.specs
            view = opened.enter_context(local_copy(remote.store, specs, export_filter, beside=out))
        else:
            view = opened.enter_context(open_view(data.store))
            specs = registered_specs(data, models=config_of(data_text).models.url)
        history = open_history(data, view, export_filter, specs=specs)
        with _progress(console(as_json=as_json), f"exporting {history.spec.game}") as show:
            if kind == "parquet":
                from understudy.exchange.parquet import write_parquet

                written = write_parquet(history, out, with_player=with_player, on_steps=show)
            else:
                from understudy.exchange.minari import write_minari

                dataset = write_minari(history, out, on_steps=show)
                written = dataset.written
                more = {"dataset_id": dataset.dataset_id, "left_out": dict(dataset.omitted)}
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
    terminal = console()
    terminal.print(
        f"wrote {count_of(written.steps, 'step')} in {count_of(written.episodes, 'episode')} "
        f"of {history.spec.game}, {format_size(written.size_bytes)}: {written.path}",
        soft_wrap=True,
    )
    for name, steps in history.left_out.items():
        terminal.print(
            f"skipped {count_of(steps, 'step')} with consent {name}; to include them, add "
            f"--consent {name}"
        )
    if history.gone_chunks:
        chunks = count_of(history.gone_chunks, "chunk")
        terminal.print(f"forgotten or expired during the export: {chunks}")
    if omitted := more.get("left_out"):
        terminal.print(
            f"skipped {count_of(sum(omitted.values()), 'incomplete episode')}: {omitted['cut']} "
            f"cut (without an end), {omitted['unfinished']} unfinished, {omitted['gaps']} with gaps"
        )
        terminal.print(
            f"open it in Python: minari.MinariDataset({str(written.path / 'data')!r})",
            soft_wrap=True,
        )
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
    help="parquet: files of `data export`. minari: Minari datasets. seed-a: JSON records of the "
    "pipeline that understudy grew out of (docs/exchange.md).",
)
@click.option("--game", help="Store under this game name (default: the name in the files).")
@click.option(
    "--player",
    help="The player to store the steps under (default: the file's pseudonyms, else `imported`).",
)
@click.option(
    "--consent",
    type=click.Choice(CONSENTS),
    help="Whether bots may learn from the steps (default for parquet: as in the file).",
)
@click.option(
    "--repair-shift",
    is_flag=True,
    help="seed-a: each record has the state after its action; use the state of the previous record "
    "as the observation. Either this or --as-is is required.",
)
@click.option(
    "--as-is",
    is_flag=True,
    help="seed-a: import the records unchanged, with consent `denied`: no learner uses them.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    help="seed-a: the game's step limit; an episode that ends there counts as truncated.",
)
@click.option(
    "--actions",
    type=click.IntRange(min=1),
    help="seed-a: the number of actions, if the files do not state it.",
)
@click.option("--game-id", help="seed-a: only records with this game id.")
@click.option(
    "--stream",
    "stream_url",
    metavar="URL",
    help="The stream to send the steps through (default: the deployment's own).",
)
@store_option
@click.option(
    "--models",
    "models_url",
    metavar="URL",
    help="The registry of games and models (default: the deployment's own).",
)
@click.option(
    "--wait",
    "wait_s",
    type=FiniteRange(min=0),
    default=60.0,
    show_default=True,
    help="With a remote store: give up after this many seconds without progress of ingest.",
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

    All files are checked before any step is stored: if one is invalid, nothing is stored. The
    command can be killed at any moment and run again; steps that are already stored are skipped.
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
    destination = Destination(data, config, wait_s)
    name = None if player is None else player_name(player)
    incoming = _incoming(files, kind, destination=destination, **options)
    with _progress(console(as_json=as_json), f"importing {incoming[0].spec.game}") as show:
        result = import_files(destination, incoming, player=name, on_steps=show)
    fields = {
        "format": kind,
        **result.to_json(),
        "next": destination.next_step() if result.waiting_steps else "",
    }
    _print_import(results(as_json=as_json), fields, data_text or str(data.root))
    has_failed = result.refused_steps or result.waiting_steps or fields.get("refused_episodes")
    return finish(fields, as_json=as_json, code=1 if has_failed else 0)


def _incoming(
    files: tuple[Path, ...],
    kind: str,
    *,
    destination: "Destination",
    game: str | None,
    consent: str | None,
    repair_shift: bool,
    as_is: bool,
    **seed: Any,
) -> list[Any]:
    name = None if game is None else game_name(game)
    only_seed = {"repair_shift": repair_shift, "as_is": as_is, **seed}
    flags = [f"--{flag.replace('_', '-')}" for flag, value in only_seed.items() if value]
    if kind != "seed-a" and flags:
        raise ConfigError(
            f"{', '.join(flags)} cannot be used with --format {kind}; use --format seed-a"
        )
    if kind == "parquet":
        from understudy.exchange.parquet import ParquetFile

        return [ParquetFile(path, game=name, consent=consent) for path in files]
    if kind == "seed-a" and repair_shift == as_is:
        raise ConfigError(
            "seed-a records have the state after the action; give --repair-shift to correct that "
            "(the first step of each episode is lost), or --as-is to import them unchanged, with "
            "consent denied, so that no learner uses them"
        )
    if consent is None and not as_is:
        raise ConfigError(
            f"{kind} files do not record the players' consent; give --consent with one of "
            f"{', '.join(CONSENTS)}; learners use only granted steps"
        )
    if kind == "minari":
        from understudy.exchange.minari import MinariDataset

        return [MinariDataset(path, game=name, consent=str(consent)) for path in files]
    from understudy.exchange.seed_a import SeedA, SeedOptions

    mode: Any = "as-is" if as_is else "repair-shift"
    return [
        SeedA(
            files,
            SeedOptions(mode=mode, game=name, consent=consent or "unknown", **seed),
            registered=destination.specs,
        )
    ]


def _print_import(out: Console, fields: dict[str, Any], data_text: str) -> None:
    out.print(
        f"{count_of(fields['steps'], 'step')} of {fields['game']} in "
        f"{count_of(fields['sessions'], 'session')}: stored "
        f"{format_count(fields['stored_steps'])}, already stored "
        f"{format_count(fields['there_steps'])}"
    )
    if fields["format"] == "seed-a":
        _print_seed(out, fields)
    elif fields.get("episodes_without_end"):
        episodes = count_of(fields["episodes_without_end"], "episode")
        out.print(f"stored as cut, without an end: {episodes}")
    if fields.get("env_kwargs"):
        arguments = shlex.quote(json.dumps(fields["env_kwargs"]))
        out.print(
            f"its env was created with arguments; train with: --env-kwargs {escape(arguments)}",
            soft_wrap=True,
        )
    if fields["refused_steps"]:
        out.print(
            f"[red]rejected {count_of(fields['refused_steps'], 'step')}[/]: "
            f"{pairs(fields['refusals'])}; next: understudy data quarantine list --data "
            f"{data_text}",
            soft_wrap=True,
        )
    if fields["waiting_steps"]:
        out.print(
            "[yellow]in the stream but not yet stored: "
            f"{count_of(fields['waiting_steps'], 'step')}[/]: {fields['next']}",
            soft_wrap=True,
        )


def _print_seed(out: Console, fields: dict[str, Any]) -> None:
    out.print(
        f"{count_of(fields['records'], 'record')} of {fields['game_id']!r}, "
        f"{count_of(fields['duplicates'], 'duplicate')}; "
        f"{count_of(fields['episodes'], 'episode')}, "
        f"{fields['episodes_without_end']} without an end, {count_of(fields['gaps'], 'gap')}"
    )
    if fields["mode"] == "as-is":
        out.print(
            "stored unchanged: each observation is the state after its action, so consent is "
            "denied and no learner uses these steps"
        )
    else:
        out.print(
            f"lost {fields['lost_first_steps']} first steps of episodes: the state before their "
            "action was not recorded"
        )
    limit = "no known limit" if fields["limit"] is None else f"the limit is {fields['limit']}"
    out.print(
        f"{fields['derived_truncations']} episode ends classified as truncations by step count "
        f"({limit})"
    )
    if fields["looks_aligned"]:
        out.print(
            "[yellow]these records do not seem to be shifted: next_state equals the following "
            "record's state, so --repair-shift would shift them wrongly; check the records[/]"
        )
    for name, reason in list(fields["refused_episodes"].items())[:20]:
        out.print(f"[red]rejected[/] {name}: {reason}")


def _since(text: str | None) -> float:
    if text is None:
        return 0.0
    try:
        since = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"--since is {text[:40]!r}; give a date or time, such as 2026-11-01 or 2026-11-01T12:00"
        ) from None
    return (since if since.tzinfo else since.replace(tzinfo=UTC)).timestamp()


@contextmanager
def _progress(out: Console, title: str) -> Iterator[OnSteps]:
    """Yield a function that shows how many steps are done: a bar in a terminal, else lines."""
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
                f"{title}: {format_count(done)} of {format_count(total)} steps"
                if total
                else f"read {format_count(done)} steps"
            )

    yield line
