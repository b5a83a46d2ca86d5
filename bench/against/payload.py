"""The inputs that all contestants share: rows for replays, weights and observations for policies.

Row `i` is identifiable: its observation contains `i`, the next one `i + 1`, its reward is `i % 8`.
"""

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
BLOCK = 512
FRAME = (84, 84)
NETS = {"64-64": (4, 64, 64, 2), "256-256": (4, 256, 256, 2), "Nature": (3136, 512, 6)}
NATURE_CONVS = ((32, 4, 8, 4), (64, 32, 4, 2), (64, 64, 3, 1))
"""Channels out, channels in, kernel, stride."""

# --- Replay ---------------------------------------------------------------------------------------


def observations(kind: str, first: int, count: int) -> Array:
    """float32[count, 4] or uint8[count, 84, 84], numbered from `first`."""
    numbers = np.arange(first, first + count)
    if kind == "vector":
        return np.stack([numbers, numbers % 7, numbers % 5, numbers % 3], axis=1).astype(np.float32)
    frames = np.full((count, *FRAME), 7, np.uint8)
    frames[:, 0, :4] = numbers.astype("<u4")[:, None].view(np.uint8)
    return frames


def numbers_of(obs: Array) -> Array:
    """The row numbers of these observations."""
    if obs.ndim == 2:
        return obs[:, 0].astype(np.int64)
    return np.ascontiguousarray(obs[:, 0, :4]).view("<u4")[:, 0].astype(np.int64)


def block(kind: str, first: int) -> dict[str, Array]:
    """512 transitions with priorities, for a replay of transitions."""
    numbers = np.arange(first, first + BLOCK)
    obs = observations(kind, first, BLOCK + 1)
    return {
        "obs": obs[:-1],
        "next_obs": obs[1:],
        "action": (numbers % 2).astype(np.int32),
        "reward": (numbers % 8).astype(np.float32),
        "done": np.zeros(BLOCK, np.float32),
        "priority": priorities(first),
    }


def priorities(seed: int) -> Array:
    return np.random.default_rng(seed).random(BLOCK).astype(np.float32) + np.float32(0.01)


def cycles(
    make: Callable[[int], Any],
    insert: Callable[[Any], Any],
    sample: Callable[[], Any],
    update: Callable[[Any, Array], Any],
    *,
    first: int,
    count: int,
) -> tuple[dict[str, float], Any]:
    """Median µs of each part and of a cycle, over `count` cycles on a full replay, and a draw."""
    took: list[tuple[float, float, float]] = []
    drawn: Any = None
    for at in range(count):
        fresh = make(first + at * BLOCK)
        values = priorities(at)
        began = time.perf_counter()
        insert(fresh)
        inserted = time.perf_counter()
        drawn = sample()
        sampled = time.perf_counter()
        update(drawn, values)
        took.append((inserted - began, sampled - inserted, time.perf_counter() - sampled))
    parts = [statistics.median(part) * 1e6 for part in zip(*took, strict=True)]
    whole = statistics.median(map(sum, took)) * 1e6
    return {"cycle": whole, "insert": parts[0], "sample": parts[1], "update": parts[2]}, drawn


def is_right(obs: Array, next_obs: Array, reward: Array, weight: Array) -> bool:
    """Whether a drawn batch has only inserted rows and valid importance weights."""
    numbers = numbers_of(obs)
    rows = len(numbers) == BLOCK and len(set(numbers.tolist())) > 1
    data = (numbers_of(next_obs) == numbers + 1).all() and (reward.ravel() == numbers % 8).all()
    return bool(
        rows and data and (weight > 0).all() and weight.max() <= 1.0001 and weight.min() < 1
    )


# --- Inference ------------------------------------------------------------------------------------


def weights(net: str) -> tuple[list[tuple[Array, Array]], list[tuple[Array, Array]]]:
    """Convolutions (kernels out, in, height, width) and dense layers (in, out), with biases."""
    rng = np.random.default_rng(11)

    def drawn(shape: tuple[int, ...], fan_in: int) -> Array:
        return np.asarray((rng.random(shape) * 2 - 1) * np.sqrt(6 / fan_in), np.float32)

    convs = [
        (drawn((out, into, side, side), into * side * side), drawn((out,), 600))
        for out, into, side, _ in NATURE_CONVS * (net == "Nature")
    ]
    sizes = NETS[net]
    return convs, [(drawn((into, out), into), drawn((out,), 600)) for into, out in pairwise(sizes)]


def questions(net: str, count: int = 256) -> Array:
    """Observations to decide on; float32[count, 4] or uint8[count, 4, 84, 84]."""
    rng = np.random.default_rng(12)
    if net == "Nature":
        return (rng.random((count, 4, *FRAME)) * 256).astype(np.uint8)
    return (rng.random((count, 4)) * 2 - 1).astype(np.float32)


def decide(act: Callable[[Array], int], net: str, calls: int) -> dict[str, Any]:
    """p50 and p99 in µs of one decision, and the actions for the first 64 observations."""
    observed = questions(net)
    answers = [int(act(obs)) for obs in observed[:64]]
    took = np.empty(calls)
    for at in range(calls):
        obs = observed[at % len(observed)]
        began = time.perf_counter_ns()
        act(obs)
        took[at] = time.perf_counter_ns() - began
    p50, p99 = (np.quantile(took, [0.5, 0.99]) / 1e3).tolist()
    return {f"{net} p50": p50, f"{net} p99": p99, "answers": answers}


def inference(
    make: Callable[[str], Callable[[Array], int]], request: dict[str, Any]
) -> Callable[[], dict[str, Any]]:
    """A round of every network: its times, and its answers for comparison."""
    policies = {net: make(net) for net in NETS}

    def run() -> dict[str, Any]:
        values: dict[str, float] = {}
        answers: dict[str, list[int]] = {}
        for net, act in policies.items():
            result = decide(act, net, request["calls"] // (10 if net == "Nature" else 1))
            answers[net] = result.pop("answers")
            values |= result
        return {"values": values, "answers": answers}

    return run
