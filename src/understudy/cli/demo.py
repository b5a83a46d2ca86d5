"""understudy demo."""

import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from understudy.app.data import DataFolder
from understudy.app.demo import Killed, go_on, record_and_kill, sabotage
from understudy.app.simulate import SimulateConfig, SimulateResult
from understudy.app.verify import Verdict, verify
from understudy.cli.live import watching
from understudy.cli.options import count, examples, finish, folder, json_option
from understudy.core.errors import ConfigError


@click.command(epilog=examples("understudy demo", "understudy demo --data D --seconds 10 --json"))
@click.option("--game", default="CartPole-v1", show_default=True, help="Any Gymnasium id.")
@click.option("--players", default=4, show_default=True, help="How many simulated players.")
@click.option("--seconds", default=4.0, show_default=True, help="How long they play before and after the kill.")
@click.option("--data", "data_text", metavar="DIR", help="Keep the data in this folder (default: a temporary one).")
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Also write a picture of the output.")
@json_option
def demo(game: str, players: int, seconds: float, data_text: str | None, svg: Path | None, as_json: bool) -> int:
    """Record real play, kill everything with kill -9, start again, and prove that nothing is lost or doubled."""
    if svg is not None and not svg.absolute().parent.is_dir():
        raise ConfigError(f"--svg {svg}: there is no folder {svg.absolute().parent}; make it first")
    out = Console(stderr=as_json, highlight=False, record=svg is not None, width=96 if svg else None)
    scratch = Path(tempfile.mkdtemp(prefix="understudy-demo-"))
    try:
        data = folder(data_text) if data_text else DataFolder(scratch / "data")
        config = SimulateConfig(env_id=game, players=players, seconds=seconds)
        killed, result = _record(out, data, config)
        verdict = verify(data)
        red, where = sabotage(data, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    _print(out, killed, result, verdict)
    _print_control(out, red, where)
    out.print("\nnext")
    out.print(
        "  understudy simulate CartPole-v1 --players 8 --seconds 10 --data D    [dim]# kill it whenever you like[/dim]"
    )
    out.print("  understudy data verify --data D")
    if svg is not None:
        out.save_svg(str(svg), title="understudy demo")
    fine = verdict.exit_code == 0 and red.exit_code == 1
    fields = {"killed": asdict(killed), "result": asdict(result), "verify": verdict.to_json(), "control": red.to_json()}
    return finish(fields, as_json=as_json, code=0 if fine else 1)


def _record(out: Console, data: DataFolder, config: SimulateConfig) -> tuple[Killed, SimulateResult]:
    title = f"{config.players} players of {config.env_id}"
    out.print(f"[bold]1  record[/bold]  {title}: recorder → spool → stream → ingest → store, in real processes")
    long = SimulateConfig(env_id=config.env_id, players=config.players, seconds=3600.0)
    with watching(out, title=title, seconds=config.seconds) as show:
        killed = record_and_kill(data, long, show, after_s=config.seconds)
    out.print(f"[bold]2  kill -9[/bold]  all {killed.processes} processes, in the middle of it")
    out.print("[bold]3  start again[/bold]  on the same folder; what the dead left in their spools is sent first")
    with watching(out, title=title, seconds=config.seconds) as show:
        return killed, go_on(data, config, show)


def _print(out: Console, killed: Killed, result: SimulateResult, verdict: Verdict) -> None:
    out.print("[bold]4  verify[/bold]  every acknowledgement the players got, against the stored bytes\n")
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in ("", "recorded", "acknowledged", "steps/s", "ack p99"):
        table.add_column(name, justify="left" if not name else "right")
    table.add_row(
        "before the kill",
        count(killed.recorded_steps),
        count(killed.acked_steps),
        count(killed.acked_steps / killed.after_s),
        "",
    )
    table.add_row(
        "after it",
        count(result.recorded_steps),
        count(result.acked_steps),
        count(result.steps_per_s),
        f"{result.ack_p99_ms:.1f} ms",
    )
    out.print(table)
    out.print(
        f"\nstored [bold]{count(verdict.steps)}[/bold] steps of {verdict.sessions} sessions; the ledger promises "
        f"{count(verdict.ledger_steps)}"
    )
    colour = "green" if verdict.exit_code == 0 else "red"
    out.print(
        f"[{colour} bold]lost {count(verdict.lost_steps)}, stored twice {count(verdict.duplicate_steps)}, "
        f"unexplained gaps {count(verdict.gap_steps)}[/]"
    )


def _print_control(out: Console, red: Verdict, where: str) -> None:
    seen = f"seen: {count(red.lost_steps)} steps called lost" if red.exit_code == 1 else "NOT SEEN"
    out.print(f"[dim]control: {where} flipped in a copy → {seen}[/dim]")
