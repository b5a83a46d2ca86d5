"""The Kafka stream fulfils the Stream contract on a real broker, and rejects mixed-up sessions."""

import contextlib
import time
import unittest
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException, Producer

from tests.integration.kafka import WAIT_TIMEOUT_S, Topic
from understudy.core.errors import Closed, ConfigError, PositionGone, StorageFailed, Unreachable
from understudy.core.location import parse_location
from understudy.experience.frame import decode_frame
from understudy.ports import Position, Stream
from understudy.streams.kafka import create_kafka, open_kafka
from understudy.streams.kafka_client import kafka_config
from understudy.testing.streams import StreamContract, read_all, sample_frames


class TestKafka(StreamContract):
    partitions = 3
    server: Any
    topic: Topic

    @pytest.fixture(autouse=True)
    def on_a_server(self, kafka_server: Any) -> None:
        self.server = kafka_server

    def make(self) -> Stream:
        self.topic = Topic(self.server, partitions=self.partitions)
        return self.topic.open()

    def reopen(self, stream: Stream) -> Stream:
        return self.topic.open()

    def end(self, stream: Stream) -> Stream:
        raise unittest.SkipTest("partitions of Kafka do not end")

    def trim(self, stream: Stream, partition: str) -> Stream:
        records = read_all(stream)[partition]
        self.topic.trim(partition, records[-3].position)
        return stream


class TestKafkaOfOnePartition(TestKafka):
    partitions = 1


@pytest.fixture
def topic(kafka_server: Any) -> Topic:
    return Topic(kafka_server)


# --- partitions -----------------------------------------------------------------------------------


def test_a_session_is_in_one_partition_and_sessions_are_in_all(topic: Topic):
    with topic.open() as stream:
        frames = sample_frames(4)
        for _ in range(30):
            session = uuid.uuid4()
            assert all(
                one.accepted
                for one in stream.append([replace(frame, session=session) for frame in frames])
            )
        found = read_all(stream)
        sessions = [
            {decode_frame(record.raw).session for record in records} for records in found.values()
        ]
    assert [len(records) > 0 for records in found.values()] == [True] * 3
    assert sum(map(len, sessions)) == len(set().union(*sessions)) == 30


def test_a_topic_that_grew_is_rejected_until_the_url_names_the_old_number(topic: Topic):
    with topic.open() as stream:
        stream.append(sample_frames(3))
        before = read_all(stream)
        topic.grow(6)
        assert stream.append(sample_frames(2, seed=1))[0].accepted, (
            "whoever is open goes on as before"
        )
    with pytest.raises(ConfigError) as raised:
        topic.open()
    assert "used with 6 partitions, but its sessions are spread over 3, so" in str(raised.value)
    assert "partitions=3" in str(raised.value)
    with topic.open(partitions=3) as stream:
        assert [one.id for one in stream.partitions()] == list(before)
        for partition, records in before.items():
            assert list(read_all(stream)[partition][: len(records)]) == records


def test_positions_for_another_partition_count_are_rejected_even_without_records(topic: Topic):
    with topic.open() as stream:
        stream.append(sample_frames(3))
        partition, records = next(
            (name, found) for name, found in read_all(stream).items() if found
        )
        topic.trim(partition, records[-1].position)
    topic.grow(6)
    with topic.open() as stream, pytest.raises(ConfigError) as raised:
        stream.read(partition, records[-1].position, max_bytes=1, wait_s=0.0)
    assert "partitions=3" in str(raised.value)


def test_more_partitions_than_exist_cannot_be_requested(topic: Topic):
    with pytest.raises(ConfigError, match="has 3 partitions"):
        topic.open(partitions=4)


def test_a_recreated_topic_has_partitions_with_other_names(topic: Topic):
    with topic.open() as stream:
        before = {one.id for one in stream.partitions()}
    topic.delete()
    made_again_by_s = time.monotonic() + WAIT_TIMEOUT_S
    while True:
        try:
            create_kafka(topic.location(), partitions=3)
            with topic.open() as stream:
                after = {one.id for one in stream.partitions()}
            if not before & after:
                return
        except (ConfigError, Unreachable):
            pass
        assert time.monotonic() < made_again_by_s
        time.sleep(0.1)


