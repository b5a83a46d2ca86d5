"""A Spark job with clocks that differ, a store that is away, errors in between: it ends in time, and says why not."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any, NoReturn

import numpy as np
import pytest
from structlog.testing import capture_logs

from tests.backends.hanging import hanging
from tests.backends.kafka import PATIENCE_S, Skewed, Topic
from tests.backends.keyspaces import Keyspace
from tests.backends.spark import (
    Away,
    Job,
    Process,
    append,
    digests_of,
    following,
    some_frames,
    wait_for,
    wait_until,
)
from understudy.app.data import DataFolder
from understudy.core.errors import StorageFailed
from understudy.core.ports import Stored
from understudy.streams.file import FileStream
from understudy.streams.kafka import open_kafka

pytestmark = pytest.mark.timeout(600)
DRAIN_S = 90.0


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
def test_draining_stores_what_was_there_and_ends_although_players_never_pause_and_clocks_differ(
    job: Job, kafka_server: Any, ahead_s: float
):
    topic, clock, stop, taken = Topic(kafka_server), Skewed(ahead_s), Event(), Event()
    job.url = topic.location().url
    before = some_frames(np.random.default_rng(80), n_sessions=12, now_s=clock.now())

    with open_kafka(topic.location(), clock=clock) as gateway, topic.open() as reader:
        append(gateway, before)

        def play() -> None:
            rng = np.random.default_rng(81)
            while not stop.wait(0.02):
                append(gateway, some_frames(rng, n_sessions=1, n_chunks=1, now_s=clock.now()))
                taken.set()

        ingest = job.ingest(reader, max_batch_bytes=60_000)
        with ThreadPoolExecutor(2) as pool:
            playing = pool.submit(play)
            assert taken.wait(PATIENCE_S)
            draining = pool.submit(ingest.drain)
            try:
                draining.result(DRAIN_S)
            finally:
                stop.set()
                playing.result(PATIENCE_S)
                if not draining.done():
                    ingest._give_up()
        items = job.store.tail(None, max_items=10_000, wait_s=0.0).items
        stored = {(item.frame.session, item.frame.chunk_no) for item in items if isinstance(item, Stored)}
        assert {(frame.session, frame.chunk_no) for frame in before} <= stored
        # What came meanwhile is left to the next, which finds nothing that was stored before.
        again = job.drain(reader)
    assert again.stats.fates.keys() == {"new"}
    audit = job.store.audit()
    assert (audit.gap_chunks, audit.duplicate_chunks) == (0, 0)


@pytest.mark.parametrize("takes_claims", [True, False])
def test_why_a_job_waits_is_told_until_it_goes_on(job: Job, takes_claims: bool):
    stream, away = FileStream(job.data.stream), Away(job.store, takes_claims=takes_claims)
    append(stream, some_frames(np.random.default_rng(82)))
    ingest = job.ingest(stream, store=away)
    with following(ingest, ends_in_s=30.0):
        wait_until(lambda: ingest.stats.trouble == "it does not answer")
        away.is_back = True
        wait_until(lambda: ingest.stats.frames == 20 and ingest.stats.trouble == "")
    stream.close()


def test_why_a_job_was_started_again_is_told_until_it_reads_again(job: Job):
    stream = FileStream(job.data.stream)
    append(stream, some_frames(np.random.default_rng(83)))
    ingest = job.ingest(stream, opener="tests.backends.spark_throttled:open_from_text")
    with following(ingest, ends_in_s=30.0):
        wait_until(lambda: ingest.stats.trouble == "too many requests")
        wait_until(lambda: ingest.stats.frames == 20 and ingest.stats.trouble == "")
    stream.close()


def test_an_error_beside_a_batch_that_waits_ends_the_job(job: Job):
    stream, away = FileStream(job.data.stream), Away(job.store, takes_claims=True)
    append(stream, some_frames(np.random.default_rng(84)))

    def each() -> None:
        if away.asked.is_set():
            raise StorageFailed("the disk refuses")

    ingest, stop = job.ingest(stream, store=away), Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ingest.run, stop, each)
        try:
            with pytest.raises(StorageFailed, match="the disk refuses"):
                running.result(60.0)
        finally:
            stop.set()
    assert digests_of(job.store) == {}
    assert job.drain(stream).stats.fates == {"new": 20}
    stream.close()


class Broken(Away):
    """A store on a disk that refuses."""

    def _refuse(self) -> NoReturn:
        raise StorageFailed("the disk refuses")


def test_a_store_that_refuses_while_the_job_is_asked_to_stop_is_an_error(job: Job):
    stream, stop = FileStream(job.data.stream), Event()
    append(stream, some_frames(np.random.default_rng(86)))
    stop.set()
    with capture_logs() as logs, pytest.raises(StorageFailed, match="the disk refuses"):
        job.ingest(stream, store=Broken(job.store, takes_claims=True)).run(stop)
    assert logs == []
    assert job.drain(stream).stats.fates == {"new": 20}
    stream.close()


def test_a_store_that_is_away_is_in_the_report_of_the_role(
    with_spark: None, keyspace: Keyspace, cassandra_server: Any, tmp_path: Path
):
    process, rng = Process(keyspace, DataFolder(tmp_path / "D")), np.random.default_rng(85)
    append(process.stream, some_frames(rng))
    child = process.start()
    try:
        wait_for(child, 1)
        stored = child.latest["stored"]
        assert child.latest["storage_error"] == ""
        with hanging(cassandra_server):
            append(process.stream, some_frames(rng))
            wait_until(lambda: bool(child.latest["storage_error"]))
        wait_until(lambda: child.latest["stored"] > stored and child.latest["storage_error"] == "")
        child.stop()
        assert child.wait(120.0) == 0, child.errors
    finally:
        process.kill_all()
        process.stream.close()
    with closing(keyspace.open()) as store:
        audit = store.audit()
    assert (audit.chunks, audit.gap_chunks, audit.duplicate_chunks) == (40, 0, 0)
