"""Spark ingest to a real Cassandra stores the same as our own service, whatever tasks do."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from tests.integration.kafka import Topic
from tests.integration.keyspaces import OneSpec
from tests.integration.kinesis import KinesisHarness
from tests.integration.spark import (
    Job,
    append,
    digests_of,
    following,
    native_digests,
    some_frames,
    wait_until,
)
from understudy.core.clock import SystemClock
from understudy.core.errors import ClaimLost, ConfigError, StorageFailed
from understudy.experience.frame import Frame
from understudy.ingest.service import IngestConfig, PartitionIngest, Turn
from understudy.ports import FullStore, Receipt, WriteBatch
from understudy.streams.file import FileStream
from understudy.testing.samples import OTHER_PLAYER, random_session, stamped
from understudy.testing.store_harness import SPEC

SMALL = IngestConfig(max_read_bytes=20_000)
"""A commit is much less than what a stream of these tests holds."""


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(70)


def file_stream(job: Job) -> FileStream:
    return FileStream(job.data.stream)


def of_every_kind(rng: np.random.Generator) -> list[Frame]:
    """Frames with duplicates, frames of another player, and frames of an unknown game."""
    good = some_frames(rng)
    stolen = good[-1].stamped(OTHER_PLAYER, int(time.time()))
    old = next(iter(stamped(random_session(SPEC, rng, n_chunks=1))))
    return [*good, *good[3:9], stolen, old]


def test_native_and_spark_ingest_store_the_same_from_one_stream(
    job: Job, rng: np.random.Generator, tmp_path: Path
):
    for _ in range(3):  # each writer is a partition of its own
        with closing(file_stream(job)) as stream:
            append(stream, of_every_kind(rng))
    stream = file_stream(job)
    ingest = job.drain(stream, config=SMALL, max_batch_bytes=40_000)
    native = native_digests(stream, tmp_path / "native")
    assert len(native) == 12
    assert digests_of(job.store) == native
    assert ingest.stats.fates == {"new": 60, "duplicate": 18, "refused": 3}
    assert ingest.stats.refusals == {"other_player": 3, "bad_session_time": 3}
    audit = job.store.audit()
    assert (audit.chunks, audit.gap_chunks, audit.duplicate_chunks, audit.quarantined) == (
        60,
        0,
        0,
        6,
    )


def test_no_byte_of_a_frame_reaches_the_driver(job: Job, rng: np.random.Generator):
    """The driver's stream and store would raise if asked for a frame; task reports are counted."""
    frames: list[Frame] = []
    for _ in range(3):
        with closing(file_stream(job)) as stream:
            frames += (some := some_frames(rng, n_sessions=8))
            append(stream, some)
    ingest = job.drain(file_stream(job))
    assert ingest.stats.fates == {"new": len(frames)}
    told = [repr(report) for report in ingest.reports]
    bodies = [repr(frame.body[:64])[2:-1] for frame in frames]
    assert not any(body in text for body in bodies for text in told)
    assert sum(report.size_bytes for report in ingest.reports) == sum(
        frame.size_bytes for frame in frames
    )
    assert max(map(len, told)) < 2_000, "a few numbers, however much was stored"


def test_the_next_job_resumes_at_the_stores_position(job: Job, rng: np.random.Generator):
    stream = file_stream(job)
    for _ in range(3):
        append(stream, some_frames(rng))
        assert job.drain(stream).stats.fates == {"new": 20}
    assert job.drain(stream).stats.frames == 0
    assert job.store.audit().duplicate_chunks == 0


def test_a_task_whose_worker_dies_is_retried_under_its_own_claim(
    job: Job, rng: np.random.Generator
):
    stream = file_stream(job)
    append(stream, some_frames(rng))
    job.fault("dies")
    ingest = job.drain(stream)
    assert ingest.stats.fates == {"new": 20}
    first, second = (int(line.split()[1]) for line in job.notes("claims"))
    assert first < second
    audit = job.store.audit()
    assert (audit.chunks, audit.gap_chunks, audit.duplicate_chunks) == (20, 0, 0)