def test_a_topic_is_created_once(topic: Topic):
    create_kafka(topic.location(), partitions=3)
    with pytest.raises(ConfigError, match="already exists with 3 partitions, but 5 were requested"):
        create_kafka(topic.location(), partitions=5)


# --- reading --------------------------------------------------------------------------------------


def test_resuming_needs_no_jump_and_a_big_partition_is_read_in_bounded_pieces(topic: Topic):
    with topic.open() as stream:
        frames = sample_frames(1)
        (outcomes,) = {one.accepted for one in stream.append(frames * 500)}
        assert outcomes
        partition = next(name for name, records in read_all(stream).items() if records)
        seeks = count_seeks(stream, partition)
        position = None
        seen = 0
        while (
            read := stream.read(
                partition, position, max_bytes=20 * len(frames[0].encode()), wait_s=0.0
            )
        ).records:
            assert len(read.records) <= 20
            position = read.next
            seen = seen + len(read.records)
        assert (seen, len(seeks)) == (500, 1)


def count_seeks(stream: Any, partition: str) -> list[object]:
    """Where the consumer of a partition is sent, from now on."""
    reader = stream._readers[partition]
    seeks = []
    inner = reader._seek

    def jump(start: object, after: object) -> None:
        seeks.append(start)
        inner(start, after)

    reader._seek = jump
    return seeks


def test_a_reader_waiting_at_the_start_of_an_empty_partition_jumps_once(topic: Topic):
    with topic.open() as stream:
        partition = stream.partitions()[0].id
        seeks = count_seeks(stream, partition)
        for _ in range(5):
            assert stream.read(partition, None, max_bytes=1, wait_s=0.0).next is None
        assert len(seeks) == 1


def test_a_position_past_the_end_is_an_error(topic: Topic):
    with (
        topic.open() as stream,
        pytest.raises(StorageFailed, match="ends at offset 0, but was read up to 42"),
    ):
        stream.read(stream.partitions()[0].id, Position("41/3"), max_bytes=1, wait_s=0.0)


def test_records_trimmed_before_a_waiting_reader_are_reported_as_gone(topic: Topic):
    """The consumer has its place, and the place is gone: no reset to the newest record."""
    with topic.open() as stream, topic.open() as other:
        other.append(sample_frames(1))
        partition, (first,) = next(
            (name, found) for name, found in read_all(stream).items() if found
        )
        stream._readers[partition].close()  # a reader that was away for long
        other.append(sample_frames(1) * 5)
        topic.trim(partition, read_all(other)[partition][-2].position)
        with pytest.raises(PositionGone) as raised:
            stream.read(partition, first.position, max_bytes=1 << 20, wait_s=0.0)
        earliest = Position(str(raised.value.earliest))
        assert len(stream.read(partition, earliest, max_bytes=1 << 20, wait_s=0.0).records) == 1


def test_a_closed_stream_reads_nothing_and_still_lists_partitions(topic: Topic):
    stream = topic.open()
    with pytest.raises(ConfigError, match="not a partition of this stream"):
        stream.read("elsewhere", None, max_bytes=1, wait_s=0.0)
    stream.close()
    with pytest.raises(Closed):
        stream.read(stream.partitions()[0].id, None, max_bytes=1, wait_s=0.0)


def test_close_ends_a_waiting_read(topic: Topic):
    stream = topic.open()
    partition = stream.partitions()[0].id
    stream.read(partition, None, max_bytes=1, wait_s=0.0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stream.read, partition, None, max_bytes=1, wait_s=60.0)
        began_s = time.monotonic()
        stream.close()
        with contextlib.suppress(Closed):  # when it was closed before it began
            assert not waiting.result(WAIT_TIMEOUT_S).records
    assert time.monotonic() - began_s < 20.0, "long before its 60 s are over"


