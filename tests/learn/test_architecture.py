"""The default network: which layers each kind of observation gets."""

from typing import Any

import jax
import numpy as np
import pytest

from understudy.core.tensors import DTYPES
from understudy.experience.game import game_spec
from understudy.experience.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space
from understudy.learn.architecture import network_for, policy_outputs
from understudy.learn.networks import init_weights
from understudy.nn.heads import head_for
from understudy.nn.network import (
    Activation,
    Channels,
    Constant,
    Conv,
    Dense,
    Flatten,
    LayerNorm,
    NetworkSpec,
    ObservationNorm,
    OneHot,
    ScaleImage,
)
from understudy.nn.policy import Policy
from understudy.testing.samples import random_rows, random_spec

F32 = DTYPES["F32"]
U8 = DTYPES["U8"]
I8 = np.dtype(np.int8)
HEADS = {"logits": (Dense(2, gain=0.01),)}


def layers_of(space: Space, **how: Any) -> tuple[Any, ...]:
    return (
        network_for(game_spec("g", obs=space, actions=2), heads=HEADS, **how).inputs["obs"].layers
    )


def test_a_vector_goes_through_dense_layers() -> None:
    spec = network_for(
        game_spec("cart", obs=4, actions=2), heads=HEADS, widths=(8, 4), activation="tanh"
    )
    assert spec.inputs["obs"].layers == (Flatten(),)
    assert spec.trunk == (Dense(8), Activation("tanh"), Dense(4), Activation("tanh"))
    assert spec.heads == HEADS


def test_norms_are_added_if_requested() -> None:
    spec = network_for(
        game_spec("cart", obs=4, actions=2),
        heads=HEADS,
        widths=(8,),
        layer_norm=True,
        observation_norm=True,
    )
    assert spec.inputs["obs"].layers == (ObservationNorm(), Flatten())
    assert spec.trunk == (Dense(8), LayerNorm(), Activation("relu"))


@pytest.mark.parametrize(
    ("shape", "stack", "axes"),
    [
        ((84, 84), 1, ()),
        ((84, 84), 4, (0,)),
        ((84, 84, 3), 1, (2,)),
        ((84, 84, 3), 4, (0, 3)),
        ((3, 84, 84), 1, (0,)),
        ((4, 84, 84), 2, (0, 1)),
    ],
)
def test_an_image_gets_convolutions_over_all_its_channels(
    shape: tuple[int, ...], stack: int, axes: Any
) -> None:
    layers = layers_of(Box(shape, U8), stack=stack)
    assert layers[:2] == (ScaleImage(), Channels(axes))
    assert [layer for layer in layers if isinstance(layer, Conv)] == [
        Conv(32, 8, 4),
        Conv(64, 4, 2),
        Conv(64, 3, 1),
    ]


def test_a_small_image_gets_small_convolutions() -> None:
    assert Conv(16, 4, 2) in layers_of(Box((20, 24), U8))


@pytest.mark.parametrize(
    ("space", "stack", "encoding"),
    [
        (Box((7, 7, 6), U8, 0, 1), 1, (Channels((2,)),)),
        (Box((4, 10, 10), U8), 1, (ScaleImage(), Channels((0,)))),
        (MultiBinary((10, 10, 4)), 2, (Channels((0, 3)),)),
        (MultiDiscrete((9,) * 54, (6, 9)), 1, (OneHot(9), Channels((2,)))),
        (MultiDiscrete((3,) * 16, (4, 4)), 3, (OneHot(3), Channels((0, 3)))),
        (Box((8, 8), I8, -1, 5), 1, (OneHot(7, -1), Channels((2,)))),
        (Box((8, 9), U8, 0, 5), 2, (OneHot(6), Channels((0, 3)))),
    ],
)
def test_a_grid_of_cells_gets_a_convolution(space: Space, stack: int, encoding: Any) -> None:
    layers = layers_of(space, stack=stack)
    assert layers == (*encoding, Conv(16, 3, 1), Activation("relu"), Flatten())


@pytest.mark.parametrize(
    ("space", "layers"),
    [
        (MultiDiscrete((3,) * 9, (3, 3)), (OneHot(3), Flatten())),
        (Box((3, 3, 2), F32), (Flatten(),)),
        (Box((84, 84, 3), F32), (Flatten(),)),
        (Discrete(5, 2), (OneHot(5, 2), Flatten())),
        (MultiDiscrete((3, 7), (2,)), (OneHot(7), Flatten())),
        (MultiBinary((3,)), (Flatten(),)),
        (Discrete(100_000), (Flatten(),)),
        (Box((128,), U8), (ScaleImage(), Flatten())),
        (Box((3,), U8, 0, 3), (Flatten(),)),
        (Box((84, 84), F32), (Flatten(),)),
        (Box((10, 10), U8), (ScaleImage(), Flatten())),
        (Box((3, 10), I8, 0, 5), (Flatten(),)),
        (Box((10, 10), I8), (Flatten(),)),
    ],
)
def test_other_observations_are_choices_or_numbers(space: Space, layers: Any) -> None:
    assert layers_of(space) == layers


@pytest.mark.parametrize("seed", range(8))
def test_any_game_gets_a_network_that_runs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    game = random_spec(rng)
    stack = int(rng.integers(1, 4))
    game = game_spec("any", obs=dict(game.obs), actions=3)
    spec = network_for(
        game,
        heads={"logits": (Dense(3),)},
        widths=(8,),
        stack=stack,
        observation_norm=seed % 2 == 0,
    )
    weights: Any = init_weights(jax.random.key(seed), spec)
    policy = Policy(game, spec, weights, head_for(game), stack=stack)
    obs = {name: random_rows(space, 2 * stack, rng) for name, space in game.obs_columns.items()}
    if stack > 1:
        obs = {name: rows.reshape(2, stack, *rows.shape[1:]) for name, rows in obs.items()}
    with np.errstate(all="ignore"):
        decision = policy.decide(obs, None, deterministic=True)
    assert decision.action.shape == (2,)


def test_parts_of_an_observation_are_concatenated() -> None:
    game = game_spec(
        "parts", obs={"cam": Box((24, 24), U8), "x": Box((3,), F32), "kind": Discrete(4)}, actions=2
    )
    spec: NetworkSpec = network_for(game, heads=HEADS, widths=(8,))
    assert list(spec.inputs) == ["obs.cam", "obs.kind", "obs.x"]
    convolved = 5 * 5 * 32
    assert spec.shapes()["trunk.0.kernel"] == (convolved + 4 + 3, 8)


def test_a_policy_begins_undecided_and_has_what_its_head_reads():
    steer = game_spec("steer", obs=3, actions=Box((2,), F32, -1.0, 1.0))
    last = Dense(2, gain=0.01)
    assert policy_outputs(head_for(game_spec("line", obs=3, actions=2))) == {"logits": (last,)}
    assert policy_outputs(head_for(steer)) == {"mean": (last,), "log_std": (Constant(2),)}
