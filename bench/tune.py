"""Measures tuning: trials per hour of lanes on two cores, on experiment E1, beside peers.

    python bench/tune.py            about half an hour on two cores; writes bench/results/tune.json
    python bench/tune.py --quick    fewer trials; writes nothing unless --out is given

E1: CartPole with a limit of 200 steps; DQN with one hidden layer, the squared error, Adam, a replay
of 4,096 steps, one env step and one update per iteration, the target network copied every 50
updates, epsilon from 1 to 0.05 in the first fifth; 4,000 iterations, then a final test of the last
policy. Random search over the learning rate (log, 1e-4 to 1e-2), the discount (0.95 to 0.995), the
width (20, 100, 400) and the batch (32, 64).

The time is that of a whole study of a fixed number of trials: it includes the start of the two
processes, their imports, every compilation (the compilation cache begins empty) and all tests.
Peers have two processes, too, and run fewer trials of the same space in the same round: Optuna on a
journal, and Ray Tune, both with Stable-Baselines3.

Overhead: the whole command `understudy tune` with one trial that does nothing, and what each
further one costs.
"""

import inspect
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
if __name__ in ("__main__", "__mp_main__"):
    # Run as a file, sys.path starts with bench/; replace it with the folder that contains bench/.
    sys.path[0] = str(ROOT)

import numpy as np  # noqa: E402

from bench.contestants import Contestant, ContestantError, Process  # noqa: E402
from bench.figures import Figure, Findings, Ratio, all_of  # noqa: E402
from bench.one_pass import run_once  # noqa: E402
from understudy.tuning.lanes import Lanes  # noqa: E402
from understudy.tuning.result import load_study  # noqa: E402
from understudy.tuning.space import read_space  # noqa: E402
from understudy.tuning.study_config import SearchConfig, SlotsConfig, StudyConfig  # noqa: E402
from understudy.tuning.trial import TrainableSpec, Trial  # noqa: E402
from understudy.tuning.tune import tune  # noqa: E402

CORES = 2
GOAL = 8_000.0
LANES = 8
LEARNED = 150.0
"""The mean return that the best quarter of the trials must reach."""
LIMITED = 200.0
"""The largest return."""
KS_LIMIT = 1.63
"""Of the Kolmogorov-Smirnov distance times sqrt(n / 2), at a level of 1 %."""
START_GOAL_S = 1.0
TRIAL_GOAL_MS = 5.0
EPISODES = 20
"""Of the final test, which is E1's."""
GAME = "CartPole-v0"
HIDDEN = (20, 100, 400)
BATCHES = (32, 64)
XLA_FLAGS = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
"""Each process computes in one thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a run is."""

    name: str
    trials: int
    peer_trials: int
    """Of each peer, which are slower; 0: no peers."""
    rounds: int
    seeds: int
    """Of the runs that are compared with runs alone."""
    iterations: int = 4_000
    hidden: Sequence[int] = HIDDEN
    batches: Sequence[int] = BATCHES
    slots: int = CORES
    starts: int = 3
    """How often a study of empty trials is measured."""


SIZES = {
    size.name: size
    for size in (
        Size(name="full", trials=480, peer_trials=24, rounds=3, seeds=20),
        Size(name="quick", trials=96, peer_trials=4, rounds=1, seeds=5),
        Size(
            name="tiny",
            trials=4,
            peer_trials=0,
            rounds=1,
            seeds=2,
            iterations=64,
            hidden=(20,),
            batches=(32,),
            # A second process would compile the same programs once more.
            slots=1,
            starts=1,
        ),
    )
}


