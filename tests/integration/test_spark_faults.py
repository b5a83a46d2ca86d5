"""A Spark job with differing clocks and an unreachable store: it ends in time or reports why."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from tests.integration.hanging import hanging
from tests.integration.kafka import WAIT_TIMEOUT_S, Skewed, Topic
from tests.integration.keyspaces import Keyspace
from tests.integration.spark import Job, Process, append, some_frames, wait_for, wait_until
from understudy.backends.data import DataFolder
from understudy.ingest.service import IngestConfig
from understudy.ports import Stored
from understudy.streams.kafka import open_kafka

DRAIN_S = 90.0


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
def test_draining_ends_even_if_players_never_pause_and_clocks_differ(
    job: Job, kafka_server: Any, ahead_s: float
):
    topic = Topic(kafka_server)
    clock = Skewed(ahead_s)
    stop = Event()
    taken = Event()
    job.url = topic.location().url
    before = some_frames(np.random.default_rng(80), n_sessions=12, now_s=clock.now())

    with open_kafka(topic.location(), clock=clock) as gateway, topic.open() as reader:
        append(gateway, before)

        def play() -> None:
            rng = np.random.default_rng(81)
            while not stop.wait(0.02):
                append(gateway, some_frames(rng, n_sessions=1, n_chunks=1, now_s=clock.now()))
                taken.set()

        ingest = job.ingest(
            reader, config=IngestConfig(max_read_bytes=20_000), max_batch_bytes=60_000
        )
        with ThreadPoolExecutor(2) as pool:
            playing = pool.submit(play)
            assert taken.wait(WAIT_TIMEOUT_S)
            draining = pool.submit(ingest.drain)
            try:
                draining.result(DRAIN_S)
            finally:
                stop.set()
                playing.result(WAIT_TIMEOUT_S)
        items = job.store.tail(None, max_items=10_000, wait_s=0.0).items
        stored = {
            (item.frame.session, item.frame.chunk_no) for item in items if isinstance(item, Stored)
        }
        assert {(frame.session, frame.chunk_no) for frame in before} <= stored
        # What came meanwhile is left to the next, which finds nothing that was stored before.
        again = job.drain(reader)
    assert again.stats.fates.keys() == {"new"}
    audit = job.store.audit()
    assert (audit.gap_chunks, audit.duplicate_chunks) == (0, 0)


def test_an_unreachable_store_is_in_the_report_of_the_role(
    with_spark: None, keyspace: Keyspace, cassandra_server: Any, tmp_path: Path
):
    process = Process(keyspace, DataFolder(tmp_path / "D"))
    rng = np.random.default_rng(85)
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
