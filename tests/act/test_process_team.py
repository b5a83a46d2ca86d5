"""A team of processes plays what actors in one process play, whichever of them is killed."""

import contextlib
import functools
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from tests.act.envs import MixedEnv, PlainEnv
from tests.act.failing_envs import (
    Closing,
    Exiting,
    Failing,
    Leaving,
    Reporting,
    Unrepeatable,
    make_without_jax,
)
from tests.act.policies import random_policy
from tests.cli.platforms import wait_for
from understudy.act.process_team import process_team
from understudy.act.remote_team import SAVE_EVERY
from understudy.act.team import LocalTeam, TeamPlan, decode_collected, encode_collected
from understudy.act.vector import Envs, game_of, make_envs
from understudy.core.errors import ConfigError, GameFailed
from understudy.ports import Collected, Team

STEPS = 12


def plan_of(env: Any = PlainEnv, *, num_actors: int = 2, make: Any = None) -> TeamPlan:
    return TeamPlan(
        make_envs=make or functools.partial(make_envs, env),
        game=game_of(make_envs(env, 1)),
        root_seed=5,
        created_ms=1_700_000_000_000,
        num_envs=4,
        num_actors=num_actors,
    )


def play(team: Team, plan: TeamPlan, rounds: Iterable[int]) -> list[Collected]:
    kind = "epsilon_greedy" if plan.game.discrete else "gaussian_tanh"
    return [
        team.collect(
            random_policy(plan.game, kind, seed=round_no, version=round_no),
            STEPS,
            round_no=round_no,
            explore=0.3,
        )
        for round_no in rounds
    ]


@pytest.mark.parametrize("env", [PlainEnv, MixedEnv])
def test_processes_play_what_actors_in_this_process_play(env: Any):
    plan = plan_of(env)
    with (
        contextlib.closing(process_team(plan)) as team,
        contextlib.closing(LocalTeam(plan)) as local,
    ):
        expected = play(local, plan, range(5))
        assert play(team, plan, range(5)) == expected
        # Each continues from the other's state.
        arrays, facts = team.state()
        local_arrays, local_facts = local.state()
        assert facts == local_facts
        assert {name: array.tobytes() for name, array in arrays.items()} == {
            name: array.tobytes() for name, array in local_arrays.items()
        }
        expected = play(local, plan, range(5, 8))
        team.restore(local_arrays, local_facts)
        assert play(team, plan, range(5, 8)) == expected
        local.restore(arrays, facts)
        assert play(local, plan, range(5, 8)) == expected


def test_a_killed_actor_is_replaced_and_plays_the_same():
    plan = plan_of()
    rounds = 2 * SAVE_EVERY + 3
    # Before the first saved state, around it, and long after one.
    kills = (1, SAVE_EVERY - 1, SAVE_EVERY, SAVE_EVERY + 1, 2 * SAVE_EVERY - 1)
    with contextlib.closing(LocalTeam(plan)) as local:
        expected = play(local, plan, range(rounds))
        state = local.state()[1]
    with contextlib.closing(process_team(plan)) as team:
        for round_no in range(rounds):
            if round_no in kills:
                os.kill(team.pids[round_no % 2], signal.SIGKILL)
            (collected,) = play(team, plan, range(round_no, round_no + 1))
            assert collected.chunks == expected[round_no].chunks
            assert collected.episodes == expected[round_no].episodes
            assert len(collected.replaced) == (round_no in kills)
            assert all("signal 9" in what for what in collected.replaced)
        os.kill(team.pids[0], signal.SIGKILL)
        assert team.state()[1] == state


def test_an_asynchronous_team_goes_on_without_a_killed_actor_and_no_chunk_comes_twice():
    plan = plan_of()
    with contextlib.closing(process_team(plan, is_asynchronous=True)) as team:
        rounds = itertools.count()
        collected = play(team, plan, itertools.islice(rounds, 4))
        os.kill(team.pids[1], signal.SIGKILL)
        while sessions_of(collected) < 6:  # two of the killed actor, two of its replacement
            collected += play(team, plan, itertools.islice(rounds, 1))
        # A stopped actor stops no other.
        os.kill(team.pids[0], signal.SIGSTOP)
        collected += play(team, plan, itertools.islice(rounds, 8))
        os.kill(team.pids[0], signal.SIGCONT)
        with pytest.raises(ConfigError, match="has no state"):
            team.state()
    assert sum(len(part.replaced) for part in collected) == 1
    ids = [chunk.meta.id for part in collected for chunk in part.chunks]
    assert len(ids) == len(set(ids))
    assert sessions_of(collected) == 6


def sessions_of(collected: list[Collected]) -> int:
    return len({chunk.meta.session for part in collected for chunk in part.chunks})


