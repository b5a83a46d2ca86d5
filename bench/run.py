"""Measures the learner beside its peers: one process, peers in environments of their own, A B A B
on the same cores.

    python bench/run.py solve-dqn             10 seeds, SB3, SBX and rlox; writes
                                              bench/results/learner-solve-dqn.json
    python bench/run.py replay inference      two measures, one after the other
    python bench/run.py all                   everything, about two hours on two cores
    python bench/run.py all --quick           a look at everything, in minutes; writes nothing
                                              unless --out is given
    python bench/run.py collect --peers sb3   against the peers whose name contains this
    python bench/run.py --calibrate           store this machine's reference, while it is idle

Measures: solve-dqn, solve-ppo, collect, replay, inference. A peer's environment is made when it is
first needed, under bench/.peers (about 5 GB each with torch, most of it shared with uv's cache). On
a busy machine a run waits, then refuses; --force records anyway, with a remark. Figures count only
while our learning gate passes, in the same run.
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
    # Run as a file, the first place to import from is bench/ itself; make it the folder that holds
    # the package.
    sys.path[0] = str(ROOT)
    # The evaluator and the reference kernels have one thread, whatever the machine has.
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

from bench import guard, machine  # noqa: E402
from bench.bootstrap import times_better  # noqa: E402
from bench.contest import Found, compare_all, learning_gate, on_cores, solve_all  # noqa: E402
from bench.contestants import Contestant  # noqa: E402
from bench.figures import Gate, all_of, significant  # noqa: E402
from bench.measures import MEASURES, OURS, Measure  # noqa: E402

RESULTS = ROOT / "bench" / "results"
_PATIENCE_S = 300.0


def main() -> int:
    """Run what was asked for; 0 when every gate passed and every result that was to be recorded
    is."""
    options = _options()
    # Asked to end, a measure leaves through its context managers, which end the contestants.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.calibrate:
        print(f"stored in {guard.STORED.relative_to(ROOT)}: {guard.calibrate()}")
        return 0
    from bench import table  # draws with rich

    out = options.out or (None if options.quick else RESULTS)
    remarks = _remarks(options)
    if remarks and not options.force and not options.quick:
        print(
            "not measured, because it could not be recorded:", *remarks, sep="\n  ", file=sys.stderr
        )
        print(
            "  --force records it with this remark; --quick looks without recording",
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
        help="trainings of each contestant, seeds 0 to N-1 (default 10; quick 1)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes; peers stop after two evaluations"
    )
    parser.add_argument(
        "--peers", help="only peers whose name contains one of these, separated by commas"
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
            f"{f'no measure {unknown[0]!r}; ' if unknown else ''}name some of "
            f"{', '.join(MEASURES)}, or all"
        )
    options.measures = list(MEASURES) if "all" in options.measures else options.measures
    options.rounds = options.rounds or (2 if options.quick else 7)
    options.seeds = options.seeds or (1 if options.quick else 10)
    return options


def _remarks(options: argparse.Namespace) -> list[str]:
    """What speaks against figures made now; where they are to be recorded, after waiting for a
    quiet moment."""
    stored = guard.stored()
    patience_s = _PATIENCE_S if stored is not None and not (options.force or options.quick) else 0.0
    if patience_s:
        print(f"waiting for a quiet machine, at most {patience_s:.0f} s", flush=True)
    return guard.wait_until_quiet(
        lambda: guard.complaints(guard.read(), stored), patience_s=patience_s
    )


def _measure(
    measure: Measure, options: argparse.Namespace, remarks: list[str], gates: list[Gate]
) -> dict[str, Any]:
    """The result file of one measure; `gates` are those of this run so far, and get the one that
    is made here."""
    began_s = time.monotonic()
    load = machine.load_average()
    others = guard.Others()
    contestants, left_out = _asked(measure, options.peers)
    print(f"{measure.title}: {', '.join(who.name for who in contestants)}", flush=True)
    with on_cores(measure.cores) as cores:
        found = _contest(measure, contestants, options)
    gate = _all_gates(measure, found, options, gates)
    found.skipped |= left_out
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
        "contestants": {who.name: _told(who, found) for who in contestants},
        "requests": measure.parts,
        "order": found.order,
        "rows": _rows(
            measure, found, all_of((gate.says, gate.passed), ("a full run", not options.quick))
        ),
        "runs": found.runs,
        "skipped": found.skipped,
        "failed": found.failed,
    }


def _asked(measure: Measure, peers: str | None) -> tuple[list[Contestant], dict[str, str]]:
    """Ours and the peers that `--peers` names; who is left out, and why."""
    wanted = (peers or "").lower().split(",")
    asked = [
        who
        for who in measure.contestants
        if who.is_ours or any(w in who.name.lower() for w in wanted)
    ]
    return asked, {
        who.name: f"left out by --peers {peers}" for who in measure.contestants if who not in asked
    }


def _contest(measure: Measure, contestants: list[Contestant], options: argparse.Namespace) -> Found:
    if measure.is_solving:
        return solve_all(measure, contestants, seeds=options.seeds, quick=options.quick)
    return compare_all(measure, contestants, rounds=options.rounds, quick=options.quick)


def _all_gates(
    measure: Measure, found: Found, options: argparse.Namespace, gates: list[Gate]
) -> Gate:
    """What the figures of this measure depend on: its own learning, or all that was learned in
    this run."""
    if measure.is_solving:
        gates.append(learning_gate(measure.name, found))
        return gates[-1]
    gates.extend([] if gates else [_gate(options)])
    return all_of(*((one.says, one.passed) for one in gates))


def _shortfalls(options: argparse.Namespace, used: float | None) -> list[str]:
    """What the reader of a full run must know: too few rounds, and who else was busy."""
    found = []
    if not options.quick and (options.seeds < 10 or options.rounds < 5):
        found.append(
            f"{options.seeds} seeds and {options.rounds} rounds; a figure wants 10 and 5 or more"
        )
    if used is not None and used > guard.MAX_LOAD:
        found.append(f"other processes kept {used} cores busy while this was measured")
    return found


def _told(who: Contestant, found: Found) -> dict[str, Any]:
    return {
        "module": who.module,
        "threads": found.threads[who.name],
        "settings": who.settings,
        "versions": found.versions.get(who.name, {}),
    }


def _gate(options: argparse.Namespace) -> Gate:
    """The learning gate of this commit, where no measure before has trained anything."""
    print("Learning gate: CartPole-v1, DQN, ours", flush=True)
    measure = MEASURES["solve-dqn"]
    with on_cores(measure.cores):
        found = solve_all(
            measure, measure.contestants[:1], seeds=options.seeds, quick=options.quick
        )
    return learning_gate(measure.name, found)


def _rows(measure: Measure, found: Found, gate: Gate) -> list[dict[str, Any]]:
    """Each row with everybody's values, and how many times better each of ours is than each
    peer."""
    right = all_of(
        ("every contestant did the work right", not found.failed), (gate.says, gate.passed)
    )
    rows = []
    for row, values in found.values.items():
        ours = [who.name for who in measure.contestants if who.is_ours and who.name in values]
        ratios = [
            _ratio(measure, row, name, peer, values, is_void=not right.passed)
            for name in ours
            for peer in values
            if peer not in ours
        ]
        told = {who: [_finite(value) for value in measured] for who, measured in values.items()}
        rows.append({"name": row, "unit": measure.unit, "values": told, "ratios": ratios})
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
    wanted = [
        goal.times
        for goal in measure.goals
        if (goal.row, goal.peer) == (row, peer) and ours == OURS
    ]
    goal = wanted[0] if wanted else None
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
