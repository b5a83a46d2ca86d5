"""Values are converted only without loss; everything else is refused with its reason."""

import tracemalloc
from typing import Any

import numpy as np
import pytest

from understudy.core.errors import Refused
from understudy.core.tensors import DTYPES
from understudy.experience.game import game_spec
from understudy.experience.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from understudy.experience.writer import (
    action_writer,
    check_mask,
    obs_reader,
    obs_writer,
    raw_action_writer,
)


def written(space, value, *, action=False):
    spaces = {"obs": space, "actions": 2} if not action else {"obs": 1, "actions": space}
    spec = game_spec("x", **spaces)
    columns = [np.zeros((2, *space.shape), space.dtype)]
    (action_writer if action else obs_writer)(spec)(columns, 1, value)
    assert not columns[0][0].any()
    return columns[0][1]


F32 = DTYPES["F32"]
U8 = DTYPES["U8"]
I16 = DTYPES["I16"]


@pytest.mark.parametrize(
    ("space", "value", "expected"),
    [
        (Box((2,), F32), [1, 2.5], [1, 2.5]),
        (Box((2,), F32), np.array([1, 2], np.int64), [1, 2]),
        (Box((2,), F32), np.array([0.1, 0.2]), np.array([0.1, 0.2], np.float32)),
        (Box((2,), F32), np.array([1, 2], ">f4"), [1, 2]),
        (Box((2,), F32), np.array([1e20, -1e20], np.float32), np.array([1e20, -1e20], np.float32)),
        (Box((40,), F32), np.arange(40, dtype=np.float32), np.arange(40)),
        (Box((2, 2), F32), [[1, 2], [3, 4]], [[1, 2], [3, 4]]),
        (
            Box((2, 2), F32),
            np.asfortranarray(np.array([[1, 2], [3, 4]], np.float32)),
            [[1, 2], [3, 4]],
        ),
        (Box((), F32), 3.5, 3.5),
        (Box((2,), U8), [0, 255], [0, 255]),
        (Box((2,), U8), np.array([1.0, 2.0]), [1, 2]),
        (Box((2,), F32, 0.0, 1.0), [1.5, -0.5], [1.5, -0.5]),
        (Discrete(3, 5), 7, 7),
        (MultiBinary((2,)), [True, False], [1, 0]),
        (MultiDiscrete((2, 3), (2,)), [1, 2], [1, 2]),
    ],
)
def test_values_that_fit_are_written(space, value, expected):
    assert np.array_equal(written(space, value), np.asarray(expected))


@pytest.mark.parametrize(
    ("space", "value", "reason"),
    [
        (Box((2,), F32), [1, 2, 3], "bad_shape"),
        (Box((2,), F32), 1.0, "bad_shape"),
        (Box((2,), F32), [[1], [2, 3]], "bad_shape"),
        (Box((2,), F32), ["a", "b"], "bad_dtype"),
        (Box((2,), F32), None, "bad_dtype"),
        (Box((2,), F32), [1e39, 0], "not_finite"),
        (Box((2,), F32), np.array([3e38, -3e38], np.float32), "not_finite"),
        (Box((40,), F32), np.full(40, 1e30, np.float32), "not_finite"),
        (Box((1,), DTYPES["F64"]), [1.1e20], "not_finite"),
        (Box((2,), F32), np.array([np.inf, -np.inf], np.float32), "not_finite"),
        (Box((40,), F32), np.full(40, np.nan, np.float32), "not_finite"),
        (Box((2,), F32), np.array([2**24 + 1, 0]), "bad_dtype"),
        (Box((2,), U8), [256, 0], "bad_dtype"),
        (Box((2,), U8), [-1, 0], "bad_dtype"),
        (Box((2,), U8), [0.5, 0], "bad_dtype"),
        (Box((2,), I16, 1, 9), [0, 5], "not_in_space"),
        (Discrete(3, 5), 8, "not_in_space"),
        (MultiBinary((2,)), [2, 0], "not_in_space"),
    ],
)
def test_values_that_do_not_fit_are_refused(space, value, reason):
    with pytest.raises(Refused) as raised:
        written(space, value)
    assert raised.value.reason == reason


@pytest.mark.parametrize(("value", "got"), [([1, 2, 3], "3 numbers"), (1.0, "one number")])
def test_a_wrong_size_is_said_in_words(value: object, got: str):
    with pytest.raises(Refused, match=f"is {got}; this game was connected with 2 numbers"):
        written(Box((2,), F32), value)


