"""data export and data import against real servers, as a user types them."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.exchange.exports import file_of_steps, recorded, steps_in, to_parquet
from tests.integration.kafka import Topic
from tests.integration.keyspaces import Keyspace
from tests.integration.kinesis import KinesisHarness as Shards
from understudy.backends.data import DataFolder
from understudy.backends.deployment import open_deployment
from understudy.cli.root import run as run_command
from understudy.core.names import new_session
from understudy.dev.recipes import BUCKET
from understudy.dev.servers import aws_location
from understudy.testing.clock import ManualClock
from understudy.testing.samples import PLAYER, random_session
from understudy.testing.store_harness import SPEC, StoreHarness

COMMAND = [sys.executable, "-m", "understudy.cli.main"]
RECORD = {
    "episode": 0,
    "step": 0,
    "state": [0.1, 0.2, 0.3, 0.4],
    "action": 1,
    "reward": 1.0,
    "next_state": [0.1, 0.2, 0.3, 0.4],
    "done": False,
    "game_id": "CartPole-v0",
}
SEED_A = ["--format", "seed-a", "--repair-shift", "--consent", "granted"]


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def configured(folder: Path, **sections: str) -> DataFolder:
    """A data folder whose config names these addresses."""
    folder.mkdir()
    (folder / "understudy.toml").write_text(
        "".join(f'[{name}]\nurl = "{url}"\n' for name, url in sections.items())
    )
    return DataFolder(folder)


def file_of_records(folder: Path) -> tuple[Path, int]:
    rows = [
        {**RECORD, "episode": one, "step": at, "done": at == 9}
        for one in range(3)
        for at in range(10)
    ]
    (folder / "records.jsonl").write_text("".join(f"[{json.dumps(row)}]\n" for row in rows))
    return folder / "records.jsonl", 27


@contextmanager
def ingest(data: DataFolder, *flags: str) -> Iterator[None]:
    """Ingest with the flags and config, in its own process."""
    command = [*COMMAND, "ingest", "--data", str(data.root), *flags]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield
        finally:
            process.terminate()
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 0, errors[-2000:]


def test_a_forgotten_player_who_returns_is_exported(
    keyspace: Keyspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(7)
    clock = ManualClock()
    harness = StoreHarness(keyspace.open(clock), clock, lambda one: one)
    harness.put(*random_session(SPEC, rng, n_chunks=3))
    harness.store.forget(PLAYER)
    clock.advance(10.0)
    fresh = random_session(SPEC, rng, session=new_session(clock.now(), rng.bytes(10)), n_chunks=4)
    harness.put(*fresh)
    harness.store.quarantine([(fresh[0].meta.session, 2)], reason="guard")
    harness.store.close()
    data = configured(tmp_path / "D", store=keyspace.url)
    open_deployment(data).registry.register(SPEC)
    out = tmp_path / "out.parquet"
    assert (
        run_command(
            ["data", "export", str(out), "--data", str(data.root), "--format", "parquet", "--json"]
        )
        == 0
    )
    wanted = [fresh[0], fresh[1], fresh[3]]
    assert told(capsys)["steps"] == sum(chunk.meta.n_steps for chunk in wanted)
    to_parquet(recorded(tmp_path / "same", SPEC, wanted), tmp_path / "same.parquet")
    assert steps_in(out) == steps_in(tmp_path / "same.parquet")


def test_files_are_imported_through_kafka_to_cassandra_each_step_once(
    keyspace: Keyspace, kafka_server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topic = Topic(kafka_server)
    data = configured(tmp_path / "D", stream=topic.location().url, store=keyspace.url)
    path, n_steps = file_of_steps(tmp_path, SPEC)
    records, n_records = file_of_records(tmp_path)
    bring = ["data", "import", str(path), "--data", str(data.root), "--format", "parquet", "--json"]
    bring_records = ["data", "import", str(records), "--data", str(data.root), *SEED_A, "--json"]
    # Nobody stores: it says what to start, and may be given again.
    for _ in range(2):
        assert run_command([*bring, "--wait", "1"]) == 1
        found = told(capsys)
        assert (found["stored_steps"], found["waiting_steps"], found["refused_steps"]) == (
            0,
            n_steps,
            0,
        )
        assert f"understudy ingest --data {data.root}" in found["next"]
    with ingest(data):
        assert run_command(bring) == 0
        found = told(capsys)
        assert (found["stored_steps"] + found["there_steps"], found["waiting_steps"]) == (
            n_steps,
            0,
        )
        assert run_command(bring_records) == 0
        found = told(capsys)
        assert (found["steps"], found["stored_steps"], found["waiting_steps"]) == (
            n_records,
            n_records,
            0,
        )
        for again, steps in ((bring, n_steps), (bring_records, n_records)):
            assert run_command(again) == 0
            assert (told(capsys)["there_steps"]) == steps
    assert run_command(["data", "verify", "--data", str(data.root), "--json"]) == 0
    found = told(capsys)
    assert (found["steps"], found["sessions"], found["lost_steps"]) == (n_steps + n_records, 6, 0)
    assert (found["duplicate_steps"], found["gap_steps"], found["quarantined_chunks"]) == (0, 0, 0)
    out = tmp_path / "b.parquet"
    assert (
        run_command(
            [
                "data",
                "export",
                str(out),
                "--data",
                str(data.root),
                "--format",
                "parquet",
                "--game",
                SPEC.game,
            ]
        )
        == 0
    )
    assert steps_in(out) == steps_in(path)
    assert not (data.root / "stream").exists(), "nothing went where nobody reads"
    assert not (data.root / "import.json").exists()
    topic.delete()


def test_an_import_killed_with_9_ends_with_each_step_once(
    keyspace: Keyspace, kafka_server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topic = Topic(kafka_server)
    rng = np.random.default_rng(1)
    data = configured(tmp_path / "D", stream=topic.location().url, store=keyspace.url)
    path, n_steps = file_of_steps(tmp_path, SPEC, n_sessions=40, n_chunks=20)
    bring = ["data", "import", str(path), "--data", str(data.root), "--format", "parquet", "--json"]
    kills = 0
    for turn in range(3):
        with subprocess.Popen(
            [*COMMAND, *bring, "--wait", "2"], stdout=subprocess.DEVNULL
        ) as process:
            before = ledger_lines(data)
            deadline_s = time.monotonic() + 60
            while (
                process.poll() is None
                and ledger_lines(data) == before
                and time.monotonic() < deadline_s
            ):
                time.sleep(0.005)
            time.sleep(float(rng.uniform(0.0, 0.05)))
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
        if turn == 1:
            assert run_command(["ingest", "--until-empty", "--data", str(data.root), "--json"]) == 0
    assert kills > 0
    with ingest(data):
        assert run_command(bring) == 0
    capsys.readouterr()
    assert run_command(["data", "verify", "--data", str(data.root), "--json"]) == 0
    found = told(capsys)
    assert (found["steps"], found["sessions"]) == (n_steps, 40)
    assert (found["lost_steps"], found["duplicate_steps"], found["gap_steps"]) == (0, 0, 0)
    topic.delete()


def ledger_lines(data: DataFolder) -> int:
    return sum(path.read_bytes().count(b"\n") for path in data.ledger.glob("*.jsonl"))


def test_records_are_imported_through_kinesis_to_a_local_and_a_remote_store(
    keyspace: Keyspace, kinesalite_server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = Shards(kinesalite_server)
    path, n_steps = file_of_records(tmp_path)
    here = configured(tmp_path / "here", stream=shards.location().url)
    bring = ["data", "import", str(path), *SEED_A, "--json", "--data"]
    for stored in (n_steps, 0):
        assert run_command([*bring, str(here.root)]) == 0
        found = told(capsys)
        assert (found["steps"], found["stored_steps"], found["there_steps"]) == (
            n_steps,
            stored,
            n_steps - stored,
        )
    assert not any(here.stream.glob("**/*.log")), "nothing went where nobody reads"
    shards = Shards(kinesalite_server)
    there = DataFolder(tmp_path / "there")
    addresses = ["--stream", shards.location().url, "--store", keyspace.url]
    with ingest(there, *addresses):
        assert run_command([*bring, str(there.root), *addresses]) == 0
    assert told(capsys)["stored_steps"] == n_steps


def test_games_are_registered_in_the_configured_models_location(
    s3_server: Any, kinesalite_server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = aws_location(s3_server, "s3", BUCKET, f"imported-{secrets.token_hex(4)}").url
    shards = Shards(kinesalite_server)
    data = configured(tmp_path / "D", stream=shards.location().url, models=models)
    path, n_steps = file_of_steps(tmp_path, SPEC)
    assert (
        run_command(
            ["data", "import", str(path), "--data", str(data.root), "--format", "parquet", "--json"]
        )
        == 0
    )
    found = told(capsys)
    assert (found["stored_steps"], found["refused_steps"], found["waiting_steps"]) == (
        n_steps,
        0,
        0,
    )
    assert not data.games.exists()
    assert open_deployment(data, models=models).registry.specs(SPEC.game) == [SPEC]
    # The records' game is known by now, and read from there.
    records, _ = file_of_records(tmp_path)
    bring = ["data", "import", str(records), *SEED_A, "--json", "--data", str(data.root)]
    assert run_command(bring) == 0
    assert told(capsys)["spec_is_from"] == "gymnasium"
    assert run_command(bring) == 0
    assert told(capsys)["spec_is_from"] == "registered"
