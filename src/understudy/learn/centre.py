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

_MOVED = 0.25
"""Share of a cell's moves, down and across, that the actions must explain."""
_ALWAYS = 0.99
"""Share of the steps in which exactly one cell must be set."""

Places = NDArray[np.float64]


def find_centre(game: GameSpec, steps: Batch) -> str:
    """The grid and its cell whose moves follow from the actions most, as `network_for` reads them.

    Empty if the game has no grid, or nothing on it moves as the actions say.
    """
    if game.discrete is None:
        return ""
    best = ""
    most = _MOVED
    for name, before, after in _candidates(game, steps):
        explained = _explained(after - before, steps.action)
        if explained > most:
            best = name
            most = explained
    return best


def _candidates(game: GameSpec, steps: Batch) -> Iterator[tuple[str, Places, Places]]:
    """Names of cells, and their places before and after each step."""
    for grid, space in game.obs_columns.items():
        if not is_grid(space):
            continue
        columns = (
            _newest(steps.obs[grid], space.shape),
            _newest(steps.next_obs[grid], space.shape),
        )
        codes = cell_codes(space)
        if codes is not None:
            values = range(codes.start, codes.start + codes.n)
            planes = [[cells == code for cells in columns] for code in values]
        else:
            channel = grid_channel(space)
            assert channel is not None
            moved = [np.moveaxis(cells, channel + 1, -1) for cells in columns]
            planes = [[cells[..., at] > 0 for cells in moved] for at in range(moved[0].shape[-1])]
        for at, (before, after) in enumerate(planes):
            if (before.sum((1, 2)) == 1).mean() >= _ALWAYS:
                yield f"{grid} {at}", _places(before), _places(after)
        cells = np.stack([before for before, _ in planes], -1)
        for name, other in game.obs_columns.items():
            if other.shape == (2,):
                before, after = (
                    _newest(values[name], (2,)).astype(np.float64)
                    for values in (steps.obs, steps.next_obs)
                )
                if (order := _order(before, cells)) is not None:
                    yield f"{grid} {name}{' xy' if order else ''}", before, after


def _order(places: Places, cells: Array) -> bool | None:
    """Whether places on a grid are columns and rows (x, y) or rows and columns; None: neither.

    In the right order, what is on those cells is less of a surprise: nobody stands in a wall.
    """
    surprise = {}
    for is_xy in (False, True):
        rows, columns = places.T[::-1] if is_xy else places.T
        fits = (places == np.rint(places)).all() and (places >= 0).all()
        if fits and (rows < cells.shape[1]).all() and (columns < cells.shape[2]).all():
            at = (np.arange(len(cells)), rows.astype(np.intp), columns.astype(np.intp))
            shares = np.clip(cells[at].mean(0), 1e-9, 1 - 1e-9)
            surprise[is_xy] = -(shares * np.log(shares) + (1 - shares) * np.log(1 - shares)).sum()
    return min(surprise, key=lambda is_xy: surprise[is_xy]) if surprise else None


def _newest(column: Array, shape: tuple[int, ...]) -> Array:
    """Observations without the axis of a stack."""
    return column if column.ndim == len(shape) + 1 else column[:, -1]


def _places(plane: Array) -> Places:
    """The row and column of the cell that is set."""
    return np.stack(divmod(plane.reshape(len(plane), -1).argmax(1), plane.shape[2]), 1).astype(
        np.float64
    )


def _explained(moves: Places, actions: Array) -> float:
    """Share of the variance of moves that is between actions, not among moves of one action.

    That of rows or of columns, whichever is smaller: a paddle that only moves sideways is no place
    to see everything from.
    """
    moves = moves - moves.mean(0)
    between = np.zeros(2)
    for action in np.unique(actions):
        own = moves[actions == action]
        between += len(own) * np.square(own.mean(0))
    total = np.square(moves).sum(0)
    return float((between / np.maximum(total, 1e-9)).min())
