"""Finds the cell of a grid that the player moves, from which a network is then shown the grid.

What a player does next depends on what lies around them, wherever that is on the map. A network
that sees the whole grid must learn this anew for each cell; one that sees it from the player's cell
learns it once.
"""

import itertools
import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from understudy.algorithm import Batch
from understudy.core.tensors import Array
from understudy.experience.game import GameSpec
from understudy.experience.spaces import Space
from understudy.learn.architecture import (
    MAX_CODES,
    cell_codes,
    grid_channel,
    is_grid,
    may_have_codes,
)
from understudy.nn.network import OneHot

_MIN_EXPLAINED = 0.25
"""Share of the variance of a cell's moves, down and across, that the actions must explain."""
_MIN_SINGLE = 0.95
"""Share of the steps before and after which exactly one cell must be set."""
_MIN_VALUES = 3
"""Different values that a row or column must have: flags have two."""
_MAX_PLACES = 8
"""Numbers that are tried in pairs."""
_MAX_NUMBERS = 64
"""Columns up to this size may hold the player's row or column."""
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


def moves_of(game: GameSpec, centre: str, steps: Batch) -> tuple[Floats, Array]:
    """The moves of that cell, down and across (float64[n, 2]), and the actions before them.

    Moves that are farther than one step, such as to a new start, are left out.
    """
    for name, moves, actions in _candidates(game, steps):
        if name == centre:
            is_near = (np.abs(moves) <= _MAX_MOVE).all(1)
            return moves[is_near], actions[is_near]
    return np.zeros((0, 2)), np.zeros(0, np.int32)


def may_have_centre(game: GameSpec) -> bool:
    """Whether the game has a grid, or numbers that may be one."""
    spaces = game.obs_columns.values()
    return game.discrete is not None and any(is_grid(s) or may_have_codes(s) for s in spaces)


def _candidates(game: GameSpec, steps: Batch) -> Iterator[tuple[str, Floats, Array]]:
    """Names of cells, their moves (down and across, float64[n, 2]), and the actions before them."""
    numbers = None
    for grid, space in game.obs_columns.items():
        before, after = (_newest(obs[grid], space.shape) for obs in (steps.obs, steps.next_obs))
        codes = cell_codes(space)
        values = ""
        if may_have_codes(space) and codes is None:
            codes = _codes_in(before)
            values = "" if codes is None else f" of {codes.start}..{codes.start + codes.n - 1}"
        elif not is_grid(space):
            continue
        if codes is None and grid_channel(space) is None:
            continue
        if codes is None and grid_channel(space) == 0:
            before, after = (np.moveaxis(cells, 1, -1) for cells in (before, after))
        for number in range(codes.n if codes is not None else before.shape[-1]):
            planes = [
                cells[..., number] > 0 if codes is None else cells == codes.start + number
                for cells in (before, after)
            ]
            is_single = np.logical_and(*(plane.sum((1, 2)) == 1 for plane in planes))
            if is_single.mean() >= _MIN_SINGLE:
                start, end = (_places(plane[is_single]) for plane in planes)
                yield f"{grid} {number}{values}", end - start, steps.action[is_single]
        if numbers is None:
            numbers = dict(_numbers(game.obs_columns, steps))
        for names in itertools.combinations(numbers, 2):
            start, end = (np.stack([numbers[name][at] for name in names], 1) for at in (0, 1))
            is_xy = _is_xy(start, before)
            if is_xy is not None:
                row, column = names[::-1] if is_xy else names
                moves = (end - start)[:, ::-1] if is_xy else end - start
                yield f"{grid} {row},{column}{values}", moves, steps.action


def _codes_in(cells: Array) -> OneHot | None:
    """The codes of cells, if all are whole numbers of a small range."""
    if not np.isfinite(cells).all() or not (cells == np.rint(cells)).all():
        return None
    first = int(cells.min())
    n_codes = int(cells.max()) - first + 1
    return OneHot(n_codes, first) if 1 < n_codes <= MAX_CODES else None


def _numbers(columns: Mapping[str, Space], steps: Batch) -> list[tuple[str, tuple[Floats, Floats]]]:
    """The numbers that move most as the actions say: names, and values before and after.

    A number whose next value follows from the action alone, such as the last action, is no place.
    """
    found: list[tuple[float, str, tuple[Floats, Floats]]] = []
    for name, space in columns.items():
        size = math.prod(space.shape)
        if size > _MAX_NUMBERS:
            continue
        for index in range(size):
            start, end = (
                _newest(obs[name], space.shape)
                .reshape(len(steps.action), -1)[:, index]
                .astype(np.float64)
                for obs in (steps.obs, steps.next_obs)
            )
            explained = _explained(np.stack([end - start] * 2, 1), steps.action)
            by_action = _explained(np.stack([end] * 2, 1), steps.action, max_move=math.inf)
            is_place = explained > max(_MIN_EXPLAINED, by_action)
            if is_place and len(np.unique(start)) >= _MIN_VALUES:
                label = name if size == 1 else f"{name}[{index}]"
                found.append((explained, label, (start, end)))
    found.sort(key=lambda number: -number[0])
    return [(label, values) for _, label, values in found[:_MAX_PLACES]]


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


def _explained(moves: Floats, actions: Array, *, max_move: float = _MAX_MOVE) -> float:
    """Share of the variance of moves that is between actions, not among moves of one action.

    That of rows or of columns, whichever is smaller: a paddle that only moves sideways is no place
    to see everything from.
    """
    is_near = (np.abs(moves) <= max_move).all(1)
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
