"""The state of one session, and the pure functions that count every frame exactly once.

Stores keep one `SessionState` per session and call `admit` inside their commit. The state is
bounded: it has at most 1,024 ranges of seen numbers, and data numbers are at most 1,024 ahead of
the first missing one.
"""

import struct
import uuid
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from operator import attrgetter
from typing import Literal

from understudy.core.errors import Refused
from understudy.core.names import session_time_s

MAX_AHEAD = 1024
"""How far the number of a data frame may be ahead of the first missing number."""

MAX_REPORT_AHEAD = 1 << 20
"""The same for drop reports and closes, whose numbers follow everything a client has yet to
send."""

MAX_RANGES = 1024
MAX_DROPPED = 1 << 62


def tombstone_of(identity: bytes) -> bytes:
    """A hash that a store keeps of a forgotten id: it matches the id but does not reveal it."""
    return sha256(b"understudy tombstone\0" + identity).digest()[:16]


_RANGE = struct.Struct("<QQqq?")
_HEAD = struct.Struct("<16sQQQqI??")


@dataclass(frozen=True, slots=True)
class SeenRange:
    """Seen chunk numbers `first..last`, and which steps they have."""

    first: int
    last: int
    first_step: int = -1
    """The first step of chunk `first`; -1 if unknown."""
    end_step: int = 0
    """The number after the last known step."""
    exact: bool = False
    """Whether `end_step` is where the next chunk must start; if not, it may start later."""


_FIRST = attrgetter("first")
_LAST = attrgetter("last")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionState:
    """The state of one session in a store."""

    player: bytes
    ranges: tuple[SeenRange, ...] = ()
    n_chunks: int = 0
    n_steps: int = 0
    dropped_steps: int = 0
    closed_at: int = -1
    """The chunk number of the close frame; -1 while the session is open."""
    last_received_s: int = 0
    forgotten: bool = False
    """Whether its player was erased; every further frame is then rejected."""

    @property
    def high(self) -> int:
        """Every chunk number below this was seen."""
        return self.ranges[0].last + 1 if self.ranges and self.ranges[0].first == 0 else 0

    @property
    def closed(self) -> bool:
        return self.closed_at >= 0

    def has_seen(self, number: int) -> bool:
        index = bisect_left(self.ranges, number, key=_LAST)
        return index < len(self.ranges) and self.ranges[index].first <= number

    def missing(self) -> tuple[tuple[int, int], ...]:
        """Ranges of chunk numbers that were not seen although later ones were."""
        gaps = []
        at = 0
        for seen in self.ranges:
            if seen.first > at:
                gaps.append((at, seen.first - 1))
            at = seen.last + 1
        return tuple(gaps)

    def pack(self) -> bytes:
        """The state as bytes for a database column."""
        head = _HEAD.pack(
            self.player,
            self.n_chunks,
            self.n_steps,
            self.dropped_steps,
            self.closed_at,
            self.last_received_s,
            self.forgotten,
            False,
        )
        return head + b"".join(
            _RANGE.pack(seen.first, seen.last, seen.first_step, seen.end_step, seen.exact)
            for seen in self.ranges
        )


