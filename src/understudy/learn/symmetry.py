"""Mirror images of a grid game: a recorded step shows what to do in up to eight of them.

Where north and south are alike, a step north around a wall also shows how to walk south around its
mirror image. The actions that change places are those that move the player's cell in opposite
directions. Held-out steps of people show whether a game is alike in this way: clones that learn
from images too must not predict them worse (`learn/held_out.py`).
"""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from understudy.algorithm import Batch
from understudy.core.errors import ConfigError
from understudy.experience.game import GameSpec
from understudy.learn.architecture import shown_from
from understudy.learn.centre import moves_of

_STILL = 0.1
"""Actions that move the player's cell by less than this on average do not move it."""
_MAX_DIFFERENCE = 0.25
"""How far a move may be from the image of another to be the same, in relation to the longer one."""
_MIRROR = re.compile(r"\s*(rows|columns|swap)\s+(\d+(?:\s*,\s*\d+)*)\s*")
_FORM = (
    "give mirrors, and for each the action that takes the place of action 0, 1 and so on, such as "
    "'rows 1,0,2,3; columns 0,1,3,2', or 'none'; 'swap', rows with columns, needs a square grid"
)


# --- Which images ---------------------------------------------------------------------------------


def find_symmetry(game: GameSpec, centre: str, steps: Batch) -> str:
    """The mirrors that the actions allow, as a `symmetry` setting; empty if there is none.

    `rows`: north and south change places; `columns`: west and east do; `swap`: rows and columns do.
    """
    moves, actions = moves_of(game, centre, steps)
    if game.discrete is None or not len(moves):
        return ""
    means = np.zeros((game.discrete.n, 2))
    for action in np.unique(actions):
        means[action] = moves[actions == action].mean(0)
    images = {"rows": means * (-1, 1), "columns": means * (1, -1)}
    sides = _place_of_grid(game, centre).sides
    if sides[0] == sides[1]:
        images["swap"] = means[:, ::-1]
    orders = {mirror: _order(means, image) for mirror, image in images.items()}
    return "; ".join(f"{mirror} {','.join(map(str, o))}" for mirror, o in orders.items() if o)


def _order(means: NDArray[np.float64], images: NDArray[np.float64]) -> list[int]:
    """For each action the one that moves as its image does; empty if the two do not change places.

    `means`: how actions move the player's cell. `images`: the same in the mirror.
    """
    order = []
    for action, image in enumerate(images):
        distances = np.linalg.norm(means - image, axis=1)
        other = action if np.linalg.norm(image) < _STILL else int(distances.argmin())
        longest = max(np.linalg.norm(image), np.linalg.norm(means[other]))
        if other != action and distances[other] > _MAX_DIFFERENCE * longest:
            return []
        order.append(other)
    is_mirror = all(order[other] == action for action, other in enumerate(order))
    return order if is_mirror and order != sorted(order) else []


class _PlaceOfGrid(NamedTuple):
    """Where observations hold a grid and the player's cell."""

    grid: str
    axes: tuple[int, int]
    """The axes of rows and columns, from the last one."""
    sides: tuple[int, int]
    """The number of rows and of columns."""
    cell: tuple[tuple[str, int], ...]
    """The numbers of the player's row and column, if there are any: a column, and an index from
    its end."""


def _place_of_grid(game: GameSpec, centre: str) -> _PlaceOfGrid:
    shown = shown_from(game, centre)
    shape = game.obs_columns[shown.grid].shape
    row, column = (axis for axis in range(len(shape)) if len(shape) == 2 or axis != shown.axis)
    return _PlaceOfGrid(
        shown.grid,
        (row - len(shape), column - len(shape)),
        (shape[row], shape[column]),
        tuple(number for number in (shown.row, shown.column) if number),
    )


def check_symmetry(symmetry: str) -> None:
    """Raise ConfigError for a `symmetry` setting that fits no game."""
    if symmetry not in ("", "none"):
        _orders_of(symmetry)


def may_mirror(game: GameSpec, symmetry: str) -> bool:
    """Whether a valid `symmetry` setting has the game's number of actions; true without mirrors."""
    if symmetry in ("", "none"):
        return True
    n_actions = game.discrete.n if game.discrete is not None else 0
    return all(len(order) == n_actions for order in _orders_of(symmetry).values())


def _orders_of(symmetry: str) -> dict[str, tuple[int, ...]]:
    """For each mirror of a `symmetry` setting the image of each action."""
    orders: dict[str, tuple[int, ...]] = {}
    for part in symmetry.split(";"):
        mirror = _MIRROR.fullmatch(part)
        order = tuple(map(int, mirror[2].split(","))) if mirror else ()
        is_valid = sorted(order) == list(range(len(order))) and all(
            order[other] == action for action, other in enumerate(order)
        )
        if mirror is None or not is_valid or mirror[1] in orders:
            raise ConfigError(f"symmetry is {symmetry[:80]!r}; {_FORM}")
        orders[mirror[1]] = order
    if len({len(order) for order in orders.values()}) > 1:
        raise ConfigError(
            f"symmetry is {symmetry[:80]!r}; give an action for each action of the game, as many "
            "for each mirror"
        )
    return orders


