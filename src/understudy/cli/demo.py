"""understudy demo: runs the closed loop and shows it live in a terminal, as lines elsewhere."""

import re
import secrets
import shlex
import shutil
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from understudy.backends.data import DataFolder, data_folder
from understudy.backends.deployment import signing_key
from understudy.cli.interrupts import Interrupts
from understudy.cli.options import count_of, examples, finish, format_count, json_option, live_view
from understudy.core.errors import ConfigError, UnderstudyError
from understudy.games.rally import Court, as_text
from understudy.platform.children import end_children, kill_children
from understudy.simulation.loop import (
    KILLABLE,
    Backends,
    Loop,
    LoopConfig,
    LoopProgress,
    LoopResult,
    Show,
    point_share,
)

_LINE_EVERY_S = 5.0
_COLUMNS = 72
_ROWS = 12
_COURT_ROWS = 11
"""Rows of a terminal that the live view needs without the court, and that the court needs."""
_WINDOW_S = 5.0
"""Rates are averaged over this window; steps acknowledged before it should be stored by now."""
_FONT = re.compile(r"\s*@font-face\s*\{[^}]*https?://[^}]*\}")
_COMMENT = re.compile(r"\s*<!--.*?-->", re.DOTALL)
_KEY = re.compile(r"(?<=key=)[^\s<>&\"']+")


@click.command(
    epilog=examples(
        "understudy demo",
        "understudy demo --check --kill learner --json",
        "understudy demo --game CartPole-v1 --keep D",
        "understudy demo --stream kinesis --store cassandra --models s3 --ingest spark --check",
    )
)
@click.option(
    "--game", default="rally", show_default=True, metavar="ID", help="rally, or a Gymnasium id."
)
@click.option("--players", default=8, show_default=True, help="Number of simulated players.")
@click.option("--seconds", default=150.0, show_default=True, help="Maximum duration of play.")
@click.option(
    "--kill",
    type=click.Choice(KILLABLE),
    help="Kill this role with kill -9 once the first bot is playing.",
)
@click.option(
    "--stream",
    default="file",
    show_default=True,
    metavar="S",
    help="file, kinesis, kafka, or a URL.",
)
@click.option(
    "--store",
    default="local",
    show_default=True,
    metavar="S",
    help="local, cassandra, or a URL.",
)
@click.option(
    "--models", default="folder", show_default=True, metavar="S", help="folder, s3, or a URL."
)
@click.option(
    "--ingest",
    type=click.Choice(["native", "spark"]),
    default="native",
    show_default=True,
    help="The ingest engine.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Exit with 1 unless the last champion beats the first bot and no step was lost.",
)
@click.option(
    "--seed", default=0, show_default=True, help="Seed of the players and of the evaluation."
)
@click.option(
    "--keep", metavar="DIR", help="Keep the data in this folder (default: a temporary one)."
)
@click.option(
    "--svg",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the output to an SVG file.",
)
@json_option
def demo(
    game: str,
    players: int,
    seconds: float,
    kill: str | None,
    stream: str,
    store: str,
    models: str,
    ingest: str,
    check: bool,
    seed: int,
    keep: str | None,
    svg: Path | None,
    as_json: bool,
) -> int:
    """Run the closed loop: players play, a learner learns from them, its bots play against them.

    Simulated players of different skill use the real client over real HTTP; gateway, ingest and
    learner are the processes that `understudy up` runs. The learner never runs the game. Servers
    that --stream, --store, --models or --ingest need are started if they are not running, and
    stopped at the end. The demo ends by itself with an evaluation of the first and the last bot on
    equal seeds. The last bot is the champion at that time, not a newer canary still on trial.
    """
    if svg is not None:
        check_svg(svg)
    config = LoopConfig(
        env_id=game,
        people=players,
        max_seconds=seconds,
        kill=kill,  # type: ignore[arg-type]
        seed=seed,
        backends=Backends(stream=stream, store=store, models=models, ingest=ingest),
    )
    out = Console(
        stderr=as_json, highlight=False, record=svg is not None, width=112 if svg else None
    )
    with Interrupts(hurry=kill_children) as interrupts, _scratch() as scratch:
        data = data_folder(keep) if keep else DataFolder(scratch / "data")
        if signing_key(data).exists():
            raise ConfigError(
                f"--keep {keep}: the folder already contains a platform; give a new folder"
            )
        with loop_view(out, config) as show:

            def show_or_stop(look: LoopProgress) -> None:
                interrupts.check()
                show(look)

            def begin() -> None:
                path = "client → gateway → stream → ingest → store → learner → bot"
                subject = f"{players} people play" if players > 1 else "one person plays"
                out.print(f"[bold]{subject} {escape(game)}[/]: {path}", soft_wrap=True)

            loop = Loop(data, config, show_or_stop, scratch=scratch / "servers", on_begin=begin)
            result = loop.run()
    if result.first is None:
        error = no_bot_error(config, result.seconds, shlex.quote(keep) if keep else None)
        finish({**result.to_json(), "error": error}, as_json=as_json)
        raise UnderstudyError(error)
    _print(out, result, config.kill, keep=keep)
    if svg is not None:
        write_svg(svg, out, title="understudy demo")
    return finish(result.to_json(), as_json=as_json, code=0 if result.is_sound or not check else 1)


