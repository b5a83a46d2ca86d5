"""Rally as envs: one seat against a scripted opponent (one env or many), or both seats."""

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from understudy.act.vector_envs import Seed, Step, checked_actions, checked_num_envs, checked_reset
from understudy.core.errors import ConfigError
from understudy.games import rally
from understudy.games.rally import GAME_ID, OPPONENT, Court, Ints

SPEC = EnvSpec(
    id=GAME_ID,
    entry_point="understudy.act.rally:RallyEnv",
    reward_threshold=0.5,
    disable_env_checker=True,
    order_enforce=False,
)
# Unbounded, so that the game's spec equals the one that Python and JavaScript clients build from
# the names of the observations alone.
OBS_SPACE = spaces.Box(-np.inf, np.inf, (len(rally.OBS_NAMES),), np.float32)
ACTION_SPACE = spaces.Discrete(len(rally.ACTION_NAMES))
Obs = NDArray[np.float32]


class RallyEnv(gymnasium.Env[Obs, np.int64]):
    """One serve for one seat against a scripted opponent. The reward is 1 for a point won, -1 for
    a point lost."""

    metadata = {"render_modes": ["ansi", "rgb_array"], "render_fps": 15}  # noqa: RUF012 (declared as in Gymnasium)
    observation_space = OBS_SPACE
    action_space = ACTION_SPACE
    obs_names = rally.OBS_NAMES
    action_names = rally.ACTION_NAMES

    def __init__(
        self, opponent: str = OPPONENT, seat: int = 0, render_mode: str | None = None
    ) -> None:
        self._skill = rally.skill_of(opponent)
        self._seat = _seat(seat)
        self.render_mode = _render_mode(render_mode)
        self.spec = SPEC
        self.court = rally.serve(0)
        self._seed = self._decisions = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        seed = None if seed is None else int(seed)
        super().reset(seed=seed)
        self._seed = seed if seed is not None else int(self.np_random.integers(1 << 31))
        self.court = rally.serve(self._seed)
        self._decisions = 0
        return rally.observation(self.court, self._seat), {}

    def step(self, action: int | np.int64) -> tuple[Obs, float, bool, bool, dict[str, Any]]:
        drawn = rally.random_bits(self._seed, self._decisions)
        opponent_action = rally.scripted(
            Ints, rally.seat_view(self.court, 1 - self._seat), self._skill, drawn
        )
        own_action = _action(action)
        both = (own_action, opponent_action) if self._seat == 0 else (opponent_action, own_action)
        self.court, point = rally.step(Ints, self.court, *both)
        self._decisions += 1
        reward = float(point if self._seat == 0 else -point)
        is_late = self._decisions >= rally.MAX_DECISIONS and point == 0
        return rally.observation(self.court, self._seat), reward, point != 0, is_late, {}

    def render(self) -> Any:
        if self.render_mode == "rgb_array":
            return rally.render_image(self.court)
        return rally.as_text(self.court)


