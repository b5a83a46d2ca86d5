"""The seeds that a vector env's reset was given: one number, one for each env, or none."""

from collections.abc import Sequence

from understudy.core.errors import ConfigError


def one_for_each(seed: int | Sequence[int | None] | None, num_envs: int) -> Sequence[int | None]:
    """A seed for each env: consecutive ones from a number; None: any."""
    if seed is None:
        return [None] * num_envs
    seeds = [seed + i for i in range(num_envs)] if isinstance(seed, int) else seed
    if len(seeds) != num_envs:
        raise ConfigError(f"{len(seeds)} seeds for {num_envs} envs; give one number, or one for each env")
    return seeds
