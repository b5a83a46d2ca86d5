"""How much each env explores: a ladder of epsilons from a curious first to a nearly greedy last."""

import numpy as np
from numpy.typing import NDArray

from understudy.core.errors import ConfigError


def ladder(n: int, *, base: float = 0.4, alpha: float = 7.0) -> NDArray[np.float32]:
    """float32[n]: base^(1 + alpha * i / (n - 1)); a single env explores with the base itself."""
    return np.array([epsilon_of(i, n, base=base, alpha=alpha) for i in range(n)], np.float32)


def epsilon_of(index: int, n: int, *, base: float = 0.4, alpha: float = 7.0) -> float:
    """The epsilon of one env of `n`; a function of its place alone, so others may come and go.

    `n` is the number of places, not of those at work: an index beyond it begins the ladder again.
    """
    if n < 1 or index < 0:
        raise ConfigError(f"place {index} of {n}; give a place from 0 and a number of places from 1")
    if not 0 < base <= 1 or alpha < 0:
        raise ConfigError(f"base is {base} and alpha {alpha}; give a base above 0 and up to 1, and an alpha from 0")
    return float(base ** (1 + alpha * (index % n) / max(1, n - 1)))
