"""understudy data: look at, verify, export, import and erase recorded data."""

import time
from contextlib import ExitStack
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from understudy.backends.data import data_folder, stats_elsewhere
from understudy.backends.data import stats as count_stats
from understudy.backends.local import open_view
from understudy.cli.deployed import config_of, released_models, store_elsewhere
from understudy.cli.exchange import export_data, import_data
from understudy.cli.options import (
    common_options,
    count,
    examples,
    finish,
    results,
    size,
    store_option,
)
from understudy.core.log import is_locked
from understudy.platform.erase import (
    compact_store,
    forget_elsewhere,
    forget_player,
    replay_quarantine,
)
from understudy.platform.ingest import replay as replay_frames
from understudy.ports import SessionFilter
from understudy.simulation.verify import Verification, digests, verify_elsewhere, whole
from understudy.simulation.verify import verify as verify_data


@click.group(
    epilog=examples("understudy data stats --data D", "understudy data verify --data D --json")
)
def data() -> None:
    """Look at, verify, export, import and erase recorded data."""


data.add_command(export_data)
data.add_command(import_data)


@data.command(
    epilog=examples(
        "understudy data stats --data D", "UNDERSTUDY_DATA=D understudy data stats --json"
    )
)
@store_option
@common_options
def stats(data_text: str | None, as_json: bool, store_url: str | None) -> int:
    """Count steps, sessions, quarantine and bytes.

    A store elsewhere is read from end to end; how large it is, its own tools tell.
    """
    with store_elsewhere(data_text, store_url) as there:
        fields = (
            stats_elsewhere(there.data, there.store)
            if there
            else count_stats(data_folder(data_text).must_exist())
        )
    out = results(as_json=as_json)
    steps, chunks, sessions = (count(fields[name]) for name in ("steps", "chunks", "sessions"))
    said = f"{steps} steps in {chunks} chunks of {sessions} sessions"
    if there is None and fields["free_bytes"]:
        said += f"; {size(fields['free_bytes'])} free inside the database (understudy data compact)"
    out.print(said)
    for game, of_it in fields["games"].items():
        out.print(f"  {game}: {count(of_it)} steps")
    out.print(f"quarantined {fields['quarantined'] or 0}, parked {fields['parked']}")
    used = ", ".join(f"{name} {size(of_it)}" for name, of_it in fields["bytes"].items())
    if there is not None:
        used = f"in the data folder: {used or 'nothing'}; how large the store is, its servers tell"
    out.print(used, soft_wrap=True)
    return finish(fields, as_json=as_json)


@data.command(
    epilog=examples(
        "understudy data sessions --data D",
        "understudy data sessions --data D --game CartPole-v1 --json",
    )
)
@click.option("--game", help="Only sessions of this game.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="How many at most."
)
@store_option
@common_options
def sessions(
    data_text: str | None, as_json: bool, store_url: str | None, game: str | None, limit: int
) -> int:
    """List sessions with their steps, gaps and drops."""
    rows: list[dict[str, Any]] = []
    with ExitStack() as opened:
        there = opened.enter_context(store_elsewhere(data_text, store_url))
        store = (
            there.store
            if there
            else opened.enter_context(open_view(data_folder(data_text).must_exist().store))
        )
        for info in store.sessions(SessionFilter(game=game)):
            if len(rows) == limit:
                break
            rows.append(
                {
                    "session": str(info.session),
                    "game": info.game,
                    "player": info.player.hex(),
                    "chunks": info.n_chunks,
                    "steps": info.n_steps,
                    "missing": [list(pair) for pair in info.missing],
                    "dropped": info.dropped_steps,
                    "closed": info.closed,
                }
            )
    table = Table("session", "game", "player", "chunks", "steps", "missing", "dropped", "closed")
    for row in rows:
        values = [
            row["session"],
            row["game"],
            row["player"][:8],
            *(str(row[name]) for name in ("chunks", "steps")),
        ]
        table.add_row(
            *values,
            str(row["missing"] or ""),
            str(row["dropped"]),
            "yes" if row["closed"] else "no",
        )
    results(as_json=as_json).print(table)
    return finish({"sessions": rows}, as_json=as_json)


