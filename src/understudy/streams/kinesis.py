"""A stream in Amazon Kinesis Data Streams, or in a server that speaks its API.

A frame is a record, its session the partition key, a shard a partition, a sequence number a
position. Positions are kept by the store, not by Kinesis; no table in DynamoDB is needed.
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
_SAFE_S = 23 * 3600.0
"""No stream forgets what is younger than a day: whoever was at the tip this long ago has missed
nothing."""
_KPL_MAGIC = b"\xf3\x89\x9a\xc2"
_NO_SUCH_PLACE = ("InvalidArgumentException", "ResourceNotFoundException")

_Put = tuple[str, bytes]
"""A record that is sent: partition key and data."""


class KinesisStream:
    """Frames in Kinesis; any number of processes append, each shard is read by whoever holds its
    claim."""

    def __init__(self, api: KinesisApi) -> None:
        self._api = api
        self._config = api.config
        self._clock = api.clock
        self._closed = api.closed
        created: datetime | None = _once_active(api).get("StreamCreationTimestamp")
        api.is_starting = False
        # Positions mean nothing in a stream made anew, so its partitions have other names.
        self._prefix = (
            f"{api.config.stream}@{int(created.timestamp()) if created is not None else 0}"
        )
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
            for number, outcome in zip(
                numbers, self._keep_trying([puts[n] for n in numbers]), strict=True
            ):
                outcomes[number] = outcome
        return outcomes

    def _keep_trying(self, puts: Sequence[_Put]) -> Sequence[Ack]:
        """Put what fits into one call, and what failed of it again: the same bytes, for
        `append_s` at most."""
        outcomes = [Ack(True)] * len(puts)
        left = list(range(len(puts)))
        give_up_s = self._clock.monotonic() + self._config.append_s
        attempt = 0
        while left:
            failures = self._group.submit([puts[number] for number in left])
            failed = [
                (number, one) for number, one in zip(left, failures, strict=True) if one is not None
            ]
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
            failures = [CallFailed("Unreachable", "the answer does not name every record")] * len(
                records
            )
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
                f"{partition!r} is no partition of Kinesis stream {self._config.stream!r}, whose "
                "partitions begin with "
                f"{self._prefix}/"
            )
        with self._lock:
            if shard not in self._readers:
                self._readers[shard] = ShardReader(self._api, shard, shards=self._shards)
            return self._readers[shard]

    def close(self) -> None:
        """Let a running append finish; reads that wait return."""
        with self._group.alone:
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
            part = []
            total = 0
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


def create_kinesis(
    location: Location, *, shards: int | None = None, clock: Clock | None = None
) -> int:
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
        raise ConfigError(
            f"Kinesis stream {config.stream!r} at {config.place} is there with {there} open "
            f"shards, and {shards} were "
            "asked for; name no number to use it as it is, change it with `aws kinesis "
            "update-shard-count "
            f"--stream-name {config.stream} --target-shard-count {shards} --scaling-type "
            "UNIFORM_SCALING`, or take "
            "another name"
        )
    return there


def _create(api: KinesisApi, shards: int) -> Mapping[str, Any]:
    try:
        return api.call("create_stream", StreamName=api.config.stream, ShardCount=shards)
    except CallFailed as error:
        if error.code == "ResourceInUseException":  # somebody has made it
            return {}
        if error.code == "LimitExceededException" and "shard" in error.detail:
            raise ConfigError(
                f"Kinesis at {api.config.place} makes no stream of {shards} shards "
                f"({error.detail}); ask for fewer, or "
                "have the limit of the account raised"
            ) from None
        raise


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
                f"Kinesis stream {api.config.stream!r} at {api.config.place} is {status}; wait "
                "until it is ACTIVE and "
                "start again"
            )
        api.clock.wait(api.closed, _LOOK_S)


def _summary(api: KinesisApi) -> Mapping[str, Any]:
    answer = api.call("describe_stream_summary", StreamName=api.config.stream)
    found: Mapping[str, Any] = answer.get("StreamDescriptionSummary", {})
    if "StreamStatus" not in found:
        raise CallFailed("NotKinesis", "its answer says nothing about the stream")
    return found


# --- Reading --------------------------------------------------------------------------------------


class ShardList:
    """Which shards there are; asked again when the answer is old, or somebody saw that it is
    wrong."""

    def __init__(self, api: KinesisApi) -> None:
        self._api = api
        self._lock = threading.Lock()
        self._shards: dict[str, tuple[str, ...]] = {}
        self._ended: set[str] = set()
        self._until_s = 0.0
        self._wanted = object()
        """Another one when the list is known to be wrong; a list that was asked for before that
        is wrong, too."""
        self._known: object = None

    def shards(self) -> Mapping[str, tuple[str, ...]]:
        """Shard ids with the ids of their parents that still exist; parents first, always in the
        same order."""
        with self._lock:
            now_s = self._api.clock.monotonic()
            wanted = self._wanted
            if self._known is not wanted or now_s >= self._until_s:
                found = self._fetch()
                self._shards = parents_first(found)
                self._known = wanted
                self._ended = {
                    str(shard["ShardId"])
                    for shard in found
                    if shard["SequenceNumberRange"].get("EndingSequenceNumber")
                }
                self._until_s = now_s + self._api.config.list_s
            return self._shards

    def renew(self) -> None:
        """Ask again next time, also when somebody is asking right now."""
        self._wanted = object()

    def has_ended(self, shard: str) -> bool:
        """Whether a shard takes no more records, as far as the list goes."""
        self.shards()
        return shard in self._ended

    def saw(self, shard: str) -> None:
        """A shard took a record; one that nobody has heard of means that the stream was
        resharded."""
        if self._shards and shard not in self._shards:
            self.renew()

    def _fetch(self) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = []
        page: Mapping[str, Any] = {"StreamName": self._api.config.stream}
        while True:
            answer = self._api.patient("list_shards", **page)
            found += answer["Shards"]
            if not answer.get("NextToken"):
                return found
            page = {"NextToken": answer["NextToken"]}


def parents_first(shards: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Shard ids with their parents, no child before a parent; parents that the stream has
    forgotten are left out."""
    names = sorted(str(shard["ShardId"]) for shard in shards)
    known = set(names)
    named = {
        str(shard["ShardId"]): tuple(
            str(parent)
            for parent in (shard.get("ParentShardId"), shard.get("AdjacentParentShardId"))
            if parent in known and parent != shard["ShardId"]
        )
        for shard in shards
    }
    ordered: dict[str, tuple[str, ...]] = {}
    waiting = names
    while waiting:
        ready = [name for name in waiting if all(parent in ordered for parent in named[name])]
        # Parents in a circle exist in no stream; whoever claims so must not hang us.
        ordered |= {name: named[name] for name in ready or waiting}
        waiting = [name for name in waiting if name not in ordered]
    return ordered


