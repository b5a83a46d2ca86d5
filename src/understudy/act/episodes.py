"""Which episodes ended during a collect, and how far the open ones are."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class EpisodeEnded(NamedTuple):
    """An episode that ended during a collect; `env` counts over all actors of a run."""

    env: int
    return_: float
    length: int
    seed: int


@dataclass(frozen=True, slots=True)
class Standing:
    """How far the open episode of each env is: float64[envs] and int64[envs]."""

    return_: NDArray[np.float64]
    length: NDArray[np.int64]


def count(
    reward: NDArray[np.float64], ended: NDArray[np.bool_], before: Standing
) -> tuple[Standing, NDArray[np.float64], NDArray[np.int64]]:
    """Where the episodes stand after [steps, envs] more; return and length of those that ended, by step and env."""
    n_steps, num_envs = reward.shape
    rewards, ends = reward.T.flatten(), ended.T.ravel()  # env after env; rewards are changed here, so copied
    first = np.arange(num_envs) * n_steps
    rewards[first] += before.return_
    begins = ends.copy()  # the step behind an end begins a part, as does an env's first step
    begins[1:] = ends[:-1]
    begins[first] = True
    starts = np.flatnonzero(begins)
    last = np.append(starts[1:], len(rewards)) - 1
    returns, lengths = np.add.reduceat(rewards, starts), last + 1 - starts
    lengths[np.searchsorted(starts, first)] += before.length
    has_ended, of_env = ends[last], starts // n_steps
    after = Standing(np.zeros(num_envs), np.zeros(num_envs, np.int64))
    after.return_[of_env[~has_ended]], after.length[of_env[~has_ended]] = returns[~has_ended], lengths[~has_ended]
    closed = np.flatnonzero(has_ended)
    in_time = closed[np.lexsort((of_env[closed], last[closed] % n_steps))]
    return after, returns[in_time], lengths[in_time]
