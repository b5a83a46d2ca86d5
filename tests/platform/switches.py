"""A game small enough to learn in a second: press the switch that is lit; ten presses an
episode."""

import atexit
import os
import tempfile
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

GAME = "tests.platform.switches:Switches-v0"
QUICK = {"eval_episodes": 5, "checkpoint_every": 512}
"""Settings for runs that only have to go through all the motions."""

# Programs that were compiled once are loaded by every later test, in whatever process.
os.environ.setdefault(
    "UNDERSTUDY_COMPILE_CACHE", str(Path(tempfile.gettempdir()) / "understudy-tests-compiled")
)


class Switches(gymnasium.Env[Any, Any]):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 50}  # noqa: RUF012
    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None, presses: int = 10) -> None:
        self.render_mode = render_mode
        self._presses = presses
        self.is_closed = False
        self.grip: Any = None
        self.resets = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.resets = self.resets + 1
        self._done = 0
        return self._light(), {}

    def _light(self) -> Any:
        self._lit = int(self.np_random.integers(2))
        return np.eye(2, dtype=np.float32)[self._lit]

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(action == self._lit)
        self._done += 1
        return self._light(), reward, self._done == self._presses, False, {}

    def render(self) -> Any:
        if self.render_mode is None:
            return None
        frame = np.zeros((60, 800, 3), np.uint8)
        frame[:, self._lit * 400 : self._lit * 400 + 400] = 255
        return frame

    def close(self) -> None:
        self.is_closed = True


class Brighter(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Light twice as bright."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Box(0, 2, (2,), np.float32)

    def observation(self, observation: Any) -> Any:
        return observation * np.float32(2)


class Unpaid(gymnasium.RewardWrapper[Any, Any]):
    """Every reward is NaN."""

    def reward(self, reward: Any) -> float:
        return float("nan")


class Short(gymnasium.wrappers.TimeLimit[Any, Any]):
    """Three presses an episode."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env, max_episode_steps=3)


class Chatty(Switches):
    """Prints without a newline: from Python, from below it and, if asked to, at the very end."""

    def __init__(self, is_polite: bool = False) -> None:
        super().__init__()
        if is_polite:
            atexit.register(print, "Goodbye", end="")

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        print("Hello", end="")
        os.write(1, b"from C")
        return super().reset(seed=seed)


if "Switches-v0" not in gymnasium.registry:
    gymnasium.register(
        "Switches-v0", entry_point="tests.platform.switches:Switches", reward_threshold=9.0
    )
    gymnasium.register("Chatty-v0", entry_point="tests.platform.switches:Chatty")
    gymnasium.register(
        "Polite-v0", entry_point="tests.platform.switches:Chatty", kwargs={"is_polite": True}
    )
