"""The Kinesis stream against its published limits: rate, sizes, partial failures, trimmed
positions."""

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

pytest.importorskip("boto3", reason="the extra aws is not installed")

from botocore.exceptions import EndpointConnectionError

from tests.streams.memory_kinesis import MemoryKinesis, client_error
from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import Closed, ConfigError, PositionGone, Unreachable
from understudy.experience.frame import MAX_BODY_BYTES, Frame, decode_frame
from understudy.ports import Position, Read, Stream
from understudy.streams.kinesis import KinesisStream
from understudy.streams.kinesis_client import KinesisApi, KinesisConfig
from understudy.testing.clock import START_S, ManualClock
from understudy.testing.streams import StreamContract, read_all, sample_frames


class Table:
    """A stream over a Kinesis in memory, on a manual clock by default."""

    def __init__(self, *, shards: int = 1, page: int = 100, clock: Clock | None = None) -> None:
        self.still = ManualClock()
        self.clock: Clock = clock or self.still
        self.kinesis = MemoryKinesis(self.clock, shards=shards, page=page)
        self.stream = self.open()

    def open(self) -> KinesisStream:
        config = KinesisConfig(
            stream="play", region="eu-west-1", poll_s=0.2 if self.clock is self.still else 0.01
        )
        return KinesisStream(
            KinesisApi(self.kinesis, config, clock=self.clock, rng=random.Random(3))
        )

    @property
    def only(self) -> str:
        (partition,) = self.stream.partitions()
        return partition.id

    def read(
        self, after: Position | None = None, *, wait_s: float = 0.0, max_bytes: int = 1 << 20
    ) -> Read:
        return self.stream.read(self.only, after, max_bytes=max_bytes, wait_s=wait_s)


def raws(read: Read) -> list[bytes]:
    return [record.raw for record in read.records]


class TestKinesisInMemory(StreamContract):
    def make(self) -> Stream:
        self.table = Table(shards=2, clock=SystemClock())
        return self.table.stream

    def reopen(self, stream: Stream) -> Stream:
        return self.table.open()

    def end(self, stream: Stream) -> Stream:
        for shard in list(self.table.kinesis.shards):
            self.table.kinesis.split(shard)
        return self.table.open()

    def trim(self, stream: Stream, partition: str) -> Stream:
        del self.table.kinesis.records[partition.rpartition("/")[2]][:-2]
        return self.table.open()


# --- append ---------------------------------------------------------------------------------------


def test_only_failed_records_are_retried_with_the_same_bytes():
    table = Table()
    frames = sample_frames(6)
    table.kinesis.fail_records = [{1, 4}, {0}]
    assert all(outcome.accepted for outcome in table.stream.append(frames))
    assert table.kinesis.puts == [6, 2, 1]
    assert Counter(raws(table.read())) == Counter(frame.encode() for frame in frames)


def test_a_record_that_always_fails_is_reported_alone_within_a_time_limit():
    table = Table()
    frames = sample_frames(3)
    table.kinesis.fail_records = [{1}] + [{0}] * 10_000
    outcomes = table.stream.append(frames)
    assert [outcome.accepted for outcome in outcomes] == [True, False, True]
    assert "InternalFailure" in (outcomes[1].error or "")
    assert outcomes[1].retry_after_s > 0
    assert table.clock.monotonic() - START_S <= 3.0
    assert len(table.kinesis.puts) < 30


@pytest.mark.parametrize(
    "error",
    [
        client_error("ProvisionedThroughputExceededException"),
        client_error("ThrottlingException"),
        client_error("Anything", status=500),
        EndpointConnectionError(endpoint_url="http://127.0.0.1:1"),
    ],
)
def test_a_failed_call_is_retried(error: Exception):
    table = Table()
    frames = sample_frames(3)
    table.kinesis.trouble["put_records"] = [error, error]
    assert all(outcome.accepted for outcome in table.stream.append(frames))
    assert table.kinesis.calls["put_records"] == 3


