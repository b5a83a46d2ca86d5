"""Several runs that differ only by their seeds, one after another, and what they say together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.app.runs.algorithms import algorithm_name
from understudy.app.runs.api import train
from understudy.app.runs.folder import RunFolder, check_free, default_folder
from understudy.app.runs.train import Run
from understudy.app.runs.wanted import MAX_SEED, Wanted, wanted_algorithm
from understudy.core.errors import ConfigError
from understudy.core.statistics import bootstrap, iqm

MAX_SEEDS = 1_000


@dataclass(frozen=True, slots=True)
class Runs:
    """What trainings with several seeds came to."""

    folder: Path
    runs: Sequence[Run]
    result: Mapping[str, Any]


def train_seeds(
    game: Any, *, seeds: int, seed: int | None = None, out: Path | None = None, resume: bool = False,
    on_run: Callable[[Path], object] = lambda folder: None, **asked: Any,
) -> Runs:  # fmt: skip
    """One run for each seed from `seed` on, in OUT/seed-S; `asked` is what `train` takes.

    With `resume`, runs that have ended stay as they are, and the others go on or begin.
    """
    first = seed or 0
    if not 1 <= seeds <= MAX_SEEDS or first + seeds - 1 > MAX_SEED:
        raise ConfigError(f"seeds is {seeds}; give how many runs to make, from 1 to {MAX_SEEDS}")
    if game is None:
        raise ConfigError("which game? several seeds need it, also to go on; give a Gymnasium id, such as CartPole-v1")
    if out is None and resume:
        raise ConfigError("which runs are to be resumed? give their folder: --resume --out runs/GAME-ALGORITHM-N")
    if out is None:
        wanted = Wanted(
            algorithm=asked.get("algorithm"), preset=asked.get("preset"), from_store=asked.get("from_store"),
            config_file=asked.get("config"),
        )  # fmt: skip
        out = default_folder(Path("runs"), str(game), algorithm_name(wanted_algorithm(wanted)))
    if not resume:
        check_free(out)
    runs = []
    for number in range(first, first + seeds):
        folder = out / f"seed-{number}"
        on_run(folder)
        runs.append(train(game, seed=number, out=folder, resume=resume, **asked))
        asked.pop("began_s", None)  # only the first run had to wait for the process
    result = together(out, [run.result for run in runs])
    RunFolder(out).write_json("summary.json", result)
    return Runs(out, runs, result)


def together(out: Path, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The results of several seeds as one: sums of the work, IQM and interval of the returns over seeds."""
    means = [result["return_mean"] for result in results if result["return_mean"] is not None]
    found = bootstrap([[mean] for mean in means], iqm) if means else None
    work = ("episodes", "env_steps", "updates", "guarded_chunks", "train_s", "compile_s", "eval_s")
    return {
        "solved": all(result["solved"] for result in results), "solved_seeds": sum(one["solved"] for one in results),
        "seeds": len(results), "return_mean": sum(means) / len(means) if means else None,
        "return_iqm": found and found.value, "return_low": found and found.low, "return_high": found and found.high,
        **{name: round(sum(result.get(name, 0) for result in results), 3) for name in work},
        "startup_s": results[0]["startup_s"], "resumed_at_step": max(one["resumed_at_step"] for one in results),
        "env_class": results[0]["env_class"], "algorithm": results[0]["algorithm"], "game": results[0]["game"],
        "run": str(out), "runs": [dict(result) for result in results],
    }  # fmt: skip
