"""Spark ingest as processes: killed repeatedly, stopped, and run from the command line."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest

from tests.integration.keyspaces import Keyspace
from tests.integration.spark import (
    MARK,
    Process,
    append,
    digests_of,
    left_of,
    native_digests,
    some_frames,
    wait_for,
    wait_until,
)
from understudy.backends.data import DataFolder
from understudy.experience.intake import deployment_key
from understudy.platform.children import FAILED
from understudy.platform.config import Config, GatewaySection, IngestSection, StoreSection
from understudy.platform.platform import Platform
from understudy.streams.file import FileStream

ROOT = Path(__file__).parents[2]
STEPS_S = 0.2
"""Time between two sessions of the player that never stops."""


@pytest.fixture
def process(with_spark: None, keyspace: Keyspace, tmp_path: Path) -> Iterator[Process]:
    process = Process(keyspace, DataFolder(tmp_path / "D"))
    yield process
    process.kill_all()
    process.stream.close()


class Player(Thread):
    """A player that keeps playing whatever happens to ingest."""

    def __init__(self, stream: FileStream) -> None:
        super().__init__()
        self._stream = stream
        self._over = Event()
        self.frames = 0

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
    """Start a job and kill it during startup or storing: driver, whole group, or JVM only."""
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
        assert child.wait(60.0) == FAILED, child.errors
        assert child.errors.startswith(("Spark has exited", "Spark did not start")), child.errors
        assert child.errors.count("\n") == 1, child.errors
        return
    else:
        child.kill()
    assert child.wait(30.0) == -9, child.errors


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_job_killed_repeatedly_loses_and_duplicates_nothing(
    process: Process, keyspace: Keyspace, kills: int, tmp_path: Path
):
    rng = np.random.default_rng(kills)
    with Player(process.stream) as player:
        for _ in range(kills - 1):
            kill_sometime(process, rng)
        # And once when a batch is stored whole, and the driver does not know it yet.
        dying = process.start("tests.integration.spark_dying")
        assert dying.wait(300.0) == -9, dying.errors
        last = process.start()
        wait_for(last, 1)
    last.stop()
    assert last.wait(300.0) == 0, last.errors
    assert process.wait_until_gone() == [], "no process is left"
    native = native_digests(process.stream, tmp_path / "native")
    with closing(keyspace.open()) as store:
        assert digests_of(store) == native
        audit = store.audit()
    assert (audit.chunks, audit.gap_chunks, audit.duplicate_chunks, audit.quarantined) == (
        player.frames,
        0,
        0,
        0,
    )


def test_a_role_interrupted_with_its_parent_while_spark_starts_stops_and_leaves_nothing(
    process: Process,
):
    """Like Ctrl-C in a terminal, which reaches all processes; the parent drains its roles."""
    child = process.start()
    deadline_s = time.monotonic() + 120.0
    while process.jvm() is None and time.monotonic() < deadline_s:
        os.kill(child.pid, signal.SIGINT)
        time.sleep(0.05)
    for _ in range(40):
        os.kill(child.pid, signal.SIGINT)
        time.sleep(0.05)
    child.stop()
    assert child.wait(120.0) in (0, FAILED), child.errors
    assert "Traceback" not in child.errors
    assert process.wait_until_gone() == [], "no process is left"


@contextmanager
def started(process: Process, command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A command in its own session, as a terminal starts it."""
    environment = {**os.environ, MARK: process.mark}
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        process.kill_all()
        child.communicate()


def asked_to_stop(
    command: subprocess.Popen[str], number: int, *, within_s: float
) -> tuple[str, str]:
    """The output of a command whose process group gets a stop signal, as from a terminal."""
    os.killpg(command.pid, number)
    return command.communicate(timeout=within_s)


def command_for(
    process: Process, keyspace: Keyspace, *more: str, master: str = "local[1]"
) -> list[str]:
    return [
        sys.executable,
        "-m",
        "understudy.cli.main",
        "ingest",
        "--engine",
        "spark",
        "--store",
        keyspace.url,
        "--master",
        master,
        "--data",
        str(process.data.root),
        "--json",
        *more,
    ]


def test_the_command_stores_the_stream_with_minimal_output(process: Process, keyspace: Keyspace):
    append(process.stream, some_frames(np.random.default_rng(5)))
    command = command_for(process, keyspace, "--until-empty")
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env=dict(os.environ)
    )
    assert (done.returncode, done.stderr) == (0, "")
    fields = json.loads(done.stdout)
    assert fields["fates"] == {"new": 20}
    assert fields["batch_rows"] == 20
    assert 0 < fields["batch_s"] < 300


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_drains_and_leaves_nothing_running(
    process: Process, keyspace: Keyspace, number: int
):
    rng = np.random.default_rng(8)
    append(process.stream, some_frames(rng))
    with started(process, command_for(process, keyspace)) as command:
        with closing(keyspace.open()) as store:
            wait_until(lambda: store.audit().chunks == 20)
        append(process.stream, some_frames(rng))
        out, errors = asked_to_stop(command, number, within_s=30.0)
    assert command.returncode == 0, errors
    assert json.loads(out)["fates"] == {"new": 40}
    assert errors.startswith("following ")
    assert "{" not in errors, "no warning"
    assert "Traceback" not in errors
    assert left_of(process.mark, timeout_s=5.0) == []


