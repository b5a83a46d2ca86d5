"""understudy data: look at, verify and erase recorded data."""

import time
from collections.abc import Mapping
from typing import Any

import click
from rich.table import Table

from understudy.app.erase import forget_player, replay_quarantine
from understudy.app.stats import stats as count_stats
from understudy.app.verify import Verdict
from understudy.app.verify import verify as verify_data
from understudy.cli.options import console, count, data_option, examples, finish, folder, json_option, size
from understudy.core.ports import SessionFilter
from understudy.stores.catalogue import quarantined
from understudy.stores.view import StoreView


@click.group(epilog=examples("understudy data stats --data D", "understudy data verify --data D --json"))
def data() -> None:
    """Look at, verify and erase recorded data."""


@data.command(epilog=examples("understudy data stats --data D", "UNDERSTUDY_DATA=D understudy data stats --json"))
@data_option
@json_option
def stats(data_text: str | None, as_json: bool) -> int:
    """Count steps, sessions, segments, quarantine and bytes."""
    where = folder(data_text).must_exist()
    fields = count_stats(where)
    if not as_json:
        out = console()
        out.print(
            f"{count(fields['steps'])} steps in {count(fields['chunks'])} chunks of {count(fields['sessions'])} "
            f"sessions; {fields['segments']} segments, {count(fields['unsealed_chunks'])} chunks unsealed"
        )
        for game, steps in fields["games"].items():
            out.print(f"  {game}: {count(steps)} steps")
        out.print(f"quarantined {fields['quarantined'] or 0}, parked {fields['parked']}")
        out.print(", ".join(f"{name} {size(used)}" for name, used in fields["bytes"].items()))
    return finish(fields, as_json=as_json)


@data.command(
    epilog=examples("understudy data sessions --data D", "understudy data sessions --data D --game CartPole-v1 --json")
)
@click.option("--game", help="Only sessions of this game.")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="How many at most.")
@data_option
@json_option
def sessions(data_text: str | None, as_json: bool, game: str | None, limit: int) -> int:
    """List sessions with their steps, gaps and drops."""
    where = folder(data_text).must_exist()
    rows: list[dict[str, Any]] = []
    with StoreView(where.store) as view:
        for info in view.sessions(SessionFilter(game=game)):
            if len(rows) == limit:
                break
            rows.append({
                "session": str(info.session), "game": info.game, "player": info.player.hex(), "chunks": info.n_chunks,
                "steps": info.n_steps, "missing": [list(pair) for pair in info.missing], "dropped": info.dropped_steps,
                "closed": info.closed,
            })  # fmt: skip
    if not as_json:
        table = Table("session", "game", "player", "chunks", "steps", "missing", "dropped", "closed")
        for row in rows:
            player = row["player"][:8]
            values = [row["session"], row["game"], player, *(str(row[name]) for name in ("chunks", "steps"))]
            table.add_row(*values, str(row["missing"] or ""), str(row["dropped"]), "yes" if row["closed"] else "no")
        console().print(table)
    return finish({"sessions": rows}, as_json=as_json)


@data.command(epilog=examples("understudy data verify --data D", "understudy data verify --data D --json"))
@data_option
@json_option
def verify(data_text: str | None, as_json: bool) -> int:
    """Finish what a kill left, then prove every acknowledged step against the stored bytes.

    Exits 0 when all is there once; 1 on any loss, duplicate or damage; 2 when there is no ledger to prove against (the
    bytes are audited all the same).
    """
    where = folder(data_text).must_exist()
    began_s = time.monotonic()
    verdict = verify_data(where)
    if not as_json:
        _print_verdict(verdict, time.monotonic() - began_s)
    return finish(verdict.to_json(), as_json=as_json, code=verdict.exit_code)


def _print_verdict(verdict: Verdict, took_s: float) -> None:
    out = console()
    if verdict.recovered_frames:
        out.print(f"sent {count(verdict.recovered_frames)} frames that a killed game had spooled")
    out.print(
        f"{count(verdict.steps)} steps, {count(verdict.chunks)} chunks, {count(verdict.sessions)} sessions audited "
        f"in {took_s:.1f} s" + (" (a writer is alive: up to its barrier)" if verdict.live_writer else "")
    )
    for line in verdict.corrupt[:20]:
        out.print(f"[red]damaged[/red] {line}")
    out.print(
        f"ledger {count(verdict.ledger_chunks)} acknowledged frames, {count(verdict.ledger_steps)} steps: "
        f"lost {count(verdict.lost_steps)}, stored twice {count(verdict.duplicate_steps)}, "
        f"unexplained gaps {count(verdict.gap_steps)}, quarantined {verdict.quarantined_chunks} chunks"
    )
    if verdict.exit_code == 2:
        out.print("no ledger here, so nothing was promised that could be proved; checksums, gaps and copies are fine")
    elif verdict.exit_code == 1:
        out.print("[red]NOT fine[/red]: restore what is damaged from a backup; nothing here mends itself")
    elif verdict.set_aside_steps:
        out.print(
            f"[yellow]every acknowledged step is accounted for, but {count(verdict.set_aside_steps)} of them are "
            "quarantined, parked, forgotten or expired[/]; next: understudy data quarantine list"
        )
    else:
        out.print("[green]every acknowledged step is there, once[/green]")


