"""Spark ingest into a real Cassandra: the same as our own service from the same stream, whatever happens to the job."""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from tests.backends.kafka import Topic
from tests.backends.keyspaces import Keyspace
from tests.backends.kinesis import Desk
from tests.backends.spark import Job, append, digests_of, native_digests, some_frames, url_of
from understudy.app.data import DataFolder
from understudy.core.errors import ConfigError, Unreachable
from understudy.core.frame import Frame
from understudy.core.ports import Receipt, WriteBatch
from understudy.ingest.spark_session import Spark, open_spark, require_spark
from understudy.streams.file import FileStream
from understudy.testing.desk import SPEC
from understudy.testing.samples import OTHER_PLAYER, random_session, stamped

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spark]:
    """One session for all tests of this file: it takes long to start."""
    try:
        require_spark()
    except ConfigError as error:
        pytest.skip(str(error))
    with open_spark(tmp_path_factory.mktemp("spark"), master="local[2]") as spark:
        yield spark


@pytest.fixture(scope="module")
def keyspace(cassandra_server: Any) -> Iterator[Keyspace]:
    made = Keyspace(cassandra_server, cassandra_server.credentials_file, "spark")
    yield made
    made.close()


@pytest.fixture
def job(spark: Spark, keyspace: Keyspace, tmp_path: Path) -> Iterator[Job]:
    keyspace.empty()
    job = Job(spark, keyspace, DataFolder(tmp_path / "D"))
    yield job
    job.store.close()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(70)


def file_stream(job: Job) -> FileStream:
    return FileStream(job.data.stream)


def of_every_kind(rng: np.random.Generator) -> list[Frame]:
    """Frames of which some come twice, some are another player's, and some are of a game nobody knows."""
    good = some_frames(rng)
    stolen = good[-1].stamped(OTHER_PLAYER, int(time.time()))
    old = next(iter(stamped(random_session(SPEC, rng, n_chunks=1))))
    return [*good, *good[3:9], stolen, old]


def test_native_and_spark_ingest_make_the_same_of_one_stream(job: Job, rng: np.random.Generator, tmp_path: Path):
    for _ in range(3):  # each writer is a partition of its own
        with closing(file_stream(job)) as stream:
            append(stream, of_every_kind(rng))
    stream = file_stream(job)
    ingest = job.drain(stream, max_batch_bytes=20_000)
    native = native_digests(stream, tmp_path / "native")
    assert len(native) == 12
    assert digests_of(job.store) == native
    assert ingest.stats.fates == {"new": 60, "duplicate": 18, "refused": 3}
    assert ingest.stats.refusals == {"other_player": 3, "bad_session_time": 3}
    audit = job.store.audit()
    assert (audit.chunks, audit.gap_chunks, audit.duplicate_chunks, audit.quarantined) == (60, 0, 0, 6)


def test_a_finished_batch_that_was_not_noted_comes_again_as_duplicates_only(job: Job, rng: np.random.Generator):
    stream = file_stream(job)
    for _ in range(2):
        append(stream, some_frames(rng))
        assert job.drain(stream).stats.fates == {"new": 20}
    before = digests_of(job.store)
    job.forget_last_commit()
    append(stream, some_frames(rng))
    assert job.drain(stream).stats.fates == {"duplicate": 20, "new": 20}
    after = digests_of(job.store)
    assert {session: after[session] for session in before} == before
    assert job.store.audit().duplicate_chunks == 0


def test_a_first_batch_that_was_not_noted_begins_where_the_store_stands(job: Job, rng: np.random.Generator):
    stream = file_stream(job)
    append(stream, some_frames(rng))
    job.drain(stream)
    job.forget_last_commit()
    append(stream, some_frames(rng))
    assert job.drain(stream).stats.fates == {"new": 20}


def test_without_its_checkpoint_a_job_goes_on_where_the_store_stands(job: Job, rng: np.random.Generator):
    stream = file_stream(job)
    append(stream, some_frames(rng))
    job.drain(stream)
    job.lose_checkpoint()
    append(stream, some_frames(rng))
    assert job.drain(stream).stats.fates == {"new": 20}


