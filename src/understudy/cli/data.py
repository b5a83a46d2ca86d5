"""understudy data: inspect, verify, export, import and erase recorded data."""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from understudy.backends.data import data_folder, remote_stats
from understudy.backends.data import stats as count_stats
from understudy.backends.deployment import registered_games
from understudy.backends.local import open_view
from understudy.cli.deployed import (
    config_of,
    models_that_learned_from,
    remote_store,
    unreplaced_models,
)
from understudy.cli.exchange import export_data, import_data
from understudy.cli.options import (
    TIMEOUT,
    ResultTable,
    common_options,
    count_of,
    examples,
    finish,
    format_count,
    format_size,
    results,
    store_option,
)
from understudy.client.receipts import AckedFrame, read_receipts
from understudy.core.errors import ConfigError
from understudy.core.log import is_locked
from understudy.core.settings import nearest
from understudy.core.wording import joined
from understudy.platform.erase import (
    compact_store,
    forget_in_remote_store,
    forget_player,
    replay_quarantine,
)
from understudy.platform.ingest import replay as replay_frames
from understudy.ports import SessionFilter
from understudy.simulation.verify import Verification, combined_digest, digests, verify_remote_store
from understudy.simulation.verify import verify as verify_data


@click.group(
    epilog=examples("understudy data stats --data D", "understudy data verify --data D --json")
)
def data() -> None:
    """Inspect, verify, export, import and erase recorded data."""


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
    """Count steps, sessions, quarantined frames and bytes.

    A remote store is read completely, which may take long; its size is known only to the tools of
    its database.
    """
    with remote_store(data_text, store_url) as remote:
        fields = (
            remote_stats(remote.data, remote.store)
            if remote
            else count_stats(data_folder(data_text).must_exist())
        )
    out = results(as_json=as_json)
    steps, chunks, sessions = (
        count_of(fields[f"{noun}s"], noun) for noun in ("step", "chunk", "session")
    )
    line = f"{steps} in {chunks} of {sessions}"
    if remote is None and fields["free_bytes"]:
        free = format_size(fields["free_bytes"])
        line += f"; {free} free inside the database (understudy data compact)"
    out.print(line)
    for game, game_steps in fields["games"].items():
        out.print(f"  {game}: {count_of(game_steps, 'step')}")
    unstored = [name for name in ("stream", "spool") if fields["bytes"].get(name)]
    if not fields["steps"] and unstored:
        out.print(
            f"recorded steps wait in the {' and the '.join(unstored)}; store them with: understudy "
            f"ingest --until-empty --data {escape(data_text or 'DIR')}",
            soft_wrap=True,
        )
    evicted = f", evicted {fields['evicted']}" if fields.get("evicted") else ""
    out.print(f"quarantined {fields['quarantined'] or 0}, parked {fields['parked']}{evicted}")
    used = ", ".join(
        f"{name} {format_size(used_bytes)}" for name, used_bytes in fields["bytes"].items()
    )
    if remote is not None:
        used = f"in the data folder: {used or 'nothing'}; for the store's size, ask its servers"
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
    "--limit",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Maximum number of rows.",
)
@store_option
@common_options
def sessions(
    data_text: str | None, as_json: bool, store_url: str | None, game: str | None, limit: int
) -> int:
    """List sessions with their steps, missing chunks and dropped steps."""
    rows: list[dict[str, Any]] = []
    with ExitStack() as opened:
        remote = opened.enter_context(remote_store(data_text, store_url))
        store = (
            remote.store
            if remote
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
    if game is not None and not rows:
        if remote:
            games = remote.games
        else:
            config = config_of(data_text)
            games = registered_games(config.folder, models=config.models.url)
        if game not in games:
            raise ConfigError(
                f"the game {game[:80]!r} is not registered, so --game matches nothing; "
                f"{nearest(game, games)}"
            )
    table = ResultTable(
        "session", "game", "player", "chunks", "steps", "missing", "dropped", "closed"
    )
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
        "understudy data verify --data D --receipts receipts.jsonl --json",
        "understudy data verify --data D --store cassandra://HOST/KEYSPACE --digest",
    )
)
@click.option("--digest", is_flag=True, help="Also print a SHA-256 per session, to compare stores.")
@click.option(
    "--receipts",
    "receipt_files",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    multiple=True,
    help="A game's file of acknowledged frames (SenderConfig.receipts); may be repeated.",
)
@store_option
@common_options
def verify(
    data_text: str | None,
    as_json: bool,
    store_url: str | None,
    digest: bool,
    receipt_files: tuple[Path, ...],
) -> int:
    """Send spooled frames, store what is in the stream, then verify every acknowledged step.

    Acknowledged steps are read from the ledger, a list that simulated players ('understudy
    simulate', 'understudy demo') and 'understudy data import' write, and from the receipts of
    games, and compared with the stored bytes. Each receipt is stored, quarantined, expired,
    forgotten or missing. Exits 0 if every acknowledged step is accounted for exactly once; 1 on any
    loss, duplicate, gap or damage; 2 if there are neither a ledger nor receipts (the stored bytes
    are still audited).

    With a remote store nothing is sent or stored: only what ingest has stored so far is verified.
    """
    began_s = time.monotonic()
    by_session = {}
    receipts: list[AckedFrame] = []
    cut_lines: list[str] = []
    empty: list[Path] = []
    for path in receipt_files:
        numbers: list[int] = []
        of_file = list(read_receipts(path, on_cut=numbers.append))
        receipts += of_file
        cut_lines += [f"line {number} of {path}" for number in numbers]
        empty += [] if of_file or numbers else [path]
    with ExitStack() as opened:
        remote = opened.enter_context(remote_store(data_text, store_url))
        folder = remote.data if remote else data_folder(data_text).must_exist()
        verification = (
            verify_remote_store(
                folder,
                remote.store,
                live=is_locked(folder.root / "ingest.lock"),
                receipts=receipts,
            )
            if remote
            else verify_data(
                folder, config=config_of(data_text, store_url=store_url), receipts=receipts
            )
        )
        if digest:
            store = remote.store if remote else opened.enter_context(open_view(folder.store))
            by_session = digests(lambda cursor: store.tail(cursor, max_items=512, wait_s=0.0))
    out = results(as_json=as_json)
    took_s = time.monotonic() - began_s
    _print_verification(out, verification, took_s, is_remote=remote is not None)
    if cut_lines:
        out.print(
            f"[yellow]![/] {escape(cut_lines[0])} is cut off, so its receipt was not checked; "
            f"{count_of(len(cut_lines), 'such line')} in all",
            soft_wrap=True,
        )
    for path in empty:
        out.print(
            f"[yellow]![/] {escape(str(path))} holds no receipts, so nothing was compared with it: "
            "the game has not had a frame acknowledged, or writes to another file; check the path "
            "in understudy.connect(receipts=...)",
            soft_wrap=True,
        )
    for session, text in by_session.items():
        out.print(f"{session} {text}")
    fields = verification.to_json() | {"cut_receipts": len(cut_lines)}
    fields["empty_receipts"] = [str(path) for path in empty]
    if digest:
        fields |= {"digest": combined_digest(by_session), "digests": by_session}
    return finish(fields, as_json=as_json, code=verification.exit_code)


