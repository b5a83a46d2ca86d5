"""understudy tune: searches settings; show and resume a study."""

import difflib
import math
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from understudy.cli.interrupts import Interrupts
from understudy.cli.options import (
    PATH,
    ResultTable,
    console,
    count_of,
    examples,
    finish,
    format_count,
    import_from_here,
    json_option,
    live_view,
    results,
    setting_pairs,
)
from understudy.cli.training_view import format_duration
from understudy.core.errors import ConfigError, StorageFailed, StorageFull
from understudy.core.log import is_locked
from understudy.training.preset import BEST
from understudy.tuning.base_file import evaluate_base, train_base
from understudy.tuning.journal import Row
from understudy.tuning.result import (
    Finalist,
    StudyResult,
    compare_studies,
    estimate_fields,
    interval_text,
    load_study,
    ranked,
)
from understudy.tuning.study import (
    SlotEnded,
    StudyEvent,
    StudyStarted,
    TrialEnded,
    TrialStarted,
)
from understudy.tuning.tune import LOCK
from understudy.tuning.tune import tune as tune_study

_LINE_EVERY_S = 5.0
_BEST_SHOWN = 5
_FAILURES_SHOWN = 3
_BAR_COLUMNS = 40
_RECENT = 100
"""Trials whose mean time tells the time left."""


class _TuneGroup(click.Group):
    """`understudy tune FILE` is `understudy tune run FILE`; its help has the options of `run`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            is_name = not args[0].startswith("-") and not Path(args[0]).exists()
            near = difflib.get_close_matches(args[0], self.commands, n=1)
            if near and is_name:
                raise click.UsageError(
                    f"no such command or file '{args[0]}'; did you mean '{near[0]}'?"
                )
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        run = self.commands["run"]
        run.format_usage(ctx, formatter)
        run.format_help_text(ctx, formatter)
        run.format_options(ctx, formatter)
        self.format_commands(ctx, formatter)
        run.format_epilog(ctx, formatter)


@click.group(cls=_TuneGroup)
def tune() -> None:
    """Search settings."""


def _slots_option(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option(
            "--address",
            "--master",
            "address",
            metavar="HOST:PORT",
            help="Of the cluster. With --engine ray: its head, or `auto`; with spark: its master, "
            "such as spark://HOST:7077 (default: one on this machine that ends with the study).",
        ),
        click.option(
            "--engine",
            metavar="NAME",
            help="What runs the slots: `local` processes, `ray` or `spark`; no result depends on "
            "it (default: the study's).",
        ),
        click.option(
            "--oversubscribe",
            is_flag=True,
            help="Allow more processes than this machine has cores.",
        ),
        click.option(
            "--trials", type=int, metavar="N", help="Trials of the study (default: the file's)."
        ),
        click.option(
            "--slots",
            type=int,
            metavar="N",
            help="Trials that run at once; no result depends on it (default: the file's).",
        ),
    ):
        command = option(command)
    return command


@tune.command(
    hidden=True,
    epilog=examples(
        "understudy tune study.toml",
        "understudy tune config/optim_dqn.json --parallelized --plevel 1",
        "understudy tune --optim-config config/optim_dqn.json",
        "understudy tune study.toml --search tpe --stop asha --slots 2 --trials 100 --out S",
        "understudy tune study.toml --set lag=4 --set trial_timeout_s=600",
        "understudy tune study.toml --set max_seconds=3600",
        "understudy tune study.toml --slots 2 --engine ray",
        "understudy tune study.toml --slots 8 --engine spark --address spark://HOST:7077",
        "understudy tune show S",
        "understudy tune resume S",
        "understudy tune resume S --trials 200",
        "understudy tune compare S T",
        "understudy train CartPole-v1 --preset S",
    ),
)
@click.argument("file", type=PATH, required=False)
@click.option(
    "--optim-config", type=PATH, metavar="FILE", help="The study's file, as RLiable names it."
)
@click.option(
    "--parallelized", is_flag=True, help="Run RLiable's num_workers in parallel, at level 1."
)
@click.option(
    "--plevel",
    type=click.IntRange(1, 2),
    metavar="1|2",
    help="What runs in parallel: trials (1), or the rollouts of each trial (2).",
)
@_slots_option
@click.option("--seed", type=int, help="Random seed of the search and of all trials (default 0).")
@click.option("--out", type=PATH, metavar="DIR", help="The study's folder (default: the file's).")
@click.option(
    "--search",
    metavar="NAME",
    help="random, grid or sobol; tpe, gp or cma with Optuna (default: the file's).",
)
@click.option("--stop", metavar="NAME", help="Which trials end early: none, asha or median.")
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="NAME=VALUE",
    help="Change one setting of the study, such as lag=4; repeatable.",
)
@click.option(
    "--legacy-convergence",
    is_flag=True,
    help="End the study as RLiable does: when two consecutive trials are alike.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Resume the study in --out, or the file's last one; start it if there is none.",
)
@json_option
def run(
    file: Path | None,
    optim_config: Path | None,
    parallelized: bool,
    plevel: int | None,
    search: str | None,
    stop: str | None,
    sets: Sequence[str],
    legacy_convergence: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Search the settings of a training for the best ones, as FILE describes them.

    FILE is TOML, or the grid file of RLiable (JSON). The study's folder has a journal of all
    trials: a study can be killed at any moment and resumed. The same seed and lag give the same
    trials on any number of slots.
    """
    if file is not None and optim_config is not None:
        raise ConfigError("the study is given twice, as FILE and by --optim-config; give it once")
    named = {"method": search, "rule": stop, "is_legacy": True if legacy_convergence else None}
    named |= {name: options.pop(name) for name in ("engine", "address")}
    settings = setting_pairs(sets)
    for name, value in named.items():
        if value is None:
            continue
        if name in settings:
            raise ConfigError(
                f"{name} is set twice: by its own flag and by --set; omit one of them"
            )
        settings[name] = value
    study = file or optim_config
    if study is None and not options["resume"]:
        raise ConfigError(
            "no study was given; give its file: understudy tune study.toml (see --help)"
        )
    level = plevel or (1 if parallelized else 0)
    return _run(study, as_json=as_json, level=level, settings=settings, **options)


