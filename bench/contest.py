"""Lets contestants do the same work in turn, A B A B, and keeps what each of them found."""

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
"""Row name, contestant, one value a round."""


@dataclass(slots=True)
class Found:
    """What a contest found, as it goes into the result file."""

    values: Values = field(default_factory=dict)
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Of a measure that solves: each training, by contestant."""
    order: list[str] = field(default_factory=list)
    """Who ran, one after the other."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Who could not run or was not asked to, and why."""
    failed: list[str] = field(default_factory=list)
    """Checks of the work that did not hold."""
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    threads: dict[str, int] = field(default_factory=dict)

    def add(self, row: str, who: str, value: float) -> None:
        self.values.setdefault(row, {}).setdefault(who, []).append(value)


def in_order(
    rounds: int, names: Sequence[str], work: Callable[[int, str], None], found: Found
) -> None:
    """A B A B: everybody once a round, always in the same order; who fails is left out from then
    on."""
    for at in range(rounds):
        for name in names:
            if name not in found.skipped:
                found.order.append(name)
                try:
                    work(at, name)
                except ContestantError as error:
                    found.skipped[name] = str(error)


@contextlib.contextmanager
def on_cores(count: int) -> Iterator[list[int]]:
    """This process, and all it starts, on the first `count` cores that it may use."""
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
    """One training, from the start of its process to the look that found it good enough or the
    end of its steps."""

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
    who: Contestant, measure: str, seed: int, *, threads: int, max_looks: int | None = None
) -> tuple[Run, dict[str, str]]:
    """Train once; the process waits, and its clock stands, while its weights are evaluated here."""
    with Process(who, {"do": measure, "seed": seed}, threads=threads) as process:
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
            raise ContestantError(f"ended after {line['steps']} steps and never showed its weights")
        return run, process.versions


def best_threads(who: Contestant, measure: str) -> int:
    """One or two threads, whichever trains faster; peers are not to be throttled by our choice."""
    speeds = {}
    for threads in (1, 2):
        run, _ = solve(who, measure, 0, threads=threads, max_looks=_TRIAL_LOOKS)
        speeds[threads] = run.steps / run.train_s
    return max(speeds, key=lambda threads: speeds[threads])


def solve_all(
    measure: Measure, contestants: Sequence[Contestant], *, seeds: int, quick: bool
) -> Found:
    """Each seed by everybody in turn; a quick look ends the peers' trainings after two
    evaluations."""
    found = Found()
    known = {who.name: who for who in contestants}
    for who in contestants:
        found.threads[who.name] = who.threads
        if who.tries_threads and not quick:
            with _skipping(who.name, found):
                found.threads[who.name] = best_threads(who, measure.name)

    def work(seed: int, name: str) -> None:
        who = known[name]
        began_s = time.monotonic()
        looks = QUICK_LOOKS if quick and not who.is_ours else None
        run, versions = solve(who, measure.name, seed, threads=found.threads[name], max_looks=looks)
        found.versions[name] = versions
        found.runs.setdefault(name, []).append(asdict(run))
        # Unsolved within its steps: ours never ends, a peer is taken to end there, which favours
        # the peer.
        train_s = run.train_s if run.solved or not who.is_ours else float("inf")
        found.add(TRAINING, name, train_s)
        found.add(WHOLE, name, train_s + run.compile_s + run.startup_s)
        print(
            f"  seed {seed:<3}{name:<26}{_outcome(run):<44}{time.monotonic() - began_s:6.1f} s",
            flush=True,
        )

    in_order(seeds, list(known), work, found)
    return found


def _outcome(run: Run) -> str:
    seen = (
        f"solved in {run.train_s:.2f} s"
        if run.solved
        else f"{run.curve[-1][2]:.0f} after {run.train_s:.2f} s"
    )
    return f"{seen}, {run.steps:,} steps"


def learning_gate(measure: str, found: Found) -> Gate:
    """Passes when our trainings solved the game on at least nine of ten seeds."""
    if OURS in found.skipped:
        return Gate(False, f"{measure}: our training failed: {found.skipped[OURS]}")
    runs = found.runs.get(OURS, [])
    solved = sum(run["solved"] for run in runs)
    says = (
        f"{measure}: {solved} of {len(runs)} seeds: greedy mean of 100 held-out episodes >= "
        f"{evaluator.SOLVED:.0f}"
    )
    return Gate(bool(runs) and solved >= 0.9 * len(runs), says)


# --- Measures of a rate or a time -----------------------------------------------------------------


def compare_all(
    measure: Measure, contestants: Sequence[Contestant], *, rounds: int, quick: bool
) -> Found:
    """Everybody gets ready, then one round each in turn; those who wait are asleep."""
    found = Found(threads={who.name: who.threads for who in contestants})
    for part, request in measure.parts.items():
        asked = {"do": measure.name} | request | (measure.quick if quick else {})
        with contextlib.ExitStack() as stack:
            processes: dict[str, Process] = {}
            for who in contestants:
                if who.name in found.skipped:
                    continue  # it failed in a part before
                began_s = time.monotonic()
                with _skipping(who.name, found):
                    processes[who.name] = stack.enter_context(Process(who, asked))
                    found.versions[who.name] = processes[who.name].versions
                said = (
                    f"not ready: {found.skipped[who.name]}"
                    if who.name in found.skipped
                    else "ready"
                )
                print(
                    f"  {part:<28}{who.name:<28}{time.monotonic() - began_s:6.1f} s  {said}",
                    flush=True,
                )
            answers: dict[str, dict[str, list[int]]] = {}

            def work(_: int, name: str) -> None:
                told = processes[name].ask()  # noqa: B023
                for row, value in told["values"].items():
                    found.add(f"{part}: {row}", name, value)  # noqa: B023
                answers[name] = told.get("answers", {})  # noqa: B023
                if not told.get("right", True):
                    found.failed.append(f"{part}: {name} gave wrong rows")  # noqa: B023

            in_order(rounds, list(processes), work, found)
            found.failed += disagreements(answers)
    return found


def disagreements(answers: Mapping[str, Mapping[str, Sequence[int]]]) -> list[str]:
    """Contestants that decide otherwise than the first one, on more than one question of 64."""
    names = list(answers)
    return [
        f"{name} and {names[0]} decide differently on {net}"
        for name in names[1:]
        for net, given in answers[name].items()
        if sum(a != b for a, b in zip(given, answers[names[0]].get(net, given), strict=True)) > 1
    ]


@contextlib.contextmanager
def _skipping(name: str, found: Found) -> Iterator[None]:
    try:
        yield
    except ContestantError as error:
        found.skipped[name] = str(error)