@pytest.mark.parametrize(
    "value",
    [
        ["A" * 20_000] + [0] * 2_000,
        [0] * 2_000 + [b"A" * 20_000],
        [[0.5, 1, np.float32(2), "A" * 20_000]] * 2_000,
        tuple([[0]] * 2_000 + [["A" * 20_000]]),
    ],
    ids=["first", "last", "rows", "tuple"],
)
def test_a_text_in_a_list_is_refused_before_an_array_of_texts_is_allocated(value):
    """NumPy makes every element as wide as the longest text: 160 MB here."""
    tracemalloc.start()
    try:
        for space in (Box((2,), F32), Box((2_001,), F32), Box((2_000, 4), F32)):
            with pytest.raises(Refused, match="contains the text") as raised:
                written(space, value)
            assert raised.value.reason == "bad_dtype"
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_list_that_is_nested_too_deeply_is_refused():
    value: Any = [1]
    for _ in range(2_000):
        value = [value]
    with pytest.raises(Refused) as raised:
        written(Box((2,), F32), value)
    assert raised.value.reason == "bad_shape"


@pytest.mark.parametrize("action", [1, np.int64(1), np.uint8(1), np.array(1), True])
def test_a_discrete_action_is_any_whole_number(action):
    assert written(Discrete(3), action, action=True) == 1


@pytest.mark.parametrize(
    ("space", "action", "reason"),
    [
        (Discrete(3), 3, "not_in_space"),
        (Discrete(3), -1, "not_in_space"),
        (Discrete(3), 1.0, "bad_dtype"),
        (Discrete(3), "up", "not_in_space"),
        (Box((1,), F32, -1.0, 1.0), [1.5], "not_in_space"),
        (MultiDiscrete((2, 3), (2,)), [0, 3], "not_in_space"),
    ],
)
def test_an_action_outside_its_space_is_refused(space, action, reason):
    with pytest.raises(Refused) as raised:
        written(space, action, action=True)
    assert raised.value.reason == reason


def test_action_names_are_accepted_if_the_game_has_them():
    spec = game_spec("x", obs=1, actions=["left", "right"])
    columns = [np.zeros(1, np.int32)]
    action_writer(spec)(columns, 0, "right")
    assert columns[0][0] == 1
    with pytest.raises(Refused, match="left"):
        action_writer(spec)(columns, 0, "up")


def test_arrays_that_fit_are_not_copied():
    plain = game_spec("x", obs=3, actions=2)
    parts = game_spec("x", obs={"a": Box((3,), F32), "b": Discrete(2)}, actions=2)
    obs = np.arange(3, dtype=np.float32)
    assert obs_reader(plain)(obs)["obs"] is obs
    columns = obs_reader(parts)({"a": obs, "b": 1})
    assert columns["obs.a"] is obs
    assert columns["obs.b"].dtype == np.int32
    assert columns["obs.b"] == 1
    stacked = obs_reader(plain, stack=2)([obs, [4, 5, 6]])["obs"]
    np.testing.assert_array_equal(stacked, [[0, 1, 2], [4, 5, 6]])
    for read, value in (
        (obs_reader(plain), [1, 2]),
        (obs_reader(plain, stack=2), [obs, [np.nan] * 3]),
    ):
        with pytest.raises(Refused):
            read(value)


def test_parts_are_found_by_nested_keys_dotted_names_and_indices():
    spec = game_spec("x", obs={"a.b": Box((1,), F32), "c.0": Discrete(3)}, actions=2)
    good: list[Any] = [
        {"a": {"b": [5]}, "c": (2,)},
        {"a.b": [5], "c.0": 2},
        {"a": {"b": [5]}, "c": {0: 2}},
    ]
    bad: list[Any] = [{"a": {"b": [5]}}, {"a": 3, "c": (2,)}, [1, 2], {"a": {"b": [5]}, "c": ()}]
    for value in good:
        columns = [np.zeros((1, 1), np.float32), np.zeros(1, np.int32)]
        obs_writer(spec)(columns, 0, value)
        assert (columns[0][0, 0], columns[1][0]) == (5, 2)
    for value in bad:
        with pytest.raises(Refused, match="bad_shape"):
            obs_writer(spec)(columns, 0, value)


def test_a_raw_action_has_the_shape_but_no_bounds():
    spec = game_spec("x", obs=1, actions=Box((2,), F32, -1.0, 1.0))
    columns = [np.zeros((1, 2), np.float32)]
    raw_action_writer(spec)(columns, 0, [7.0, -7.0])
    assert columns[0].tolist() == [[7.0, -7.0]]


def test_an_action_mask_has_a_flag_for_every_action():
    mask = np.array([True, False])
    assert check_mask(mask, 2) is mask
    assert check_mask([1, 0], 2).tolist() == [True, False]
    for bad, reason in (([1], "bad_shape"), ([2, 0], "bad_dtype"), ("ab", "bad_dtype")):
        with pytest.raises(Refused, match=reason):
            check_mask(bad, 2)
