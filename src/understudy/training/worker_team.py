"""The team of a run whose actors are workers."""

import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from understudy.act.team import TeamPlan
from understudy.core.errors import ConfigError
from understudy.experience.game import GameSpec
from understudy.training.env_info import GameChoice
from understudy.training.evaluation import WHILE_TRAINING, held_out_seeds
from understudy.training.folder import RunFolder
from understudy.training.settings import RunPart
from understudy.workers.server import RunLimits
from understudy.workers.team import RunPlan, WorkersConfig, WorkerTeam, worker_key, workers_config
from understudy.workers.wire import RunInfo


def make_worker_team(
    choice: GameChoice,
    facts: Mapping[str, Any],
    part: RunPart,
    *,
    game: GameSpec,
    folder: RunFolder,
) -> WorkerTeam:
    """Listen for the workers of a run; each has its part of the nominal team's envs."""
    if choice.num_envs is not None:
        raise ConfigError(
            f"the game is a vector env ({choice.name}), which workers cannot create; pass a "
            "Gymnasium id or a function that creates one"
        )
    plan = TeamPlan(
        make_envs=functools.partial(choice.make, is_training=True),
        game=game,
        root_seed=facts["seed"],
        created_ms=facts["created_ms"],
        num_envs=part.envs,
        num_actors=part.actors,
        incarnation=facts["starts"],
    )
    shown = choice.to_json()
    config = workers_config(facts["listen"]) if facts.get("listen") else WorkersConfig()
    run = RunPlan(
        info=RunInfo(
            run=run_id(facts),
            game=shown["game"],
            name=shown["name"],
            env_kwargs=shown["env_kwargs"],
            wrappers=shown["wrappers"],
            frame_skip=shown["frame_skip"],
            num_envs=part.envs // part.actors,
        ),
        steps=part.collect,
        seeds=_evaluation_seeds,
        limits=RunLimits(lease_s=part.lease_s, evaluate_share=part.evaluate_share),
        max_steps=part.eval_max_steps,
    )
    key, place = worker_key(config, folder.root / "worker.key", os.environ)
    return WorkerTeam(plan, run, config, key=key, key_place=place)


def run_id(facts: Mapping[str, Any]) -> str:
    """The id of a run, which stays the same when it is resumed."""
    text = f"{facts['created_ms']}/{facts['seed']}/{facts['name']}/{facts['algorithm']}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _evaluation_seeds(count: int, number: int) -> Sequence[int]:
    # The first seeds are those of the learner's own evaluations.
    return held_out_seeds(count, series=WHILE_TRAINING, attempt=number + 1_000)
