"""Statistics of scores: bit-equal to the rliable library's, intervals that cover, clear errors."""

import json
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any, cast

import numpy as np
import pytest

from understudy.arena.statistics import (
    Floats,
    compare,
    estimate,
    iqm,
    mean,
    mean_score_profile,
    median,
    optimality_gap,
    percentile_interval,
    probability_of_improvement,
    profile,
    run_score_profile,
)
from understudy.core.errors import ConfigError
from understudy.core.statistics import Estimate
from understudy.core.statistics import iqm as fractional_iqm

REFERENCES = json.loads(Path(__file__).with_name("rliable.json").read_text())["cases"]
"""Numbers of rliable and the packages it used, by `bench/against/rliable.py`."""
MATRICES = ("10x1", "10x5", "5x26", "ties")
THRESHOLDS = [0.0, 0.25, 0.5, 0.75, 1.0]


class RliableStream:
    """Draws what rliable draws under `np.random.seed(1)`: a resample's indices after another's."""

    def __init__(self, *draws: tuple[int, tuple[int, ...]]) -> None:
        self._state = np.random.RandomState(1)
        self._draws = draws
        self._columns: list[Any] = []

    def integers(self, low: int, high: int, size: tuple[int, ...]) -> Any:
        if not self._columns:
            rows = [[self._state.randint(0, *draw) for draw in self._draws] for _ in range(size[0])]
            self._columns = [np.array(column) for column in zip(*rows, strict=True)]
        assert self._columns[0].shape == size
        return self._columns.pop(0)


def assert_no_difference(
    samples: list[Floats],
    figure: Callable[..., Floats],
    reference: list[Any],
    *,
    resample_tasks: bool = False,
) -> None:
    draws = [(len(sample), sample.shape) for sample in samples]
    if resample_tasks:
        draws.append((samples[0].shape[1], (1, samples[0].shape[1])))
    ends = percentile_interval(
        samples,
        figure,
        cast(np.random.Generator, RliableStream(*draws)),
        resamples=2_000,
        resample_tasks=resample_tasks,
    )
    points, reference_ends = map(np.array, reference)
    assert np.abs(figure(*samples) - points).max() == 0.0
    assert np.abs(ends.reshape(2, -1) - reference_ends).max() == 0.0


def figures(scores: Floats) -> Floats:
    return np.stack([f(scores) for f in (mean, median, iqm, optimality_gap)], axis=-1)


@pytest.mark.parametrize("resample_tasks", [False, True])
@pytest.mark.parametrize("name", MATRICES)
def test_figures_and_their_intervals_are_those_of_rliable(name: str, resample_tasks: bool) -> None:
    case = REFERENCES[name]
    reference = case["figures, tasks resampled" if resample_tasks else "figures"]
    assert_no_difference([np.array(case["x"])], figures, reference, resample_tasks=resample_tasks)


@pytest.mark.parametrize("name", MATRICES)
def test_the_probability_of_improvement_is_that_of_rliable(name: str) -> None:
    case = REFERENCES[name]
    samples = [np.array(case["x"]), np.array(case["y"])]
    reference = case["probability of improvement"]
    assert_no_difference(samples, probability_of_improvement, reference)


@pytest.mark.parametrize("of", [run_score_profile, mean_score_profile])
@pytest.mark.parametrize("name", MATRICES)
def test_profiles_are_those_of_rliable(name: str, of: Callable[..., Floats]) -> None:
    case = REFERENCES[name]
    reference = case["run-score profile" if of is run_score_profile else "mean-score profile"]
    assert_no_difference([np.array(case["x"])], lambda scores: of(scores, THRESHOLDS), reference)


@pytest.mark.parametrize("figure", [mean, iqm])
def test_figures_at_ten_points_of_a_curve_are_those_of_rliable(
    figure: Callable[..., Floats],
) -> None:
    """Its third axis has the points; each point of each run of each task is drawn apart."""
    case = REFERENCES["3x3x10"]

    def at_points(scores: Floats) -> Floats:
        return figure(np.moveaxis(scores.reshape(*scores.shape[:-1], 3, 10), -1, -3))

    sample = np.array(case["x"]).reshape(3, 30)
    assert_no_difference([sample], at_points, case[figure.__name__])


def test_figures_of_small_matrices_are_as_computed_by_hand() -> None:
    scores = [[0.0, 4.0, 10.0], [2.0, 6.0, 50.0]]  # means 1, 5, 30
    assert mean(scores) == 12.0
    assert median(scores) == 5.0
    assert iqm(scores) == (2 + 4 + 6 + 10) / 4
    assert optimality_gap(scores, target=8.0) == 8 - (0 + 4 + 8 + 2 + 6 + 8) / 6
    assert probability_of_improvement([1.0, 2.0, 3.0], [2.0, 0.0]) == (1 + 1.5 + 2) / 6
    assert run_score_profile(scores, [2.0, 10.0]).tolist() == [4 / 6, 1 / 6]
    assert mean_score_profile(scores, [2.0, 10.0]).tolist() == [2 / 3, 1 / 3]


