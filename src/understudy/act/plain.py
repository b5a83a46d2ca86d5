"""PlainEnvs: a game's envs stepped one after another, with little around the games' own steps."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, iterate
from numpy.typing import NDArray

Flags = NDArray[np.bool_]
Step = tuple[Any, NDArray[np.float64], Flags, Flags, dict[str, Any]]

MASK = "action_mask"
"""Where an env's info says which actions are legal."""


class PlainEnvs(SyncVectorEnv):
    """A SyncVectorEnv whose caller resets what has ended; of the infos it tells nothing but the masks."""

    def __init__(self, make: Callable[[], gymnasium.Env[Any, Any]], num_envs: int) -> None:
        super().__init__([make] * num_envs, autoreset_mode=AutoresetMode.DISABLED)
        self.spec = self.envs[0].spec
        self._env_obs: list[Any] = [None] * num_envs
        space = self.single_observation_space
        self._row = space.shape if isinstance(space, spaces.Box) else ()

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """All observations, after a reset of those that the mask names, or of all."""
        if not isinstance(seed, list) or options is None or "reset_mask" not in options:
            return super().reset(seed=seed, options=options)  # type: ignore[arg-type]
        infos: dict[str, Any] = {}
        rest = dict(options)
        mask: Flags = rest.pop("reset_mask")
        for i in mask.nonzero()[0].tolist():
            self._env_obs[i], info = self.envs[i].reset(seed=seed[i], options=rest)
            if MASK in info:
                infos = self._add_info(infos, {MASK: info[MASK]}, i)
        self._autoreset_envs[mask] = False
        return self._batched(), infos

    def step(self, actions: Any) -> Step:
        """One step of every env; none may have ended before."""
        assert not self._autoreset_envs.any(), f"envs that ended were not reset: {self._autoreset_envs}"
        infos: dict[str, Any] = {}
        shown, rewards = self._env_obs, np.empty(self.num_envs)
        terminated, truncated = np.empty((2, self.num_envs), np.bool_)
        for i, (env, action) in enumerate(zip(self.envs, iterate(self.action_space, actions), strict=True)):
            shown[i], rewards[i], terminated[i], truncated[i], info = env.step(action)
            if MASK in info:
                infos = self._add_info(infos, {MASK: info[MASK]}, i)
        self._autoreset_envs = terminated | truncated
        return self._batched(), rewards, terminated, truncated, infos

    def _batched(self) -> Any:
        rows, row, space = self._env_obs, self._row, self.single_observation_space
        if row and len(set(map(len, rows))) == 1:
            batch = np.empty((self.num_envs, *row), space.dtype)
            # Joined along their first axis, since stacking makes a view of each row before.
            np.concatenate(rows, out=batch.reshape(self.num_envs * row[0], *row[1:]))
            return batch
        self._observations = concatenate(space, rows, self._observations)
        return deepcopy(self._observations)
