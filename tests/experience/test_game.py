"""GameSpec: from Gymnasium and without it, its JSON, its stable id, and what it refuses."""

import json
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces as gym
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.experience.chunks import chunk_with, specs
from tests.experience.trajectories import Step, rows_of
from understudy.core.errors import InvalidName, SpecError
from understudy.core.tensors import DTYPES
from understudy.experience.chunk import decode_chunk
from understudy.experience.game import (
    GameSpec,
    game_spec,
    random_action,
    spec_from_gymnasium,
    spec_from_json,
)
from understudy.experience.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space
from understudy.experience.writer import action_writer
from understudy.testing.samples import random_spec

F32 = DTYPES["F32"]


@given(specs())
def test_a_spec_is_restored_with_the_same_id(spec: GameSpec) -> None:
    restored = spec_from_json(spec.to_json())
    assert restored == spec
    assert restored.schema == spec.schema
    assert restored.to_json() == spec.to_json()
    assert spec_from_json(spec.to_json().decode()) == spec


def test_schema_ids_never_change() -> None:
    named = game_spec(
        "rally",
        obs=["x", "y"],
        actions=["up", "stay", "down"],
        has_action_mask=True,
        max_episode_steps=500,
    )
    assert named.to_json() == (
        b'{"action":{"":{"dtype":"I32","n":3,"space":"discrete","start":0}},"action_names":["up","stay","down"],'
        b'"format":1,"game":"rally","has_action_mask":true,"max_episode_steps":500,'
        b'"obs":{"":{"dtype":"F32","high":null,"low":null,"shape":[2],"space":"box"}},"obs_names":["x","y"]}'
    )
    assert named.schema == "049da82389b72d69340730fff6d82a9d1e83d40397fb5fbc6e136eb9600a4417"
    assert (
        spec_from_gymnasium(gymnasium.make("CartPole-v1")).schema
        == "77b55444770c43f3f63881dda6a26b3988d22d5974d3dc31ecc161101dbd7c3f"
    )


def test_the_order_of_parts_does_not_change_the_id() -> None:
    parts: dict[str, Space] = {"a": Box((2,), F32), "b": Discrete(3)}
    one = game_spec("rally", obs=parts, actions=2)
    two = game_spec("rally", obs=dict(reversed(parts.items())), actions=2)
    assert one.schema == two.schema
    assert list(one.obs_columns) == list(two.obs_columns) == ["obs.a", "obs.b"]


def test_cartpole_has_the_spec_of_its_gymnasium_env() -> None:
    spec = spec_from_gymnasium(gymnasium.make("CartPole-v1"))
    assert (spec.game, spec.max_episode_steps) == ("CartPole-v1", 500)
    assert spec.obs_columns["obs"].shape == (4,)
    assert spec.discrete == Discrete(2)
    assert spec_from_gymnasium(gymnasium.make_vec("CartPole-v1", 3)) == spec
    assert spec_from_gymnasium(gymnasium.make("CartPole-v1"), game="pole").game == "pole"


kinds: st.SearchStrategy[Any] = st.sampled_from(
    [np.float16, np.float32, np.float64, np.uint8, np.int16, np.int64]
)


@st.composite
def boxes(draw: st.DrawFn) -> Any:
    dtype = np.dtype(draw(kinds))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, max_side=3))
    if draw(st.booleans()) and dtype.kind == "f":
        low, high = (draw(st.sampled_from(pair)) for pair in ((-np.inf, -1.5, 0), (np.inf, 1.5, 0)))
        return gym.Box(low, high, shape, dtype.type)
    lows = draw(hnp.arrays(dtype, shape, elements=st.integers(0, 3)))
    return gym.Box(lows, (lows + draw(st.integers(0, 3))).astype(dtype), dtype=dtype.type)


leaves = (
    boxes()
    | st.builds(gym.Discrete, st.integers(1, 9), start=st.integers(-3, 3))
    | st.lists(st.integers(1, 5), min_size=1, max_size=4).map(gym.MultiDiscrete)
    | st.builds(lambda grid: gym.MultiDiscrete(np.array(grid)), st.just([[2, 3], [4, 5]]))
    | st.integers(1, 4).map(gym.MultiBinary)
    | st.just((2, 3)).map(gym.MultiBinary)
)
names = st.from_regex(r"[a-z][a-z0-9_-]{0,5}", fullmatch=True)
gym_spaces: st.SearchStrategy[Any] = st.recursive(
    leaves,
    lambda inner: (
        st.dictionaries(names, inner, min_size=1, max_size=3).map(gym.Dict)
        | st.lists(inner, min_size=1, max_size=3).map(lambda parts: gym.Tuple(tuple(parts)))
    ),
    max_leaves=5,
)


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """The leaves of a nested observation by dotted path."""
    if not isinstance(value, dict | tuple):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    leaves: dict[str, Any] = {}
    for key, part in items:
        leaves |= flat(part, f"{path}.{key}" if path else str(key))
    return leaves