def test_a_checkpoint_that_would_leave_something_out_is_refused(job: Job, rng: np.random.Generator):
    stream = file_stream(job)
    append(stream, some_frames(rng))
    job.drain(stream)
    job.store.close()
    job.keyspace.empty()
    job.store = job.keyspace.open()
    append(stream, some_frames(rng))
    with pytest.raises(ConfigError, match=r"which is stored up to None; remove the checkpoint"):
        job.drain(stream)
    assert digests_of(job.store) == {}
    job.lose_checkpoint()
    assert job.drain(stream).stats.fates == {"new": 40}


def test_a_checkpoint_of_another_stream_is_refused(job: Job, rng: np.random.Generator, tmp_path: Path):
    stream = file_stream(job)
    append(stream, some_frames(rng))
    job.drain(stream)
    other = Job(job.spark, job.keyspace, DataFolder(tmp_path / "E"))
    shutil.copytree(job.checkpoint, other.checkpoint)
    elsewhere = file_stream(other)
    append(elsewhere, some_frames(rng))
    with closing(other.store), pytest.raises(ConfigError, match=r"is of file:.*D/stream, not of file:.*E/stream"):
        other.drain(elsewhere)


class Shaky:
    """A store whose writes fail a few times, before or after they were made."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.claim, self.failures = inner, inner.claim, 0

    def write(self, batch: WriteBatch) -> Receipt:
        self.failures += 1
        if self.failures == 1:
            raise Unreachable("it does not answer")
        receipt: Receipt = self._inner.write(batch)
        if self.failures == 3:
            raise Unreachable("it answered too late")
        return receipt


def test_a_store_that_is_away_for_a_while_makes_the_job_wait(job: Job, rng: np.random.Generator):
    stream, stop = file_stream(job), Event()
    append(stream, some_frames(rng))
    with job.running(stream, store=Shaky(job.store), max_batch_bytes=40_000) as ingest:
        thread = Thread(target=ingest.run, args=(stop,))
        thread.start()
        deadline = time.monotonic() + 120
        while ingest.stats.frames < 20 and time.monotonic() < deadline:
            time.sleep(0.1)
        stop.set()
        thread.join(30.0)
        ingest.drain()
    assert ingest.stats.fates["new"] + ingest.stats.fates["duplicate"] == 20
    audit = job.store.audit()
    assert (audit.chunks, audit.gap_chunks, audit.duplicate_chunks) == (20, 0, 0)


class Lossy:
    """A store that says all was well and leaves the last frame of every batch out: what these tests must notice."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.claim = inner, inner.claim

    def write(self, batch: WriteBatch) -> Receipt:
        less = WriteBatch(batch.partition, batch.epoch, batch.position, batch.candidates[:-1])
        return Receipt([*self._inner.write(less).fates, "new"])


def test_control_a_job_that_loses_a_frame_is_found_out(job: Job, rng: np.random.Generator, tmp_path: Path):
    stream = file_stream(job)
    append(stream, some_frames(rng))
    job.drain(stream, store=Lossy(job.store))
    native = native_digests(stream, tmp_path / "native")
    assert sum(digests_of(job.store).get(session) != digest for session, digest in native.items()) == 1


def test_draining_ends_although_players_are_faster_than_the_job(job: Job, rng: np.random.Generator):
    stream, stop = file_stream(job), Event()
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


def test_a_kafka_topic_is_stored_like_by_our_own_service(
    job: Job, rng: np.random.Generator, kafka_server: Any, tmp_path: Path
):
    topic = Topic(kafka_server)
    job.url = url_of(topic.location())
    with closing(topic.open()) as stream:
        append(stream, some_frames(rng, n_sessions=8))
        assert job.drain(stream).stats.fates == {"new": 40}
        append(stream, some_frames(rng))
        assert job.drain(stream).stats.fates == {"new": 20}
        assert digests_of(job.store) == native_digests(stream, tmp_path / "native")


def test_a_kinesis_stream_that_is_resharded_is_stored_like_by_our_own_service(
    job: Job, rng: np.random.Generator, kinesis_server: Any, tmp_path: Path
):
    desk = Desk(kinesis_server, shards=1)
    job.url = url_of(desk.location())
    rounds: Sequence[list[Frame]] = [some_frames(rng, n_sessions=2) for _ in range(3)]
    with closing(desk.open()) as stream:
        for index, frames in enumerate(rounds):
            if index:
                desk.split(desk.open_shards()[0])
            append(stream, frames)
            assert job.drain(stream).stats.fates == {"new": 10}
        assert digests_of(job.store) == native_digests(stream, tmp_path / "native")
    assert job.store.audit().gap_chunks == 0
