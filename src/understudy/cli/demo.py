"""understudy demo."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from understudy.app.data import DataFolder
from understudy.app.loop import KILLABLE, Look, Loop, LoopConfig, LoopResult, Show
from understudy.cli.options import count, examples, finish, folder, json_option
from understudy.core.errors import ConfigError

_LINE_EVERY_S = 5.0


@click.command(
    epilog=examples("understudy demo", "understudy demo --check --kill learner --json", "understudy demo --keep D")
)
@click.option("--game", default="CartPole-v1", show_default=True, metavar="ID", help="A Gymnasium id.")
@click.option("--players", default=8, show_default=True, help="How many simulated people.")
@click.option("--seconds", default=75.0, show_default=True, help="How long they play at most.")
@click.option("--kill", type=click.Choice(KILLABLE), help="Kill this role with kill -9 once the first bot plays.")
@click.option("--check", is_flag=True, help="End with 1 unless the last bot beats the first and nothing was lost.")
@click.option("--seed", default=0, show_default=True, help="Of the people and of the episodes that judge.")
@click.option("--keep", metavar="DIR", help="Keep the data in this folder (default: a temporary one).")
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Also write a picture of the output.")
@json_option
def demo(
    game: str, players: int, seconds: float, kill: str | None, check: bool, seed: int, keep: str | None,
    svg: Path | None, as_json: bool,
) -> int:  # fmt: skip
    """Close the loop: people play, a learner without a game learns from them, and its bots play with them.

    Simulated people of different skill play through the real client over real HTTP; gateway, ingest and learner are
    the processes that `understudy up` runs. It ends by itself with the first and the last bot on equal seeds.
    """
    if svg is not None and not svg.absolute().parent.is_dir():
        raise ConfigError(f"--svg {svg}: there is no folder {svg.absolute().parent}; make it first")
    config = LoopConfig(env_id=game, people=players, max_seconds=seconds, kill=kill, seed=seed)  # type: ignore[arg-type]
    out = Console(stderr=as_json, highlight=False, record=svg is not None, width=96 if svg else None)
    scratch = Path(tempfile.mkdtemp(prefix="understudy-demo-"))
    try:
        data = folder(keep) if keep else DataFolder(scratch / "data")
        out.print(f"[bold]{players} people play {game}[/]: client → gateway → stream → ingest → store → learner → bot")
        with _watching(out, config) as show:
            result = Loop(data, config, show).run()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    _print(out, result, keep)
    if svg is not None:
        out.save_svg(str(svg), title="understudy demo")
    return finish(result.to_json(), as_json=as_json, code=0 if result.is_sound or not check else 1)


@contextmanager
def _watching(out: Console, config: LoopConfig) -> Iterator[Show]:
    """What happens, as it happens: a table in a terminal, a line now and then elsewhere."""
    next_s = 0.0
    live = Live(console=out, refresh_per_second=8, transient=True) if out.is_terminal else None

    def show(look: Look) -> None:
        nonlocal next_s
        if look.said:
            out.print(f"[dim]{look.elapsed_s:5.1f} s[/]  {escape(look.said)}", soft_wrap=True)
        elif live is not None:
            live.update(_table(look, config))
        elif time.monotonic() >= next_s:
            next_s = time.monotonic() + _LINE_EVERY_S
            out.print(
                f"[dim]{look.elapsed_s:5.1f} s[/]  acknowledged {count(look.acked_steps)}, stored "
                f"{count(look.stored_steps)} steps; {escape(look.phase)}",
                soft_wrap=True,
            )

    if live is None:
        yield show
    else:
        with live:
            yield show


def _table(look: Look, config: LoopConfig) -> Table:
    table = Table(title=f"{config.env_id}   {look.elapsed_s:.0f} of at most {config.max_seconds:g} s", min_width=64)
    table.add_column("")
    table.add_column("", justify="right")
    for name, text in (
        ("steps recorded", count(look.recorded_steps)), ("acknowledged", count(look.acked_steps)),
        ("stored", count(look.stored_steps)), ("champion", str(look.champion or "none yet")),
        ("canary", str(look.canary or "none")), ("learner", look.phase),
    ):  # fmt: skip
        table.add_row(name, text)
    return table


def _print(out: Console, result: LoopResult, keep: str | None) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in ("", "mean return", "95 % interval"):
        table.add_column(name, justify="left" if not name else "right")
    for name, value, low, high in (
        ("first bot", result.first_return, result.first_low, result.first_high),
        ("last bot", result.last_return, result.last_low, result.last_high),
    ):
        table.add_row(name, f"{value:.1f}", f"{low:.1f} to {high:.1f}")
    out.print()
    out.print(table)
    colour, word = ("green", "better") if result.improved else ("yellow", "not proven to be better")
    out.print(
        f"\n[{colour} bold]the last bot is {word}[/], on the same 100 held-out seeds, after {result.seconds:.0f} s"
    )
    colour = "green" if not (result.lost_steps or result.duplicate_steps) else "red"
    killed = f" although the {result.killed} was killed" if result.killed else ""
    out.print(
        f"acknowledged {count(result.acked_steps)} steps, stored {count(result.stored_steps)}: "
        f"[{colour} bold]lost {count(result.lost_steps)}, stored twice {count(result.duplicate_steps)}[/]{killed}"
    )
    out.print("\nnext")
    out.print(f"  understudy up --data {keep or 'D'}            [dim]# the same roles, for a game of yours[/dim]")
    out.print("  understudy train CartPole-v1        [dim]# a bot from a simulator alone[/dim]")
