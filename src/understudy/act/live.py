"""LiveEnvs: a vector env with its current observations, as the columns that a policy reads."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate, create_empty_array
from numpy.typing import NDArray

from understudy.act.vector import Envs, obs_part, obs_splitter
from understudy.act.vector_envs import MASK, raw_reward_reader
from understudy.core.errors import ConfigError, GameFailed, UnderstudyError
from understudy.core.tensors import Array
from understudy.experience.game import GameSpec
from understudy.experience.spaces import Box, Discrete, describe
from understudy.nn.heads import env_actions

Flags = NDArray[np.bool_]


class LiveEnvs:
    """Observation columns, action masks and frame stacks of envs.

    The caller resets the envs whose episodes ended, also those of a vector env that resets itself:
    there, `reset` changes to the observations of the episodes that the vector env has started
    (SAME_STEP), or lets the next step start them (NEXT_STEP).
    """

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
        self._take_raw = raw_reward_reader(envs)
        self._mode = envs.metadata.get("autoreset_mode", AutoresetMode.DISABLED)
        self.resets_itself = self._mode is not AutoresetMode.DISABLED
        """The vector env resets its envs, from seeds of its own."""
        self.skipped: Flags | None = None
        """Envs that the last step only reset: it is no step of theirs. None unless NEXT_STEP."""
        self._waiting = np.zeros(self.num_envs, np.bool_)
        """NEXT_STEP: the envs that the next step will reset."""
        self._first_obs: dict[str, Array] = {}
        """SAME_STEP: the observations after the resets in the last step, and their masks."""
        self._first_mask: Flags | None = None
        if self._mode is AutoresetMode.NEXT_STEP:
            self.skipped = self._waiting.copy()
        n_actions = game.discrete.n if game.has_action_mask and game.discrete else 0
        self.action_mask: Flags | None = (
            np.ones((self.num_envs, n_actions), np.bool_) if n_actions else None
        )
        self._columns = obs_splitter(game)
        self._layout = {
            name: ((self.num_envs, *space.shape), space.dtype)
            for name, space in game.obs_columns.items()
        }
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
        """Start an episode in the envs that `mask` selects, or in all.

        A vector env that resets itself uses only the first seed, and only without a mask.
        """
        if self.resets_itself and mask is not None:
            self._let_reset(mask)
            return
        options = None if mask is None else {"reset_mask": mask}
        mask = self._all if mask is None else mask
        # Not all vector envs accept a list. From half of a seed, the seeds that the envs derive by
        # counting on are no held-out ones.
        seed = int(seeds[0] or 0) // 2 if self.resets_itself else list(seeds)
        try:
            obs, infos = self.envs.reset(seed=seed, options=options)  # type: ignore[arg-type]
            self.obs = self._columns(obs)
            self._check_size()
            self._check_obs("reset")
            self._read_masks(infos, mask)
        except UnderstudyError:
            raise
        except Exception as error:
            raise self._failed("reset", error) from error
        self._restart_stacks(mask)
        if self._take_raw is not None:
            self._take_raw()  # steps that a wrapper plays in a reset are none of the policy

    def step(self, action: Array) -> tuple[Array, Flags, Flags]:
        """Step every env; return reward, terminated, truncated. `obs` has final observations."""
        try:
            obs, reward, terminated, truncated, infos = self.envs.step(action)
            self.obs = self._columns(obs)
            self._check_obs("step")
            self._read_masks(infos, self._all)
            self.raw_reward = None if self._take_raw is None else self._take_raw()
            if self._mode is AutoresetMode.SAME_STEP and (terminated | truncated).any():
                self._show_finals(infos, (terminated | truncated).nonzero()[0])
        except UnderstudyError:
            raise
        except Exception as error:
            raise self._failed("step", error) from error
        if self.frames is not None:
            for name, column in self.obs.items():
                frames = self.frames[name]
                frames[:, :-1] = frames[:, 1:]
                frames[:, -1] = column
        if self.skipped is not None:
            reward = self._skip_resets(reward, terminated | truncated)
            if self.raw_reward is not None:
                self.raw_reward[self.skipped] = 0.0
        return reward, terminated, truncated

    def _restart_stacks(self, mask: Flags) -> None:
        if self.frames is not None:
            for name, column in self.obs.items():
                self.frames[name][mask] = column[mask][:, None]

    # --- Vector envs that reset themselves --------------------------------------------------------

    def check_resets(self, what: str) -> None:
        """ConfigError if the vector env resets itself; `what` needs envs that the caller resets."""
        if self.resets_itself:
            raise ConfigError(
                f"the vector env of {self.game.game} resets itself ({self._mode}), which does not "
                f"suit {what}; create it with autoreset_mode=AutoresetMode.DISABLED"
            )

    def _let_reset(self, mask: Flags) -> None:
        """Start the episodes that follow those that have just ended in the envs of `mask`."""
        if self._mode is AutoresetMode.NEXT_STEP:
            self._waiting = mask.copy()
            if self.action_mask is not None:
                self.action_mask[mask] = True  # the next action is ignored
            return
        self.obs = self._first_obs
        if self.action_mask is not None and self._first_mask is not None:
            self.action_mask[:] = self._first_mask
        self._restart_stacks(mask)

    def _skip_resets(self, reward: Array, ended: Flags) -> Array:
        """Mark the envs that a step only reset, and return the rewards without theirs."""
        skipped = self._waiting
        self.skipped = skipped
        if not np.count_nonzero(skipped):
            return reward
        if (ended & skipped).any():
            env = int(np.flatnonzero(ended & skipped)[0])
            raise self._otherwise(f"env {env} ended again in the step that resets it")
        self._waiting = np.zeros(self.num_envs, np.bool_)
        self._restart_stacks(skipped)
        return np.where(skipped, 0.0, reward)

    def _show_finals(self, infos: dict[str, Any], envs: NDArray[np.int64]) -> None:
        """Replace the first observations of the next episodes by the final ones of the last."""
        finals = infos.get("final_obs")
        if finals is None or not infos.get("_final_obs", self._all)[envs].all():
            raise self._otherwise(f"the infos of a step that ended env {envs[0]} have no final_obs")
        self._first_obs = self.obs
        if isinstance(finals, list) or (isinstance(finals, np.ndarray) and finals.dtype.hasobject):
            space = self.envs.single_observation_space
            rows = [finals[env] for env in envs.tolist()]
            empty: Any = create_empty_array(space, len(rows))
            columns = self._columns(concatenate(space, rows, empty))
        else:  # stacked, with a row for every env
            columns = {name: column[envs] for name, column in self._columns(finals).items()}
        self.obs = {name: column.copy() for name, column in self.obs.items()}
        for name, column in columns.items():
            self.obs[name][envs] = column
        if self.action_mask is not None:
            self._first_mask = self.action_mask.copy()
            ended = np.zeros(self.num_envs, np.bool_)
            ended[envs] = True
            self._read_masks(infos.get("final_info", {}), ended)

    def _otherwise(self, what: str) -> GameFailed:
        return GameFailed(
            f"the vector env of {self.game.game} does not reset itself as its metadata says "
            f"({self._mode}): {what}; correct its metadata['autoreset_mode']"
        )

    def _check_size(self) -> None:
        n_rows = len(next(iter(self.obs.values())))
        if n_rows != self.num_envs:
            raise ConfigError(
                f"the vector env of {self.game.game} returned observations of {n_rows} of its "
                f"{self.num_envs} envs; create it so that a step plays all of them, such as with "
                "batch_size equal to num_envs"
            )

    def _check_obs(self, call: str) -> None:
        """GameFailed unless the columns of a vector env have the shapes and types of the game."""
        for name, (shape, dtype) in self._layout.items():
            column = self.obs[name]
            if column.shape != shape or (
                column.dtype != dtype and not np.can_cast(column.dtype, dtype, "same_kind")
            ):
                raise GameFailed(
                    f"the vector env of {self.game.game} returned an {name!r} of {_layout(column)} "
                    f"in {call}(), not of {dtype}{list(shape)}; return what its observation_space "
                    "describes"
                )

    def _wrong_obs(self, call: str) -> str:
        """Which env returned an observation that does not fit its space; empty if none did."""
        for env, obs in enumerate(getattr(self.envs, "_env_obs", ())):
            if obs is None and call == "reset":
                continue  # it was not reset yet
            for name, (shape, dtype) in self._layout.items():
                said = f"env {env} of {self.game.game} returned"
                try:
                    part = np.asarray(obs_part(obs, name))
                except (KeyError, IndexError, TypeError, ValueError):
                    return f"{said} no {name!r} in {call}()"
                if part.shape != shape[1:] or not np.can_cast(part.dtype, dtype, "same_kind"):
                    wanted = f"{dtype}{list(shape[1:])}"
                    return f"{said} an {name!r} of {_layout(part)} in {call}(), not of {wanted}"
        return ""

    def _failed(self, call: str, error: Exception) -> GameFailed:
        if wrong := self._wrong_obs(call):
            return GameFailed(
                f"{wrong}; return what its observation_space describes (Gymnasium's check_env "
                "helps), then resume the run"
            )
        what = f"{type(error).__name__}: {error}"
        return GameFailed(
            f"an env of {self.game.game} failed in {call}(): {what[:300]}; fix the env "
            "(Gymnasium's check_env helps), then resume the run; --debug shows where"
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


def _layout(array: Array) -> str:
    dtype = array.dtype.str if array.dtype.kind == "U" else array.dtype
    return f"{dtype}{list(array.shape)}"