def test_a_topic_deleted_mid_run_is_reported_and_nothing_is_acknowledged(topic: Topic):
    with topic.open(timeout_s=2) as stream:
        assert stream.append(sample_frames(1))[0].accepted
        read_all(stream)
        topic.delete()
        gone_by_s = time.monotonic() + WAIT_TIMEOUT_S
        while (outcome := stream.append(sample_frames(1))[0]).accepted:
            assert time.monotonic() < gone_by_s
        assert outcome.retry_after_s > 0
        assert topic.name in str(outcome.error)
        with pytest.raises(Unreachable):
            stream.read(stream.partitions()[0].id, None, max_bytes=1, wait_s=0.0)


def test_foreign_records_are_records_and_do_not_affect_partitions(topic: Topic):
    producer = Producer(kafka_config(topic.location()).client())
    producer.produce(topic.name, value=b"no frame", headers=[("partitions", b"many")])
    producer.produce(topic.name, value=None, key=b"tombstone")
    assert producer.flush(WAIT_TIMEOUT_S) == 0
    with topic.open() as stream:
        assert sorted(
            record.raw for records in read_all(stream).values() for record in records
        ) == [b"", b"no frame"]


def test_a_partition_that_ends_without_a_record_is_opened_and_read(topic: Topic):
    """The marker at the end of a transaction has an offset and no record."""
    writer = kafka_config(topic.location()).client() | {"transactional.id": topic.name}
    producer = Producer(writer)
    producer.init_transactions(WAIT_TIMEOUT_S)
    producer.begin_transaction()
    producer.produce(topic.name, value=b"in a transaction", partition=0)
    producer.commit_transaction(WAIT_TIMEOUT_S)
    with topic.open() as stream:
        found = [record.raw for records in read_all(stream).values() for record in records]
    assert found == [b"in a transaction"]


# --- who may not come in --------------------------------------------------------------------------


@pytest.fixture
def stranger(tmp_path: Path, kafka_server: Any) -> str:
    """An address whose credentials file has a wrong password."""
    file = tmp_path / "wrong"
    file.write_text(f'username = "{kafka_server.credentials["username"]}"\npassword = "wrong"\n')
    return f"kafka://{kafka_server.address}/plays?credentials={file}&open_timeout_s=8"


def test_a_wrong_password_is_reported_immediately(stranger: str):
    began_s = time.monotonic()
    with pytest.raises(ConfigError) as raised:
        open_kafka(parse_location(stranger))
    assert time.monotonic() - began_s < 6.0
    assert "as user" in str(raised.value)
    assert "check the credentials file and mechanism=" in str(raised.value)


def test_missing_credentials_are_reported_with_both_ways_to_provide_them(kafka_server: Any):
    with pytest.raises(Unreachable) as raised:
        open_kafka(parse_location(f"kafka://{kafka_server.address}/plays?open_timeout_s=2"))
    assert "check that a broker is running" in str(raised.value)
    assert "credentials=FILE" in str(raised.value)


def test_an_unsupported_sasl_mechanism_is_reported(topic: Topic):
    with pytest.raises(ConfigError, match=r"SCRAM-SHA-512 mechanism handshake failed.*PLAIN"):
        topic.open(mechanism="SCRAM-SHA-512")


def test_tls_with_a_plaintext_listener_is_reported(topic: Topic):
    with pytest.raises(ConfigError, match="check that this listener uses TLS"):
        topic.open(tls="true", open_timeout_s=2)


def test_a_missing_topic_is_not_created_implicitly(topic: Topic):
    location = replace(topic.location(), path="nowhere")
    with pytest.raises(ConfigError, match=r"topic 'nowhere' at .*; create it with"):
        open_kafka(location)
    try:
        found = topic.admin.list_topics(timeout=WAIT_TIMEOUT_S).topics
    except KafkaException as error:
        pytest.fail(str(error))
    assert "nowhere" not in found
