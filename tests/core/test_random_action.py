"""A random action is one the game takes, whatever its action space."""

import numpy as np
import pytest

from understudy.core.game import game_spec
from understudy.core.random_action import random_action
from understudy.core.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space
from understudy.core.tensors import DTYPES
from understudy.core.writer import action_writer
from understudy.testing.samples import random_spec


def test_over_random_games_every_action_can_be_recorded():
    for seed in range(200):
        rng = np.random.default_rng(seed)
        spec = random_spec(rng)
        columns = [np.empty((1, *space.shape), space.dtype) for space in spec.action_columns.values()]
        for _ in range(5):
            action_writer(spec)(columns, 0, random_action(spec, rng))


def test_only_legal_actions_are_drawn_and_all_of_them():
    spec = game_spec("legal", obs=1, actions=Discrete(6, 10))
    rng, legal = np.random.default_rng(0), np.array([0, 1, 0, 1, 1, 0], bool)
    assert {random_action(spec, rng, legal=legal) for _ in range(200)} == {11, 13, 14}


@pytest.mark.parametrize(
    "space",
    [
        Box((3,), DTYPES["F32"]), Box((2, 2), DTYPES["F32"], 0.0, None), Box((), DTYPES["F64"], -3.0, -2.0),
        Box((2,), DTYPES["F32"], (-1.0, -3e38), (1.0, 3e38)), Box((4,), DTYPES["U64"]), Box((4,), DTYPES["I64"]),
        Box((2,), DTYPES["I8"], -5, 5), MultiBinary((3,)), MultiDiscrete((2, 5), (2,)), Box((2,), DTYPES["F16"]),
        Discrete(1 << 64, 0, DTYPES["U64"]), Discrete((1 << 64) - 1, -(1 << 63), DTYPES["I64"]), Discrete(10**9),
        MultiDiscrete((1 << 63, 2), (2, 1)), Box((2,), DTYPES["BOOL"]),
        Box((2,), DTYPES["F64"], 2e6, 3e6), Box((4,), DTYPES["U64"], 1 << 62, (1 << 64) - 2),
    ],
    ids=str,
)  # fmt: skip
def test_every_space_is_drawn_from_within_its_bounds(space: Space):
    spec, rng = game_spec("any", obs=1, actions=space), np.random.default_rng(1)
    drawn = np.array([random_action(spec, rng) for _ in range(300)], space.dtype)
    assert drawn.dtype == space.dtype
    assert space.holds(drawn).all()
    assert len(np.unique(drawn)) > 1


def test_parts_come_as_the_game_takes_them():
    spec = game_spec("parts", obs=1, actions={"a.x": Discrete(3), "a.y": MultiBinary((2,)), "b": Discrete(2, 5)})
    action = random_action(spec, np.random.default_rng(0))
    assert action["a"]["x"] in range(3)
    assert action["a"]["y"].shape == (2,)
    assert action["b"] in (5, 6)
