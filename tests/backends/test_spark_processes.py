"""Spark ingest as processes: killed again and again, asked to finish, and called from the command line."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from tests.backends.keyspaces import Keyspace
from tests.backends.spark import Process, append, digests_of, native_digests, some_frames, wait_for
from understudy.app.data import DataFolder
from understudy.app.roles.children import NOT_CARRIED_OUT
from understudy.core.errors import ConfigError
from understudy.ingest.spark_session import require_spark
from understudy.streams.file import FileStream

ROOT = Path(__file__).parents[2]
STEPS_S = 0.2
"""Time between two sessions of the player who never stops."""


@pytest.fixture(scope="module")
def keyspace(cassandra_server: Any) -> Iterator[Keyspace]:
    try:
        require_spark()
    except ConfigError as error:
        pytest.skip(str(error))
    made = Keyspace(cassandra_server, cassandra_server.credentials_file, "spark_processes")
    yield made
    made.close()


@pytest.fixture
def process(keyspace: Keyspace, tmp_path: Path) -> Iterator[Process]:
    keyspace.empty()
    process = Process(keyspace, DataFolder(tmp_path / "D"))
    yield process
    process.kill_all()
    process.stream.close()


class Player(Thread):
    """Somebody who plays on whatever happens to ingest."""

    def __init__(self, stream: FileStream) -> None:
        super().__init__()
        self._stream, self._over, self.frames = stream, Event(), 0

    def run(self) -> None:
        rng = np.random.default_rng(90)
        while not self._over.wait(STEPS_S):
            frames = some_frames(rng, n_sessions=1, n_chunks=3)
            append(self._stream, frames)
            self.frames += len(frames)

    def __enter__(self) -> "Player":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


def kill_sometime(process: Process, rng: np.random.Generator) -> None:
    """Start a job and kill it: while it starts, or while it stores; the driver, all of it at once, or its JVM alone."""
    child = process.start()
    if rng.random() < 0.25:
        time.sleep(rng.uniform(0.0, 8.0))
    else:
        wait_for(child, 0 if rng.random() < 0.3 else 1)
        time.sleep(rng.uniform(0.0, 2.0))
    how = rng.choice(["driver", "all", "jvm"])
    if how == "driver":
        child.kill()
    elif how == "all":
        process.kill_all()
    elif jvm := process.jvm():
        os.kill(jvm, signal.SIGKILL)
        assert child.wait(60.0) == NOT_CARRIED_OUT, child.errors
        assert child.errors.startswith(("Spark has ended", "Spark did not start")), child.errors
        assert child.errors.count("\n") == 1, child.errors
        return
    else:
        child.kill()
    assert child.wait(30.0) == -9, child.errors


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_job_that_is_killed_again_and_again_loses_and_doubles_nothing(
    process: Process, keyspace: Keyspace, kills: int, tmp_path: Path
):
    rng = np.random.default_rng(kills)
    with Player(process.stream) as player:
        for _ in range(kills - 1):
            kill_sometime(process, rng)
        # And once when a batch is stored whole, and Spark does not know it yet.
        dying = process.start("tests.backends.spark_dying")
        assert dying.wait(300.0) == -9, dying.errors
        last = process.start()
        wait_for(last, 1)
    last.stop()
    assert last.wait(300.0) == 0, last.errors
    assert last.latest["fates"]["duplicate"] > 0, "what was not noted was handed over again"
    assert process.wait_until_gone() == [], "no process is left"
    native = native_digests(process.stream, tmp_path / "native")
    with closing(keyspace.open()) as store:
        assert digests_of(store) == native
        audit = store.audit()
    assert (audit.chunks, audit.gap_chunks, audit.duplicate_chunks, audit.quarantined) == (player.frames, 0, 0, 0)


@pytest.mark.timeout(600)
def test_the_command_stores_the_stream_and_says_no_more_than_it_must(process: Process, keyspace: Keyspace):
    append(process.stream, some_frames(np.random.default_rng(5)))
    command = [sys.executable, "-m", "understudy.cli.main", "ingest", "--engine", "spark", "--store", keyspace.url,
               "--master", "local[1]", "--data", str(process.data.root), "--until-empty", "--json"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=dict(os.environ))
    assert (done.returncode, done.stderr) == (0, "")
    fields = json.loads(done.stdout)
    assert fields["fates"] == {"new": 20}
    assert fields["batch_rows"] == 20
    assert 0 < fields["batch_s"] < 300


@pytest.mark.timeout(600)
def test_spark_submit_runs_the_same_job(process: Process, keyspace: Keyspace):
    append(process.stream, some_frames(np.random.default_rng(6)))
    command = [str(Path(sys.executable).with_name("spark-submit")), "--master", "local[1]", "scripts/submit_ingest.py",
               "--store", keyspace.url, "--data", str(process.data.root), "--until-empty", "--json"]  # fmt: skip
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["fates"] == {"new": 20}


@pytest.mark.timeout(600)
def test_a_master_that_cannot_be_is_told_in_one_line(process: Process, keyspace: Keyspace):
    command = [sys.executable, "-m", "understudy.cli.main", "ingest", "--engine", "spark", "--store", keyspace.url,
               "--master", "here", "--data", str(process.data.root), "--until-empty"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=dict(os.environ))
    assert done.returncode in (2, 3)
    (line,) = done.stderr.strip().splitlines()
    assert "Spark did not start under master 'here': " in line
