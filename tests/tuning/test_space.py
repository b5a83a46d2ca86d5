"""Space: inclusive intervals, equal shares, grids, positions in the unit cube, and JSON."""

import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.core.errors import ConfigError
from understudy.tuning.space import Choice, Interval, Space, read_space

SPACE = Space(
    {
        "iterations": Interval(low=1000, high=4000, is_integer=True),
        "rate": Interval(low=1e-4, high=1e-2, scale="log"),
        "batch": Choice([32, 64]),
        "discount": Interval(low=0.9, high=1.0, step=0.05),
    }
)


def test_integers_are_inclusive_at_both_ends_and_equally_likely():
    interval = Interval(low=3, high=6, is_integer=True)
    rng = np.random.default_rng(0)
    drawn = Counter(Space({"n": interval}).sample(rng)["n"] for _ in range(8_000))
    assert sorted(drawn) == [3, 4, 5, 6]
    # Chi-square with 3 degrees of freedom; 16.3 is exceeded once in a thousand.
    assert sum((count - 2_000) ** 2 / 2_000 for count in drawn.values()) < 16.3
    assert all(type(value) is int for value in drawn)


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_the_ends_of_the_unit_interval_are_the_ends_of_an_interval(scale):
    for is_integer in (False, True):
        interval = Interval(low=2, high=50, is_integer=is_integer, scale=scale)
        assert interval.at(0.0) == pytest.approx(2)
        assert interval.at(math.nextafter(1, 0)) == pytest.approx(50)
        assert interval.contains(interval.at(1.0))


def test_a_log_scale_has_as_many_values_in_each_decade():
    interval = Interval(low=1e-4, high=1e-2, scale="log")
    values = [interval.at(unit) for unit in np.linspace(0, 1, 1_001)]
    assert sum(value < 1e-3 for value in values) == pytest.approx(500, abs=1)


def test_steps_are_clean_numbers_and_the_last_one_may_miss_the_end():
    tenths = Interval(low=0.1, high=0.95, step=0.1)
    assert tenths.axis(0) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    assert tenths.size == 9
    assert all(map(tenths.contains, tenths.axis(0)))
    assert not tenths.contains(0.25)
    evens = Interval(low=2, high=8, is_integer=True, step=2)
    assert {evens.at(unit) for unit in np.linspace(0, 1, 50)} == {2, 4, 6, 8}


def test_a_grid_has_all_combinations_and_the_last_dimension_changes_fastest():
    space = Space({"a": Choice(["x", "y"]), "b": Interval(low=1, high=3, is_integer=True, step=1)})
    points = list(space.grid())
    assert points == [{"a": a, "b": b} for a in "xy" for b in (1, 2, 3)]
    assert space.size == 6
    assert SPACE.size is None


def test_a_grid_of_an_interval_needs_a_step_or_a_number_of_points():
    with pytest.raises(ConfigError, match=r"iterations: .* needs a step or a number of points"):
        SPACE.grid()
    points = list(SPACE.grid(3))
    assert len(points) == 3 * 3 * 2 * 3
    assert sorted({point["iterations"] for point in points}) == [1000, 2500, 4000]
    rates = sorted({point["rate"] for point in points})
    assert rates == pytest.approx([1e-4, 1e-3, 1e-2])
    assert all(map(SPACE.contains, points))
    one = Space({"rate": Interval(low=1e-4, high=1e-2, scale="log")})
    assert next(one.grid(1))["rate"] == pytest.approx(1e-3)


def test_contains_distinguishes_types_names_and_bounds():
    point = {"iterations": 1000, "rate": 1e-3, "batch": 32, "discount": 0.95}
    assert SPACE.contains(point)
    for name, value in (
        ("iterations", 1000.0), ("iterations", True), ("batch", 33), ("rate", 0.1),
        ("rate", "0.001"), ("discount", 0.94),
    ):  # fmt: skip
        assert not SPACE.contains({**point, name: value}), (name, value)
    assert not SPACE.contains({**point, "more": 1})
    assert not Choice([1]).contains(True)


@given(st.lists(st.floats(0, 1), min_size=4, max_size=4))
def test_every_position_of_the_unit_cube_is_a_point_that_survives_json(unit):
    point = SPACE.at(unit)
    assert SPACE.contains(point)
    read = read_space(json.loads(json.dumps(SPACE.to_json())))
    assert read == SPACE
    assert read.contains(json.loads(json.dumps(point)))
    assert read.at(unit) == point


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(0, 1e308), st.floats(0, 1))
def test_values_of_huge_intervals_stay_within_their_ends(low, width, unit):
    high = min(low + width, 1.7e308)
    if high >= low:
        assert low <= Interval(low=low, high=high).at(unit) <= high


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ([], "its list is empty; give at least one value"),
        ([1, 2, 1], "its list has 1 twice"),
        ([float("nan")], "its list has nan"),
        (7, "it is 7; give a list of values, or an object with min and max"),
        ({"min": 1}, "max is missing; give both"),
        ({"min": 1, "max": 2, "stap": 1}, "it has an unknown key stap; did you mean step?"),
        ({"min": 4, "max": 1}, "its min 4 is above its max 1; exchange the two"),
        ({"min": "1", "max": 2}, "its min is '1'; give a number"),
        ({"min": 0, "max": 1, "scale": "log"}, "its scale is log, but its min is 0"),
        ({"min": 1, "max": 2, "scale": "lin"}, "its scale is 'lin'; give linear or log"),
        ({"min": 1, "max": 2, "type": "real"}, "its type is 'real'; give int or float"),
        ({"min": 1, "max": 2, "step": 0}, "its step is 0"),
        ({"min": -1e308, "max": 1e308, "step": 1}, "its step 1 is too small"),
        ({"min": 0, "max": 10**300}, "its max is .*; give a whole number of at most 2\\^53"),
        ({"min": 0, "max": 10**400}, "its max is .*; give a finite number"),
        ({"min": 0.5, "max": 10**400}, "its max is .*; give a finite number"),
        ({"min": 0, "max": float("inf")}, "its max is inf; give a finite number"),
        ({"min": 1.5, "max": 3, "type": "int"}, "its min is 1.5; give a whole number"),
    ],
)
def test_a_bad_entry_is_one_line_that_names_its_key(entry, message):
    with pytest.raises(ConfigError, match=f"^rate: {message}") as caught:
        read_space({"rate": entry})
    assert "\n" not in str(caught.value)


def test_two_integers_are_an_interval_of_integers_unless_the_setting_is_a_float():
    entry = {"x": {"min": 0, "max": 1}}
    assert read_space(entry).dimensions["x"] == Interval(low=0, high=1, is_integer=True)
    assert read_space(entry, types={"x": float}).dimensions["x"] == Interval(low=0.0, high=1.0)
    assert read_space({"x": {"min": 1e3, "max": 4e3}}, types={"x": int}).dimensions["x"] == (
        Interval(low=1000, high=4000, is_integer=True)
    )
    with pytest.raises(ConfigError, match=r"the space is empty"):
        read_space({})
