"""A stream in Amazon Kinesis Data Streams, or in a server that speaks its API.

A frame is a record, its session the partition key, a shard a partition, a sequence number a position. Positions are
kept by the store, not by Kinesis; no table in DynamoDB is needed.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from understudy.core.clock import Clock
from understudy.core.errors import Closed, ConfigError, StorageFailed
from understudy.core.frame import MAX_FRAME_BYTES, Frame
from understudy.core.group import GroupCommit
from understudy.core.location import Location
from understudy.core.ports import Ack, Partition, Position, Read
from understudy.streams.kinesis_api import KinesisApi, connect, pause_s
from understudy.streams.kinesis_config import KinesisConfig, kinesis_config
from understudy.streams.kinesis_shards import ShardList, ShardReader, partitions
from understudy.streams.kinesis_trouble import CallFailed

MOST_RECORDS = 500
MOST_BYTES = 5 * 1024 * 1024
"""What one PutRecords may carry; newer pages of AWS allow 10 MiB, older ones this."""
_LEAST_SIZE = MOST_BYTES // MOST_RECORDS
"""What a small record counts, so that a sum of sizes bounds the number of records, too."""
_ACTIVE_S = 60.0
_LOOK_S = 0.1
_RETRY_AFTER_S = 1.0
_SHARDS = 4
"""Of a stream that is made where nobody says how many."""
_TOO_LARGE = Ack(False, refused=f"too_large: a frame takes at most {MAX_FRAME_BYTES} bytes")

_Put = tuple[str, bytes]
"""A record that is sent: partition key and data."""


class KinesisStream:
    """Frames in Kinesis; any number of processes append, each shard is read by whoever holds its claim."""

    def __init__(self, api: KinesisApi) -> None:
        self._api, self._config, self._clock, self._closed = api, api.config, api.clock, api.closed
        created: datetime | None = _once_active(api).get("StreamCreationTimestamp")
        api.is_starting = False
        self._prefix = f"{api.config.stream}@{int(created.timestamp()) if created is not None else 0}"
        self._shards = ShardList(api)
        self._readers: dict[str, ShardReader] = {}
        self._lock = threading.Lock()
        self._group = GroupCommit[Sequence[_Put], Sequence[CallFailed | None]](
            self._put, size=lambda puts: sum(map(_size, puts)), most=MOST_BYTES
        )

    def append(self, frames: Sequence[Frame]) -> Sequence[Ack]:
        if self._closed.is_set():
            raise Closed("the stream was closed")
        # Encoded here, so that a frame that cannot be encoded fails its own caller only.
        puts = {
            number: (frame.session.hex, frame.encode())
            for number, frame in enumerate(frames)
            if frame.size_bytes <= MAX_FRAME_BYTES
        }
        outcomes = [_TOO_LARGE] * len(frames)
        for numbers in _calls(puts):
            for number, outcome in zip(numbers, self._keep_trying([puts[n] for n in numbers]), strict=True):
                outcomes[number] = outcome
        return outcomes

    def _keep_trying(self, puts: Sequence[_Put]) -> Sequence[Ack]:
        """Put what fits into one call, and what failed of it again: the same bytes, for `append_s` at most."""
        outcomes = [Ack(True)] * len(puts)
        left = list(range(len(puts)))
        give_up_s = self._clock.monotonic() + self._config.append_s
        attempt = 0
        while left:
            failures = self._group.submit([puts[number] for number in left])
            failed = [(number, one) for number, one in zip(left, failures, strict=True) if one is not None]
            attempt += 1
            pause = pause_s(attempt, self._api.rng)
            is_over = self._clock.monotonic() + pause >= give_up_s or self._closed.is_set()
            left = []
            for number, failure in failed:
                if failure.retry_helps and not is_over:
                    left.append(number)
                else:
                    error = str(failure.for_people(self._config))
                    outcomes[number] = Ack(False, retry_after_s=_RETRY_AFTER_S, error=error)
            if left:
                # Waited here, outside the common call: whoever writes to other shards goes on.
                self._clock.wait(self._closed, pause)
        return outcomes

    def _put(self, groups: Sequence[Sequence[_Put]]) -> Sequence[Sequence[CallFailed | None]]:
        """One PutRecords for all who wait; what became of each record."""
        records = [{"PartitionKey": key, "Data": data} for group in groups for key, data in group]
        failures: Sequence[CallFailed | None]
        try:
            # Asked again here, where `close` cannot come between the answer and the call.
            if self._closed.is_set():
                raise CallFailed("Closed", "the stream was closed while this was tried again")
            answer = self._api.call("put_records", StreamName=self._config.stream, Records=records)
            failures = [self._failure(one) for one in answer["Records"]]
        except CallFailed as error:
            failures = [error] * len(records)
        if len(failures) != len(records):
            failures = [CallFailed("Unreachable", "the answer does not name every record")] * len(records)
        parts = iter(failures)
        return [[next(parts) for _ in group] for group in groups]

    def _failure(self, answered: Mapping[str, Any]) -> CallFailed | None:
        code = answered.get("ErrorCode")
        if code:
            return CallFailed(str(code), str(answered.get("ErrorMessage", "")))
        self._shards.saw(str(answered.get("ShardId")))
        return None

    def partitions(self) -> Sequence[Partition]:
        if self._closed.is_set():
            raise Closed("the stream was closed")
        return partitions(self._prefix, self._shards.shards())

    def read(self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float) -> Read:
        return self._reader(partition).read(after, max_bytes=max_bytes, wait_s=wait_s)

    def _reader(self, partition: str) -> ShardReader:
        prefix, _, shard = partition.rpartition("/")
        if prefix != self._prefix or not shard:
            raise ConfigError(
                f"{partition!r} is no partition of Kinesis stream {self._config.stream!r}, whose partitions begin with "
                f"{self._prefix}/"
            )
        with self._lock:
            if shard not in self._readers:
                self._readers[shard] = ShardReader(self._api, shard, shards=self._shards)
            return self._readers[shard]

    def close(self) -> None:
        """Let a running append finish; reads that wait return."""
        with self._group.alone():
            self._closed.set()
            self._api.close()


def _size(put: _Put) -> int:
    return max(_LEAST_SIZE, len(put[0]) + len(put[1]))


def _calls(puts: Mapping[int, _Put]) -> Iterator[list[int]]:
    """The numbers of records, in parts that fit into one call each."""
    part: list[int] = []
    total = 0
    for number, put in puts.items():
        if part and total + _size(put) > MOST_BYTES:
            yield part
            part, total = [], 0
        part.append(number)
        total += _size(put)
    if part:
        yield part


def open_kinesis(location: Location, *, clock: Clock | None = None) -> KinesisStream:
    """The stream at a `kinesis://` address; ConfigError or StorageFailed says why there is none."""
    api = connect(kinesis_config(location), clock=clock)
    try:
        return KinesisStream(api)
    except BaseException:
        api.close()
        raise


def create_kinesis(location: Location, *, shards: int | None = None, clock: Clock | None = None) -> int:
    """Make a stream for development and wait until it can be used; how many open shards it has.

    One that is there stays as it is; ConfigError when it has another number than was asked for.
    """
    config = kinesis_config(location)
    if shards is not None and shards < 1:
        raise ConfigError(f"shards is {shards}; give at least 1")
    api = connect(config, clock=clock)
    try:
        api.patiently(lambda: _create(api, shards or _SHARDS))
        there = int(_once_active(api)["OpenShardCount"])
    finally:
        api.close()
    if shards not in (None, there):
        raise _other_count(config, there, wanted=shards)
    return there


def _create(api: KinesisApi, shards: int) -> Mapping[str, Any]:
    try:
        return api.call("create_stream", StreamName=api.config.stream, ShardCount=shards)
    except CallFailed as error:
        if error.code == "ResourceInUseException":  # somebody has made it
            return {}
        if error.code == "LimitExceededException" and "shard" in error.detail:
            raise ConfigError(
                f"Kinesis at {api.config.place} makes no stream of {shards} shards ({error.detail}); ask for fewer, or "
                "have the limit of the account raised"
            ) from None
        raise


def _other_count(config: KinesisConfig, there: int, *, wanted: int | None) -> ConfigError:
    return ConfigError(
        f"Kinesis stream {config.stream!r} at {config.place} is there with {there} open shards, and {wanted} were "
        "asked for; name no number to use it as it is, change it with `aws kinesis update-shard-count --stream-name "
        f"{config.stream} --target-shard-count {wanted} --scaling-type UNIFORM_SCALING`, or take another name"
    )


def _once_active(api: KinesisApi) -> Mapping[str, Any]:
    """What the server says about the stream, once it takes records."""
    give_up_s = api.clock.monotonic() + _ACTIVE_S
    while True:
        summary = api.patiently(lambda: _summary(api))
        status = summary["StreamStatus"]
        if status in ("ACTIVE", "UPDATING"):
            return summary
        if status == "DELETING" or api.clock.monotonic() >= give_up_s:
            raise StorageFailed(
                f"Kinesis stream {api.config.stream!r} at {api.config.place} is {status}; wait until it is ACTIVE and "
                "start again"
            )
        api.clock.wait(api.closed, _LOOK_S)


def _summary(api: KinesisApi) -> Mapping[str, Any]:
    answer = api.call("describe_stream_summary", StreamName=api.config.stream)
    found: Mapping[str, Any] = answer.get("StreamDescriptionSummary", {})
    if "StreamStatus" not in found:
        raise CallFailed("NotKinesis", "its answer says nothing about the stream")
    return found