@tune.command(
    epilog=examples(
        "understudy tune resume S",
        "understudy tune resume S --trials 200",
        "understudy tune resume S --engine ray --address auto --slots 8",
    )
)
@click.argument("folder", type=PATH)
@_slots_option
@json_option
def resume(
    folder: Path, engine: str | None, address: str | None, as_json: bool, **options: Any
) -> int:
    """Resume the study in FOLDER, or extend it with more --trials."""
    place = {"engine": engine, "address": address}
    settings = {name: value for name, value in place.items() if value is not None}
    return _run(None, as_json=as_json, settings=settings, out=folder, resume=True, **options)


@tune.command(
    epilog=examples(
        "understudy tune show S",
        "understudy tune show S --html report.html",
        "understudy tune show S --png pictures",
        "understudy tune show S --json",
    )
)
@click.argument("folder", type=PATH)
@click.option(
    "--html", type=PATH, metavar="FILE", help="Write charts and trials as one page for a browser."
)
@click.option("--png", type=PATH, metavar="DIR", help="Write each chart as a PNG file into DIR.")
@json_option
def show(folder: Path, html: Path | None, png: Path | None, as_json: bool) -> int:
    """Show the trials of the study in FOLDER, also while it runs; draw its charts."""
    result = load_study(folder)
    out = results(as_json=as_json)
    _print(out, result)
    fields = result.to_json()
    if html is not None or png is not None:
        from understudy.tuning.report import write_report  # imported late: few need it

        written = [str(path) for path in write_report(result, html=html, png=png)]
        for path in written:
            out.print(f"wrote   {escape(path)}", soft_wrap=True)
        if not written:
            out.print("no charts: no trial has ended yet; try again later")
        fields["written"] = written
    return finish(fields, as_json=as_json)


