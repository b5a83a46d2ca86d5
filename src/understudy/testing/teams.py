"""The contract of the Team port, as tests to subclass."""

import contextlib
import functools
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from understudy.core.errors import ConfigError
from understudy.experience.chunk import RowKind
from understudy.nn.policy import Policy
from understudy.ports import Collected, Team

_STEPS = 12


class NotesClose(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An env that creates a file in a folder when it is closed, in whichever process it is."""

    def __init__(self, env: gymnasium.Env[Any, Any], folder: Path) -> None:
        super().__init__(env)
        self._file = folder / uuid.uuid4().hex

    def close(self) -> None:
        super().close()
        self._file.touch()


class TeamContract:
    """Tests of a Team: subclass, define `make` and `policy`, and run with pytest."""

    def make(self) -> Team:
        """Create a team of at least two envs that has played nothing; each call the same team."""
        raise NotImplementedError(
            "a subclass of TeamContract must define make(): a team that has played nothing"
        )

    def policy(self) -> Policy:
        """A policy for the team's game, with an epsilon_greedy head."""
        raise NotImplementedError(
            "a subclass of TeamContract must define policy(): one for the team's game"
        )

    def make_noting(self, folder: Path) -> Team:
        """The team of `make`, each of whose envs is inside `NotesClose(env, folder)`."""
        raise NotImplementedError(
            "a subclass of TeamContract must define make_noting(folder): the team of make(), with "
            "each env inside understudy.testing.teams.NotesClose(env, folder)"
        )

    @contextlib.contextmanager
    def _team(self) -> Iterator[Team]:
        with contextlib.closing(self.make()) as team:
            yield team

    def _play(self, team: Team, first: int, end: int) -> list[Collected]:
        """Rounds with one policy version each."""
        return [
            team.collect(
                replace(self.policy(), version=round_no), _STEPS, round_no=round_no, explore=0.5
            )
            for round_no in range(first, end)
        ]

    def test_a_round_has_the_steps_of_every_env_in_order(self) -> None:
        with self._team() as team:
            rounds = self._play(team, 0, 3)
            sessions: dict[object, int] = {}
            for collected in rounds:
                assert collected.env_steps == _STEPS * team.num_envs
                assert collected.env_steps == sum(chunk.meta.n_steps for chunk in collected.chunks)
                assert all(0 <= episode.env < team.num_envs for episode in collected.episodes)
                for chunk in collected.chunks:
                    sessions.setdefault(chunk.meta.session, len(sessions))
                order = [sessions[chunk.meta.session] for chunk in collected.chunks]
                assert order == sorted(order)
            assert len(sessions) == team.num_envs

    def test_chunks_name_the_version_that_played_them(self) -> None:
        with self._team() as team:
            for round_no, collected in enumerate(self._play(team, 0, 3)):
                for chunk in collected.chunks:
                    is_step = chunk.columns["row"] == RowKind.STEP
                    assert set(chunk.columns["version"][is_step].tolist()) == {round_no}

    def test_equal_teams_play_the_same(self) -> None:
        with self._team() as team, self._team() as other:
            assert self._play(team, 0, 3) == self._play(other, 0, 3)

    def test_a_restored_team_continues_as_if_it_had_never_stopped(self) -> None:
        with self._team() as team:
            self._play(team, 0, 11)
            arrays, facts = team.state()
            expected = self._play(team, 11, 14)
            with self._team() as other:
                other.restore(arrays, facts)
                assert self._play(other, 11, 14) == expected
            # A team that has played can go back, too.
            team.restore(arrays, facts)
            assert self._play(team, 11, 14) == expected

    def test_each_env_explores_with_its_own_epsilon(self) -> None:
        policy = self.policy()
        with self._team() as team, self._team() as greedy:
            epsilons = np.zeros(team.num_envs, np.float32)
            epsilons[-1] = 1.0
            mixed = team.collect(policy, 40, round_no=0, explore=epsilons)
            none = greedy.collect(policy, 40, round_no=0, explore=0.0)
        last = none.chunks[-1].meta.session
        is_last = [chunk.meta.session == last for chunk in mixed.chunks]
        assert any(is_last)
        assert [chunk for chunk in mixed.chunks if chunk.meta.session != last] == [
            chunk for chunk in none.chunks if chunk.meta.session != last
        ]
        assert [chunk for chunk in mixed.chunks if chunk.meta.session == last] != [
            chunk for chunk in none.chunks if chunk.meta.session == last
        ]

    def test_a_state_of_other_actors_is_refused(self) -> None:
        with self._team() as team:
            self._play(team, 0, 1)
            arrays, facts = team.state()
            for other in ({"actors": [facts] * 99}, {**facts, "schema": "0" * 64, "actors": []}):
                assert "actor" in _refusal(functools.partial(team.restore, arrays, other))

    def test_a_policy_for_another_game_is_refused_and_the_team_plays_on(self) -> None:
        policy = self.policy()
        other = replace(policy.game, max_episode_steps=77_777)
        with self._team() as team:
            other_policy = replace(policy, game=other)
            assert "policy" in _refusal(lambda: team.collect(other_policy, 4, round_no=0))
            assert team.collect(policy, 4, round_no=1, explore=0.0).env_steps == 4 * team.num_envs

    def test_closing_a_team_closes_every_env(self, tmp_path: Path) -> None:
        with contextlib.closing(self.make_noting(tmp_path)) as team:
            team.collect(self.policy(), 4, round_no=0, explore=0.0)
            assert not list(tmp_path.iterdir())
        assert len(list(tmp_path.iterdir())) == team.num_envs

    def test_a_team_may_be_closed_twice(self) -> None:
        team = self.make()
        team.close()
        team.close()


def _refusal(call: Callable[[], object]) -> str:
    """The message of the ConfigError that the call raises; empty if it raises none."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""
