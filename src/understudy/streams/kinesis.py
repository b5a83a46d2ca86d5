"""A stream in Amazon Kinesis Data Streams or a Kinesis-compatible server.

Each frame is a record with its session as the partition key. A shard is a partition, and a sequence
number is a position. The store keeps the positions of readers, so no DynamoDB table is needed.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import structlog

from understudy.core.clock import Clock
from understudy.core.errors import Closed, ConfigError, PositionGone, StorageFailed, Unreachable
from understudy.core.location import Location
from understudy.core.log import GroupCommit
from understudy.experience.frame import MAX_FRAME_BYTES, Frame
from understudy.ports import Ack, Partition, Position, Read, Record
from understudy.streams.kinesis_client import (
    CallFailed,
    KinesisApi,
    connect,
    kinesis_config,
    pause_s,
)

_log = structlog.get_logger("understudy.streams.kinesis")
MAX_RECORDS = 500
MAX_BYTES = 5 * 1024 * 1024
"""Limits of one PutRecords call; newer AWS documentation allows 10 MiB, older only this."""
_LEAST_SIZE = MAX_BYTES // MAX_RECORDS
"""Minimum size counted per record, so that the byte limit also limits the number of records."""
_ACTIVE_S = 60.0
_STATUS_POLL_S = 0.1
_RETRY_AFTER_S = 1.0
_DEFAULT_SHARDS = 4
"""Shards of a new stream when no number is requested."""
_TOO_LARGE = Ack(False, refused=f"too_large: the limit is {MAX_FRAME_BYTES} bytes per frame")
_SAFE_GAP_S = 23 * 3600.0
"""A reader that was at a shard's tip within this time has missed no record, because streams keep
records for at least a day."""
_KPL_MAGIC = b"\xf3\x89\x9a\xc2"
_NO_SUCH_POSITION = ("InvalidArgumentException", "ResourceNotFoundException")

_Put = tuple[str, bytes]
"""A record to send: partition key and data."""


class KinesisStream:
    """A Kinesis stream; any number of processes append, and each shard has one reader at a time."""

    def __init__(self, api: KinesisApi) -> None:
        self._api = api
        self._config = api.config
        self._clock = api.clock
        self._closed = api.closed
        created: datetime | None = _wait_until_active(api).get("StreamCreationTimestamp")
        api.is_starting = False
        # Positions are invalid in a recreated stream, so its partitions have other names.
        self._prefix = (
            f"{api.config.stream}@{int(created.timestamp()) if created is not None else 0}"
        )
        self._shards = ShardList(api)
        self._readers: dict[str, ShardReader] = {}
        self._lock = threading.Lock()
        self._group = GroupCommit[Sequence[_Put], Sequence[CallFailed | None]](
            self._put, size=lambda puts: sum(map(_size, puts)), most=MAX_BYTES
        )

    def append(self, frames: Sequence[Frame]) -> Sequence[Ack]:
        if self._closed.is_set():
            raise Closed("the stream was closed")
        # Encoded before the shared call, so that an invalid frame fails its own caller only.
        puts = {
            number: (frame.session.hex, frame.encode())
            for number, frame in enumerate(frames)
            if frame.size_bytes <= MAX_FRAME_BYTES
        }
        outcomes = [_TOO_LARGE] * len(frames)
        for numbers in _calls(puts):
            for number, outcome in zip(
                numbers, self._append_with_retries([puts[n] for n in numbers]), strict=True
            ):
                outcomes[number] = outcome
        return outcomes

    def _append_with_retries(self, puts: Sequence[_Put]) -> Sequence[Ack]:
        """Put records that fit into one call; retry the failed ones for `append_s`."""
        outcomes = [Ack(True)] * len(puts)
        pending = list(range(len(puts)))
        give_up_s = self._clock.monotonic() + self._config.append_s
        attempt = 0
        while pending:
            failures = self._group.submit([puts[number] for number in pending])
            failed = [
                (number, failure)
                for number, failure in zip(pending, failures, strict=True)
                if failure is not None
            ]
            attempt += 1
            pause = pause_s(attempt, self._api.rng)
            is_over = self._clock.monotonic() + pause >= give_up_s or self._closed.is_set()
            pending = []
            for number, failure in failed:
                if failure.retry_helps and not is_over:
                    pending.append(number)
                else:
                    error = str(failure.to_error(self._config))
                    outcomes[number] = Ack(False, retry_after_s=_RETRY_AFTER_S, error=error)
            if pending:
                # Wait here, outside the shared call, so that appends to other shards continue.
                self._clock.wait(self._closed, pause)
        return outcomes

    def _put(self, groups: Sequence[Sequence[_Put]]) -> Sequence[Sequence[CallFailed | None]]:
        """Call PutRecords once for all waiting appends; return each record's failure, or None."""
        records = [{"PartitionKey": key, "Data": data} for group in groups for key, data in group]
        failures: Sequence[CallFailed | None]
        try:
            # Checked again here, where `close` cannot run between this check and the call.
            if self._closed.is_set():
                raise CallFailed("Closed", "the stream was closed during a retry")
            response = self._api.call(
                "put_records", StreamName=self._config.stream, Records=records
            )
            failures = [self._failure(result) for result in response["Records"]]
        except CallFailed as error:
            failures = [error] * len(records)
        if len(failures) != len(records):
            incomplete = CallFailed("Unreachable", "the response does not list every record")
            failures = [incomplete] * len(records)
        results = iter(failures)
        return [[next(results) for _ in group] for group in groups]

    def _failure(self, result: Mapping[str, Any]) -> CallFailed | None:
        code = result.get("ErrorCode")
        if code:
            return CallFailed(str(code), str(result.get("ErrorMessage", "")))
        self._shards.note_shard(str(result.get("ShardId")))
        return None

    def partitions(self) -> Sequence[Partition]:
        if self._closed.is_set():
            raise Closed("the stream was closed")
        return [
            Partition(
                f"{self._prefix}/{name}", tuple(f"{self._prefix}/{parent}" for parent in parents)
            )
            for name, parents in self._shards.shards().items()
        ]

    def read(
        self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float
    ) -> Read:
        return self._reader(partition).read(after, max_bytes=max_bytes, wait_s=wait_s)

    def _reader(self, partition: str) -> "ShardReader":
        prefix, _, shard = partition.rpartition("/")
        if prefix != self._prefix or not shard:
            raise ConfigError(
                f"{partition!r} is not a partition of Kinesis stream {self._config.stream!r}; its "
                f"partitions start with {self._prefix}/"
            )
        with self._lock:
            if shard not in self._readers:
                self._readers[shard] = ShardReader(self._api, shard, shards=self._shards)
            return self._readers[shard]

    def close(self) -> None:
        """Wait for a running append and wake waiting reads."""
        with self._group.alone:
            self._closed.set()
            self._api.close()


