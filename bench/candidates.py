"""Whether late candidates lower the champion's true return, in loops ten times the demo's length.

    python bench/candidates.py                   rally and CartPole-v1, 400 s of play, 5 seeds; one
                                                 run after the other, in more than an hour; writes
                                                 bench/results/candidates.json after each run
    python bench/candidates.py --parallel 10     ten runs at a time, on a machine of 16 cores
    python bench/candidates.py --game rally --seed 3
    python bench/candidates.py --quick           20 s of play, 50 episodes, 1 seed; writes nothing
                                                 unless --out is given

A run is the loop of `understudy demo` with its settings and embedded backends, except that it does
not end when an improvement is proven. Afterwards, all champions and the last ten candidates play
the same 1,000 episodes in the game itself; in rally, the opponent is scripted. Bots play as they do
for clients; `greedy_mean` is the mean return of their best actions, which the demo shows. A run
misses if one of these ten was promoted although its mean return is below that of the champion that
it replaced by more than 1.96 standard errors of the difference. A second call measures only what is
missing: runs of other commits are measured again unless --keep is given.
"""

import argparse
import contextlib
import itertools
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Run as a file, sys.path starts with bench/; replace it with the folder that contains bench/.
    sys.path[0] = str(ROOT)

from bench.machine import commit  # noqa: E402
from bench.players import is_lowered, print_wide  # noqa: E402
from bench.rows import kept_rows, read_rows, write_rows  # noqa: E402
from understudy.act.evaluate import evaluate  # noqa: E402
from understudy.act.vector import Envs, make_envs  # noqa: E402
from understudy.backends.data import DataFolder  # noqa: E402
from understudy.backends.deployment import open_deployment  # noqa: E402
from understudy.cli.interrupts import Interrupts  # noqa: E402
from understudy.core.errors import UnderstudyError  # noqa: E402
from understudy.core.names import game_name_of_env  # noqa: E402
from understudy.experience.chunk import RowKind  # noqa: E402
from understudy.games.rally import GAME_ID, OPPONENT  # noqa: E402
from understudy.models.catalogue import Catalogue  # noqa: E402
from understudy.nn.policy import Policy  # noqa: E402
from understudy.platform.children import (  # noqa: E402
    Child,
    end_children,
    kill_children,
    report,
    stop_with_parent,
)
from understudy.ports import Stored  # noqa: E402
from understudy.simulation.loop import Loop, LoopConfig, LoopProgress  # noqa: E402
from understudy.simulation.verify import tail_items  # noqa: E402
from understudy.stores.view import StoreView  # noqa: E402

RESULT = ROOT / "bench" / "results" / "candidates.json"
GAMES = (GAME_ID, "CartPole-v1")
SEEDS = 5
PLAY_S = 400.0
QUICK_PLAY_S = 20.0
EPISODES = 1_000
QUICK_EPISODES = 50
JUDGED = 10
"""The number of last candidates that are judged."""
_CHILD = "child"
_REPORT_EVERY_S = 0.5
_TICK_S = 0.1
_STOP_S = 30.0


class LoopRun(NamedTuple):
    """What identifies a row."""

    game: str
    seed: int
    play_s: float
    episodes: int