def _print_verification(
    out: Console, verification: Verification, took_s: float, *, is_remote: bool
) -> None:
    if verification.recovered_frames:
        out.print(
            f"sent {count_of(verification.recovered_frames, 'frame')} that killed games left in "
            "the spool"
        )
    out.print(
        f"{count_of(verification.steps, 'step')}, {count_of(verification.chunks, 'chunk')}, "
        f"{count_of(verification.sessions, 'session')} audited in {took_s:.1f} s"
        + (
            " (ingest is running; frames that arrive during the check may not be included)"
            if verification.live_writer
            else ""
        )
    )
    for line in verification.corrupt[:20]:
        out.print(f"[red]damaged[/red] {escape(line)}")
    out.print(
        f"ledger {count_of(verification.ledger_chunks, 'acknowledged frame')}, "
        f"{count_of(verification.ledger_steps, 'step')}: lost "
        f"{format_count(verification.lost_steps)}, stored twice "
        f"{format_count(verification.duplicate_steps)}, unexplained gaps "
        f"{format_count(verification.gap_steps)}, quarantined "
        f"{count_of(verification.quarantined_chunks, 'chunk')}"
    )
    if verification.evicted_chunks:
        out.print(
            f"[yellow]evicted[/yellow] {count_of(verification.evicted_chunks, 'quarantined frame')}"
            ", because the quarantine was full; their bytes are lost"
        )
    for spool in verification.unreadable_spools[:20]:
        out.print(
            f"[yellow]not sent[/yellow] the frames in {escape(spool)}, which were never "
            "acknowledged: spool.json there is missing or damaged; restore that file, or delete "
            "the folder to discard the frames",
            soft_wrap=True,
        )
    lost = [receipt for receipt in verification.receipts if receipt.fate in ("missing", "evicted")]
    if verification.receipts:
        fates = verification.receipt_fates.items()
        counts = ", ".join(f"{fate} {format_count(count)}" for fate, count in fates)
        out.print(f"receipts {format_count(len(verification.receipts))}: {counts}", soft_wrap=True)
    for receipt in lost[:20]:
        out.print(
            f"[red]{receipt.fate}[/red] chunk {receipt.chunk_no} of session {receipt.session}"
        )
    _print_verdict(out, verification, is_remote=is_remote)


