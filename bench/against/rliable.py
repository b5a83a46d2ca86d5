# mypy: disable-error-code="import-not-found"
"""rliable: a bootstrap of the IQM, and reference numbers, which a test compares with ours.

`bench/.peers/rliable/bin/python -m bench.against.rliable references > tests/arena/rliable.json`
writes them again; `python bench/score_statistics.py` installs that environment.
"""

import importlib.metadata
import json
import sys
import time
from typing import Any

import numpy as np
from rliable import library, metrics

from bench.against.link import Link, Round, serve

PACKAGES = ("rliable", "arch", "scipy", "numpy")
RESAMPLES = 2_000
THRESHOLDS = [0.0, 0.25, 0.5, 0.75, 1.0]
SHAPES = {"10x1": (10, 1), "10x5": (10, 5), "5x26": (5, 26), "ties": (10, 4)}
"""Runs and tasks; the scores to compare with have two runs fewer."""


def iqm(_: Link, request: dict[str, Any]) -> Round:
    """Each round's seconds for an interval of the IQM, and its ends under `np.random.seed(1)`."""
    scores = np.array(request["scores"])

    def figure(x: Any) -> Any:
        return np.array([metrics.aggregate_iqm(x)])

    _interval(scores, figure, 100)  # warms up

    def run() -> dict[str, Any]:
        began_s = time.perf_counter()
        began_cpu_s = time.process_time()
        _, ends = _interval(scores, figure, request["resamples"])
        return {
            "wall_s": time.perf_counter() - began_s,
            "cpu_s": time.process_time() - began_cpu_s,
            "ends": ends,
        }

    return run


def references() -> dict[str, Any]:
    """Points and interval ends of every quantity, by matrix; each under `np.random.seed(1)`."""
    cases: dict[str, Any] = {}
    for seed, (name, (runs, tasks)) in enumerate(SHAPES.items()):
        rng = np.random.RandomState(seed)
        x = rng.random_sample((runs, tasks)) * 1.5
        y = rng.random_sample((runs - 2, tasks))
        if name == "ties":
            x = np.round(x * 3) / 4
            y = np.round(y * 3) / 4
        cases[name] = {
            "x": x.tolist(),
            "y": y.tolist(),
            "figures": _interval(x, _figures),
            "figures, tasks resampled": _interval(x, _figures, task_bootstrap=True),
            "probability of improvement": _interval(
                [x, y], lambda a, b: np.array([metrics.probability_of_improvement(a, b)])
            ),
            "run-score profile": _profile(x, is_of_runs=True),
            "mean-score profile": _profile(x, is_of_runs=False),
        }
    curves = np.random.RandomState(9).random_sample((3, 3, 10))
    at_points = [
        _interval(curves, lambda x, f=figure: np.array([f(x[..., at]) for at in range(10)]))
        for figure in (metrics.aggregate_mean, metrics.aggregate_iqm)
    ]
    cases["3x3x10"] = {"x": curves.tolist(), "mean": at_points[0], "iqm": at_points[1]}
    return cases


def _figures(x: Any) -> Any:
    return np.array(
        [
            metrics.aggregate_mean(x),
            metrics.aggregate_median(x),
            metrics.aggregate_iqm(x),
            metrics.aggregate_optimality_gap(x),
        ]
    )


def _interval(scores: Any, figure: Any, resamples: int = RESAMPLES, **options: Any) -> list[Any]:
    np.random.seed(1)
    points, ends = library.get_interval_estimates({"": scores}, figure, reps=resamples, **options)
    return [points[""].tolist(), ends[""].tolist()]


def _profile(scores: Any, *, is_of_runs: bool) -> list[Any]:
    np.random.seed(1)
    shares, ends = library.create_performance_profile(
        {"": scores}, THRESHOLDS, use_score_distribution=is_of_runs, reps=RESAMPLES
    )
    return [shares[""].tolist(), ends[""].tolist()]


if __name__ == "__main__":
    if sys.argv[1:] == ["references"]:
        versions = {name: importlib.metadata.version(name) for name in PACKAGES}
        print(json.dumps({"versions": versions, "cases": references()}))
    else:
        serve(PACKAGES, {"iqm": iqm})
