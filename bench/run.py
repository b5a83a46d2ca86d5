"""Measures the learner against its peers: peers in their own environments, A B A B on equal cores.

    python bench/run.py solve-dqn             10 seeds, SB3, SBX and rlox; writes
                                              bench/results/learner-solve-dqn.json
    python bench/run.py replay inference      two measures, one after the other
    python bench/run.py all                   all measures, about two hours on two cores
    python bench/run.py all --quick           all measures in minutes; writes nothing
                                              unless --out is given
    python bench/run.py collect --peers sb3   only the peers whose name contains this
    python bench/run.py --calibrate           store this machine's reference, while it is idle

Measures: solve-dqn, solve-ppo, collect, replay, inference. A peer's environment is installed when
it is first needed, in bench/.peers (about 5 GB each with torch, most of it shared with uv's cache).
On a busy machine a run waits, then refuses to record; --force records anyway, with a remark.
Figures count only if our learning gate passes in the same run.
"""

import argparse
import datetime
import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Run as a file, sys.path starts with bench/; replace it with the folder that contains bench/.
    sys.path[0] = str(ROOT)
    # The evaluator and the reference kernels use one thread on every machine.
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

from bench import guard, machine  # noqa: E402
from bench.bootstrap import times_better  # noqa: E402
from bench.contest import Outcome, compare_all, learning_gate, on_cores, solve_all  # noqa: E402
from bench.contestants import Contestant  # noqa: E402
from bench.figures import Gate, all_of, significant  # noqa: E402
from bench.measures import MEASURES, OURS, Measure  # noqa: E402

RESULTS = ROOT / "bench" / "results"
_QUIET_TIMEOUT_S = 300.0


def main() -> int:
    """Run the requested measures; 0 if every gate passed and every result was recorded."""
    options = _options()
    # On SIGTERM, a measure exits through its context managers, which stop the contestants.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.calibrate:
        print(f"stored in {guard.STORED.relative_to(ROOT)}: {guard.calibrate()}")
        return 0
    from bench import table  # late: it imports rich

    out = options.out or (None if options.quick else RESULTS)
    remarks = _remarks(options)
    if remarks and not options.force and not options.quick:
        print(
            "not measured, because the result could not be recorded:",
            *remarks,
            sep="\n  ",
            file=sys.stderr,
        )
        print(
            "  --force records the result with these remarks; --quick measures without recording",
            file=sys.stderr,
        )
        return 2
    sound = True
    gates = list[Gate]()
    for name in options.measures:
        result = _measure(MEASURES[name], options, remarks, gates)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False)
            (out / f"learner-{name}.json").write_text(text + "\n")
        table.show(result)
        sound &= result["gate"]["passed"] and not result["failed"]
    return 0 if sound else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "measures", nargs="*", metavar="MEASURE", help=", ".join([*MEASURES, "all"])
    )
    parser.add_argument(
        "--rounds", type=int, help="rounds of a rate or a time (default 7; quick 2)"
    )
    parser.add_argument(
        "--seeds",
        type=int,
        help="training runs of each contestant, seeds 0 to N-1 (default 10; quick 1)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes; peers stop after two evaluations"
    )
    parser.add_argument(
        "--peers", help="only peers whose name contains one of these, comma-separated"
    )
    parser.add_argument(
        "--out", type=Path, help="folder for learner-MEASURE.json (default bench/results)"
    )
    parser.add_argument(
        "--force", action="store_true", help="record on a busy machine too, with a remark"
    )
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="store the speed of this machine's reference kernels",
    )
    options = parser.parse_args()
    unknown = [name for name in options.measures if name not in (*MEASURES, "all")]
    if unknown or not (options.measures or options.calibrate):
        parser.error(
            f"{f'unknown measure {unknown[0]!r}; ' if unknown else ''}give one or more of "
            f"{', '.join(MEASURES)}, or all"
        )
    options.measures = list(MEASURES) if "all" in options.measures else options.measures
    options.rounds = options.rounds or (2 if options.quick else 7)
    options.seeds = options.seeds or (1 if options.quick else 10)
    return options


def _remarks(options: argparse.Namespace) -> list[str]:
    """Why figures measured now would not count; waits for a quiet machine before recording."""
    stored = guard.stored()
    must_wait = stored is not None and not (options.force or options.quick)
    timeout_s = _QUIET_TIMEOUT_S if must_wait else 0.0
    if timeout_s:
        print(f"waiting for a quiet machine, at most {timeout_s:.0f} s", flush=True)
    return guard.wait_until_quiet(
        lambda: guard.complaints(guard.read(), stored), timeout_s=timeout_s
    )


