"""The cell of a grid that the player moves, found in recorded steps."""

import tracemalloc
from typing import Any

import jax
import numpy as np
import pytest

from understudy.algorithm import Batch
from understudy.core.errors import ConfigError
from understudy.experience.game import GameSpec, game_spec
from understudy.experience.spaces import Box, Discrete, MultiDiscrete
from understudy.learn.algorithms.bc import Bc, BcConfig
from understudy.learn.algorithms.iql import Iql, IqlConfig
from understudy.learn.architecture import network_for
from understudy.learn.centre import find_centre
from understudy.nn.network import Centre, Conv, Dense, NetworkSpec, ObservationNorm

U8 = np.dtype(np.uint8)
F32 = np.dtype(np.float32)
MOVES = np.array([[-1, 0], [1, 0], [0, -1], [0, 1], [0, 0]])
ROWS, COLUMNS, N = 5, 6, 400
PLANES = game_spec(
    "planes", obs={"grid": Box((ROWS, COLUMNS, 3), U8, 0, 1), "x": Box((2,), F32)}, actions=5
)
CHANNELS_FIRST = game_spec("first", obs={"grid": Box((3, ROWS, COLUMNS), U8, 0, 1)}, actions=5)
CODES = game_spec("codes", obs={"map": MultiDiscrete((4,) * 30, (ROWS, COLUMNS))}, actions=5)
APART = game_spec(
    "apart",
    obs={
        "map": MultiDiscrete((4,) * 30, (ROWS, COLUMNS)),
        "place": MultiDiscrete((ROWS, COLUMNS), (2,)),
        "goal": MultiDiscrete((ROWS, COLUMNS), (2,)),
    },
    actions=5,
)


XY = game_spec(
    "xy",
    obs={"map": Box((ROWS, COLUMNS), np.dtype(np.int8), -1, 3), "place": Box((2,), F32)},
    actions=5,
)
NUMBERS = game_spec("numbers", obs=(ROWS, COLUMNS), actions=5)
APIECE = game_spec(
    "apiece",
    obs={"map": Box((ROWS, COLUMNS), F32), "col": Discrete(COLUMNS), "row": Box((1,), U8, 0, 9)},
    actions=5,
)
STATE = game_spec(
    "state", obs={"grid": Box((ROWS, COLUMNS, 2), U8, 0, 1), "state": Box((4,), F32)}, actions=5
)


def played(game: GameSpec, *, follows: float = 0.9, stack: int = 1) -> Batch:
    """A player who moves as the actions say, for this share of the steps, and a guard who does not.

    Channel or code 1 is the guard's cell, 2 the player's; walls are anywhere.
    """
    rng = np.random.default_rng(0)
    action = rng.integers(5, size=N).astype(np.int32)
    start = rng.integers(1, (ROWS - 1, COLUMNS - 1), (N, 2))
    chance = MOVES[rng.integers(5, size=N)]
    move = np.where(rng.random((N, 1)) < follows, MOVES[action], chance)
    guards = rng.integers(1, (ROWS - 1, COLUMNS - 1), (N, 2))
    walls = rng.random((N, ROWS, COLUMNS)) < 0.2
    now = observed(game, walls, guards, start)
    then = observed(game, walls, guards + MOVES[rng.integers(5, size=N)], start + move)
    if stack > 1:
        now, then = (
            {
                name: np.stack([0 * values] * (stack - 1) + [values], 1)
                for name, values in obs.items()
            }
            for obs in (now, then)
        )
    ones = np.ones(N, np.float32)
    return Batch(now, action, ones, then, ones, ones)


