"""The actions that a vector env's step was given: one whole number for each env."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from understudy.core.errors import ConfigError


def checked_num_envs(num_envs: int) -> int:
    """The number of envs side by side, or ConfigError."""
    if num_envs < 1:
        raise ConfigError(f"num_envs is {num_envs}; give a whole number from 1")
    return num_envs


def checked_actions(actions: Any, num_envs: int, *, num_actions: int) -> NDArray[np.int64]:
    """The actions as int64[num_envs], or ConfigError for what is no action of the game."""
    given = np.asarray(actions)
    if given.dtype.kind not in "iu" or given.shape != (num_envs,):
        raise ConfigError(
            f"actions are {given.dtype}{list(given.shape)}; give whole numbers, one for each of {num_envs} envs"
        )
    whole = given.astype(np.int64, copy=False)
    # Without a sign what is below 0 is very large, so that one comparison finds both.
    if np.maximum.reduce(whole.view(np.uint64)) >= num_actions:
        at = int(np.argmax(whole.view(np.uint64)))
        raise ConfigError(f"the action of env {at} is {given[at]}; give whole numbers from 0 to {num_actions - 1}")
    return whole
