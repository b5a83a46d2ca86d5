"""Figures: percentiles that were measured, rates with their range, shares with a sound interval."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.core.errors import ConfigError
from understudy.core.statistics import Percentiles, Rate, bootstrap, iqm, mean, percentiles, rate, share

samples = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=200)


@given(samples)
def test_percentiles_are_the_ones_of_a_sorted_list(sample: list[float]) -> None:
    found, ordered = percentiles(sample), sorted(sample)

    def nearest(q: float) -> float:
        return ordered[max(0, math.ceil(q * len(ordered) - 1e-9) - 1)]

    assert found == Percentiles(len(sample), nearest(0.5), nearest(0.99), nearest(0.9999), ordered[-1])


def test_a_tail_shows_only_in_a_sample_that_is_large_enough() -> None:
    few, many = np.ones(100), np.ones(20_000)
    few[0] = many[:3] = 9
    assert percentiles(few) == Percentiles(100, 1, 1, 9, 9)
    assert percentiles(many) == Percentiles(20_000, 1, 1, 9, 9)
    many[2] = 1
    assert percentiles(many).p9999 == 1


@given(samples)
def test_a_rate_lies_within_its_range(sample: list[float]) -> None:
    found = rate(sample)
    assert found.low == min(sample)
    assert found.high == max(sample)
    assert found.low <= found.median <= found.high
    assert rate([3, 1, 2]) == Rate(2, 1, 3)


@given(st.integers(1, 10_000).flatmap(lambda whole: st.tuples(st.integers(0, whole), st.just(whole))))
def test_a_share_lies_within_its_interval(case: tuple[int, int]) -> None:
    found = share(*case)
    assert 0 <= found.low <= found.share <= found.high <= 1
    assert found.high - found.low < 1
    wider = share(case[0] * 4, case[1] * 4)
    assert wider.high - wider.low <= found.high - found.low


def test_known_shares() -> None:
    # Wilson's interval for 8 of 10, as printed in any table: 0.490 to 0.943.
    assert (share(8, 10).low, share(8, 10).high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert share(0, 10).low == 0
    assert share(10, 10).high == 1


@pytest.mark.parametrize("sample", [[], [float("nan")], [1.0, float("inf")]])
def test_a_sample_that_says_nothing_is_refused(sample: list[float]) -> None:
    for figure in (percentiles, rate):
        with pytest.raises(ConfigError):
            figure(sample)


@pytest.mark.parametrize(("part", "whole"), [(1, 0), (-1, 2), (3, 2), (0, 0)])
def test_a_share_of_nothing_is_refused(part: int, whole: int) -> None:
    with pytest.raises(ConfigError):
        share(part, whole)


def test_the_interquartile_mean_is_the_mean_of_the_middle_half() -> None:
    assert iqm([1, 2, 3, 1000]) == 2.5
    assert iqm([5.0]) == 5.0
    assert iqm([0, 0, 1, 2, 3, 4, 90, 90]) == pytest.approx(2.5)


def test_intervals_hold_the_mean_and_narrow_with_more_values() -> None:
    rng = np.random.default_rng(3)
    few, many = mean(rng.normal(10, 2, 20)), mean(rng.normal(10, 2, 2_000))
    for one in (few, many):
        assert one.low is not None
        assert one.high is not None
        assert one.low < one.value < one.high
    assert many.high - many.low < (few.high - few.low) / 3  # type: ignore[operator]


def test_below_five_there_is_no_interval() -> None:
    assert mean([1.0, 2.0]).low is None
    assert bootstrap([[1.0, 2.0], [3.0]], iqm).high is None


def test_a_bootstrap_over_groups_is_wider_than_one_over_their_values() -> None:
    groups = [[value] * 50 for value in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)]
    over_groups, over_values = bootstrap(groups, iqm), mean([value for group in groups for value in group])
    assert over_groups.high - over_groups.low > 2 * (over_values.high - over_values.low)  # type: ignore[operator]