@pytest.mark.parametrize(("number", "after_s"), [(signal.SIGINT, 0.5), (signal.SIGTERM, 3.0)])
def test_a_command_stopped_while_spark_starts_exits_normally(
    process: Process, keyspace: Keyspace, number: int, after_s: float
):
    append(process.stream, some_frames(np.random.default_rng(9)))
    with started(process, command_for(process, keyspace)) as command:
        assert command.stderr is not None
        assert command.stderr.readline().startswith("following ")
        time.sleep(after_s)
        _, errors = asked_to_stop(command, number, within_s=30.0)
    assert command.returncode == 0, errors
    assert "Traceback" not in errors
    assert left_of(process.mark, timeout_s=5.0) == []


def test_a_second_stop_ends_the_command_immediately_and_leaves_nothing_running(
    process: Process, keyspace: Keyspace
):
    append(process.stream, some_frames(np.random.default_rng(11)))
    with started(process, command_for(process, keyspace)) as command:
        with closing(keyspace.open()) as store:
            wait_until(lambda: store.audit().chunks == 20)
        os.killpg(command.pid, signal.SIGINT)
        time.sleep(0.2)  # two signals at the same moment are one
        _, errors = asked_to_stop(command, signal.SIGINT, within_s=3.0)
        assert left_of(process.mark) == []
    assert command.returncode == 130, errors
    assert (
        errors.splitlines()[-1]
        == "interrupted; steps that are not stored yet stay in the stream until the next start"
    )


def test_spark_submit_runs_the_same_job(process: Process, keyspace: Keyspace):
    append(process.stream, some_frames(np.random.default_rng(6)))
    command = [
        str(Path(sys.executable).with_name("spark-submit")),
        "--master",
        "local[1]",
        "scripts/submit_ingest.py",
        "--store",
        keyspace.url,
        "--data",
        str(process.data.root),
        "--until-empty",
        "--json",
    ]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["fates"] == {"new": 20}


@pytest.mark.parametrize(
    ("master", "said"),
    [
        ("here", "master is 'here', which Spark does not support"),
        ("local[x]", "master is 'local[x]', which Spark does not support"),
        (
            "spark://127.0.0.1:9",
            (
                "the stream is in the data folder (stream.url), "
                "which workers of spark://127.0.0.1:9 cannot reach"
            ),
        ),
    ],
)
def test_an_invalid_master_is_reported_in_one_line(
    process: Process, keyspace: Keyspace, master: str, said: str
):
    command = command_for(process, keyspace, "--until-empty", master=master)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env=dict(os.environ)
    )
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert said in line


def test_speculation_is_rejected_wherever_it_is_set(
    process: Process, keyspace: Keyspace, tmp_path: Path
):
    (tmp_path / "spark-defaults.conf").write_text("spark.speculation true\n")
    command = command_for(process, keyspace, "--until-empty")
    environment = {**os.environ, MARK: process.mark, "SPARK_CONF_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 2
    assert "spark.speculation is true" in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert left_of(process.mark, timeout_s=5.0) == []


def figures(url: str, key: str) -> str:
    asked = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(asked, timeout=10.0) as answer:
        return str(answer.read().decode())


def test_progress_is_among_the_metrics_of_the_gateway(process: Process, keyspace: Keyspace):
    deployment_key(process.data.root)
    append(process.stream, some_frames(np.random.default_rng(10)))
    config = Config(
        data=str(process.data.root),
        roles=("gateway", "ingest"),
        gateway=GatewaySection(port=0),
        ingest=IngestSection(engine="spark", master="local[1]"),
        store=StoreSection(url=keyspace.url),
    )
    with Platform(config, on_state_change=lambda *_: None) as platform:
        stop = Event()
        thread = Thread(target=platform.supervisor.run, args=(stop,))
        thread.start()
        try:
            wait_until(lambda: platform.supervisor.is_ready)
            assert platform.url is not None
            assert platform.keys is not None
            url = platform.url
            key = platform.keys.key
            wait_until(
                lambda: 'understudy_ingest_batch_rows{engine="spark"} 20.0' in figures(url, key)
            )
            told = figures(url, key)
        finally:
            stop.set()
            thread.join()
        assert platform.supervisor.stop()
    assert 'understudy_ingest_running{engine="spark"} 1.0' in told
    assert 'understudy_ingest_frames_total{engine="spark",fate="new"} 20.0' in told
    (took_s,) = re.findall(r'understudy_ingest_batch_seconds{engine="spark"} (.+)', told)
    assert 0 < float(took_s) < 300
