"""Trains CartPole with each engine, undisturbed and with kills, and checks what must hold.

    python bench/engines.py            about 20 minutes on two cores; writes
                                       bench/results/engines.json after each run
    python bench/engines.py --quick    one seed each; writes nothing unless --out is given

    learn    lock-step where the engine can: the return on held-out seeds of each run
    bits     the same run with each engine in lock-step, with actors killed: the same steps, updates
             and last weights
    chaos    asynchronous: every 20 rounds one of four actors is killed, and half-way the learner,
             which then resumes; every step that counts is stored once
    slow     asynchronous, with steps of 5 ms and episodes of 2,000: actors are killed in the middle
             of them, and the others' rounds continue to arrive

Every run is a process of its own, and every kill is SIGKILL. A disturbed run counts only if all
its faults happened.
"""

import argparse
import contextlib
import datetime
import functools
import hashlib
import json
import operator
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Run as a file, sys.path starts with bench/; replace it with the folder that contains bench/.
    sys.path[0] = str(ROOT)

from bench import machine  # noqa: E402
from bench.against.sleepy import Sleepy  # noqa: E402

RESULT = ROOT / "bench" / "results" / "engines.json"
SOLVED = 475.0
ACTORS = 4
ROUND_STEPS = 256
KILL_ROUNDS = 20
_STEPS = 60_000
_SLOW_STEPS = 20_480
_MAX_PAUSE_S = 2.0
"""Between two published versions of a slow run; a round takes 0.3 s."""
_BITS_SEED = 4
_DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training, and what happens to it."""

    part: str
    engine: str
    seed: int
    is_asynchronous: bool = False
    kills_actors: bool = False
    kills_learner: bool = False

    @property
    def steps(self) -> int:
        return _SLOW_STEPS if self.part == "slow" else _STEPS


@dataclass(slots=True, kw_only=True)
class Faults:
    """How often something was killed, and how often the run replaced an actor."""

    actors: int = 0
    learner: int = 0
    replaced: int = 0


def main() -> int:
    """Run every case; 0 if each run keeps what it promises."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one seed each")
    parser.add_argument("--out", type=Path, help="file for the result")
    options = parser.parse_args()
    out = options.out or (None if options.quick else RESULT)
    rows: list[dict[str, Any]] = []
    for case in cases(is_quick=options.quick):
        row = measure(case)
        row["is_equal"] = _is_equal(row, rows)
        row["is_right"] = not (row["why_not"] or row["is_equal"] is False)
        rows.append(row)
        _print(row)
        if out is not None:
            result = {
                "format": 1,
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "commit": machine.commit(),
                "machine": machine.machine(),
                "load_average": machine.load_average(),
                "rows": rows,
            }
            out.write_text(json.dumps(result, indent=1) + "\n")
    wrong = sum(not row["is_right"] for row in rows)
    print(f"{len(rows) - wrong} of {len(rows)} runs are right")
    return 1 if wrong else 0


def cases(*, is_quick: bool) -> Iterator[Case]:
    """All runs, undisturbed ones first in each part."""
    for engine in ("inline", "process"):
        for seed in range(1 if is_quick else 10):
            yield Case(part="learn", engine=engine, seed=seed)
    for engine in ("inline", "process"):
        yield Case(part="bits", engine=engine, seed=_BITS_SEED)
    yield Case(part="bits", engine="process", seed=_BITS_SEED, kills_actors=True)
    for kills_actors in (False, True):
        yield Case(
            part="slow", engine="process", seed=0, is_asynchronous=True, kills_actors=kills_actors
        )
    for seed in range(1 if is_quick else 5):
        yield Case(part="chaos", engine="process", seed=seed, is_asynchronous=True)
        yield Case(
            part="chaos",
            engine="process",
            seed=seed,
            is_asynchronous=True,
            kills_actors=True,
            kills_learner=True,
        )


def measure(case: Case) -> dict[str, Any]:
    """Run a case with its faults; `why_not` lists what does not hold."""
    faults = Faults()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="understudy-engines-") as folder:
        done = _run(case, Path(folder) / "run", faults, resume=False)
        if done is None:
            done = _run(case, Path(folder) / "run", faults, resume=True)
    assert done is not None
    needed = case.steps // (KILL_ROUNDS * ROUND_STEPS) - 1 if case.kills_actors else 0
    checks = {
        f"a return of {SOLVED:g}": case.part in ("bits", "slow") or done["return"] >= SOLVED,
        "every step stored once": done["stored"] in (None, done["env_steps"]),
        f"{needed} actors killed": faults.actors >= needed,
        "the learner killed": faults.learner == case.kills_learner,
        f"no pause of {_MAX_PAUSE_S:g} s": case.part != "slow" or done["pause_s"] < _MAX_PAUSE_S,
        # Those that were killed last may end with a learner that is killed.
        "every killed actor replaced": faults.replaced
        >= faults.actors - ACTORS * case.kills_learner,
    }
    return {
        **asdict(case),
        **asdict(faults),
        **done,
        "seconds": round(time.monotonic() - began_s, 1),
        "why_not": [name for name, holds in checks.items() if not holds],
    }


