"""Watching a bot: episodes of a registered model in a Gymnasium env, a frame at a time."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium

from understudy.act.vector import make_env
from understudy.act.vector_envs import MASK
from understudy.app.deployment import Deployment
from understudy.app.runs.choice import GameChoice, look_at
from understudy.app.runs.video import frame_of, rendering
from understudy.core.errors import ConfigError
from understudy.core.manifest import open_policy
from understudy.core.policy import Policy
from understudy.core.tensors import Array

MAX_STEPS = 100_000
"""An episode of a game without an end is left here."""


@dataclass(frozen=True, slots=True)
class Bot:
    """A model that can play."""

    name: str
    policy: Policy


@dataclass(frozen=True, slots=True)
class Moment:
    """One step of an episode that is being watched."""

    step: int
    action: Any
    reward: float
    total: float
    has_ended: bool
    frame: Array | None
    """What the env shows, where it can."""


def find_bot(deployment: Deployment, choice: GameChoice, bot: str) -> Bot:
    """The model that an alias, a number or GAME/NUMBER means; ConfigError when this game has none such."""
    registry = deployment.registry
    if choice.name in registry.games():
        try:
            spec = look_at(choice).spec
        except ConfigError as error:
            raise ConfigError(
                f"{choice.name} is registered, and there is no env of it here: {error}; its bots play in your own game"
            ) from None
    else:
        spec = look_at(choice).spec
    manifest = registry.find(bot, game=str(spec.game))
    policy = open_policy(manifest, registry.policy_bytes(manifest))
    if policy.game.schema != spec.schema:
        raise ConfigError(
            f"{manifest.name} was made for another shape of {spec.game} than this env has; play it with the "
            "same packages and wrappers"
        )
    return Bot(manifest.name, policy)


def watch(
    choice: GameChoice, policy: Policy, *, seeds: Sequence[int], shows_frames: bool, see: Callable[[int, Moment], None]
) -> list[float]:
    """Play an episode for each seed and show each moment, with the episode's number; the returns."""
    returns = []
    with rendering(choice) if shows_frames else _plain(choice) as env:
        for number, seed in enumerate(seeds, start=1):
            total = 0.0
            for moment in _episode(env, choice, policy, seed=seed, shows_frames=shows_frames):
                see(number, moment)
                total = moment.total
            returns.append(total)
    return returns


@contextlib.contextmanager
def _plain(choice: GameChoice) -> Iterator["gymnasium.Env[Any, Any]"]:
    with contextlib.closing(make_env(choice.name, choice.env_kwargs)) as env:
        yield env


def _episode(
    env: "gymnasium.Env[Any, Any]", choice: GameChoice, policy: Policy, *, seed: int, shows_frames: bool
) -> Iterator[Moment]:
    player = policy.player()
    obs, info = env.reset(seed=seed)
    total = 0.0
    for step in range(1, MAX_STEPS + 1):
        action = player.act(obs, legal=info.get(MASK))
        obs, reward, terminated, truncated, info = env.step(action)
        total += float(reward)
        has_ended = bool(terminated or truncated)
        yield Moment(step, action, float(reward), total, has_ended, frame_of(env, choice) if shows_frames else None)
        if has_ended:
            return
