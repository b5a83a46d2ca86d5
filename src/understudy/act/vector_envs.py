"""Vector envs that their caller resets: `reset(seed=[...], options={"reset_mask": mask})`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space, concatenate, iterate
from numpy.typing import NDArray

from understudy.core.errors import ConfigError
from understudy.games import cartpole

Flags = NDArray[np.bool_]
Step = tuple[Any, NDArray[np.float64], Flags, Flags, dict[str, Any]]
Seed = int | Sequence[int | None] | None
"""The seed of a reset: one number, one for each env, or none."""

MASK = "action_mask"
"""The key of the action mask in an env's info."""
CARTPOLES = ("CartPole-v0", "CartPole-v1")
"""CartPole with a limit of 200 or of 500 steps."""


class RawReward(gymnasium.Wrapper[Any, Any, Any, Any], gymnasium.utils.RecordConstructorArgs):
    """Sums the rewards of the env inside it, so that wrappers around it do not change returns."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        gymnasium.utils.RecordConstructorArgs.__init__(self)
        super().__init__(env)
        self._sum = 0.0

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        self._sum += float(reward)
        return obs, reward, terminated, truncated, info

    def take(self) -> float:
        """The sum since the last call."""
        total = self._sum
        self._sum = 0.0
        return total


class RawRewards(VectorWrapper[Any, Any, Any, Any, Any]):
    """Sums the rewards of the vector env inside it, as RawReward does those of an env."""

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)
        self._sums = np.zeros(env.num_envs)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        obs, rewards, terminated, truncated, infos = super().step(actions)
        self._sums += np.asarray(rewards)
        return obs, rewards, terminated, truncated, infos

    def take(self) -> NDArray[np.float64]:
        """The sums since the last call, float64[envs]."""
        totals = self._sums
        self._sums = np.zeros(self.num_envs)
        return totals


def put_raw_reward(env: Any) -> bool:
    """Put a RawReward, or RawRewards, below an env's innermost NormalizeReward, if it has one."""
    normalizers: list[Any] = [
        layer
        for layer in layers_of(env)
        if isinstance(layer, gymnasium.Wrapper | VectorWrapper) and "return_rms" in vars(layer)
    ]
    if normalizers:
        inside = normalizers[-1].env
        if not isinstance(inside, RawReward | RawRewards):
            of_one = isinstance(inside, gymnasium.Env)
            normalizers[-1].env = RawReward(inside) if of_one else RawRewards(inside)
    return bool(normalizers)


def put_raw_rewards(envs: VectorEnv[Any, Any, Any]) -> None:
    """Put RawReward or RawRewards below any NormalizeReward in or around a vector env.

    ConfigError if it is in another process.
    """
    *_, inner = layers_of(envs)
    if isinstance(inner, AsyncVectorEnv) and any(inner.call("has_wrapper_attr", "return_rms")):
        raise ConfigError(
            f"a NormalizeReward inside the envs of the {type(inner).__name__} hides their own "
            "rewards, of which returns are sums; put gymnasium.wrappers.vector.NormalizeReward "
            "around the vector env instead, or use a SyncVectorEnv"
        )
    has_raw = [put_raw_reward(env) for env in single_envs(envs)]
    if any(has_raw):
        inner.envs = [
            env if has or isinstance(env, RawReward) else RawReward(env)
            for env, has in zip(inner.envs, has_raw, strict=True)
        ]
    else:
        put_raw_reward(envs)


def raw_reward_reader(
    envs: VectorEnv[Any, Any, Any],
) -> Callable[[], NDArray[np.float64]] | None:
    """A function that returns the rewards since its last call, float64[envs], below any wrappers.

    None if the envs return these rewards themselves.
    """
    per_env = [
        layer.take
        for env in single_envs(envs)
        for layer in layers_of(env)
        if isinstance(layer, RawReward)
    ]
    if per_env:
        return lambda: np.array([take() for take in per_env])
    return next((layer.take for layer in layers_of(envs) if isinstance(layer, RawRewards)), None)