@tune.command(
    epilog=examples(
        "understudy tune export S --csv trials.csv",
        "understudy tune export S --optuna trials.log",
        "understudy tune export S --optuna sqlite:///trials.db --name first",
        "optuna-dashboard trials.log",
    )
)
@click.argument("folder", type=PATH)
@click.option(
    "--optuna",
    "target",
    metavar="URL|FILE",
    help="A storage of Optuna: the URL of a database, an SQLite file (.db), or a journal file.",
)
@click.option(
    "--name", default="", metavar="NAME", help="Of the study in that storage (default: its own)."
)
@click.option("--csv", type=PATH, metavar="FILE", help="A table with one line per trial.")
@json_option
def export(folder: Path, target: str | None, name: str, csv: Path | None, as_json: bool) -> int:
    """Write the trials of the study in FOLDER for Optuna and its dashboard, or as a table.

    For thousands of trials, give a journal file: it is written many times as fast as SQLite, and
    the dashboard opens both. Optuna numbers the trials that have ended from 0; the attribute
    trial_no is the study's own number.
    """
    if target is None and csv is None:
        raise ConfigError("nothing to export was requested; give --csv FILE or --optuna FILE")
    result = load_study(folder)
    from understudy.tuning.export import export_csv, export_optuna

    out = results(as_json=as_json)
    fields: dict[str, Any] = {"trials": len(result.trials)}
    count = count_of(len(result.trials), "trial")
    if csv is not None:
        export_csv(result, csv)
        out.print(f"wrote {count} to {escape(str(csv))}", soft_wrap=True)
        fields["csv"] = str(csv)
    if target is not None:
        address = export_optuna(result, target, name=name)
        dashboard = escape(f"optuna-dashboard {shlex.quote(address)}")
        out.print(
            f"wrote {count} to {escape(target)}\nopen it with: {dashboard} (pip install "
            "optuna-dashboard)",
            soft_wrap=True,
        )
        fields["optuna"] = address
    return finish(fields, as_json=as_json)


@tune.command(epilog=examples("understudy tune compare S T", "understudy tune compare S T --json"))
@click.argument("folder", type=PATH)
@click.argument("other", type=PATH)
@json_option
def compare(folder: Path, other: Path, as_json: bool) -> int:
    """Compare the best trials of two studies, FOLDER and OTHER, on their held-out seeds.

    Shows how likely a training with the settings of FOLDER is better than one with those of OTHER.
    """
    names = [str(folder), str(other)]
    studies = [load_study(path) for path in (folder, other)]
    chance = compare_studies(*studies)
    finalists = [study.tested for study in studies]
    out = results(as_json=as_json)
    out.print(_held_out_table(finalists, names))
    out.print(
        f"a training of {escape(names[0])} is better than one of {escape(names[1])} with "
        f"probability {interval_text(chance)}",
        soft_wrap=True,
    )
    fields = {
        "probability": estimate_fields(chance),
        "studies": [study.to_json() for study in studies],
    }
    return finish(fields, as_json=as_json)


@tune.command(
    "train",
    epilog=examples(
        "understudy tune train config/config_dqn.json",
        "understudy tune train config/config_count.json --seed 3",
    ),
)
@click.argument("file", type=PATH)
@click.option("--seed", type=int, default=0, help="Random seed (default 0).")
@json_option
def train_once(file: Path, seed: int, as_json: bool) -> int:
    """Train once what RLiable's base file FILE describes, and save it at its mdl_file."""
    import_from_here()
    return _print_metrics(train_base(file, seed=seed), as_json=as_json)


@tune.command(
    "evaluate",
    epilog=examples(
        "understudy tune evaluate config/config_dqn.json",
        "understudy tune evaluate config/config_count.json --environment other.jsonl",
    ),
)
@click.argument("file", type=PATH)
@click.option(
    "--environment", metavar="ENV", help="Another env, or file of rows (default: the file's)."
)
@click.option("--seed", type=int, default=0, help="Random seed of a class of your own (default 0).")
@json_option
def evaluate_once(file: Path, environment: str | None, seed: int, as_json: bool) -> int:
    """Evaluate what `tune train` saved."""
    import_from_here()
    return _print_metrics(evaluate_base(file, environment=environment, seed=seed), as_json=as_json)


def _print_metrics(metrics: Mapping[str, float], *, as_json: bool) -> int:
    out = results(as_json=as_json)
    for name, value in metrics.items():
        out.print(f"{escape(name)}  {value:.6g}")
    return finish(metrics, as_json=as_json)


def _run(study: Path | None, *, as_json: bool, **options: Any) -> int:
    import_from_here()
    out = console(as_json=as_json)
    progress = StudyProgress()
    try:
        with (
            Interrupts() as interrupts,
            live_view(
                out,
                draw=_progress_bar,
                line=_progress_line,
                every_s=_LINE_EVERY_S,
                has_room=out.is_terminal,
            ) as view,
        ):

            def on_event(event: StudyEvent) -> None:
                progress.handle_event(event)
                if text := _message(event, progress.states["failed"]):
                    out.print(text, soft_wrap=True)
                if isinstance(event, TrialStarted | TrialEnded):
                    view(progress)
                interrupts.check()

            result = tune_study(study, on_event=on_event, **options)
    except (KeyboardInterrupt, StorageFull, StorageFailed, OSError):
        if (started := progress.started) is not None:
            command = f"understudy tune resume {shlex.quote(started.folder)}"
            message = f"stopped after {count_of(progress.n_ended, 'trial')}; resume with: {command}"
            print(message, file=sys.stderr)
            fields = {"stopped": True, "folder": started.folder, "trials": progress.n_ended}
            finish({**fields, "next": command}, as_json=as_json)
        raise
    _print(results(as_json=as_json), result)
    has_no_best = bool(result.ended) and result.best is None
    return finish(result.to_json(), as_json=as_json, code=1 if has_no_best else 0)