def observed(game: GameSpec, walls: Any, guards: Any, players: Any) -> dict[str, Any]:
    rows = np.arange(N)
    planes = np.zeros((N, ROWS, COLUMNS, 3), np.uint8)
    planes[..., 0] = walls
    planes[rows, players[:, 0], players[:, 1], 0] = 0
    planes[rows, guards[:, 0], guards[:, 1], 1] = 1
    planes[rows, players[:, 0], players[:, 1], 2] = 1
    codes = 3 * planes[..., 0]
    if game in (CODES, NUMBERS):
        codes = np.where(planes[..., 2], 2, np.where(planes[..., 1], 1, codes))
    columns = {
        "obs.grid": planes.transpose(0, 3, 1, 2) if game is CHANNELS_FIRST else planes,
        "obs.x": np.zeros((N, 2), np.float32),
        "obs.map": codes.astype(np.int64),
        "obs.place": players[:, ::-1].astype(np.float32) if game is XY else players,
        "obs.goal": guards,
        "obs": codes.astype(np.float32) - 1,
        "obs.col": players[:, 1],
        "obs.row": players[:, :1].astype(np.uint8),
        "obs.state": np.c_[guards[:, 1], players[:, 1], guards[:, 0] / 9, players[:, 0]],
    }
    if game is STATE:
        columns["obs.grid"] = planes[..., :2]
    return {name: columns[name] for name in game.obs_columns}


@pytest.mark.parametrize(
    ("game", "centre"),
    [
        (PLANES, "obs.grid 2"),
        (CHANNELS_FIRST, "obs.grid 2"),
        (CODES, "obs.map 2"),
        (APART, "obs.map obs.place[0],obs.place[1]"),
        (XY, "obs.map obs.place[1],obs.place[0]"),
        (NUMBERS, "obs 2 of -1..2"),
        (APIECE, "obs.map obs.row,obs.col of 0..3"),
        (STATE, "obs.grid obs.state[3],obs.state[1]"),
    ],
    ids=lambda one: getattr(one, "game", one),
)
@pytest.mark.parametrize("stack", [1, 3])
def test_it_is_the_cell_that_moves_as_the_actions_say(game: GameSpec, centre: str, stack: int):
    assert find_centre(game, played(game, stack=stack)) == centre


def test_without_a_grid_or_a_cell_that_follows_there_is_none():
    assert find_centre(PLANES, played(PLANES, follows=0.0)) == ""
    vector = game_spec("vector", obs=3, actions=5)
    zeros = {"obs": np.zeros((N, 3), np.float32)}
    assert find_centre(vector, played(PLANES)._replace(obs=zeros, next_obs=zeros)) == ""
    still = played(PLANES)
    assert find_centre(PLANES, still._replace(next_obs=still.obs)) == ""
    box = game_spec("box", obs=dict(PLANES.obs), actions=Box((2,), F32, -1.0, 1.0))
    assert find_centre(box, played(PLANES)) == ""


def test_fractions_and_a_wide_range_are_no_codes_of_cells():
    for change in (lambda cells: cells / 2, lambda cells: cells * 50):
        steps = played(NUMBERS)
        now, then = ({"obs": change(obs["obs"])} for obs in (steps.obs, steps.next_obs))
        assert find_centre(NUMBERS, steps._replace(obs=now, next_obs=then)) == ""


def test_the_last_action_is_no_place():
    game = game_spec(
        "last",
        obs={"grid": Box((9, 9, 4), U8, 0, 1), "a": Discrete(5), "b": Box((5,), F32)},
        actions=5,
    )
    rng = np.random.default_rng(0)
    action = rng.integers(5, size=N)
    before = rng.integers(5, size=N)
    now, then = (
        {"obs.grid": rng.random((N, 9, 9, 4)) < 0.3, "obs.a": last, "obs.b": np.eye(5)[last]}
        for last in (before, action)
    )
    steps = played(PLANES)._replace(obs=now, next_obs=then, action=action)
    assert find_centre(game, steps) == ""


def test_a_paddle_that_only_moves_sideways_is_none():
    steps = played(PLANES)
    assert find_centre(PLANES, steps) == "obs.grid 2"
    is_across = np.isin(steps.action, (2, 3))
    sideways: Any = jax.tree.map(lambda column: column[is_across], steps)
    assert find_centre(PLANES, sideways) == ""


def test_new_starts_and_empty_last_observations_do_not_hide_the_player():
    steps = played(PLANES, follows=1.0)
    after = {name: values.copy() for name, values in steps.next_obs.items()}
    after["obs.grid"][:8] = 0
    for row in range(8, 28):
        after["obs.grid"][row, ..., 2] = 0
        after["obs.grid"][row, -1, -1, 2] = 1
    assert find_centre(PLANES, steps._replace(next_obs=after)) == "obs.grid 2"