@contextmanager
def _scratch() -> Iterator[Path]:
    """A temporary folder, removed on exit with every child process, even after interrupts."""
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
            clean()  # again: an interrupt may have stopped the first call; later ones do not raise


def no_bot_error(config: LoopConfig, seconds: float, keep: str | None) -> str:
    """The error for a demo that released no bot; `keep` is its data folder, None if temporary."""
    inspect = f"inspect it with `understudy status --data {keep or 'DIR'}`"
    error = (
        f"no bot was released within {config.max_seconds:g} s of play ({seconds:.0f} s including "
        "startup and shutdown)"
    )
    if config.kill:
        error += f", so the {config.kill} was never killed"
    return (
        f"{error}; give more --seconds, or {inspect if keep else f'give --keep DIR and {inspect}'}"
    )


def _print(out: Console, result: LoopResult, kill: str | None, *, keep: str | None) -> None:
    out.print()
    out.print(_bots(result))
    colour, word = ("green", "better") if result.improved else ("yellow", "not proven to be better")
    out.print(
        f"\n[{colour} bold]the last bot is {word}[/] than the first, on the same "
        f"{result.judged_on}, after {result.seconds:.0f} s"
    )
    verification = result.verification
    is_lossless = not (verification.lost_steps or verification.duplicate_steps)
    out.print(
        f"bots learned only from {format_count(verification.steps)} recorded steps; the learner "
        "never ran the game"
    )
    killed = f" although the {result.killed} was killed" if result.killed else ""
    out.print(
        f"acknowledged {format_count(verification.ledger_steps)} steps, stored "
        f"{format_count(verification.steps)}, verified byte by byte: "
        f"[{'green' if is_lossless else 'red'} bold]lost {format_count(verification.lost_steps)}, "
        f"stored twice {format_count(verification.duplicate_steps)}[/]{killed}"
    )
    if kill and not result.killed:
        out.print(
            f"[yellow]the {kill} was never killed[/]: it was not running when the first bot was "
            "released; try again"
        )
    out.print("\nnext")
    commands = [
        ("understudy play rally --web", "play rally yourself, in a browser"),
        (
            f"understudy up --data {shlex.quote(keep) if keep else 'D'}",
            "the same roles, for your own game",
        ),
        ("understudy demo --kill learner", "the demo again, with a kill -9 in the middle"),
        ("understudy train rally", "train a bot from an env alone"),
    ]
    if result.killed:
        del commands[2]
    width = max(len(command) for command, _ in commands) + 2
    for command, what in commands:
        out.print(f"  {escape(command):<{width}}[dim]# {what}[/dim]", soft_wrap=True)


def _bots(result: LoopResult) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in ("", "share of points" if result.is_match else "mean return", "95 % interval"):
        table.add_column(name, justify="left" if not name else "right")
    form = ".0%" if result.is_match else ".1f"
    for name, returned in (("first bot", result.first), ("last bot (champion)", result.last)):
        assert returned is not None
        score = point_share(returned) if result.is_match else returned
        low, high = (score.value if end is None else end for end in (score.low, score.high))
        table.add_row(
            name, format(score.value, form), f"{format(low, form)} to {format(high, form)}"
        )
    return table


# --- While it runs --------------------------------------------------------------------------------


@contextmanager
def loop_view(out: Console, config: LoopConfig) -> Iterator[Show]:
    """Yield a function that shows the loop's progress until the block ends."""
    recent: deque[LoopProgress] = deque()
    has_room = (
        out.is_terminal
        and not out.is_dumb_terminal
        and out.width >= _COLUMNS
        and out.height > _ROWS
    )

    def draw(look: LoopProgress) -> RenderableType:
        return _view(look, recent[0], config, has_court=out.height > _ROWS + _COURT_ROWS)

    def line(look: LoopProgress) -> str:
        acked = format_count(look.acked_steps)
        steps = f"acknowledged {acked}, stored {format_count(look.stored_steps)} steps"
        return f"[dim]{look.elapsed_s:5.1f} s[/]  {steps}; {_points(look) or escape(look.phase)}"

    with live_view(out, draw=draw, line=line, every_s=_LINE_EVERY_S, has_room=has_room) as update:

        def show(look: LoopProgress) -> None:
            if look.message:
                out.print(
                    f"[dim]{look.elapsed_s:5.1f} s[/]  {escape(look.message)}", soft_wrap=True
                )
                return
            recent.append(look)
            while recent[0].elapsed_s < look.elapsed_s - _WINDOW_S:
                recent.popleft()
            update(look)

        yield show
    if out.record and recent:
        # The SVG file shows the last view, too.
        out.print(_view(recent[-1], recent[0], config, has_court=True))