def main() -> int:
    """Run both parts; 0 if every gate passed."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    os.environ["XLA_FLAGS"] = XLA_FLAGS
    return run_once(
        "tune", about=__doc__, sizes=SIZES, parts={"overhead": overhead, "E1": e1, "alone": alone}
    )


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
        "eval_episodes": EPISODES,
        "test_episodes": EPISODES,
        "checkpoint_every": size.iterations,
    }


def config_of(size: Size) -> dict[str, Any]:
    return {
        "game": GAME,
        "algorithm": "dqn",
        "preset": None,
        "settings": settings_of(size),
        "is_rliable": False,
        "lanes": LANES,
    }


# --- Overhead: trials that do nothing -------------------------------------------------------------


class Nothing:
    """A class of a user's, in RLiable's form."""

    def __init__(self, sc: Any, cfg: Mapping[str, Any]) -> None:
        self._x = cfg["hp_params"]["x"]

    def train(self, rows: Any) -> None:
        """Nothing is learned."""

    def evaluate(self, rows: Any) -> float:
        return float(self._x)


NOTHING = """
[study]
class = "nothing:Nothing"
environment = "rows.csv"
max_trials = {trials}
[space]
x = {{ min = 0.0, max = 1.0 }}
[search]
test_seeds = 0
"""


def overhead(folder: Path, size: Size, findings: Findings) -> None:
    """Seconds of the command with one empty trial, and milliseconds of each further one."""
    folder.mkdir()
    (folder / "rows.csv").write_text("x\n1\n")
    (folder / "nothing.py").write_text(
        f"from typing import Any, Mapping\n{inspect.getsource(Nothing)}"
    )
    n_trials = 1_000 if size.name == "full" else 20
    starts_s: list[float] = []
    trials_ms: list[float] = []
    n_done = 0
    for number in range(size.starts):
        seconds = []
        for trials in (1, n_trials):
            (folder / "study.toml").write_text(NOTHING.format(trials=trials))
            out = folder / f"{number}-{trials}"
            command = ["tune", "study.toml", "--slots", str(size.slots), "--out", str(out)]
            began_s = time.monotonic()
            subprocess.run(
                [sys.executable, "-m", "understudy.cli.main", *command],
                cwd=folder,
                check=True,
                capture_output=True,
            )
            seconds.append(time.monotonic() - began_s)
            n_done += len(load_study(out).trials)
        starts_s.append(seconds[0])
        trials_ms.append((seconds[1] - seconds[0]) / (n_trials - 1) * 1_000)
    gate = all_of(("every trial is in the journal", n_done == size.starts * (1 + n_trials)))
    findings.figures += [
        Figure(
            name="a study with one empty trial: the whole command",
            unit="s",
            values=starts_s,
            gate=gate,
            goal=START_GOAL_S if size.name == "full" else None,
            more_is_better=False,
            bound_by="the imports of two interpreters",
        ),
        Figure(
            name="a further empty trial",
            unit="ms",
            values=trials_ms,
            gate=gate,
            goal=TRIAL_GOAL_MS if size.name == "full" else None,
            more_is_better=False,
        ),
    ]


# --- E1: trials per hour --------------------------------------------------------------------------


class E1Lanes(Lanes):
    """Lanes in which a trial's `samples_per_insert` is its batch: one update for each step."""

    def bucket(self, trial: Trial) -> str:
        return super().bucket(_with_one_update(trial))

    def start(self, trial: Trial) -> None:
        super().start(_with_one_update(trial))


def _with_one_update(trial: Trial) -> Trial:
    return replace(trial, values={**trial.values, "samples_per_insert": trial.values["batch"]})


def study_of(folder: Path, size: Size, *, seed: int) -> StudyConfig:
    """E1 as a study of `understudy.tune`: a random search in lanes, on two slots."""
    return StudyConfig(
        name="E1",
        space=read_space(
            {
                "learning_rate": {"min": 1e-4, "max": 1e-2, "scale": "log"},
                "discount": {"min": 0.95, "max": 0.995},
                "widths": [[hidden] for hidden in size.hidden],
                "batch": list(size.batches),
            }
        ),
        trainable=TrainableSpec(
            path="bench.tune:E1Lanes", config={**config_of(size), "folder": str(folder)}
        ),
        max_trials=size.trials,
        seed=seed,
        # A random search knows no results, so all of its trials may be asked for at once.
        search=SearchConfig(lag=size.trials, test_seeds=0),
        slots=SlotsConfig(slots=size.slots, lanes=LANES),
    )


