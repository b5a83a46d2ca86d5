"""LiveEnvs: a vector env with its current observations, as the columns that a policy reads."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from understudy.act.vector import Envs, obs_splitter
from understudy.act.vector_envs import MASK
from understudy.core.errors import ConfigError, GameFailed, UnderstudyError
from understudy.core.tensors import Array
from understudy.experience.game import GameSpec
from understudy.experience.spaces import Box, Discrete, describe
from understudy.nn.heads import env_actions

Flags = NDArray[np.bool_]


class LiveEnvs:
    """Observation columns, action masks and frame stacks of envs that the caller resets."""

    def __init__(self, envs: Envs, game: GameSpec) -> None:
        self.envs = envs
        self.num_envs = envs.num_envs
        self.game = game
        self.obs: dict[str, Array] = {}
        """Column name to [envs, ...]."""
        self.frames: dict[str, Array] | None = None
        """Column name to [envs, stack, ...], oldest first; None if the policy uses no stacks."""
        self.raw_reward: Array | None = None
        """Rewards of the last step below any wrappers, float64[envs]; None without wrappers."""
        n_actions = game.discrete.n if game.has_action_mask and game.discrete else 0
        self.action_mask: Flags | None = (
            np.ones((self.num_envs, n_actions), np.bool_) if n_actions else None
        )
        self._columns = obs_splitter(game)
        self._all = np.ones(self.num_envs, np.bool_)
        space = game.action.get("")
        if not isinstance(space, Discrete | Box):
            raise ConfigError(
                f"{game.game} has the actions {describe(game.action)}; actors support a single "
                "Discrete or Box space, so wrap the env"
            )
        self._space = space

    @property
    def inputs(self) -> dict[str, Array]:
        """The columns that a policy reads: `frames` if it uses stacks, else `obs`."""
        return self.obs if self.frames is None else self.frames

    def keep_stacks(self, stack: int) -> None:
        """From now on, stack each env's last observations; at first, copies of the current one."""
        if stack == 1:
            self.frames = None
        elif self.frames is None or next(iter(self.frames.values())).shape[1] != stack:
            self.frames = {name: np.stack([column] * stack, 1) for name, column in self.obs.items()}

    def actions(self, decided: Array) -> Array:
        """Return a policy's actions in the env's format.

        A Discrete space's start is added; for a Box space, shape and dtype are changed to its own.
        """
        space = self._space
        if isinstance(space, Discrete):
            return decided if space.start == 0 else decided + np.int32(space.start)
        if decided.shape[1:] == space.shape and decided.dtype == space.dtype:
            return decided
        return env_actions(self.game, decided)

    def reset(self, seeds: Sequence[int | None], mask: Flags | None = None) -> None:
        """Start an episode in the envs that `mask` selects, or in all."""
        options = None if mask is None else {"reset_mask": mask}
        mask = self._all if mask is None else mask
        try:
            obs, infos = self.envs.reset(seed=list(seeds), options=options)  # type: ignore[arg-type]
            self.obs = self._columns(obs)
            self._read_masks(infos, mask)
        except UnderstudyError:
            raise
        except Exception as error:
            raise self._failed("reset", error) from error
        if self.frames is not None:
            for name, column in self.obs.items():
                self.frames[name][mask] = column[mask][:, None]

    def step(self, action: Array) -> tuple[Array, Flags, Flags]:
        """Step every env; return reward, terminated, truncated. `obs` has final observations."""
        try:
            obs, reward, terminated, truncated, infos = self.envs.step(action)
            self.obs = self._columns(obs)
            self._read_masks(infos, self._all)
            self.raw_reward = getattr(self.envs, "raw_reward", None)
        except UnderstudyError:
            raise
        except Exception as error:
            raise self._failed("step", error) from error
        if self.frames is not None:
            for name, column in self.obs.items():
                frames = self.frames[name]
                frames[:, :-1] = frames[:, 1:]
                frames[:, -1] = column
        return reward, terminated, truncated

    def _failed(self, call: str, error: Exception) -> GameFailed:
        what = f"{type(error).__name__}: {error}"
        return GameFailed(
            f"an env of {self.game.game} failed in {call}(): {what[:300]}; fix the env "
            "(Gymnasium's check_env helps), then continue with --resume; --debug shows where"
        )

    def obs_copies(self, envs: NDArray[np.int64]) -> dict[str, Array]:
        """Return copies of these envs' observations and, if the game has masks, `action_mask`."""
        rows = {name: column[envs] for name, column in self.obs.items()}
        return rows if self.action_mask is None else {**rows, "action_mask": self.action_mask[envs]}

    def check_masks(self) -> None:
        """Raise ConfigError if an env whose episode is running allows no action."""
        if self.action_mask is not None and not self.action_mask.any(1).all():
            env = int(np.flatnonzero(~self.action_mask.any(1))[0])
            raise ConfigError(
                f"env {env} of {self.game.game} allows no action; its {MASK} must allow at least "
                "one until the episode ends"
            )

    def _read_masks(self, infos: dict[str, Any], mask: Flags) -> None:
        if self.action_mask is None:
            if MASK in infos and not self.game.has_action_mask:
                raise ConfigError(
                    f"an info of {self.game.game} has an {MASK}, but the info of its first reset "
                    "had none, so masks would be ignored; add one to every info, from the first "
                    "reset on"
                )
            return
        self.action_mask[mask] = True  # without a mask, all actions are valid
        masks = infos.get(MASK)
        if masks is None:
            return
        mask = mask & infos.get(f"_{MASK}", self._all)
        if mask.any():
            self.action_mask[mask] = np.array(masks[mask].tolist(), np.bool_)
