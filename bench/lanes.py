"""Measures lanes: iterations of many trials in one compiled program, on the device that JAX uses.

    python bench/lanes.py            at most four minutes; writes bench/results/lanes.json
    python bench/lanes.py --quick    shorter rounds; writes nothing unless --out is given
    python bench/lanes.py --counts 1,32 --within 60

    --counts N,N    numbers of lanes (default: 1, 32, 256, 1,024 and 4,096; on a CPU 1 and 32)
    --within S      seconds after which no further number is begun (default 200)

Each trial is one of experiment E1 of bench/tune.py with 100 units and batches of 64; its learning
rate and discount are its own. In an iteration, every lane plays one step in one env, inserts it
into its ring of 4,096 steps, draws a batch and makes one update. Game, ring, draws and updates are
on the device; the time includes the host's part of each call, but neither compilation nor the
start of the lanes, which are notes.

Gate: 256 lanes (8 on a CPU) are trained for all 4,000 iterations. The greedy policy of each then
plays 20 episodes in NumPy, and the best quarter must reach a mean return of 150. All weights
must be finite, and so must the last updates.

On a GPU, 256 lanes are measured a second time, as studies run them: the host then decides before
each round and each update whether there is another one.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Run as a file, sys.path starts with bench/; replace it with the folder that contains bench/.
    sys.path[0] = str(ROOT)

import jax  # noqa: E402
import numpy as np  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from bench import tune  # noqa: E402
from bench.figures import Figure, Findings, all_of, rate  # noqa: E402
from bench.one_pass import run_once  # noqa: E402
from understudy.algorithm import Schedule  # noqa: E402
from understudy.games import cartpole  # noqa: E402
from understudy.learn.lanes import LanePlan, LaneProgram, Rounds  # noqa: E402
from understudy.nn.policy import Policy  # noqa: E402
from understudy.training.env_info import GameChoice, inspect_env  # noqa: E402
from understudy.training.settings import RunSettings  # noqa: E402
from understudy.training.train_request import TrainRequest, resolve  # noqa: E402

COUNTS = (1, 32, 256, 1_024, 4_096)
CPU_COUNTS = (1, 32)
GATE_LANES = 256
CPU_GATE_LANES = 8
HIDDEN = 100
BATCH = 64
LEARNING_RATES = (1e-4, 1e-2)
DISCOUNTS = (0.95, 0.995)
WITHIN_S = 200.0
ROUNDS = 3
"""Timed rounds of each number of lanes, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a run is."""

    name: str
    seconds: float
    """Of the timed calls of one number of lanes."""
    trial: tune.Size = tune.SIZES["full"]
    per_call: int = 250
    """Iterations in one call; a divisor of the trial's, so that one length is compiled."""


SIZES = {
    size.name: size
    for size in (
        Size(name="full", seconds=9.0),
        Size(name="quick", seconds=2.0),
        Size(name="tiny", seconds=0.02, trial=tune.SIZES["tiny"], per_call=16),
    )
}


def main() -> int:
    """Measure the gate and each number of lanes; 0 if the gate passed."""
    parser = argparse.ArgumentParser(add_help=False)
    is_cpu = jax.default_backend() == "cpu"
    usual = ",".join(map(str, CPU_COUNTS if is_cpu else COUNTS))
    parser.add_argument("--counts", default=usual)
    parser.add_argument("--within", type=float, default=WITHIN_S)
    options, others = parser.parse_known_args()
    words = options.counts.split(",")
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        sys.exit(f"--counts is {options.counts!r}; give numbers of lanes, such as 1,32")
    if not options.within > 0:  # also for NaN
        sys.exit(f"--within is {options.within:g}; give seconds, such as {WITHIN_S:g}")
    counts = [int(word) for word in words]
    bench = Bench(ends_s=time.monotonic() + options.within, is_cpu=is_cpu)
    # The gate's program first, which is compiled; then the largest, in case time runs out.
    counts.sort(key=lambda lanes: (lanes != bench.gate_lanes, -lanes))
    parts: dict[str, Callable[[Path, Size, Findings], None]] = {"gate": bench.gate}
    parts |= {f"{lanes} lanes": partial(bench.measure, lanes=lanes) for lanes in counts}
    if not is_cpu and GATE_LANES in counts:
        parts["as studies"] = partial(bench.measure, lanes=GATE_LANES, is_as_studies=True)
    return run_once(
        "lanes", about=__doc__, sizes=SIZES, parts=parts, arguments=others, saves_each_part=True
    )


# --- Lanes of E1 ----------------------------------------------------------------------------------


