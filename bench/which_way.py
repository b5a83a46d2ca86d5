"""WhichWay: a pixel game that a single frame cannot solve.

A bright square crosses an 84x84 image to the left or to the right, and wraps around. The player
names the direction: reward 1 for each correct answer. The position of the square reveals nothing,
because start and direction are random in every episode; two frames reveal the direction. Guessing
earns half a point per step; the best player has to guess only at the first step.
"""

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

SIDE = 84
SQUARE = 14
STRIDE = 7
STEPS = 16
BEST = STEPS - 0.5
GUESSING = STEPS / 2


class WhichWay(gymnasium.Env[NDArray[np.uint8], np.int64]):
    """uint8[84, 84] frames, two actions, 16 steps."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (SIDE, SIDE), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.render_mode = render_mode
        self._at = 0
        self._direction = 0
        self._n_steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        super().reset(seed=seed)
        self._at = int(self.np_random.integers(SIDE // STRIDE))
        self._direction = int(self.np_random.integers(2))
        self._n_steps = 0
        return self._frame(), {}

    def step(self, action: np.int64) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        reward = float(int(action) == self._direction)
        self._at = (self._at + (1 if self._direction else -1)) % (SIDE // STRIDE)
        self._n_steps += 1
        return self._frame(), reward, self._n_steps >= STEPS, False, {}

    def _frame(self) -> NDArray[np.uint8]:
        frame = np.zeros((SIDE, SIDE), np.uint8)
        columns = (self._at * STRIDE + np.arange(SQUARE)) % SIDE
        frame[35:49, columns] = 255
        return frame

    def render(self) -> NDArray[np.uint8]:
        return np.repeat(self._frame()[:, :, None], 3, axis=2)
