# mypy: disable-error-code="import-not-found, import-untyped, no-any-unimported, misc, attr-defined"
"""A seed's way on Ray, rebuilt from its description: plain Ray actors that play one step a call."""

import logging
import os
from typing import Any

# Without these, Ray sends usage statistics and writes to the home folder.
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_DISABLE_IMPORT_WARNING="1", RAY_DEDUP_LOGS="0")

import ray

from bench.against.link import Link, Round, serve
from bench.against.sleepy import GAMES
from bench.against.torch_dqn import Dqn, Player, columns, measured

_VERSION_STEPS = 256
"""Steps after which the actors get new weights."""


@ray.remote(num_cpus=0)
class Actor:
    """One env, in a process of its own."""

    def __init__(self, game: str, seed: int) -> None:
        self._player = Player(GAMES[game](), seed=seed)
        self._version = -1

    def step(self, version: int, weights: Any) -> dict[str, Any]:
        if version != self._version:
            self._player.load(weights)
            self._version = version
        return self._player.step()[0]


def scale(_: Link, request: dict[str, Any]) -> Round:
    """Every actor has one call in flight; the learner takes the steps that are ready."""
    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR)
    dqn = Dqn(GAMES[request["game"]]())
    actors = [Actor.remote(request["game"], seed) for seed in range(request["envs"])]
    weights = ray.put(dqn.weights())
    calls = {actor.step.remote(0, weights): actor for actor in actors}

    def take() -> None:
        nonlocal weights
        ray.wait(list(calls), num_returns=1)
        done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0)
        version = dqn.steps // _VERSION_STEPS
        dqn.insert(columns(ray.get(done)))
        if dqn.steps // _VERSION_STEPS != version:
            weights = ray.put(dqn.weights())
        for call in done:
            actor = calls.pop(call)
            calls[actor.step.remote(dqn.steps // _VERSION_STEPS, weights)] = actor

    return lambda: measured(dqn, take, seconds=request["seconds"])


if __name__ == "__main__":
    serve(["ray", "torch", "gymnasium", "numpy"], {"scale": scale})
