"""Measures tuning: how good the winner of a search of fixed time is (experiment E2), beside peers.

    python bench/tune_quality.py            about an hour on two cores; writes
                                            bench/results/tune-quality.json
    python bench/tune_quality.py --quick    20 s and 2 studies; writes nothing unless --out is given
    --at-once N                             N studies at once, each on two cores of its own

E2: the game, algorithm and space of E1 (bench/tune.py), 10 studies of 60 s with each system. The
60 s begin before the study's first process starts, and include imports and compilations, with an
empty compilation cache; only trials that finished within them count. The winner is the trial with
the best final test. Its settings are trained again, by the same system, with 10 seeds that no
search uses, and each of these policies plays 100 episodes of at most 200 steps: the mean of all is
the study's score.

A system is compared with another by the probability that one of its studies is better. A study is
better by its score; if both scores are within 1 of the cap of 200, then by the time to reach it:
the seconds until the first trial with a final test of at least 195.

Peers run in environments of their own, or with UNDERSTUDY_PEERS=here in this interpreter; those
whose packages are missing are named and left out.
"""

import argparse
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Run as a file, sys.path starts with bench/; replace it with the folder that contains bench/.
    sys.path[0] = str(ROOT)

import numpy as np  # noqa: E402

from bench.contestants import Contestant, ContestantError, Process, python_of  # noqa: E402
from bench.figures import Figure, Findings, Gate, Ratio, all_of  # noqa: E402
from bench.one_pass import run_once  # noqa: E402
from bench.tune import BATCHES, CORES, HIDDEN, LIMITED, XLA_FLAGS  # noqa: E402
from understudy.arena.statistics import compare  # noqa: E402