@pytest.mark.parametrize(
    "code", ["AccessDeniedException", "ResourceNotFoundException", "ExpiredTokenException"]
)
def test_a_permanent_error_is_reported_at_once_and_the_sender_keeps_its_frames(code: str):
    table = Table()
    frames = sample_frames(3)
    table.kinesis.trouble["put_records"] = [client_error(code)]
    outcomes = table.stream.append(frames)
    assert not any(outcome.accepted for outcome in outcomes)
    assert all(
        outcome.retry_after_s > 0 and "play" in (outcome.error or "") for outcome in outcomes
    )
    assert table.kinesis.calls["put_records"] == 1
    assert all(outcome.accepted for outcome in table.stream.append(frames))


def test_a_call_carries_at_most_500_records():
    table = Table()
    frame = sample_frames(1)[0]
    assert all(outcome.accepted for outcome in table.stream.append([frame] * 1201))
    assert table.kinesis.puts == [500, 500, 201]


def test_a_call_carries_at_most_5_mib():
    table = Table()
    large = replace(sample_frames(1)[0], body=bytes(MAX_BODY_BYTES))
    assert all(outcome.accepted for outcome in table.stream.append([large] * 25))
    assert table.kinesis.puts == [9, 9, 7]


def test_a_response_that_omits_records_acknowledges_nothing(monkeypatch):
    table = Table()
    frames = sample_frames(3)
    monkeypatch.setattr(
        table.kinesis, "put_records", lambda **_: {"FailedRecordCount": 0, "Records": []}
    )
    assert not any(outcome.accepted for outcome in table.stream.append(frames))


def test_sessions_spread_evenly_over_shards():
    shards = 16
    sessions = 4000
    table = Table(shards=shards)
    frame = sample_frames(1)[0]
    rng = random.Random(1)
    frames = [
        replace(frame, session=UUID(int=(1 << 76) * 7 + rng.getrandbits(62)))
        for _ in range(sessions)
    ]
    table.stream.append(frames)
    counts = [len(records) for records in table.kinesis.records.values()]
    expected = sessions / shards
    chi_square = sum((count - expected) ** 2 / expected for count in counts)
    assert chi_square < 37.7, f"{counts}: 99.9 % of fair spreads over {shards} shards are below"


def test_a_session_stays_on_one_shard():
    table = Table(shards=8)
    frames = sample_frames(20)
    table.stream.append(frames)
    assert sorted(len(records) for records in table.kinesis.records.values())[-2:] == [0, 20]


# --- read -----------------------------------------------------------------------------------------


def test_an_idle_shard_is_read_five_times_a_second_and_no_more():
    table = Table(shards=3)
    for _ in range(40):
        for partition in table.stream.partitions():
            table.stream.read(partition.id, None, max_bytes=1 << 20, wait_s=0.0)
    assert table.kinesis.early == []
    # All shards become due together: three of them cost no more time than one.
    assert table.clock.monotonic() - START_S == pytest.approx(39 * 0.2)


def test_a_waiting_read_also_keeps_the_rate_limit():
    table = Table()
    assert table.read(wait_s=10.0).records == []
    assert 10.0 <= table.clock.monotonic() - START_S <= 10.2
    assert table.kinesis.calls["get_records"] in (50, 51)
    assert table.kinesis.early == []


def test_consecutive_positions_need_one_iterator():
    table = Table()
    position: Position | None = None
    for frame in sample_frames(10):
        table.stream.append([frame])
        read = table.read(position)
        assert raws(read) == [frame.encode()]
        position = read.next
    assert table.kinesis.calls["get_shard_iterator"] == 1


def test_records_of_one_response_are_returned_without_another_call():
    table = Table()
    frames = sample_frames(9)
    table.stream.append(frames)
    position: Position | None = None
    for frame in frames:
        read = table.read(position, max_bytes=1)
        assert raws(read) == [frame.encode()]
        position = read.next
    assert table.kinesis.calls["get_records"] == 1


def test_a_throttled_read_waits_and_resumes():
    table = Table()
    frames = sample_frames(3)
    table.stream.append(frames)
    table.kinesis.trouble["get_records"] = [
        client_error("ProvisionedThroughputExceededException")
    ] * 4
    assert len(table.read().records) == 3