def _print_verdict(out: Console, verification: Verification, *, is_remote: bool) -> None:
    is_missing = verification.lost_steps or verification.receipt_fates["missing"]
    is_sound = not (verification.duplicate_steps or verification.corrupt)
    has_quarantined = verification.quarantined_chunks or verification.parked_chunks
    after = "; next: understudy data quarantine list" if has_quarantined else ""
    if verification.exit_code == 2:
        out.print(
            "no damage, gap or duplicate was found, but there are no acknowledgements to compare "
            "with: only simulated players and imports write a ledger; next: record with "
            "understudy.connect(..., receipts='receipts.jsonl'), then run this command with "
            "--receipts receipts.jsonl",
            soft_wrap=True,
        )
    elif is_remote and is_missing and is_sound:
        out.print(
            "[red]FAILED[/red], unless these steps are still in the stream: store them with "
            "'understudy ingest --until-empty', then verify again"
        )
    elif verification.has_only_gaps:
        out.print(
            f"[red]FAILED[/red]: {count_of(verification.gap_chunks, 'chunk')} never arrived, of "
            "sessions with missing chunks in 'understudy data sessions'. No ledger or receipt that "
            "was compared names them: their games lost unsent frames, or only claimed to have sent "
            "them. Restore a backup only if receipts of these games name them",
            soft_wrap=True,
        )
    elif verification.exit_code == 1:
        out.print(
            "[red]FAILED[/red]: nothing is repaired automatically; restore a backup "
            "(understudy restore --help)"
        )
    elif verification.set_aside_steps:
        out.print(
            "[yellow]every acknowledged step is accounted for, but not all are stored: "
            f"{count_of(verification.set_aside_steps, 'step')} quarantined, parked, forgotten or "
            f"expired[/]{after}"
        )
    elif len(verification.receipts) != verification.receipt_fates["stored"]:
        out.print(
            "[yellow]every receipt is accounted for, but not all of their frames are stored[/]"
            f"{after}"
        )
    else:
        out.print("[green]every acknowledged step is stored exactly once[/green]")


