"""The live view of a simulation: a table in a terminal, a line now and then elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table

from understudy.app.crowd.simulate import Progress
from understudy.cli.options import count

_LINE_EVERY_S = 2.0


class Show(Protocol):
    """Takes each new state of a simulation."""

    def __call__(self, progress: Progress) -> None: ...


@contextmanager
def watching(out: Console, *, title: str, seconds: float) -> Iterator[Show]:
    """Show progress until the block ends."""
    if out.is_terminal:
        with Live(console=out, refresh_per_second=8, transient=True) as live:
            yield lambda progress: live.update(_table(progress, title, seconds))
    else:
        yield _Lines(out, seconds)


class _Lines:
    def __init__(self, out: Console, seconds: float) -> None:
        self._out, self._seconds, self._next_s = out, seconds, 0.0

    def __call__(self, progress: Progress) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _LINE_EVERY_S
            self._out.print(
                f"{progress.elapsed_s:5.1f} s of {self._seconds:g}: recorded {count(progress.recorded_steps)}, "
                f"acked {count(progress.acked_steps)}, stored {count(progress.stored_steps)} steps"
            )


def _table(progress: Progress, title: str, seconds: float) -> Table:
    table = Table(title=f"{title}   {progress.elapsed_s:.1f} of {seconds:g} s", title_justify="left", min_width=64)
    for name in ("", "processes", "steps", "steps/s", "lag"):
        table.add_column(name, justify="left" if not name else "right")
    elapsed = max(progress.elapsed_s, 1e-9)
    rows = (("players", progress.players_alive, progress.recorded_steps), ("acked", "", progress.acked_steps))
    for name, alive, steps in rows:
        table.add_row(name, str(alive), count(steps), count(steps / elapsed), "")
    table.add_row(
        "stored", "1" if progress.ingest_alive else "0", count(progress.stored_steps),
        count(progress.stored_steps / elapsed), f"{progress.lag_s * 1000:.0f} ms",
    )  # fmt: skip
    return table