def main() -> int:
    """Run the command; 0 only if every run was measured and none missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--game", choices=GAMES, help="measure only this game")
    parser.add_argument("--seed", type=int, help="only this run of each game, counted from 0")
    parser.add_argument("--seconds", type=float, help=f"seconds of play; default: {PLAY_S:g}")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time; default: 1")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK_PLAY_S:g} s of play, {QUICK_EPISODES} episodes, 1 seed",
    )
    parser.add_argument("--keep", action="store_true", help="keep runs of other commits")
    parser.add_argument("--out", type=Path, help="file for the result")
    options = parser.parse_args()
    for name, lowest in (("seed", 0), ("seconds", 5), ("parallel", 1)):
        number = getattr(options, name)
        if number is not None and not number >= lowest:
            parser.error(f"--{name} is {number:g}; pass a number of at least {lowest}")
    seeds = range(1 if options.quick else SEEDS)
    if options.seed is not None:
        seeds = range(options.seed, options.seed + 1)
    play_s = options.seconds or (QUICK_PLAY_S if options.quick else PLAY_S)
    episodes = QUICK_EPISODES if options.quick else EPISODES
    games = (options.game,) if options.game else GAMES
    asked = [LoopRun(game, seed, play_s, episodes) for game in games for seed in seeds]
    for run in asked:
        loop_config(run)  # raises ConfigError before anything is measured
    out = options.out or (None if options.quick else RESULT)
    result = Result(out, read_rows(out, run_of) if out else [])
    done = {run_of(row) for row in kept_rows(result.rows, every=options.keep)}
    n_failed = _measure(
        [run for run in asked if run not in done], result, parallel=options.parallel
    )
    rows = [row for row in result.rows if run_of(row) in asked]
    _show(rows)
    if kept := [run for run in asked if run in done]:
        print(f"kept: {', '.join(_name(run) for run in kept)}")
    return 1 if n_failed or any(row["missed"] for row in rows) else 0


# --- Runs and their rows --------------------------------------------------------------------------


@dataclass
class Result:
    """All rows so far, written to a file after each new one."""

    out: Path | None
    rows: list[dict[str, Any]]

    def add(self, row: dict[str, Any]) -> None:
        others = [other for other in self.rows if run_of(other) != run_of(row)]
        self.rows = sorted([*others, row], key=lambda row: (GAMES.index(row["game"]), run_of(row)))
        if self.out is not None:
            write_rows(self.out, self.rows)


def run_of(row: Mapping[str, Any]) -> LoopRun:
    return LoopRun(row["game"], row["seed"], row["play_s"], row["episodes"])


def _name(run: LoopRun) -> str:
    return f"{run.game} seed {run.seed}"


def _measure(runs: Sequence[LoopRun], result: Result, *, parallel: int) -> int:
    """Measure runs in processes of their own; return how many failed."""
    waiting = list(runs)
    children: dict[LoopRun, tuple[Child, TaskID]] = {}
    n_failed = 0
    with (
        Interrupts(hurry=kill_children),
        # A killed run leaves roles behind that end soon, and may still write.
        tempfile.TemporaryDirectory(
            prefix="understudy-candidates-", ignore_cleanup_errors=True
        ) as scratch,
        Progress(console=Console(stderr=True)) as progress,
    ):
        try:
            while waiting or children:
                while waiting and len(children) < parallel:
                    run = waiting.pop(0)
                    words = [str(ROOT / "bench" / "candidates.py"), _CHILD, json.dumps(run)]
                    words.append(str(Path(scratch) / f"{run.game}-{run.seed}"))
                    bar = progress.add_task(_name(run), total=run.play_s)
                    children[run] = (Child(_name(run), [sys.executable, *words]), bar)
                for run, (child, bar) in list(children.items()):
                    latest = child.latest
                    if child.exit_code is None:
                        progress.update(
                            bar,
                            completed=latest.get("play_s", 0.0),
                            description=f"{_name(run)}: {latest.get('phase', '')[:60]}",
                        )
                        continue
                    child.wait(_STOP_S)
                    del children[run]
                    progress.remove_task(bar)
                    row = child.latest.get("row")
                    if row is None:
                        n_failed += 1
                        line = f"{_name(run)} failed: {child.errors.strip()}"
                    else:
                        result.add(row)
                        line = _line(row)
                    progress.console.print(line, highlight=False, markup=False)
                time.sleep(_TICK_S)
        finally:
            for child, _ in children.values():
                child.stop()
            for child, _ in children.values():
                child.wait(_STOP_S)
            end_children()
    return n_failed


def _line(row: Mapping[str, Any]) -> str:
    return (
        f"{_name(run_of(row))}: {row['n_candidates']} candidates, {row['n_promotions']} promoted, "
        f"{row['minutes']:.1f} minutes{': ' if row['missed'] else ''}{', '.join(row['missed'])}"
    )


def _show(rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(
        "game",
        title=f"Promotions among the last {JUDGED} candidates, by true return",
        title_justify="left",
    )
    headings = ("seed", "play", "candidates", "promoted", "of these late", "worst change")
    for heading in (*headings, "first bot", "last", "episodes", "lost steps"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("missed")
    for row in rows:
        means = {model["model"]: model["mean"] for model in row["models"] if "mean" in model}
        ends = [row["champions"][at] for at in (0, -1)] if row["champions"] else []
        worst = min(row["promotions"], key=lambda each: each["change"], default=None)
        table.add_row(
            row["game"],
            str(row["seed"]),
            f"{row['play_s']:g} s",
            str(row["n_candidates"]),
            str(row["n_promotions"]),
            str(len(row["promotions"])),
            "" if worst is None else f"{worst['change']:+.4g} ± {worst['interval']:.2g}",
            *([f"{means[model]:.4g}" for model in ends] or ["", ""]),
            f"{row['n_episodes']:,}",
            str(row["lost_steps"]),
            ", ".join(row["missed"]),
        )
    print_wide(table)


# --- One run --------------------------------------------------------------------------------------


def loop_config(run: LoopRun) -> LoopConfig:
    """The demo's settings, except for the length."""
    return LoopConfig(
        env_id=run.game, max_seconds=run.play_s, min_seconds=run.play_s, seed=run.seed
    )