def test_a_running_attempt_is_fenced_by_a_later_one(job: Job, rng: np.random.Generator):
    """Two workers of one owner with separate stores; the first hangs before writing."""
    stream = file_stream(job)
    append(stream, some_frames(rng))
    (turn,) = [Turn(one.id) for one in stream.partitions()]
    hangs = Event()
    goes_on = Event()

    class Hanging:
        def __init__(self, inner: FullStore) -> None:
            self._inner = inner
            self.claim = inner.claim

        def write(self, batch: WriteBatch) -> Receipt:
            hangs.set()
            assert goes_on.wait(60.0)
            return self._inner.write(batch)

    with closing(job.keyspace.open()) as first, ThreadPoolExecutor(1) as pool:
        zombie: Any = Hanging(first)
        attempts = [
            PartitionIngest(
                stream, store, OneSpec(), owner="spark", config=IngestConfig(), clock=SystemClock()
            )
            for store in (zombie, job.store)
        ]
        late = pool.submit(attempts[0].advance, turn)
        assert hangs.wait(60.0)
        assert attempts[1].advance(turn).stats.fates == {"new": 20}
        goes_on.set()
        progress = late.result(60.0)
    assert (progress.claim, progress.stats.frames) == (None, 0)
    assert [event for event, _ in progress.events] == ["claim_lost"]
    audit = job.store.audit()
    assert (audit.chunks, audit.gap_chunks, audit.duplicate_chunks) == (20, 0, 0)


def test_a_task_that_always_fails_ends_the_job_with_its_reason(job: Job):
    stream = file_stream(job)
    append(stream, [])
    append(stream, some_frames(np.random.default_rng(1)))
    with pytest.raises(StorageFailed, match="a Spark task failed: AttributeError: "):
        job.drain(stream, config="no config")
    with pytest.raises(ConfigError, match="nowhere"):
        job.drain(stream, opener="understudy:nowhere")
    assert job.drain(stream).stats.fates == {"new": 20}


def test_a_partition_claimed_by_another_owner_fails_its_task_only(
    job: Job, rng: np.random.Generator
):
    with closing(file_stream(job)) as stream:
        append(stream, some_frames(rng))
    (taken,) = [one.id for one in stream.partitions()]
    rival = job.store.claim(taken, owner="rival", ttl_s=300.0)
    stream = file_stream(job)
    append(stream, some_frames(rng))
    ingest = job.ingest(stream)
    with following(ingest, ends_in_s=30.0):
        wait_until(lambda: ingest.stats.frames > 0)
        assert ingest.stats.frames == 20
        # The claim runs out, and the partition is taken; on a slow machine while the rival still
        # asks for it.
        with suppress(ClaimLost):
            job.store.claim(taken, owner="rival", ttl_s=0.5)
        wait_until(lambda: ingest.stats.frames == 40)
    assert ingest.stats.error == ""
    with pytest.raises(ClaimLost):
        job.store.write(WriteBatch(taken, rival.epoch, None))
    assert job.store.audit().chunks == 40


def test_a_job_waits_while_its_store_is_unreachable(job: Job, rng: np.random.Generator):
    stream = file_stream(job)
    append(stream, some_frames(rng))
    job.fault("shaky")
    ingest = job.ingest(stream, config=SMALL)
    with following(ingest, ends_in_s=30.0):
        wait_until(lambda: ingest.stats.error == "it answered too late")
        wait_until(lambda: ingest.stats.error == "" and job.store.audit().chunks == 20)
    audit = job.store.audit()
    assert (audit.chunks, audit.gap_chunks, audit.duplicate_chunks) == (20, 0, 0)


@pytest.mark.parametrize("fault", ["away", "no-claims"])
def test_a_job_waiting_for_its_store_stops_on_request_and_leaves_the_rest_to_the_next(
    job: Job, rng: np.random.Generator, fault: str
):
    stream = file_stream(job)
    append(stream, some_frames(rng))
    file = job.fault(fault)
    with following(job.ingest(stream), ends_in_s=10.0):
        wait_until(lambda: len(job.notes("asked")) >= 2)
    assert digests_of(job.store) == {}
    file.unlink()
    assert job.drain(stream).stats.fates == {"new": 20}