@data.command(
    epilog=examples(
        "understudy data forget ada --data D",
        "understudy data forget ada --game CartPole-v1 --data D --json",
    )
)
@click.argument("player")
@click.option("--game", help="Erase only this game's steps.")
@click.option(
    "--timeout",
    "timeout_s",
    type=TIMEOUT,
    default=120.0,
    show_default=True,
    help="Seconds to wait for a running writer.",
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
    """Permanently erase everything PLAYER (the name that the game uses) has recorded."""
    with remote_store(data_text, store_url) as remote:
        if remote:
            fields = forget_in_remote_store(
                remote.data,
                remote.store,
                player,
                registered=remote.games,
                game=game,
                stream=config_of(data_text).stream.url,
            )
        else:
            folder = data_folder(data_text).must_exist()
            config = config_of(data_text, store_url=store_url)
            fields = forget_player(folder, player, game=game, timeout_s=timeout_s, config=config)
    earlier = fields.pop("earlier")
    fields["models"] = models_that_learned_from(data_text, fields.pop("first_steps"), earlier)
    times = [at_s for requests in earlier.values() for at_s in requests.values()]
    fields["forgotten_before_s"] = max(times, default=None)
    fields["unreplaced"] = unreplaced_models(data_text, earlier)
    fields["not_searched"] = ["backups", "exported files", "run folders"]
    out = results(as_json=as_json)
    has_erased = bool(fields["chunks"] or fields["spooled_sessions"])
    if has_erased:
        out.print(
            f"erased {count_of(fields['chunks'], 'chunk')} and "
            f"{count_of(fields['spooled_sessions'], 'spooled session')} of {escape(player)}; "
            f"deleted {format_size(fields['stream_bytes'])} of the stream"
        )
    else:
        before = "check the name"
        if times:
            at = time.strftime("%Y-%m-%d %H:%M", time.localtime(fields["forgotten_before_s"]))
            before = f"the same name was requested before, at {at}"
        out.print(
            f"no steps of {escape(player)} exist in {joined(fields['games'])}, so none were "
            f"erased; {before}",
            soft_wrap=True,
        )
        if fields["unreplaced"]:
            out.print(
                "champions that may have learned from the player and are not replaced yet: "
                f"{', '.join(fields['unreplaced'])}; understudy status shows when they are",
                soft_wrap=True,
            )
    out.print("frames that were recorded before now and arrive later will be rejected")
    for place, why in fields["left"].items():
        out.print(f"[yellow]not erased yet[/] in the {place}: {escape(why)}", soft_wrap=True)
    out.print(f"not searched: {', '.join(fields['not_searched'])}")
    if fields["models"] and has_erased:
        out.print(
            "models that may have learned from the player keep what they learned: "
            f"{', '.join(fields['models'])}",
            soft_wrap=True,
        )
    return finish(fields, as_json=as_json)


@data.command(
    epilog=examples("understudy data compact --data D", "understudy data compact --data D --json")
)
@click.option(
    "--timeout",
    "timeout_s",
    type=TIMEOUT,
    default=3600.0,
    show_default=True,
    help="Seconds to wait for a running writer.",
)
@common_options
def compact(data_text: str | None, as_json: bool, timeout_s: float) -> int:
    """Free the disk space of forgotten and expired steps; ingest may be running."""
    folder = data_folder(data_text).must_exist()
    fields = compact_store(folder, config=config_of(data_text), timeout_s=timeout_s)
    results(as_json=as_json).print(f"the database shrank by {format_size(fields['freed_bytes'])}")
    return finish(fields, as_json=as_json)


@data.group(
    epilog=examples(
        "understudy data quarantine list --data D", "understudy data quarantine replay --data D"
    )
)
def quarantine() -> None:
    """List and replay frames that were rejected or parked."""


@quarantine.command(
    name="list",
    epilog=examples(
        "understudy data quarantine list --data D",
        "understudy data quarantine list --data D --limit 5 --json",
    ),
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Maximum number of rows.",
)
@store_option
@common_options
def list_(data_text: str | None, as_json: bool, store_url: str | None, limit: int) -> int:
    """List quarantined and parked frames with their reasons."""
    with ExitStack() as opened:
        remote = opened.enter_context(remote_store(data_text, store_url))
        store = (
            remote.store
            if remote
            else opened.enter_context(open_view(data_folder(data_text).must_exist().store))
        )
        rows = [
            {
                "id": frame.id,
                "reason": frame.reason,
                "detail": frame.detail,
                "parked": frame.parked,
                "session": frame.session.hex if frame.session else "",
                "chunk_no": frame.chunk_no,
            }
            for frame in store.quarantined(limit=limit)
        ]
    table = ResultTable("id", "reason", "detail", "parked", "session", "chunk")
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
    type=TIMEOUT,
    default=120.0,
    show_default=True,
    help="Seconds to wait for a running writer.",
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
    """Check quarantined frames again (all, or IDS) and store those that now pass, each once."""
    with remote_store(data_text, store_url) as remote:
        chosen = list(ids) or None
        if remote:
            fields = replay_frames(remote.store, remote.specs, chosen)
        else:
            folder = data_folder(data_text).must_exist()
            config = config_of(data_text, store_url=store_url)
            fields = replay_quarantine(folder, chosen, timeout_s=timeout_s, config=config)
    results(as_json=as_json).print(
        f"tried {fields['tried']}: stored {fields['stored']}, still rejected "
        f"{fields['still_refused']}, already stored {fields['duplicates']}"
    )
    return finish(fields, as_json=as_json)
