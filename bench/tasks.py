"""The tasks that understudy must learn: two seeds of each in `make test`, ten in `make bench`."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

import understudy
from bench.which_way import WhichWay
from understudy.backends.data import DataFolder
from understudy.client.gym import record
from understudy.nn.network import (
    Activation,
    Channels,
    Conv,
    Dense,
    Flatten,
    Input,
    NetworkSpec,
    ScaleImage,
)
from understudy.platform.ingest import IngestRole

ROWS_TO_CLONE = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A game, an algorithm, and the goal: greedy mean return over 100 held-out episodes."""

    name: str
    game: Any
    algorithm: str
    goal: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    network: NetworkSpec | None = None
    store: Callable[[Path, int], float] | None = None
    """Fills a data folder to learn from and returns its player's mean return.

    `goal` is then a share of that return.
    """

    def train(self, folder: Path, seed: int) -> Mapping[str, Any]:
        """Train with this seed and return the run's result; `solved`: it reached the goal."""
        goal = self.goal
        options = understudy.TrainOptions(network=self.network)
        if self.store is not None:
            goal *= self.store(folder / "data", seed)
            options = replace(options, from_store=folder / "data")
        run = understudy.train(
            self.game,
            algorithm=self.algorithm,
            seed=seed,
            until=goal,
            settings=dict(self.settings),
            out=folder / "run",
            options=options,
        )
        return run.result


def which_way_network(stack: int, head: str) -> NetworkSpec:
    """One convolution with a kernel as wide as the square's stride; a CPU learns it in seconds."""
    shape = (stack, 84, 84) if stack > 1 else (84, 84)
    eye = (
        ScaleImage(),
        Channels((0,) if stack > 1 else ()),
        Conv(16, 7, 7),
        Activation("relu"),
        Flatten(),
    )
    return NetworkSpec(
        inputs={"obs": Input(shape, np.dtype("u1"), eye)},
        trunk=(Dense(64), Activation("relu")),
        heads={head: (Dense(2, gain=1.0),)},
    )


def pixels(stack: int) -> Task:
    """WhichWay with this many stacked frames; with one frame it cannot be learned."""
    return Task(
        name=f"pixels, stack {stack}, dqn",
        game=WhichWay,
        algorithm="dqn",
        goal=15.0,
        network=which_way_network(stack, "q"),
        settings={
            "stack": stack,
            "steps": 5_120,
            "horizon": 5_120,
            "eval_every": 1_280,
            "eval_episodes": 50,
            "min_inserts": 256,
            "samples_per_insert": 4.0,
            "learning_rate": 1e-3,
            "target_period": 100,
            "discount": 0.5,
            "n_step": 1,
            "epsilon": {"start": 1.0, "end": 0.05, "until": 0.4},
            "capacity": 16_384,
        },
    )


def scripted(obs: Any) -> int:
    """Pushes the cart in the direction of the fall; balances CartPole-v1 for hundreds of steps."""
    return int(obs[2] + 0.5 * obs[3] + 0.05 * obs[1] + 0.02 * obs[0] > 0)


def record_scripted(folder: Path, seed: int) -> float:
    """Store 2,000 rows of the scripted player; returns its mean return over 20 episodes."""
    env = record(
        gymnasium.make("CartPole-v1"),
        data=str(folder),
        consent="granted",
        by="script",
        player="script",
    )
    obs, _ = env.reset(seed=seed)
    for row in range(ROWS_TO_CLONE):
        obs, _, terminated, truncated, _ = env.step(scripted(obs))
        if terminated or truncated:
            obs, _ = env.reset(seed=seed + row + 1)
    env.close()
    with IngestRole(DataFolder(folder)) as role:
        role.service.drain()
    return scripted_return()


@functools.cache
def scripted_return() -> float:
    """The mean return of the scripted player."""
    env = gymnasium.make("CartPole-v1")
    returns = []
    for seed in range(20):
        obs, _ = env.reset(seed=1_000 + seed)
        total = 0.0
        ended = False
        while not ended:
            obs, reward, terminated, truncated, _ = env.step(scripted(obs))
            total = total + float(reward)
            ended = terminated or truncated
        returns.append(total)
    return float(np.mean(returns))


TASKS = (
    Task(name="CartPole-v1, dqn", game="CartPole-v1", algorithm="dqn", goal=475.0),
    Task(name="CartPole-v1, ppo", game="CartPole-v1", algorithm="ppo", goal=475.0),
    Task(
        name="Acrobot-v1, dqn",
        game="Acrobot-v1",
        algorithm="dqn",
        goal=-100.0,
        settings={"eval_episodes": 20},
    ),
    Task(
        name="Acrobot-v1, ppo",
        game="Acrobot-v1",
        algorithm="ppo",
        goal=-100.0,
        settings={"eval_episodes": 20},
    ),
    Task(name="Pendulum-v1, ppo", game="Pendulum-v1", algorithm="ppo", goal=-250.0),
    pixels(4),
    Task(
        name="CartPole-v1, bc", game="CartPole-v1", algorithm="bc", goal=0.9, store=record_scripted
    ),
)