@data.command(
    epilog=examples(
        "understudy data forget ada --data D", "understudy data forget ada --game CartPole-v1 --data D --json"
    )
)
@click.argument("player")
@click.option("--game", help="Only what this player did in one game.")
@click.option("--timeout", "timeout_s", default=120.0, show_default=True, help="Seconds to wait for a live writer.")
@data_option
@json_option
def forget(data_text: str | None, as_json: bool, player: str, game: str | None, timeout_s: float) -> int:
    """Erase everything PLAYER (the name the game gave) ever did here, for good."""
    fields = forget_player(folder(data_text).must_exist(), player, game=game, timeout_s=timeout_s)
    if not as_json:
        if not fields["chunks"] and not fields["spooled_sessions"]:
            console().print(f"nothing of {player} was found in {', '.join(fields['games'])}; is the name right?")
        console().print(
            f"erased {count(fields['chunks'])} chunks and {fields['spooled_sessions']} spooled sessions of {player}; "
            f"freed {size(fields['stream_bytes'])} of stored stream"
        )
        console().print("older frames of theirs are refused from now on; no model was trained on them")
        if not fields["is_finished"]:
            console().print("[yellow]a reader has the store open: the last bytes go when it closes; run this again[/]")
    return finish(fields, as_json=as_json)


@data.group(epilog=examples("understudy data quarantine list --data D", "understudy data quarantine replay --data D"))
def quarantine() -> None:
    """Frames that were refused or parked."""


@quarantine.command(
    name="list",
    epilog=examples(
        "understudy data quarantine list --data D", "understudy data quarantine list --data D --limit 5 --json"
    ),
)
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="How many at most.")
@data_option
@json_option
def list_(data_text: str | None, as_json: bool, limit: int) -> int:
    """List quarantined and parked frames with the reason."""
    where = folder(data_text).must_exist()
    rows: list[Mapping[str, Any]] = []
    with StoreView(where.store) as view, view.snapshot() as unsealed:
        sealed = quarantined(view.catalogue, after_id=0, limit=limit)
        waiting = [one for one, _ in unsealed.quarantined if one.id not in unsealed.replayed]
        for id_, reason, detail, parked, session, number in [
            *(
                (one.id, one.reason, one.detail, one.parked, one.session.bytes if one.session else b"", one.chunk_no)
                for one in sealed
            ),
            *((one.id, one.reason, one.detail, one.parked, one.session, one.chunk_no) for one in waiting),
        ][:limit]:
            rows.append(
                {
                    "id": id_,
                    "reason": reason,
                    "detail": detail,
                    "parked": parked,
                    "session": session.hex(),
                    "chunk_no": number,
                }
            )
    if not as_json:
        table = Table("id", "reason", "detail", "parked", "session", "chunk")
        for row in rows:
            table.add_row(*(str(row[name]) for name in ("id", "reason", "detail", "parked", "session", "chunk_no")))
        console().print(table)
    return finish({"frames": rows}, as_json=as_json)


@quarantine.command(
    epilog=examples(
        "understudy data quarantine replay --data D", "understudy data quarantine replay 3 7 --data D --json"
    )
)
@click.argument("ids", nargs=-1, type=int)
@click.option("--timeout", "timeout_s", default=120.0, show_default=True, help="Seconds to wait for a live writer.")
@data_option
@json_option
def replay(data_text: str | None, as_json: bool, ids: tuple[int, ...], timeout_s: float) -> int:
    """Check quarantined frames again (all, or IDS) and store those that pass now, each once."""
    fields = replay_quarantine(folder(data_text).must_exist(), list(ids) or None, timeout_s=timeout_s)
    if not as_json:
        console().print(
            f"tried {fields['tried']}: stored {fields['stored']}, still refused {fields['still_refused']}, "
            f"there already {fields['duplicates']}"
        )
    return finish(fields, as_json=as_json)
