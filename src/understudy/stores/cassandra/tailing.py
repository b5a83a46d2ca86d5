"""The tail: commits of all partitions merged, each arrival once. It never passes what is committed."""

import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from understudy.core.chunk import chunk_of
from understudy.core.clock import Clock
from understudy.core.errors import Refused
from understudy.core.frame import Frame, FrameKind, decode_frame
from understudy.core.ports import Cursor, Forgotten, Gone, Stored, Tail
from understudy.core.session import tombstone_of
from understudy.stores.cassandra.cursor import Place, Places, read_cursor
from understudy.stores.cassandra.facts import ADMIN, Arrived, Commit, Event, Key, keys
from understudy.stores.cassandra.journal import Journal
from understudy.stores.cassandra.keeping import SLACK_S, Keeping
from understudy.stores.cassandra.lanes import Lanes
from understudy.stores.cassandra.reading import commit_of, select
from understudy.stores.cassandra.tables import CHUNK_BUCKET, COMMIT_BUCKET, lasting_s
from understudy.stores.cassandra.wire import Statement, Wire

POLL_S = 0.05
_LOOK_S = 1.0
"""How often lanes themselves are asked, for heads that their writers could not tell any more."""
_ENDED_S = 60.0
"""How often the list of retired lanes is read: a week may pass before one is in it."""
_FRAMES = "SELECT chunk_no, frame FROM chunks WHERE session = ? AND bucket = ? AND chunk_no IN ?"
_FRAME = "SELECT chunk_no, frame FROM chunks WHERE session = ? AND bucket = ? AND chunk_no = ?"
_AT_ONCE = 16


@dataclass(slots=True)
class _Lane:
    """What is at hand of one partition behind a place."""

    head: int
    commits: list[Commit] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Shown:
    """One item to be: an arrival or an event of a commit, or arrivals of which nothing is left."""

    commit: Commit | None
    arrived: Arrived | None = None
    n_lost: int = 0