OURS = "understudy"
REACHED = 195.0
"""The final test of a trial that reached the cap."""
NEAR = 1.0
"""A score within this of the cap is at the cap."""
GOAL = 0.9
LOW_GOAL = 0.5
"""Of the lower bound of the probability of improvement."""
OF_OURS = Contestant(name=OURS, module="bench.our_tuner")
PEERS = {
    "Optuna and SB3, TPE": {"do": "optuna", "sampler": "tpe"},
    "Ray Tune and SB3": {"do": "ray"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a run is."""

    name: str
    seconds: float
    studies: int
    trials: int = 10_000
    """Of each search, at most."""
    seeds: int = 10
    """With which a winner is trained again."""
    episodes: int = 100
    """Of each of these policies."""
    iterations: int = 4_000
    hidden: Sequence[int] = HIDDEN
    batches: Sequence[int] = BATCHES
    has_peers: bool = True


SIZES = {
    size.name: size
    for size in (
        Size(name="full", seconds=60.0, studies=10),
        Size(name="quick", seconds=20.0, studies=2),
        Size(
            name="tiny",
            seconds=600.0,  # its trial ends earlier
            studies=1,
            trials=1,
            seeds=1,
            episodes=5,
            iterations=64,
            hidden=(20,),
            batches=(32,),
            has_peers=False,
        ),
    )
}


def main() -> int:
    """Run all studies; 0 if every gate passed."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--at-once", type=int, default=1)
    options, others = parser.parse_known_args()
    os.environ["XLA_FLAGS"] = XLA_FLAGS
    return run_once(
        "tune-quality",
        about=__doc__,
        sizes=SIZES,
        parts={"E2": partial(e2, pairs=core_pairs(options.at_once))},
        arguments=others,
    )


def core_pairs(at_once: int) -> list[list[int]]:
    """The cores of each study; empty lists on systems that cannot bind a process to cores."""
    if not hasattr(os, "sched_getaffinity"):
        return [[] for _ in range(at_once)]
    cores = sorted(os.sched_getaffinity(0))
    if not 1 <= at_once <= max(1, len(cores) // CORES):
        limit = max(1, len(cores) // CORES)
        sys.exit(f"--at-once is {at_once}, and there are {len(cores)} cores; give 1 to {limit}")
    return [cores[CORES * number : CORES * (number + 1)] for number in range(at_once)]


# --- Studies --------------------------------------------------------------------------------------


class StudyOutcome(NamedTuple):
    """The outcome of one study of a system."""

    score: float
    """The mean return of the winner's policies; 0 without a winner."""
    reached_s: float
    """When the first trial was at the cap; the whole time if none was."""
    n_trials: int
    n_winner_seeds: int
    versions: str


def e2(folder: Path, size: Size, findings: Findings, *, pairs: Sequence[Sequence[int]]) -> None:
    """Studies of all systems in turn, as many at once as there are pairs of cores."""
    systems = {OURS: {"do": "ours"}, **(PEERS if size.has_peers else {})}
    jobs = [(name, number) for number in range(size.studies) for name in systems]
    skipped: dict[str, str] = {}
    free: queue.SimpleQueue[Sequence[int]] = queue.SimpleQueue()
    for pair in pairs:
        free.put(pair)

    def bind() -> None:
        """Bind this thread, and so the processes that it starts, to its cores."""
        if pair := free.get():
            os.sched_setaffinity(threading.get_native_id(), pair)

    def measured(job: tuple[str, int]) -> StudyOutcome | None:
        name, number = job
        if name in skipped:
            return None
        try:
            study = study_of(name, systems[name], size=size, number=number)
        except ContestantError as error:
            if name == OURS:
                raise
            skipped[name] = str(error)
            return None
        print(
            f"{name}: study {number + 1} of {size.studies}: score {study.score:.1f}, at the cap "
            f"after {study.reached_s:.1f} s, {study.n_trials} trials",
            flush=True,
        )
        return study

    for name in systems:
        prepare(name, skipped)
    with ThreadPoolExecutor(len(pairs), initializer=bind) as pool:
        studies = list(pool.map(measured, jobs))
    findings.skipped += [f"{name}: {why}" for name, why in skipped.items()]
    findings.notes.append(f"studies at once: {len(pairs)}")
    by_system: dict[str, list[StudyOutcome]] = {name: [] for name in systems if name not in skipped}
    for (name, _), study in zip(jobs, studies, strict=True):
        if name in by_system and study is not None:
            by_system[name].append(study)
    report(by_system, size, findings)


def contestant(name: str) -> Contestant:
    if name == OURS:
        return OF_OURS
    return Contestant(name=name, module="bench.against.tuners", environment="tuners")


def prepare(name: str, skipped: dict[str, str]) -> None:
    """Install a system's environment before the first clock starts."""
    try:
        python_of(contestant(name).environment)
    except ContestantError as error:
        skipped[name] = str(error)


def study_of(name: str, do: Mapping[str, str], *, size: Size, number: int) -> StudyOutcome:
    """One study: the search, then the trainings of its winner."""
    request = {
        **do,
        "seed": number,
        "began_s": time.time(),
        "seconds": size.seconds,
        "trials": size.trials,
        "seeds": size.seeds,
        "episodes": size.episodes,
        "iterations": size.iterations,
        "hidden": list(size.hidden),
        "batches": list(size.batches),
    }
    with Process(contestant(name), request) as process:
        answer = process.ask()
        versions = ", ".join(f"{key} {value}" for key, value in process.versions.items())
    ended = [(at_s, value) for at_s, value in answer["ended"] if at_s <= size.seconds]
    reached = [at_s for at_s, value in ended if value >= REACHED]
    scores = answer["scores"]
    return StudyOutcome(
        score=float(np.mean(scores)) if scores else 0.0,
        reached_s=min(reached, default=size.seconds),
        n_trials=len(ended),
        n_winner_seeds=len(scores),
        versions=versions,
    )


# --- The comparison -------------------------------------------------------------------------------


def merit(study: StudyOutcome, seconds: float) -> float:
    """The score; at the cap, more than any score below, and the more the earlier it was reached."""
    if study.score < LIMITED - NEAR:
        return study.score
    return LIMITED + 1.0 - study.reached_s / seconds


def report(by_system: Mapping[str, Sequence[StudyOutcome]], size: Size, findings: Findings) -> None:
    """The figures of each system, and how ours compares with the others."""
    ours = by_system[OURS]
    our_gate = gate_of(OURS, ours, size)
    for name, studies in by_system.items():
        gate = gate_of(name, studies, size)
        for what, unit, values, more_is_better in (
            ("held-out return of the winner", "", [study.score for study in studies], True),
            ("time to reach the cap", "s", [study.reached_s for study in studies], False),
            ("trials in time", "", [float(study.n_trials) for study in studies], True),
        ):
            findings.figures.append(
                Figure(
                    name=f"E2: {name}: {what}",
                    unit=unit,
                    values=values,
                    gate=gate,
                    more_is_better=more_is_better,
                )
            )
        findings.notes.append(f"{name}: {studies[0].versions}")
        if name == OURS:
            continue
        gate = all_passed(our_gate, gate)
        findings.figures += improvement(ours, studies, peer=name, size=size, gate=gate)
        findings.ratios.append(
            Ratio(
                name="E2: time to reach the cap",
                peer=name,
                unit="s",
                ours=[study.reached_s for study in ours],
                theirs=[study.reached_s for study in studies],
                gate=gate,
                more_is_better=False,
            )
        )


def improvement(
    ours: Sequence[StudyOutcome],
    theirs: Sequence[StudyOutcome],
    *,
    peer: str,
    size: Size,
    gate: Gate,
) -> list[Figure]:
    """The probability that a study of ours is better, and its interval, if there are enough."""
    our_merits = [merit(study, size.seconds) for study in ours]
    their_merits = [merit(study, size.seconds) for study in theirs]
    estimate = compare(our_merits, their_merits, np.random.default_rng(0))
    goal = {"better": GOAL, "lower bound": LOW_GOAL, "upper bound": None}
    values = {
        "better": estimate.value,
        "lower bound": estimate.low,
        "upper bound": estimate.high,
    }
    return [
        Figure(
            name=f"E2: probability of improvement over {peer}"
            + ("" if what == "better" else f", {what}"),
            unit="",
            values=[value],
            gate=gate,
            goal=goal[what] if size.name == "full" else None,
        )
        for what, value in values.items()
        if value is not None
    ]


def gate_of(name: str, studies: Sequence[StudyOutcome], size: Size) -> Gate:
    are_whole = all(study.n_winner_seeds == size.seeds for study in studies)
    return all_of(
        (f"{name}: {size.studies} studies", len(studies) == size.studies),
        (f"{name}: each has a winner, trained again with {size.seeds} seeds", are_whole),
    )


def all_passed(*gates: Gate) -> Gate:
    return Gate(all(gate.passed for gate in gates), "; ".join(gate.says for gate in gates))


if __name__ == "__main__":
    sys.exit(main())