def e1(folder: Path, size: Size, findings: Findings) -> None:
    """Studies of random search, beside those of peers, in turn."""
    trials_h: list[float] = []
    best_quarters: list[float] = []
    iterations_s: list[float] = []
    is_done = True
    peers: dict[str, list[Peer]] = {}
    for number in range(size.rounds):
        place = folder / str(number)
        os.environ["UNDERSTUDY_COMPILE_CACHE"] = str(place / "cache")
        began_s = time.monotonic()
        began_cpu_s = _children_s()
        result = tune(study_of(place / "study", size, seed=number))
        wall_s = time.monotonic() - began_s
        returns = [row.result.metrics["reward"] for row in result.trials if row.result.metrics]
        is_done &= len(returns) == size.trials
        trials_h.append(size.trials / wall_s * 3_600)
        iterations_s.append(size.trials * size.iterations / (_children_s() - began_cpu_s))
        best_quarters.append(best_quarter(returns))
        for name, do in PEERS.items():
            if peer := measured(name, do, size, number, findings):
                peers.setdefault(name, []).append(peer)
    is_small = size.name == "tiny"
    gate = all_of(
        ("every trial was done", is_done),
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
    for name, rounds in peers.items():
        if len(rounds) < size.rounds:
            continue
        findings.ratios.append(
            Ratio(
                name="E1: trials per hour",
                peer=name,
                unit="trials/h",
                ours=trials_h,
                theirs=[peer.trials_h for peer in rounds],
                gate=gate,
            )
        )
        findings.notes.append(
            f"{name}: the best quarter of {size.peer_trials} trials has a mean return of "
            f"{np.mean([peer.best_quarter for peer in rounds]):.0f}; {rounds[0].versions}"
        )


class Peer(NamedTuple):
    """A round of a peer."""

    trials_h: float
    best_quarter: float
    versions: str


PEERS = {
    "Optuna and SB3, random": {"do": "optuna", "sampler": "random"},
    "Optuna and SB3, TPE": {"do": "optuna", "sampler": "tpe"},
    "Ray Tune and SB3": {"do": "ray"},
}


def measured(
    name: str, do: Mapping[str, str], size: Size, number: int, findings: Findings
) -> Peer | None:
    """A study of a peer with two processes; None if it could not run, or is not to."""
    if not size.peer_trials:
        return None
    request = {
        **do,
        "trials": size.peer_trials,
        "iterations": size.iterations,
        "hidden": list(size.hidden),
        "batches": list(size.batches),
    }
    tuner = Contestant(name=name, module="bench.against.tuners", environment="tuners")
    try:
        with Process(tuner, request) as process:
            answer = process.ask()
            versions = ", ".join(f"{key} {value}" for key, value in process.versions.items())
    except ContestantError as error:
        findings.skipped.append(f"{name}: {error}")
        return None
    if len(answer["returns"]) < size.peer_trials:
        findings.skipped.append(f"{name}: {len(answer['returns'])} of {size.peer_trials} trials")
        return None
    print(f"{name}: round {number + 1} of {size.rounds}, {answer['wall_s']:.0f} s", flush=True)
    return Peer(
        size.peer_trials / answer["wall_s"] * 3_600, best_quarter(answer["returns"]), versions
    )


def best_quarter(returns: Sequence[float]) -> float:
    """The mean of the best quarter."""
    return float(np.mean(sorted(returns)[-max(1, len(returns) // 4) :]))


def _children_s() -> float:
    """Processor seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# --- Whole runs: lanes against runs alone ---------------------------------------------------------


def alone(folder: Path, size: Size, findings: Findings) -> None:
    """The final returns of the same settings with many seeds, in lanes and with `train`."""
    from understudy import train

    hidden = size.hidden[len(size.hidden) // 2]
    values = {"learning_rate": 4e-3, "discount": 0.97, "batch": size.batches[-1]}
    per_insert = float(size.batches[-1])  # one update per step
    fixed = {**settings_of(size), **values, "widths": [hidden], "samples_per_insert": per_insert}
    config = {**config_of(size), "settings": fixed, "folder": str(folder / "study")}
    began_s = time.monotonic()
    result = tune(
        StudyConfig(
            name="alone",
            space=read_space({"learning_rate": [4e-3]}),
            trainable=TrainableSpec(path="understudy.tuning.lanes:Lanes", config=config),
            max_trials=size.seeds,
            search=SearchConfig(lag=size.seeds, test_seeds=0),
            slots=SlotsConfig(slots=size.slots, lanes=LANES),
        )
    )
    in_lanes_s = time.monotonic() - began_s
    ours = [row.result.metrics["reward"] for row in result.trials]
    began_s = time.monotonic()
    theirs = [
        train(
            GAME,
            algorithm="dqn",
            settings=fixed,
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
            values=[in_lanes_s, alone_s],
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