@given(gym_spaces, gym_spaces)
def test_any_nested_gymnasium_space_can_be_recorded(obs: Any, action: Any) -> None:
    obs.seed(0)
    action.seed(0)
    env = SimpleNamespace(observation_space=obs, action_space=action, spec=None)
    spec = spec_from_gymnasium(env, game="rally")
    assert spec_from_json(spec.to_json()) == spec
    columns = rows_of([Step(0, 1, 0.0, 0, True, "terminated")])
    del columns["obs"]
    for head, space, parts in (("obs", obs, spec.obs), ("action", action, spec.action)):
        values = flat(space.sample())
        assert values.keys() == parts.keys()
        for path, value in values.items():
            rows = np.stack([np.asarray(value)] * 2).astype(parts[path].dtype)
            assert (rows[0] == value).all()
            assert parts[path].contains(rows).all()
            columns[f"{head}.{path}" if path else head] = rows
    chunk = chunk_with(columns, schema=spec.schema)
    assert decode_chunk(chunk.encode()) == chunk


def test_named_observations_may_be_lengths_and_shapes() -> None:
    spec = game_spec("grid", obs={"grid": (7, 7), "energy": 1, "on": Discrete(2)}, actions=4)
    floats = DTYPES["F32"]
    assert spec.obs == {"grid": Box((7, 7), floats), "energy": Box((1,), floats), "on": Discrete(2)}
    for wrong in ("seven", (7, 0), None, [7]):
        with pytest.raises(SpecError, match=r"obs\['grid'\] is .*; give a space such as Box"):
            game_spec("grid", obs={"grid": wrong}, actions=4)  # type: ignore[dict-item]


def test_a_box_may_be_bounded_in_some_elements_only() -> None:
    low = np.array([-1, -np.inf], np.float32)
    high = np.array([np.inf, 2], np.float32)
    env = SimpleNamespace(observation_space=gym.Box(low, high), action_space=gym.Discrete(2))
    box = spec_from_gymnasium(env, game="rally").obs[""]
    rows = np.array([[-1, -3e38], [3e38, 2], [-1.5, 0], [0, 2.5]], np.float32)
    assert box.contains(rows).tolist() == [True, True, False, False]


def test_flags_and_images_keep_their_type() -> None:
    parts = gym.Dict(
        {"on": gym.Box(0, 1, (3,), np.bool_), "camera": gym.Box(0, 255, (84, 84), np.uint8)}
    )
    spec = spec_from_gymnasium(
        SimpleNamespace(observation_space=parts, action_space=gym.Discrete(2)), game="rally"
    )
    assert spec.obs == {"on": Box((3,), DTYPES["BOOL"]), "camera": Box((84, 84), DTYPES["U8"])}
    assert spec_from_json(spec.to_json()) == spec


def plain(**spaces: Any) -> Any:
    return SimpleNamespace(
        observation_space=gym.Discrete(2), action_space=gym.Discrete(2), **spaces
    )


@pytest.mark.parametrize(
    "obs",
    [
        gym.Text(5),
        gym.Sequence(gym.Discrete(2)),
        gym.Graph(gym.Box(0, 1, (2,)), None),
        gym.Dict({}),
        gym.Tuple(()),
        gym.Dict({"a.b": gym.Discrete(2), "a": gym.Dict({"b": gym.Discrete(3)})}),
        gym.Dict({"": gym.Discrete(2)}),
        gym.Dict({"a b": gym.Discrete(2)}),
        gym.Dict({"../x": gym.Discrete(2)}),
        gym.Dict({"ü": gym.Discrete(2)}),
        gym.Dict({"x" * 41: gym.Discrete(2)}),
        gym.MultiDiscrete([2, 2], start=[1, 0]),
        gym.Box(0, 1, (1,) * 7),
        gym.Box(0, 1, (300, 300)),
        gym.Box(0, 1, (0,)),
        gym.Dict({"a" * 40: gym.Dict({"b" * 40: gym.Dict({"c" * 40: gym.Discrete(2)})})}),
        gym.Dict({f"k{n}": gym.Discrete(2) for n in range(300)}),
    ],
    ids=lambda space: str(space)[:40],
)
def test_spaces_that_cannot_be_recorded_are_refused(obs: Any) -> None:
    with pytest.raises(SpecError):
        spec_from_gymnasium(
            SimpleNamespace(observation_space=obs, action_space=gym.Discrete(2)), game="rally"
        )