# --- The view of a running study ------------------------------------------------------------------


@dataclass(slots=True)
class StudyProgress:
    """The progress of a study, from its events."""

    now: Callable[[], float] = time.monotonic
    started: StudyStarted | None = None
    n_ended: int = 0
    best: Row | None = None
    states: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("stopped", "failed"), 0))
    _started_s: float = 0.0
    _running: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Each trial's slot, and when it began."""
    _warm_since_s: dict[int, float] = field(default_factory=dict)
    """When the first trial of a slot ended, which includes imports and compilation."""
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Durations of the last trials, without the first of each slot."""
    _most_running: int = 0
    """The most trials that ran at once."""

    def handle_event(self, event: StudyEvent) -> None:
        match event:
            case StudyStarted():
                self.started = event
                self._started_s = self.now()
                self.n_ended = 0
                self._most_running = 0
                self._running.clear()
                self._warm_since_s.clear()
                self._seconds.clear()
                self.states = dict.fromkeys(self.states, 0)
                self.best = event.best
                for row in event.rows:
                    self._count(row)
            case TrialStarted():
                self._running[event.trial.trial_no] = (event.slot, self.now())
                self._most_running = max(self._most_running, len(self._running))
            case SlotEnded():
                self._warm_since_s.pop(event.slot, None)
                self._running = {
                    trial_no: place
                    for trial_no, place in self._running.items()
                    if place[0] != event.slot
                }
            case TrialEnded():
                slot, start_s = self._running.pop(event.row.trial.trial_no, (-1, 0.0))
                if start_s >= self._warm_since_s.setdefault(slot, self.now()):
                    self._seconds.append(self.now() - start_s)
                self._count(event.row)
                if event.is_best:
                    self.best = event.row

    def _count(self, row: Row) -> None:
        self.n_ended += 1
        if row.result.state in self.states:
            self.states[row.result.state] += 1

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the last trial at the rate so far, or until the study's time is over.

        None before a trial has ended that was not the first of its slot.
        """
        if self.started is None or not self._seconds:
            return None
        mean_s = sum(self._seconds) / len(self._seconds)
        n_left = self.started.max_trials - self.n_ended
        spent_s = sum(min(mean_s, self.now() - start_s) for _, start_s in self._running.values())
        at_rate_s = (n_left * mean_s - spent_s) / max(1, min(self._most_running, n_left))
        passed_s = self.now() - self._started_s
        return max(0.0, min(at_rate_s, self.started.limit_s - passed_s))

    @property
    def best_text(self) -> str:
        """The incumbent: the best trial so far."""
        if self.started is not None and self.started.is_test:
            return "the best trials again, on held-out seeds"
        if self.started is None or self.best is None:
            return "no best trial yet"
        name = self.started.metric.name
        value = self.best.result.metrics[name]
        return f"best {name} {value:.4g} (trial {self.best.trial.trial_no})"

    @property
    def counts_text(self) -> str:
        total = "?" if self.started is None else format_count(self.started.max_trials)
        parts = [f"{format_count(self.n_ended)} of {total} trials"]
        parts += [f"{count} {state}" for state, count in self.states.items() if count]
        return ", ".join(parts)


def _progress_bar(progress: StudyProgress) -> RenderableType:
    total = 1 if progress.started is None else progress.started.max_trials
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row(
        ProgressBar(total, progress.n_ended, width=_BAR_COLUMNS),
        progress.counts_text,
        "" if progress.remaining_s is None else f"{format_duration(progress.remaining_s)} left",
    )
    table.add_row(escape(progress.best_text))
    return table


def _progress_line(progress: StudyProgress) -> str:
    parts = [progress.counts_text, escape(progress.best_text)]
    if progress.remaining_s is not None:
        parts.append(f"{format_duration(progress.remaining_s)} left")
    return "; ".join(parts)


