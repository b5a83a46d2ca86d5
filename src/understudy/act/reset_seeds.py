"""What a vector env's reset was given: one seed, one for each env, or none; and which envs it is for."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from understudy.core.errors import ConfigError


def one_for_each(seed: int | Sequence[int | None] | None, num_envs: int) -> Sequence[int | None]:
    """A seed for each env: consecutive ones from a number; None: any."""
    if seed is None:
        return [None] * num_envs
    if isinstance(seed, int | np.integer):
        return [int(seed) + i for i in range(num_envs)]
    if not isinstance(seed, Sequence | np.ndarray):
        raise ConfigError(f"seed is {seed!r}; give one whole number, or one for each env")
    if len(seed) != num_envs:
        raise ConfigError(f"{len(seed)} seeds for {num_envs} envs; give one number, or one for each env")
    return seed


def reset_mask(options: Mapping[str, Any] | None, num_envs: int) -> NDArray[np.bool_] | None:
    """Which envs the options ask for, bool[num_envs]; None: all."""
    given = (options or {}).get("reset_mask")
    if given is None:
        return None
    mask = np.asarray(given, np.bool_)
    if mask.shape != (num_envs,):
        raise ConfigError(f"reset_mask has shape {list(mask.shape)}; give {num_envs} of True and False, one an env")
    return mask
