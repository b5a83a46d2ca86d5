"""Spark ingest into a real Cassandra: the same as our own service from the same stream, whatever happens to the job."""

import shutil
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from tests.backends.kafka import Topic
from tests.backends.kinesis import Desk
from tests.backends.spark import Away, Job, append, digests_of, following, native_digests, some_frames, wait_until
from understudy.app.data import DataFolder
from understudy.core.errors import ConfigError, StorageFailed, Unreachable
from understudy.core.frame import Frame
from understudy.core.ports import Receipt, WriteBatch
from understudy.streams.file import FileStream
from understudy.testing.desk import SPEC
from understudy.testing.samples import OTHER_PLAYER, random_session, stamped

pytestmark = pytest.mark.timeout(600)


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
    with pytest.raises(ConfigError, match=r"is stored up to None; give another --checkpoint, or remove"):
        job.drain(stream)
    assert digests_of(job.store) == {}
    job.lose_checkpoint()
    assert job.drain(stream).stats.fates == {"new": 40}


@pytest.mark.parametrize("more", [False, True], ids=["nothing more came", "more came to other partitions"])
def test_a_checkpoint_is_refused_although_nothing_comes_behind_it(job: Job, rng: np.random.Generator, more: bool):
    stream = file_stream(job)
    append(stream, some_frames(rng))
    job.drain(stream)
    stream.close()
    job.store.close()
    job.keyspace.empty()
    job.store = job.keyspace.open()
    stream = file_stream(job)  # in which it has another partition
    append(stream, some_frames(rng) if more else [])
    with pytest.raises(ConfigError, match=r"is stored up to None; give another --checkpoint, or remove this one"):
        job.drain(stream)
    with pytest.raises(ConfigError, match=r"is stored up to None; give another --checkpoint, or remove this one"):
        job.ingest(stream).run(Event())
    job.lose_checkpoint()
    job.drain(stream)
    assert job.store.audit().chunks == (40 if more else 20)


@pytest.mark.parametrize("damaged", ["offsets/0", "metadata"])
def test_a_damaged_checkpoint_is_told_with_the_next_step(job: Job, rng: np.random.Generator, damaged: str):
    stream = file_stream(job)
    append(stream, some_frames(rng))
    job.drain(stream)
    file = job.checkpoint / damaged
    file.write_bytes(b"v1 {")
    file.with_name(f".{file.name}.crc").unlink()
    with pytest.raises(StorageFailed, match=rf"if checkpoint {job.checkpoint} is damaged, give another --checkpoint"):
        job.drain(stream)
    job.lose_checkpoint()
    append(stream, some_frames(rng))
    assert job.drain(stream).stats.fates == {"new": 20}


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
    """A store of which one write fails before it was made, and one after."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.claim, self.writes = inner, inner.claim, 0

    def write(self, batch: WriteBatch) -> Receipt:
        self.writes += 1
        if self.writes == 1:
            raise Unreachable("it does not answer")
        receipt: Receipt = self._inner.write(batch)
        if self.writes == 3:
            raise Unreachable("it answered too late")
        return receipt


def test_a_store_that_is_away_for_a_while_makes_the_job_wait(job: Job, rng: np.random.Generator):
    stream, shaky = file_stream(job), Shaky(job.store)
    append(stream, some_frames(rng))
    ingest = job.ingest(stream, store=shaky, max_batch_bytes=20_000)
    with following(ingest, ends_in_s=30.0):
        wait_until(lambda: ingest.stats.frames >= 20)
    assert shaky.writes > 3, "it answered too late once"
    assert ingest.stats.fates["duplicate"] > 0, "what it took then came again"
    assert ingest.stats.fates["new"] + ingest.stats.fates["duplicate"] == 20
    assert ingest.stats.trouble == ""
    audit = job.store.audit()
    assert (audit.chunks, audit.gap_chunks, audit.duplicate_chunks) == (20, 0, 0)


@pytest.mark.parametrize("takes_claims", [True, False])
def test_a_job_that_waits_for_its_store_ends_when_it_is_asked_to_and_leaves_all_to_the_next(
    job: Job, rng: np.random.Generator, takes_claims: bool
):
    stream, away = file_stream(job), Away(job.store, takes_claims=takes_claims)
    append(stream, some_frames(rng))
    with following(job.ingest(stream, store=away), ends_in_s=10.0):
        assert away.asked.wait(120.0)
        time.sleep(2.0)  # it goes on asking meanwhile
    assert digests_of(job.store) == {}
    assert job.drain(stream).stats.fates == {"new": 20}


def test_a_stream_that_is_throttled_for_a_while_makes_the_job_wait(job: Job, rng: np.random.Generator):
    stream = file_stream(job)
    append(stream, some_frames(rng))
    ingest = job.ingest(stream, opener="tests.backends.spark_throttled:open_from_text")
    with following(ingest, ends_in_s=30.0):
        wait_until(lambda: ingest.stats.frames >= 20)
    assert (job.data.root / "refusals").read_text() == "...", "it was refused as often as it was to be"
    assert ingest.stats.fates == {"new": 20}


def test_a_job_with_more_to_store_than_it_has_time_for_ends_and_leaves_the_rest(job: Job, rng: np.random.Generator):
    stream, stop = file_stream(job), Event()
    for _ in range(20):
        append(stream, some_frames(rng))
    ingest = job.ingest(stream, max_batch_bytes=20_000)
    stop.set()
    began_s = time.monotonic()
    ingest.run(stop, drain_s=2.0)
    assert time.monotonic() - began_s < 15.0
    assert ingest.stats.fates["new"] < 400
    job.drain(stream)
    audit = job.store.audit()
    assert (audit.chunks, audit.gap_chunks, audit.duplicate_chunks) == (400, 0, 0)


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
    job.url = topic.location().url
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
    job.url = desk.location().url
    rounds: Sequence[list[Frame]] = [some_frames(rng, n_sessions=2) for _ in range(3)]
    with closing(desk.open()) as stream:
        for index, frames in enumerate(rounds):
            if index:
                desk.split(desk.open_shards()[0])
            append(stream, frames)
            assert job.drain(stream).stats.fates == {"new": 10}
        assert digests_of(job.store) == native_digests(stream, tmp_path / "native")
    assert job.store.audit().gap_chunks == 0