@pytest.mark.parametrize(
    ("fault", "trouble"),
    [
        ("away", "it does not answer"),
        ("no-claims", "it does not answer"),
        ("throttled", "too many"),
    ],
)
def test_the_reason_why_a_job_waits_is_reported_until_it_resumes(
    job: Job, rng: np.random.Generator, fault: str, trouble: str
):
    stream = file_stream(job)
    append(stream, some_frames(rng))
    file = job.fault(fault)
    ingest = job.ingest(stream)
    with following(ingest, ends_in_s=30.0):
        wait_until(lambda: trouble in ingest.stats.error)
        if fault != "throttled":  # which ends by itself
            file.unlink()
        wait_until(lambda: ingest.stats.frames == 20 and ingest.stats.error == "")
    assert ingest.stats.fates == {"new": 20}


def test_a_store_error_while_the_job_is_stopping_is_an_error(job: Job, rng: np.random.Generator):
    stream = file_stream(job)
    stop = Event()
    append(stream, some_frames(rng))
    file = job.fault("broken")
    stop.set()
    with pytest.raises(StorageFailed, match="the disk refuses"):
        job.ingest(stream).run(stop)
    file.unlink()
    assert job.drain(stream).stats.fates == {"new": 20}


def test_a_job_with_more_to_store_than_its_time_limit_ends_and_leaves_the_rest(
    job: Job, rng: np.random.Generator
):
    stream = file_stream(job)
    stop = Event()
    for _ in range(20):
        append(stream, some_frames(rng))
    ingest = job.ingest(stream, config=SMALL, max_batch_bytes=20_000)
    stop.set()
    began_s = time.monotonic()
    ingest.run(stop, drain_s=1.0)
    assert time.monotonic() - began_s < 15.0
    assert ingest.stats.fates["new"] < 400
    job.drain(stream)
    audit = job.store.audit()
    assert (audit.chunks, audit.gap_chunks, audit.duplicate_chunks) == (400, 0, 0)


def test_control_a_job_that_loses_a_frame_is_detected(
    job: Job, rng: np.random.Generator, tmp_path: Path
):
    stream = file_stream(job)
    append(stream, some_frames(rng))
    job.fault("lossy")
    job.drain(stream)
    native = native_digests(stream, tmp_path / "native")
    assert (
        sum(digests_of(job.store).get(session) != digest for session, digest in native.items()) == 1
    )


def test_draining_ends_even_if_players_are_faster_than_the_job(job: Job, rng: np.random.Generator):
    stream = file_stream(job)
    stop = Event()
    frames = some_frames(rng)
    append(stream, frames)

    def play() -> None:
        more = np.random.default_rng(71)
        while not stop.wait(0.05):
            append(stream, some_frames(more, n_sessions=1, n_chunks=1))

    player = Thread(target=play)
    player.start()
    try:
        job.drain(stream)
    finally:
        stop.set()
        player.join()
    assert {str(frame.session) for frame in frames} <= digests_of(job.store).keys()
    job.drain(stream)
    assert job.store.audit().duplicate_chunks == 0


def test_a_kafka_topic_is_stored_as_by_our_own_service(
    job: Job, rng: np.random.Generator, kafka_server: Any, tmp_path: Path
):
    topic = Topic(kafka_server)
    job.url = topic.location().url
    with closing(topic.open()) as stream:
        append(stream, some_frames(rng, n_sessions=8))
        assert job.drain(stream).stats.fates == {"new": 40}
        append(stream, some_frames(rng))
        assert job.drain(stream).stats.fates == {"new": 20}
        assert digests_of(job.store) == native_digests(stream, tmp_path / "native")


def test_a_resharded_kinesis_stream_is_stored_as_by_our_own_service(
    job: Job, rng: np.random.Generator, kinesis_server: Any, tmp_path: Path
):
    harness = KinesisHarness(kinesis_server, shards=1)
    job.url = harness.location().url
    rounds: Sequence[list[Frame]] = [some_frames(rng, n_sessions=2) for _ in range(3)]
    with closing(harness.open()) as stream:
        for index, frames in enumerate(rounds):
            if index:
                harness.split(harness.open_shards()[0])
            append(stream, frames)
            assert job.drain(stream).stats.fates == {"new": 10}
        assert digests_of(job.store) == native_digests(stream, tmp_path / "native")
    assert job.store.audit().gap_chunks == 0
