"""Small random games for the actor tests; all randomness comes from the seed of the reset."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class RandomEnv(gymnasium.Env[Any, Any]):
    """Random observations and rewards that depend on the action; ends in all ways."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.n_steps = 0
        self.heard = 0.0
        return self.observe(), self.info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.check(action)
        self.n_steps += 1
        self.heard = 0.5 * self.heard + float(np.sum(action))
        chance = self.np_random.random()
        reward = float(self.np_random.normal()) + self.heard
        return self.observe(), reward, chance < 0.08, chance > 0.94 or chance < 0.02, self.info()

    def check(self, action: Any) -> None:
        assert self.action_space.contains(action), action

    def observe(self) -> Any:
        raise NotImplementedError("each game below says what it shows")

    def info(self) -> dict[str, Any]:
        return {}

    def numbers(self, n: int) -> Any:
        return (self.np_random.normal(size=n) + self.heard).astype(np.float32)


class PlainEnv(RandomEnv):
    """A vector observation and three actions that start at 2."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(3, start=2)

    def observe(self) -> Any:
        return self.numbers(3)


class MixedEnv(RandomEnv):
    """A nested observation and a Box action of two dimensions, in float64."""

    observation_space = spaces.Dict(
        {
            "picture": spaces.Box(0, 255, (4, 4), np.uint8),
            "inner": spaces.Tuple(
                [spaces.Box(-np.inf, np.inf, (2,), np.float32), spaces.Discrete(5)]
            ),
        }
    )
    action_space = spaces.Box(-1.0, 2.0, (2, 2), np.float64)

    def observe(self) -> Any:
        picture = self.np_random.integers(256, size=(4, 4)).astype(np.uint8)
        return {
            "picture": picture,
            "inner": (self.numbers(2), np.int64(self.np_random.integers(5))),
        }


class MaskedEnv(RandomEnv):
    """At each step only some of four actions are valid; an invalid one raises."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(4, start=-1)

    def check(self, action: Any) -> None:
        assert self.mask[action + 1], f"invalid action {action} of {self.mask}"

    def observe(self) -> Any:
        self.mask = self.np_random.random(4) < 0.5
        self.mask[self.np_random.integers(4)] = True
        return self.numbers(3)

    def info(self) -> dict[str, Any]:
        return {"action_mask": self.mask.astype(np.int8)}


class UnseededEnv(PlainEnv):
    """Plays a different episode each time, whatever the seed."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        return super().reset(seed=None, options=options)