THROTTLED = client_error("ProvisionedThroughputExceededException")


def test_a_shard_throttled_for_long_is_an_error_and_not_an_empty_read():
    table = Table()
    table.stream.append(sample_frames(1))
    table.kinesis.trouble["get_records"] = [THROTTLED] * 10_000
    with pytest.raises(
        Unreachable,
        match=r"ProvisionedThroughputExceeded.*; Kinesis is throttling: add shards, or wait",
    ):
        table.read()
    assert 8.0 <= table.clock.monotonic() - START_S <= 12.0
    table.kinesis.trouble.clear()
    assert len(table.read().records) == 1


def test_empty_responses_of_a_shard_with_records_are_not_its_end():
    table = Table()
    frames = sample_frames(2)
    table.stream.append(frames)
    table.kinesis.most = 0
    with pytest.raises(Unreachable, match="returned no records for 8 s"):
        table.read()
    table.kinesis.most = 10
    assert len(table.read().records) == 2


def test_a_reader_at_the_tip_that_is_throttled_later_returns_no_records():
    table = Table()
    real = table.kinesis.get_records
    late_s = table.clock.monotonic() + 9.5

    def throttled_late(**asked: Any) -> Any:
        if table.clock.monotonic() > late_s:
            raise THROTTLED
        return real(**asked)

    table.kinesis.get_records = throttled_late  # type: ignore[method-assign]
    assert table.read(wait_s=10.0).records == []


def test_a_read_reports_how_current_it_is_by_our_clock_and_server_durations_only():
    table = Table()
    frames = sample_frames(6)
    skew_s = 3600.0
    for frame in frames:
        table.stream.append([frame])
        table.still.advance(10.0)
    records = table.kinesis.records["shardId-000000000000"]
    records[:] = [(number, at_s + skew_s, data) for number, at_s, data in records]
    table.kinesis._clock = Ahead(table.still, skew_s)
    table.kinesis.most = 4
    said: list[float | None] = []
    position: Position | None = None
    for _ in range(3):
        read = table.read(position, max_bytes=1 if not said else 1 << 20)
        said.append(read.complete_to_s)
        position = read.next
    first, rest, last = said
    assert first == pytest.approx(START_S), "the first of four"
    assert rest == pytest.approx(START_S + 30.0)
    assert last == pytest.approx(START_S + 60.0, abs=1.0), "the tip"


class Ahead(ManualClock):
    """The server's clock: ahead of ours."""

    def __init__(self, ours: ManualClock, by_s: float) -> None:
        self._ours = ours
        self._by_s = by_s

    def now(self) -> float:
        return self._ours.now() + self._by_s


def test_reading_after_close_is_rejected():
    table = Table()
    partition = table.only
    table.stream.close()
    with pytest.raises(Closed):
        table.stream.read(partition, None, max_bytes=1, wait_s=0.0)


def test_an_expired_iterator_is_renewed_at_its_position():
    table = Table()
    frames = sample_frames(4)
    table.stream.append(frames[:2])
    read = table.read()
    table.still.advance(600.0)
    table.stream.append(frames[2:])
    assert raws(table.read(read.next)) == [frame.encode() for frame in frames[2:]]
    assert table.kinesis.calls["get_shard_iterator"] == 2


def test_a_short_outage_costs_time_only():
    table = Table()
    frames = sample_frames(4)
    table.stream.append(frames)
    table.kinesis.trouble["get_records"] = [
        EndpointConnectionError(endpoint_url="http://127.0.0.1:1")
    ] * 3
    assert len(table.read().records) == 4


def test_a_long_outage_is_one_error_and_reading_resumes_afterwards():
    table = Table()
    frames = sample_frames(4)
    table.stream.append(frames)
    position = table.read(max_bytes=1).next
    table = _reopened(table)
    table.kinesis.trouble["get_shard_iterator"] = [
        EndpointConnectionError(endpoint_url="http://127.0.0.1:1")
    ] * 10_000
    with pytest.raises(Unreachable, match=r"failed: Unreachable: .*; check the network"):
        table.read(position)
    table.kinesis.trouble.clear()
    assert raws(table.read(position)) == [frame.encode() for frame in frames[1:]]