class TimedLanes:
    """Trials of E1 in all lanes of one program; calls play rounds in all of them."""

    def __init__(self, lanes: int, size: Size, *, is_fixed: bool) -> None:
        self.lanes = lanes
        self.per_call = size.per_call
        self.settings = settings = settings_of(size)
        spec = inspect_env(GameChoice(game=tune.GAME)).spec
        plan = LanePlan(
            lanes=lanes,
            envs=settings.run.envs,
            collect=settings.run.collect,
            capacity=settings.learner.capacity,
            max_rounds=size.per_call,
            updates=1 if is_fixed else None,
        )
        self.program = LaneProgram(settings.algorithm_type(spec, settings.config), plan)

    def start(self, seed: int) -> None:
        """Start all trials, with values drawn from the seed."""
        rng = np.random.default_rng(seed)
        low, high = map(math.log, LEARNING_RATES)
        rates = np.exp(rng.uniform(low, high, size=self.lanes))
        seeds = rng.integers(1 << 31, size=self.lanes)
        discounts = rng.uniform(*DISCOUNTS, size=self.lanes)
        self.program.start_all(seeds.tolist(), discounts.tolist())
        self.iterations = 0
        shape = (self.per_call, self.lanes)
        # Knobs that never change are on the device.
        knobs = {name: getattr(self.settings.knobs, name) for name in self._knob_names()}
        self._fixed = {
            name: jax.device_put(np.full(shape, knob, np.float32))
            for name, knob in (knobs | {"learning_rate": rates}).items()
            if not isinstance(knob, Schedule)
        }
        self._updates = jax.device_put(np.ones(shape, np.int32))
        self.program.wait()

    def call(self) -> None:
        """One call of the program; returns before its end."""
        before = self.iterations + np.arange(self.per_call)
        knobs = {
            name: self._fixed[name] if name in self._fixed else self._scheduled(name, before + 1)
            for name in self._knob_names()
        }
        rounds = Rounds(self._scheduled("epsilon", before), self._updates, knobs)
        self.program.run(rounds, np.ones(self.lanes, np.bool_))
        self.iterations += self.per_call

    def _knob_names(self) -> list[str]:
        return list(type(self.settings.knobs).__dataclass_fields__)

    def _scheduled(self, name: str, iterations: NDArray[np.int64]) -> NDArray[np.float32]:
        schedule = getattr(self.settings.knobs, name)
        progress = iterations / self.settings.run.horizon
        share = np.minimum(1.0, progress / schedule.until)
        values = schedule.start + (schedule.end - schedule.start) * share
        shape = (self.per_call, self.lanes)
        return np.broadcast_to(values.astype(np.float32)[:, None], shape)


def settings_of(size: Size) -> RunSettings:
    """E1's settings of one width and batch, with one update for each step."""
    values = {
        **tune.settings_of(size.trial),
        "widths": [HIDDEN],
        "batch": BATCH,
        "samples_per_insert": float(BATCH),
    }
    spec = inspect_env(GameChoice(game=tune.GAME)).spec
    return resolve(TrainRequest(algorithm="dqn", settings=values), spec)


def returns_of(policies: Sequence[Policy]) -> list[float]:
    """The mean return of each greedy policy, over the same first states, in NumPy."""
    game = policies[0].game
    (column,) = game.obs_columns
    episodes = tune.EPISODES
    firsts = cartpole.first_state(np.random.default_rng(0).random((cartpole.N_FIRST, episodes)))
    state = np.repeat(firsts[:, None], len(policies), axis=1)  # float64[4, policies, episodes]
    is_open = np.ones(state.shape[1:], np.bool_)
    returns = np.zeros(state.shape[1:])
    for _ in range(game.max_episode_steps or cartpole.MAX_EPISODE_STEPS):
        obs = state.transpose(1, 2, 0).astype(np.float32)
        action = [
            policy.decide({column: rows}, None, deterministic=True).action
            for policy, rows in zip(policies, obs, strict=True)
        ]
        state, reward, terminated = cartpole.step(np, state, np.stack(action))
        returns += reward * is_open
        is_open &= ~terminated
        if not is_open.any():
            break
    return [float(row.mean()) for row in returns]


# --- What is measured -----------------------------------------------------------------------------


