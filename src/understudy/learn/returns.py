"""Returns of rollouts: generalised advantages, where an episode that was truncated is still worth its next state."""

from typing import Any

import jax
import jax.numpy as jnp

from understudy.core.algorithm import Rollout


def advantages(rollout: Rollout, values: Any, next_values: Any, *, discount: Any, trace: Any) -> Any:
    """Generalised advantages, float32[steps, envs]; `values` and `next_values` have that shape too.

    `next_values` is the value of what each step led to before any reset, so a truncated step bootstraps from the
    observation it really reached; a terminated one bootstraps from nothing. No trace crosses either end.
    """
    alive = 1.0 - rollout.terminated.astype(jnp.float32)
    goes_on = 1.0 - (rollout.terminated | rollout.truncated).astype(jnp.float32)
    errors = rollout.reward + discount * next_values * alive - values

    def back(later: Any, row: tuple[Any, Any]) -> tuple[Any, Any]:
        error, on = row
        advantage = error + discount * trace * on * later
        return advantage, advantage

    _, found = jax.lax.scan(back, jnp.zeros_like(values[0]), (errors, goes_on), reverse=True)
    return found
