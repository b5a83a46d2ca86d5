"""What the closed loop looks like while it runs: a table and the match in a terminal, a line now and then elsewhere."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from understudy.app.crowd.loop import Look, LoopConfig, Show
from understudy.cli.options import count
from understudy.games.rally import Court, as_text

_LINE_EVERY_S = 5.0
_COLUMNS, _ROWS, _COURT_ROWS = 72, 12, 11
"""What a picture takes of a terminal, without the court, and what the court takes."""
_OVER_S = 5.0
"""Rates are taken over so long; what was acknowledged before must be stored by now."""


@contextmanager
def watching(out: Console, config: LoopConfig) -> Iterator[Show]:
    """Show the loop until the block ends."""
    next_s = 0.0
    live = Live(console=out, refresh_per_second=10, transient=True) if _has_room(out) else None
    seen: deque[Look] = deque()

    def show(look: Look) -> None:
        nonlocal next_s
        if look.said:
            out.print(f"[dim]{look.elapsed_s:5.1f} s[/]  {escape(look.said)}", soft_wrap=True)
            return
        seen.append(look)
        while seen[0].elapsed_s < look.elapsed_s - _OVER_S:
            seen.popleft()
        if live is not None:
            live.update(_picture(look, seen[0], config, has_court=out.height > _ROWS + _COURT_ROWS))
        elif time.monotonic() >= next_s:
            next_s = time.monotonic() + _LINE_EVERY_S
            out.print(f"[dim]{look.elapsed_s:5.1f} s[/]  {_line(look)}", soft_wrap=True)

    if live is None:
        yield show
    else:
        with live:
            yield show
    if out.record and seen:
        out.print(_picture(seen[-1], seen[0], config, has_court=True))  # what a picture of the output should have, too


def _has_room(out: Console) -> bool:
    """Whether this is a terminal where a picture can be drawn and drawn again."""
    return out.is_terminal and not out.is_dumb_terminal and out.width >= _COLUMNS and out.height > _ROWS


def _line(look: Look) -> str:
    steps = f"acknowledged {count(look.acked_steps)}, stored {count(look.stored_steps)} steps"
    return f"{steps}; {_points(look) or escape(look.phase)}"


def _points(look: Look) -> str:
    """The share of points of each bot, oldest first."""
    names = sorted(look.points, key=lambda name: int(name.rpartition("/")[2]))
    shares = [f"{name} {look.points[name][0] / look.points[name][1]:.0%}" for name in names]
    return f"points won by {', '.join(shares)}" if shares else ""


def _kept(look: Look, before: Look) -> Text:
    """Whether all that was acknowledged some seconds ago is stored once; the loop's end proves it by the bytes."""
    late, more = max(0, before.acked_steps - look.stored_steps), max(0, look.stored_steps - look.recorded_steps)
    if late:
        return Text(f"{count(late)} steps acknowledged and not yet stored", style="yellow")
    if more:
        # Whoever plays along in a browser is not among those who are counted.
        return Text(f"0 lost so far, by counts; {count(more)} steps of others are stored as well", style="green")
    return Text("0 lost, 0 twice so far, by counts", style="green")


def _picture(look: Look, before: Look, config: LoopConfig, *, has_court: bool) -> RenderableType:
    took_s = max(look.elapsed_s - before.elapsed_s, 1e-9)

    def rate(name: str) -> str:
        return f"{count(max(0, getattr(look, name) - getattr(before, name)) / took_s)}/s" if took_s > 0.5 else ""

    table = Table(
        title=f"{config.env_id}   {look.play_s:.0f} of at most {config.max_seconds:g} s of play", min_width=_COLUMNS,
        title_justify="left",
    )  # fmt: skip
    for name in ("", "steps", "rate", "lag"):
        table.add_column(name, justify="left" if not name else "right")
    waiting = max(0, look.recorded_steps - look.acked_steps)
    lag = "" if look.lag_s is None else f"{look.lag_s * 1000:.0f} ms"
    table.add_row(
        f"{config.people} players", count(look.recorded_steps), rate("recorded_steps"), f"{count(waiting)} to send"
    )
    on_the_way = f"{count(max(0, look.acked_steps - look.stored_steps))} on the way"
    table.add_row("acknowledged", count(look.acked_steps), rate("acked_steps"), on_the_way)
    table.add_row("stored", count(look.stored_steps), rate("stored_steps"), lag)
    table.add_row("learner", f"{count(look.updates)} updates", rate("updates"), "")
    bots = f"champion {look.champion or 'none yet'}" + (f", canary {look.canary}" if look.canary else "")
    parts: list[RenderableType] = [table, Text(f"{bots}; {look.phase}", style="dim", overflow="ellipsis", no_wrap=True)]
    parts.append(_kept(look, before))
    if points := _points(look):
        parts.append(Text(points, overflow="ellipsis", no_wrap=True))
    if has_court and (court := look.view.get("court")):
        seats = ("person", "bot") if look.view["seat"] == 0 else ("bot", "person")
        mine, bots_points = look.view["score"]
        score = (mine, bots_points) if look.view["seat"] == 0 else (bots_points, mine)
        title = f"{seats[0]} {score[0]} : {score[1]} {seats[1]}"
        parts.append(Panel(as_text(Court(*court), columns=64, rows=9), title=title, width=68))
    return Group(*parts)
