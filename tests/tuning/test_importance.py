"""The importance of settings, against the same measure in plain Python."""

import statistics
from collections.abc import Sequence

import numpy as np
import pytest

from understudy.tuning.importance import MIN_TRIALS, bins_of, importances


def oracle(groups: Sequence[object], metric: Sequence[float]) -> float:
    """Epsilon squared of the ranks, with loops."""
    ranks = [
        sum(other < value for other in metric) + (sum(other == value for other in metric) - 1) / 2
        for value in metric
    ]
    kinds = sorted(set(map(repr, groups)))
    mean = statistics.fmean(ranks)
    total = sum((rank - mean) ** 2 for rank in ranks)
    if total == 0 or not 1 < len(kinds) < len(ranks):
        return 0.0
    between = 0.0
    for kind in kinds:
        own = [rank for rank, group in zip(ranks, groups, strict=True) if repr(group) == kind]
        between += len(own) * (statistics.fmean(own) - mean) ** 2
    within = (total - between) / (len(ranks) - len(kinds))
    return max(0.0, (between - (len(kinds) - 1) * within) / total)


@pytest.mark.parametrize("seed", range(20))
def test_the_share_is_that_of_the_plain_computation(seed: int):
    rng = np.random.default_rng(seed)
    n_trials = int(rng.integers(MIN_TRIALS, 80))
    columns = {
        "choice": rng.choice(["a", "b", "1", ""], n_trials).tolist(),
        "mixed": [[1, 1.0, True, None, [2]][place] for place in rng.integers(5, size=n_trials)],
        "few": rng.integers(1, 3, n_trials).tolist(),
        "many": rng.random(n_trials).tolist(),
        "alone": [7] * n_trials,
    }
    metric = rng.integers(0, 12, n_trials) + (np.array(columns["many"]) > 0.7) * 5.0
    found = importances(columns, metric.tolist(), rng=rng)
    assert [each.share for each in found] == sorted((each.share for each in found), reverse=True)
    for name, share, chance in found:
        column = columns[name]
        groups = column if name in ("choice", "mixed") else bins_of(column).tolist()
        assert share == pytest.approx(oracle(groups, metric.tolist()), abs=1e-12)
        assert 0.0 <= chance <= 1.0


def test_the_deciding_setting_is_first_and_one_without_effect_is_within_chance():
    rng = np.random.default_rng(0)
    within = 0
    for _ in range(40):
        columns = {name: rng.random(100).tolist() for name in ("decides", "nothing")}
        metric = -((np.array(columns["decides"]) - 0.4) ** 2) + 0.02 * rng.normal(size=100)
        first, second = importances(columns, metric.tolist(), rng=rng)
        assert first.name == "decides"
        assert first.share > 0.7 > first.chance
        within += second.share <= second.chance
    assert 34 <= within <= 40  # 38 are expected


def test_scales_and_one_diverged_trial_change_nothing():
    rng = np.random.default_rng(1)
    x = rng.uniform(-5, -1, 60)
    metric = x + rng.normal(size=60)
    plain = importances({"x": x.tolist()}, metric.tolist(), rng=np.random.default_rng(0))
    metric[metric.argmin()] = -1e300
    logarithmic = importances(
        {"x": (10**x).tolist()}, metric.tolist(), rng=np.random.default_rng(0)
    )
    assert logarithmic == plain


def test_too_few_trials_and_equal_metrics_have_no_importance():
    rng = np.random.default_rng(2)
    assert importances({"x": [1, 2]}, [1.0, 2.0], rng=rng) == []
    (same,) = importances({"x": list(range(20))}, [3.0] * 20, rng=rng)
    assert (same.share, same.chance) == (0.0, 0.0)


def test_numbers_are_divided_by_quantiles_and_other_values_by_equality():
    counts = np.bincount(bins_of(np.random.default_rng(3).lognormal(size=800).tolist()))
    assert counts.tolist() == [100] * 8
    assert bins_of([32, 64, 32, 128] * 10).tolist() == [0, 1, 0, 2] * 10
    assert len(set(bins_of([1, 1.0, True, "1"] * 5).tolist())) == 4
    for side in (-1.0, 1.0):
        mostly_zero = bins_of([0.0] * 90 + [side * number for number in range(1, 11)])
        assert sorted(np.bincount(mostly_zero).tolist()) == [10, 90]
