"""The live view of a run: a table in a terminal, a line now and then elsewhere."""

import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from understudy.cli.options import count_of, format_count, format_size
from understudy.ports import TeamReport
from understudy.training.events import (
    Compiling,
    EpisodeEnded,
    Evaluation,
    Event,
    Guarded,
    InitFrom,
    OnEvent,
    Started,
    Update,
    WorkerEvaluation,
    WorkersReport,
)

_LINE_EVERY_S = 5.0
_WINDOW_S = 5.0
_GUARDS_SHOWN = 3
"""Interventions of the guard shown per kind; further ones are only counted (see guarded.csv)."""
_NAMES_SHOWN = 6


class RunProgress:
    """The progress of a run, from its events."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._begin(None)

    def _begin(self, started: Started | None) -> None:
        self.started = started
        self.steps = 0 if started is None else started.env_steps
        self.updates = 0
        self.lag_versions = 0
        self.replay_ratio = 0.0
        self.is_compiling = False
        self.evaluation: Evaluation | None = None
        self.team: TeamReport | None = None
        """The last report of the run's workers."""
        self.worker_evaluation: WorkerEvaluation | None = None
        self._recent: deque[float] = deque(maxlen=100)
        self._history: deque[tuple[float, int, int]] = deque()
        self.guards: Counter[str] = Counter()
        """How often the guard (against non-finite updates) intervened, by kind of reason."""

    def handle_event(self, event: Event) -> None:
        self.steps = max(self.steps, event.env_steps)
        match event:
            case Started():
                self._begin(event)
            case Compiling():
                self.is_compiling = True
            case EpisodeEnded():
                self._recent.append(event.return_)
            case Update():
                self.updates = event.updates
                self.lag_versions = event.lag_versions
                self.replay_ratio = event.replay_ratio
                if self.is_compiling:
                    # Compiling is not training: rates are measured from here.
                    self.is_compiling = False
                    self._history.clear()
                self._history.append((self._now(), self.steps, self.updates))
                while len(self._history) > 2 and self._history[0][0] < self._now() - _WINDOW_S:
                    self._history.popleft()
            case Evaluation():
                self.evaluation = event
            case Guarded():
                self.guards[_kind(event)] += 1
            case WorkersReport():
                self.team = event.report
            case WorkerEvaluation():
                self.worker_evaluation = event

    @property
    def unit(self) -> str:
        """The unit of a run's progress: `updates` when it trains from a store, else `steps`."""
        return "updates" if self.started is not None and self.started.is_from_store else "steps"

    def times_guarded(self, event: Guarded) -> int:
        """How often the guard intervened for this kind of reason, including this event."""
        return self.guards[_kind(event)]

    @property
    def rates(self) -> tuple[float, float]:
        """Steps and updates per second over the last five seconds; 0 before the second update."""
        if len(self._history) < 2:
            return 0.0, 0.0
        from_s, first_steps, first_updates = self._history[0]
        to_s, steps, updates = self._history[-1]
        took_s = max(to_s - from_s, 1e-9)
        return (steps - first_steps) / took_s, (updates - first_updates) / took_s

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the last step at the current rate; None if unknown."""
        steps_s = self.rates[0]
        return (
            None
            if self.started is None or steps_s <= 0
            else max(0, self.started.steps - self.steps) / steps_s
        )

    @property
    def train_return(self) -> float | None:
        return sum(self._recent) / len(self._recent) if self._recent else None


@contextmanager
def run_view(out: Console, progress: RunProgress) -> Iterator[OnEvent]:
    """Yield an event handler that shows a run; `progress` receives every event first."""
    next_s = 0.0
    has_workers = True

    def handle_event(event: Event) -> None:
        nonlocal next_s, has_workers
        progress.handle_event(event)
        if isinstance(event, WorkersReport) and has_workers != any(event.report.workers.values()):
            has_workers = not has_workers
            if not has_workers:
                out.print("waiting for workers ...", soft_wrap=True)
        is_news = not isinstance(event, Guarded) or progress.times_guarded(event) <= _GUARDS_SHOWN
        if isinstance(event, Started | Guarded) and is_news:
            out.print(_message(event, progress), soft_wrap=not out.is_terminal)
        elif out.is_terminal or not is_news:
            return
        elif isinstance(event, Compiling):
            out.print("compiling ...", soft_wrap=True)
        elif isinstance(event, Evaluation) or (
            isinstance(event, Update) and time.monotonic() >= next_s
        ):
            out.print(progress_line(progress), soft_wrap=True)
        else:
            return
        next_s = time.monotonic() + _LINE_EVERY_S

    if not out.is_terminal:
        yield handle_event
        return
    with Live(
        console=out,
        refresh_per_second=4,
        transient=True,
        get_renderable=lambda: progress_table(progress),
    ):
        yield handle_event


def _kind(event: Guarded) -> str:
    return re.sub(r"[0-9]+", "", event.what.partition(":")[0])


def _message(event: Started | Guarded, progress: RunProgress) -> str:
    at = f"at {progress.unit.removesuffix('s')} {format_count(event.env_steps)}"
    if isinstance(event, Started):
        resumed = f", resumed {at}" if event.env_steps else ""
        message = (
            f"{event.game}, {escape(event.algorithm)}, seed {event.seed}: run "
            f"{escape(event.run)}{resumed}"
        )
        if event.init_from is not None and not resumed:
            message += f"\n{escape(init_from_line(event.init_from))}"
        if event.worker_command:
            message += (
                f"\nworkers join with: {escape(event.worker_command)}\n"
                f"their key is in {escape(event.worker_key)}"
            )
        if event.cut_schedules:
            message += f"\n{escape(cut_schedules_line(event, progress.unit))}"
        return message
    message = f"[yellow]guarded[/] {at}: {escape(event.what)} {' '.join(event.chunks)}".rstrip()
    if progress.times_guarded(event) == _GUARDS_SHOWN:
        message += (
            "\n[yellow]guarded[/]: more messages of this kind are not shown; "
            f"{_guarded_csv(progress)} lists them all"
        )
    return message


def _guarded_csv(progress: RunProgress) -> str:
    return escape(
        str(Path("RUN" if progress.started is None else progress.started.run) / "guarded.csv")
    )


def init_from_line(source: InitFrom) -> str:
    """A line that tells how many weights are copied from another run, and which are new."""
    total = len(source.fit) + len(source.new)
    share = f"{len(source.fit)} of {total}" if source.new else f"all {total}"
    line = f"from {source.run}: {share} weights fit"
    for what, names in (("new", source.new), ("without a place here", source.unused)):
        more = len(names) - _NAMES_SHOWN
        rest = f" and {more} more" if more > 0 else ""
        if names:
            line += f"; {what}: {', '.join(names[:_NAMES_SHOWN])}{rest}"
    return line


def cut_schedules_line(run: Started, unit: str) -> str:
    """A line with the schedules that a run cuts, and how to fit them to the run."""
    ends = ", ".join(
        f"{name} ends at {last:.3g}, not {end:.3g}"
        for name, (last, end) in run.cut_schedules.items()
    )
    return (
        f"schedules span {format_count(run.horizon)} {unit}, this run {format_count(run.steps)}: "
        f"{ends}; fit them to the run with --set horizon={run.steps}"
    )


def format_return(event: Evaluation) -> str:
    """A return with its interval, if there is one, and the number of cut episodes, if any."""
    text = f"{event.mean:.1f}"
    if event.low is not None and event.high is not None:
        text += f" ({event.low:.1f} to {event.high:.1f})"
    if event.n_cut:
        text += f", {event.n_cut} of {len(event.returns)} episodes cut"
    return text


def format_duration(seconds: float | None) -> str:
    """Format seconds for display: 2 min 05 s."""
    if seconds is None:
        return "?"
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    return (
        f"{rounded // 60} min {rounded % 60:02d} s"
        if rounded < 3600
        else f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"
    )


def progress_line(progress: RunProgress) -> str:
    """The progress of a run in one line."""
    steps_s, updates_s = progress.rates
    counts = {"steps": (progress.steps, steps_s), "updates": (progress.updates, updates_s)}
    if progress.unit == "updates":
        del counts["steps"]
    parts = [f"{format_count(done)} {unit}" for unit, (done, _) in counts.items()]
    if steps_s:
        parts.append(
            ", ".join(f"{format_count(rate)} {unit}/s" for unit, (_, rate) in counts.items())
        )
    if progress.evaluation is not None:
        parts.append(f"return {format_return(progress.evaluation)}")
    parts += [f"lag {progress.lag_versions}, replay ratio {progress.replay_ratio:.1f}"]
    if progress.team is not None:
        parts.append(_team_text(progress.team))
    if guards := progress.guards.total():
        parts.append(f"guarded {count_of(guards, 'time')}")
    if progress.remaining_s:
        parts.append(f"{format_duration(progress.remaining_s)} left at most")
    return "; ".join(parts)


def _workers_text(team: TeamReport) -> str:
    return f"{team.workers['train']} train, {team.workers['evaluate']} evaluate"


def _team_text(team: TeamReport) -> str:
    return (
        f"workers {_workers_text(team)}, {team.chunks_s:.0f} chunks/s, handling "
        f"{1000 * team.handling_s:.0f} ms, learner load {team.learner_load:.0%}, queue "
        f"{format_size(team.queue_bytes)}"
    )


def progress_table(progress: RunProgress) -> Table:
    """The progress of a run as a table."""
    run = progress.started
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    if run is None:
        table.add_row("[dim]starting ...[/]")
        return table
    steps_s, updates_s = progress.rates
    waits = (
        "[bold yellow]compiling ...[/]" if progress.is_compiling else f"{format_count(updates_s)}/s"
    )
    if progress.unit == "steps":
        table.add_row(
            "steps",
            f"{format_count(progress.steps)} of {format_count(run.steps)}",
            f"{format_count(steps_s)}/s",
        )
        table.add_row("updates", format_count(progress.updates), waits)
    else:
        table.add_row(
            "updates", f"{format_count(progress.steps)} of {format_count(run.steps)}", waits
        )
    goal = "" if run.until is None else f"goal {run.until:g}"
    best = "-" if progress.evaluation is None else format_return(progress.evaluation)
    table.add_row("return", f"[bold]{best}[/]", goal)
    if progress.train_return is not None:
        table.add_row("while training", f"{progress.train_return:.1f}", "[dim]last 100 episodes[/]")
    table.add_row("replay ratio", f"{progress.replay_ratio:.1f}", f"lag {progress.lag_versions}")
    if (team := progress.team) is not None:
        table.add_row("workers", _workers_text(team), f"{team.steps_s:.0f} steps/s arrive")
        table.add_row(
            "handling", f"{1000 * team.handling_s:.0f} ms", f"queue {format_size(team.queue_bytes)}"
        )
        table.add_row("learner load", f"{team.learner_load:.0%}", f"lag {team.lag_versions}")
    if (played := progress.worker_evaluation) is not None:
        mean = sum(played.returns) / len(played.returns)
        table.add_row("by a worker", f"{mean:.1f}", f"[dim]version {played.version}[/]")
    if guards := progress.guards.total():
        table.add_row(
            "[yellow]guarded[/]",
            count_of(guards, "time"),
            f"[dim]{_guarded_csv(progress)}[/]",
        )
    remaining = format_duration(progress.remaining_s)
    table.add_row("time left", remaining if run.until is None else f"{remaining} at most", "")
    return table
