"""The default network of a game, chosen by the kind of each observation column."""

from collections.abc import Mapping, Sequence

import numpy as np

from understudy.experience.game import GameSpec
from understudy.experience.spaces import Box, Discrete, MultiDiscrete, Space
from understudy.nn.heads import Head
from understudy.nn.network import (
    Activation,
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

LARGE = (Conv(32, 8, 4), Conv(64, 4, 2), Conv(64, 3, 1))
SMALL = (Conv(16, 4, 2), Conv(32, 3, 2))
GRID = (Conv(16, 3, 1),)


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
) -> NetworkSpec:
    """A network: convolutions for images and grids, one-hot for discrete values, dense layers.

    `activation` and `layer_norm` apply to each dense layer (convolutions use relu);
    `observation_norm` applies to inputs that are neither images nor discrete.
    """
    inputs = {
        name: Input(
            (stack, *space.shape) if stack > 1 else space.shape,
            space.dtype,
            _layers(space, stack=stack, observation_norm=observation_norm),
        )
        for name, space in game.obs_columns.items()
    }
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
    if isinstance(space, MultiDiscrete) and max(space.counts) <= MAX_CHOICES:
        encoding.append(OneHot(max(space.counts)))
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


def _image_layers(shape: Shape, channels: Shape, *, stack: int) -> tuple[Layer, ...]:
    # The stack axis comes first, so the image's own channels move by one axis.
    axes = (0, *(axis + 1 for axis in channels)) if stack > 1 else channels
    sides = [size for axis, size in enumerate(shape) if axis not in channels]
    convs = LARGE if min(sides) >= LARGE_SIDE else SMALL
    return (ScaleImage(), Channels(axes), *_with_relu(convs), Flatten())


def _with_relu(convs: Sequence[Conv]) -> list[Layer]:
    return [layer for conv in convs for layer in (conv, Activation("relu"))]


def grid_channel(space: Space) -> int | None:
    """The channel axis of a grid of cells, once they are encoded; None if the space is no grid."""
    sides = shape = space.shape
    channel = 2
    if isinstance(space, MultiDiscrete):
        has_channels = len(shape) == 2 and max(space.counts) <= MAX_CHOICES
    else:
        has_channels = len(shape) == 3 and min(shape[0], shape[2]) <= MAX_CHANNELS
        if has_channels:
            channel = 0 if shape[0] < shape[2] else 2
            sides = shape[1:] if channel == 0 else shape[:2]
    is_grid = has_channels and all(side in GRID_SIDES for side in sides)
    return channel if is_grid else None


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