def _run(case: Case, folder: Path, faults: Faults, *, resume: bool) -> dict[str, Any] | None:
    """Run a case to its end; None if its learner was killed."""
    request = {**asdict(case), "out": str(folder), "resume": resume}
    command = [sys.executable, __file__, "child", json.dumps(request)]
    killed_at = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        watchdog = threading.Timer(_DEADLINE_S, child.kill)
        watchdog.start()
        try:
            for line in child.stdout:
                report = json.loads(line)
                if "return" in report:
                    return {name: value for name, value in report.items() if name != "steps"}
                faults.replaced += report["replaced"]
                steps = report["steps"]
                if case.kills_learner and not resume and steps >= case.steps // 2:
                    child.kill()
                    faults.learner += 1
                    return None
                if case.kills_actors and steps >= killed_at + KILL_ROUNDS * ROUND_STEPS:
                    killed_at = steps
                    pids = actor_pids(child.pid)
                    for pid in pids[faults.actors % max(1, len(pids)) :][:1]:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                            faults.actors += 1
        finally:
            watchdog.cancel()
            child.kill()
    raise RuntimeError(f"{case} ended without a result; its message is above")


def actor_pids(pid: int) -> list[int]:
    """The processes of a run's actors."""
    pids = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            with contextlib.suppress(OSError):
                title = Path(f"/proc/{child}/cmdline").read_bytes()
                if b"process_team" in title:
                    pids.append(child)
    return sorted(pids)


def _is_equal(row: dict[str, Any], earlier: list[dict[str, Any]]) -> bool | None:
    """Whether a run ended as the first run of `bits` did; None in other parts."""
    if row["part"] != "bits":
        return None
    first = next((before for before in earlier if before["part"] == "bits"), row)
    return all(row[name] == first[name] for name in ("env_steps", "updates", "sha256"))


def _print(row: dict[str, Any]) -> None:
    mode = "asynchronous" if row["is_asynchronous"] else "lock-step"
    verdict = "right" if row["is_right"] else f"WRONG: {', '.join(row['why_not']) or 'not equal'}"
    print(
        f"{row['part']:<6} {row['engine']:<8} {mode:<13} seed {row['seed']}  return "
        f"{row['return']:5.1f}  steps {row['env_steps']:>6}  kills {row['actors']:>2} + "
        f"{row['learner']}  {row['seconds']:5.1f} s  {verdict}",
        flush=True,
    )


# --- The measured process -------------------------------------------------------------------------


def train_once(request: dict[str, Any]) -> None:
    """Train as requested; print a line after each round, and the result."""
    import understudy
    from understudy import events
    from understudy.backends.local import open_view
    from understudy.training.folder import RunFolder

    replaced = 0
    published_s: list[float] = []

    def on_event(event: events.Event) -> None:
        nonlocal replaced
        replaced += isinstance(event, events.Guarded) and "was replaced" in event.what
        if isinstance(event, events.Update):
            print(json.dumps({"steps": event.env_steps, "replaced": replaced}), flush=True)
            replaced = 0
            published_s.append(time.monotonic())

    is_learn = request["part"] == "learn"
    is_slow = request["part"] == "slow"
    game: Any = functools.partial(Sleepy, 2_000, 0.0) if is_slow else "CartPole-v1"
    run = understudy.train(
        None if request["resume"] else game,
        algorithm=None if request["resume"] else "dqn",
        seed=None if request["resume"] else request["seed"],
        until=None if request["resume"] else SOLVED if is_learn else float("inf"),
        settings={}
        if request["resume"]
        else {
            "steps": 100_000 if is_learn else _SLOW_STEPS if is_slow else _STEPS,
            "horizon": 100_000,
            # An evaluation would be a pause of its own.
            **({"eval_every": 10**9} if is_slow else {}),
            "actors": ACTORS,
            "asynchronous": request["is_asynchronous"],
            "keep_history": True,
        },
        out=request["out"],
        resume=request["resume"],
        on_event=on_event,
        options=understudy.TrainOptions(
            engine=request["engine"],
            # Evaluations do not wait.
            wrapper="train:bench.against.sleepy:Slowed" if is_slow else (),
        ),
    )
    with contextlib.closing(open_view(run.folder / "store")) as view:
        items: Any = view.tail(None, max_items=10_000_000, wait_s=0.0).items
        stored = sum(item.chunk.meta.n_steps for item in items if item.chunk is not None)
    last = {
        "return": run.result["return_mean"],
        "env_steps": run.result["env_steps"],
        "updates": run.result["updates"],
        "stored": stored,
        "pause_s": round(max(map(operator.sub, published_s[1:], published_s)), 2),
        "sha256": hashlib.sha256(
            RunFolder(run.folder).policy_path("last").read_bytes()
        ).hexdigest(),
    }
    print(json.dumps(last), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        train_once(json.loads(sys.argv[2]))
    else:
        sys.exit(main())