@data.command(
    epilog=examples(
        "understudy data verify --data D",
        "understudy data verify --data D --json",
        "understudy data verify --data D --store cassandra://HOST/KEYSPACE --digest",
    )
)
@click.option("--digest", is_flag=True, help="Also a SHA-256 per session, to compare stores with.")
@store_option
@common_options
def verify(data_text: str | None, as_json: bool, store_url: str | None, digest: bool) -> int:
    """Finish what a kill left, then prove every acknowledged step against the stored bytes.

    Exits 0 when all is there once; 1 on any loss, duplicate or damage; 2 when there is no ledger to
    prove against (the bytes are audited all the same). Of a store elsewhere only what ingest has
    stored by now is checked.
    """
    began_s = time.monotonic()
    found = {}
    with ExitStack() as opened:
        there = opened.enter_context(store_elsewhere(data_text, store_url))
        where = there.data if there else data_folder(data_text).must_exist()
        verdict = (
            verify_elsewhere(where, there.store, live=is_locked(where.root / "ingest.lock"))
            if there
            else verify_data(where, config=config_of(data_text, store_url=store_url))
        )
        if digest:
            store = there.store if there else opened.enter_context(open_view(where.store))
            found = digests(lambda cursor: store.tail(cursor, max_items=512, wait_s=0.0))
    out = results(as_json=as_json)
    _print_verdict(out, verdict, time.monotonic() - began_s, is_elsewhere=there is not None)
    for session, text in found.items():
        out.print(f"{session} {text}")
    fields = verdict.to_json() | ({"digest": whole(found), "digests": found} if digest else {})
    return finish(fields, as_json=as_json, code=verdict.exit_code)


def _print_verdict(
    out: Console, verdict: Verification, took_s: float, *, is_elsewhere: bool
) -> None:
    if verdict.recovered_frames:
        out.print(f"sent {count(verdict.recovered_frames)} frames that a killed game had spooled")
    out.print(
        f"{count(verdict.steps)} steps, {count(verdict.chunks)} chunks, {count(verdict.sessions)} "
        "sessions audited "
        f"in {took_s:.1f} s"
        + (" (a writer is alive: up to its barrier)" if verdict.live_writer else "")
    )
    for line in verdict.corrupt[:20]:
        out.print(f"[red]damaged[/red] {escape(line)}")
    out.print(
        f"ledger {count(verdict.ledger_chunks)} acknowledged frames, {count(verdict.ledger_steps)} "
        "steps: "
        f"lost {count(verdict.lost_steps)}, stored twice {count(verdict.duplicate_steps)}, "
        f"unexplained gaps {count(verdict.gap_steps)}, quarantined {verdict.quarantined_chunks} "
        "chunks"
    )
    if verdict.exit_code == 2:
        out.print(
            "no ledger here, so nothing was promised that could be proved; checksums, gaps and "
            "copies are fine"
        )
    elif is_elsewhere and verdict.lost_steps and not (verdict.duplicate_steps or verdict.corrupt):
        out.print(
            "[red]NOT fine[/red], unless these steps still wait in the stream: let ingest store "
            "them (understudy "
            "ingest --until-empty), then verify again"
        )
    elif verdict.exit_code == 1:
        out.print(
            "[red]NOT fine[/red]: restore what is damaged from a backup; nothing here mends itself"
        )
    elif verdict.set_aside_steps:
        out.print(
            "[yellow]every acknowledged step is accounted for, but "
            f"{count(verdict.set_aside_steps)} of them are "
            "quarantined, parked, forgotten or expired[/]; next: understudy data quarantine list"
        )
    else:
        out.print("[green]every acknowledged step is there, once[/green]")


