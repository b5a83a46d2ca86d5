"""The tail: the valid commits of all partitions, merged so that each arrival occurs once."""

import json
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from understudy.core.clock import Clock
from understudy.core.errors import ConfigError, Refused
from understudy.experience.chunk import chunk_of
from understudy.experience.frame import Frame, FrameKind, decode_frame
from understudy.experience.session import tombstone_of
from understudy.ports import TAIL_BYTES, Cursor, Forgotten, Gone, Stored, Tail
from understudy.stores.cassandra.commits import (
    ADMIN,
    COMMIT_BUCKET,
    Arrived,
    Commit,
    Event,
    FrameKey,
    commit_of,
    commits_after,
    record_ttl_s,
)
from understudy.stores.cassandra.lookup import AdminJournal
from understudy.stores.cassandra.partitions import Partitions
from understudy.stores.cassandra.wire import Wire

POLL_S = 0.05
LOOK_S = 60.0
"""How often the partitions are read for commits that a writer did not register before it died."""
SLACK_S = 3600.0
"""Tolerated clock difference: data that is missing up to this long before its expiry counts as
expired, not as damaged."""
_AT_ONCE = 16
_READ_BYTES = 32 * 1024 * 1024
"""A page ends with the commit that brings its frames to this size."""


@dataclass(frozen=True, slots=True)
class TailPosition:
    """A position in one partition: the last commit read completely, and the index in the next."""

    commit_no: int = 0
    index: int = 0
    arrivals: int = 0
    """Arrivals of the partition that were returned, or skipped because they expired."""


@dataclass(slots=True)
class TailCursor:
    """The position of a tail in all partitions."""

    last_arrival_no: int = 0
    """The last arrival number of this tail."""
    at: dict[str, TailPosition] = field(default_factory=dict)

    def text(self) -> Cursor:
        fields = {
            name: [place.commit_no, place.index, place.arrivals]
            for name, place in sorted(self.at.items())
        }
        return Cursor(json.dumps([self.last_arrival_no, fields], separators=(",", ":")))

    def copy(self) -> "TailCursor":
        return TailCursor(self.last_arrival_no, dict(self.at))


def read_cursor(cursor: Cursor | None) -> TailCursor:
    """Parse a cursor; ConfigError when it is not a cursor of a Cassandra store."""
    if cursor is None:
        return TailCursor()
    try:
        last_arrival_no, fields = json.loads(cursor)
        return TailCursor(
            int(last_arrival_no),
            {name: TailPosition(*map(int, place)) for name, place in fields.items()},
        )
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(
            f"{cursor[:40]!r} is not a cursor of a Cassandra store; pass one that tail() returned, "
            "or None to start at the beginning"
        ) from None


@dataclass(slots=True)
class _ReadAhead:
    """Commits of one partition that were read but not returned yet, and its last commit number."""

    head: int
    commits: list[Commit] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PendingItem:
    """An item whose frame is not read yet: an arrival, an event, or arrivals that were lost."""

    commit: Commit | None
    arrived: Arrived | None = None
    n_lost: int = 0


