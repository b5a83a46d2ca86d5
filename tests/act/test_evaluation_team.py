"""Evaluations in several processes return what one process does, for every episode."""

import contextlib
import functools
import os
import signal
from typing import Any

import numpy as np
import pytest

from tests.act.envs import MixedEnv, PlainEnv
from tests.act.failing_envs import ExitsAtSeed3, RaisesAtSeed3
from tests.act.policies import random_policy
from understudy.act.evaluate import evaluate
from understudy.act.evaluation_team import EvaluationTeam
from understudy.act.team import TeamPlan
from understudy.act.vector import game_of, make_envs
from understudy.core.errors import GameFailed

SEEDS = list(range(1000, 1013))


def plan_of(env: Any, *, num_processes: int) -> TeamPlan:
    return TeamPlan(
        make_envs=functools.partial(make_envs, env),
        game=game_of(make_envs(env, 1)),
        root_seed=0,
        created_ms=0,
        num_envs=4 * num_processes,
        num_actors=num_processes,
    )


@pytest.mark.parametrize(
    ("env", "num_processes"), [("CartPole-v1", 2), (PlainEnv, 3), (MixedEnv, 2)]
)
def test_pooled_returns_equal_those_of_one_process(env, num_processes):
    plan = plan_of(env, num_processes=num_processes)
    kind = "epsilon_greedy" if plan.game.discrete else "gaussian_tanh"
    with contextlib.closing(EvaluationTeam(plan)) as team:
        for policy_no in range(2):
            policy = random_policy(plan.game, kind, seed=policy_no)
            # As many envs as in each process: NumPy may round other batch sizes differently.
            alone = evaluate(policy, make_envs(env, 4), seeds=SEEDS, max_steps=30)
            pooled = team.evaluate(policy, seeds=SEEDS, max_steps=30)
            assert pooled.returns.tobytes() == alone.returns.tobytes()
            assert pooled.n_cut == alone.n_cut
        assert len(np.unique(pooled.returns)) > 1  # else their order would not matter
        # Fewer episodes than processes.
        one = team.evaluate(policy, seeds=SEEDS[:1], max_steps=30)
        assert one.returns.tolist() == alone.returns[:1].tolist()


def test_an_env_that_raises_or_exits_in_a_process_fails_the_evaluation(monkeypatch):
    monkeypatch.setattr("understudy.act.evaluation_team.MAX_LOSSES", 2)
    policy = random_policy(game_of(make_envs(PlainEnv, 1)), "epsilon_greedy")
    for env, message in (
        (RaisesAtSeed3, "no such level"),
        (ExitsAtSeed3, "process 1 of 2 .* was lost 2 times.* code 7"),
    ):
        plan = plan_of(env, num_processes=2)
        with (
            contextlib.closing(EvaluationTeam(plan)) as team,
            pytest.raises(GameFailed, match=message),
        ):
            team.evaluate(policy, seeds=[2, 3])


def test_processes_that_are_killed_are_replaced_and_every_episode_is_counted():
    plan = plan_of(PlainEnv, num_processes=2)
    policy = random_policy(plan.game, "epsilon_greedy")
    alone = evaluate(policy, make_envs(PlainEnv, 5), seeds=SEEDS)
    with contextlib.closing(EvaluationTeam(plan)) as team:
        for _ in range(2):  # before the first answer, and between two evaluations
            for part in team._parts:
                os.kill(part.channel._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            pooled = team.evaluate(policy, seeds=SEEDS)
            assert pooled.returns.tobytes() == alone.returns.tobytes()


def test_closing_a_team_ends_its_processes_also_before_they_have_started():
    team = EvaluationTeam(plan_of(PlainEnv, num_processes=2))
    processes = [part.channel._process for part in team._parts]  # type: ignore[attr-defined]
    team.close()
    team.close()
    assert all(process.poll() is not None for process in processes)
