"""The interval of an interquartile mean, by our arena/statistics.py and by the library rliable.

    python bench/score_statistics.py           five rounds of 50,000 resamples, about five minutes;
                                               writes bench/results/statistics.json
    python bench/score_statistics.py --quick   two rounds of 5,000; writes nothing without --out

Both sides resample the same 10 runs of 5 tasks, in turn, on one core and one thread. rliable runs
in its own environment below bench/.peers, which is installed first. Given rliable's random numbers,
ours must return its interval to the last bit; in the measured rounds it draws its own.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Run as a file, sys.path starts with bench/; replace it with the folder that contains bench/.
    sys.path[0] = str(ROOT)

import time  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from types import SimpleNamespace  # noqa: E402
from typing import Any, cast  # noqa: E402

import numpy as np  # noqa: E402

from bench.contest import on_cores  # noqa: E402
from bench.contestants import Contestant, ContestantError, Process  # noqa: E402
from bench.figures import Figure, Findings, Took, all_of, in_turn, rate_ratios  # noqa: E402
from bench.one_pass import run_once  # noqa: E402
from understudy.arena.statistics import estimate, iqm  # noqa: E402
from understudy.core.statistics import Estimate  # noqa: E402

GOAL = 50.0
"""Times as fast as rliable."""
RLIABLE = Contestant(name="rliable", module="bench.against.rliable", environment="rliable")


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure."""

    rounds: int
    resamples: int


SIZES = {"full": Size(5, 50_000), "quick": Size(2, 5_000), "tiny": Size(2, 200)}


def main() -> int:
    """Measure both sides; 0 if the gate passed."""
    return run_once("statistics", about=__doc__, sizes=SIZES, parts={"iqm": _measure})


def _measure(_: Path, size: Size, findings: Findings) -> None:
    scores = np.random.default_rng(0).random((10, 5))
    request = {"do": "iqm", "scores": scores.tolist(), "resamples": size.resamples}

    def ours() -> tuple[Took, Any]:
        began_s = time.perf_counter()
        began_cpu_s = time.process_time()
        found = estimate(scores, iqm, np.random.default_rng(1), resamples=size.resamples)
        return Took(time.process_time() - began_cpu_s, time.perf_counter() - began_s), found

    estimate(scores, iqm, np.random.default_rng(1), resamples=100)  # the peer warms up, too
    try:
        with on_cores(1), Process(RLIABLE, request) as process:

            def theirs() -> tuple[Took, Any]:
                line = process.ask()
                return Took(line["cpu_s"], line["wall_s"]), line["ends"]

            rounds = in_turn(size.rounds, {"ours": ours, "theirs": theirs})
            versions = process.versions
    except ContestantError as error:
        findings.skipped.append(f"rliable: {error}")
        return
    stream = cast(np.random.Generator, SimpleNamespace(integers=np.random.RandomState(1).randint))
    same = estimate(scores, iqm, stream, resamples=size.resamples)
    gate = all_of(
        (
            "the same interval to the last bit, given the same random numbers",
            all([[same.low], [same.high]] == ends for _, ends in rounds["theirs"]),
        ),
        (
            "the same interval within 0.01 with our own random numbers",
            all(_is_close(found, same) for _, found in rounds["ours"]),
        ),
    )
    took = {side: [each for each, _ in measured] for side, measured in rounds.items()}
    ratios = rate_ratios(
        "IQM of 10x5 with its interval",
        "rliable " + versions["rliable"],
        size.resamples,
        took["ours"],
        took["theirs"],
        unit="resamples/s",
        gate=gate,
    )
    findings.ratios += ratios
    findings.figures += [
        Figure(
            name=f"{ratio.name}: times as fast as {ratio.peer}",
            unit="x",
            values=ratio.times,
            goal=GOAL,
            gate=gate,
            bound_by="drawing the random numbers, and NumPy's partition",
        )
        for ratio in ratios
    ]
    findings.notes.append(
        "versions of rliable's environment: "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
    )


def _is_close(found: Estimate, reference: Estimate) -> bool:
    pairs = ((found.low, reference.low), (found.high, reference.high))
    return all(a is not None and b is not None and abs(a - b) < 0.01 for a, b in pairs)


if __name__ == "__main__":
    sys.exit(main())
