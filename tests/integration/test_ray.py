"""A team of Ray actors plays what actors in this process play; one Ray for most of these tests."""

import contextlib
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.act.failing_envs import Closing, Failing
from tests.act.test_process_team import plan_of, play, sessions_of
from tests.cli.platforms import wait_for
from tests.contracts.test_teams import PlainContract, plan
from tests.integration.ray_cluster import processes_with
from tests.training.test_engines import run
from understudy.act import remote_team
from understudy.act.ray_session import RaySession, processes_in
from understudy.act.ray_team import ray_team
from understudy.act.remote_team import SAVE_EVERY
from understudy.act.team import LocalTeam
from understudy.act.vector import make_envs
from understudy.core.errors import ConfigError, GameFailed
from understudy.ports import Team
from understudy.training.events import Event, Guarded, Update

pytest.importorskip("ray")
FOLDER = Path(tempfile.gettempdir())


@pytest.fixture(scope="module")
def session() -> Iterator[RaySession]:
    """Ray on this machine; teams use the connection of their process."""
    with contextlib.closing(RaySession(num_cpus=3)) as session:
        yield session


@pytest.mark.usefixtures("session")
class TestRayTeam(PlainContract):
    def make(self) -> Team:
        return ray_team(plan(1))


@pytest.mark.usefixtures("session")
def test_a_killed_actor_is_replaced_and_plays_the_same():
    plan = plan_of()
    rounds = SAVE_EVERY + 3
    kills = (1, SAVE_EVERY + 1)
    with contextlib.closing(LocalTeam(plan)) as local:
        expected = play(local, plan, range(rounds))
        state = local.state()[1]
    with contextlib.closing(ray_team(plan)) as team:
        for round_no in range(rounds):
            if round_no in kills:
                os.kill(team.pids[round_no % 2], signal.SIGKILL)
            (collected,) = play(team, plan, range(round_no, round_no + 1))
            assert collected.chunks == expected[round_no].chunks
            assert collected.episodes == expected[round_no].episodes
            assert len(collected.replaced) == (round_no in kills)
            assert all("was replaced" in what for what in collected.replaced)
        assert team.state()[1] == state


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("algorithm", ["dqn", "ppo"])
def test_a_run_ends_with_the_bits_of_one_process_also_if_actors_are_killed(
    tmp_path: Path, algorithm: str
):
    guarded: list[Guarded] = []
    rounds = 0

    def kill(event: Event) -> None:
        nonlocal rounds
        if isinstance(event, Guarded):
            guarded.append(event)
        if isinstance(event, Update):
            rounds += 1
            if rounds in (1, 4):
                os.kill(actor_pids()[0], signal.SIGKILL)

    def stop(event: Event) -> None:
        if event.env_steps > 1_000:
            raise KeyboardInterrupt

    inline = run(tmp_path / "inline", algorithm, "inline", steps=2_000)
    on_ray = run(tmp_path / "ray", algorithm, "ray", steps=2_000, on_event=kill)
    assert on_ray.policy.encode() == inline.policy.encode()
    assert len(guarded) == 2
    assert all("was replaced" in event.what for event in guarded)
    # And one that is begun on Ray is resumed in this process.
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "both", algorithm, "ray", steps=2_000, on_event=stop)
    resumed = run(tmp_path / "both", algorithm, "inline", steps=2_000, resume=True)
    assert resumed.policy.encode() == inline.policy.encode()
    assert json.loads((tmp_path / "both" / "run.json").read_text())["engine"] == "inline"
    wait_for(lambda: not actor_pids())


def actor_pids() -> list[int]:
    """The processes of Ray actors of this process's Ray."""
    return [
        pid
        for pid in processes_with(f"RAY_AUTH_TOKEN={os.environ['RAY_AUTH_TOKEN']}")
        if b"_Served" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


@pytest.mark.usefixtures("session")
def test_an_asynchronous_team_begins_with_the_actors_that_have_a_cpu_and_others_join():
    plan = plan_of()
    with contextlib.ExitStack() as opened:
        other = opened.enter_context(contextlib.closing(ray_team(plan)))
        team = opened.enter_context(contextlib.closing(ray_team(plan, is_asynchronous=True)))
        assert len(team.pids) == 1
        rounds = itertools.count()
        collected = play(team, plan, itertools.islice(rounds, 3))
        assert sessions_of(collected) == 2  # one of two actors, which has two of the four envs
        other.close()
        while sessions_of(collected) < 4:
            collected += play(team, plan, itertools.islice(rounds, 1))
        os.kill(team.pids[0], signal.SIGKILL)
        while sessions_of(collected) < 6:  # its replacement begins new ones
            collected += play(team, plan, itertools.islice(rounds, 1))
    notes = [note for part in collected for note in part.replaced]
    assert ["joined the others" in note for note in notes] == [True, False]
    assert "was replaced" in notes[1]
    ids = [chunk.meta.id for part in collected for chunk in part.chunks]
    assert len(ids) == len(set(ids))


@pytest.mark.usefixtures("session")
def test_a_team_in_lock_step_without_enough_cpus_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote_team, "PLACE_S", 1.0)
    refused = r"room for \d of 4 actors: each needs 1 CPU.*cluster's 3 are free"
    with pytest.raises(ConfigError, match=refused):
        ray_team(plan_of(num_actors=4))


