"""CartPoleVector: many CartPole-v1 side by side in NumPy, the same bits as Gymnasium's one by one."""

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from understudy.act.reset_seeds import one_for_each, reset_mask
from understudy.act.vector_actions import checked_actions, checked_num_envs
from understudy.games import cartpole

GAME_ID = "CartPole-v1"


class CartPoleVector(VectorEnv[Any, Any, Any]):
    """A vector env whose caller resets what has ended: `reset(seed=[...], options={"reset_mask": mask})`."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = checked_num_envs(num_envs)
        self.spec = gymnasium.spec(GAME_ID)
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED, "render_modes": []}
        self.render_mode = None
        high = np.array([2 * cartpole.MAX_POSITION, np.inf, 2 * cartpole.MAX_ANGLE, np.inf], np.float32)
        self.single_observation_space = gymnasium.spaces.Box(-high, high, dtype=np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._carts, self._rewards = cartpole.Carts(num_envs), np.ones(num_envs)
        self._elapsed = np.zeros(num_envs, np.int64)
        self._first, self._place = np.zeros((4, 0)), dict[int | None, int]()

    def prepare(self, seeds: NDArray[np.uint32]) -> None:
        """Get ready for resets with these seeds, which makes them cheaper; forgets those of earlier calls."""
        self._first = cartpole.reset_many(seeds)
        self._place = dict(zip(seeds.tolist(), range(len(seeds)), strict=True))

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """All observations, after a reset of those that the mask names, or of all."""
        mask, seeds = reset_mask(options, self.num_envs), one_for_each(seed, self.num_envs)
        envs = np.arange(self.num_envs) if mask is None else mask.nonzero()[0]
        self._carts.state[:, envs] = self._first_states([seeds[env] for env in envs.tolist()])
        self._elapsed[envs] = 0
        return self._obs(), {}

    def step(
        self, actions: NDArray[np.integer[Any]]
    ) -> tuple[
        NDArray[np.float32], NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]
    ]:  # fmt: skip
        """One step of every env; an env that has ended goes on falling until it is reset."""
        terminated = self._carts.step(checked_actions(actions, self.num_envs, num_actions=2))
        self._elapsed += 1
        return self._obs(), self._rewards.copy(), terminated, self._elapsed >= cartpole.MAX_EPISODE_STEPS, {}

    def _first_states(self, seeds: Sequence[int | None]) -> NDArray[np.float64]:
        try:
            return self._first[:, [self._place[seed] for seed in seeds]]
        except KeyError:  # of seeds that nobody told about
            return np.array([cartpole.reset(seed) for seed in seeds]).T

    def _obs(self) -> NDArray[np.float32]:
        return self._carts.state.T.astype(np.float32, order="C")
