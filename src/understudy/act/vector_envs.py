"""Vector envs whose caller resets what has ended: `reset(seed=[...], options={"reset_mask":
mask})`."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, iterate
from numpy.typing import NDArray

from understudy.core.errors import ConfigError
from understudy.games import cartpole

Flags = NDArray[np.bool_]
Step = tuple[Any, NDArray[np.float64], Flags, Flags, dict[str, Any]]
Seed = int | Sequence[int | None] | None
"""What a reset is given: one seed, one for each env, or none."""

MASK = "action_mask"
"""Where an env's info says which actions are legal."""
CARTPOLE = "CartPole-v1"


class PlainEnvs(SyncVectorEnv):
    """A game's envs stepped one after another, with little around the games' own steps; infos
    hold only the masks."""

    def __init__(self, make: Callable[[], gymnasium.Env[Any, Any]], num_envs: int) -> None:
        super().__init__([make] * num_envs, autoreset_mode=AutoresetMode.DISABLED)
        self.spec = self.envs[0].spec
        self._env_obs: list[Any] = [None] * num_envs
        space = self.single_observation_space
        self._row = space.shape if isinstance(space, spaces.Box) else ()

    def reset(
        self, *, seed: Seed = None, options: dict[str, Any] | None = None
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
        assert not self._autoreset_envs.any(), (
            f"envs that ended were not reset: {self._autoreset_envs}"
        )
        infos: dict[str, Any] = {}
        shown = self._env_obs
        rewards = np.empty(self.num_envs)
        terminated, truncated = np.empty((2, self.num_envs), np.bool_)
        for i, (env, action) in enumerate(
            zip(self.envs, iterate(self.action_space, actions), strict=True)
        ):
            shown[i], rewards[i], terminated[i], truncated[i], info = env.step(action)
            if MASK in info:
                infos = self._add_info(infos, {MASK: info[MASK]}, i)
        self._autoreset_envs = terminated | truncated
        return self._batched(), rewards, terminated, truncated, infos

    def _batched(self) -> Any:
        rows = self._env_obs
        row = self._row
        space = self.single_observation_space
        if row and len(set(map(len, rows))) == 1:
            batch = np.empty((self.num_envs, *row), space.dtype)
            # Joined along their first axis, since stacking makes a view of each row before.
            np.concatenate(rows, out=batch.reshape(self.num_envs * row[0], *row[1:]))
            return batch
        self._observations = concatenate(space, rows, self._observations)
        return deepcopy(self._observations)


class CartPoleVector(VectorEnv[Any, Any, Any]):
    """Many CartPole-v1 side by side in NumPy, the same bits as Gymnasium's one by one."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = checked_num_envs(num_envs)
        self.spec = gymnasium.spec(CARTPOLE)
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED, "render_modes": []}
        self.render_mode = None
        high = np.array(
            [2 * cartpole.MAX_POSITION, np.inf, 2 * cartpole.MAX_ANGLE, np.inf], np.float32
        )
        self.single_observation_space = spaces.Box(-high, high, dtype=np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._carts = cartpole.Carts(num_envs)
        self._rewards = np.ones(num_envs)
        self._elapsed = np.zeros(num_envs, np.int64)
        self._first = np.zeros((4, 0))
        self._place = dict[int | None, int]()

    def prepare(self, seeds: NDArray[np.uint32]) -> None:
        """Get ready for resets with these seeds, which makes them cheaper; forgets those of
        earlier calls."""
        self._first = cartpole.reset_many(seeds)
        self._place = dict(zip(seeds.tolist(), range(len(seeds)), strict=True))

    def reset(
        self, *, seed: Seed = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """All observations, after a reset of those that the mask names, or of all."""
        mask, seeds = checked_reset(seed, options, num_envs=self.num_envs)
        envs = mask.nonzero()[0]
        chosen = [seeds[env] for env in envs.tolist()]
        try:
            states = self._first[:, [self._place[one] for one in chosen]]
        except KeyError:  # seeds that were not prepared
            states = np.array([cartpole.reset(one) for one in chosen]).T
        self._carts.state[:, envs] = states
        self._elapsed[envs] = 0
        return self._obs(), {}

    def step(self, actions: NDArray[np.integer[Any]]) -> Step:
        """One step of every env; an env that has ended goes on falling until it is reset."""
        terminated = self._carts.step(checked_actions(actions, self.num_envs, num_actions=2))
        self._elapsed += 1
        return (
            self._obs(),
            self._rewards.copy(),
            terminated,
            self._elapsed >= cartpole.MAX_EPISODE_STEPS,
            {},
        )

    def _obs(self) -> NDArray[np.float32]:
        return self._carts.state.T.astype(np.float32, order="C")


# --- What our own vector envs accept --------------------------------------------------------------


def checked_num_envs(num_envs: int) -> int:
    """The number of envs side by side, or ConfigError."""
    if num_envs < 1:
        raise ConfigError(f"num_envs is {num_envs}; give a whole number from 1")
    return num_envs


def checked_reset(
    seed: Seed, options: Mapping[str, Any] | None, *, num_envs: int
) -> tuple[Flags, Sequence[int | None]]:
    """Which envs a reset is for, bool[num_envs], and a seed for each env: consecutive ones from
    a number; None: any."""
    given = (options or {}).get("reset_mask")
    mask = np.ones(num_envs, np.bool_) if given is None else np.asarray(given, np.bool_)
    if mask.shape != (num_envs,):
        raise ConfigError(
            f"reset_mask has shape {list(mask.shape)}; give {num_envs} of True and False, one an "
            "env"
        )
    if seed is None:
        return mask, [None] * num_envs
    if isinstance(seed, int | np.integer):
        return mask, [int(seed) + i for i in range(num_envs)]
    if not isinstance(seed, Sequence | np.ndarray):
        raise ConfigError(f"seed is {seed!r}; give one whole number, or one for each env")
    if len(seed) != num_envs:
        raise ConfigError(
            f"{len(seed)} seeds for {num_envs} envs; give one number, or one for each env"
        )
    return mask, seed


def checked_actions(actions: Any, num_envs: int, *, num_actions: int) -> NDArray[np.int64]:
    """The actions as int64[num_envs], or ConfigError for what is no action of the game."""
    given = np.asarray(actions)
    if given.dtype.kind not in "iu" or given.shape != (num_envs,):
        raise ConfigError(
            f"actions are {given.dtype}{list(given.shape)}; give whole numbers, one for each of "
            f"{num_envs} envs"
        )
    whole = given.astype(np.int64, copy=False)
    # Without a sign what is below 0 is very large, so that one comparison finds both.
    if np.maximum.reduce(whole.view(np.uint64)) >= num_actions:
        at = int(np.argmax(whole.view(np.uint64)))
        raise ConfigError(
            f"the action of env {at} is {given[at]}; give whole numbers from 0 to {num_actions - 1}"
        )
    return whole
