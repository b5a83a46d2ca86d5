"""Policies with random weights, for the actor tests."""

from typing import Any

import numpy as np

from understudy.experience.game import GameSpec
from understudy.experience.spaces import Discrete
from understudy.nn.heads import head_for
from understudy.nn.network import Activation, Dense, Flatten, Input, NetworkSpec, OneHot
from understudy.nn.policy import InitialPriority, Policy


def random_policy(
    game: GameSpec,
    kind: str,
    *,
    seed: int = 0,
    stack: int = 1,
    priority: InitialPriority | None = None,
    version: int = 3,
) -> Policy:
    """Return a policy with a small network; its outputs are small enough for noise to matter."""
    head = head_for(game, kind)
    network = NetworkSpec(
        {name: _input(space, stack) for name, space in game.obs_columns.items()},
        (Dense(16), Activation("tanh")),
        {name: (Dense(head.size),) for name in head.outputs},
    )
    rng = np.random.default_rng(seed)
    weights = {
        name: rng.normal(size=shape).astype(np.float32) for name, shape in network.shapes().items()
    }
    for name in weights:
        if name.startswith("heads."):
            weights[name] *= np.float32(0.2)
    return Policy(game, network, weights, head, stack=stack, version=version, priority=priority)


def _input(space: Any, stack: int) -> Input:
    if isinstance(space, Discrete):
        return Input((), space.dtype, (OneHot(space.n, space.start),))
    shape = (stack, *space.shape) if stack > 1 else space.shape
    return Input(shape, space.dtype, (Flatten(), Dense(8), Activation("tanh")))