def _points(look: LoopProgress) -> str:
    """The share of points that each bot won against the players, oldest bot first."""
    names = sorted(look.points, key=lambda name: int(name.rpartition("/")[2]))
    shares = [f"{name} {look.points[name][0] / look.points[name][1]:.0%}" for name in names]
    return f"points won against players: {', '.join(shares)}" if shares else ""


def _losses(look: LoopProgress, before: LoopProgress) -> Text:
    """Whether steps acknowledged some seconds ago are stored; the demo's end verifies the bytes."""
    late = max(0, before.acked_steps - look.stored_steps)
    more = max(0, look.stored_steps - look.recorded_steps)
    if late:
        return Text(f"{format_count(late)} steps acknowledged and not yet stored", style="yellow")
    if more:
        # Only steps of simulated players count as recorded; people in a browser may play, too.
        return Text(
            f"0 lost so far, by counts; {format_count(more)} steps of other players are stored as "
            "well",
            style="green",
        )
    return Text("0 lost, 0 stored twice so far, by counts", style="green")


def _view(
    look: LoopProgress, before: LoopProgress, config: LoopConfig, *, has_court: bool
) -> RenderableType:
    took_s = max(look.elapsed_s - before.elapsed_s, 1e-9)

    def rate(name: str) -> str:
        return (
            f"{format_count(max(0, getattr(look, name) - getattr(before, name)) / took_s)}/s"
            if took_s > 0.5
            else ""
        )

    table = Table(
        title=f"{config.env_id}   {look.play_s:.0f} of at most {config.max_seconds:g} s of play",
        min_width=_COLUMNS,
        title_justify="left",
    )
    for name in ("", "steps", "rate", "lag"):
        table.add_column(name, justify="left" if not name else "right")
    waiting = max(0, look.recorded_steps - look.acked_steps)
    lag = "" if look.lag_s is None else f"{look.lag_s * 1000:.0f} ms"
    table.add_row(
        count_of(config.people, "player"),
        format_count(look.recorded_steps),
        rate("recorded_steps"),
        f"{format_count(waiting)} to send",
    )
    in_flight = f"{format_count(max(0, look.acked_steps - look.stored_steps))} in flight"
    table.add_row("acknowledged", format_count(look.acked_steps), rate("acked_steps"), in_flight)
    table.add_row("stored", format_count(look.stored_steps), rate("stored_steps"), lag)
    table.add_row("learner", count_of(look.updates, "update"), rate("updates"), "")
    bots = f"champion {look.champion or 'none yet'}" + (
        f", canary {look.canary}" if look.canary else ""
    )
    parts: list[RenderableType] = [
        table,
        Text(f"{bots}; {look.phase}", style="dim", overflow="ellipsis", no_wrap=True),
    ]
    parts.append(_losses(look, before))
    if points := _points(look):
        parts.append(Text(points, overflow="ellipsis", no_wrap=True))
    if has_court and (court := look.view.get("court")):
        seats = ("person", "bot") if look.view["seat"] == 0 else ("bot", "person")
        person_points, bots_points = look.view["score"]
        score = (
            (person_points, bots_points) if look.view["seat"] == 0 else (bots_points, person_points)
        )
        title = f"{seats[0]} {score[0]} : {score[1]} {seats[1]}"
        parts.append(Panel(as_text(Court(*court), columns=64, rows=9), title=title, width=68))
    return Group(*parts)


# --- The SVG file ---------------------------------------------------------------------------------


def check_svg(path: Path) -> None:
    """Raise ConfigError if the file cannot be written; leaves no new file behind."""
    if not path.absolute().parent.is_dir():
        raise ConfigError(
            f"--svg {path}: folder {path.absolute().parent} does not exist; create it first"
        )
    try:
        existed = path.exists()
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise ConfigError(
            f"--svg {path} cannot be written: {error.strerror}; give a file in a writable folder"
        ) from None


def write_svg(path: Path, out: Console, *, title: str) -> None:
    """Write what a recording console printed, without web fonts and without the keys in URLs."""
    svg = _COMMENT.sub("", _FONT.sub("", out.export_svg(title=title)))
    # The length is preserved: an SVG states each text's length, and viewers stretch the text to it.
    svg = _KEY.sub(lambda key: "…" + "&#160;" * (len(key[0]) - 1), svg)
    path.write_text(svg, encoding="utf-8")
