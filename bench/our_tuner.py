"""Our side of bench/tune_quality.py: a study of fixed time in lanes, and its winner again."""

import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import tune as e1
from bench.against.link import Link, Round, serve
from understudy.tuning.result import StudyResult
from understudy.tuning.space import read_space
from understudy.tuning.study_config import SearchConfig
from understudy.tuning.trial import Values
from understudy.tuning.tune import tune

AHEAD = 96
"""Trials that are chosen before their results are known: several for each lane and program."""
HELD_OUT = 1_000_000
"""Added to the seed of a study: no search uses the seeds of the trainings of its winner."""


def search_and_train_again(_: Link, request: dict[str, Any]) -> Round:
    """Rounds of E2, with the same request and answer as those of the peers in tuners.py."""

    def run() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            # Each study compiles from scratch, and its two processes share what they compiled.
            os.environ["UNDERSTUDY_COMPILE_CACHE"] = f"{folder}/cache"
            os.environ.pop("JAX_ENABLE_COMPILATION_CACHE", None)
            result = search(Path(folder), request)
            ends = {lease.trial_no: lease.end_s for lease in result.leases}
            ended = []
            for row in result.trials:
                end_s = ends[row.trial.trial_no]
                if row.result.state == "done" and end_s is not None:
                    ended.append((end_s - request["began_s"], row.result.metrics["reward"]))
            best = result.best
            scores = [] if best is None else train_again(Path(folder), request, best.trial.values)
        return {"ended": ended, "scores": scores}

    return run


def search(folder: Path, request: dict[str, Any]) -> StudyResult:
    study = e1.study_of(folder / "search", size_of(request), seed=request["seed"])
    left_s = request["began_s"] + request["seconds"] - time.time()
    search_config = SearchConfig(lag=AHEAD, test_seeds=0)
    return tune(replace(study, max_seconds=left_s, search=search_config))


def train_again(folder: Path, request: dict[str, Any], values: Values) -> list[float]:
    """The mean return of each policy that is trained with these settings and held-out seeds."""
    study = e1.study_of(folder / "again", size_of(request), seed=HELD_OUT + request["seed"])
    config = study.trainable.config
    settings = {**config["settings"], "test_episodes": request["episodes"]}
    result = tune(
        replace(
            study,
            space=read_space({name: [value] for name, value in values.items()}),
            trainable=replace(study.trainable, config={**config, "settings": settings}),
            max_trials=request["seeds"],
        )
    )
    return [row.result.metrics["reward"] for row in result.trials if row.result.metrics]


def size_of(request: dict[str, Any]) -> e1.Size:
    return e1.Size(
        name="E2",
        trials=request["trials"],
        peer_trials=0,
        rounds=1,
        seeds=request["seeds"],
        iterations=request["iterations"],
        hidden=request["hidden"],
        batches=request["batches"],
    )


if __name__ == "__main__":
    serve(["understudy", "jax"], {"ours": search_and_train_again})
