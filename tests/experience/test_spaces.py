"""Spaces: whole columns are checked at once, bounds are exact, and JSON is restored or refused."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.experience.chunks import spaces
from understudy.core.errors import SpecError
from understudy.core.tensors import DTYPES
from understudy.experience.spaces import (
    Box,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    space_from_json,
)

F32, F64, U8, I8, I32, I64, U64, BOOL = (
    DTYPES[n] for n in ("F32", "F64", "U8", "I8", "I32", "I64", "U64", "BOOL")
)
NAN = float("nan")
INF = float("inf")

HOLDS: list[tuple[Space, list[Any], list[bool]]] = [
    (Box((), F32), [0, -1e30, NAN, INF, -INF], [True, True, False, False, False]),
    (Box((), F32, -1, 1), [-1, 1, 1.0001, -1.0001, NAN], [True, True, False, False, False]),
    (Box((), F32, None, 0.1), [0.1, 0.2, -9], [True, False, True]),
    (
        Box((2,), F64, (0, -1), (1, 0)),
        [[0, 0], [1, -1], [-1, 0], [0, 1]],
        [True, True, False, False],
    ),
    (Box((), U8), [0, 255], [True, True]),
    (Box((), U8, 1, 254), [0, 1, 254, 255], [False, True, True, False]),
    (Box((), I64, 0, 2**53), [2**53, 2**53 + 1], [True, False]),
    (Box((), U64, 2**63, None), [2**63 - 1, 2**63, 2**64 - 1], [False, True, True]),
    (Box((2,), BOOL), [[True, False]], [True]),
    (Discrete(3), [-1, 0, 2, 3], [False, True, True, False]),
    (Discrete(3, -1, I8), [-2, -1, 1, 2], [False, True, True, False]),
    (Discrete(255, 1, U8), [0, 1, 255], [False, True, True]),
    (MultiDiscrete((2, 3), (2,)), [[1, 2], [2, 0], [0, 3], [-1, 0]], [True, False, False, False]),
    (MultiDiscrete((2, 2, 2, 9), (2, 2)), [[[1, 1], [1, 8]], [[1, 1], [8, 1]]], [True, False]),
    (MultiBinary((2,)), [[0, 1], [2, 0], [-1, 0]], [True, False, False]),
]


@pytest.mark.parametrize(
    ("space", "rows", "want"), HOLDS, ids=[f"{n}-{row[0]}"[:60] for n, row in enumerate(HOLDS)]
)
def test_a_space_checks_whole_columns(space: Space, rows: list[Any], want: list[bool]) -> None:
    result = space.contains(np.array(rows, space.dtype))
    assert result.tolist() == want
    assert result.dtype == np.bool_
    assert space.contains(np.zeros((0, *space.shape), space.dtype)).shape == (0,)


@given(spaces())
def test_a_space_is_restored_from_its_json(space: Space) -> None:
    text = json.dumps(space.to_json())
    restored = space_from_json(json.loads(text))
    assert restored == space
    assert json.dumps(restored.to_json()) == text


def test_equal_spaces_are_equal_for_any_form_of_arguments() -> None:
    one = Box((2,), F32, -1, 0.1)
    assert one == Box([2], np.float32, (-1.0, np.float32(-1)), [0.1, np.float32(0.1)])  # type: ignore[arg-type]
    assert json.dumps(one.to_json()) == json.dumps(
        Box((2,), np.dtype("=f4"), -1.0, float(np.float32(0.1))).to_json()
    )
    assert Box((), U8, 0, 255) == Box((), U8) == Box((), np.dtype(">u1"), np.uint8(0), None)  # type: ignore[arg-type]
    assert Box((), F32, -0.0) == Box((), F32, 0)
    assert json.dumps(Box((), F32, -0.0).to_json()) == json.dumps(Box((), F32, 0).to_json())
    assert Discrete(np.int64(3)) == Discrete(3)  # type: ignore[arg-type]


def test_whole_bounds_keep_every_digit() -> None:
    space = Box((), U64, 0, 2**64 - 2)
    assert space_from_json(json.loads(json.dumps(space.to_json()))) == space


IMPOSSIBLE: list[tuple[str, Any]] = [
    ("no number of choices", lambda: Discrete(0)),
    ("choices past the type", lambda: Discrete(300, 0, U8)),
    ("choices past int32", lambda: Discrete(2**31, 1)),
    ("start below the type", lambda: Discrete(2, -1, U8)),
    ("choices of floats", lambda: Discrete(2, 0, F32)),
    ("bounds of another length", lambda: Box((3,), F32, (0, 0), None)),
    ("low above high", lambda: Box((2,), F32, 1, -1)),
    ("low above high in one place", lambda: Box((2,), F32, (0, 2), 1)),
    ("a bound that is not a number", lambda: Box((2,), F32, NAN, None)),
    ("an infinite bound", lambda: Box((2,), F32, None, INF)),
    ("a bound past the type", lambda: Box((2,), U8, -1, None)),
    ("a bound past float32", lambda: Box((2,), F32, None, 1e300)),
    ("an empty shape part", lambda: Box((0,), F32)),
    ("seven dimensions", lambda: Box((1,) * 7, F32)),
    ("counts of another shape", lambda: MultiDiscrete((2, 2), (3,))),
    ("a count of 0", lambda: MultiDiscrete((2, 0), (2,))),
    ("counts past the type", lambda: MultiDiscrete((300,), (1,), I8)),
    ("counts of floats", lambda: MultiDiscrete((3,), (1,), F32)),
    ("switches of floats", lambda: MultiBinary((2,), F32)),
    ("switches without end", lambda: MultiBinary((2, 0))),
]


@pytest.mark.parametrize("make", [row[1] for row in IMPOSSIBLE], ids=[row[0] for row in IMPOSSIBLE])
def test_an_invalid_space_is_refused_when_created(make: Any) -> None:
    with pytest.raises(SpecError):
        make()


BOX = {"space": "box", "dtype": "F32", "shape": [2], "low": None, "high": None}
DISCRETE = {"space": "discrete", "n": 2, "start": 0, "dtype": "I32"}
MULTI = {"space": "multi_discrete", "counts": [2, 3], "shape": [2], "dtype": "I64"}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        [],
        None,
        "box",
        {**BOX, "space": "graph"},
        {**BOX, "space": None},
        {**BOX, "dtype": "C64"},
        {**BOX, "dtype": []},
        {**BOX, "shape": 2},
        {**BOX, "shape": "12"},
        {**BOX, "shape": [2.0]},
        {**BOX, "shape": ["2"]},
        {**BOX, "shape": [True]},
        {**BOX, "shape": [-2]},
        {**BOX, "low": "0"},
        {**BOX, "low": True},
        {**BOX, "low": [0]},
        {**BOX, "low": [0, "1"]},
        {**BOX, "low": [0, [1]]},
        {**BOX, "extra": 1},
        {k: v for k, v in BOX.items() if k != "high"},
        {**DISCRETE, "n": 0},
        {**DISCRETE, "n": 2.5},
        {**DISCRETE, "n": "2"},
        {**DISCRETE, "n": True},
        {**DISCRETE, "start": 0.5},
        {**DISCRETE, "start": None},
        {**DISCRETE, "n": 10**30},
        {**MULTI, "counts": 6},
        {**MULTI, "counts": [2]},
        {**MULTI, "counts": [2, "3"]},
        {**MULTI, "counts": [2, 0]},
        {**MULTI, "shape": [3]},
        {"space": "multi_binary", "shape": [0], "dtype": "I8"},
    ],
)
def test_json_that_is_not_exactly_a_space_is_refused(fields: Any) -> None:
    with pytest.raises(SpecError):
        space_from_json(fields)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda s: st.lists(s) | st.dictionaries(st.text(), s),
    )
)
def test_any_other_json_is_refused(fields: Any) -> None:
    with pytest.raises(SpecError):
        space_from_json(fields)