class PlainEnvs(SyncVectorEnv):
    """Envs stepped one after another with little overhead; infos contain only action masks."""

    def __init__(self, make: Callable[[], gymnasium.Env[Any, Any]], num_envs: int) -> None:
        super().__init__([make] * num_envs, autoreset_mode=AutoresetMode.DISABLED)
        self.spec = self.envs[0].spec
        self._env_obs: list[Any] = [None] * num_envs
        space = self.single_observation_space
        self._row = space.shape if isinstance(space, spaces.Box) else ()

    def reset(
        self, *, seed: Seed = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the envs in `options['reset_mask']`, or all; return all observations."""
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
        """Step every env; envs whose episode ended must be reset before."""
        assert not self._autoreset_envs.any(), f"ended envs were not reset: {self._autoreset_envs}"
        infos: dict[str, Any] = {}
        env_obs = self._env_obs
        rewards = np.empty(self.num_envs)
        terminated, truncated = np.empty((2, self.num_envs), np.bool_)
        for i, (env, action) in enumerate(
            zip(self.envs, iterate(self.action_space, actions), strict=True)
        ):
            env_obs[i], rewards[i], terminated[i], truncated[i], info = env.step(action)
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
            # Joined along the first axis: stacking would first create a view of each row.
            np.concatenate(rows, out=batch.reshape(self.num_envs * row[0], *row[1:]))
            return batch
        self._observations = concatenate(space, rows, self._observations)
        return deepcopy(self._observations)


def layers_of(env: Any) -> Iterator[Any]:
    """Yield the wrappers of an env or vector env, outermost first, and the env inside them."""
    while isinstance(env, gymnasium.Wrapper | VectorWrapper):
        yield env
        env = env.env
    yield env


def single_envs(envs: VectorEnv[Any, Any, Any]) -> list[gymnasium.Env[Any, Any]]:
    """The envs of a SyncVectorEnv, also inside wrappers; none of another vector env."""
    *_, inner = layers_of(envs)
    return list(inner.envs) if isinstance(inner, SyncVectorEnv) else []


class CartPoleVector(VectorEnv[Any, Any, Any]):
    """Many CartPole envs in NumPy, bit-identical to Gymnasium's single env."""

    def __init__(self, num_envs: int, *, game: str = CARTPOLES[-1]) -> None:
        self.num_envs = checked_num_envs(num_envs)
        self.spec = gymnasium.spec(game)
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
        self._max_steps = self.spec.max_episode_steps or cartpole.MAX_EPISODE_STEPS
        self._rewards = np.ones(num_envs)
        self._elapsed = np.zeros(num_envs, np.int64)
        self._first = np.zeros((4, 0))
        self._place = dict[int | None, int]()

    def prepare(self, seeds: NDArray[np.uint32]) -> None:
        """Precompute the first states of these seeds, for faster resets; replaces earlier seeds."""
        self._first = cartpole.reset_many(seeds)
        self._place = dict(zip(seeds.tolist(), range(len(seeds)), strict=True))

    def reset(
        self, *, seed: Seed = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Reset the envs in `options['reset_mask']`, or all; return all observations."""
        mask, seeds = checked_reset(seed, options, num_envs=self.num_envs)
        envs = mask.nonzero()[0]
        chosen = [seeds[env] for env in envs.tolist()]
        try:
            states = self._first[:, [self._place[seed] for seed in chosen]]
        except KeyError:  # seeds that were not prepared
            states = np.array([cartpole.reset(seed) for seed in chosen]).T
        self._carts.state[:, envs] = states
        self._elapsed[envs] = 0
        return self._obs(), {}

    def step(self, actions: NDArray[np.integer[Any]]) -> Step:
        """Step every env; a cart whose episode has ended keeps moving until its env is reset."""
        terminated = self._carts.step(checked_actions(actions, self.num_envs, num_actions=2))
        self._elapsed += 1
        return (
            self._obs(),
            self._rewards.copy(),
            terminated,
            self._elapsed >= self._max_steps,
            {},
        )

    def _obs(self) -> NDArray[np.float32]:
        return self._carts.state.T.astype(np.float32, order="C")


# --- Arguments of the built-in vector envs --------------------------------------------------------


def checked_num_envs(num_envs: int) -> int:
    """Return the number of envs; ConfigError if it is less than 1."""
    if num_envs < 1:
        raise ConfigError(f"num_envs is {num_envs}; use an integer of at least 1")
    return num_envs


def checked_reset(
    seed: Seed, options: Mapping[str, Any] | None, *, num_envs: int
) -> tuple[Flags, Sequence[int | None]]:
    """Return the envs to reset, bool[num_envs], and one seed per env; None means a random seed.

    A single number n means the seeds n, n + 1, n + 2 and so on.
    """
    reset_mask = (options or {}).get("reset_mask")
    mask = np.ones(num_envs, np.bool_) if reset_mask is None else np.asarray(reset_mask, np.bool_)
    if mask.shape != (num_envs,):
        raise ConfigError(
            f"reset_mask has shape {list(mask.shape)}; use {num_envs} booleans, one for each env"
        )
    if seed is None:
        return mask, [None] * num_envs
    if isinstance(seed, int | np.integer):
        return mask, [int(seed) + i for i in range(num_envs)]
    if not isinstance(seed, Sequence | np.ndarray):
        raise ConfigError(f"seed is {seed!r}; use one integer, or one for each env")
    if len(seed) != num_envs:
        raise ConfigError(
            f"got {len(seed)} seeds for {num_envs} envs; use one integer, or one for each env"
        )
    return mask, seed


def checked_actions(actions: Any, num_envs: int, *, num_actions: int) -> NDArray[np.int64]:
    """Return the actions as int64[num_envs]; ConfigError if one is not an action of the game."""
    array = np.asarray(actions)
    if array.dtype.kind not in "iu" or array.shape != (num_envs,):
        raise ConfigError(
            f"actions are {array.dtype}{list(array.shape)}; use integers, one for each of "
            f"{num_envs} envs"
        )
    integers = array.astype(np.int64, copy=False)
    # As unsigned numbers, negative ones are very large, so one comparison finds every invalid one.
    if np.maximum.reduce(integers.view(np.uint64)) >= num_actions:
        env = int(np.argmax(integers.view(np.uint64)))
        raise ConfigError(
            f"the action of env {env} is {array[env]}; use integers from 0 to {num_actions - 1}"
        )
    return integers
