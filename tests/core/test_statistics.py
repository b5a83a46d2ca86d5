"""Estimates: interquartile means, and intervals that contain the mean."""

import numpy as np
import pytest

from understudy.core.errors import ConfigError
from understudy.core.statistics import bootstrap, iqm, mean


def test_the_interquartile_mean_is_the_mean_of_the_middle_half() -> None:
    assert iqm([1, 2, 3, 1000]) == 2.5
    assert iqm([5.0]) == 5.0
    assert iqm([0, 0, 1, 2, 3, 4, 90, 90]) == pytest.approx(2.5)


def test_intervals_contain_the_mean_and_narrow_with_more_values() -> None:
    rng = np.random.default_rng(3)
    few = mean(rng.normal(10, 2, 20))
    many = mean(rng.normal(10, 2, 2_000))
    for estimate in (few, many):
        assert estimate.low is not None
        assert estimate.high is not None
        assert estimate.low < estimate.value < estimate.high
    assert many.high - many.low < (few.high - few.low) / 3  # type: ignore[operator]


def test_with_fewer_than_five_there_is_no_interval() -> None:
    assert mean([1.0, 2.0]).low is None
    assert bootstrap([[1.0, 2.0], [3.0]], iqm).high is None


def test_a_bootstrap_over_groups_is_wider_than_one_over_their_values() -> None:
    groups = [[value] * 50 for value in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)]
    over_groups = bootstrap(groups, iqm)
    over_values = mean([value for group in groups for value in group])
    assert over_groups.high - over_groups.low > 2 * (over_values.high - over_values.low)  # type: ignore[operator]


@pytest.mark.parametrize("sample", [[], [float("nan")], [1.0, float("inf")]])
def test_an_empty_or_infinite_sample_is_refused(sample: list[float]) -> None:
    for figure in (mean, iqm):
        with pytest.raises(ConfigError):
            figure(sample)