def _size(put: _Put) -> int:
    return max(_LEAST_SIZE, len(put[0]) + len(put[1]))


def _calls(puts: Mapping[int, _Put]) -> Iterator[list[int]]:
    """Group the numbers of records so that each group fits into one call."""
    numbers: list[int] = []
    total = 0
    for number, put in puts.items():
        if numbers and total + _size(put) > MAX_BYTES:
            yield numbers
            numbers = []
            total = 0
        numbers.append(number)
        total += _size(put)
    if numbers:
        yield numbers


def open_kinesis(location: Location, *, clock: Clock | None = None) -> KinesisStream:
    """Open the stream at a `kinesis://` address; ConfigError or StorageFailed on failure."""
    api = connect(kinesis_config(location), clock=clock)
    try:
        return KinesisStream(api)
    except BaseException:
        api.close()
        raise


def create_kinesis(
    location: Location, *, shards: int | None = None, clock: Clock | None = None
) -> int:
    """Create a stream for development, wait until it is active and count its open shards.

    An existing stream is not changed; ConfigError when its number of shards is not the requested
    one.
    """
    config = kinesis_config(location)
    if shards is not None and shards < 1:
        raise ConfigError(f"shards is {shards}; use 1 or more")
    api = connect(config, clock=clock)
    try:
        api.with_retries(lambda: _create(api, shards or _DEFAULT_SHARDS))
        open_shards = int(_wait_until_active(api)["OpenShardCount"])
    finally:
        api.close()
    if shards not in (None, open_shards):
        raise ConfigError(
            f"Kinesis stream {config.stream!r} at {config.where} already exists with {open_shards} "
            f"open shards, but {shards} were requested; omit the number to use it as it is, change "
            f"it with `aws kinesis update-shard-count --stream-name {config.stream} "
            f"--target-shard-count {shards} --scaling-type UNIFORM_SCALING`, or use another name"
        )
    return open_shards


