"""The tail: commits of all partitions merged, each arrival once. It never passes what is
committed."""

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
from understudy.ports import Cursor, Forgotten, Gone, Stored, Tail
from understudy.stores.cassandra.commits import (
    ADMIN,
    COMMIT_BUCKET,
    Arrived,
    Commit,
    Event,
    FrameKey,
    commit_of,
    commits_after,
    lasting_s,
)
from understudy.stores.cassandra.lookup import AdminJournal
from understudy.stores.cassandra.partitions import Partitions
from understudy.stores.cassandra.wire import Wire

POLL_S = 0.05
LOOK_S = 60.0
"""How often partitions themselves are asked, for heads that a writer which died could not
register."""
SLACK_S = 3600.0
"""How much clocks may differ before what ran out looks like what was lost."""
_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class TailPosition:
    """A place in one partition: a commit that was shown whole, and how much of the one behind
    it."""

    commit_no: int = 0
    index: int = 0
    arrivals: int = 0
    """Arrivals of the partition that were shown, or passed over because nothing is left of them."""


@dataclass(slots=True)
class Places:
    """Where a tail is."""

    shown: int = 0
    """The last arrival number along this tail."""
    at: dict[str, TailPosition] = field(default_factory=dict)

    def text(self) -> Cursor:
        fields = {
            name: [place.commit_no, place.index, place.arrivals]
            for name, place in sorted(self.at.items())
        }
        return Cursor(json.dumps([self.shown, fields], separators=(",", ":")))

    def copy(self) -> "Places":
        return Places(self.shown, dict(self.at))


def read_cursor(cursor: Cursor | None) -> Places:
    """The places that a cursor stands for; ConfigError when it is none of this store."""
    if cursor is None:
        return Places()
    try:
        shown, fields = json.loads(cursor)
        return Places(
            int(shown), {name: TailPosition(*map(int, place)) for name, place in fields.items()}
        )
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(
            f"{cursor[:40]!r} is no cursor of a Cassandra store; begin without one"
        ) from None


@dataclass(slots=True)
class _ReadAhead:
    """What is at hand of one partition behind a place."""

    head: int
    commits: list[Commit] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Shown:
    """One item to be: an arrival or an event of a commit, or arrivals of which nothing is left."""

    commit: Commit | None
    arrived: Arrived | None = None
    n_lost: int = 0