def unpack_state(raw: bytes) -> SessionState:
    """The inverse of `pack`."""
    player, n_chunks, n_steps, dropped, closed_at, received, forgotten, _ = _HEAD.unpack_from(raw)
    ranges = tuple(SeenRange(*fields) for fields in _RANGE.iter_unpack(raw[_HEAD.size :]))
    return SessionState(
        player=player,
        ranges=ranges,
        n_chunks=n_chunks,
        n_steps=n_steps,
        dropped_steps=dropped,
        closed_at=closed_at,
        last_received_s=received,
        forgotten=forgotten,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """The facts of a frame that `admit` needs."""

    number: int
    player: bytes
    received_s: int
    kind: Literal["data", "drop", "close", "refused"]
    first_step: int = -1
    n_steps: int = 0
    """Steps of a data frame; dropped steps of a drop report."""
    dropped: tuple[tuple[int, int], ...] = ()


Rejection = Literal[
    "",
    "seen",
    "other_player",
    "forgotten",
    "after_close",
    "out_of_window",
    "step_mismatch",
    "bad_report",
]
"""Why a frame does not count; empty if it does."""


def admit(state: SessionState | None, arrival: Arrival) -> tuple[SessionState, Rejection]:
    """Return the new state and `""` if the frame counts, else the same state and the reason.

    The reason "seen" is no error: the caller compares bytes to tell a duplicate from a conflict.
    """
    before = SessionState(player=arrival.player) if state is None else state
    if before.forgotten:
        return before, "forgotten"  # whichever player sends it: an import may name another one
    if before.player != arrival.player:
        return before, "other_player"
    if before.has_seen(arrival.number):
        return before, "seen"
    if before.closed and arrival.number > before.closed_at:
        return before, "after_close"
    ranges = before.ranges
    if arrival.kind == "drop":
        ranges = _cover(ranges, arrival.dropped)
    high = ranges[0].last + 1 if ranges and ranges[0].first == 0 else 0
    if arrival.number > high + (
        MAX_AHEAD if arrival.kind in ("data", "refused") else MAX_REPORT_AHEAD
    ):
        return before, "out_of_window"
    if arrival.kind == "close" and ranges and ranges[-1].last > arrival.number:
        return before, "bad_report"
    if arrival.kind == "data":
        added = _add_data(ranges, arrival)
        if added is None:
            return before, "step_mismatch"
        ranges = added
    else:
        ranges = _insert(ranges, SeenRange(arrival.number, arrival.number))
    if len(ranges) > MAX_RANGES:
        return before, "out_of_window"
    is_data = arrival.kind == "data"
    after = replace(
        before,
        ranges=ranges,
        n_chunks=before.n_chunks + is_data,
        n_steps=before.n_steps + (arrival.n_steps if is_data else 0),
        # Bounded, since each report of a session may claim any count.
        dropped_steps=min(
            before.dropped_steps + (arrival.n_steps if arrival.kind == "drop" else 0), MAX_DROPPED
        ),
        closed_at=arrival.number if arrival.kind == "close" else before.closed_at,
        last_received_s=max(before.last_received_s, arrival.received_s),
    )
    return after, ""


def readmit(state: SessionState, arrival: Arrival) -> SessionState:
    """The state after a data frame with a seen number moved from quarantine to the store."""
    return replace(state, n_chunks=state.n_chunks + 1, n_steps=state.n_steps + arrival.n_steps)


def withdraw(state: SessionState, n_steps: int) -> SessionState:
    """The state after a stored data frame was removed; its number stays seen."""
    return replace(state, n_chunks=state.n_chunks - 1, n_steps=state.n_steps - n_steps)


def _add_data(ranges: tuple[SeenRange, ...], arrival: Arrival) -> tuple[SeenRange, ...] | None:
    """The ranges with the arrival's number added; None if its steps conflict with a range."""
    number = arrival.number
    first_step = arrival.first_step
    end_step = arrival.first_step + arrival.n_steps
    index = bisect_left(ranges, number, key=_FIRST)
    left = ranges[:index]
    right = ranges[index:]
    if any(first_step < seen.end_step for seen in left) or any(
        0 <= seen.first_step < end_step for seen in right
    ):
        return None
    if left and left[-1].last == number - 1 and left[-1].exact and first_step != left[-1].end_step:
        return None
    if right and right[0].first == number + 1 and right[0].first_step not in (-1, end_step):
        return None
    return _insert(ranges, SeenRange(number, number, first_step, end_step, True))


def _cover(ranges: Sequence[SeenRange], spans: Iterable[tuple[int, int]]) -> tuple[SeenRange, ...]:
    """The ranges with all numbers of sorted spans marked as seen, in one pass over both."""
    gaps: list[SeenRange] = []
    index = 0
    for first, last in spans:
        at = first
        while index < len(ranges) and ranges[index].last < at:
            index += 1
        while index < len(ranges) and ranges[index].first <= last:
            seen = ranges[index]
            if seen.first > at:
                gaps.append(SeenRange(at, seen.first - 1))
            at = seen.last + 1
            if at > last:
                break  # the next span may start in this range, too
            index += 1
        if at <= last:
            gaps.append(SeenRange(at, last))
    covered: list[SeenRange] = []
    for seen in sorted([*ranges, *gaps], key=_FIRST):
        if covered and covered[-1].last == seen.first - 1:
            covered[-1] = _merged(covered[-1], seen)
        else:
            covered.append(seen)
    return tuple(covered)


def _insert(ranges: tuple[SeenRange, ...], new: SeenRange) -> tuple[SeenRange, ...]:
    """The ranges with one more, of which no number was seen."""
    index = bisect_left(ranges, new.first, key=_FIRST)
    before = ranges[:index]
    after = ranges[index:]
    if before and before[-1].last == new.first - 1:
        new = _merged(before[-1], new)
        before = before[:-1]
    if after and after[0].first == new.last + 1:
        new = _merged(new, after[0])
        after = after[1:]
    return (*before, new, *after)


def _merged(left: SeenRange, right: SeenRange) -> SeenRange:
    return SeenRange(
        left.first, right.last, left.first_step, max(left.end_step, right.end_step), right.exact
    )


# --- How old a session may be ---------------------------------------------------------------------
#
# A session id contains the time its session began. Frames of a session that is too old are refused,
# so the deduplication need not remember sessions for ever. The age is measured when a frame enters:
# an acknowledged frame stays valid, however long ingest was down or a schema was missing.

DAY_S = 86_400.0

AHEAD_S = 1 * DAY_S
"""How far a player's clock may be ahead."""

SPOOL_S = 7 * DAY_S
"""How long recorded frames may wait in a client's spool."""

INTAKE_MAX_AGE_S = SPOOL_S + 1 * DAY_S
"""A day more, so that differing clocks refuse nothing that was sent in time."""

INGEST_S = INTAKE_MAX_AGE_S + 7 * DAY_S
"""A week more than the intake accepts, for streams that other producers append to and that stamp
their own time."""

REMEMBER_S = INGEST_S + AHEAD_S
"""How long a deleted session is remembered after its frames arrived: so long may more of its frames
be accepted if the player's clock was AHEAD_S ahead."""


def has_valid_time(session: uuid.UUID, *, entered_s: float, oldest_s: float) -> bool:
    """Whether a session may have begun when its id says, for a frame that entered at this time."""
    return -AHEAD_S <= entered_s - session_time_s(session) <= oldest_s


def refused_session(session: uuid.UUID, *, entered_s: float, oldest_s: float) -> Refused | None:
    """The Refused for a frame that entered at this time if its session id is invalid, else None."""
    if session.version != 7:
        return Refused("bad_session", f"session {session} is not a UUIDv7")
    if not has_valid_time(session, entered_s=entered_s, oldest_s=oldest_s):
        age_s = entered_s - session_time_s(session)
        return Refused(
            "bad_session_time",
            f"session {session} began {age_s / DAY_S:.1f} days before this frame arrived; "
            f"expected {-AHEAD_S / DAY_S:.0f} to {oldest_s / DAY_S:.0f}; check the "
            "clock of the machine that recorded it",
        )
    return None