def _create(api: KinesisApi, shards: int) -> Mapping[str, Any]:
    try:
        return api.call("create_stream", StreamName=api.config.stream, ShardCount=shards)
    except CallFailed as error:
        if error.code == "ResourceInUseException":  # it exists already
            return {}
        if error.code == "LimitExceededException" and "shard" in error.detail:
            raise ConfigError(
                f"Kinesis at {api.config.where} rejects a stream of {shards} shards "
                f"({error.detail}); use fewer shards, or request a higher limit for the account"
            ) from None
        raise


def _wait_until_active(api: KinesisApi) -> Mapping[str, Any]:
    """Wait until the stream accepts records; return its summary."""
    give_up_s = api.clock.monotonic() + _ACTIVE_S
    while True:
        summary = api.with_retries(lambda: _summary(api))
        status = summary["StreamStatus"]
        if status in ("ACTIVE", "UPDATING"):
            return summary
        if status == "DELETING" or api.clock.monotonic() >= give_up_s:
            raise StorageFailed(
                f"Kinesis stream {api.config.stream!r} at {api.config.where} is {status}; wait "
                "until it is ACTIVE, or create it again once it is deleted, then start again"
            )
        api.clock.wait(api.closed, _STATUS_POLL_S)


def _summary(api: KinesisApi) -> Mapping[str, Any]:
    response = api.call("describe_stream_summary", StreamName=api.config.stream)
    summary: Mapping[str, Any] = response.get("StreamDescriptionSummary", {})
    if "StreamStatus" not in summary:
        raise CallFailed("NotKinesis", "the response does not describe the stream")
    return summary


# --- Reading --------------------------------------------------------------------------------------


class ShardList:
    """The stream's shards, cached; fetched again when the list is old or known to be wrong."""

    def __init__(self, api: KinesisApi) -> None:
        self._api = api
        self._lock = threading.Lock()
        self._shards: dict[str, tuple[str, ...]] = {}
        self._ended: set[str] = set()
        self._until_s = 0.0
        self._generation = object()
        """Replaced when the list is known to be wrong, so that even a running fetch is repeated."""
        self._fetched: object = None

    def shards(self) -> Mapping[str, tuple[str, ...]]:
        """Shard ids with the ids of their listed parents; parents first, in a stable order."""
        with self._lock:
            now_s = self._api.clock.monotonic()
            generation = self._generation
            if self._fetched is not generation or now_s >= self._until_s:
                shards = self._fetch()
                self._shards = parents_first(shards)
                self._fetched = generation
                self._ended = {
                    str(shard["ShardId"])
                    for shard in shards
                    if shard["SequenceNumberRange"].get("EndingSequenceNumber")
                }
                self._until_s = now_s + self._api.config.list_s
            return self._shards

    def invalidate(self) -> None:
        """Fetch the list again at the next use, even if a fetch is in progress."""
        self._generation = object()

    def has_ended(self, shard: str) -> bool:
        """Whether a shard is closed for new records, according to the list."""
        self.shards()
        return shard in self._ended

    def note_shard(self, shard: str) -> None:
        """Note a shard that accepted a record; an unknown one means the stream was resharded."""
        if self._shards and shard not in self._shards:
            self.invalidate()

    def _fetch(self) -> list[Mapping[str, Any]]:
        shards: list[Mapping[str, Any]] = []
        page: Mapping[str, Any] = {"StreamName": self._api.config.stream}
        while True:
            response = self._api.call_with_retries("list_shards", **page)
            shards += response["Shards"]
            if not response.get("NextToken"):
                return shards
            page = {"NextToken": response["NextToken"]}


