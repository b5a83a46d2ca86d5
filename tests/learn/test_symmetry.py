"""Mirror images of a grid game's steps."""

from typing import Any

import jax
import numpy as np
import pytest

from tests.learn.test_centre import (
    APART,
    APIECE,
    CHANNELS_FIRST,
    CODES,
    COLUMNS,
    MOVES,
    NUMBERS,
    PLANES,
    ROWS,
    XY,
    N,
    played,
)
from understudy.algorithm import Batch
from understudy.core.errors import ConfigError
from understudy.experience.game import GameSpec, game_spec
from understudy.experience.spaces import Box
from understudy.learn.algorithms.bc import Bc, BcConfig
from understudy.learn.algorithms.iql import Iql, IqlConfig
from understudy.learn.centre import find_centre, moves_of
from understudy.learn.held_out import Choice
from understudy.learn.symmetry import Symmetry, find_symmetry

BOTH = "rows 1,0,2,3,4; columns 0,1,3,2,4"
GAMES = (PLANES, CHANNELS_FIRST, CODES, APART, XY, NUMBERS, APIECE)
SQUARE = game_spec("square", obs={"grid": Box((7, 7, 3), np.dtype(np.uint8), 0, 1)}, actions=5)
WALL, GOAL, PLAYER = range(3)


@pytest.mark.parametrize("stack", [1, 2])
@pytest.mark.parametrize("game", GAMES, ids=lambda game: game.game)
def test_the_moves_of_an_image_are_those_of_its_action(game: GameSpec, stack: int):
    steps = played(game, follows=1.0, stack=stack)
    centre = find_centre(game, steps)
    assert find_symmetry(game, centre, steps) == BOTH
    mirrored = Symmetry(game, centre, BOTH).mirrored(steps)
    moves, actions = moves_of(game, centre, as_numpy(mirrored))
    assert len(moves) == N
    assert (moves == MOVES[actions]).all()
    assert (np.asarray(mirrored.action)[::4] == steps.action[::4]).all()
    assert (np.asarray(mirrored.action) != steps.action).sum() > N / 4
    assert (np.asarray(mirrored.reward) == steps.reward).all()


def as_numpy(batch: Batch) -> Batch:
    arrays: Batch = jax.tree.map(np.asarray, batch)
    return arrays


def test_all_of_the_grid_is_mirrored_and_so_are_masks():
    steps = squares(np.random.default_rng(0), lambda plane: 0)
    mask = np.arange(5) != steps.action[:, None]
    steps = steps._replace(action_mask=mask, next_action_mask=mask)
    symmetry = find_symmetry(SQUARE, "obs.grid 2", steps)
    assert symmetry == f"{BOTH}; swap 2,3,0,1,4"
    mirrored = as_numpy(Symmetry(SQUARE, "obs.grid 2", symmetry).mirrored(steps))
    grids = steps.obs["obs.grid"]
    # Images come in the order of rows, columns and swap, the last one changes first.
    assert (mirrored.obs["obs.grid"][1] == grids[1].transpose(1, 0, 2)).all()
    assert (mirrored.obs["obs.grid"][2] == grids[2][:, ::-1]).all()
    assert (mirrored.obs["obs.grid"][4] == grids[4][::-1]).all()
    assert (mirrored.obs["obs.grid"][7] == grids[7][::-1, ::-1].transpose(1, 0, 2)).all()
    assert not mirrored.action_mask[np.arange(len(mask)), mirrored.action].any()
    assert (mirrored.action_mask.sum(1) == 4).all()
    assert (mirrored.next_action_mask == mirrored.action_mask).all()
    last = Symmetry(SQUARE, "obs.grid 2", symmetry).mirrored(
        steps._replace(
            obs={"obs.grid": grids[:9]},
            next_obs={"obs.grid": grids[:9]},
            action=steps.action[:9],
            action_mask=None,
            next_action_mask=None,
        )
    )
    assert (np.asarray(last.obs["obs.grid"])[8] == grids[8]).all()