def test_a_replaced_actor_that_plays_otherwise_than_before_ends_the_run():
    plan = plan_of(Unrepeatable, num_actors=1)
    with contextlib.closing(process_team(plan)) as team:
        play(team, plan, range(3))
        os.kill(team.pids[0], signal.SIGKILL)
        with pytest.raises(ConfigError, match=r"played otherwise than before.*reset\(seed"):
            play(team, plan, range(3, 4))


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_closing_a_team_closes_its_envs(tmp_path: Path, is_asynchronous: bool):
    plan = plan_of(make=functools.partial(make_envs, functools.partial(Closing, tmp_path)))
    team = process_team(plan, is_asynchronous=is_asynchronous)
    play(team, plan, range(2))
    team.close()
    assert len(list(tmp_path.iterdir())) == plan.num_envs


def test_a_game_sees_the_environment_of_the_user(monkeypatch: pytest.MonkeyPatch):
    plan = plan_of(make=functools.partial(make_envs, Reporting))
    for path in (None, "/nowhere"):
        monkeypatch.setenv("PYTHONPATH", path or "")
        if path is None:
            monkeypatch.delenv("PYTHONPATH")
        with (
            contextlib.closing(process_team(plan)) as team,
            pytest.raises(GameFailed, match=f"the path is {path}"),
        ):
            play(team, plan, range(1))


def test_a_process_has_no_jax_and_stays_small():
    with contextlib.closing(process_team(plan_of(make=make_without_jax))) as team:
        for pid in team.pids:
            (line,) = (
                line
                for line in Path(f"/proc/{pid}/status").read_text().splitlines()
                if line.startswith("VmRSS")
            )
            assert int(line.split()[1]) / 1024 < 80


def test_an_error_of_the_game_is_raised_with_the_traceback_of_the_process():
    plan = plan_of(Failing)
    with (
        contextlib.closing(process_team(plan)) as team,
        pytest.raises(GameFailed, match="the door is stuck") as raised,
    ):
        play(team, plan, range(1))
    assert 'raise RuntimeError("the door is stuck")' in "".join(raised.value.__notes__)


def test_a_game_that_exits_is_an_error_of_the_game():
    plan = plan_of(Leaving, num_actors=1)
    with (
        contextlib.closing(process_team(plan)) as team,
        pytest.raises(GameFailed, match="SystemExit: 5"),
    ):
        play(team, plan, range(1))


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_an_actor_that_dies_again_and_again_ends_the_run_with_its_reason(
    is_asynchronous: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("understudy.act.remote_team.MAX_LOSSES", 3)
    plan = plan_of(Exiting, num_actors=1)
    with (
        contextlib.closing(process_team(plan, is_asynchronous=is_asynchronous)) as team,
        pytest.raises(GameFailed, match=r"lost 3 times.*code 7"),
    ):
        play(team, plan, range(3))


def test_a_game_that_cannot_be_created_in_a_process_is_refused():
    def fail(num_envs: int) -> Envs:
        raise ConfigError("no display; start one")

    with pytest.raises(ConfigError, match="no display; start one"):
        process_team(plan_of(make=fail))
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"cannot be created in another process.*pickle"):
        process_team(plan_of(make=lambda num_envs: lock))


def test_envs_that_cannot_be_divided_among_the_actors_are_refused():
    with pytest.raises(ConfigError, match="4 envs cannot be divided among 3 actors"):
        plan_of(num_actors=3)


def test_an_env_registered_by_the_caller_is_known_to_the_processes():
    class Local(PlainEnv):
        """Cannot be imported."""

    gymnasium.register("TeamTest-v0", lambda **_: Local(), disable_env_checker=True)
    try:
        plan = plan_of("TeamTest-v0")
        with contextlib.closing(process_team(plan)) as team:
            assert play(team, plan, range(1))[0].env_steps == 4 * STEPS
    finally:
        del gymnasium.registry["TeamTest-v0"]


SCRIPT = """
import gymnasium, understudy
from tests.act.envs import PlainEnv

class Mine(PlainEnv):
    pass

gymnasium.register("Mine-v0", entry_point="__main__:Mine", disable_env_checker=True)
run = understudy.train(
    "Mine-v0", algorithm="dqn", steps=500, settings={"actors": 2, "eval_episodes": 1},
    options=understudy.TrainOptions(engine="process"),
)
print(run.result["env_steps"])
"""


def test_a_script_without_a_guard_trains_on_its_own_env(tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT)
    path = os.pathsep.join(filter(None, sys.path))
    found = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert int(found.stdout) >= 500


PARENT = """
import functools, time
from tests.act.test_process_team import plan_of
from understudy.act.process_team import process_team
team = process_team(plan_of())
print(*team.pids, flush=True)
time.sleep(600)
"""


def test_the_processes_of_a_killed_parent_end():
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    with parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_a_round_that_only_resets_has_no_chunks():
    nothing = Collected([], [], 0)
    assert decode_collected(encode_collected(nothing)) == nothing


def test_a_result_is_the_same_after_its_bytes():
    plan = plan_of(MixedEnv)
    with contextlib.closing(LocalTeam(plan)) as team:
        for collected in play(team, plan, range(4)):
            assert decode_collected(encode_collected(collected)) == collected
