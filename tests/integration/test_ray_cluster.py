"""Runs on a Ray cluster of several nodes: lost nodes, joining nodes, tokens, submitted jobs."""

import contextlib
import itertools
import json
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.act.test_process_team import plan_of, play, sessions_of
from tests.cli.platforms import wait_for
from tests.docs.scale_page import commands_of
from tests.integration.ray_cluster import RayCluster, free_port
from understudy.act.ray_session import RaySession
from understudy.act.ray_team import ray_team
from understudy.act.team import LocalTeam
from understudy.core.errors import ConfigError
from understudy.ports import Collected

ray = pytest.importorskip("ray")


@contextlib.contextmanager
def cluster_of(**options: bool) -> Iterator[RayCluster]:
    """A cluster in a folder with a short path: those of Ray's sockets begin with it, up to 107
    bytes, and a folder of pytest may be too long for them.
    """
    with (
        tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder,
        contextlib.closing(RayCluster(Path(folder), **options)) as cluster,
    ):
        yield cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with cluster_of(has_jobs=True) as cluster:
        yield cluster


def test_an_address_that_cannot_be_used_is_refused_with_the_reason(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def refused(address: str, why: str) -> None:
        with pytest.raises(ConfigError, match=why):
            RaySession(address, num_cpus=1)
        assert not ray.is_initialized()

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # changes nothing
    refused("ray://127.0.0.1:10001", "Ray Client is not supported.*ray job submit")
    refused("somewhere", "'somewhere'; give host:port")
    refused(f"127.0.0.1:{free_port()}", "no Ray cluster answers at 127.0.0.1.*its head runs")
    refused(cluster.address, "no token was found; set RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    refused(cluster.address, "the token is wrong; set RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN", cluster.token)
    with monkeypatch.context() as patched:
        patched.setattr(ray, "__version__", "2.99.0")
        refused(cluster.address, r"Version mismatch.*Ray: 2\.99.*install the cluster's versions")
    with socket.create_server(("127.0.0.1", 0)) as silent, monkeypatch.context() as patched:
        patched.setattr("understudy.act.ray_session._ANSWER_S", 5.0)
        refused(f"127.0.0.1:{silent.getsockname()[1]}", "cannot use|did not answer as Ray")


def test_a_cluster_that_runs_the_code_of_anyone_is_refused():
    with (
        cluster_of(has_token=False) as cluster,
        pytest.raises(ConfigError, match=r"runs the code of anyone.*RAY_AUTH_MODE=token"),
    ):
        RaySession(cluster.address, num_cpus=1)


@pytest.fixture(scope="module")
def session(cluster: RayCluster) -> Iterator[RaySession]:
    """Connected before there are nodes: to the head, which no test ends; then one node joins."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_AUTH_TOKEN", cluster.token)
        with contextlib.closing(RaySession(cluster.address, num_cpus=0)) as session:
            cluster.add_node()
            yield session


def test_a_team_in_lock_step_plays_the_same_if_a_node_is_lost(
    cluster: RayCluster, session: RaySession
):
    plan = plan_of()
    with contextlib.closing(LocalTeam(plan)) as local:
        expected = play(local, plan, range(10))
    wait_for(lambda: session.free_cpus() == (2, 2))
    with contextlib.closing(ray_team(plan, address=cluster.address)) as team:
        assert play(team, plan, range(4)) == expected[:4]
        cluster.add_node()
        wait_for(lambda: session.free_cpus() == (1, 3))
        cluster.kill_node()
        collected = play(team, plan, range(4, 10))
    assert [part.chunks for part in collected] == [part.chunks for part in expected[4:]]
    assert [part.episodes for part in collected] == [part.episodes for part in expected[4:]]
    (note,) = [note for part in collected for note in part.replaced]
    assert "was replaced: its" in note


def test_an_asynchronous_team_shrinks_if_a_node_is_lost_and_grows_if_one_joins(
    cluster: RayCluster, session: RaySession
):
    plan = plan_of()
    rounds = itertools.count()
    collected: list[Collected] = []
    wait_for(lambda: session.free_cpus() == (2, 2))
    with contextlib.closing(ray_team(plan, address=cluster.address, is_asynchronous=True)) as team:
        while sessions_of(collected) < 4:
            collected += play(team, plan, itertools.islice(rounds, 1))
        cluster.kill_node()
        while not any("was replaced" in note for part in collected for note in part.replaced):
            collected += play(team, plan, itertools.islice(rounds, 1))
        assert len(team.pids) == 1
        collected += play(team, plan, itertools.islice(rounds, 3))
        assert sessions_of(collected) == 4
        cluster.add_node()
        while sessions_of(collected) < 6:
            collected += play(team, plan, itertools.islice(rounds, 1))
        assert len(team.pids) == 2
    ids = [chunk.meta.id for part in collected for chunk in part.chunks]
    assert len(ids) == len(set(ids))


def page_commands(cluster: RayCluster) -> list[str]:
    """Those of docs/scale.md, for this cluster: token, head, node, run and job."""
    return [
        each.text.replace("head.example:6379", cluster.address)
        .replace("--port=6379", f"--port={cluster.port}")
        .replace("127.0.0.1:8265", f"127.0.0.1:{cluster.jobs_port}")
        for each in commands_of("3.")
    ]


def test_a_run_plays_on_the_cluster(cluster: RayCluster, session: RaySession, tmp_path: Path):
    token, head, node, train, _ = page_commands(cluster)
    assert_succeeds(token, tmp_path, cluster)
    assert len(bytes.fromhex((tmp_path / "ray.token").read_text().strip())) == 32
    # The nodes of these tests were started so, with less memory, one CPU and ports of their own.
    for command, started in ((head, cluster.commands[0]), (node, cluster.commands[-1])):
        settings, _, words = command.partition(" ray start ")
        assert settings == "RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$PWD/ray.token"
        assert set(words.split()) <= set(started.split())
    wait_for(lambda: session.free_cpus() == (2, 2))
    assert_succeeds(train, cluster.folder, cluster)
    assert_finished(cluster.folder / "R")


@pytest.mark.usefixtures("session")
def test_the_whole_command_runs_as_a_submitted_job(cluster: RayCluster, tmp_path: Path):
    job = page_commands(cluster)[-1]
    wait_for(lambda: _accepts(cluster.jobs_port))
    stranger = subprocess.run(
        ["sh", "-c", f"{job.partition(' -- ')[0]} -- touch '{tmp_path}/was here'"],
        cwd=cluster.folder,
        env={**cluster.environment, "RAY_AUTH_TOKEN": "0" * 64},
        capture_output=True,
        text=True,
        check=False,
    )
    assert stranger.returncode != 0
    assert "token" in stranger.stderr.lower()
    assert_succeeds(job, cluster.folder, cluster)
    assert_finished(cluster.folder / "R2")
    assert not (tmp_path / "was here").exists()


def assert_finished(run: Path) -> None:
    assert json.loads((run / "result.json").read_text())["env_steps"] >= 4_000


def assert_succeeds(command: str, folder: Path, cluster: RayCluster) -> None:
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=folder,
        env={key: text for key, text in cluster.environment.items() if "TOKEN" not in key},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True
