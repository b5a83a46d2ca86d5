"""Learning over seeds: every task of `bench/tasks.py` ten times, with intervals.

Run as `python bench/learning.py [--seeds N] [--only TEXT]`; writes bench/results/learning.json and
prints the table. A task is learned if at least 9 of 10 seeds reach its goal. Speed is not measured
here, so the load does not matter.
"""

import argparse
import json
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.machine import commit, machine  # noqa: E402
from bench.tasks import TASKS, Task  # noqa: E402
from understudy.core.statistics import bootstrap, iqm  # noqa: E402

ENOUGH = 0.9


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10, help="runs of each task")
    parser.add_argument("--only", default="", help="tasks whose name contains this text")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "learning.json")
    arguments = parser.parse_args()
    tasks = [task for task in TASKS if arguments.only in task.name]
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("learning", total=len(tasks) * arguments.seeds)
        rows = []
        for task in tasks:
            runs = []
            for seed in range(arguments.seeds):
                progress.update(bar, description=f"{task.name}, seed {seed}")
                runs.append(_run(task, seed))
                progress.advance(bar)
            rows.append(_row(task, runs))
    result = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": commit(),
        "machine": machine(),
        "tasks": rows,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    _show(rows)
    return 0 if all(row["learned"] for row in rows) else 1


def _run(task: Task, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = task.train(Path(folder), seed)
    names = ("solved", "return_mean", "env_steps", "updates", "train_s", "seed")
    return {name: result[name] for name in names}


def _row(task: Task, runs: list[dict[str, Any]]) -> dict[str, Any]:
    # A run without evaluation has no return: it counts as not solved, and is reported.
    judged = [run for run in runs if run["return_mean"] is not None]
    estimate = bootstrap([[run["return_mean"]] for run in judged], iqm) if judged else None
    solved = sum(run["solved"] for run in judged)
    return {
        "task": task.name,
        "goal": task.goal,
        "is_share_of_player": task.store is not None,
        "solved": solved,
        "seeds": len(runs),
        "judged": len(judged),
        "learned": solved >= ENOUGH * len(runs),
        "iqm": estimate and estimate.value,
        "low": estimate and estimate.low,
        "high": estimate and estimate.high,
        "median_env_steps": float(np.median([run["env_steps"] for run in runs])),
        "median_updates": float(np.median([run["updates"] for run in runs])),
        "runs": runs,
    }


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table(
        "task", "goal", "solved", "IQM of returns", "95 % interval", "env steps", "updates"
    )
    for row in rows:
        interval = "" if row["low"] is None else f"{row['low']:.1f} to {row['high']:.1f}"
        goal = (
            f"{row['goal']:.0%} of the player" if row["is_share_of_player"] else f"{row['goal']:g}"
        )
        unjudged = row["seeds"] - row["judged"]
        solved = f"{row['solved']} of {row['seeds']}" + (
            f", {unjudged} without evaluation" if unjudged else ""
        )
        table.add_row(
            row["task"],
            goal,
            solved,
            "" if row["iqm"] is None else f"{row['iqm']:.1f}",
            interval,
            f"{row['median_env_steps']:,.0f}",
            f"{row['median_updates']:,.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    raise SystemExit(main())