@data.command(
    epilog=examples(
        "understudy data forget ada --data D",
        "understudy data forget ada --game CartPole-v1 --data D --json",
    )
)
@click.argument("player")
@click.option("--game", help="Only what this player did in one game.")
@click.option(
    "--timeout",
    "timeout_s",
    default=120.0,
    show_default=True,
    help="Seconds to wait for a live writer.",
)
@store_option
@common_options
def forget(
    data_text: str | None,
    as_json: bool,
    store_url: str | None,
    player: str,
    game: str | None,
    timeout_s: float,
) -> int:
    """Erase everything PLAYER (the name the game gave) ever did here, for good."""
    with store_elsewhere(data_text, store_url) as there:
        if there:
            fields = forget_elsewhere(there.data, there.store, player, known=there.games, game=game)
        else:
            where = data_folder(data_text).must_exist()
            config = config_of(data_text, store_url=store_url)
            fields = forget_player(where, player, game=game, timeout_s=timeout_s, config=config)
    fields["models"] = released_models(data_text, fields["games"])
    out = results(as_json=as_json)
    if not fields["chunks"] and not fields["spooled_sessions"]:
        out.print(
            f"nothing of {escape(player)} was found in {', '.join(fields['games'])}; is the name "
            "right?"
        )
    erased = (
        f"{count(fields['chunks'])} chunks and {fields['spooled_sessions']} spooled sessions "
        f"of {escape(player)}"
    )
    out.print(f"erased {erased}; freed {size(fields['stream_bytes'])} of stored stream")
    out.print("older frames of theirs are refused from now on")
    if fields["models"]:
        out.print(
            f"models that were released before keep what they learnt: {', '.join(fields['models'])}"
        )
    if there:
        out.print(
            "[dim]a stream elsewhere still holds their frames until its retention is over, and a "
            "database's files "
            "until they are compacted: see the page of each in docs/[/]"
        )
    if not fields["is_finished"]:
        out.print(
            "[yellow]a reader has the store open: the last bytes go when it closes; run this "
            "again[/]"
        )
    return finish(fields, as_json=as_json)


@data.command(
    epilog=examples("understudy data compact --data D", "understudy data compact --data D --json")
)
@click.option(
    "--timeout",
    "timeout_s",
    default=3600.0,
    show_default=True,
    help="Seconds to wait for a live writer.",
)
@common_options
def compact(data_text: str | None, as_json: bool, timeout_s: float) -> int:
    """Return room that forgotten and expired steps left to the file system; ingest may run
    meanwhile."""
    where = data_folder(data_text).must_exist()
    fields = compact_store(where, config=config_of(data_text), timeout_s=timeout_s)
    results(as_json=as_json).print(f"the database shrank by {size(fields['freed_bytes'])}")
    return finish(fields, as_json=as_json)


@data.group(
    epilog=examples(
        "understudy data quarantine list --data D", "understudy data quarantine replay --data D"
    )
)
def quarantine() -> None:
    """Frames that were refused or parked."""


@quarantine.command(
    name="list",
    epilog=examples(
        "understudy data quarantine list --data D",
        "understudy data quarantine list --data D --limit 5 --json",
    ),
)
@click.option(
    "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="How many at most."
)
@store_option
@common_options
def list_(data_text: str | None, as_json: bool, store_url: str | None, limit: int) -> int:
    """List quarantined and parked frames with the reason."""
    with ExitStack() as opened:
        there = opened.enter_context(store_elsewhere(data_text, store_url))
        store = (
            there.store
            if there
            else opened.enter_context(open_view(data_folder(data_text).must_exist().store))
        )
        rows = [
            {
                "id": one.id,
                "reason": one.reason,
                "detail": one.detail,
                "parked": one.parked,
                "session": one.session.hex if one.session else "",
                "chunk_no": one.chunk_no,
            }
            for one in store.quarantined(limit=limit)
        ]
    table = Table("id", "reason", "detail", "parked", "session", "chunk")
    for row in rows:
        table.add_row(*(escape(str(value)) for value in row.values()))
    results(as_json=as_json).print(table)
    return finish({"frames": rows}, as_json=as_json)


@quarantine.command(
    epilog=examples(
        "understudy data quarantine replay --data D",
        "understudy data quarantine replay 3 7 --data D --json",
    )
)
@click.argument("ids", nargs=-1, type=int)
@click.option(
    "--timeout",
    "timeout_s",
    default=120.0,
    show_default=True,
    help="Seconds to wait for a live writer.",
)
@store_option
@common_options
def replay(
    data_text: str | None,
    as_json: bool,
    store_url: str | None,
    ids: tuple[int, ...],
    timeout_s: float,
) -> int:
    """Check quarantined frames again (all, or IDS) and store those that pass now, each once."""
    with store_elsewhere(data_text, store_url) as there:
        chosen = list(ids) or None
        if there:
            fields = replay_frames(there.store, there.specs, chosen)
        else:
            where = data_folder(data_text).must_exist()
            config = config_of(data_text, store_url=store_url)
            fields = replay_quarantine(where, chosen, timeout_s=timeout_s, config=config)
    results(as_json=as_json).print(
        f"tried {fields['tried']}: stored {fields['stored']}, still refused "
        f"{fields['still_refused']}, "
        f"there already {fields['duplicates']}"
    )
    return finish(fields, as_json=as_json)