class ShardReader:
    """Reads one shard, never faster than it may be read; keeps its iterator while positions
    follow one another."""

    def __init__(self, api: KinesisApi, shard: str, *, shards: ShardList) -> None:
        self._api = api
        self._shard = shard
        self._shards = shards
        self._lock = threading.Lock()
        self._due_s = 0.0
        self._failures = 0
        self._failing_since_s = 0.0
        self._seek(None)

    def read(self, after: Position | None, *, max_bytes: int, wait_s: float) -> Read:
        """What stands behind a position; it may take a moment longer than `wait_s`, as the shard's
        pace demands.

        Nothing comes only where there is nothing: Unreachable when `retry_s` were not enough to
        know.
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
                    f"shard {self._shard} of Kinesis stream {config.stream!r} at {config.place} "
                    "gave none of its "
                    f"records for {config.retry_s:g} s; let fewer read it, or wait"
                )
            return self._hand_out(max_bytes)

    def _seek(self, after: Position | None) -> None:
        if after is not None and not (after.isascii() and after.isdigit()):
            raise ConfigError(f"{after!r} is no position of a Kinesis stream")
        self._after = self._newest = after
        self._held: deque[Record] = deque()
        self._iterator: str | None = None
        self._expected: Position | None = None
        self._is_finished = self._is_at_tip = False
        self._was_at_tip_s: float | None = None
        self._complete_to_s = -math.inf
        """When everything had come in that the last answer and those before it gave."""

    def _hand_out(self, max_bytes: int) -> Read:
        records: list[Record] = []
        size = 0
        while self._held:
            size += len(self._held[0].raw)
            if records and size > max_bytes:
                break
            records.append(self._held.popleft())
        if records:
            self._after = records[-1].position
        # By the server's clock alone: how much later came what is held back.
        later_s = max(0.0, self._held[-1].time_s - records[-1].time_s) if self._held else 0.0
        return Read(
            records,
            self._after,
            self._is_finished and not self._held,
            self._complete_to_s - later_s,
        )

    def _fetch(self) -> bool:
        """One call for records; whether it showed that there are no more of them now, and more
        may come."""
        clock = self._api.clock
        if self._due_s > clock.monotonic():
            clock.wait(self._api.closed, self._due_s - clock.monotonic())
            if self._api.closed.is_set():
                return True
        asked_s = clock.monotonic()
        self._due_s = asked_s + self._api.config.poll_s
        try:
            if self._iterator is None:
                self._iterator = self._new_iterator()
                if self._is_finished:
                    return True
            answer = self._api.call("get_records", ShardIterator=self._iterator)
        except CallFailed as error:
            self._fail(error)
            return False
        self._failures = 0
        return self._take(answer, asked_s)

    def _new_iterator(self) -> str | None:
        """Where to go on, None when the shard is gone; a place from before is looked at again,
        to see it is there."""
        if self._newest is None:
            return self._ask_iterator("TRIM_HORIZON")
        seen_s = self._was_at_tip_s
        if seen_s is not None and self._api.clock.monotonic() - seen_s < _SAFE_S:
            # Nothing behind our place can have been trimmed, though the record that marks it may
            # have been.
            return self._ask_iterator(
                "AFTER_SEQUENCE_NUMBER", otherwise=lambda: self._ask_iterator("TRIM_HORIZON")
            )
        self._expected = self._newest
        return self._ask_iterator("AT_SEQUENCE_NUMBER", otherwise=self._gone)

    def _ask_iterator(
        self, kind: str, *, otherwise: Callable[[], str | None] | None = None
    ) -> str | None:
        place = {} if kind == "TRIM_HORIZON" else {"StartingSequenceNumber": self._newest}
        try:
            answer = self._api.call(
                "get_shard_iterator",
                StreamName=self._api.config.stream,
                ShardId=self._shard,
                ShardIteratorType=kind,
                **place,
            )
            return str(answer["ShardIterator"])
        except CallFailed as error:
            if error.code not in _NO_SUCH_PLACE:
                raise
            self._shards.renew()
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
        """Note a failed call and wait before the next; the error for people when that has
        lasted."""
        clock = self._api.clock
        config = self._api.config
        if error.code == "ExpiredIteratorException":
            self._iterator = None
            return
        if not error.retry_helps and error.code != "InvalidArgumentException":
            raise error.for_people(config) from error
        if not self._failures:
            self._failing_since_s = clock.monotonic()
            _log.warning("read_failed", shard=self._shard, stream=config.stream, error=str(error))
        self._failures += 1
        self._due_s = clock.monotonic() + config.poll_s + pause_s(self._failures, self._api.rng)
        if not error.is_throttle:
            # The iterator may be what the server cannot read.
            self._iterator = None
        if clock.monotonic() - self._failing_since_s >= config.retry_s:
            self._failures = 0
            raise error.for_people(config) from error

    def _take(self, answer: Mapping[str, Any], asked_s: float) -> bool:
        self._iterator = answer.get("NextShardIterator") or None
        self._is_finished = self._iterator is None
        if self._is_finished:
            # Its children are there by now.
            self._shards.renew()
        behind_s = (answer.get("MillisBehindLatest") or 0) / 1000
        is_at_tip = not behind_s
        for found in answer["Records"]:
            position = Position(str(found["SequenceNumber"]))
            if self._expected is not None:
                if int(position) > int(self._expected):
                    self._gone()
                if position == self._expected:
                    self._expected = None
            # What comes twice stands at a place that was passed.
            if self._newest is None or int(position) > int(self._newest):
                self._held.append(_record(found, position, shard=self._shard))
                self._newest = position
        if self._expected is not None and (is_at_tip or self._is_finished):
            self._gone()
        self._is_at_tip = is_at_tip
        self._complete_to_s = asked_s - behind_s
        if is_at_tip:
            self._was_at_tip_s = asked_s
        # An ended shard says so itself, though maybe not with the first answer.
        return is_at_tip and not self._shards.has_ended(self._shard)


def _record(found: Mapping[str, Any], position: Position, *, shard: str) -> Record:
    raw = bytes(found["Data"])
    if raw.startswith(_KPL_MAGIC):
        # Goes to quarantine as one record: no frame starts like this.
        _log.warning(
            "aggregated_record",
            shard=shard,
            position=position,
            advice="send frames without the KPL",
        )
    arrived = found.get("ApproximateArrivalTimestamp")
    return Record(position, arrived.timestamp() if arrived is not None else 0.0, raw)
