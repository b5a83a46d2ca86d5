"""The shards of a Kinesis stream: which there are, parents first, and a reader for each."""

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from understudy.core.errors import Closed, ConfigError, PositionGone, Unreachable
from understudy.core.ports import Partition, Position, Read, Record
from understudy.streams.kinesis_api import KinesisApi, pause_s
from understudy.streams.kinesis_trouble import CallFailed

_log = structlog.get_logger("understudy.streams.kinesis")
_SAFE_S = 23 * 3600.0
"""No stream forgets what is younger than a day: whoever was at the tip this long ago has missed nothing."""
_KPL_MAGIC = b"\xf3\x89\x9a\xc2"
_NO_SUCH_PLACE = ("InvalidArgumentException", "ResourceNotFoundException")


class ShardList:
    """Which shards there are; asked again when the answer is old, or somebody saw that it is wrong."""

    def __init__(self, api: KinesisApi) -> None:
        self._api = api
        self._lock = threading.Lock()
        self._shards: dict[str, tuple[str, ...]] = {}
        self._ended: set[str] = set()
        self._until_s = 0.0
        self._wanted = object()
        """Another one when the list is known to be wrong; a list that was asked for before that is wrong, too."""
        self._known: object = None

    def shards(self) -> Mapping[str, tuple[str, ...]]:
        """Shard ids with the ids of their parents that still exist; parents first, always in the same order."""
        with self._lock:
            now_s, wanted = self._api.clock.monotonic(), self._wanted
            if self._known is not wanted or now_s >= self._until_s:
                found = self._fetch()
                self._shards, self._known = parents_first(found), wanted
                self._ended = {
                    str(shard["ShardId"]) for shard in found if shard["SequenceNumberRange"].get("EndingSequenceNumber")
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
        """A shard took a record; one that nobody has heard of means that the stream was resharded."""
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
    """Shard ids with their parents, no child before a parent; parents that the stream has forgotten are left out."""
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


def partition_id(prefix: str, shard: str) -> str:
    """A shard's name that no other stream's shard has, since its positions mean nothing in a stream made anew."""
    return f"{prefix}/{shard}"


def partitions(prefix: str, shards: Mapping[str, tuple[str, ...]]) -> list[Partition]:
    """The shards as the Stream port shows them."""
    return [
        Partition(partition_id(prefix, name), tuple(partition_id(prefix, parent) for parent in parents))
        for name, parents in shards.items()
    ]


class ShardReader:
    """Reads one shard, never faster than it may be read; keeps its iterator while positions follow one another."""

    def __init__(self, api: KinesisApi, shard: str, *, shards: ShardList) -> None:
        self._api, self._shard, self._shards = api, shard, shards
        self._lock = threading.Lock()
        self._due_s = 0.0
        self._failures = 0
        self._failing_since_s = 0.0
        self._seek(None)

    def read(self, after: Position | None, *, max_bytes: int, wait_s: float) -> Read:
        """What stands behind a position; it may take a moment longer than `wait_s`, as the shard's pace demands.

        Nothing comes only where there is nothing: Unreachable when `retry_s` were not enough to know.
        """
        clock, closed, config = self._api.clock, self._api.closed, self._api.config
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
                    f"shard {self._shard} of Kinesis stream {config.stream!r} at {config.place} gave none of its "
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
        return Read(records, self._after, self._is_finished and not self._held, self._complete_to_s - later_s)

    def _fetch(self) -> bool:
        """One call for records; whether it showed that there are no more of them now, and more may come."""
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
        """Where to go on, None when the shard is gone; a place from before is looked at again, to see it is there."""
        if self._newest is None:
            return self._ask_iterator("TRIM_HORIZON")
        seen_s = self._was_at_tip_s
        if seen_s is not None and self._api.clock.monotonic() - seen_s < _SAFE_S:
            # Nothing behind our place can have been trimmed, though the record that marks it may have been.
            return self._ask_iterator("AFTER_SEQUENCE_NUMBER", otherwise=lambda: self._ask_iterator("TRIM_HORIZON"))
        self._expected = self._newest
        return self._ask_iterator("AT_SEQUENCE_NUMBER", otherwise=self._gone)

    def _ask_iterator(self, kind: str, *, otherwise: Callable[[], str | None] | None = None) -> str | None:
        place = {} if kind == "TRIM_HORIZON" else {"StartingSequenceNumber": self._newest}
        try:
            answer = self._api.call(
                "get_shard_iterator", StreamName=self._api.config.stream, ShardId=self._shard, ShardIteratorType=kind,
                **place,
            )  # fmt: skip
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
        """Note a failed call and wait before the next; the error for people when that has lasted."""
        clock, config = self._api.clock, self._api.config
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
        self._is_at_tip, self._complete_to_s = is_at_tip, asked_s - behind_s
        if is_at_tip:
            self._was_at_tip_s = asked_s
        # An ended shard says so itself, though maybe not with the first answer.
        return is_at_tip and not self._shards.has_ended(self._shard)


def _record(found: Mapping[str, Any], position: Position, *, shard: str) -> Record:
    raw = bytes(found["Data"])
    if raw.startswith(_KPL_MAGIC):
        # Goes to quarantine as one record: no frame starts like this.
        _log.warning("aggregated_record", shard=shard, position=position, advice="send frames without the KPL")
    arrived = found.get("ApproximateArrivalTimestamp")
    return Record(position, arrived.timestamp() if arrived is not None else 0.0, raw)