@dataclass(slots=True)
class Bench:
    """The gate, then one number of lanes after the other, while there is time."""

    ends_s: float
    is_cpu: bool
    learned: list[tuple[str, bool]] = field(default_factory=list)
    """What the gate's trials must have reached."""
    measured: list[tuple[int, Figure]] = field(default_factory=list)
    last_s: float = 0.0
    """How long the last number of lanes took, with its compilation."""
    known: TimedLanes | None = None
    """The gate's lanes, whose program is compiled."""
    compile_s: float = 0.0
    """Of the gate's program."""

    @property
    def gate_lanes(self) -> int:
        return CPU_GATE_LANES if self.is_cpu else GATE_LANES

    def gate(self, _: Path, size: Size, findings: Findings) -> None:
        """Train whole trials and play their policies."""
        findings.notes.append(about_device())
        is_small = size.name == "tiny"
        lanes = TimedLanes(2 if is_small else self.gate_lanes, size, is_fixed=not self.is_cpu)
        lanes.start(seed=0)
        began_s = time.perf_counter()
        took_s = []
        while lanes.iterations < lanes.settings.run.steps:
            call_began_s = time.perf_counter()
            lanes.call()
            lanes.program.wait()
            took_s.append(time.perf_counter() - call_began_s)
        self.compile_s = took_s[0] - float(np.median(took_s[1:]))
        trained_s = time.perf_counter() - began_s
        policies = [lanes.program.policy(lane) for lane in range(lanes.lanes)]
        best = tune.best_quarter(returns_of(policies))
        self.learned = [
            (
                f"the best quarter of {lanes.lanes} trials reached {tune.LEARNED:g} ({best:.0f})",
                is_small or best >= tune.LEARNED,
            ),
            *checks_of(lanes, policies),
        ]
        say(
            findings,
            f"gate: {lanes.lanes} lanes, {lanes.iterations:,} iterations in {trained_s:.1f} s with "
            f"{self.compile_s:.1f} s of compilation; the best quarter's mean return is {best:.1f}",
        )
        lanes.program.free()
        self.known = lanes
        self.last_s = self.compile_s + size.seconds

    def measure(
        self, _: Path, size: Size, findings: Findings, *, lanes: int, is_as_studies: bool = False
    ) -> None:
        """Time one number of lanes."""
        name = f"{lanes:,} lane{'s' if lanes > 1 else ''}"
        if is_as_studies:
            name += ", as studies run them"
        began_s = time.monotonic()
        if began_s + self.last_s > self.ends_s:
            findings.skipped.append(f"{name}: there was no time left")
            return
        try:
            rates, checks, is_known = self._timed(
                size, findings, name=name, n_lanes=lanes, is_as_studies=is_as_studies
            )
        except jax.errors.JaxRuntimeError as error:  # such as too little memory
            findings.skipped.append(f"{name}: {str(error).splitlines()[0][:300]}")
            print(findings.skipped[-1], flush=True)
            return
        gate = all_of(*self.learned, *(check for check in checks if check not in self.learned))
        figure = Figure(name=name, unit="trial-iterations/s", values=rates, gate=gate)
        self.measured.append((lanes, figure))
        findings.figures[:] = [entry for _, entry in sorted(self.measured, key=lambda row: row[0])]
        if not is_known:
            self.last_s = time.monotonic() - began_s

    def _timed(
        self, size: Size, findings: Findings, *, name: str, n_lanes: int, is_as_studies: bool
    ) -> tuple[list[float], list[tuple[str, bool]], bool]:
        """The rate of each round, what else must hold, and whether it was compiled before."""
        known = self.known
        is_known = known is not None and known.lanes == n_lanes and not is_as_studies
        is_fixed = not self.is_cpu and not is_as_studies
        lanes = known if known and is_known else TimedLanes(n_lanes, size, is_fixed=is_fixed)
        began_s = time.perf_counter()
        lanes.start(seed=1)
        start_s = time.perf_counter() - began_s
        first_s = seconds_of(lanes, 1)
        call_s = seconds_of(lanes, 1)
        compile_s = self.compile_s if is_known else first_s - call_s
        n_calls = max(1, int(size.seconds / ROUNDS / call_s))
        rates: list[float] = []
        timed_s = 0.0
        while len(rates) < ROUNDS or timed_s < size.seconds * (1 - 1 / ROUNDS):
            took_s = seconds_of(lanes, n_calls)
            timed_s += took_s
            rates.append(n_lanes * n_calls * lanes.per_call / took_s)
        policies = [lanes.program.policy(lane) for lane in range(n_lanes)]
        checks = checks_of(lanes, policies)
        overall = rate(rates)
        memory = jax.devices()[0].memory_stats() or {}
        peak = memory.get("peak_bytes_in_use")
        say(
            findings,
            f"{name}: {overall.median:,.0f} trial-iterations/s "
            f"({overall.low:,.0f} to {overall.high:,.0f}), "
            f"{n_lanes / overall.median * 1e6:,.0f} µs for an iteration of all lanes; "
            f"{len(rates)} rounds of {n_calls} calls of {lanes.per_call} iterations; compilation "
            f"{compile_s:.1f} s, start of all lanes {start_s:.2f} s"
            + (f", peak memory so far {peak / 2**30:.2f} GiB" if peak else ""),
        )
        lanes.program.free()
        return rates, checks, is_known


def seconds_of(lanes: TimedLanes, calls: int) -> float:
    """How long so many calls take."""
    began_s = time.perf_counter()
    for _ in range(calls):
        lanes.call()
    lanes.program.wait()
    return time.perf_counter() - began_s


def checks_of(lanes: TimedLanes, policies: Sequence[Policy]) -> list[tuple[str, bool]]:
    arrays = [array for policy in policies for array in policy.weights.values()]
    return [
        ("all weights are finite", all(bool(np.isfinite(array).all()) for array in arrays)),
        ("the last updates were finite", not lanes.program.skips.any()),
    ]


def about_device() -> str:
    """The device and what computes there."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        what = "cores"
    else:
        cores = getattr(device, "core_count", None)
        what = "multiprocessors"
    flags = os.environ.get("XLA_FLAGS", "")
    return (
        f"device: {device.device_kind} ({device.platform}), {cores or 'unknown number of'} {what}; "
        f"jax {jax.__version__}" + (f"; XLA_FLAGS {flags}" if flags else "")
    )


def say(findings: Findings, line: str) -> None:
    """Print a note at once, and keep it."""
    print(line, flush=True)
    findings.notes.append(line)


if __name__ == "__main__":
    sys.exit(main())