class RallyVector(VectorEnv[Any, Any, Any]):
    """Many serves at once in NumPy; once the ball is out, a serve is frozen until its reset."""

    obs_names = rally.OBS_NAMES
    action_names = rally.ACTION_NAMES

    def __init__(self, num_envs: int, *, opponent: str = OPPONENT, seat: int = 0) -> None:
        self.num_envs = checked_num_envs(num_envs)
        self.spec = SPEC
        self.render_mode = None
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED, "render_modes": []}
        self.single_observation_space = OBS_SPACE
        self.single_action_space = ACTION_SPACE
        self.observation_space = batch_space(OBS_SPACE, num_envs)
        self.action_space = batch_space(ACTION_SPACE, num_envs)
        self._skill = rally.skill_of(opponent)
        self._seat = _seat(seat)
        self._seeds, self._decisions = np.zeros((2, num_envs), np.int64)
        self.court = rally.serve(self._seeds)
        self._rng = np.random.default_rng()

    def reset(
        self, *, seed: Seed = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        """Reset the envs in `options['reset_mask']`, or all; return all observations."""
        is_new, seeds = checked_reset(seed, options, num_envs=self.num_envs)
        if isinstance(seed, int | np.integer):
            self._rng = np.random.default_rng(seed)
        for env, env_seed in enumerate(seeds):
            if is_new[env]:
                self._seeds[env] = (
                    int(self._rng.integers(1 << 31)) if env_seed is None else env_seed
                )
        self.court = Court(
            *(
                np.where(is_new, new, old)
                for new, old in zip(rally.serve(self._seeds), self.court, strict=True)
            )
        )
        self._decisions[is_new] = 0
        return rally.observation(self.court, self._seat), {}

    def step(self, actions: NDArray[np.integer[Any]]) -> Step:
        """Play one decision in every env."""
        own_actions = checked_actions(actions, self.num_envs, num_actions=len(rally.ACTION_NAMES))
        drawn = rally.random_bits(self._seeds, self._decisions)
        opponent_actions = rally.scripted(
            np, rally.seat_view(self.court, 1 - self._seat), self._skill, drawn
        )
        both = (
            (own_actions, opponent_actions) if self._seat == 0 else (opponent_actions, own_actions)
        )
        self.court, points = rally.step(np, self.court, *both)
        self._decisions += 1
        terminated = points != 0
        truncated = (self._decisions >= rally.MAX_DECISIONS) & ~terminated
        rewards = (points if self._seat == 0 else -points).astype(np.float64)
        return rally.observation(self.court, self._seat), rewards, terminated, truncated, {}


class RallyParallel:
    """Both seats as agents `left` and `right`, with the API of a PettingZoo parallel env; does not
    need PettingZoo."""

    metadata: Mapping[str, Any] = {
        "name": GAME_ID,
        "render_modes": RallyEnv.metadata["render_modes"],
        "is_parallelizable": True,
    }

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = _render_mode(render_mode)
        self.possible_agents = ["left", "right"]
        self.agents: list[str] = []
        self.observation_spaces = dict.fromkeys(self.possible_agents, OBS_SPACE)
        self.action_spaces = dict.fromkeys(self.possible_agents, ACTION_SPACE)
        self.court = rally.serve(0)
        self._decisions = 0
        self._rng = np.random.default_rng()

    @property
    def num_agents(self) -> int:
        """The number of agents that play now: 0 before a reset and after the end."""
        return len(self.agents)

    @property
    def max_num_agents(self) -> int:
        return len(self.possible_agents)

    def observation_space(self, agent: str) -> spaces.Box:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Discrete:
        return self.action_spaces[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Obs], dict[str, dict[str, Any]]]:
        """Start a serve, a random one if there is no seed."""
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        drawn = int(self._rng.integers(1 << 31)) if seed is None else int(seed)
        self.agents = list(self.possible_agents)
        self.court = rally.serve(drawn)
        self._decisions = 0
        return self._obs(), {agent: {} for agent in self.agents}

    def step(
        self, actions: Mapping[str, int]
    ) -> tuple[
        dict[str, Obs],
        dict[str, float],
        dict[str, bool],
        dict[str, bool],
        dict[str, dict[str, Any]],
    ]:
        """Play one decision of both agents; once the serve is over, `agents` is empty."""
        agents = self.agents
        if not agents:
            raise ConfigError(
                "step was called before a reset, or after the serve was over; call reset first"
            )
        if set(actions) != set(agents):
            names = ", ".join(map(str, actions)) or "no agent"
            raise ConfigError(f"got actions for {names}; pass one for left and one for right")
        left = _action(actions["left"])
        right = _action(actions["right"])
        self.court, point = rally.step(Ints, self.court, left, right)
        self._decisions += 1
        is_late = self._decisions >= rally.MAX_DECISIONS and point == 0
        if point != 0 or is_late:
            self.agents = []
        rewards = {"left": float(point), "right": float(-point)}
        return (
            self._obs(),
            rewards,
            dict.fromkeys(agents, point != 0),
            dict.fromkeys(agents, is_late),
            {agent: {} for agent in agents},
        )

    def render(self) -> Any:
        if self.render_mode == "rgb_array":
            return rally.render_image(self.court)
        return rally.as_text(self.court)

    def close(self) -> None: ...

    def _obs(self) -> dict[str, Obs]:
        return {
            agent: rally.observation(self.court, seat)
            for seat, agent in enumerate(self.possible_agents)
        }


def _action(action: int | np.int64) -> int:
    """Return the action; ConfigError if out of range, since 3 would move the paddle faster."""
    if action not in range(len(rally.ACTION_NAMES)):
        raise ConfigError(f"action is {action}; use 0 (up), 1 (stay) or 2 (down)")
    return int(action)


def _seat(seat: int) -> int:
    if seat not in (0, 1):
        raise ConfigError(f"seat is {seat}; use 0 (left) or 1 (right)")
    return seat


def _render_mode(mode: str | None) -> str | None:
    modes = RallyEnv.metadata["render_modes"]
    if mode is not None and mode not in modes:
        raise ConfigError(f"render_mode is {mode!r}; use {', '.join(modes)} or None")
    return mode