# --- Images of batches ----------------------------------------------------------------------------


class _Image(NamedTuple):
    """One way to mirror a grid: rows first, then columns, then rows with columns."""

    is_down: bool
    is_across: bool
    is_swapped: bool
    order: tuple[int, ...]
    """The image of each action."""


@dataclass(frozen=True)
class Symmetry:
    """The mirror images of a game's steps, by its `centre` and `symmetry` settings."""

    game: GameSpec
    centre: str
    symmetry: str

    @cached_property
    def images(self) -> tuple[_Image, ...]:
        """All mirrors combined: none, or two, four or eight with the step as it is."""
        if self.symmetry in ("", "none") or self.centre in ("", "none"):
            return ()
        orders = _orders_of(self.symmetry)
        n_actions = self.game.discrete.n if self.game.discrete is not None else 0
        n_rows, n_columns = self._place.sides
        is_square = n_rows == n_columns or "swap" not in orders
        if not is_square or not may_mirror(self.game, self.symmetry):
            raise ConfigError(
                f"symmetry is {self.symmetry!r}, with {len(next(iter(orders.values())))} actions; "
                f"{self.game.game} has {n_actions} actions, and its grid {n_rows} x {n_columns} "
                f"cells; {_FORM}"
            )
        images = []
        choices = ((False, True)[: 1 + (name in orders)] for name in ("rows", "columns", "swap"))
        for is_down, is_across, is_swapped in itertools.product(*choices):
            order = tuple(range(n_actions))
            for name, is_on in (("rows", is_down), ("columns", is_across), ("swap", is_swapped)):
                order = tuple(orders[name][action] for action in order) if is_on else order
            images.append(_Image(is_down, is_across, is_swapped, order))
        return tuple(images)

    @cached_property
    def _place(self) -> _PlaceOfGrid:
        return _place_of_grid(self.game, self.centre)

    def mirrored(self, batch: Batch) -> Batch:
        """The batch with its rows replaced in turn by each of their images.

        Rows of a batch are drawn at random, so that over time each row is replaced by any of them.
        """
        n_images = len(self.images)
        size = len(batch.action) // max(n_images, 1) * n_images
        if not size:
            return batch
        rows = _Rows(*(getattr(batch, name) for name in _Rows._fields))
        parts = [
            self._mirrored(jax.tree.map(lambda column, k=k: column[k:size:n_images], rows), image)
            for k, image in enumerate(self.images)
        ]

        def joined(column: Any, *images: Any) -> Any:
            in_turn = jnp.stack(images, 1).reshape(size, *column.shape[1:])
            return jnp.concatenate([in_turn, column[size:]])

        return batch._replace(**jax.tree.map(joined, rows, *parts)._asdict())

    def _mirrored(self, rows: "_Rows", image: _Image) -> "_Rows":
        order = np.array(image.order)

        def mask_of(mask: Any) -> Any:
            # Image `order[a]` is valid where `a` is; `order` is that of mirrors, combined.
            return None if mask is None else mask[:, np.argsort(order)]

        return _Rows(
            self._mirrored_obs(rows.obs, image),
            jnp.asarray(order, rows.action.dtype)[rows.action],
            self._mirrored_obs(rows.next_obs, image),
            mask_of(rows.action_mask),
            mask_of(rows.next_action_mask),
        )

    def _mirrored_obs(self, obs: Mapping[str, Any], image: _Image) -> dict[str, Any]:
        grid, axes, (n_rows, n_columns), cell = self._place
        cells = jnp.asarray(obs[grid])
        cells = jnp.flip(cells, axes[0]) if image.is_down else cells
        cells = jnp.flip(cells, axes[1]) if image.is_across else cells
        cells = jnp.swapaxes(cells, *axes) if image.is_swapped else cells
        mirrored = {**obs, grid: cells}
        if cell:
            row, column = (_numbers(self.game, mirrored, number) for number in cell)
            row = n_rows - 1 - row if image.is_down else row
            column = n_columns - 1 - column if image.is_across else column
            for number, values in zip(
                cell, (column, row) if image.is_swapped else (row, column), strict=True
            ):
                mirrored[number[0]] = _with_numbers(self.game, mirrored, number, values)
        return mirrored


class _Rows(NamedTuple):
    """What differs in the images of a batch's rows."""

    obs: Mapping[str, Any]
    action: Any
    next_obs: Mapping[str, Any]
    action_mask: Any
    next_action_mask: Any


def _numbers(game: GameSpec, obs: Mapping[str, Any], number: tuple[str, int]) -> Any:
    """One number of a column, of each observation in a stack: [batch, stack]."""
    name, index = number
    size = int(np.prod(game.obs_columns[name].shape))
    return jnp.asarray(obs[name]).reshape(len(obs[name]), -1, size)[..., index]


def _with_numbers(
    game: GameSpec, obs: Mapping[str, Any], number: tuple[str, int], values: Any
) -> Any:
    """The column with this number replaced."""
    name, index = number
    column = jnp.asarray(obs[name])
    size = int(np.prod(game.obs_columns[name].shape))
    rows = column.reshape(len(column), -1, size)
    return rows.at[..., index].set(values.astype(column.dtype)).reshape(column.shape)
