"""The games of `bench/scale.py`: CartPole, and one that waits five milliseconds in each step.

Runs in the peers' own environments, so it uses only Gymnasium and NumPy.
"""

import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

STEP_S = 0.005


class Sleepy(gymnasium.Env[Any, Any]):
    """A game that waits in every step, as one in another process or on another machine does."""

    observation_space = gymnasium.spaces.Box(-1, 1, (8,), np.float32)
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, episode_steps: int = 200, step_s: float = STEP_S) -> None:
        self._episode_steps = episode_steps
        self._step_s = step_s

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._n_steps = 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._step_s:
            time.sleep(self._step_s)
        self._n_steps += 1
        return self._obs(), float(action == 1), False, self._n_steps == self._episode_steps, {}

    def _obs(self) -> Any:
        return self.np_random.random(8, dtype=np.float32)


class Slowed(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Waits in every step of another game."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        time.sleep(STEP_S)
        return self.env.step(action)


def fast(**_: Any) -> gymnasium.Env[Any, Any]:
    return gymnasium.make("CartPole-v1")


def slow(**_: Any) -> gymnasium.Env[Any, Any]:
    return Sleepy()


GAMES: dict[str, Callable[..., gymnasium.Env[Any, Any]]] = {"fast": fast, "slow": slow}
