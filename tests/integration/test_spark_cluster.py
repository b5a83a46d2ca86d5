"""Spark ingest on a real standalone cluster: dying workers, an unusable worker, no master."""

import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.kafka import Topic
from tests.integration.keyspaces import Keyspace
from tests.integration.spark import (
    MARK,
    append,
    digests_of,
    left_of,
    native_digests,
    some_frames,
    wait_until,
)
from tests.integration.spark_cluster import Cluster
from understudy.backends.data import DataFolder
from understudy.backends.deployment import open_deployment
from understudy.testing.store_harness import SPEC

pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "understudy.cli.main", "ingest", "--engine", "spark"]
SUBMIT = str(Path(sys.executable).with_name("spark-submit"))


@pytest.fixture
def mark() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def cluster(with_spark: None, mark: str, tmp_path: Path) -> Iterator[Cluster]:
    with closing(Cluster(tmp_path / "cluster", mark)) as cluster:
        cluster.add_worker()
        yield cluster


@pytest.fixture
def topic(kafka_server: Any) -> Topic:
    return Topic(kafka_server)


@pytest.fixture
def flags(
    topic: Topic, keyspace: Keyspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """The options of an ingest between these; workers can reach the registry."""
    data = DataFolder(tmp_path / "D")
    models = f"file://{tmp_path}/models"
    open_deployment(data, models=models).registry.register(SPEC)
    monkeypatch.setenv("UNDERSTUDY_MODELS_URL", models)
    return [
        "--stream",
        topic.location().url,
        "--store",
        keyspace.url,
        "--data",
        str(data.root),
        "--json",
    ]


def started(command: Sequence[str], mark: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        MARK: mark,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
    }
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    )


def test_a_cluster_with_dying_workers_stores_the_same_as_our_own_service(
    cluster: Cluster, mark: str, topic: Topic, keyspace: Keyspace, flags: list[str], tmp_path: Path
):
    rng = np.random.default_rng(20)
    with closing(topic.open()) as stream, closing(keyspace.open()) as store:
        append(stream, some_frames(rng))
        job = started([*COMMAND, "--master", cluster.url, *flags], mark)
        wait_until(lambda: store.audit().chunks == 20 or job.poll() is not None)
        assert cluster.kill_executors() == 1
        append(stream, some_frames(rng))
        wait_until(lambda: store.audit().chunks == 40 or job.poll() is not None)
        cluster.kill_worker()
        append(stream, some_frames(rng))
        cluster.add_worker()
        wait_until(lambda: store.audit().chunks == 60 or job.poll() is not None)
        job.send_signal(signal.SIGTERM)
        out, errors = job.communicate(timeout=60.0)
        assert job.returncode == 0, errors
        assert json.loads(out)["fates"] == {"new": 60}

        # The next job is spark-submit's, and goes on where the store stands.
        append(stream, some_frames(rng))
        submit = [
            SUBMIT,
            "--master",
            cluster.url,
            "scripts/submit_ingest.py",
            *flags,
            "--until-empty",
        ]
        job = started(submit, mark)
        out, errors = job.communicate(timeout=300.0)
        assert job.returncode == 0, errors
        assert json.loads(out.splitlines()[-1])["fates"] == {"new": 20}
        assert digests_of(store) == native_digests(stream, tmp_path / "native")
        audit = store.audit()
    assert (audit.chunks, audit.gap_chunks, audit.duplicate_chunks) == (80, 0, 0)


def test_a_worker_that_cannot_run_tasks_is_reported_before_anything_is_read(
    cluster: Cluster, mark: str, flags: list[str], tmp_path: Path
):
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    command = [
        "env",
        f"PYSPARK_PYTHON={bare / 'bin' / 'python'}",
        *COMMAND,
        "--master",
        cluster.url,
    ]
    job = started([*command, *flags, "--until-empty"], mark)
    _, errors = job.communicate(timeout=300.0)
    assert job.returncode == 2, errors
    assert f"a worker of {cluster.url} cannot run a task: " in errors
    assert "No module named 'understudy'" in errors


@pytest.mark.slow  # it waits for most of a minute
@pytest.mark.usefixtures("with_spark")
def test_a_silent_master_is_reported_and_a_stop_request_ends_the_wait(mark: str, flags: list[str]):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        master = f"spark://127.0.0.1:{silent.getsockname()[1]}"
        job = started([*COMMAND, "--master", master, *flags], mark)
        assert job.stderr is not None
        told = next(line for line in job.stderr if "spark_waits" in line)
        assert f"Spark has not started under master {master} yet" in told
        job.send_signal(signal.SIGTERM)
        _, errors = job.communicate(timeout=30.0)
    assert job.returncode == 0, errors
    assert "Traceback" not in errors
    assert left_of(mark, timeout_s=5.0) == []


@pytest.mark.usefixtures("with_spark")
def test_a_missing_master_is_reported_immediately(mark: str, flags: list[str]):
    job = started([*COMMAND, "--master", "spark://127.0.0.1:9", *flags, "--until-empty"], mark)
    _, errors = job.communicate(timeout=60.0)
    assert job.returncode == 3
    (line,) = errors.strip().splitlines()
    assert "no Spark master is listening at 127.0.0.1:9: " in line