class Tailer:
    """Reads pages of the tail; many threads may ask at once."""

    def __init__(self, wire: Wire, lanes: Lanes, journal: Journal, *, clock: Clock, keeping: Keeping) -> None:
        self._wire, self._lanes, self._journal, self._clock = wire, lanes, journal, clock
        self._keeping = keeping
        self._heads: dict[str, int] = {}
        self._looked_s = self._read_ended_s = float("-inf")
        self._ended: dict[str, int] = {}
        """Lanes that were retired."""
        self._ahead: dict[str, list[Commit]] = {}
        """Commits that were read and did not fit the last page; they never change."""
        self._lock = threading.Lock()

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
            self._wire.wait(min(POLL_S, left_s))

    # --- heads ----------------------------------------------------------------------------------------------------

    def heads(self, *, look: bool = False) -> dict[str, int]:
        """How far every partition may be read; with `look`, exactly as far as it is committed now."""
        rows = self._wire.scan(self._wire.bind("SELECT name, number FROM registry WHERE kind = 'head'"))
        told = {row.name: row.number or 0 for row in rows}
        self._journal.expired_before_s = max(self._journal.expired_before_s, told.pop("~expired", 0))
        told.pop("~erased", None)
        listed = told | {name: max(number, told.get(name, 0)) for name, number in self._ended_heads(look).items()}
        found = {name: max(number, self._heads.get(name, 0)) for name, number in listed.items()}
        if look or time.monotonic() - self._looked_s > _LOOK_S:
            self._looked_s = time.monotonic()
            for name, row in self._lanes.rows({*told, ADMIN}).items():
                found[name] = max(found.get(name, 0), row.commit_no)
        for name, number in self._lanes.own_heads().items():
            found[name] = max(found.get(name, 0), number)
        self._heads.update(found)
        return found

    def _ended_heads(self, look: bool) -> dict[str, int]:
        """Asked after the others: a lane is listed here before it leaves there."""
        if look or time.monotonic() - self._read_ended_s > _ENDED_S:
            self._read_ended_s = time.monotonic()
            rows = self._wire.scan(self._wire.bind("SELECT name, number FROM registry WHERE kind = 'ended'"))
            self._ended = {row.name: row.number for row in rows}
        return self._ended

    # --- merging --------------------------------------------------------------------------------------------------

    def _next(self, places: Places, max_items: int) -> tuple[list[Shown], Places]:
        """What comes behind these places, in the order of arrival as far as that is known."""
        heads, places = self.heads(), places.copy()
        lanes = self._begun(heads, places)
        shown: list[Shown] = []
        while len(shown) < max_items:
            self._fill(lanes, places)
            ready = [(lane.commits[0].at_s, name == ADMIN, name) for name, lane in lanes.items() if lane.commits]
            if not ready:
                break
            name = min(ready)[2]
            wanted = lanes[name].commits[0].events
            if name != ADMIN and wanted > places.at.get(ADMIN, Place()).commit_no:
                # What was decided before this commit is shown before it.
                if ADMIN not in lanes:
                    lanes[ADMIN] = _Lane(self.heads(look=True).get(ADMIN, 0))
                    continue
                name = ADMIN
                if not lanes[ADMIN].commits:
                    break
            places.at[name] = self._show(lanes[name], places.at.get(name, Place()), shown, max_items)
        with self._lock:
            self._ahead.update({name: lane.commits for name, lane in lanes.items() if lane.commits})
        self._journal.read_to(self._heads.get(ADMIN, 0))
        places.shown += sum(one.n_lost or 1 for one in shown)
        return shown, places

    def _begun(self, heads: Mapping[str, int], places: Places) -> dict[str, _Lane]:
        """Partitions with something behind these places, and what is at hand of it."""
        lanes: dict[str, _Lane] = {}
        for name, head in heads.items():
            at = places.at.get(name, Place()).commit_no
            if head > at:
                with self._lock:
                    ahead = self._ahead.pop(name, [])
                lanes[name] = _Lane(head, ahead if ahead and ahead[0].tag.commit_no == at + 1 else [])
        return lanes

    def _fill(self, lanes: Mapping[str, _Lane], places: Places) -> None:
        """Read ahead in every partition of which nothing is at hand."""
        empty = [
            (name, lane)
            for name, lane in lanes.items()
            if not lane.commits and places.at.get(name, Place()).commit_no < lane.head
        ]
        found = self._wire.all(
            [select(self._wire, name, places.at.get(name, Place()).commit_no, lane.head) for name, lane in empty]
        )
        for (name, lane), rows in zip(empty, found, strict=True):
            lane.commits = [commit_of(row) for row in rows]
            if not rows:
                places.at[name] = self._skip(name, lane, places.at.get(name, Place()))

    def _skip(self, name: str, lane: _Lane, place: Place) -> Place:
        """Commits of a whole bucket have run out: go on at the next one that is there."""
        bucket = (place.commit_no + 1) >> COMMIT_BUCKET
        for later in range(bucket + 1, (lane.head >> COMMIT_BUCKET) + 1):
            rows = self._wire.all([select(self._wire, name, (later << COMMIT_BUCKET) - 1, lane.head)])[0]
            if rows:
                lane.commits = [commit_of(row) for row in rows]
                return Place(lane.commits[0].tag.commit_no - 1, 0, place.arrivals)
        return Place(lane.head, 0, place.arrivals)

    def _show(self, lane: _Lane, place: Place, shown: list[Shown], max_items: int) -> Place:
        """Add a partition's first commit to the page, as much of it as fits; the place behind it."""
        commit = lane.commits[0]
        n_lost = commit.before - (place.arrivals - place.index)
        if n_lost > 0:
            shown.append(Shown(None, None, n_lost))
            place = Place(commit.tag.commit_no - 1, 0, commit.before)
        whole = [Shown(commit, one) for one in commit.facts.stored]
        if commit.facts.event is not None:
            whole.append(Shown(commit))
        fits = whole[place.index : place.index + max_items - len(shown)]
        shown += fits
        index = place.index + len(fits)
        if index < len(whole):
            return Place(commit.tag.commit_no - 1, index, place.arrivals + len(fits))
        lane.commits.pop(0)
        return Place(commit.tag.commit_no, 0, place.arrivals + len(fits))

    # --- items ----------------------------------------------------------------------------------------------------

    def _items(self, before: int, shown: Sequence[Shown]) -> list[Stored | Forgotten]:
        wanted = [one for one in shown if one.commit and one.arrived and not self.gone(one.arrived, one.commit.events)]
        frames = self.frames([one.arrived for one in wanted if one.arrived])
        if any(one.arrived and one.arrived.key not in frames for one in wanted):
            # Taken away while this page was read: by now there is a reason.
            self._journal.refresh()
            self.heads()
        items: list[Stored | Forgotten] = []
        number = before
        for one in shown:
            items.append(self._item(number + 1, one, frames))
            number += one.n_lost or 1
        return items

    def _item(self, number: int, one: Shown, frames: Mapping[Key, Frame]) -> Stored | Forgotten:
        if one.commit is None:
            # How old they were is not known.
            return Forgotten(number, number + one.n_lost - 1, "expired" if self.has_run_out(0.0) else "damaged")
        if one.arrived is None:
            assert one.commit.facts.event is not None
            return _event(number, one.commit.facts.event)
        arrived = one.arrived
        frame = frames.get(arrived.key)
        gone = self.gone(arrived, one.commit.events)
        if gone is None and frame is None:
            gone = self.lost(one.commit)
        if gone is None and frame is not None:
            try:
                return Stored(number, frame, chunk_of(frame) if frame.kind is FrameKind.DATA else None)
            except Refused:
                gone = "damaged"
        chunks = ((uuid.UUID(bytes=arrived.session), arrived.chunk_no),)
        return Forgotten(number, number, gone or "damaged", arrived.player, chunks)

    def gone(self, one: Arrived, events: int) -> Gone | None:
        return self._journal.gone(one, events)

    def lost(self, commit: Commit) -> Gone:
        """Why a frame's row is not there although nobody took it away."""
        return "expired" if self._is_past(commit.at_s, "chunks") else "damaged"

    def has_run_out(self, at_s: float) -> bool:
        """Whether commits since this time may be gone by themselves."""
        return any(self._is_past(one, "commits") for one in {at_s, max(at_s, self._keeping.changed_s)})

    def _is_past(self, at_s: float, table: str) -> bool:
        """Whether what was written into a table at a time may have run out."""
        keep_s = self._keeping.of(at_s)
        return bool(keep_s) and at_s + lasting_s(table, keep_s) < self._clock.now() + SLACK_S

    def frames(self, wanted: Iterable[Arrived]) -> dict[Key, Frame]:
        """The frames of these arrivals that are there and whole."""
        arrived = {one.key: one for one in wanted}
        found: dict[Key, Frame] = {}
        groups = list(_groups(arrived))
        answers = self._wire.all([_select(self._wire, session, numbers) for session, numbers in groups])
        for (session, _), rows in zip(groups, answers, strict=True):
            for row in rows:
                frame = _whole(row.frame, arrived[session, row.chunk_no])
                if frame is not None:
                    found[session, row.chunk_no] = frame
        return found