def _measure(
    measure: Measure, options: argparse.Namespace, remarks: list[str], gates: list[Gate]
) -> dict[str, Any]:
    """The result file of one measure; its gate is appended to `gates`, the gates so far."""
    began_s = time.monotonic()
    load = machine.load_average()
    others = guard.Others()
    contestants, left_out = _selected(measure, options.peers)
    print(f"{measure.title}: {', '.join(each.name for each in contestants)}", flush=True)
    with on_cores(measure.cores) as cores:
        outcome = _contest(measure, contestants, options)
    gate = _all_gates(measure, outcome, options, gates)
    outcome.skipped |= left_out
    used = others.cores()
    return {
        "format": 1,
        "measure": measure.name,
        "title": measure.title,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": machine.commit(),
        "scale": "quick" if options.quick else "full",
        "seconds": round(time.monotonic() - began_s, 1),
        "machine": machine.machine(),
        "cores": cores,
        "load_average_before": load,
        "others_cores": used,
        "remarks": [*remarks, *_shortfalls(options, used)],
        "notes": list(measure.notes),
        "gate": {"passed": gate.passed, "says": gate.says},
        "contestants": {each.name: _facts(each, outcome) for each in contestants},
        "requests": measure.parts,
        "order": outcome.order,
        "rows": _rows(
            measure, outcome, all_of((gate.says, gate.passed), ("a full run", not options.quick))
        ),
        "runs": outcome.runs,
        "skipped": outcome.skipped,
        "failed": outcome.failed,
    }


def _selected(measure: Measure, peers: str | None) -> tuple[list[Contestant], dict[str, str]]:
    """Our contestants and the peers that `--peers` names; and the other peers with the reason."""
    parts = (peers or "").lower().split(",")
    selected = [
        contestant
        for contestant in measure.contestants
        if contestant.is_ours or any(part in contestant.name.lower() for part in parts)
    ]
    return selected, {
        contestant.name: f"left out by --peers {peers}"
        for contestant in measure.contestants
        if contestant not in selected
    }


def _contest(
    measure: Measure, contestants: list[Contestant], options: argparse.Namespace
) -> Outcome:
    if measure.is_solving:
        return solve_all(measure, contestants, seeds=options.seeds, quick=options.quick)
    return compare_all(measure, contestants, rounds=options.rounds, quick=options.quick)


def _all_gates(
    measure: Measure, outcome: Outcome, options: argparse.Namespace, gates: list[Gate]
) -> Gate:
    """The gate of a measure's figures: of its own training, or of every training in this run."""
    if measure.is_solving:
        gates.append(learning_gate(measure.name, outcome))
        return gates[-1]
    gates.extend([] if gates else [_gate(options)])
    return all_of(*((gate.says, gate.passed) for gate in gates))


def _shortfalls(options: argparse.Namespace, used: float | None) -> list[str]:
    """Remarks on a full run: too few rounds, or other busy processes."""
    remarks = []
    if not options.quick and (options.seeds < 10 or options.rounds < 5):
        remarks.append(
            f"{options.seeds} seeds and {options.rounds} rounds; a figure needs at least 10 "
            "seeds and 5 rounds"
        )
    if used is not None and used > guard.MAX_LOAD:
        remarks.append(f"other processes used {used} cores during the measurement")
    return remarks


def _facts(contestant: Contestant, outcome: Outcome) -> dict[str, Any]:
    return {
        "module": contestant.module,
        "threads": outcome.threads[contestant.name],
        "settings": contestant.settings,
        "versions": outcome.versions.get(contestant.name, {}),
    }


def _gate(options: argparse.Namespace) -> Gate:
    """The learning gate of our DQN, trained here because no earlier measure has trained."""
    print("Learning gate: CartPole-v1, DQN, ours", flush=True)
    measure = MEASURES["solve-dqn"]
    with on_cores(measure.cores):
        outcome = solve_all(
            measure, measure.contestants[:1], seeds=options.seeds, quick=options.quick
        )
    return learning_gate(measure.name, outcome)


def _rows(measure: Measure, outcome: Outcome, gate: Gate) -> list[dict[str, Any]]:
    """Each row with the values of all contestants, and the ratio of each of ours to each peer."""
    right = all_of(
        ("every contestant did the work right", not outcome.failed), (gate.says, gate.passed)
    )
    rows = []
    for row, values in outcome.values.items():
        ours = [each.name for each in measure.contestants if each.is_ours and each.name in values]
        ratios = [
            _ratio(measure, row, name, peer, values, is_void=not right.passed)
            for name in ours
            for peer in values
            if peer not in ours
        ]
        finite = {name: [_finite(value) for value in measured] for name, measured in values.items()}
        rows.append({"name": row, "unit": measure.unit, "values": finite, "ratios": ratios})
    return rows


def _ratio(
    measure: Measure,
    row: str,
    ours: str,
    peer: str,
    values: dict[str, list[float]],
    *,
    is_void: bool,
) -> dict[str, Any]:
    times = times_better(values[ours], values[peer], more_is_better=measure.more_is_better)
    goals = [
        goal.times
        for goal in measure.goals
        if (goal.row, goal.peer) == (row, peer) and ours == OURS
    ]
    goal = goals[0] if goals else None
    met = "reported" if goal is None else "met" if times.meets(goal) else "missed"
    interval = {name: _finite(getattr(times, name)) for name in ("ratio", "low", "high")}
    return {
        "ours": ours,
        "peer": peer,
        **interval,
        "goal": goal,
        "verdict": "void" if is_void else met,
    }


def _finite(value: float) -> float | None:
    return significant(value) if math.isfinite(value) else None


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