def _message(event: StudyEvent, n_failed: int) -> str:
    match event:
        case StudyStarted():
            slots = count_of(event.slots, "slot")
            if math.isfinite(event.limit_s):
                slots += f" in at most {event.limit_s:.0f} s"
            resumed = f", resumed after {count_of(len(event.rows), 'trial')}" if event.rows else ""
            study = (
                f"{escape(event.name)}: {count_of(event.max_trials, 'trial')} on "
                f"{slots}, {event.metric.criteria} {event.metric.name}: "
                f"study {escape(event.folder)}{resumed}"
            )
            return "\n".join([study, *(f"[yellow]note[/] {escape(note)}" for note in event.notes)])
        case SlotEnded():
            return (
                f"[yellow]slot {event.slot} ended[/]: {escape(event.why)}; its trials without a "
                "result restart"
            )
        case TrialEnded() if event.row.result.state == "failed" and n_failed <= _FAILURES_SHOWN:
            error = escape(event.row.result.error)
            more = "; more are only counted" if n_failed == _FAILURES_SHOWN else ""
            return f"[yellow]trial {event.row.trial.trial_no} failed[/]: {error}{more}"
        case _:
            return ""


# --- The result -----------------------------------------------------------------------------------


def _print(out: Console, result: StudyResult) -> None:
    name = result.config.metric.name
    best = ranked(result.config, result.trials)[:_BEST_SHOWN]
    settings = list(result.config.space.dimensions)
    if best:
        best_table = ResultTable("trial", name, *settings)
        for row in best:
            best_table.add_row(
                str(row.trial.trial_no),
                f"{row.result.metrics[name]:.4g}",
                *(_value_text(row.trial.values, setting) for setting in settings),
            )
        out.print(best_table)
    is_running = is_locked(result.folder / LOCK)
    lines = [_status(result, len(best), is_running=is_running)]
    lines += [f"[yellow]note[/] {warning}" for warning in result.warnings]
    if why := result.why_no_best:
        lines.append(why)
    if result.test is not None:
        out.print(_held_out_table(result.test.finalists))
        lines[:0] = map(escape, result.test.summary)
    elif result.ended and not result.is_finished and not is_running:
        lines.append("the best trials were not yet trained on all held-out seeds")
    lines.append(f"study   {escape(str(result.folder))}")
    if not result.is_finished and not is_running:
        lines.append(f"next: understudy tune resume {escape(shlex.quote(str(result.folder)))}")
    elif result.is_finished and (result.folder / BEST).exists():
        game = shlex.quote(str(result.config.trainable.config["game"]))
        folder = shlex.quote(str(result.folder))
        if result.best is not None:
            lines.append(f"{BEST} has the settings of trial {result.best.trial.trial_no}")
        lines.append(f"next: understudy train {escape(game)} --preset {escape(folder)}")
    out.print("\n".join(lines), soft_wrap=True)


def _status(result: StudyResult, n_shown: int, *, is_running: bool) -> str:
    """How many trials have ended and how, in one line."""
    states = [row.result.state for row in result.trials]
    parts = [count_of(len(states), "trial")]
    if not result.ended:
        parts[0] = f"{len(states)} of {count_of(result.max_trials, 'trial')}"
    parts += [
        f"{states.count(state)} {state}" for state in ("stopped", "failed") if state in states
    ]
    line = f"{', '.join(parts)}; {escape(result.ended)}"
    if not result.ended:
        line += "running" if is_running else "not finished"
    return f"{line}; the table has the best {n_shown}" if 0 < n_shown < len(states) else line


def _held_out_table(finalists: Sequence[Finalist], names: Sequence[str] = ()) -> ResultTable:
    """The finalists, under the numbers of their trials or other names."""
    table = ResultTable("study" if names else "trial", "in the search", "held-out seeds", "seeds")
    for index, finalist in enumerate(finalists):
        seeds = str(len(finalist.scores))
        if finalist.n_failed:
            seeds += f", {finalist.n_failed} failed"
        table.add_row(
            names[index] if names else str(finalist.trial.trial_no),
            f"{finalist.tuned:.4g}",
            "none" if finalist.estimate is None else interval_text(finalist.estimate),
            seeds,
        )
    return table


def _value_text(values: Mapping[str, Any], name: str) -> str:
    value = values[name]
    return f"{value:.4g}" if isinstance(value, float) else str(value)