def _groups(wanted: Iterable[Key]) -> Iterable[tuple[bytes, list[int]]]:
    """Numbers that lie beside one another, a few at a time."""
    beside: dict[tuple[bytes, int], list[int]] = {}
    for session, number in wanted:
        beside.setdefault((session, number >> CHUNK_BUCKET), []).append(number)
    for (session, _), numbers in beside.items():
        for at in range(0, len(numbers), _AT_ONCE):
            yield session, numbers[at : at + _AT_ONCE]


def _select(wire: Wire, session: bytes, numbers: list[int]) -> Statement:
    if len(numbers) == 1:
        return wire.bind(_FRAME, uuid.UUID(bytes=session), numbers[0] >> CHUNK_BUCKET, numbers[0])
    return wire.bind(_FRAMES, uuid.UUID(bytes=session), numbers[0] >> CHUNK_BUCKET, numbers)


def _whole(raw: bytes | None, one: Arrived) -> Frame | None:
    """The frame in these bytes, if it is the one that arrived."""
    if raw is None:
        return None
    try:
        frame = decode_frame(raw)
    except Refused:
        return None
    return frame if frame.body_crc == one.crc else None


def _event(number: int, event: Event) -> Forgotten:
    reason: Gone = "forgotten" if event.kind == "forget" else "quarantined"
    player = tombstone_of(event.player) if event.player else None
    return Forgotten(number, number, reason, player, keys(event.chunks), event.at_s)