def test_an_action_that_does_not_fit_its_column_is_refused() -> None:
    env = SimpleNamespace(observation_space=gym.Discrete(2), action_space=gym.Discrete(2**40))
    with pytest.raises(SpecError, match="I32"):
        spec_from_gymnasium(env, game="rally")


def test_an_env_without_a_name_needs_one() -> None:
    with pytest.raises(InvalidName):
        spec_from_gymnasium(plain())


WAYS: list[tuple[Any, Any, Any, Any]] = [
    (6, 3, Box((6,), F32), Discrete(3)),
    ((84, 84), ["a", "b"], Box((84, 84), F32), Discrete(2)),
    ([4], MultiBinary((2,)), Box((4,), F32), MultiBinary((2,))),
    (["x", "y"], Box((2,), F32, -1, 1), Box((2,), F32), Box((2,), F32, -1, 1)),
    (Discrete(9), MultiDiscrete((2, 3), (2,)), Discrete(9), MultiDiscrete((2, 3), (2,))),
]


@pytest.mark.parametrize(("obs", "actions", "obs_space", "action_space"), WAYS)
def test_a_game_is_described_without_gymnasium(
    obs: Any, actions: Any, obs_space: Any, action_space: Any
) -> None:
    spec = game_spec("rally", obs=obs, actions=actions)
    assert (spec.obs, spec.action) == ({"": obs_space}, {"": action_space})
    assert list(spec.obs_columns) == ["obs"]
    assert list(spec.action_columns) == ["action"]


@pytest.mark.parametrize(
    "obs", [0, -1, True, 1.5, "six", [], [0], [1.5], ["x", 1], None, {}, ["x", "x"], ["x", ""]]
)
def test_an_invalid_observation_space_is_refused(obs: Any) -> None:
    with pytest.raises(SpecError):
        game_spec("rally", obs=obs, actions=2)


@pytest.mark.parametrize(
    "actions",
    [0, -1, True, 1.5, "up", [], [1, 2], ["up", "up"], None, {}, [""], ["up", " "], 10**9],
)
def test_an_invalid_action_space_is_refused(actions: Any) -> None:
    with pytest.raises(SpecError):
        game_spec("rally", obs=4, actions=actions)


@pytest.mark.parametrize(
    "more",
    [
        {"has_action_mask": True, "actions": Box((2,), F32)},
        {"has_action_mask": "x"},
        {"has_action_mask": 1},
        {"has_action_mask": None},
        {"max_episode_steps": 0},
        {"max_episode_steps": 2.5},
        {"max_episode_steps": True},
        {"actions": {"a": Discrete(2), "": Discrete(2)}},
        {"obs": {"a/b": Discrete(2)}},
        {"obs": {"a..b": Discrete(2)}},
    ],
)
def test_a_spec_that_contradicts_itself_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        game_spec("rally", **{"obs": 4, "actions": 2, **more})


def test_names_must_match_the_spaces() -> None:
    box = {"": Box((2,), F32)}
    two = {"": Discrete(2)}
    for names in (
        {"action_names": ("a",)},
        {"action_names": ("a", "a")},
        {"obs_names": ("x",)},
        {"obs_names": ("x", "x")},
    ):
        with pytest.raises(SpecError):
            GameSpec(game="rally", obs=box, action=two, **names)  # type: ignore[arg-type]
    with pytest.raises(SpecError):
        GameSpec(game="rally", obs={"a": Discrete(2)}, action=two, obs_names=("x",))  # type: ignore[arg-type]
    with pytest.raises(InvalidName):
        game_spec("../x", obs=2, actions=2)


def test_a_row_that_is_too_large_for_a_frame_is_refused() -> None:
    assert game_spec("rally", obs=Box((245_740,), DTYPES["U8"]), actions=2).row_bytes <= 240 * 1024
    with pytest.raises(SpecError, match="smaller or narrower"):
        game_spec("rally", obs=Box((246_000,), DTYPES["U8"]), actions=2)


GOOD = json.loads(game_spec("rally", obs=["x", "y"], actions=["up", "down"]).to_json())


