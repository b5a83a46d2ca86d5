"""Records any Gymnasium env in one line: `env = record(gymnasium.make("CartPole-v1"), data="DIR")`.

Steps are recorded as the wrapped env returned them, in its own dtypes; Dict and Tuple spaces are
flattened. A vector env yields the same transitions as a plain loop over its envs, in every
autoreset mode.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import iterate

from understudy.client.connect import Game, connect
from understudy.client.episode import Decider, Recorder
from understudy.core.errors import ConfigError
from understudy.experience.game import spec_from_gymnasium

MASK = "action_mask"
"""The key of the action mask in an env's info; read only with has_action_mask=True."""


def record(
    env: gymnasium.Env[Any, Any],
    game: Game | str | None = None,
    *,
    player: str | None = None,
    by: Decider = "unknown",
    skill: str | None = None,
    temperature: float | None = None,
    **settings: Any,
) -> "RecordedEnv":
    """Return a recorded env; `game` is a connected Game, or a name to `connect` with `settings`.

    `skill` and `temperature` are those of the bot in `env.act`, as in `Game.episode`.
    """
    connected, is_own = _game(env, game, settings)
    recorder = connected.recorder(player=player, skill=skill, temperature=temperature)
    return RecordedEnv(env, connected, recorder, by=by, is_own=is_own)


def record_vector(
    env: VectorEnv[Any, Any, Any],
    game: Game | str | None = None,
    *,
    player: str | None = None,
    by: Decider = "unknown",
    **settings: Any,
) -> "RecordedVectorEnv":
    """Return a recorded vector env; each of its envs is recorded as a session of its own."""
    connected, is_own = _game(env, game, settings)
    return RecordedVectorEnv(env, connected, player=player, by=by, is_own=is_own)


def _game(env: Any, game: Game | str | None, settings: dict[str, Any]) -> tuple[Game, bool]:
    if isinstance(game, Game):
        if settings:
            raise ConfigError(
                f"got a connected game and also {', '.join(sorted(settings))}; pass these to "
                "`connect`, or pass the game's name instead of the game"
            )
        return game, False
    spec = spec_from_gymnasium(
        env, game=game, has_action_mask=settings.pop("has_action_mask", False)
    )
    return connect(spec, **settings), True


class RecordedEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Records an env without changing it; `close` also closes a game that `record` connected."""

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        game: Game,
        recorder: Recorder,
        *,
        by: Decider,
        is_own: bool,
    ) -> None:
        super().__init__(env)
        self.game = game
        self._by = by
        self._is_own = is_own
        self._recorder = recorder
        self._has_action_mask = game.spec.has_action_mask
        self._action_mask: Any = None

    def act(self, obs: Any, *, deterministic: bool = False, otherwise: Any = None) -> Any:
        """Return the bot's action for the last observation, to pass to `step`."""
        return self._recorder.act(
            obs, action_mask=self._action_mask, deterministic=deterministic, otherwise=otherwise
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        self._action_mask = info.get(MASK) if self._has_action_mask else None
        self._recorder.reset(obs, action_mask=self._action_mask, seed=seed)
        return obs, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._action_mask = info.get(MASK) if self._has_action_mask else None
        self._recorder.step(
            action,
            reward,
            obs,
            terminated,
            truncated,
            action_mask=self._action_mask,
            by=self._by,
        )
        return obs, reward, terminated, truncated, info

    def close(self) -> None:
        self._recorder.close()
        if self._is_own:
            self.game.close()
        super().close()


class RecordedVectorEnv(VectorWrapper[Any, Any, Any, Any, Any]):
    """Records a vector env without changing it; steps that only reset an env are skipped."""

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        game: Game,
        *,
        player: str | None,
        by: Decider,
        is_own: bool,
    ) -> None:
        super().__init__(env)
        self.game = game
        self._by = by
        self._is_own = is_own
        self._recorders = [game.recorder(player=player) for _ in range(env.num_envs)]
        self._mode = AutoresetMode(env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self._has_action_mask = game.spec.has_action_mask
        self._has_ended = np.zeros(env.num_envs, np.bool_)

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        # Read before the call: some vector envs remove the mask from the options.
        mask = (options or {}).get("reset_mask")
        obs, infos = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        seeds = _seeds(seed, self.num_envs)
        for i, env_obs in enumerate(self._each(obs)):
            if mask is None or mask[i]:
                action_mask = self._action_mask(infos, i)
                self._recorders[i].reset(env_obs, action_mask=action_mask, seed=seeds[i])
                self._has_ended[i] = False
        return obs, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        obs, rewards, terminations, truncations, infos = self.env.step(actions)
        finals = self._finals(infos)
        for i, (env_obs, action) in enumerate(
            zip(self._each(obs), iterate(self.action_space, actions), strict=True)
        ):
            recorder = self._recorders[i]
            action_mask = self._action_mask(infos, i)
            ended = bool(terminations[i] or truncations[i])
            if self._has_ended[i]:
                if self._mode is AutoresetMode.NEXT_STEP:
                    # This step ignored its action and returned the next episode's first
                    # observation.
                    recorder.reset(env_obs, action_mask=action_mask)
                    self._has_ended[i] = False
                continue
            same_step = ended and self._mode is AutoresetMode.SAME_STEP
            last = (finals[i] if finals is not None else None) if same_step else env_obs
            recorder.step(
                action,
                rewards[i],
                last,
                terminations[i],
                truncations[i],
                action_mask=None if same_step else action_mask,
                by=self._by,
            )
            if same_step:
                recorder.reset(env_obs, action_mask=action_mask)
            else:
                self._has_ended[i] = ended
        return obs, rewards, terminations, truncations, infos

    def close(self, **settings: Any) -> None:
        for recorder in self._recorders:
            recorder.close()
        if self._is_own:
            self.game.close()
        super().close(**settings)

    def _each(self, obs: Any) -> Iterator[Any]:
        return iterate(self.observation_space, obs)

    def _finals(self, infos: Mapping[str, Any]) -> Any:
        """Return the final observation of each env, from a list or a stacked structure."""
        finals = infos.get("final_obs")
        return (
            finals if finals is None or isinstance(finals, np.ndarray) else list(self._each(finals))
        )

    def _action_mask(self, infos: Mapping[str, Any], i: int) -> Any:
        if (
            not self._has_action_mask
            or MASK not in infos
            or not infos.get(f"_{MASK}", np.ones(self.num_envs))[i]
        ):
            return None
        return infos[MASK][i]


def _seeds(seed: int | Sequence[int | None] | None, num_envs: int) -> Sequence[int | None]:
    if isinstance(seed, int):
        return [seed + i for i in range(num_envs)]
    return [None] * num_envs if seed is None else seed