def test_a_ray_that_does_not_start_is_reported_and_leaves_nothing(
    session: RaySession, monkeypatch: pytest.MonkeyPatch
):
    def fail(**arguments: object) -> None:
        folders.append(Path(str(arguments["_temp_dir"])))
        raise Exception("The current node\ntimed out")

    folders: list[Path] = []
    token = os.environ["RAY_AUTH_TOKEN"]
    with monkeypatch.context() as patched:
        patched.setattr(session.ray, "is_initialized", lambda: False)
        patched.setattr(session.ray, "init", fail)
        patched.setattr(session.ray, "shutdown", lambda: None)
        with pytest.raises(ConfigError, match=r"start .*: The current node timed out; wait"):
            RaySession(num_cpus=1)
    assert os.environ["RAY_AUTH_TOKEN"] == token
    assert not folders[0].exists()


@pytest.mark.usefixtures("session")
def test_a_game_that_fails_is_reported_and_its_envs_are_closed(tmp_path: Path):
    class Stuck(Closing, Failing):
        """Fails, and leaves a file for each env that is closed."""

    plan = plan_of(Failing, make=functools.partial(make_envs, functools.partial(Stuck, tmp_path)))
    with contextlib.closing(ray_team(plan)) as team:
        with pytest.raises(GameFailed, match="the door is stuck") as raised:
            play(team, plan, range(1))
        assert 'raise RuntimeError("the door is stuck")' in "".join(raised.value.__notes__)
    assert len(list(tmp_path.iterdir())) == plan.num_envs


STRANGER = """
import pathlib, sys, ray
ray.init(address=sys.argv[1])
ray.get(ray.remote(lambda path: path.touch()).remote(pathlib.Path(sys.argv[2])))
"""


@pytest.mark.parametrize("token", [None, "0" * 64])
def test_a_stranger_without_the_token_gets_no_code_run(
    tmp_path: Path, session: RaySession, token: str | None
):
    address = session.ray.get_runtime_context().gcs_address
    environment = {key: text for key, text in os.environ.items() if not key.startswith("RAY_")}
    environment |= {"RAY_NUM_REDIS_GET_RETRIES": "2", "HOME": str(tmp_path / "home")}
    environment["RAY_AUTH_MODE"] = "disabled" if token is None else "token"
    found = subprocess.run(
        [sys.executable, "-c", STRANGER, address, str(tmp_path / "was here")],
        env={**environment, **({} if token is None else {"RAY_AUTH_TOKEN": token})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode != 0
    assert "InvalidAuthToken" in found.stderr
    assert not (tmp_path / "was here").exists()
    # The same script with the token runs.
    if token is not None:
        environment["RAY_AUTH_TOKEN"] = os.environ["RAY_AUTH_TOKEN"]
        script = [sys.executable, "-c", STRANGER, address, str(tmp_path / "was here")]
        subprocess.run(script, env=environment, capture_output=True, check=True)
        assert (tmp_path / "was here").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_run_that_is_stopped_or_killed(tmp_path: Path, number: int):
    before = set(FOLDER.glob("understudy-ray-*"))
    environment = {key: text for key, text in os.environ.items() if not key.startswith("RAY_")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    arguments = ["train", "CartPole-v1", "--algorithm", "dqn", "--steps", "10000000", "--actors"]
    arguments += ["2", "--engine", "ray", "--until", "inf", "--out", str(tmp_path / "run")]
    command = subprocess.Popen(
        [sys.executable, "-m", "understudy.cli.main", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: (tmp_path / "run" / "curve.csv").exists(), timeout_s=120.0)
        (folder,) = set(FOLDER.glob("understudy-ray-*")) - before
        assert len(processes_in(str(folder))) > 5
        command.send_signal(number)
        assert command.wait(60.0) == (130 if number == signal.SIGINT else -number)
        if number == signal.SIGINT:  # it has waited for them
            assert not processes_in(str(folder))
        wait_for(lambda: not folder.exists())
        assert not processes_in(str(folder))
    finally:
        command.kill()
        command.wait()
