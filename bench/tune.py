"""Measures tuning: trials per hour of lanes on two cores, on experiment E1.

    python bench/tune.py            about ten minutes on two cores; writes bench/results/tune.json
    python bench/tune.py --quick    fewer trials; writes nothing unless --out is given

E1: CartPole with a limit of 200 steps; DQN with one hidden layer, the squared error, Adam, a replay
of 4,096 steps, one env step and one update per iteration, the target network copied every 50
updates, epsilon from 1 to 0.05 in the first fifth; 4,000 iterations, then a final test of the last
policy. Random search over the learning rate (log, 1e-4 to 1e-2), the discount (0.95 to 0.995), the
width (20, 100, 400) and the batch (32, 64).

The time is that of a whole study of a fixed number of trials: it includes the start of the two
processes, their imports, every compilation (the compilation cache begins empty) and all tests.
The final test plays 100 episodes, more than the 20 of E1.
"""

import os
import resource
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ in ("__main__", "__mp_main__"):
    # Run as a file, sys.path starts with bench/; replace it with the folder that contains bench/.
    sys.path[0] = str(ROOT)

import numpy as np  # noqa: E402

from bench.figures import Figure, Findings, Took, all_of  # noqa: E402
from bench.one_pass import run_once  # noqa: E402
from understudy.tuning.trial import Trial, TrialResult  # noqa: E402

