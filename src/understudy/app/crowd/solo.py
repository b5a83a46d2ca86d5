"""Solo: somebody at one Gymnasium env, more or less skilled, who leaves some episodes to the bot."""

from collections.abc import Callable
from typing import Any

import numpy as np

from understudy.act.vector import make_env
from understudy.client.connect import Game
from understudy.client.episode import Episode

BOT_SHARE = 0.5
"""The share of episodes that people leave to the bot."""

Choose = Callable[[Any], Any]
"""An observation to the action that a person takes."""


class Solo:
    """One person at one env."""

    rows_per_step = 1

    def __init__(self, game: Game, name: str, env_id: str, rng: np.random.Generator) -> None:
        self._game, self._name, self._rng = game, name, rng
        self._env = make_env(env_id)
        self._env.action_space.seed(int(rng.integers(1 << 31)))
        skilled = _SKILLED.get(env_id, self._any_action)
        # From people who mostly try things out to people who know what they do.
        skill = float(rng.uniform(0.45, 0.9))
        self._choose: Choose = lambda obs: skilled(obs) if rng.random() < skill else self._any_action(obs)
        self.points: dict[str, list[int]] = {}
        self._begin()

    def _any_action(self, _: Any) -> Any:
        return self._env.action_space.sample()

    def _begin(self) -> None:
        self._obs, info = self._env.reset(seed=int(self._rng.integers(1 << 30)))
        self._legal = info.get("action_mask")
        self._is_bots = bool(self._rng.random() < BOT_SHARE)
        self._episode: Episode = self._game.episode(self._name)

    def step(self) -> None:
        episode, obs, legal = self._episode, self._obs, self._legal
        if self._is_bots:
            action = episode.act(obs, legal=legal, otherwise=self._choose)
        else:
            action = self._choose(obs)
            episode.acted(obs, action, legal=legal)
        self._obs, reward, terminated, truncated, info = self._env.step(action)
        self._legal = info.get("action_mask")
        episode.reward(float(reward))
        if terminated or truncated:
            episode.end(self._obs, legal=self._legal, truncated=not terminated)
            self._begin()

    def view(self) -> dict[str, Any]:
        """What a watcher may draw."""
        return {}


def _cartpole(obs: Any) -> int:
    """As beginners do: push to the side where the pole leans, whatever its speed."""
    return int(obs[2] > 0)


_SKILLED: dict[str, Choose] = {"CartPole-v1": _cartpole}
"""What skilled people do, by game; in other games they try things out."""
