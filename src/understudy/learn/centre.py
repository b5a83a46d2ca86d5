"""Finds the cell of a grid that the player moves, from which a network is then shown the grid.

What a player does next depends on what lies around them, wherever that is on the map. A network
that sees the whole grid must learn this anew for each cell; one that sees it from the player's cell
learns it once.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from understudy.algorithm import Batch
from understudy.core.tensors import Array
from understudy.experience.game import GameSpec
from understudy.learn.architecture import cell_codes, grid_channel, is_grid

_MIN_EXPLAINED = 0.25
"""Share of the variance of a cell's moves, down and across, that the actions must explain."""
_MIN_SINGLE = 0.95
"""Share of the steps before and after which exactly one cell must be set."""
_MAX_MOVE = 2.0
"""Moves that are farther, such as to a new start, are ignored."""

Floats = NDArray[np.float64]


def find_centre(game: GameSpec, steps: Batch) -> str:
    """The grid and its cell whose moves follow from the actions most, as `network_for` reads them.

    Empty if the game has no grid, or nothing on it moves as the actions say.
    """
    if game.discrete is None:
        return ""
    best = ""
    most = _MIN_EXPLAINED
    for name, moves, actions in _candidates(game, steps):
        explained = _explained(moves, actions)
        if explained > most:
            best = name
            most = explained
    return best


def _candidates(game: GameSpec, steps: Batch) -> Iterator[tuple[str, Floats, Array]]:
    """Names of cells, their moves (down and across, float64[n, 2]), and the actions before them."""
    for grid, space in game.obs_columns.items():
        if not is_grid(space):
            continue
        before, after = (_newest(obs[grid], space.shape) for obs in (steps.obs, steps.next_obs))
        codes = cell_codes(space)
        channel = grid_channel(space)
        if codes is None and channel == 0:
            before, after = (np.moveaxis(cells, 1, -1) for cells in (before, after))
        for number in range(codes.n if codes is not None else before.shape[-1]):
            planes = [
                cells[..., number] > 0 if codes is None else cells == codes.start + number
                for cells in (before, after)
            ]
            is_single = np.logical_and(*(plane.sum((1, 2)) == 1 for plane in planes))
            if is_single.mean() >= _MIN_SINGLE:
                start, end = (_places(plane[is_single]) for plane in planes)
                yield f"{grid} {number}", end - start, steps.action[is_single]
        for name, other in game.obs_columns.items():
            if other.shape == (2,):
                start, end = (_newest(obs[name], (2,)) for obs in (steps.obs, steps.next_obs))
                is_xy = _is_xy(start, before)
                if is_xy is not None:
                    moves = end.astype(np.float64) - start
                    yield f"{grid} {name}{' xy' if is_xy else ''}", moves, steps.action


def _newest(column: Array, shape: tuple[int, ...]) -> Array:
    """Observations without the axis of a stack."""
    return column if column.ndim == len(shape) + 1 else column[:, -1]


def _places(plane: Array) -> Floats:
    """The row and column of the cell that is set, float64[n, 2]."""
    cells = plane.reshape(len(plane), -1).argmax(1)
    return np.stack(divmod(cells, plane.shape[2]), 1).astype(np.float64)


def _is_xy(places: Array, cells: Array) -> bool | None:
    """Whether places on a grid are columns and rows (x, y), or rows and columns; None: neither.

    In the right order, what is on those cells varies less: nobody stands in a wall.
    """
    entropies = {}
    for is_xy in (False, True):
        rows, columns = places.T[::-1] if is_xy else places.T
        is_whole = bool((places == np.rint(places)).all() and (places >= 0).all())
        if is_whole and (rows < cells.shape[1]).all() and (columns < cells.shape[2]).all():
            there = cells[np.arange(len(cells)), rows.astype(np.intp), columns.astype(np.intp)]
            shares = np.unique(there, axis=0, return_counts=True)[1] / len(cells)
            entropies[is_xy] = -float(shares @ np.log(shares))
    return min(entropies, key=lambda is_xy: entropies[is_xy]) if entropies else None


def _explained(moves: Floats, actions: Array) -> float:
    """Share of the variance of moves that is between actions, not among moves of one action.

    That of rows or of columns, whichever is smaller: a paddle that only moves sideways is no place
    to see everything from.
    """
    is_near = (np.abs(moves) <= _MAX_MOVE).all(1)
    moves = moves[is_near]
    if not len(moves):
        return 0.0
    moves = moves - moves.mean(0)
    between = np.zeros(2)
    for action in np.unique(actions):
        own = moves[actions[is_near] == action]
        if len(own):
            between += len(own) * np.square(own.mean(0))
    total = np.square(moves).sum(0)
    return float((between / np.maximum(total, 1e-9)).min())
