"""Every built-in team, and a single actor, passes the Team contract."""

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.act.envs import PlainEnv
from tests.act.policies import random_policy
from understudy.act.actor import Actor
from understudy.act.process_team import process_team
from understudy.act.team import LocalTeam, TeamPlan
from understudy.act.vector import game_of, make_envs
from understudy.nn.policy import Policy
from understudy.ports import Team
from understudy.testing.teams import NotesClose, TeamContract

GAME = game_of(make_envs(PlainEnv, 1))


MAKERS: list[Any] = [PlainEnv]
"""How envs are created: the last one of these."""


def noting_env(folder: Path) -> NotesClose:
    return NotesClose(PlainEnv(), folder)


def plan(num_actors: int) -> TeamPlan:
    return TeamPlan(
        make_envs=functools.partial(make_envs, MAKERS[-1]),
        game=GAME,
        root_seed=5,
        created_ms=1_700_000_000_000,
        num_envs=4,
        num_actors=num_actors,
    )


class PlainContract(TeamContract):
    """The contract with `plan`, for every kind of team."""

    def policy(self) -> Policy:
        return random_policy(GAME, "epsilon_greedy")

    def make_noting(self, folder: Path) -> Team:
        MAKERS.append(functools.partial(noting_env, folder))
        try:
            return self.make()
        finally:
            MAKERS.pop()


class TestActor(PlainContract):
    def make(self) -> Actor:
        return plan(1).make_actor(0)


class TestLocalTeam(PlainContract):
    def make(self) -> Team:
        return LocalTeam(plan(2))


class TestProcessTeam(PlainContract):
    def make(self) -> Team:
        return process_team(plan(2))


class Leaving(LocalTeam):
    """A team that forgets to close one of its actors."""

    def close(self) -> None:
        self._actors[0].close()


class OfLeaving(PlainContract):
    def make(self) -> Team:
        return Leaving(plan(2))


def test_the_contract_notices_envs_that_stay_open(tmp_path: Path):
    with pytest.raises(AssertionError):
        OfLeaving().test_closing_a_team_closes_every_env(tmp_path)
