"""Offsets: how far every partition of a stream was read, as one JSON object that a checkpoint keeps.

    {"stream": "which stream", "places": {"a partition": {"position": "its last record", "ended": false}}}

An offset names records that were really read, since not every stream can say where it ends now. What lies between two
offsets can be read again, the same records in the same order, as long as the stream keeps them.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import ConfigError, PositionGone, Unreachable
from understudy.core.ports import Position, Read, Stream

_log = structlog.get_logger("understudy.ingest")
Offset = dict[str, Any]
_MOST_BYTES = 64 * 1024 * 1024
"""More than a batch ever held of one partition: what is not found among so much is not there any more."""


@dataclass(frozen=True, slots=True)
class Passed:
    """A record that was read, with the position it stands behind: None for the first that the stream still has."""

    partition: str
    after: Position | None
    position: Position
    time_s: float
    raw: bytes


@dataclass(frozen=True, slots=True)
class Place:
    """How far a partition was read, and whether nothing more will come."""

    position: Position | None = None
    ended: bool = False
    complete_to_s: float = field(default=-math.inf, compare=False)
    """By the reader's monotonic clock: all that came in before this was read by now. No part of an offset."""


def offset_of(stream: str, places: Mapping[str, Place]) -> Offset:
    """An offset as JSON; places in the order of their names, so that equal ones are equal texts."""
    fields = {name: {"position": one.position, "ended": one.ended} for name, one in sorted(places.items())}
    return {"stream": stream, "places": fields}


def places_of(offset: Offset, stream: str) -> dict[str, Place]:
    """The places of an offset; ConfigError when it is of another stream."""
    if offset.get("stream") != stream:
        raise ConfigError(
            f"the checkpoint is of {offset.get('stream')}, not of {stream}; name another folder with --checkpoint"
        )
    return {name: Place(one["position"], one["ended"]) for name, one in offset["places"].items()}


def read_on(
    stream: Stream, places: Mapping[str, Place], *, max_bytes: int, clock: Clock | None = None
) -> tuple[list[Passed], dict[str, Place]]:  # fmt: skip
    """What stands behind these places now, each readable partition once, and the places behind that.

    A partition is read only when its parents have ended; those the stream has forgotten are left out.
    """
    clock, partitions = clock or SystemClock(), stream.partitions()
    found: dict[str, Place] = {one.id: places.get(one.id, Place()) for one in partitions}
    share = max(1, max_bytes // max(1, sum(not one.ended for one in found.values())))
    records: list[Passed] = []
    for partition in partitions:
        place = found[partition.id]
        if place.ended or not all(parent not in found or found[parent].ended for parent in partition.parents):
            continue
        asked_s = clock.monotonic()
        passed, read, _ = _read(stream, partition.id, place.position, max_bytes=share)
        records += passed
        found[partition.id] = Place(read.next, read.ended, _complete_to_s(read, asked_s, clock))
    return records, found


def complete_of(before: Mapping[str, Place], after: Mapping[str, Place]) -> dict[str, float]:
    """To when, by the reader's monotonic clock, each partition that may hold more was read between these places.

    One that ended just now is not read, since its children may not have been seen yet.
    """
    had_ended = {name for name, one in before.items() if one.ended}
    return {name: -math.inf if one.ended else one.complete_to_s
            for name, one in after.items() if name not in had_ended}  # fmt: skip


def _complete_to_s(read: Read, asked_s: float, clock: Clock) -> float:
    if not read.records:
        return asked_s
    if read.complete_to_s is not None:
        return read.complete_to_s
    # In this order it is rather too early than too late, however long we are held up in between.
    monotonic_s, now_s = clock.monotonic(), clock.now()
    return monotonic_s - (now_s - read.records[-1].time_s)


def read_between(
    stream: Stream, start: Mapping[str, Place], end: Mapping[str, Place], *, max_bytes: int
) -> Iterator[Passed]:
    """The very records that lie between two places of each partition, parents first."""
    # A partition that the stream has forgotten since holds nothing any more, and is told of in the log.
    known = [one.id for one in stream.partitions()]
    for name in [*(name for name in known if name in end), *(name for name in end if name not in known)]:
        after, last = start.get(name, Place()).position, end[name].position
        if after == last or last is None:
            continue
        if name not in known:
            _log.error("partition_gone", partition=name, position=after, next="what it held is not read again")
            continue
        yield from _up_to(stream, name, after, last, max_bytes=max_bytes)


def first_left_out(
    stream: Stream, places: Mapping[str, Place], stored: Mapping[str, Position | None]
) -> tuple[str, Position] | None:
    """A partition of which nobody would ever store some: it was read to its end, and not all of that was stored."""
    there = {one.id for one in stream.partitions()}
    for name, position in stored.items():
        place = places.get(name, Place())
        if name not in there or place.position is None or place.position == position:
            continue
        try:
            if stream.read(name, place.position, max_bytes=1, wait_s=0.0).records:
                continue  # a batch will hold them, and is looked at
        except PositionGone:
            continue  # so is all before it
        with contextlib.suppress(PositionGone):
            if not stream.read(name, position, max_bytes=1, wait_s=0.0).records:
                continue
        return name, place.position
    return None


def _up_to(
    stream: Stream, partition: str, after: Position | None, last: Position, *, max_bytes: int
) -> Iterable[Passed]:
    found: list[Passed] = []
    size, most = 0, max(max_bytes, _MOST_BYTES)
    # What begins with the first record of a partition may have lost that one without a word.
    may_be_gone = after is None
    while True:
        records, read, was_gone = _read(stream, partition, after, max_bytes=max_bytes)
        may_be_gone |= was_gone or read.ended
        for one in records:
            found.append(one)
            size += len(one.raw)
            if one.position == last:
                return found
        is_over = not read.records or size > most
        if may_be_gone and (read.ended or is_over):
            # All of it was trimmed; what is left comes behind, and comes with the next batch.
            _log.error("batch_gone", partition=partition, position=last, next="the stream no longer holds it")
            return ()
        if is_over:
            raise Unreachable(
                f"partition {partition} gave a record at {last} before, and does not give it now, though nothing was "
                "trimmed; it is asked for again"
            )
        after = read.next


def _read(
    stream: Stream, partition: str, after: Position | None, *, max_bytes: int
) -> tuple[list[Passed], Read, bool]:  # fmt: skip
    """What stands behind a position, or is the first that the stream still has; whether the position was gone."""
    was_gone = False
    try:
        read = stream.read(partition, after, max_bytes=max_bytes, wait_s=0.0)
    except PositionGone as error:
        _log.error("position_gone", partition=partition, position=error.position, earliest=error.earliest)
        earliest = None if error.earliest is None else Position(error.earliest)
        after, read, was_gone = None, stream.read(partition, earliest, max_bytes=max_bytes, wait_s=0.0), True
    before = [after, *(record.position for record in read.records)]
    pairs = zip(before, read.records, strict=False)
    passed = [Passed(partition, behind, one.position, one.time_s, one.raw) for behind, one in pairs]
    return passed, read, was_gone
