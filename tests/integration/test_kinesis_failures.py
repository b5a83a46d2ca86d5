"""Failures of a Kinesis stream are reported in one line, retried where useful, and lose nothing."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.ingest.specs import KnownSpecs
from tests.integration.kinesis import WAIT_TIMEOUT_S, KinesisHarness, harness
from tests.integration.test_kinesis_faults import SPEC, sessions, steps_of
from tests.servers.fault_proxy import FaultProxy
from understudy.core.errors import ConfigError, Unreachable
from understudy.core.location import parse_location
from understudy.ingest.service import IngestService
from understudy.platform.ingest import repeat
from understudy.stores.local import LocalStore
from understudy.streams.kinesis import create_kinesis, open_kinesis
from understudy.testing.streams import read_all, sample_frames


def test_a_missing_stream_is_reported_with_the_command_that_creates_it(kinesalite_server):
    with harness(kinesalite_server) as table:
        location = table.location()
    missing = parse_location(
        f"kinesis://never-made?region=us-east-1&endpoint={kinesalite_server.url}&credentials={location.text('credentials')}"
    )
    with pytest.raises(
        ConfigError, match=r"'never-made' at http.* ResourceNotFoundException.*; create it with"
    ):
        open_kinesis(missing)


def test_a_development_stream_is_created_once_and_usable_immediately(kinesis_server):
    with harness(kinesis_server, shards=1) as table:
        assert create_kinesis(table.location()) == create_kinesis(table.location(), shards=1) == 1
        with pytest.raises(
            ConfigError,
            match=r"already exists with 1 open shards, but 3 were requested; omit the number",
        ):
            create_kinesis(table.location(), shards=3)
        assert len(table.open_shards()) == 1
        table.name += "-other"
        assert create_kinesis(table.location(), shards=3) == 3
        stream = table.open()
        assert len(stream.partitions()) == 3
        assert stream.append(sample_frames(1))[0].accepted
        stream.close()
        table.client.delete_stream(StreamName=table.name)
        table.name = table.name.removesuffix("-other")


def test_a_server_that_is_down_at_the_start_is_reported_quickly(kinesalite_server, tmp_path):
    with harness(kinesalite_server) as table, FaultProxy(kinesalite_server.url) as proxy:
        gone = proxy.url
    begun = time.monotonic()
    with pytest.raises(Unreachable, match=r"Unreachable: .*server runs, or correct endpoint="):
        open_kinesis(table.location(url=gone, retry_s=1.0))
    assert time.monotonic() - begun < 20.0


def test_wrong_credentials_are_reported_with_their_source_and_never_shown(
    kinesalite_server, tmp_path
):
    wrong = tmp_path / "credentials"
    wrong.write_text(
        "[default]\naws_access_key_id = AKIAWRONG\naws_secret_access_key = hidden-secret\n"
    )
    with (
        FaultProxy(kinesalite_server.url) as proxy,
        harness(kinesalite_server, url=proxy.url) as table,
    ):
        proxy.only_key = kinesalite_server.credentials["access_key_id"]
        table.open().close()
        given = str(kinesalite_server.credentials_file)
        location = table.location()
        refused = parse_location(
            f"kinesis://{table.name}?"
            + "&".join(f"{k}={v}" for k, v in location.options.items()).replace(given, str(wrong))
        )
        with pytest.raises(
            ConfigError,
            match=rf"UnrecognizedClientException.*check \[default\] of credentials file {wrong}",
        ) as told:
            open_kinesis(refused)
        assert "hidden-secret" not in str(told.value)


def test_keys_from_the_environment_and_a_shared_file_work(kinesalite_server, monkeypatch):
    with (
        FaultProxy(kinesalite_server.url) as proxy,
        harness(kinesalite_server, url=proxy.url) as table,
    ):
        proxy.only_key = kinesalite_server.credentials["access_key_id"]
        plain = parse_location(f"kinesis://{table.name}?region=us-east-1&endpoint={proxy.url}")
        with monkeypatch.context() as patch:
            patch.setenv("AWS_ACCESS_KEY_ID", kinesalite_server.credentials["access_key_id"])
            patch.setenv(
                "AWS_SECRET_ACCESS_KEY", kinesalite_server.credentials["secret_access_key"]
            )
            open_kinesis(plain).close()
        with monkeypatch.context() as patch:
            patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(kinesalite_server.credentials_file))
            open_kinesis(plain).close()


def test_an_append_without_a_server_acknowledges_nothing_and_names_a_retry_time(kinesalite_server):
    frames = sample_frames(4)
    with (
        FaultProxy(kinesalite_server.url) as proxy,
        harness(kinesalite_server, url=proxy.url) as table,
    ):
        stream = table.open(append_s=0.5)
        proxy.close()
        outcomes = stream.append(frames)
        assert not any(outcome.accepted for outcome in outcomes)
        assert all(
            outcome.retry_after_s > 0 and "Unreachable: " in (outcome.error or "")
            for outcome in outcomes
        )
        stream.close()
        back = table.open(url=kinesalite_server.url)
        assert all(outcome.accepted for outcome in back.append(frames))
        assert sum(map(len, read_all(back).values())) == 4
        back.close()


def test_a_server_restarted_mid_write_loses_nothing_acknowledged(kinesalite_server, tmp_path):
    lots = sessions(8, n_chunks=30)
    with harness(kinesalite_server) as table:
        told = _play_through(table, lots, folder=tmp_path)
    assert told == (sum(map(steps_of, lots)), 0, 0, 0)


def _play_through(table: KinesisHarness, lots, *, folder: Path) -> tuple[int, int, int, int]:
    writer = table.open(append_s=0.5)
    reader = table.open(retry_s=0.5)
    store = LocalStore(folder)
    service = IngestService(reader, store, KnownSpecs(SPEC), owner="test")
    stop = threading.Event()
    acked = threading.Semaphore(0)
    refused = threading.Event()

    def play(mine) -> None:
        for frame in (frame for frames in mine for frame in frames):
            deadline = time.monotonic() + 3 * WAIT_TIMEOUT_S
            while not writer.append([frame])[0].accepted:
                refused.set()
                assert time.monotonic() < deadline, "a frame is never taken"
            acked.release()

    with ThreadPoolExecutor(3) as pool:
        ingesting = pool.submit(repeat, service.step, stop)
        playing = [pool.submit(play, lots[number::2]) for number in range(2)]
        for _ in range(60):
            assert acked.acquire(timeout=WAIT_TIMEOUT_S)
        table.server.kill()
        assert refused.wait(WAIT_TIMEOUT_S), "nobody noticed that the server was away"
        table.server.restart()
        for one in playing:
            one.result()
        stop.set()
        ingesting.result()
    service.drain()
    audit = store.audit()
    store.close()
    writer.close()
    reader.close()
    return audit.steps, audit.gap_chunks, audit.duplicate_chunks, audit.quarantined


def test_only_a_kpl_record_is_rejected(kinesalite_server, tmp_path):
    (frames,) = sessions(1, n_chunks=4)
    with harness(kinesalite_server, shards=1) as table:
        stream = table.open()
        stream.append(frames[:2])
        aggregated = b"\xf3\x89\x9a\xc2" + bytes(range(200))
        table.client.put_record(StreamName=table.name, PartitionKey="a", Data=aggregated)
        stream.append(frames[2:])
        store = LocalStore(tmp_path)
        service = IngestService(stream, store, KnownSpecs(SPEC), owner="test")
        service.drain()
        assert (store.audit().steps, store.audit().quarantined) == (steps_of(frames), 1)
        assert [(one.reason, one.raw) for one in store.quarantined()] == [("bad_magic", aggregated)]
        stream.close()
        store.close()
