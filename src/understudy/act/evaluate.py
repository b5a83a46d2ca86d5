"""evaluate: plays a policy for one episode per seed and measures the returns; needs no JAX."""

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from understudy.act.chance import noise_rng
from understudy.act.live import LiveEnvs
from understudy.act.vector import Envs
from understudy.core.errors import ConfigError
from understudy.nn.policy import Policy

MAX_STEPS = 10_000
"""Steps per episode of a game without a limit of its own, so that a stuck policy also ends."""


class Evaluated(NamedTuple):
    """The result of `evaluate`."""

    returns: NDArray[np.float64]
    """One per episode, in the order of the seeds; rewards are the game's, below any wrappers."""
    n_cut: int
    """Episodes that had not ended after `max_steps` steps."""


# NaN and infinity of a game show up in its returns; NumPy warnings about them add nothing.
@np.errstate(all="ignore")
def evaluate(
    policy: Policy,
    envs: Envs,
    *,
    seeds: Sequence[int],
    episodes: int | None = None,
    deterministic: bool = True,
    max_steps: int = MAX_STEPS,
) -> Evaluated:
    """Play one episode per seed and return their returns.

    Episodes are played in parallel, in `envs`, which must leave resets to the caller. If the game
    has no step limit, an episode is cut after `max_steps` steps. With `deterministic=False`, the
    policy's noise is computed from the seeds.
    """
    if not seeds or (episodes is not None and episodes != len(seeds)):
        raise ConfigError(
            f"got {len(seeds)} seeds for {episodes} episodes; use one seed per episode, at least 1"
        )
    seeds = [int(seed) for seed in seeds]
    n = len(seeds)
    live = LiveEnvs(envs, policy.game)
    live.check_resets("an evaluation, which plays one episode per seed")
    limit = policy.game.max_episode_steps or max_steps
    # An env whose episode ended plays the next seed. If no seed is left, it plays the last one
    # again, and that return is discarded.
    returns = np.zeros(n + 1)
    n_cut = 0
    episode = np.minimum(np.arange(live.num_envs), n)
    n_begun = min(live.num_envs, n)
    steps_left = np.full(live.num_envs, limit, np.int64)
    seeds_and_last = [*seeds, seeds[-1]]
    live.reset([seeds_and_last[number] for number in episode.tolist()])
    live.keep_stacks(policy.stack)
    rng = noise_rng(zlib.crc32(repr(seeds).encode()), env=0)
    while (episode < n).any():
        live.check_masks()
        noise = None if deterministic else policy.head.noise(rng, live.num_envs)
        decision = policy.decide(
            live.inputs, noise, action_mask=live.action_mask, deterministic=deterministic
        )
        reward, terminated, truncated = live.step(live.actions(decision.action))
        returns[episode] += reward if live.raw_reward is None else live.raw_reward
        steps_left -= 1
        ended = terminated | truncated
        if policy.game.max_episode_steps is None:
            n_cut += int(((steps_left == 0) & ~ended & (episode < n)).sum())
        ended |= steps_left == 0
        if ended.any():
            for env in np.flatnonzero(ended).tolist():
                episode[env] = min(n_begun, n)
                n_begun += 1
            steps_left[ended] = limit
            live.reset([seeds_and_last[number] for number in episode.tolist()], ended)
    return Evaluated(returns[:-1], n_cut)
