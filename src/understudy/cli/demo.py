"""understudy demo."""

import secrets
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from understudy.app.crowd.backends import Backends
from understudy.app.crowd.loop import KILLABLE, Look, Loop, LoopConfig
from understudy.app.crowd.loop_result import LoopResult, NoBot
from understudy.app.data import DataFolder
from understudy.app.deployment import signing_key
from understudy.app.roles.children import end_children, kill_children
from understudy.cli.demo_view import watching
from understudy.cli.interrupts import Interrupts
from understudy.cli.options import count, examples, finish, folder, json_option
from understudy.cli.picture import check_picture, write_picture
from understudy.core.errors import ConfigError, UnderstudyError


@click.command(
    epilog=examples(
        "understudy demo",
        "understudy demo --check --kill learner --json",
        "understudy demo --game CartPole-v1 --keep D",
        "understudy demo --stream kinesis --store cassandra --models s3 --ingest spark --check",
    )
)
@click.option("--game", default="rally", show_default=True, metavar="ID", help="rally, or a Gymnasium id.")
@click.option("--players", default=8, show_default=True, help="How many simulated people.")
@click.option("--seconds", default=150.0, show_default=True, help="How long they play at most.")
@click.option("--kill", type=click.Choice(KILLABLE), help="Kill this role with kill -9 once the first bot plays.")
@click.option("--stream", default="file", show_default=True, metavar="S", help="file, kinesis, kafka, or an address.")
@click.option("--store", default="local", show_default=True, metavar="S", help="local, cassandra, or an address.")
@click.option("--models", default="folder", show_default=True, metavar="S", help="folder, s3, or an address.")
@click.option("--ingest", type=click.Choice(["native", "spark"]), default="native", show_default=True,
              help="What stores the stream. Servers that do not run are started, and stopped at the end.")  # fmt: skip
@click.option("--check", is_flag=True, help="End with 1 unless the last bot beats the first and nothing was lost.")
@click.option("--seed", default=0, show_default=True, help="Of the people and of the episodes that judge.")
@click.option("--keep", metavar="DIR", help="Keep the data in this folder (default: a temporary one).")
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Also write a picture of the output.")
@json_option
def demo(
    game: str, players: int, seconds: float, kill: str | None, stream: str, store: str, models: str, ingest: str,
    check: bool, seed: int, keep: str | None, svg: Path | None, as_json: bool,
) -> int:  # fmt: skip
    """Close the loop: people play, a learner without a game learns from them, and its bots play with them.

    Simulated people of different skill play through the real client over real HTTP; gateway, ingest and learner are
    the processes that `understudy up` runs. It ends by itself with the first and the last bot on equal seeds.
    """
    if svg is not None:
        check_picture(svg)
    config = LoopConfig(
        env_id=game, people=players, max_seconds=seconds, kill=kill, seed=seed,  # type: ignore[arg-type]
        backends=Backends(stream=stream, store=store, models=models, ingest=ingest),
    )  # fmt: skip
    out = Console(stderr=as_json, highlight=False, record=svg is not None, width=112 if svg else None)
    with Interrupts(hurry=kill_children) as interrupts, _scratch() as scratch:
        data = folder(keep) if keep else DataFolder(scratch / "data")
        if signing_key(data).exists():
            raise ConfigError(f"--keep {keep}: there is a platform in it already; give a folder that is not there yet")
        with watching(out, config) as show:

            def see(look: Look) -> None:
                interrupts.check()
                show(look)

            def begin() -> None:
                way = "client → gateway → stream → ingest → store → learner → bot"
                who = f"{players} people play" if players > 1 else "one person plays"
                out.print(f"[bold]{who} {escape(game)}[/]: {way}", soft_wrap=True)

            result = Loop(data, config, see, scratch=scratch / "servers", on_begin=begin).run()
    if isinstance(result, NoBot):
        error = result.why(shlex.quote(keep) if keep else None)
        finish({**result.to_json(), "error": error}, as_json=as_json)
        raise UnderstudyError(error)
    _print(out, result, config.kill, keep=keep)
    if svg is not None:
        write_picture(svg, out, title="understudy demo")
    return finish(result.to_json(), as_json=as_json, code=0 if result.is_sound or not check else 1)


@contextmanager
def _scratch() -> Iterator[Path]:
    """A temporary folder; it and every process of ours are gone behind it, however often somebody asks to stop."""
    path = Path(tempfile.gettempdir()) / f"understudy-demo-{secrets.token_hex(8)}"

    def clean() -> None:
        end_children()
        shutil.rmtree(path, ignore_errors=True)

    try:
        path.mkdir(mode=0o700)
        yield path
    finally:
        try:
            clean()
        finally:
            clean()  # the one interrupt that is raised may have come in the middle of the first


def _print(out: Console, result: LoopResult, kill: str | None, *, keep: str | None) -> None:
    out.print()
    out.print(_bots(result))
    colour, word = ("green", "better") if result.improved else ("yellow", "not proven to be better")
    out.print(
        f"\n[{colour} bold]the last bot is {word}[/], on the same {result.judged_on}, after {result.seconds:.0f} s"
    )
    verdict, is_lossless = result.verdict, not (result.verdict.lost_steps or result.verdict.duplicate_steps)
    out.print(f"all it learnt came from players' games: {count(verdict.steps)} steps; the learner never had the game")
    killed = f" although the {result.killed} was killed" if result.killed else ""
    out.print(
        f"acknowledged {count(verdict.ledger_steps)} steps, stored {count(verdict.steps)}, by bytes: "
        f"[{'green' if is_lossless else 'red'} bold]lost {count(verdict.lost_steps)}, stored twice "
        f"{count(verdict.duplicate_steps)}[/]{killed}"
    )
    if kill and not result.killed:
        out.print(f"[yellow]the {kill} was never killed[/]: it did not run when the first bot came; try again")
    out.print("\nnext")
    told = [
        ("understudy play rally --web", "play it yourself, in a browser"),
        (f"understudy up --data {shlex.quote(keep) if keep else 'D'}", "the same roles, for a game of yours"),
        ("understudy demo --kill learner", "the same, with kill -9 in the middle"),
        ("understudy train rally", "a bot from an env alone"),
    ]
    if result.killed:
        del told[2]
    width = max(len(command) for command, _ in told) + 2
    for command, what in told:
        out.print(f"  {escape(command):<{width}}[dim]# {what}[/dim]", soft_wrap=True)


def _bots(result: LoopResult) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in ("", "share of points" if result.is_match else "mean return", "95 % interval"):
        table.add_column(name, justify="left" if not name else "right")
    form = ".0%" if result.is_match else ".1f"
    for name, found in zip(("first bot", "last bot"), result.shares or (result.first, result.last), strict=True):
        low, high = (found.value if end is None else end for end in (found.low, found.high))
        table.add_row(name, format(found.value, form), f"{format(low, form)} to {format(high, form)}")
    return table