def squares(rng: np.random.Generator, choose: Any, n: int = 1_000) -> Batch:
    """Steps on random maps with a goal; `choose`: the action for a map, walls apart."""
    grids = np.zeros((n, 7, 7, 3), np.uint8)
    rows = np.arange(n)
    start = rng.integers(1, 6, (n, 2))
    goal = rng.integers(7, size=(n, 2))
    grids[rows, goal[:, 0], goal[:, 1], GOAL] = 1
    after = grids.copy()
    grids[rows, start[:, 0], start[:, 1], PLAYER] = 1
    action = np.array([choose(grid) for grid in grids], np.int32)
    action = np.where(rng.random(n) < 0.2, rng.integers(5, size=n), action).astype(np.int32)
    end = start + MOVES[action]
    after[rows, end[:, 0], end[:, 1], PLAYER] = 1
    ones = np.ones(n, np.float32)
    return Batch({"obs.grid": grids}, action, ones, {"obs.grid": after}, ones, ones)


def towards_the_goal(grid: Any) -> int:
    """Along the longer way, and across if both are equal, so that a swap is not quite alike."""
    down, right = np.argwhere(grid[..., GOAL])[0] - np.argwhere(grid[..., PLAYER])[0]
    if abs(down) > abs(right):
        return int(down > 0)
    return 2 + int(right > 0) if right else 4


def north(grid: Any) -> int:
    return 0


@pytest.mark.parametrize(("choose", "best"), [(towards_the_goal, BOTH), (north, "")])
def test_held_out_steps_tell_which_images_help(choose: Any, best: str):
    learned = squares(np.random.default_rng(0), choose, 300)
    held_out = squares(np.random.default_rng(1), choose, 400)
    configs = [
        BcConfig(centre="obs.grid 2", widths=(32,), batch=64, symmetry=symmetry)
        for symmetry in (f"{BOTH}; swap 2,3,0,1,4", BOTH, "")
    ]
    choice = Choice(SQUARE, configs, learned=learned, held_out=held_out, temperature=0.25)
    seen = []
    while choice.step():
        seen.append(choice.progress)
    assert list(dict.fromkeys(seen)) == ["clone 1 of 3", "clone 2 of 3", "clone 3 of 3"]
    assert choice.best().symmetry == best


def test_actions_without_an_opposite_have_no_image():
    steps = played(PLANES, follows=1.0)
    sideways = steps._replace(action=np.where(steps.action == 1, 4, steps.action))
    assert "rows" not in find_symmetry(PLANES, "obs.grid 2", sideways)
    assert find_symmetry(PLANES, "", steps) == ""
    assert find_symmetry(PLANES, "none", steps) == ""


@pytest.mark.parametrize("config", [BcConfig, IqlConfig])
def test_a_symmetry_that_fits_no_game_is_refused_with_the_settings(config: Any):
    for symmetry in ("rows", "rows 1,2,0", "rows 1,0,2; rows 1,0,2", "turn 1,0", "rows 0,0"):
        with pytest.raises(ConfigError, match=r"symmetry is '.*'; give mirrors, and for each"):
            config(symmetry=symmetry)
    for symmetry in ("", "none", BOTH):
        assert config(symmetry=symmetry).symmetry == symmetry


@pytest.mark.parametrize(("algorithm", "config"), [(Bc, BcConfig), (Iql, IqlConfig)])
def test_a_symmetry_of_another_game_is_refused(algorithm: Any, config: Any):
    for symmetry in ("rows 1,0,2", f"{BOTH}; swap 2,3,0,1,4"):
        own = algorithm(PLANES, config(centre="obs.grid 2", symmetry=symmetry))
        with pytest.raises(
            ConfigError, match=f"planes has 5 actions, and its grid {ROWS} x {COLUMNS} cells"
        ):
            own.update(own.init(np.zeros(2, np.uint32)), played(PLANES), {})
