"""The default network of a game, chosen by the kind of each observation column."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from understudy.core.errors import ConfigError
from understudy.experience.game import GameSpec
from understudy.experience.spaces import Box, Discrete, MultiDiscrete, Space
from understudy.nn.heads import Head
from understudy.nn.network import (
    Activation,
    Centre,
    Channels,
    Constant,
    Conv,
    Dense,
    Flatten,
    Input,
    Layer,
    LayerNorm,
    NetworkSpec,
    ObservationNorm,
    OneHot,
    ScaleImage,
    Shape,
)

IMAGE_SIDE = 20
"""uint8 arrays with two sides of at least this length are images."""
LARGE_SIDE = 60
MAX_CHANNELS = 16
"""A first or last axis up to this length is an image's channel axis."""
MAX_CHOICES = 4096
"""Discrete spaces with more values than this are treated as numbers, not one-hot encoded."""

GRID_SIDES = range(4, 25)
"""Arrays with channels, or of discrete cells, are grids if two sides have such a length."""
MAX_CODES = 64
"""Whole numbers in two dimensions are codes of cells if there are no more values than this."""

LARGE = (Conv(32, 8, 4), Conv(64, 4, 2), Conv(64, 3, 1))
SMALL = (Conv(16, 4, 2), Conv(32, 3, 2))
GRID = (Conv(16, 3, 1),)
CENTRED = (Conv(32, 1, 1), Conv(8, 1, 1), Conv(16, 3, 1))
"""For a grid shown from one cell: the first two combine what is known about each cell."""
CENTRED_LARGE = (Conv(32, 1, 1), Conv(8, 1, 1), Conv(16, 3, 2))
RADIUS = 4
"""How far such a grid is shown in each direction."""
LARGE_RADIUS = 6
"""The same for grids with a side of more than 2 * RADIUS + 1."""
_CENTRE = re.compile(
    r"(?P<grid>\S+) (?:(?P<channel>\d+)|(?P<row>[^\s,]+),(?P<column>[^\s,]+))"
    r"(?: of (?P<first>-?\d+)\.\.(?P<last>-?\d+))?"
)
"""A `centre` setting: a grid, a channel or a row and a column, and perhaps its codes."""
_CENTRE_FORMS = (
    "give a grid and one of its channels, such as 'obs.grid 5', or a grid, a row and a column, "
    "such as 'obs.grid obs.place[0],obs.place[1]' or 'obs.grid obs.y,obs.x'; for a grid of numbers "
    "from 0 to 6 add ' of 0..6'"
)
_NUMBER = re.compile(r"(?P<name>[^\s\[\]]+)(?:\[(?P<index>\d+)\])?")
"""A number of an observation: its column, and its index there."""
MAX_OTHERS = 64
"""Inputs up to this width are repeated on each cell of a grid shown from one cell."""


def policy_outputs(head: Head) -> dict[str, tuple[Layer, ...]]:
    """The output layers of a stochastic head; small weights, so that no action is preferred."""
    last = Dense(head.size, gain=0.01)
    return (
        {"logits": (last,)}
        if head.is_discrete
        else {"mean": (last,), "log_std": (Constant(head.size),)}
    )


def network_for(
    game: GameSpec,
    *,
    heads: Mapping[str, Sequence[Layer]],
    widths: Sequence[int] = (64, 64),
    activation: str = "relu",
    stack: int = 1,
    layer_norm: bool = False,
    observation_norm: bool = False,
    centre: str = "",
) -> NetworkSpec:
    """A network: convolutions for images and grids, one-hot for discrete values, dense layers.

    `activation` and `layer_norm` apply to each dense layer (convolutions use relu);
    `observation_norm` applies to inputs that are neither images nor discrete. `centre`: the cell
    from which a grid is shown, as in `IqlConfig`; `none` or empty: the whole grid.
    """
    inputs = {
        name: Input(
            (stack, *space.shape) if stack > 1 else space.shape,
            space.dtype,
            _layers(space, stack=stack, observation_norm=observation_norm),
        )
        for name, space in game.obs_columns.items()
    }
    if centre not in ("", "none"):
        inputs |= _centred(game, inputs, centre, stack=stack)
    trunk: list[Layer] = []
    for width in widths:
        trunk += [Dense(width), *([LayerNorm()] if layer_norm else []), Activation(activation)]
    return NetworkSpec(
        inputs, tuple(trunk), {name: tuple(layers) for name, layers in heads.items()}
    )


