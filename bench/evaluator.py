"""The common evaluator: 100 greedy CartPole episodes on held-out seeds, in NumPy, not timed.

Peers send their dense layers, we send the encoded policy that a game would run; both as fields of a
JSON line.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from understudy.games import cartpole
from understudy.nn.policy import decode_policy

Array = NDArray[Any]
Act = Callable[[Array], Array]
SOLVED = 475.0
STOP_SEEDS = range(900_000, 900_100)
"""Seeds of the evaluation every 2,560 steps."""
GATE_SEEDS = range(910_000, 910_100)
"""Seeds of a second evaluation after a good first one, so that luck does not end a run."""

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": lambda x: np.maximum(x, 0, out=x),
    "tanh": lambda x: np.tanh(x, out=x),
    "linear": lambda x: x,
}


def mean_return(act: Act, seeds: Sequence[int]) -> float:
    """The mean return of one episode per seed, played side by side for at most 500 steps."""
    state = np.stack([cartpole.reset(seed) for seed in seeds], axis=1)
    returns = 0
    for _ in range(cartpole.MAX_EPISODE_STEPS):
        state, _, ended = cartpole.step(np, state, act(state.T.astype(np.float32)))
        returns += state.shape[1]
        state = state[:, ~ended]
        if not state.shape[1]:
            break
    return returns / len(seeds)


def judge(act: Act) -> tuple[float, float | None]:
    """The mean return on the first hundred seeds, and on the second if the first is good enough."""
    first = mean_return(act, STOP_SEEDS)
    return first, mean_return(act, GATE_SEEDS) if first >= SOLVED else None


def act_of(line: Mapping[str, Any]) -> Act:
    """The greedy policy in a contestant's line: `policy`, or `layers` with an `activation`."""
    if "policy" in line:
        policy = decode_policy(base64.b64decode(line["policy"]))
        return lambda obs: np.asarray(policy.decide({"obs": obs}, None, deterministic=True).action)
    layers = [(_array(kernel), _array(bias)) for kernel, bias in line["layers"]]
    return dense_act(layers, line["activation"])


def dense_act(layers: Sequence[tuple[Array, Array]], activation: str) -> Act:
    """Greedy over the outputs of dense layers, with the activation between them."""
    between = _ACTIVATIONS[activation]

    def act(obs: Array) -> Array:
        for number, (kernel, bias) in enumerate(layers):
            obs = (between(obs) if number else obs) @ kernel + bias
        return np.asarray(obs.argmax(axis=1))

    return act


def _array(packed: Mapping[str, Any]) -> Array:
    return np.frombuffer(base64.b64decode(packed["float32"]), np.float32).reshape(packed["shape"])
