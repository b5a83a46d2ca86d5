"""Evaluation: held-out seeds, the envs that play them, and the returns of finished runs."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from understudy.act.evaluate import MAX_STEPS, Evaluated, evaluate
from understudy.act.evaluation_team import EvaluationTeam
from understudy.act.team import TeamPlan
from understudy.act.vector import Envs
from understudy.core.errors import ConfigError, GameFailed
from understudy.core.statistics import bootstrap, iqm
from understudy.core.tensors import Array
from understudy.nn.policy import Policy
from understudy.training.env_info import (
    EnvInfo,
    GameChoice,
    choice_of,
    different_spaces,
    inspect_env,
)
from understudy.training.folder import RunFolder, seed_folders
from understudy.training.preset import read_preset
from understudy.training.settings import MAX_EVAL_STEPS

WHILE_TRAINING, CONFIRMING, AT_THE_END, AFTERWARDS = range(4)
"""Series of held-out seeds; `AFTERWARDS` is for evaluations of finished runs."""
_SERIES_BITS = 29
_SPREAD = 0x9E3779B1
"""A factor that spreads seeds, for games that mix them badly; odd, so that they stay distinct."""

MAX_EPISODES = 1_000_000
_MAX_ENVS = 100
"""The most episodes that an evaluation plays in parallel, in built-in envs."""
_MAX_GYM_ENVS = 10


def held_out_seeds(count: int, *, series: int, attempt: int = 0) -> list[int]:
    """Env seeds from 2^31 on, which no actor uses.

    Two series never share a seed, nor do two attempts with the same count.
    """
    first = (1 << 31) + (series << _SERIES_BITS)
    numbers = range(attempt * count, (attempt + 1) * count)
    return [first + number * _SPREAD % (1 << _SERIES_BITS) for number in numbers]


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Plays held-out episodes with a policy; without envs or a team, every result is None."""

    envs: Envs | EvaluationTeam | None
    """A team plays the same episodes in several processes."""
    max_steps: int = MAX_STEPS
    """Steps after which an episode is cut, if the game has no step limit."""
    why_not: str = ""
    """Why there are no envs."""

    def play(
        self, policy: Policy, *, episodes: int, series: int, attempt: int = 0
    ) -> Evaluated | None:
        if self.envs is None:
            return None
        seeds = held_out_seeds(episodes, series=series, attempt=attempt)
        if isinstance(self.envs, EvaluationTeam):
            return self.envs.evaluate(policy, seeds=seeds, max_steps=self.max_steps)
        return evaluate(policy, self.envs, seeds=seeds, max_steps=self.max_steps)


def make_evaluator(
    choice: GameChoice,
    env_info: EnvInfo,
    *,
    episodes: int,
    max_steps: int,
    opened: contextlib.ExitStack,
    num_processes: int = 1,
) -> Evaluator:
    """An evaluator with its own parallel envs, closed with `opened`.

    Several processes each play a part of the episodes; one is this process.
    """
    most = _MAX_ENVS if env_info.is_builtin else _MAX_GYM_ENVS
    num_envs = min(math.ceil(episodes / num_processes), most)
    envs: Envs | EvaluationTeam
    if num_processes > 1:
        plan = TeamPlan(
            make_envs=choice.make,
            game=env_info.spec,
            root_seed=0,
            created_ms=0,
            num_envs=num_envs * num_processes,
            num_actors=num_processes,
        )
        envs = EvaluationTeam(plan)
    else:
        envs = choice.make(num_envs)
    opened.enter_context(contextlib.closing(envs))
    return Evaluator(envs, max_steps)


# --- Finished runs --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Returns of the policies of one or more runs on seeds that no training has used."""

    run: str
    policy: str
    iqm: float
    low: float | None
    """The ends, low and high, of the 95 % interval; None with fewer than 5 seeds (or runs)."""
    high: float | None
    mean: float
    episodes: int
    """Episodes per seed."""
    seeds: int
    """Seeds per run; each stands for its own set of `episodes` env seeds."""
    runs: int
    played: int
    """Episodes in total."""
    cut: int
    """Episodes that were cut after `max_steps` steps, since the game has no step limit."""
    max_steps: int


def evaluate_run(
    root: Path,
    *,
    episodes: int = 100,
    seeds: int = 10,
    policy: str = "best",
    game: Any = None,
    max_steps: int | None = None,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> EvaluationResult:
    """The IQM of a run's returns on held-out seeds, with its interval; or of all runs of a folder.

    `game` is required for runs that were trained on an env object or function. An episode of a game
    without a step limit is cut after `max_steps` steps, by default the run's `eval_max_steps`.
    """
    for name, value, most in (
        ("episodes", episodes, MAX_EPISODES),
        ("seeds", seeds, MAX_EPISODES),
        ("max_steps", 1 if max_steps is None else max_steps, MAX_EVAL_STEPS),
    ):
        if type(value) is not int or not 1 <= value <= most:
            raise ConfigError(f"{name} is {value!r}; give a whole number from 1 to {most}")
    if policy not in ("best", "last"):
        raise ConfigError(f"policy is {policy!r}; give best or last")
    if root.suffix == ".safetensors" and RunFolder(root.parent).exists:
        which = " --policy last" if root.stem == "last" else ""
        raise ConfigError(
            f"{root} is a single file of a run; give the run's folder: understudy evaluate "
            f"{root.parent}{which}"
        )
    if not root.is_dir():
        raise ConfigError(
            f"the folder {root} does not exist; give the folder that 'understudy train' printed"
        )
    folders = [RunFolder(path) for path in seed_folders(root)]
    groups: list[list[Array]] = []
    n_cut = 0
    for folder in folders:
        facts = folder.facts()
        played = folder.policy(policy)
        choice = choice_of(facts, None if game is None else GameChoice(game=game))
        env_info = inspect_env(choice)
        if difference := different_spaces(env_info.spec, played.game):
            raise ConfigError(
                f"the spaces of {choice.name} differ from those {folder.root} was trained on: "
                f"{difference}; evaluate it with the package versions it was trained with"
            )
        preset = read_preset(str(folder.root / "preset.toml"))
        limit = max_steps or preset.get("run", {}).get("eval_max_steps", MAX_STEPS)
        groups.append([])
        with contextlib.ExitStack() as opened:
            evaluator = make_evaluator(
                choice, env_info, episodes=episodes, max_steps=limit, opened=opened
            )
            for seed in range(seeds):
                evaluated = evaluator.play(
                    played, episodes=episodes, series=AFTERWARDS, attempt=seed
                )
                assert evaluated is not None
                if n_bad := int((~np.isfinite(evaluated.returns)).sum()):
                    raise GameFailed(
                        f"the rewards of {choice.name} add up to NaN or infinity: returns of "
                        f"{n_bad} of {episodes} episodes are not finite; correct the env, then "
                        "evaluate again"
                    )
                groups[-1].append(evaluated.returns)
                n_cut += evaluated.n_cut
                on_progress(sum(map(len, groups)), len(folders) * seeds)
    # With several runs the interval is over runs; with one run, only env seeds can vary.
    pooled = groups[0] if len(groups) == 1 else [np.concatenate(group) for group in groups]
    estimate = bootstrap(pooled, iqm)
    all_returns = np.concatenate(pooled)
    return EvaluationResult(
        run=str(root),
        policy=policy,
        iqm=estimate.value,
        low=estimate.low,
        high=estimate.high,
        mean=float(all_returns.mean()),
        episodes=episodes,
        seeds=seeds,
        runs=len(folders),
        played=len(all_returns),
        cut=n_cut,
        max_steps=limit,
    )