def _reopened(table: Table) -> Table:
    table.stream.close()
    table.stream = table.open()
    return table


def test_records_carry_the_time_of_their_arrival():
    table = Table()
    table.stream.append(sample_frames(1))
    assert table.read().records[0].time_s == START_S


def test_a_record_of_the_kpl_is_returned_as_one_invalid_record():
    table = Table()
    frames = sample_frames(2)
    table.stream.append(frames[:1])
    table.kinesis.put_records(
        StreamName="play", Records=[{"PartitionKey": "a", "Data": b"\xf3\x89\x9a\xc2" + bytes(90)}]
    )
    table.stream.append(frames[1:])
    first, aggregated, second = raws(table.read())
    assert [decode_frame(raw) for raw in (first, second)] == frames
    with pytest.raises(Exception, match="bad_magic"):
        decode_frame(aggregated)


# --- positions that are gone ----------------------------------------------------------------------


def test_a_trimmed_position_is_detected_although_kinesis_does_not_report_it():
    table = Table()
    frames = sample_frames(5)
    table.stream.append(frames)
    first = table.read(max_bytes=1).next
    del table.kinesis.records["shardId-000000000000"][:3]
    table = _reopened(table)
    with pytest.raises(PositionGone) as told:
        table.read(first)
    assert (told.value.position, told.value.earliest) == (first, None)
    assert raws(table.read(None)) == [frame.encode() for frame in frames[3:]]


def test_a_trimmed_position_without_later_records_is_reported_after_a_restart():
    table = Table()
    table.stream.append(sample_frames(2))
    last = table.read().next
    table.kinesis.records["shardId-000000000000"].clear()
    table = _reopened(table)
    with pytest.raises(PositionGone):
        table.read(last)


def test_a_reader_that_was_at_the_tip_has_missed_nothing_whatever_was_trimmed():
    table = Table()
    frames = sample_frames(3)
    table.stream.append(frames[:2])
    last = table.read().next
    assert table.read(last).records == []
    table.still.advance(20 * 3600.0)
    table.kinesis.records["shardId-000000000000"].clear()
    table.stream.append(frames[2:])
    assert raws(table.read(last)) == [frames[2].encode()]


@pytest.mark.parametrize("code", ["InvalidArgumentException", "ResourceNotFoundException"])
def test_a_position_that_the_server_rejects_is_gone(code: str):
    table = Table()
    frames = sample_frames(2)
    table.stream.append(frames)
    first = table.read(max_bytes=1).next
    table = _reopened(table)
    table.kinesis.trouble["get_shard_iterator"] = [client_error(code)]
    with pytest.raises(PositionGone):
        table.read(first)


def test_a_position_of_another_kind_of_stream_is_rejected():
    with pytest.raises(ConfigError, match="not a position of a Kinesis stream"):
        Table().read(Position("1:2:3"))


def test_a_partition_of_another_stream_is_rejected():
    with pytest.raises(ConfigError, match="start with play@1700000000/"):
        Table().stream.read("other@1/shardId-000000000000", None, max_bytes=1, wait_s=0.0)


# --- shards ---------------------------------------------------------------------------------------


def test_paged_shards_are_listed_parents_first_in_a_stable_order():
    table = Table(shards=4, page=3)
    for shard in list(table.kinesis.shards):
        table.kinesis.split(shard)
    table.kinesis.merge("shardId-000000000005", "shardId-000000000006")
    stream = table.open()
    found = stream.partitions()
    names = [one.id.rpartition("/")[2] for one in found]
    assert sorted(names) == [f"shardId-{number:012d}" for number in range(13)]
    assert found == table.open().partitions()
    for number, one in enumerate(found):
        assert all([other.id for other in found].index(parent) < number for parent in one.parents)
    assert [parent[-2:] for parent in found[-1].parents] == ["05", "06"]


