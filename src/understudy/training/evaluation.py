"""Evaluations: held-out seeds, envs to play them in, and what a finished run's policy returns on
them."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from understudy.act.evaluate import evaluate
from understudy.act.vector import Envs
from understudy.core.errors import ConfigError
from understudy.core.statistics import bootstrap, iqm
from understudy.core.tensors import Array
from understudy.nn.policy import Policy
from understudy.training.env_info import EnvInfo, GameChoice, choice_of, look_at
from understudy.training.folder import RunFolder, seed_folders

WHILE_TRAINING, CONFIRMING, AT_THE_END, AFTERWARDS = range(4)
"""Series of held-out seeds; `AFTERWARDS` is for evaluations of runs that have ended."""
_SERIES_BITS = 29
_SPREAD = 0x9E3779B1
"""Odd, so that different numbers stay different; neighbours go far apart, for games that mix
their seeds badly."""

MAX_EPISODES = 1_000_000
_SIDE_BY_SIDE = 100
"""Episodes that an evaluation plays at a time, at most, in envs of our own."""
_GYM_SIDE_BY_SIDE = 10


def held_out_seeds(count: int, *, series: int, attempt: int = 0) -> list[int]:
    """Env seeds from 2^31 on, where no actor trains; no two series share one, nor two attempts
    of the same count."""
    first = (1 << 31) + (series << _SERIES_BITS)
    numbers = range(attempt * count, (attempt + 1) * count)
    return [first + number * _SPREAD % (1 << _SERIES_BITS) for number in numbers]


@dataclass(frozen=True, slots=True)
class Judge:
    """Plays held-out episodes with a policy; None where the game is not installed."""

    envs: Envs | None

    def returns(
        self, policy: Policy, *, episodes: int, series: int, attempt: int = 0
    ) -> Array | None:
        if self.envs is None:
            return None
        seeds = held_out_seeds(episodes, series=series, attempt=attempt)
        return evaluate(policy, self.envs, episodes=episodes, seeds=seeds)


def judge_of(
    choice: GameChoice, seen: EnvInfo, episodes: int, opened: contextlib.ExitStack
) -> Judge:
    """Envs of its own for evaluations, as many side by side as is worth it."""
    side_by_side = min(episodes, _SIDE_BY_SIDE if seen.is_builtin else _GYM_SIDE_BY_SIDE)
    return Judge(opened.enter_context(contextlib.closing(choice.make(side_by_side))))


# --- runs that have ended -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """What the policies of one or more runs return on seeds that no training has seen."""

    run: str
    policy: str
    iqm: float
    low: float | None
    """Ends of the 95 % interval; None where fewer than 5 seeds (or runs) say too little about
    others."""
    high: float | None
    mean: float
    episodes: int
    """Episodes per seed."""
    seeds: int
    runs: int
    played: int
    """Episodes in all."""


def evaluate_run(
    root: Path,
    *,
    episodes: int = 100,
    seeds: int = 10,
    policy: str = "best",
    game: Any = None,
    on_progress: Callable[[int, int], object] = lambda done, whole: None,
) -> EvaluationResult:
    """IQM and interval of a run's policy over held-out seeds; of a folder with several runs, over
    the runs.

    `game` is for runs that were trained on an env object or function.
    """
    for name, value in (("episodes", episodes), ("seeds", seeds)):
        if type(value) is not int or not 1 <= value <= MAX_EPISODES:
            raise ConfigError(f"{name} is {value!r}; give a whole number from 1 to {MAX_EPISODES}")
    if policy not in ("best", "last"):
        raise ConfigError(f"policy is {policy!r}; give best or last")
    if root.suffix == ".safetensors" and RunFolder(root.parent).exists:
        which = " --policy last" if root.stem == "last" else ""
        raise ConfigError(
            f"{root} is one file of a run; give the run: understudy evaluate {root.parent}{which}"
        )
    if not root.is_dir():
        raise ConfigError(
            f"there is no folder {root}; give the folder that 'understudy train' printed"
        )
    folders = [RunFolder(path) for path in seed_folders(root)]
    groups: list[list[Array]] = []
    for folder in folders:
        facts = folder.facts()
        played = folder.policy(policy)
        choice = choice_of(facts, None if game is None else GameChoice(game=game))
        seen = look_at(choice)
        if seen.spec.schema != played.game.schema:
            raise ConfigError(
                f"{choice.name} looks different from what {folder.root} was trained on; evaluate "
                "it with the same "
                "packages"
            )
        groups.append([])
        with contextlib.ExitStack() as opened:
            judge = judge_of(choice, seen, episodes, opened)
            for seed in range(seeds):
                returns = judge.returns(played, episodes=episodes, series=AFTERWARDS, attempt=seed)
                assert returns is not None
                groups[-1].append(returns)
                on_progress(sum(map(len, groups)), len(folders) * seeds)
    # Several runs are compared with one another; the env seeds of a single run are all there is to
    # vary.
    pooled = groups[0] if len(groups) == 1 else [np.concatenate(group) for group in groups]
    found = bootstrap(pooled, iqm)
    everything = np.concatenate(pooled)
    return EvaluationResult(
        run=str(root),
        policy=policy,
        iqm=found.value,
        low=found.low,
        high=found.high,
        mean=float(everything.mean()),
        episodes=episodes,
        seeds=seeds,
        runs=len(folders),
        played=len(everything),
    )
