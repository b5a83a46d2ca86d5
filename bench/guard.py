"""Detects a busy or changed machine, whose figures do not count.

It checks the load, the speed of two reference kernels, and the CPU time of other processes.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench import machine

STORED = Path(__file__).resolve().parent / "results" / "reference.json"
MAX_LOAD = 0.5
TOLERANCE = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The machine at one moment."""

    load: float
    """Load average of the last minute."""
    kernels: Mapping[str, float] = field(default_factory=dict)
    """Speed of each reference kernel."""


def complaints(reading: Reading, stored: Mapping[str, float] | None) -> list[str]:
    """Why a figure measured now would not count; empty if it would."""
    reasons = []
    if reading.load > MAX_LOAD:
        reasons.append(
            f"the load average is {reading.load:.2f}, above the limit of {MAX_LOAD}; wait for "
            "other work to finish"
        )
    if stored is None:
        return [
            *reasons,
            "no reference of this machine is stored; run bench/run.py --calibrate while it is idle",
        ]
    for name, value in reading.kernels.items():
        off = value / stored[name] - 1
        if abs(off) > TOLERANCE:
            reasons.append(
                f"{name} runs at {value:.1f}, {off:+.0%} off its stored {stored[name]:.1f}, more "
                f"than {TOLERANCE:.0%}; wait for other work to finish, or run bench/run.py "
                "--calibrate if the machine has changed"
            )
    return reasons


def wait_until_quiet(
    look: Callable[[], list[str]],
    *,
    timeout_s: float,
    pause: Callable[[float], None] = time.sleep,
    every_s: float = 5.0,
) -> list[str]:
    """Poll until there are no complaints or the time is up; returns the last complaints."""
    reasons = look()
    waited_s = 0.0
    while reasons and waited_s < timeout_s:
        pause(every_s)
        waited_s += every_s
        reasons = look()
    return reasons


def read() -> Reading:
    """The load, and then the speed of the kernels, which would add to the load."""
    load = os.getloadavg()[0]
    return Reading(load=load, kernels=kernels())


def kernels() -> dict[str, float]:
    """The best of several runs on one thread: a matrix product in GFLOP/s, a 64 MB copy in GB/s."""
    left = np.random.default_rng(0).random((512, 512), np.float32)
    source = np.ones(64_000_000, np.uint8)
    target = np.empty_like(source)
    return {
        "gemm_gflops": 2 * 512**3 / _best_s(lambda: left @ left) / 1e9,
        "memcpy_gbs": len(source) / _best_s(lambda: np.copyto(target, source)) / 1e9,
    }


def _best_s(work: Callable[[], Any], times: int = 15) -> float:
    best_s = float("inf")
    for _ in range(times):
        began_s = time.perf_counter()
        work()
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s


def stored(path: Path = STORED) -> dict[str, float] | None:
    """The kernels' speed on this machine while it was idle; None if it was never stored."""
    return _all(path).get(_key())


def calibrate(path: Path = STORED) -> dict[str, float]:
    """Measure the kernels and store them as this machine's reference."""
    measured = {name: round(value, 2) for name, value in kernels().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_all(path) | {_key(): measured}, indent=1) + "\n")
    return measured


def _all(path: Path) -> dict[str, dict[str, float]]:
    references: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.exists() else {}
    return references


def _key() -> str:
    facts = machine.machine()
    return f"{facts['cpu']}, {os.cpu_count()} cores, {facts['memory_gib']} GiB"


class Others:
    """How many cores other processes have used since this object was created.

    Child processes that have ended count as ours.
    """

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._busy_s = _busy_s()
        self._own_s = _own_s()

    def cores(self) -> float | None:
        """The number of cores; None if the system does not report it."""
        busy_s = _busy_s()
        took_s = max(1e-3, time.monotonic() - self._began_s)
        if busy_s is None or self._busy_s is None:
            return None
        return round(max(0.0, (busy_s - self._busy_s) - (_own_s() - self._own_s)) / took_s, 2)


def _busy_s() -> float | None:
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    # user, nice, system, idle, iowait, irq, softirq, steal: all but idle and iowait keep a core
    # busy.
    return float(
        sum(int(word) for at, word in enumerate(words[:8]) if at not in (3, 4))
    ) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
