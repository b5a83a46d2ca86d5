# mypy: disable-error-code="import-not-found, import-untyped, no-any-unimported, no-any-return"
"""A plain DQN in torch for the seeds' ways of distributing it: 64-64, batch 64, a ring of steps."""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch

BATCH = 64
STEPS_PER_UPDATE = 8
WARM_UP_STEPS = 1_024
EPSILON = 0.1
_CAPACITY = 131_072
_TARGET_PERIOD = 128
_FIELDS = ("obs", "action", "reward", "next_obs", "terminated")


class Dqn:
    """The learner: `insert` steps, then `update` as often as they allow."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        torch.set_num_threads(1)
        shape: Any = env.observation_space.shape
        self.network = network(env)
        self._target = copy.deepcopy(self.network)
        self._optimiser = torch.optim.Adam(self.network.parameters(), lr=1e-3)
        self._ring: dict[str, Any] = {
            "obs": np.zeros((_CAPACITY, *shape), np.float32),
            "action": np.zeros(_CAPACITY, np.int64),
            "reward": np.zeros(_CAPACITY, np.float32),
            "next_obs": np.zeros((_CAPACITY, *shape), np.float32),
            "terminated": np.zeros(_CAPACITY, np.float32),
        }
        self._rng = np.random.default_rng(0)
        self.steps = 0
        """Steps that are in the replay, or were."""
        self.updates = 0

    def insert(self, rows: Mapping[str, Sequence[Any]]) -> None:
        at = (self.steps + np.arange(len(rows["reward"]))) % _CAPACITY
        for name in _FIELDS:
            self._ring[name][at] = rows[name]
        self.steps += len(at)

    def update(self) -> None:
        """All updates that the steps in the replay allow."""
        while self.steps >= WARM_UP_STEPS + self.updates * STEPS_PER_UPDATE:
            at = self._rng.integers(min(self.steps, _CAPACITY), size=BATCH)
            batch = {name: torch.from_numpy(self._ring[name][at]) for name in _FIELDS}
            with torch.no_grad():
                following = self._target(batch["next_obs"]).max(dim=1).values
                target = batch["reward"] + 0.99 * (1 - batch["terminated"]) * following
            q = self.network(batch["obs"]).gather(1, batch["action"][:, None])[:, 0]
            loss = torch.nn.functional.smooth_l1_loss(q, target)
            self._optimiser.zero_grad()
            loss.backward()
            self._optimiser.step()
            self.updates += 1
            if self.updates % _TARGET_PERIOD == 0:
                self._target.load_state_dict(self.network.state_dict())

    def weights(self) -> dict[str, Any]:
        return {name: array.numpy().copy() for name, array in self.network.state_dict().items()}


class Player:
    """One env, played with epsilon-greedy actions."""

    def __init__(self, env: gymnasium.Env[Any, Any], *, seed: int) -> None:
        torch.set_num_threads(1)
        self._env = env
        self._network = network(env)
        self._rng = np.random.default_rng(seed)
        self._obs, _ = env.reset(seed=seed)

    def load(self, weights: Mapping[str, Any]) -> None:
        arrays = {name: torch.from_numpy(np.array(array)) for name, array in weights.items()}
        self._network.load_state_dict(arrays)

    def step(self) -> tuple[dict[str, Any], bool]:
        """One step as a row, and whether its episode ended."""
        obs = self._obs
        if self._rng.random() < EPSILON:
            action = int(self._rng.integers(self._env.action_space.n))  # type: ignore[attr-defined]
        else:
            with torch.no_grad():
                action = int(self._network(torch.from_numpy(obs)).argmax())
        next_obs, reward, terminated, truncated, _ = self._env.step(action)
        row = {
            "obs": obs,
            "action": action,
            "reward": reward,
            "next_obs": next_obs,
            "terminated": terminated,
        }
        has_ended = terminated or truncated
        self._obs = self._env.reset()[0] if has_ended else next_obs
        return row, has_ended

    def episode(self) -> dict[str, list[Any]]:
        """The steps of one episode, as columns."""
        rows = []
        has_ended = False
        while not has_ended:
            row, has_ended = self.step()
            rows.append(row)
        return columns(rows)


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in _FIELDS}


def network(env: gymnasium.Env[Any, Any]) -> Any:
    sizes = (env.observation_space.shape[0], 64, 64, env.action_space.n)  # type: ignore[index, attr-defined]
    linear = [torch.nn.Linear(sizes[at], sizes[at + 1]) for at in range(3)]
    return torch.nn.Sequential(linear[0], torch.nn.ReLU(), linear[1], torch.nn.ReLU(), linear[2])


def measured(dqn: Dqn, take: Callable[[], None], *, seconds: float) -> dict[str, Any]:
    """Steps and updates per second, after the first update; `take` inserts what was played."""
    while not dqn.updates:
        take()
        dqn.update()
    steps = dqn.steps
    updates = dqn.updates
    began_s = time.perf_counter()
    while time.perf_counter() < began_s + seconds:
        take()
        dqn.update()
    took_s = time.perf_counter() - began_s
    return {
        "steps_per_s": (dqn.steps - steps) / took_s,
        "updates_per_s": (dqn.updates - updates) / took_s,
    }
