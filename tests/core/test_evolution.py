"""Which changes of a game's description keep its old rows readable, and that reading keeps every value."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.core.errors import SpecError
from understudy.core.evolution import Evolution, compare, project
from understudy.core.game import GameSpec, game_spec
from understudy.core.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space
from understudy.core.tensors import DTYPES

F32, F64, U8, I16, I32, I64 = (DTYPES[name] for name in ("F32", "F64", "U8", "I16", "I32", "I64"))


def spec(obs: Any = 4, actions: Any = 3, **more: Any) -> GameSpec:
    return game_spec("rally", obs=obs, actions=actions, **more)


def kinds(evolution: Evolution) -> dict[str, str]:
    """What became of each column that is not the same."""
    return {change.column: change.kind for change in evolution.changes if change.kind != "same"}


TABLE: list[tuple[str, GameSpec, GameSpec, dict[str, str]]] = [
    ("nothing changed", spec(), spec(), {}),
    ("episode limit", spec(max_episode_steps=9), spec(max_episode_steps=5), {}),
    ("float wider", spec(Box((4,), F32)), spec(Box((4,), F64)), {"obs": "widened"}),
    ("float narrower", spec(Box((4,), F64)), spec(Box((4,), F32)), {"obs": "incompatible"}),
    ("whole wider", spec(Box((4,), U8)), spec(Box((4,), I16)), {"obs": "widened"}),
    ("unsigned to signed of one width", spec(Box((4,), U8)), spec(Box((4,), DTYPES["I8"])), {"obs": "incompatible"}),
    ("whole to float, exact", spec(Box((4,), U8)), spec(Box((4,), F32)), {"obs": "incompatible"}),
    ("whole to float that rounds", spec(Box((4,), I64)), spec(Box((4,), F64)), {"obs": "incompatible"}),
    ("shape", spec(4), spec(5), {"obs": "incompatible"}),
    ("same size, other shape", spec((2, 2)), spec(4), {"obs": "incompatible"}),
    ("bounds wider", spec(Box((2,), F32, -1, 1)), spec(Box((2,), F32, (-1, -2), None)), {"obs": "widened"}),
    ("bounds narrower", spec(Box((2,), F32, -1, 1)), spec(Box((2,), F32, -1, (1, 0.5))), {"obs": "incompatible"}),
    ("bounds where there were none", spec(Box((2,), F32)), spec(Box((2,), F32, -1, 1)), {"obs": "incompatible"}),
    ("byte image with its bounds", spec(Box((2,), U8)), spec(Box((2,), I16, 0, 255)), {"obs": "widened"}),
    ("byte image cut off", spec(Box((2,), U8)), spec(Box((2,), I16, 0, 254)), {"obs": "incompatible"}),
    (
        "bounds beyond float64",
        spec(Box((1,), I64, 0, 2**53 + 1)),
        spec(Box((1,), I64, 0, 2**53)),
        {"obs": "incompatible"},
    ),
    ("more actions", spec(actions=3), spec(actions=4), {"action": "widened"}),
    ("fewer actions", spec(actions=3), spec(actions=2), {"action": "incompatible"}),
    ("other start", spec(actions=Discrete(3)), spec(actions=Discrete(3, 1)), {"action": "incompatible"}),
    ("action becomes continuous", spec(actions=3), spec(actions=Box((), F32)), {"action": "incompatible"}),
    ("names given later", spec(actions=2), spec(actions=["up", "down"]), {}),
    ("a name appended", spec(actions=["up", "down"]), spec(actions=["up", "down", "stay"]), {"action": "widened"}),
    ("names reordered", spec(actions=["up", "down"]), spec(actions=["down", "up"]), {"action": "incompatible"}),
    ("a name put before", spec(actions=["up"]), spec(actions=["stay", "up"]), {"action": "incompatible"}),
    ("observation renamed", spec(["x", "y"]), spec(["y", "x"]), {"obs": "incompatible"}),
    (
        "counts grow",
        spec(actions=MultiDiscrete((2, 3), (2,))),
        spec(actions=MultiDiscrete((2, 4), (2,))),
        {"action": "widened"},
    ),
    (
        "a count shrinks",
        spec(actions=MultiDiscrete((2, 3), (2,))),
        spec(actions=MultiDiscrete((3, 2), (2,))),
        {"action": "incompatible"},
    ),
    ("switches wider", spec(MultiBinary((3,))), spec(MultiBinary((3,), I32)), {"obs": "widened"}),
    ("part added", spec({"a": Box((2,), F32)}), spec({"a": Box((2,), F32), "b": Box((), F32)}), {"obs.b": "added"}),
    (
        "part added that has no zero",
        spec({"a": Box((2,), F32)}),
        spec({"a": Box((2,), F32), "b": Box((), F32, 1, 2)}),
        {"obs.b": "incompatible"},
    ),
    ("part dropped", spec({"a": Box((2,), F32), "b": Box((), F32)}), spec({"a": Box((2,), F32)}), {"obs.b": "dropped"}),
    (
        "nothing left",
        spec({"a": Box((2,), F32)}),
        spec({"b": Box((2,), F32)}),
        {"obs.a": "dropped", "obs.b": "incompatible"},
    ),
    ("masks added", spec(), spec(has_legal=True), {"legal": "added"}),
    ("masks dropped", spec(has_legal=True), spec(), {"legal": "dropped"}),
    ("masks kept", spec(has_legal=True), spec(has_legal=True), {}),
    (
        "masks grow",
        spec(actions=2, has_legal=True),
        spec(actions=4, has_legal=True),
        {"action": "widened", "legal": "widened"},
    ),
]


@pytest.mark.parametrize(("old", "new", "want"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_each_change_has_its_kind(old: GameSpec, new: GameSpec, want: dict[str, str]) -> None:
    found = compare(old, new)
    assert kinds(found) == want
    assert found.readable == ("incompatible" not in want.values())
    assert all(change.detail for change in found.changes if change.kind != "same")


def test_specs_of_two_games_are_not_compared() -> None:
    with pytest.raises(SpecError, match="same game"):
        compare(spec(), game_spec("chess", obs=4, actions=3))


def test_an_unreadable_change_says_what_got_wanted_and_next() -> None:
    evolution = compare(spec(Box((4,), F64)), spec(Box((4,), F32)))
    with pytest.raises(SpecError) as caught:
        project({"row": np.zeros(1, np.uint8)}, evolution)
    for part in ("rally", "obs: F64 became F32", "only a wider type", "undo the change"):
        assert part in str(caught.value)


def rows(spec: GameSpec, n: int = 3, **more: Any) -> dict[str, Any]:
    columns = {**spec.obs_columns, **spec.action_columns}
    made = {name: np.ones((n, *space.shape), space.dtype) for name, space in columns.items()}
    return made | {"row": np.zeros(n, np.uint8), "reward": np.arange(n, dtype=np.float32)} | more


def test_added_parts_are_zeros_and_dropped_ones_are_gone() -> None:
    old = spec({"a": Box((2,), F32), "b": Box((), F32)}, actions={"x": Discrete(2), "y": Discrete(2)})
    new = spec({"a": Box((2,), F64), "c": Box((2, 2), U8)}, actions={"x": Discrete(2)})
    found = project(rows(old) | {"raw_action.y": np.ones(3, np.float32)}, compare(old, new))
    assert found.keys() == {"obs.a", "obs.c", "action.x", "row", "reward"}
    assert found["obs.a"].dtype == F64
    assert (found["obs.a"] == 1).all()
    assert found["obs.c"].shape == (3, 2, 2)
    assert not found["obs.c"].any()


def test_masks_say_that_new_actions_were_not_legal() -> None:
    old, new = spec(actions=2, has_legal=True), spec(actions=3, has_legal=True)
    legal = np.array([[True, False], [True, True], [False, True]])
    assert project(rows(old, legal=legal), compare(old, new))["legal"].tolist() == [
        [True, False, False], [True, True, False], [False, True, False],
    ]  # fmt: skip
    unmasked = spec(actions=2)
    assert project(rows(unmasked), compare(unmasked, new))["legal"].tolist() == [[True, True, False]] * 3
    assert "legal" not in project(rows(old, legal=legal), compare(old, unmasked))


def test_a_column_that_should_be_there_is_not_made_up() -> None:
    old = spec()
    columns = rows(old)
    del columns["obs"]
    with pytest.raises(KeyError, match="obs"):
        project(columns, compare(old, old))


@st.composite
def widenings(draw: st.DrawFn) -> tuple[Space, Space, Any]:
    """A space, one that may replace it or not, and rows of the first."""
    names = st.sampled_from(["U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "F32", "F64"])
    old, new = DTYPES[draw(names)], DTYPES[draw(names)]
    kind = draw(st.sampled_from(["box", "discrete"]))
    n = draw(st.integers(1, 4))
    if kind == "discrete" and "f" not in (old.kind, new.kind):
        count = draw(st.integers(1, 100))
        values = draw(st.lists(st.integers(0, count - 1), min_size=n, max_size=n))
        return Discrete(count, 0, old), Discrete(draw(st.integers(1, 120)), 0, new), np.array(values, old)
    if old.kind == "f":
        numbers: Any = st.floats(allow_nan=False, allow_infinity=False, width=8 * old.itemsize)  # type: ignore[arg-type]
    else:
        info = np.iinfo(old)
        numbers = st.integers(int(info.min), int(info.max))
    return (
        Box((2,), old),
        Box((2,), new),
        np.array(draw(st.lists(st.tuples(numbers, numbers), min_size=n, max_size=n)), old),
    )


@given(widenings())
def test_projecting_keeps_every_value(case: tuple[Space, Space, Any]) -> None:
    old_space, new_space, values = case
    old, new = spec(old_space), spec(new_space)
    evolution = compare(old, new)
    columns = rows(old, len(values), obs=values)
    if not evolution.readable:
        with pytest.raises(SpecError):
            project(columns, evolution)
        return
    found = project(columns, evolution)["obs"]
    assert found.dtype == new_space.dtype
    assert found.tolist() == values.tolist()
    assert new_space.holds(found).all()
    assert project(columns, compare(old, old))["obs"] is values