@dataclass(slots=True, kw_only=True)
class Tailer:
    """Reads pages of the tail; thread-safe."""

    wire: Wire
    partitions: Partitions
    journal: AdminJournal
    clock: Clock
    has_ttl: bool
    """Whether the store has, or ever had, a time to live for chunks."""
    _heads: dict[str, int] = field(default_factory=dict)
    _refreshed_s: float = float("-inf")
    _ahead: dict[str, list[Commit]] = field(default_factory=dict)
    """Commits that did not fit into the last page; safe to cache, since commits never change."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def tail(self, cursor: Cursor | None, *, max_items: int, wait_s: float) -> Tail:
        """The next items after a cursor; empty when none arrive within `wait_s`."""
        places = read_cursor(cursor)
        deadline = time.monotonic() + wait_s
        is_cut = False
        while True:
            pending, after = self._next(places, max_items)
            if pending:
                items = self._items(places.last_arrival_no, pending)
                if len(items) == len(pending):
                    is_cut |= _frame_bytes(pending) >= _READ_BYTES
                    return Tail(items, after.text(), is_cut)
                # Read again for the cursor after fewer items.
                is_cut = True
                max_items = len(items)
                continue
            # Commits without an item, such as those with only quarantine, advance the cursor too.
            places = after
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return Tail([], places.text())
            self.wire.wait(min(POLL_S, remaining_s))

    # --- heads ----------------------------------------------------------------------------------

    def heads(self, *, look: bool = False) -> dict[str, int]:
        """The last known commit number of every partition; with `look`, the actual last one."""
        rows = self.wire.scan(
            self.wire.bind("SELECT name, number FROM registry WHERE kind = 'head'")
        )
        heads = {row.name: row.number for row in rows}
        self.journal.expired_before_s = max(self.journal.expired_before_s, heads.pop("~expired", 0))
        if look or time.monotonic() - self._refreshed_s > LOOK_S:
            self._refreshed_s = time.monotonic()
            for name, row in self.partitions.rows({*heads, ADMIN}).items():
                heads[name] = max(heads.get(name, 0), row.commit_no)
        for heads_by_partition in (self._heads, self.partitions.own_heads()):
            for name, number in heads_by_partition.items():
                heads[name] = max(heads.get(name, 0), number)
        self._heads = heads
        return dict(heads)

    # --- merging --------------------------------------------------------------------------------

    def _next(self, places: TailCursor, max_items: int) -> tuple[list[PendingItem], TailCursor]:
        """The next items after a cursor, by the time of their commits, and the new cursor."""
        heads = self.heads()
        places = places.copy()
        sources = self._sources(heads, places)
        pending: list[PendingItem] = []
        size_bytes = 0
        while len(pending) < max_items and size_bytes < _READ_BYTES:
            self._fill(sources, places)
            ready = [
                (source.commits[0].at_s, name == ADMIN, name)
                for name, source in sources.items()
                if source.commits
            ]
            if not ready:
                break
            name = min(ready)[2]
            events = sources[name].commits[0].events
            if name != ADMIN and events > places.at.get(ADMIN, TailPosition()).commit_no:
                # Admin commits that this commit takes into account are returned before it.
                if ADMIN not in sources:
                    sources[ADMIN] = _ReadAhead(self.heads(look=True).get(ADMIN, 0))
                    continue
                name = ADMIN
                if not sources[ADMIN].commits:
                    break
            shown = len(pending)
            places.at[name] = self._show(
                sources[name], places.at.get(name, TailPosition()), pending, max_items
            )
            size_bytes += _frame_bytes(pending[shown:])
        with self._lock:
            self._ahead.update(
                {name: source.commits for name, source in sources.items() if source.commits}
            )
        self.journal.read_to(self._heads.get(ADMIN, 0))
        places.last_arrival_no += sum(item.n_lost or 1 for item in pending)
        return pending, places

    def _sources(self, heads: Mapping[str, int], places: TailCursor) -> dict[str, _ReadAhead]:
        """The partitions with commits after a cursor, each with the commits read in advance."""
        sources: dict[str, _ReadAhead] = {}
        for name, head in heads.items():
            at = places.at.get(name, TailPosition()).commit_no
            if head > at:
                with self._lock:
                    ahead = self._ahead.pop(name, [])
                sources[name] = _ReadAhead(
                    head, ahead if ahead and ahead[0].number == at + 1 else []
                )
        return sources

    def _fill(self, sources: Mapping[str, _ReadAhead], places: TailCursor) -> None:
        """Read ahead in every partition without commits in memory."""
        empty = [
            (name, source)
            for name, source in sources.items()
            if not source.commits and places.at.get(name, TailPosition()).commit_no < source.head
        ]
        results = self.wire.all(
            [
                commits_after(
                    self.wire, name, places.at.get(name, TailPosition()).commit_no, source.head
                )
                for name, source in empty
            ]
        )
        for (name, source), rows in zip(empty, results, strict=True):
            source.commits = [commit_of(row) for row in rows]
            if not rows:
                places.at[name] = self._skip(name, source, places.at.get(name, TailPosition()))

    def _skip(self, name: str, source: _ReadAhead, place: TailPosition) -> TailPosition:
        """The position before the next existing commit, after a bucket of expired commits."""
        bucket = (place.commit_no + 1) >> COMMIT_BUCKET
        for later in range(bucket + 1, (source.head >> COMMIT_BUCKET) + 1):
            rows = self.wire.all(
                [commits_after(self.wire, name, (later << COMMIT_BUCKET) - 1, source.head)]
            )[0]
            if rows:
                source.commits = [commit_of(row) for row in rows]
                return TailPosition(source.commits[0].number - 1, 0, place.arrivals)
        return TailPosition(source.head, 0, place.arrivals)

    def _show(
        self, source: _ReadAhead, place: TailPosition, pending: list[PendingItem], max_items: int
    ) -> TailPosition:
        """Add as much of a partition's next commit as fits the page; return the new position."""
        commit = source.commits[0]
        n_lost = commit.before - (place.arrivals - place.index)
        if n_lost > 0:
            pending.append(PendingItem(None, None, n_lost))
            place = TailPosition(commit.number - 1, 0, commit.before)
        items = [PendingItem(commit, arrived) for arrived in commit.facts.stored]
        if commit.facts.event is not None:
            items.append(PendingItem(commit))
        fits = items[place.index : place.index + max_items - len(pending)]
        pending += fits
        index = place.index + len(fits)
        if index < len(items):
            return TailPosition(commit.number - 1, index, place.arrivals + len(fits))
        source.commits.pop(0)
        return TailPosition(commit.number, 0, place.arrivals + len(fits))

    # --- items ----------------------------------------------------------------------------------

    def _items(self, before: int, pending: Sequence[PendingItem]) -> list[Stored | Forgotten]:
        """The items of a page; fewer than are pending if these have more than TAIL_BYTES."""
        readable = [
            item.arrived
            for item in pending
            if item.commit
            and item.arrived
            and not self.journal.arrival_removal_reason(item.arrived, item.commit.events)
        ]
        frames = self.frames(readable)
        if any(arrived.frame_key not in frames for arrived in readable):
            # Removed while this page was read: refresh, so that the reason is known.
            self.journal.refresh()
            self.heads()
        items: list[Stored | Forgotten] = []
        number = before
        decoded_bytes = 0
        for pending_item in pending:
            item = self._item(number + 1, pending_item, frames)
            items.append(item)
            number += pending_item.n_lost or 1
            if isinstance(item, Stored) and item.chunk is not None:
                decoded_bytes += item.chunk.size_bytes
                if decoded_bytes >= TAIL_BYTES:
                    break
        return items

    def _item(
        self, number: int, item: PendingItem, frames: Mapping[FrameKey, Frame]
    ) -> Stored | Forgotten:
        if item.commit is None:
            return Forgotten(
                number, number + item.n_lost - 1, "expired" if self.has_ttl else "damaged"
            )
        if item.arrived is None:
            assert item.commit.facts.event is not None
            return _event(number, item.commit.facts.event)
        arrived = item.arrived
        frame = frames.get(arrived.frame_key)
        reason = self.journal.arrival_removal_reason(arrived, item.commit.events)
        if reason is None and frame is None:
            reason = self.lost(item.commit)
        if reason is None and frame is not None:
            try:
                return Stored(
                    number, frame, chunk_of(frame) if frame.kind is FrameKind.DATA else None
                )
            except Refused:
                reason = "damaged"
        if reason == "forgotten":
            return Forgotten(number, number, reason)  # without the ids of an erased player
        chunks = ((uuid.UUID(bytes=arrived.session), arrived.chunk_no),)
        return Forgotten(number, number, reason or "damaged", arrived.player, chunks)

    def lost(self, commit: Commit) -> Gone:
        """Why a frame of this commit is missing although no event removed it."""
        return "expired" if self.is_expired(commit.at_s, commit.keep_s) else "damaged"

    def may_have_expired(self, before: Commit | None) -> bool:
        """Whether commits after this one, or from the start if None, may have expired."""
        if before is None or not before.keep_s:
            return self.has_ttl
        return self.is_expired(before.at_s, record_ttl_s(before.keep_s))

    def is_expired(self, at_s: float, keep_s: int) -> bool:
        """Whether data written at a time with this time to live (0: forever) may have expired."""
        return bool(keep_s) and at_s + keep_s < self.clock.now() + SLACK_S

    def frames(self, arrivals: Iterable[Arrived]) -> dict[FrameKey, Frame]:
        """The existing, undamaged frames of these arrivals."""
        crcs = {arrived.frame_key: arrived.crc for arrived in arrivals}
        by_bucket: dict[tuple[uuid.UUID, int], list[tuple[int, bytes]]] = {}
        for session, bucket, chunk_no, digest in crcs:
            by_bucket.setdefault((session, bucket), []).append((chunk_no, digest))
        cql = (
            "SELECT session, bucket, chunk_no, digest, frame FROM chunks "
            "WHERE session = ? AND bucket = ? AND (chunk_no, digest) IN ?"
        )
        statements = [
            self.wire.bind(cql, session, bucket, keys[at : at + _AT_ONCE])
            for (session, bucket), keys in by_bucket.items()
            for at in range(0, len(keys), _AT_ONCE)
        ]
        frames: dict[FrameKey, Frame] = {}
        for row in (row for rows in self.wire.all(statements) for row in rows):
            key = (row.session, row.bucket, row.chunk_no, row.digest)
            with suppress(Refused):
                frame = decode_frame(row.frame or b"")
                if frame.body_crc == crcs[key]:
                    frames[key] = frame
        return frames


def _frame_bytes(pending: Iterable[PendingItem]) -> int:
    return sum(item.arrived.length for item in pending if item.arrived is not None)


def _event(number: int, event: Event) -> Forgotten:
    reason: Gone = "forgotten" if event.kind == "forget" else "quarantined"
    chunks = tuple((uuid.UUID(bytes=session), chunk_no) for session, chunk_no, _ in event.chunks)
    player = tombstone_of(event.player) if event.player else None
    return Forgotten(number, number, reason, player, chunks, event.at_s)