@dataclass(slots=True, kw_only=True)
class Tailer:
    """Reads pages of the tail; many threads may ask at once."""

    wire: Wire
    partitions: Partitions
    journal: AdminJournal
    clock: Clock
    has_ttl: bool
    """Whether the store has let anything run out by itself, now or before."""
    _heads: dict[str, int] = field(default_factory=dict)
    _looked_s: float = float("-inf")
    _ahead: dict[str, list[Commit]] = field(default_factory=dict)
    """Commits that were read and did not fit the last page; they never change."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def tail(self, cursor: Cursor | None, *, max_items: int, wait_s: float) -> Tail:
        """The next items behind a cursor; empty when nothing came within `wait_s`."""
        places = read_cursor(cursor)
        deadline = time.monotonic() + wait_s
        while True:
            shown, after = self._next(places, max_items)
            if shown:
                return Tail(self._items(places.shown, shown), after.text())
            # Commits without an item (positions, quarantine) are passed all the same.
            places = after
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return Tail([], places.text())
            self.wire.wait(min(POLL_S, left_s))

    # --- heads ----------------------------------------------------------------------------------

    def heads(self, *, look: bool = False) -> dict[str, int]:
        """How far every partition may be read; with `look`, exactly as far as it is committed
        now."""
        rows = self.wire.scan(
            self.wire.bind("SELECT name, number FROM registry WHERE kind = 'head'")
        )
        found = {row.name: row.number for row in rows}
        self.journal.expired_before_s = max(self.journal.expired_before_s, found.pop("~expired", 0))
        if look or time.monotonic() - self._looked_s > LOOK_S:
            self._looked_s = time.monotonic()
            for name, row in self.partitions.rows({*found, ADMIN}).items():
                found[name] = max(found.get(name, 0), row.commit_no)
        for heads in (self._heads, self.partitions.own_heads()):
            for name, number in heads.items():
                found[name] = max(found.get(name, 0), number)
        self._heads = found
        return dict(found)

    # --- merging --------------------------------------------------------------------------------

    def _next(self, places: Places, max_items: int) -> tuple[list[Shown], Places]:
        """What comes behind these places, in the order of arrival as far as that is known."""
        heads = self.heads()
        places = places.copy()
        sources = self._begun(heads, places)
        shown: list[Shown] = []
        while len(shown) < max_items:
            self._fill(sources, places)
            ready = [
                (source.commits[0].at_s, name == ADMIN, name)
                for name, source in sources.items()
                if source.commits
            ]
            if not ready:
                break
            name = min(ready)[2]
            wanted = sources[name].commits[0].events
            if name != ADMIN and wanted > places.at.get(ADMIN, TailPosition()).commit_no:
                # What was decided before this commit is shown before it.
                if ADMIN not in sources:
                    sources[ADMIN] = _ReadAhead(self.heads(look=True).get(ADMIN, 0))
                    continue
                name = ADMIN
                if not sources[ADMIN].commits:
                    break
            places.at[name] = self._show(
                sources[name], places.at.get(name, TailPosition()), shown, max_items
            )
        with self._lock:
            self._ahead.update(
                {name: source.commits for name, source in sources.items() if source.commits}
            )
        self.journal.read_to(self._heads.get(ADMIN, 0))
        places.shown += sum(one.n_lost or 1 for one in shown)
        return shown, places

    def _begun(self, heads: Mapping[str, int], places: Places) -> dict[str, _ReadAhead]:
        """Partitions with something behind these places, and what is at hand of it."""
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

    def _fill(self, sources: Mapping[str, _ReadAhead], places: Places) -> None:
        """Read ahead in every partition of which nothing is at hand."""
        empty = [
            (name, source)
            for name, source in sources.items()
            if not source.commits and places.at.get(name, TailPosition()).commit_no < source.head
        ]
        found = self.wire.all(
            [
                commits_after(
                    self.wire, name, places.at.get(name, TailPosition()).commit_no, source.head
                )
                for name, source in empty
            ]
        )
        for (name, source), rows in zip(empty, found, strict=True):
            source.commits = [commit_of(row) for row in rows]
            if not rows:
                places.at[name] = self._skip(name, source, places.at.get(name, TailPosition()))

    def _skip(self, name: str, source: _ReadAhead, place: TailPosition) -> TailPosition:
        """Commits of a whole bucket have run out: go on at the next one that is there."""
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
        self, source: _ReadAhead, place: TailPosition, shown: list[Shown], max_items: int
    ) -> TailPosition:
        """Add a partition's first commit to the page, as much of it as fits; the place behind
        it."""
        commit = source.commits[0]
        n_lost = commit.before - (place.arrivals - place.index)
        if n_lost > 0:
            shown.append(Shown(None, None, n_lost))
            place = TailPosition(commit.number - 1, 0, commit.before)
        whole = [Shown(commit, one) for one in commit.facts.stored]
        if commit.facts.event is not None:
            whole.append(Shown(commit))
        fits = whole[place.index : place.index + max_items - len(shown)]
        shown += fits
        index = place.index + len(fits)
        if index < len(whole):
            return TailPosition(commit.number - 1, index, place.arrivals + len(fits))
        source.commits.pop(0)
        return TailPosition(commit.number, 0, place.arrivals + len(fits))

    # --- items ----------------------------------------------------------------------------------

    def _items(self, before: int, shown: Sequence[Shown]) -> list[Stored | Forgotten]:
        wanted = [
            one.arrived
            for one in shown
            if one.commit
            and one.arrived
            and not self.journal.arrival_gone(one.arrived, one.commit.events)
        ]
        frames = self.frames(wanted)
        if any(one.frame_key not in frames for one in wanted):
            # Taken away while this page was read: by now there is a reason.
            self.journal.refresh()
            self.heads()
        items: list[Stored | Forgotten] = []
        number = before
        for one in shown:
            items.append(self._item(number + 1, one, frames))
            number += one.n_lost or 1
        return items

    def _item(
        self, number: int, one: Shown, frames: Mapping[FrameKey, Frame]
    ) -> Stored | Forgotten:
        if one.commit is None:
            return Forgotten(
                number, number + one.n_lost - 1, "expired" if self.has_ttl else "damaged"
            )
        if one.arrived is None:
            assert one.commit.facts.event is not None
            return _event(number, one.commit.facts.event)
        arrived = one.arrived
        frame = frames.get(arrived.frame_key)
        gone = self.journal.arrival_gone(arrived, one.commit.events)
        if gone is None and frame is None:
            gone = self.lost(one.commit)
        if gone is None and frame is not None:
            try:
                return Stored(
                    number, frame, chunk_of(frame) if frame.kind is FrameKind.DATA else None
                )
            except Refused:
                gone = "damaged"
        chunks = ((uuid.UUID(bytes=arrived.session), arrived.chunk_no),)
        return Forgotten(number, number, gone or "damaged", arrived.player, chunks)

    def lost(self, commit: Commit) -> Gone:
        """Why a frame's bytes are missing although nothing erased them."""
        return "expired" if self.is_past(commit.at_s, commit.keep_s) else "damaged"

    def may_have_run_out(self, before: Commit | None) -> bool:
        """Whether commits behind this one may be gone by themselves."""
        if before is None or not before.keep_s:
            return self.has_ttl
        return self.is_past(before.at_s, lasting_s(before.keep_s))

    def is_past(self, at_s: float, keep_s: int) -> bool:
        """Whether what was written at a time to last this long (0: for ever) may have run out."""
        return bool(keep_s) and at_s + keep_s < self.clock.now() + SLACK_S

    def frames(self, wanted: Iterable[Arrived]) -> dict[FrameKey, Frame]:
        """The frames of these arrivals that are there and whole."""
        crcs = {one.frame_key: one.crc for one in wanted}
        beside: dict[tuple[uuid.UUID, int], list[tuple[int, bytes]]] = {}
        for session, bucket, chunk_no, digest in crcs:
            beside.setdefault((session, bucket), []).append((chunk_no, digest))
        cql = (
            "SELECT session, bucket, chunk_no, digest, frame FROM chunks "
            "WHERE session = ? AND bucket = ? AND (chunk_no, digest) IN ?"
        )
        statements = [
            self.wire.bind(cql, session, bucket, keys[at : at + _AT_ONCE])
            for (session, bucket), keys in beside.items()
            for at in range(0, len(keys), _AT_ONCE)
        ]
        found: dict[FrameKey, Frame] = {}
        for row in (row for rows in self.wire.all(statements) for row in rows):
            key = (row.session, row.bucket, row.chunk_no, row.digest)
            with suppress(Refused):
                frame = decode_frame(row.frame or b"")
                if frame.body_crc == crcs[key]:
                    found[key] = frame
        return found


def _event(number: int, event: Event) -> Forgotten:
    reason: Gone = "forgotten" if event.kind == "forget" else "quarantined"
    chunks = tuple((uuid.UUID(bytes=session), chunk_no) for session, chunk_no, _ in event.chunks)
    player = tombstone_of(event.player) if event.player else None
    return Forgotten(number, number, reason, player, chunks, event.at_s)