def test_both_interquartile_means_agree_for_multiples_of_four() -> None:
    scores = np.random.default_rng(0).normal(size=(3, 20))
    assert iqm(scores) == pytest.approx(fractional_iqm(scores.ravel()), rel=1e-12)


def test_ten_runs_have_an_interval_five_a_warning_and_four_none() -> None:
    rng = np.random.default_rng(2)
    scores = rng.normal(size=(10, 3))
    ten, five, four = (estimate(scores[:n], iqm, rng, resamples=200) for n in (10, 5, 4))
    assert ten.low is not None
    assert ten.high is not None
    assert ten.low < ten.value < ten.high
    assert not ten.is_few
    assert five.low is not None
    assert five.is_few
    assert four == Estimate(float(iqm(scores[:4])))
    drawn = {n: profile(scores[:n], [0.0, 1.0], rng, resamples=200) for n in (10, 5, 4)}
    assert [drawn[n].is_few for n in (10, 5, 4)] == [False, True, False]
    assert drawn[5].low is not None
    assert drawn[4].low is drawn[4].high is None
    assert drawn[4].shares.tolist() == run_score_profile(scores[:4], [0.0, 1.0]).tolist()
    assert compare(scores, scores[:4], rng).low is None, "the side with fewer runs counts"
    assert compare(scores, scores[:9], rng, resamples=200).is_few


def test_better_runs_are_probably_better_and_equal_runs_undecided() -> None:
    rng = np.random.default_rng(3)
    good, other = rng.normal(2, 1, 10), rng.normal(0, 1, 12)
    better = compare(good, other, rng, resamples=2_000)
    assert better.low is not None
    assert better.low > 0.6
    assert compare(other, good, rng).value == pytest.approx(1 - better.value)
    assert compare(good, good, rng).value == 0.5


def test_resampled_tasks_widen_the_interval_of_different_tasks() -> None:
    rng = np.random.default_rng(4)
    scores = rng.normal(size=(10, 6)) / 10 + np.arange(6)
    ends = [
        percentile_interval([scores], mean, rng, resamples=500, resample_tasks=resample_tasks)
        for resample_tasks in (False, True)
    ]
    narrow, wide = (high - low for low, high in ends)
    assert wide > 5 * narrow


def test_the_same_generator_gives_the_same_interval_and_the_default_is_fifty_thousand() -> None:
    scores = np.random.default_rng(5).normal(size=(10, 5))
    first, second = (estimate(scores, iqm, np.random.default_rng(6)) for _ in range(2))
    assert first == second
    assert first == estimate(scores, iqm, np.random.default_rng(6), resamples=50_000)
    assert first != estimate(scores, iqm, np.random.default_rng(6), resamples=40_000)


def covered(
    figure: Callable[..., Floats], truth: float, *shapes: tuple[int, int], shift: float = 0.0
) -> float:
    """The share of 400 studies whose interval holds the truth; only the first sample is shifted."""
    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(400):
        samples = [rng.normal(size=shape) for shape in shapes]
        samples[0] += shift
        low, high = percentile_interval(samples, figure, rng, resamples=400)
        hits += bool(low <= truth <= high)
    return hits / 400


def test_intervals_of_ten_runs_cover_the_truth_about_95_times_in_100() -> None:
    probability = NormalDist().cdf(1 / 2**0.5)
    assert 0.9 <= covered(iqm, 3.0, (10, 1), shift=3.0) <= 0.98
    assert 0.9 <= covered(mean, 3.0, (10, 5), shift=3.0) <= 0.98
    assert (
        0.9 <= covered(probability_of_improvement, probability, (10, 3), (10, 3), shift=1.0) <= 0.98
    )


def test_intervals_of_three_runs_would_cover_far_too_little() -> None:
    assert covered(iqm, 0.0, (3, 1)) < 0.85


def test_resampling_needs_little_memory() -> None:
    scores = np.random.default_rng(8).normal(size=(100, 50))
    tracemalloc.start()
    estimate(scores, iqm, np.random.default_rng(9), resamples=1_000)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 10e6 < 1_000 * scores.nbytes


RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(iqm, []), r"scores: an array of shape \(0,\) is empty"),
        (partial(mean, [1.0, float("nan")]), "leave out failed runs"),
        (partial(median, 3.0), "a single number"),
        (partial(mean, [[1.0, 2.0], [3.0]]), "leave out runs that lack a task"),
        (partial(mean, ["good"]), "wanted are numbers"),
        (partial(estimate, [[[1.0]]], iqm, RNG), r"shape \(1, 1, 1\); wanted are \[runs, tasks\]"),
        (partial(estimate, np.empty((0, 3)), iqm, RNG), "at least one run"),
        (partial(estimate, [1.0] * 9, iqm, RNG, resamples=0), "resamples is 0"),
        (partial(compare, [[1.0, 2.0]], [[1.0]], RNG), "2 and 1 tasks; both need the same tasks"),
        (partial(profile, [1.0], [], RNG), "thresholds: an array of shape"),
        (partial(profile, [1.0], [float("inf")], RNG), "wanted are finite numbers in a list"),
    ],
)
def test_scores_that_say_nothing_are_rejected(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
