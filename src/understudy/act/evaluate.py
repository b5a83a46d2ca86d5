"""evaluate: what a policy's episodes return, one for each seed; NumPy only."""

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from understudy.act.chance import noise_rng
from understudy.act.live import LiveEnvs
from understudy.act.vector import Envs
from understudy.core.errors import ConfigError
from understudy.core.policy import Policy

MAX_STEPS = 10_000
"""Where an episode is cut in a game without a limit of its own: a policy that is stuck must not hang whoever waits."""


def evaluate(
    policy: Policy, envs: Envs, *, seeds: Sequence[int], episodes: int | None = None, deterministic: bool = True
) -> NDArray[np.float64]:
    """float64[episodes], in the order of the seeds; episodes are played side by side.

    `envs` leaves resets to its caller. Policies that draw by chance get noise that depends on the seeds.
    """
    if not seeds or (episodes is not None and episodes != len(seeds)):
        raise ConfigError(f"{len(seeds)} seeds for {episodes} episodes; give one seed for each, at least one")
    return _Evaluation(policy, LiveEnvs(envs, policy.game), seeds).play(deterministic=deterministic)


class _Evaluation:
    """Hands the next seed to whichever env has ended; an env without one plays its last seed again, unheard."""

    def __init__(self, policy: Policy, live: LiveEnvs, seeds: Sequence[int]) -> None:
        self._policy, self._live, self._seeds = policy, live, [int(seed) for seed in seeds]
        self._returns = np.zeros(len(seeds) + 1)  # the last one takes what nobody listens to
        self._episode = np.minimum(np.arange(live.num_envs), len(seeds))
        self._n_begun = min(live.num_envs, len(seeds))
        self._left = np.full(live.num_envs, self._limit, np.int64)

    @property
    def _limit(self) -> int:
        return self._policy.game.max_episode_steps or MAX_STEPS

    @np.errstate(all="ignore")  # a game's odd numbers show in its returns; warnings would only bury them
    def play(self, *, deterministic: bool) -> NDArray[np.float64]:
        live, policy, silent = self._live, self._policy, len(self._seeds)
        live.reset(self._env_seeds())
        live.keep_stacks(policy.stack)
        rng = noise_rng(zlib.crc32(repr(self._seeds).encode()), env=0, round_no=0)
        while (self._episode < silent).any():
            live.check_masks()
            noise = None if deterministic else policy.head.noise(rng, live.num_envs)
            decision = policy.decide(live.inputs, noise, legal=live.legal, deterministic=deterministic)
            reward, terminated, truncated = live.step(live.actions(decision.action))
            self._returns[self._episode] += reward
            self._left -= 1
            ended = terminated | truncated | (self._left == 0)
            if ended.any():
                for env in np.flatnonzero(ended).tolist():
                    self._episode[env] = min(self._n_begun, silent)
                    self._n_begun += 1
                self._left[ended] = self._limit
                live.reset(self._env_seeds(), ended)
        return self._returns[:-1]

    def _env_seeds(self) -> list[int | None]:
        last = len(self._seeds) - 1
        return [self._seeds[min(episode, last)] for episode in self._episode.tolist()]