CORES = 2
GOAL = 8_000.0
LANES = 8
LEARNED = 150.0
"""The mean return that the best quarter of the trials must reach."""
LIMITED = 200.0
"""The largest return."""
KS_LIMIT = 1.63
"""Of the Kolmogorov-Smirnov distance times sqrt(n / 2), at a level of 1 %."""
GAME = "CartPole-v0"
HIDDEN = (20, 100, 400)
BATCHES = (32, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a run is."""

    name: str
    trials: int
    rounds: int
    seeds: int
    """Of the runs that are compared with runs alone."""
    iterations: int = 4_000
    hidden: Sequence[int] = HIDDEN
    batches: Sequence[int] = BATCHES


SIZES = {
    size.name: size
    for size in (
        Size(name="full", trials=480, rounds=3, seeds=20),
        Size(name="quick", trials=96, rounds=1, seeds=5),
        Size(name="tiny", trials=4, rounds=1, seeds=2, iterations=64, hidden=(20,), batches=(32,)),
    )
}


def main() -> int:
    """Run both parts; 0 if every gate passed."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    # Each process computes in one thread.
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    return run_once("tune", about=__doc__, sizes=SIZES, parts={"E1": e1, "alone": alone})


def settings_of(size: Size) -> dict[str, Any]:
    """The settings of every trial."""
    return {
        "steps": size.iterations,
        "horizon": size.iterations,
        "envs": 1,
        "collect": 1,
        "updates_per_call": 1,
        "min_inserts": 0,
        "capacity": 4_096,
        "n_step": 1,
        "double": False,
        "dueling": False,
        "prioritised": False,
        "target_period": 50,
        "huber_delta": 1e6,
        "epsilon": {"start": 1.0, "end": 0.05, "until": 0.2},
        "eval_every": size.iterations,
        "eval_episodes": 20,
        "checkpoint_every": size.iterations,
    }


def config_of(size: Size) -> dict[str, Any]:
    return {
        "game": GAME,
        "algorithm": "dqn",
        "preset": None,
        "settings": settings_of(size),
        "lanes": LANES,
    }


def values_of(*, learning_rate: float, discount: float, hidden: int, batch: int) -> dict[str, Any]:
    return {
        "learning_rate": learning_rate,
        "discount": discount,
        "widths": [hidden],
        "batch": batch,
        "samples_per_insert": float(batch),  # one update for each step
    }


# --- E1: trials per hour --------------------------------------------------------------------------


def e1(folder: Path, size: Size, findings: Findings) -> None:
    """Studies of random search, each in two new processes."""
    trials_h: list[float] = []
    iterations_s: list[float] = []
    best_quarters: list[float] = []
    for number in range(size.rounds):
        rng = np.random.default_rng([17, number])
        trials = [
            Trial(
                trial_no=trial_no,
                values=values_of(
                    learning_rate=float(10 ** rng.uniform(-4, -2)),
                    discount=float(rng.uniform(0.95, 0.995)),
                    hidden=int(rng.choice(size.hidden)),
                    batch=int(rng.choice(size.batches)),
                ),
                seed=int(rng.integers(1 << 32)),
            )
            for trial_no in range(size.trials)
        ]
        results, took = study(folder / str(number), config_of(size), trials)
        trials_h.append(size.trials / took.wall_s * 3_600)
        iterations_s.append(size.trials * size.iterations / took.cpu_s)
        returns = sorted(result.metrics.get("reward", np.nan) for result in results)
        best_quarters.append(float(np.mean(returns[-len(returns) // 4 :])))
        is_done = {result.trial_no for result in results if result.state == "done"}
    is_small = size.name == "tiny"
    gate = all_of(
        ("every trial was done", is_done == set(range(size.trials))),
        ("every return is finite", bool(np.isfinite(best_quarters).all())),
        (
            f"the best quarter has a mean return of {LEARNED:g}",
            is_small or min(best_quarters) >= LEARNED,
        ),
    )
    findings.figures += [
        Figure(
            name="E1: trials per hour on two cores",
            unit="trials/h",
            values=trials_h,
            gate=gate,
            goal=None if is_small else GOAL,
            bound_by="updates of networks with 400 units, then compilation",
        ),
        Figure(
            name="E1: iterations per processor second",
            unit="iterations/s",
            values=iterations_s,
            gate=gate,
        ),
        Figure(
            name="E1: mean return of the best quarter", unit="", values=best_quarters, gate=gate
        ),
    ]


def study(
    folder: Path, config: dict[str, Any], trials: Sequence[Trial], slots: int = CORES
) -> tuple[list[TrialResult], Took]:
    """The results of the trials, and what all of it took."""
    os.environ["UNDERSTUDY_COMPILE_CACHE"] = str(folder / "cache")
    began_s = time.monotonic()
    began_cpu_s = _children_s()
    context = get_context("spawn")
    queues: dict[Any, deque[Trial]] = {}
    for trial in trials:
        key = (trial.values["widths"][0], trial.values["batch"])
        queues.setdefault(key, deque()).append(trial)
    buckets: dict[Connection, Any] = {}
    processes = []
    for _ in range(slots):
        ours, theirs = context.Pipe()
        process = context.Process(target=slot, args=(theirs, config))
        process.start()
        processes.append(process)
        buckets[ours] = None
    results: list[TrialResult] = []
    while len(results) < len(trials):
        for pipe in wait(list(buckets)):
            assert isinstance(pipe, Connection)
            ended, n_free, is_empty = pipe.recv()
            results += ended
            queue = queues.get(buckets[pipe])
            if not queue and is_empty:  # the next bucket: the one with most to do
                todo = {key: len(own) * key[0] * key[1] for key, own in queues.items() if own}
                for key in set(buckets.values()) & todo.keys():
                    todo[key] /= slots
                buckets[pipe] = max(todo, key=lambda key: todo[key], default=None)
                queue = queues.get(buckets[pipe])
            n_trials = min(n_free, len(queue or ()))
            pipe.send([queue.popleft() for _ in range(n_trials)] if queue else [])
    wall_s = time.monotonic() - began_s
    for pipe, process in zip(buckets, processes, strict=True):
        pipe.close()
        process.join()
    return results, Took(_children_s() - began_cpu_s, wall_s)


def _children_s() -> float:
    """Processor seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def slot(pipe: Connection, config: dict[str, Any]) -> None:
    """A process that trains trials in lanes, until the other end of the pipe closes."""
    # Imported late: the study's own process needs no JAX.
    from understudy.tuning.lanes import Lanes

    lanes = Lanes(config)
    n_running = 0
    ended: list[TrialResult] = []
    try:
        while True:
            if n_running < lanes.lanes:
                pipe.send((ended, lanes.lanes - n_running, n_running == 0))
                for trial in pipe.recv():
                    lanes.start(trial)
                    n_running += 1
            if n_running == 0:
                time.sleep(0.01)
            ended = [result for result in lanes.step() if isinstance(result, TrialResult)]
            n_running -= len(ended)
    except (EOFError, OSError):
        lanes.close()


# --- Whole runs: lanes against runs alone ---------------------------------------------------------


def alone(folder: Path, size: Size, findings: Findings) -> None:
    """The final returns of the same settings with many seeds, in lanes and with `train`."""
    from understudy import train

    values = values_of(
        learning_rate=4e-3, discount=0.97, hidden=size.hidden[-1] // 4, batch=size.batches[-1]
    )
    config = config_of(size)
    trials = [Trial(trial_no=seed, values=values, seed=seed) for seed in range(size.seeds)]
    results, took = study(folder, config, trials)
    ours = [result.metrics["reward"] for result in results]
    began_s = time.monotonic()
    theirs = [
        train(
            GAME,
            algorithm="dqn",
            settings={**config["settings"], **values},
            seed=1_000 + seed,
            until=np.inf,
            out=folder / f"run{seed}",
        ).result["return_mean"]
        for seed in range(size.seeds)
    ]
    alone_s = time.monotonic() - began_s
    distance = largest_difference(ours, theirs) * np.sqrt(size.seeds / 2)
    gate = all_of(
        (f"returns of {size.seeds} seeds have the same distribution", bool(distance <= KS_LIMIT))
    )
    findings.figures += [
        Figure(name="returns in lanes", unit="", values=ours, gate=gate),
        Figure(name="returns of runs alone", unit="", values=theirs, gate=gate),
        Figure(
            name="seconds of these runs, in lanes and alone",
            unit="s",
            values=[took.wall_s, alone_s],
            gate=gate,
            more_is_better=False,
        ),
    ]


def largest_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """The Kolmogorov-Smirnov distance of two samples."""
    at = np.sort(np.concatenate([one, other]))
    shares = [
        np.searchsorted(np.sort(sample), at, side="right") / len(sample) for sample in (one, other)
    ]
    return float(np.abs(shares[0] - shares[1]).max())


if __name__ == "__main__":
    sys.exit(main())