def test_many_codes_need_little_memory():
    many = game_spec("many", obs=MultiDiscrete((4_000,) * 576, (24, 24)), actions=5)
    cells = np.random.default_rng(0).integers(4_000, size=(N, 24, 24))
    tracemalloc.start()
    find_centre(many, played(CODES)._replace(obs={"obs": cells}, next_obs={"obs": cells}))
    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most_bytes < 50e6


def test_only_large_numbers_are_normalised_and_none_shows_the_whole_grid():
    for high, is_normalised in ((1, False), (100, True)):
        game = game_spec("cells", obs=Box((9, 9, 3), F32, 0, high), actions=5)
        layers = network_of(game, "obs 2").inputs["obs"].layers
        assert (ObservationNorm() in layers) == is_normalised
        assert network_of(game, "none") == network_of(game, "")


def test_a_large_grid_is_shown_farther():
    large = game_spec("large", obs={"grid": Box((12, 9, 3), U8, 0, 1)}, actions=5)
    layers = network_of(large, "obs.grid 2").inputs["obs.grid"].layers
    assert Centre(channel=2, radius=6) in layers
    assert Conv(16, 3, 2) in layers


def placed(row: str, row_at: int, column: str, column_at: int, *others: str) -> Centre:
    return Centre(row=(row, row_at), column=(column, column_at), others=others)


@pytest.mark.parametrize(
    ("game", "stack", "shown"),
    [
        (PLANES, 1, Centre(channel=2, others=("obs.x",))),
        (PLANES, 3, Centre(channel=8, others=("obs.x",))),
        (CODES, 2, Centre(channel=6)),
        (APART, 1, placed("obs.place", -2, "obs.place", -1, "obs.goal")),
        (XY, 2, placed("obs.place", -1, "obs.place", -2)),
        (NUMBERS, 2, Centre(channel=6)),
        (APIECE, 1, placed("obs.row", -1, "obs.col", -1)),
        (STATE, 3, placed("obs.state", -1, "obs.state", -3, "obs.state")),
    ],
)
def test_the_network_is_shown_the_grid_from_there(game: GameSpec, stack: int, shown: Centre):
    centre = find_centre(game, played(game))
    network = network_of(game, centre, stack=stack)
    grid = network.inputs[centre.partition(" ")[0]]
    assert shown in grid.layers
    for algorithm in (
        Bc(game, BcConfig(centre=centre, stack=stack)),
        Iql(game, IqlConfig(centre=centre, stack=stack)),
    ):
        assert algorithm.network.inputs[centre.partition(" ")[0]] == grid


def network_of(game: GameSpec, centre: str, *, stack: int = 1) -> NetworkSpec:
    return network_for(
        game, heads={"q": (Dense(5),)}, centre=centre, stack=stack, observation_norm=True
    )


@pytest.mark.parametrize(
    "centre",
    [
        "obs.x 1",
        "nothing 1",
        "obs.grid",
        "obs.grid obs.y",
        "5",
        "obs.grid 2 yx",
        "obs.grid obs.grid",
        "obs.grid obs.x,obs.x",
        "obs.grid obs.x[0],obs.x[2]",
        "obs.grid 2 of 0..3",
        "obs.grid 9",
    ],
)
def test_another_centre_is_refused(centre: str):
    with pytest.raises(ConfigError, match=r"centre is '.*'; give a grid and one of its channels"):
        network_of(PLANES, centre)


@pytest.mark.parametrize("config", [BcConfig, IqlConfig])
def test_a_centre_that_fits_no_game_is_refused_with_the_settings(config: Any):
    for centre in ("obs.grid", "5", "obs.grid 2 yx", "obs.grid obs.y", "obs.grid a[,b", "middle"):
        with pytest.raises(ConfigError, match=r"centre is '.*'; give a grid and one of its"):
            config(centre=centre)
    for centre in ("", "none", "obs.grid 5 of 0..6", "obs.grid obs.place[0],obs.x"):
        assert config(centre=centre).centre == centre