def _layers(space: Space, *, stack: int, observation_norm: bool) -> tuple[Layer, ...]:
    channels = image_channels(space)
    if channels is not None:
        return _image_layers(space.shape, channels, stack=stack)
    if isinstance(space, Discrete) and space.n <= MAX_CHOICES:
        return (OneHot(space.n, space.start), Flatten())
    encoding: list[Layer] = []
    channel = grid_channel(space)
    codes = cell_codes(space)
    if codes is not None:
        encoding.append(codes)
    else:
        # uint8 without bounds, such as a console's memory, ranges from 0 to 255.
        if isinstance(space, Box) and space.dtype == np.uint8 and space.high is None:
            encoding.append(ScaleImage())
        if observation_norm:
            encoding.append(ObservationNorm())
    if channel is not None:
        axes = (0, channel + 1) if stack > 1 else (channel,)
        encoding += [Channels(axes), *_with_relu(GRID)]
    return (*encoding, Flatten())


class ShownFrom(NamedTuple):
    """What a `centre` setting says: a grid, and its cell of a channel, or in a row and column."""

    grid: str
    codes: OneHot | None
    """The encoding of the grid's cells, if they are codes."""
    axis: int
    """The grid's channel axis, once its cells are encoded."""
    channel: int
    """-1: the cell is in `row` and `column`, each a column and an index from its end."""
    row: tuple[str, int] | tuple[()]
    column: tuple[str, int] | tuple[()]


def check_centre(centre: str) -> None:
    """Raise ConfigError for a `centre` setting that fits no game."""
    if centre in ("", "none"):
        return
    parts = _CENTRE.fullmatch(centre)
    numbers = [parts[name] for name in ("row", "column") if parts[name]] if parts else [""]
    if not all(map(_NUMBER.fullmatch, numbers)):
        raise ConfigError(f"centre is {centre[:80]!r}; {_CENTRE_FORMS}")


def shown_from(game: GameSpec, centre: str) -> ShownFrom:
    """What a `centre` setting says about a game; ConfigError if it does not fit."""
    parts = _CENTRE.fullmatch(centre)
    space = game.obs_columns.get(parts["grid"]) if parts else None
    if parts and space is not None:
        codes = cell_codes(space) if parts["first"] is None else _codes_of(space, parts)
        is_valid = codes is not None or parts["first"] is None
        axis = grid_channel(space, codes) if is_valid else None
        row, column = (_place(game, parts[name] or "") for name in ("row", "column"))
        channel = int(parts["channel"] or -1)
        if axis is not None and (channel >= 0 or (row and column)):
            n_channels = space.shape[axis] if codes is None else codes.n
            if channel < n_channels:
                return ShownFrom(parts["grid"], codes, axis, channel, row, column)
    raise ConfigError(
        f"centre is {centre!r}; {_CENTRE_FORMS}; {game.game} has the columns "
        f"{', '.join(game.obs_columns)}"
    )


def _centred(
    game: GameSpec, inputs: Mapping[str, Input], centre: str, *, stack: int
) -> dict[str, Input]:
    """The input of a grid, shown from one of its cells."""
    grid, codes, axis, channel, row, column = shown_from(game, centre)
    space = game.obs_columns[grid]
    encoding: tuple[Layer, ...] = (codes,) if codes is not None else inputs[grid].layers
    # Small numbers need no norm, with which the same thing would look different on each cell.
    is_small = isinstance(space, Box) and space.high is not None and np.abs(space.ends()).max() <= 1
    first = [
        layer
        for layer in encoding
        if isinstance(layer, OneHot | ScaleImage)
        or (isinstance(layer, ObservationNorm) and not is_small)
    ]
    n_channels = space.shape[axis] if codes is None else codes.n
    sides = [size for at, size in enumerate(space.shape) if at != axis]
    is_large = max(sides) > 2 * RADIUS + 1
    named = Counter(place[0] for place in (row, column) if place)
    others = [
        name
        for name, other in inputs.items()
        if name != grid
        and _width(other) <= MAX_OTHERS
        and named[name] != math.prod(game.obs_columns[name].shape)
    ]
    shown = Centre(
        # The newest of a stack of observations comes last.
        channel=channel + (stack - 1) * n_channels if channel >= 0 else -1,
        row=row,
        column=column,
        radius=LARGE_RADIUS if is_large else RADIUS,
        others=tuple(others),
    )
    convs = CENTRED_LARGE if is_large else CENTRED
    axes = (0, axis + 1) if stack > 1 else (axis,)
    layers = (*first, Channels(axes), shown, *_with_relu(convs), Flatten())
    return {grid: Input(inputs[grid].shape, inputs[grid].dtype, layers)}