@pytest.mark.parametrize(
    "fields",
    [
        [],
        None,
        {},
        {**GOOD, "format": 2},
        {**GOOD, "format": "1"},
        {**GOOD, "game": "../x"},
        {**GOOD, "game": None},
        {**GOOD, "obs_names": ["x", []]},
        {**GOOD, "action": {"": {"space": []}}},
        {**GOOD, "action": {"": {"space": "x"}}},
        {**GOOD, "action": {"": {"space": "discrete", "n": "2", "start": 0, "dtype": []}}},
        {**GOOD, "action": {"": {"space": "discrete", "n": 2, "start": 0, "dtype": "F9"}}},
        {**GOOD, "obs": []},
        {**GOOD, "obs": {}},
        {**GOOD, "obs": {"": 1}},
        {**GOOD, "obs_names": "xy"},
        {**GOOD, "obs_names": [1, 2]},
        {**GOOD, "action_names": None},
        {**GOOD, "has_action_mask": 1},
        {**GOOD, "has_action_mask": "no"},
        {**GOOD, "max_episode_steps": "5"},
        {**GOOD, "max_episode_steps": 5.5},
        {**GOOD, "more": 1},
        {key: value for key, value in GOOD.items() if key != "has_action_mask"},
    ],
)
def test_json_that_is_not_exactly_a_spec_is_refused(fields: Any) -> None:
    assert spec_from_json(json.dumps(GOOD)).action_names == ("up", "down")
    with pytest.raises((SpecError, InvalidName)) as refused:
        spec_from_json(json.dumps(fields))
    assert "Error(" not in str(refused.value)


@pytest.mark.parametrize(
    "name", ["a\nb", "\x1b[31mred", "\x00", "\x7f", "\x9b2J", "\u2028", "\u202egnp"]
)
def test_names_with_control_characters_are_refused(name: str) -> None:
    for which in ("obs_names", "action_names"):
        with pytest.raises(SpecError, match="control characters") as refused:
            spec_from_json(json.dumps({**GOOD, which: ["x", name]}))
        assert name not in str(refused.value)
    assert game_spec("rally", obs=["é x", "🧑‍🚀"], actions=2).obs_names == ("é x", "🧑‍🚀")


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b'{"format":1,"format":1}'])
def test_bytes_that_are_not_json_are_refused(raw: bytes) -> None:
    with pytest.raises(SpecError):
        spec_from_json(raw)


def test_every_random_action_of_random_games_can_be_recorded():
    for seed in range(200):
        rng = np.random.default_rng(seed)
        spec = random_spec(rng)
        columns = [
            np.empty((1, *space.shape), space.dtype) for space in spec.action_columns.values()
        ]
        for _ in range(5):
            action_writer(spec)(columns, 0, random_action(spec, rng))


def test_only_valid_actions_are_drawn_and_all_of_them():
    spec = game_spec("masked", obs=1, actions=Discrete(6, 10))
    rng = np.random.default_rng(0)
    action_mask = np.array([0, 1, 0, 1, 1, 0], bool)
    assert {random_action(spec, rng, action_mask=action_mask) for _ in range(200)} == {11, 13, 14}


@pytest.mark.parametrize(
    "space",
    [
        Box((3,), DTYPES["F32"]),
        Box((2, 2), DTYPES["F32"], 0.0, None),
        Box((), DTYPES["F64"], -3.0, -2.0),
        Box((2,), DTYPES["F32"], (-1.0, -3e38), (1.0, 3e38)),
        Box((4,), DTYPES["U64"]),
        Box((4,), DTYPES["I64"]),
        Box((2,), DTYPES["I8"], -5, 5),
        MultiBinary((3,)),
        MultiDiscrete((2, 5), (2,)),
        Box((2,), DTYPES["F16"]),
        Discrete(1 << 64, 0, DTYPES["U64"]),
        Discrete((1 << 64) - 1, -(1 << 63), DTYPES["I64"]),
        Discrete(10**9),
        MultiDiscrete((1 << 63, 2), (2, 1)),
        Box((2,), DTYPES["BOOL"]),
        Box((2,), DTYPES["F64"], 2e6, 3e6),
        Box((4,), DTYPES["U64"], 1 << 62, (1 << 64) - 2),
    ],
    ids=str,
)
def test_every_space_is_sampled_within_its_bounds(space: Space):
    spec = game_spec("any", obs=1, actions=space)
    rng = np.random.default_rng(1)
    drawn = np.array([random_action(spec, rng) for _ in range(300)], space.dtype)
    assert drawn.dtype == space.dtype
    assert space.contains(drawn).all()
    assert len(np.unique(drawn)) > 1


def test_a_random_action_with_parts_is_nested():
    spec = game_spec(
        "parts", obs=1, actions={"a.x": Discrete(3), "a.y": MultiBinary((2,)), "b": Discrete(2, 5)}
    )
    action = random_action(spec, np.random.default_rng(0))
    assert action["a"]["x"] in range(3)
    assert action["a"]["y"].shape == (2,)
    assert action["b"] in (5, 6)
