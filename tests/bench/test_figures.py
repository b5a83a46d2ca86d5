"""Figures: percentiles that were measured, and rates with their range."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.figures import Percentiles, Rate, percentiles, rate
from understudy.core.errors import ConfigError

samples = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=200)


@given(samples)
def test_percentiles_are_the_ones_of_a_sorted_list(sample: list[float]) -> None:
    found = percentiles(sample)
    ordered = sorted(sample)

    def nearest(q: float) -> float:
        return ordered[max(0, math.ceil(q * len(ordered) - 1e-9) - 1)]

    assert found == Percentiles(
        len(sample), nearest(0.5), nearest(0.99), nearest(0.9999), ordered[-1]
    )


def test_a_tail_shows_only_in_a_sample_that_is_large_enough() -> None:
    few = np.ones(100)
    many = np.ones(20_000)
    few[0] = many[:3] = 9
    assert percentiles(few) == Percentiles(100, 1, 1, 9, 9)
    assert percentiles(many) == Percentiles(20_000, 1, 1, 9, 9)
    many[2] = 1
    assert percentiles(many).p9999 == 1


@given(samples)
def test_a_rate_is_within_its_range(sample: list[float]) -> None:
    found = rate(sample)
    assert found.low == min(sample)
    assert found.high == max(sample)
    assert found.low <= found.median <= found.high
    assert rate([3, 1, 2]) == Rate(2, 1, 3)


@pytest.mark.parametrize("sample", [[], [float("nan")], [1.0, float("inf")]])
def test_an_empty_or_non_finite_sample_is_rejected(sample: list[float]) -> None:
    for figure in (percentiles, rate):
        with pytest.raises(ConfigError):
            figure(sample)