def run_loop(run: LoopRun, *, folder: Path, show: Callable[[float, str], None]) -> dict[str, Any]:
    """Play one loop, then measure its last candidates; `show` is called with the seconds played."""
    code = commit()
    began_s = time.monotonic()
    data = DataFolder(folder / "data")

    def show_loop(look: LoopProgress) -> None:
        show(look.play_s, look.phase)

    result = Loop(data, loop_config(run), show_loop, scratch=folder / "servers").run()
    verification = result.verification
    game = str(game_name_of_env(run.game))
    registry = open_deployment(data).registry
    catalogue = registry.catalogue(game)
    champions = champions_of(catalogue)
    judged = sorted(catalogue.models)[-JUDGED:]
    is_match = run.game == GAME_ID
    models: list[dict[str, Any]] = []
    with contextlib.closing(
        make_envs(run.game, run.episodes, env_kwargs={"opponent": OPPONENT} if is_match else {})
    ) as envs:
        for number, manifest in sorted(catalogue.models.items()):
            model = {
                "model": number,
                "algorithm": manifest.lineage.algorithm,
                "verdict": catalogue.verdicts.get(number, ""),
            }
            if number in judged or number in champions:
                show(run.play_s, f"measuring model {number}")
                model |= measured(registry.policy(game, number), envs, seed=run.seed)
            models.append(model)
    show(run.play_s, "counting episodes")
    row: dict[str, Any] = {
        **run._asdict(),
        "commit": code,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "n_candidates": len(models),
        "n_judged": len(judged),
        "n_promotions": len(champions),
        "champions": champions,
        "promotions": promotions_of(champions, judged, models),
        "models": models,
        "n_episodes": _n_ended(data),
        "acked_steps": verification.ledger_steps,
        "stored_steps": verification.steps,
        "lost_steps": verification.lost_steps,
        "duplicate_steps": verification.duplicate_steps,
        "restarts": result.restarts,
        "loop_seconds": result.seconds,
        "minutes": round((time.monotonic() - began_s) / 60, 2),
    }
    return row | {"missed": misses(row)}


def champions_of(catalogue: Catalogue) -> list[int]:
    """The models that became champion, in order; one that was rolled back to is there again."""
    numbers = (alias.model_no for alias in catalogue.history if alias.model_no)
    return [number for number, _ in itertools.groupby(numbers)]


def measured(policy: Policy, envs: Envs, *, seed: int) -> dict[str, Any]:
    """The true return of a model: the same held-out seeds for all models of a run."""
    seeds = [(1 << 31) + EPISODES * seed + at for at in range(envs.num_envs)]
    returns = evaluate(policy, envs, seeds=seeds, deterministic=False).returns
    greedy = evaluate(policy, envs, seeds=seeds).returns
    return {
        "mean": round(float(returns.mean()), 4),
        "standard_error": round(float(returns.std(ddof=1) / np.sqrt(len(returns))), 4),
        "greedy_mean": round(float(greedy.mean()), 4),
    }


def promotions_of(
    champions: Sequence[int], judged: Sequence[int], models: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """What each judged model changed when it replaced a champion; the first one replaced none."""
    by_number = {model["model"]: model for model in models}
    promotions = []
    for replaced, number in itertools.pairwise(champions):
        if number in judged:
            before = by_number[replaced]
            after = by_number[number]
            error = math.hypot(before["standard_error"], after["standard_error"])
            promotions.append(
                {
                    "model": number,
                    "replaced": replaced,
                    "change": round(after["mean"] - before["mean"], 4),
                    "interval": round(1.96 * error, 4),
                    "is_lowered": is_lowered(before, after),
                }
            )
    return promotions


def misses(row: Mapping[str, Any]) -> list[str]:
    """What a run should have shown and did not."""
    missed = []
    if row["lost_steps"] or row["duplicate_steps"]:
        missed.append("steps were lost or stored twice")
    if not row["champions"]:
        missed.append("no champion")
    missed += [
        f"model {promotion['model']} lowered the champion's return"
        for promotion in row["promotions"]
        if promotion["is_lowered"]
    ]
    return missed


def _n_ended(data: DataFolder) -> int:
    """The stored episodes that ended; a serve of rally is one for each seat."""
    with StoreView(data.store) as view:
        return sum(
            int((item.chunk.columns["row"] == RowKind.FINAL).sum())
            for item in tail_items(lambda cursor: view.tail(cursor, max_items=512, wait_s=0.0))
            if isinstance(item, Stored) and item.chunk is not None
        )


def run_child(run: LoopRun, folder: Path) -> None:
    """Measure one run in this process, and report its progress and its row to the parent."""
    stop = stop_with_parent()
    due_s = 0.0

    def show(play_s: float, phase: str) -> None:
        nonlocal due_s
        if stop.is_set():
            kill_children()  # their data is not needed, and a normal end takes half a minute
            raise KeyboardInterrupt
        if time.monotonic() >= due_s:
            due_s = time.monotonic() + _REPORT_EVERY_S
            report({"play_s": play_s, "phase": phase})

    folder.mkdir(parents=True)
    try:
        report({"row": run_loop(run, folder=folder, show=show)})
    finally:
        end_children()


if __name__ == "__main__":
    try:
        if sys.argv[1:2] == [_CHILD]:
            run_child(LoopRun(*json.loads(sys.argv[2])), Path(sys.argv[3]))
        else:
            sys.exit(main())
    except UnderstudyError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