def parents_first(shards: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Shard ids with their parents, parents before children; expired parents are omitted."""
    names = sorted(str(shard["ShardId"]) for shard in shards)
    listed = set(names)
    parents_of = {
        str(shard["ShardId"]): tuple(
            str(parent)
            for parent in (shard.get("ParentShardId"), shard.get("AdjacentParentShardId"))
            if parent in listed and parent != shard["ShardId"]
        )
        for shard in shards
    }
    ordered: dict[str, tuple[str, ...]] = {}
    waiting = names
    while waiting:
        ready = [name for name in waiting if all(parent in ordered for parent in parents_of[name])]
        # No real stream has a cycle of parents, but a bad response must not cause an endless loop.
        ordered |= {name: parents_of[name] for name in ready or waiting}
        waiting = [name for name in waiting if name not in ordered]
    return ordered


class ShardReader:
    """Reads one shard within its rate limit; consecutive reads reuse the shard iterator."""

    def __init__(self, api: KinesisApi, shard: str, *, shards: ShardList) -> None:
        self._api = api
        self._shard = shard
        self._shards = shards
        self._lock = threading.Lock()
        self._next_call_s = 0.0
        self._failures = 0
        self._failing_since_s = 0.0
        self._seek(None)

    def read(self, after: Position | None, *, max_bytes: int, wait_s: float) -> Read:
        """Records after a position; the shard's rate limit may extend `wait_s` a little.

        An empty result means that there are no records now. Unreachable if it takes longer than
        `retry_s` to find out.
        """
        clock = self._api.clock
        closed = self._api.closed
        config = self._api.config
        with self._lock:
            if closed.is_set():
                raise Closed("the stream was closed")
            if after != self._after:
                self._seek(after)
            deadline_s = clock.monotonic() + wait_s
            give_up_s = max(deadline_s, clock.monotonic() + config.retry_s)
            self._is_at_tip = False
            while not self._held and not self._is_finished and not closed.is_set():
                may_end = self._fetch()
                if clock.monotonic() >= (deadline_s if may_end else give_up_s):
                    break
            if not (self._held or self._is_finished or self._is_at_tip or closed.is_set()):
                raise Unreachable(
                    f"shard {self._shard} of Kinesis stream {config.stream!r} at {config.where} "
                    f"returned no records for {config.retry_s:g} s although it has some; use fewer "
                    "readers, or wait"
                )
            return self._take_held(max_bytes)

    def _seek(self, after: Position | None) -> None:
        if after is not None and not (after.isascii() and after.isdigit()):
            raise ConfigError(
                f"{after!r} is not a position of a Kinesis stream; pass a sequence number that "
                "read() returned, or None to start at the beginning"
            )
        self._after = after
        self._newest = after
        self._held: deque[Record] = deque()
        self._iterator: str | None = None
        self._expected: Position | None = None
        self._is_finished = False
        self._is_at_tip = False
        self._was_at_tip_s: float | None = None
        self._complete_to_s = -math.inf
        """All records that had arrived by this time were in the responses so far."""

    def _take_held(self, max_bytes: int) -> Read:
        records: list[Record] = []
        size = 0
        while self._held:
            size += len(self._held[0].raw)
            if records and size > max_bytes:
                break
            records.append(self._held.popleft())
        if records:
            self._after = records[-1].position
        # How much later the records that stay held arrived, by the server's clock alone.
        later_s = max(0.0, self._held[-1].time_s - records[-1].time_s) if self._held else 0.0
        return Read(
            records,
            self._after,
            self._is_finished and not self._held,
            self._complete_to_s - later_s,
        )

    def _fetch(self) -> bool:
        """Call GetRecords once; return whether a read that found no records may end now."""
        clock = self._api.clock
        if self._next_call_s > clock.monotonic():
            clock.wait(self._api.closed, self._next_call_s - clock.monotonic())
            if self._api.closed.is_set():
                return True
        called_s = clock.monotonic()
        self._next_call_s = called_s + self._api.config.poll_s
        try:
            if self._iterator is None:
                self._iterator = self._new_iterator()
                if self._is_finished:
                    return True
            response = self._api.call("get_records", ShardIterator=self._iterator)
        except CallFailed as error:
            self._fail(error)
            return False
        self._failures = 0
        return self._accept(response, called_s)

    def _new_iterator(self) -> str | None:
        """An iterator at our position, None if the shard is gone; PositionGone if trimmed."""
        if self._newest is None:
            return self._request_iterator("TRIM_HORIZON")
        at_tip_s = self._was_at_tip_s
        if at_tip_s is not None and self._api.clock.monotonic() - at_tip_s < _SAFE_GAP_S:
            # Records after our position cannot have been trimmed, only the one at our position.
            return self._request_iterator(
                "AFTER_SEQUENCE_NUMBER", otherwise=lambda: self._request_iterator("TRIM_HORIZON")
            )
        self._expected = self._newest
        return self._request_iterator("AT_SEQUENCE_NUMBER", otherwise=self._gone)

    def _request_iterator(
        self, kind: str, *, otherwise: Callable[[], str | None] | None = None
    ) -> str | None:
        start = {} if kind == "TRIM_HORIZON" else {"StartingSequenceNumber": self._newest}
        try:
            response = self._api.call(
                "get_shard_iterator",
                StreamName=self._api.config.stream,
                ShardId=self._shard,
                ShardIteratorType=kind,
                **start,
            )
            return str(response["ShardIterator"])
        except CallFailed as error:
            if error.code not in _NO_SUCH_POSITION:
                raise
            self._shards.invalidate()
            if self._shard not in self._shards.shards():
                _log.warning("shard_gone", shard=self._shard, stream=self._api.config.stream)
                self._is_finished = True
                return None
            if otherwise is None:
                raise
            return otherwise()

    def _gone(self) -> str | None:
        position = str(self._expected)
        self._seek(None)
        raise PositionGone(position, earliest=None)

    def _fail(self, error: CallFailed) -> None:
        """Note a failed call and delay the next; raise if no retry helps or `retry_s` is over."""
        clock = self._api.clock
        config = self._api.config
        if error.code == "ExpiredIteratorException":
            self._iterator = None
            return
        if not error.retry_helps and error.code != "InvalidArgumentException":
            raise error.to_error(config) from error
        if not self._failures:
            self._failing_since_s = clock.monotonic()
            _log.warning("read_failed", shard=self._shard, stream=config.stream, error=str(error))
        self._failures += 1
        self._next_call_s = (
            clock.monotonic() + config.poll_s + pause_s(self._failures, self._api.rng)
        )
        if not error.is_throttle:
            # The server may reject the iterator itself.
            self._iterator = None
        if clock.monotonic() - self._failing_since_s >= config.retry_s:
            self._failures = 0
            raise error.to_error(config) from error

    def _accept(self, response: Mapping[str, Any], called_s: float) -> bool:
        self._iterator = response.get("NextShardIterator") or None
        self._is_finished = self._iterator is None
        if self._is_finished:
            # The children of this ended shard are listed by now.
            self._shards.invalidate()
        behind_s = (response.get("MillisBehindLatest") or 0) / 1000
        is_at_tip = not behind_s
        for fields in response["Records"]:
            position = Position(str(fields["SequenceNumber"]))
            if self._expected is not None:
                if int(position) > int(self._expected):
                    self._gone()
                if position == self._expected:
                    self._expected = None
            # A repeated record is not after the newest position.
            if self._newest is None or int(position) > int(self._newest):
                self._held.append(_record(fields, position, shard=self._shard))
                self._newest = position
        if self._expected is not None and (is_at_tip or self._is_finished):
            self._gone()
        self._is_at_tip = is_at_tip
        self._complete_to_s = called_s - behind_s
        if is_at_tip:
            self._was_at_tip_s = called_s
        # Keep reading an ended shard until it reports its end, maybe after an empty response.
        return is_at_tip and not self._shards.has_ended(self._shard)


def _record(fields: Mapping[str, Any], position: Position, *, shard: str) -> Record:
    raw = bytes(fields["Data"])
    if raw.startswith(_KPL_MAGIC):
        # Ingest quarantines this as one record, since no frame starts with these bytes.
        _log.warning(
            "aggregated_record",
            shard=shard,
            position=position,
            advice="send frames without the Kinesis Producer Library, which aggregates records",
        )
    arrived = fields.get("ApproximateArrivalTimestamp")
    return Record(position, arrived.timestamp() if arrived is not None else 0.0, raw)
