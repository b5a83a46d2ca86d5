"""train_seeds: several runs that differ only in their seeds, one after another."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from understudy.core.errors import ConfigError
from understudy.core.statistics import bootstrap, iqm
from understudy.training.folder import RunFolder, check_free, default_folder
from understudy.training.preset import with_study
from understudy.training.settings import algorithm_name
from understudy.training.train import Run, TrainOptions, path_from, train
from understudy.training.train_request import MAX_SEED, TrainRequest, requested_algorithm

MAX_SEEDS = 1_000


@dataclass(frozen=True, slots=True)
class Runs:
    """Finished training runs of several seeds."""

    folder: Path
    runs: Sequence[Run]
    result: Mapping[str, Any]


def train_seeds(
    game: Any,
    *,
    seeds: int,
    seed: int | None = None,
    out: Path | None = None,
    resume: bool = False,
    on_run: Callable[[Path], object] = lambda folder: None,
    options: TrainOptions | None = None,
    **arguments: Any,
) -> Runs:
    """One run per seed, counting from `seed`, in OUT/seed-S; `arguments` are passed to `train`.

    With `resume`, finished runs stay unchanged, and the others are resumed or started.
    """
    options = options or TrainOptions()
    first = seed or 0
    if not 1 <= seeds <= MAX_SEEDS or first + seeds - 1 > MAX_SEED:
        raise ConfigError(
            f"seeds is {seeds}, the first seed {first}; give the number of runs, from 1 to "
            f"{MAX_SEEDS}, and a last seed of at most {MAX_SEED}"
        )
    if options.engine == "workers" and seeds > 1:
        raise ConfigError(
            f"seeds is {seeds}, but workers leave at the end of their run and would miss the next; "
            "start each seed as a run of its own, or use engine='process'"
        )
    if game is None:
        raise ConfigError(
            "no game was given, which several seeds require even to resume them; pass a Gymnasium "
            "id, such as CartPole-v1"
        )
    if out is None and resume:
        raise ConfigError(
            "no runs to resume were given; pass their folder as out, such as runs/GAME-ALGORITHM-N"
        )
    if out is None:
        preset, config_file = with_study(options.preset, path_from(options.config))
        request = TrainRequest(
            algorithm=arguments.get("algorithm"),
            preset=preset,
            from_store=path_from(options.from_store),
            config_file=config_file,
        )
        out = default_folder(Path("runs"), str(game), algorithm_name(requested_algorithm(request)))
    if not resume:
        check_free(out)
    runs = []
    for number in range(first, first + seeds):
        folder = out / f"seed-{number}"
        on_run(folder)
        runs.append(
            train(game, seed=number, out=folder, resume=resume, options=options, **arguments)
        )
        # Only the first run's startup includes that of the process.
        options = replace(options, started_s=None)
    result = combined_result(out, [run.result for run in runs])
    RunFolder(out).write_json("summary.json", result)
    return Runs(out, runs, result)


def combined_result(out: Path, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The results of several seeds combined: total work, and IQM with interval of the returns."""
    means = [result["return_mean"] for result in results if result["return_mean"] is not None]
    estimate = bootstrap([[mean] for mean in means], iqm) if means else None
    work = (
        "episodes",
        "cut_episodes",
        "env_steps",
        "updates",
        "guarded_chunks",
        "train_s",
        "compile_s",
        "eval_s",
    )
    return {
        "solved": all(result["solved"] for result in results),
        "solved_seeds": sum(result["solved"] for result in results),
        "seeds": len(results),
        "return_mean": sum(means) / len(means) if means else None,
        "why_no_return": "" if means else results[0].get("why_no_return", ""),
        "return_iqm": estimate and estimate.value,
        "return_low": estimate and estimate.low,
        "return_high": estimate and estimate.high,
        **{name: round(sum(result.get(name, 0) for result in results), 3) for name in work},
        "startup_s": results[0]["startup_s"],
        "resumed_at_step": max(result["resumed_at_step"] for result in results),
        "env_class": results[0]["env_class"],
        "algorithm": results[0]["algorithm"],
        "game": results[0]["game"],
        "run": str(out),
        "runs": [dict(result) for result in results],
    }
