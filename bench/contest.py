"""Runs contestants on the same work in turn, A B A B, and collects their results."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench import evaluator
from bench.contestants import Contestant, ContestantError, Process
from bench.figures import Gate
from bench.measures import OURS, TRAINING, WHOLE, Measure

QUICK_LOOKS = 2
_TRIAL_LOOKS = 3
Values = dict[str, dict[str, list[float]]]
"""Values by row name and contestant, one per round."""


@dataclass(slots=True)
class Outcome:
    """The results of a contest, as they are written to the result file."""

    values: Values = field(default_factory=dict)
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """For a measure that solves: each training run, by contestant."""
    order: list[str] = field(default_factory=list)
    """Contestants in the order in which they ran."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Contestants that could not run or were not selected, with the reason."""
    failed: list[str] = field(default_factory=list)
    """Failed checks of the work."""
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    threads: dict[str, int] = field(default_factory=dict)

    def add(self, row: str, name: str, value: float) -> None:
        self.values.setdefault(row, {}).setdefault(name, []).append(value)


def in_order(
    rounds: int, names: Sequence[str], work: Callable[[int, str], None], outcome: Outcome
) -> None:
    """Run every contestant once per round, in a fixed order; one that failed is skipped later."""
    for at in range(rounds):
        for name in names:
            if name not in outcome.skipped:
                outcome.order.append(name)
                try:
                    work(at, name)
                except ContestantError as error:
                    outcome.skipped[name] = str(error)


@contextlib.contextmanager
def on_cores(count: int) -> Iterator[list[int]]:
    """Pin this process and its children to the first `count` cores that it may use."""
    if not hasattr(os, "sched_setaffinity"):
        yield []
        return
    before = os.sched_getaffinity(0)
    chosen = sorted(before)[:count]
    os.sched_setaffinity(0, chosen)
    try:
        yield chosen
    finally:
        os.sched_setaffinity(0, before)


# --- Measures that solve --------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Run:
    """One training run, from the start of its process until it is solved or out of steps."""

    seed: int
    startup_s: float
    solved: bool = False
    steps: int = 0
    train_s: float = 0.0
    compile_s: float = 0.0
    held_out: float | None = None
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """Steps, seconds of training, mean return of 100 greedy episodes."""


def solve(
    contestant: Contestant, measure: str, seed: int, *, threads: int, max_looks: int | None = None
) -> tuple[Run, dict[str, str]]:
    """Train once; the process and its clock pause while its weights are evaluated here."""
    with Process(contestant, {"do": measure, "seed": seed}, threads=threads) as process:
        run = Run(seed=seed, startup_s=process.startup_s)
        line = process.ask()
        while line["says"] == "weights":
            first, second = evaluator.judge(evaluator.act_of(line))
            run.steps = line["steps"]
            run.train_s = line["train_s"]
            run.compile_s = line["compile_s"]
            run.held_out = second if second is not None else run.held_out
            run.curve.append((run.steps, round(run.train_s, 4), first))
            run.solved = second is not None and second >= evaluator.SOLVED
            is_last = run.solved or len(run.curve) == max_looks
            process.answer({"mean": first, "held_out": second, "stop": is_last})
            line = process.line()
        if not run.curve:
            raise ContestantError(f"ended after {line['steps']} steps and never sent its weights")
        return run, process.versions


def best_threads(contestant: Contestant, measure: str) -> int:
    """One or two threads, whichever trains this contestant faster."""
    speeds = {}
    for threads in (1, 2):
        run, _ = solve(contestant, measure, 0, threads=threads, max_looks=_TRIAL_LOOKS)
        speeds[threads] = run.steps / run.train_s
    return max(speeds, key=lambda threads: speeds[threads])