def test_parents_past_retention_are_omitted():
    table = Table()
    table.kinesis.split("shardId-000000000000")
    table.kinesis.forget("shardId-000000000000")
    assert [one.parents for one in table.open().partitions()] == [(), ()]


def test_the_shard_list_is_cached_and_refreshed_by_an_ended_or_unknown_shard():
    table = Table()
    frames = sample_frames(2)
    for _ in range(50):
        table.only  # noqa: B018
    assert table.kinesis.calls["list_shards"] == 1
    table.stream.append(frames[:1])
    table.kinesis.split("shardId-000000000000")
    table.stream.append(frames[1:])
    assert len(table.stream.partitions()) == 3, "a shard took a record that was not in the list"
    table.kinesis.split("shardId-000000000001")
    assert len(table.stream.partitions()) == 3
    parent = table.stream.partitions()[1].id
    while not table.stream.read(parent, None, max_bytes=1 << 20, wait_s=0.0).ended:
        pass
    assert len(table.stream.partitions()) == 5, "a shard ended"


def test_a_change_during_a_list_request_causes_another_request():
    """A list that was made before a shard ended lacks its children, whenever it arrives."""
    table = Table()
    asked = threading.Event()
    go_on = threading.Event()
    real = table.kinesis.list_shards

    def slow(**arguments: Any) -> Any:
        answer = real(**arguments)
        asked.set()
        assert go_on.wait(10.0)
        return answer

    table.kinesis.list_shards = slow  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(table.stream.partitions)
        assert asked.wait(10.0)
        table.kinesis.split("shardId-000000000000")
        table.stream._shards.invalidate()
        go_on.set()
        assert len(early.result()) == 1
    assert len(table.stream.partitions()) == 3


def test_a_reshard_in_the_middle_shows_every_record_once():
    table = Table(shards=2)
    frames = sample_frames(30)
    other = sample_frames(30, seed=9)
    table.stream.append([*frames[:10], *other[:10]])
    table.kinesis.split("shardId-000000000000")
    table.stream.append([*frames[10:20], *other[10:20]])
    table.kinesis.merge("shardId-000000000003", "shardId-000000000001")
    table.stream.append([*frames[20:], *other[20:]])
    found = read_all(table.open())
    assert Counter(one.raw for records in found.values() for one in records) == Counter(
        frame.encode() for frame in [*frames, *other]
    )
    assert _order(found, frames[0]) == list(range(30))


def _order(found: dict[str, Any], frame: Frame) -> list[int]:
    decoded = [decode_frame(one.raw) for records in found.values() for one in records]
    return [one.chunk_no for one in decoded if one.session == frame.session]


def test_a_shard_past_retention_has_ended():
    table = Table()
    table.stream.append(sample_frames(2))
    table.kinesis.split("shardId-000000000000")
    stream = table.open()
    parent = stream.partitions()[0].id
    table.kinesis.forget("shardId-000000000000")
    assert stream.read(parent, None, max_bytes=1, wait_s=0.0).ended


# --- start and end --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            client_error("ResourceNotFoundException"),
            ConfigError,
            "ResourceNotFoundException.*; create it",
        ),
        (
            client_error("UnrecognizedClientException"),
            ConfigError,
            "UnrecognizedClientException.*; check AWS_ACCESS_KEY_ID",
        ),
        (client_error("AccessDeniedException"), ConfigError, "docs/kinesis.md"),
        (
            EndpointConnectionError(endpoint_url="http://127.0.0.1:1"),
            Unreachable,
            "Could not connect.*; check the network",
        ),
    ],
)
def test_an_open_error_states_the_reason_and_the_next_step(
    error: Exception, kind: type[Exception], words: str
):
    table = Table()
    table.kinesis.trouble["describe_stream_summary"] = [error] * 10_000
    with pytest.raises(kind, match=words):
        table.open()


def test_close_closes_the_connections():
    table = Table()
    table.stream.close()
    assert table.kinesis.calls["close"] == 1
