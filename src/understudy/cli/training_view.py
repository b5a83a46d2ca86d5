"""The live view of a run: a table in a terminal, a line now and then elsewhere."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from understudy.cli.options import count
from understudy.core.events import Compiling, Episode, Evaluation, Event, Guarded, OnEvent, Started, Update

_LINE_EVERY_S = 5.0
_WINDOW_S = 5.0


class Progress:
    """Where a run stands, from its events."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._begin(None)

    def _begin(self, started: Started | None) -> None:
        self.started, self.steps = started, 0 if started is None else started.env_steps
        self.updates = self.lag_versions = 0
        self.replay_ratio, self.is_compiling = 0.0, False
        self.evaluation: Evaluation | None = None
        self._recent: deque[float] = deque(maxlen=100)
        self._seen: deque[tuple[float, int, int]] = deque()

    def hear(self, event: Event) -> None:
        self.steps = max(self.steps, event.env_steps)
        match event:
            case Started():
                self._begin(event)
            case Compiling():
                self.is_compiling = True
            case Episode():
                self._recent.append(event.return_)
            case Update():
                self.updates, self.lag_versions = event.updates, event.lag_versions
                self.replay_ratio = event.replay_ratio
                if self.is_compiling:
                    # Compiling is not training: rates count from here.
                    self.is_compiling = False
                    self._seen.clear()
                self._note()
            case Evaluation():
                self.evaluation = event

    def _note(self) -> None:
        self._seen.append((self._now(), self.steps, self.updates))
        while len(self._seen) > 2 and self._seen[0][0] < self._now() - _WINDOW_S:
            self._seen.popleft()

    @property
    def rates(self) -> tuple[float, float]:
        """Steps and updates a second, over the last seconds; 0 before there is anything to say."""
        if len(self._seen) < 2:
            return 0.0, 0.0
        (from_s, steps, updates), (to_s, *now) = self._seen[0], self._seen[-1]
        took_s = max(to_s - from_s, 1e-9)
        return (now[0] - steps) / took_s, (now[1] - updates) / took_s

    @property
    def left_s(self) -> float | None:
        """Seconds to the last step, at the pace of now."""
        steps_s = self.rates[0]
        return None if self.started is None or steps_s <= 0 else max(0, self.started.steps - self.steps) / steps_s

    @property
    def train_return(self) -> float | None:
        return sum(self._recent) / len(self._recent) if self._recent else None


@contextmanager
def watching_run(out: Console, progress: Progress) -> Iterator[OnEvent]:
    """Show a run until the block ends; `progress` hears every event first."""
    if not out.is_terminal:
        yield _Lines(out, progress)
        return
    with Live(console=out, refresh_per_second=4, transient=True, get_renderable=lambda: table(progress)):

        def hear(event: Event) -> None:
            progress.hear(event)
            if isinstance(event, Started | Guarded):
                out.print(_said(event))

        yield hear


class _Lines:
    def __init__(self, out: Console, progress: Progress) -> None:
        self._out, self._progress, self._next_s = out, progress, 0.0

    def __call__(self, event: Event) -> None:
        self._progress.hear(event)
        now_s = time.monotonic()
        if isinstance(event, Started | Guarded | Compiling):
            self._out.print(_said(event), soft_wrap=True)
        elif isinstance(event, Evaluation) or (isinstance(event, Update) and now_s >= self._next_s):
            self._out.print(line(self._progress), soft_wrap=True)
        else:
            return
        self._next_s = now_s + _LINE_EVERY_S


def _said(event: Started | Guarded | Compiling) -> str:
    match event:
        case Started():
            goes_on = f", goes on at step {count(event.env_steps)}" if event.env_steps else ""
            return f"{event.game}, {escape(event.algorithm)}, seed {event.seed}: run {escape(event.run)}{goes_on}"
        case Compiling():
            return "compiling ..."
    return (
        f"[yellow]guarded[/] at step {count(event.env_steps)}: {escape(event.what)} {' '.join(event.chunks)}".rstrip()
    )


def returns(event: Evaluation) -> str:
    """A return with its interval."""
    return f"{event.mean:.1f} ({event.low:.1f} to {event.high:.1f})"


def duration(seconds: float | None) -> str:
    """Seconds for people."""
    if seconds is None:
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return (
        f"{whole // 60} min {whole % 60:02d} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    )


def line(progress: Progress) -> str:
    """Where a run stands, in one line."""
    steps_s, updates_s = progress.rates
    parts = [f"{count(progress.steps)} steps", f"{count(progress.updates)} updates"]
    if steps_s:
        parts.append(f"{count(steps_s)} steps/s, {count(updates_s)} updates/s")
    if progress.evaluation is not None:
        parts.append(f"return {returns(progress.evaluation)}")
    parts += [f"lag {progress.lag_versions}, replay ratio {progress.replay_ratio:.1f}"]
    if progress.left_s:
        parts.append(f"{duration(progress.left_s)} left at most")
    return "; ".join(parts)


def table(progress: Progress) -> Table:
    """Where a run stands, as a table."""
    run = progress.started
    shown = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    if run is None:
        shown.add_row("[dim]starting ...[/]")
        return shown
    steps_s, updates_s = progress.rates
    shown.add_row("steps", f"{count(progress.steps)} of {count(run.steps)}", f"{count(steps_s)}/s")
    waits = "[bold yellow]compiling ...[/]" if progress.is_compiling else f"{count(updates_s)}/s"
    shown.add_row("updates", count(progress.updates), waits)
    goal = "" if run.until is None else f"goal {run.until:g}"
    best = "-" if progress.evaluation is None else returns(progress.evaluation)
    shown.add_row("return", f"[bold]{best}[/]", goal)
    if progress.train_return is not None:
        shown.add_row("while training", f"{progress.train_return:.1f}", "[dim]last 100 episodes[/]")
    shown.add_row("replay ratio", f"{progress.replay_ratio:.1f}", f"lag {progress.lag_versions}")
    left = duration(progress.left_s)
    shown.add_row("time left", left if run.until is None else f"{left} at most", "")
    return shown
