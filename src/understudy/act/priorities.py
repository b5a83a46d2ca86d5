"""First priorities, computed where the steps are made: |n-step return + discounted value - value of the action|."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from understudy.core.errors import ConfigError
from understudy.core.heads import LOWEST, masked
from understudy.core.tensors import Array

Flags = NDArray[np.bool_]


def best_value(q: Array, legal: Array | None) -> Array:
    """The largest of the values of legal actions, along the last axis; of all, where a mask allows nothing."""
    best: Array = (q if legal is None else masked(q, legal)).max(-1)
    if legal is not None and (is_empty := best < LOWEST).any():
        best[is_empty] = q[is_empty].max(-1)
    return best


def q_of(outputs: Mapping[str, Array]) -> Array:
    """The action values among a network's outputs."""
    if "q" not in outputs:
        raise ConfigError(f"first priorities need a head 'q', got {sorted(outputs)}; leave out the policy's priority")
    return outputs["q"]


def n_step_td(
    taken: Array, after: Array, *, reward: Array, ended: Flags, n_step: int, discount: float
) -> NDArray[np.float32]:
    """float32[steps, envs]; a window that reaches the last step bootstraps there, with fewer rewards.

    `taken` is the value of the action of each step, `after` the value of what it led to: 0 where it terminated.
    """
    n_steps = len(reward)
    target = np.zeros(reward.shape)
    is_open = np.ones(reward.shape, np.bool_)
    stops = ended.copy()
    stops[-1] = True
    for k in range(min(n_step, n_steps)):
        is_live = is_open[: n_steps - k]
        stop = stops[k:] if k < n_step - 1 else np.ones_like(stops[k:])
        gain = discount**k * (reward[k:] + stop * (discount * after[k:]))
        target[: n_steps - k] += np.where(is_live, gain, 0.0)
        is_live &= ~stop
    return np.abs(target - taken).astype(np.float32)