def _codes_of(space: Space, parts: re.Match[str]) -> OneHot | None:
    """The codes from `first` to `last` of a centre setting; None if the space cannot have these."""
    first = int(parts["first"])
    n_codes = int(parts["last"]) - first + 1
    is_valid = may_have_codes(space) and 0 < n_codes <= MAX_CODES
    return OneHot(n_codes, first) if is_valid else None


def _place(game: GameSpec, named: str) -> tuple[str, int] | tuple[()]:
    """A column and an index from its end, for a number such as `obs.place[0]`; () if there is none.

    From the end, so that in a stack of observations it is a number of the newest.
    """
    parts = _NUMBER.fullmatch(named)
    if parts is None or parts["name"] not in game.obs_columns:
        return ()
    size = math.prod(game.obs_columns[parts["name"]].shape)
    index = int(parts["index"] or 0)
    is_known = index < size and (parts["index"] is not None or size == 1)
    return (parts["name"], index - size) if is_known else ()


def _width(column: Input) -> int:
    return NetworkSpec({"obs": column}, (), {"row": ()}).outputs()["row"][0]


def _image_layers(shape: Shape, channels: Shape, *, stack: int) -> tuple[Layer, ...]:
    # The stack axis comes first, so the image's own channels move by one axis.
    axes = (0, *(axis + 1 for axis in channels)) if stack > 1 else channels
    sides = [size for axis, size in enumerate(shape) if axis not in channels]
    convs = LARGE if min(sides) >= LARGE_SIDE else SMALL
    return (ScaleImage(), Channels(axes), *_with_relu(convs), Flatten())


def _with_relu(convs: Sequence[Conv]) -> list[Layer]:
    return [layer for conv in convs for layer in (conv, Activation("relu"))]


def grid_channel(space: Space, codes: OneHot | None = None) -> int | None:
    """The channel axis of a grid of cells, once they are encoded; None if the space is no grid.

    `codes`: the encoding of its cells, if it is not that of `cell_codes`.
    """
    sides = shape = space.shape
    channel = 2
    if codes is not None or cell_codes(space) is not None:
        has_channels = len(shape) == 2
    else:
        has_channels = len(shape) == 3 and min(shape[0], shape[2]) <= MAX_CHANNELS
        if has_channels:
            channel = 0 if shape[0] < shape[2] else 2
            sides = shape[1:] if channel == 0 else shape[:2]
    is_grid = has_channels and all(side in GRID_SIDES for side in sides)
    return channel if is_grid else None


def cell_codes(space: Space) -> OneHot | None:
    """The encoding of whole numbers that are names of something, not quantities; None: no such."""
    if isinstance(space, MultiDiscrete) and max(space.counts) <= MAX_CHOICES:
        return OneHot(max(space.counts))
    if not isinstance(space, Box) or space.dtype.kind not in "iu" or len(space.shape) != 2:
        return None
    low, high = space.ends()
    first = int(low.min())
    n_codes = int(high.max()) - first + 1
    are_codes = n_codes <= MAX_CODES and all(side in GRID_SIDES for side in space.shape)
    return OneHot(n_codes, first) if are_codes else None


def may_have_codes(space: Space) -> bool:
    """Whether the numbers may be codes of cells, although the space does not say so."""
    is_plain = isinstance(space, Box) and len(space.shape) == 2 and image_channels(space) is None
    return is_plain and all(side in GRID_SIDES for side in space.shape)


def is_grid(space: Space) -> bool:
    """Whether the space is a grid of cells, and no image."""
    return grid_channel(space) is not None and image_channels(space) is None


def image_channels(space: Space) -> Shape | None:
    """The channel axes of an image, () for greyscale; None if the space is not an image."""
    shape = space.shape
    if space.dtype != np.uint8:
        return None
    if len(shape) == 2 and min(shape) >= IMAGE_SIDE:
        return ()
    if len(shape) == 3:
        for channel, sides in ((2, shape[:2]), (0, shape[1:])):
            if shape[channel] <= MAX_CHANNELS and min(sides) >= IMAGE_SIDE:
                return (channel,)
    return None