def solve_all(
    measure: Measure, contestants: Sequence[Contestant], *, seeds: int, quick: bool
) -> Outcome:
    """Train all contestants in turn on each seed; a quick run ends peers after two evaluations."""
    outcome = Outcome()
    by_name = {contestant.name: contestant for contestant in contestants}
    for contestant in contestants:
        outcome.threads[contestant.name] = contestant.threads
        if contestant.tries_threads and not quick:
            with _skipping(contestant.name, outcome):
                outcome.threads[contestant.name] = best_threads(contestant, measure.name)

    def work(seed: int, name: str) -> None:
        contestant = by_name[name]
        began_s = time.monotonic()
        looks = QUICK_LOOKS if quick and not contestant.is_ours else None
        run, versions = solve(
            contestant, measure.name, seed, threads=outcome.threads[name], max_looks=looks
        )
        outcome.versions[name] = versions
        outcome.runs.setdefault(name, []).append(asdict(run))
        # Unsolved within its steps: ours counts as infinite, a peer's as the time so far, which
        # favours the peer.
        train_s = run.train_s if run.solved or not contestant.is_ours else float("inf")
        outcome.add(TRAINING, name, train_s)
        outcome.add(WHOLE, name, train_s + run.compile_s + run.startup_s)
        print(
            f"  seed {seed:<3}{name:<26}{_summary(run):<44}{time.monotonic() - began_s:6.1f} s",
            flush=True,
        )

    in_order(seeds, list(by_name), work, outcome)
    return outcome


def _summary(run: Run) -> str:
    result = (
        f"solved in {run.train_s:.2f} s"
        if run.solved
        else f"{run.curve[-1][2]:.0f} after {run.train_s:.2f} s"
    )
    return f"{result}, {run.steps:,} steps"


def learning_gate(measure: str, outcome: Outcome) -> Gate:
    """Passes if our runs solved the game on at least nine of ten seeds."""
    if OURS in outcome.skipped:
        return Gate(False, f"{measure}: our training failed: {outcome.skipped[OURS]}")
    runs = outcome.runs.get(OURS, [])
    solved = sum(run["solved"] for run in runs)
    says = (
        f"{measure}: {solved} of {len(runs)} seeds: greedy mean of 100 held-out episodes >= "
        f"{evaluator.SOLVED:.0f}"
    )
    return Gate(bool(runs) and solved >= 0.9 * len(runs), says)


# --- Measures of a rate or a time -----------------------------------------------------------------


def compare_all(
    measure: Measure, contestants: Sequence[Contestant], *, rounds: int, quick: bool
) -> Outcome:
    """Start all contestants, then run one round of each in turn; the others sleep meanwhile."""
    outcome = Outcome(threads={contestant.name: contestant.threads for contestant in contestants})
    for part, request in measure.parts.items():
        full_request = {"do": measure.name} | request | (measure.quick if quick else {})
        with contextlib.ExitStack() as stack:
            processes: dict[str, Process] = {}
            for contestant in contestants:
                name = contestant.name
                if name in outcome.skipped:
                    continue  # it failed in an earlier part
                began_s = time.monotonic()
                with _skipping(name, outcome):
                    processes[name] = stack.enter_context(Process(contestant, full_request))
                    outcome.versions[name] = processes[name].versions
                state = (
                    f"not ready: {outcome.skipped[name]}" if name in outcome.skipped else "ready"
                )
                print(
                    f"  {part:<28}{name:<28}{time.monotonic() - began_s:6.1f} s  {state}",
                    flush=True,
                )
            answers: dict[str, dict[str, list[int]]] = {}

            def work(_: int, name: str) -> None:
                result = processes[name].ask()  # noqa: B023
                for row, value in result["values"].items():
                    outcome.add(f"{part}: {row}", name, value)  # noqa: B023
                answers[name] = result.get("answers", {})  # noqa: B023
                if not result.get("right", True):
                    outcome.failed.append(f"{part}: {name} returned wrong rows")  # noqa: B023

            in_order(rounds, list(processes), work, outcome)
            outcome.failed += disagreements(answers)
    return outcome


def disagreements(answers: Mapping[str, Mapping[str, Sequence[int]]]) -> list[str]:
    """Contestants that differ from the first one in more than one of 64 decisions."""
    names = list(answers)
    return [
        f"{name} and {names[0]} decide differently on {net}"
        for name in names[1:]
        for net, actions in answers[name].items()
        if sum(a != b for a, b in zip(actions, answers[names[0]].get(net, actions), strict=True))
        > 1
    ]


@contextlib.contextmanager
def _skipping(name: str, outcome: Outcome) -> Iterator[None]:
    try:
        yield
    except ContestantError as error:
        outcome.skipped[name] = str(error)
