"""What has been seen of one session: the pure rule that makes every frame count once.

Stores keep one `SessionState` per session and ask `admit` inside their commit. The state is
bounded: ranges of seen numbers, at most 1,024 of them, and data numbers at most 1,024 ahead of the
first missing one.
"""

import struct
import uuid
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Literal

from understudy.core.errors import Refused
from understudy.core.names import session_time_s

MAX_AHEAD = 1024
"""How far a data number may run ahead of the first missing one."""

MAX_REPORT_AHEAD = 1 << 20
"""The same for drop reports and closes, whose numbers come behind everything a client still has
to send."""

MAX_RANGES = 1024
MAX_DROPPED = 1 << 62


def tombstone_of(identity: bytes) -> bytes:
    """What a store keeps of a forgotten player or session: enough to know the id again, not to
    tell it."""
    return sha256(b"understudy tombstone\0" + identity).digest()[:16]


_RANGE = struct.Struct("<QQqq?")
_HEAD = struct.Struct("<16sQQQqI??")


@dataclass(frozen=True, slots=True)
class SeenRange:
    """Seen numbers `first..last`; where its steps begin (-1: unknown) and end (exactly, or at
    least)."""

    first: int
    last: int
    first_step: int = -1
    end_step: int = 0
    exact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionState:
    """One session as the store knows it."""

    player: bytes
    ranges: tuple[SeenRange, ...] = ()
    n_chunks: int = 0
    n_steps: int = 0
    dropped_steps: int = 0
    closed_at: int = -1
    """Number of the close frame, -1 while open."""
    last_received_s: int = 0
    forgotten: bool = False

    @property
    def high(self) -> int:
        """Every number below this was seen."""
        return self.ranges[0].last + 1 if self.ranges and self.ranges[0].first == 0 else 0

    @property
    def closed(self) -> bool:
        return self.closed_at >= 0

    def has_seen(self, number: int) -> bool:
        return any(one.first <= number <= one.last for one in self.ranges)

    def missing(self) -> tuple[tuple[int, int], ...]:
        """Ranges of numbers not seen although later ones were."""
        gaps = []
        at = 0
        for one in self.ranges:
            if one.first > at:
                gaps.append((at, one.first - 1))
            at = one.last + 1
        return tuple(gaps)

    def pack(self) -> bytes:
        """Bytes for a database column."""
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
            _RANGE.pack(one.first, one.last, one.first_step, one.end_step, one.exact)
            for one in self.ranges
        )


def unpack_state(raw: bytes) -> SessionState:
    """The state that `pack` wrote."""
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
    """A frame's facts as far as counting goes."""

    number: int
    player: bytes
    received_s: int
    kind: Literal["data", "drop", "close", "refused"]
    first_step: int = -1
    n_steps: int = 0
    """Steps of a data frame; dropped steps of a drop report."""
    dropped: tuple[tuple[int, int], ...] = ()


Verdict = Literal[
    "",
    "seen",
    "other_player",
    "forgotten",
    "after_close",
    "out_of_window",
    "step_mismatch",
    "bad_report",
]


def admit(state: SessionState | None, arrival: Arrival) -> tuple[SessionState, Verdict]:
    """The state after a frame, and `""` when it counts; otherwise the unchanged state and the
    reason it does not.

    "seen" is no fault: the caller compares bytes to tell a duplicate from a conflict.
    """
    before = SessionState(player=arrival.player) if state is None else state
    if before.forgotten:
        return before, "forgotten"  # whoever sends it now: an import may name somebody else
    if before.player != arrival.player:
        return before, "other_player"
    if before.has_seen(arrival.number):
        return before, "seen"
    if before.closed and arrival.number > before.closed_at:
        return before, "after_close"
    ranges = before.ranges
    if arrival.kind == "drop":
        for first, last in arrival.dropped:
            ranges = _cover(ranges, first, last)
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
        ranges = _cover(ranges, arrival.number, arrival.number)
    if len(ranges) > MAX_RANGES:
        return before, "out_of_window"
    is_data = arrival.kind == "data"
    after = replace(
        before,
        ranges=ranges,
        n_chunks=before.n_chunks + is_data,
        n_steps=before.n_steps + (arrival.n_steps if is_data else 0),
        # Bounded, since each of a session's reports may claim any count.
        dropped_steps=min(
            before.dropped_steps + (arrival.n_steps if arrival.kind == "drop" else 0), MAX_DROPPED
        ),
        closed_at=arrival.number if arrival.kind == "close" else before.closed_at,
        last_received_s=max(before.last_received_s, arrival.received_s),
    )
    return after, ""


def readmit(state: SessionState, arrival: Arrival) -> SessionState:
    """The state after a data frame whose number was seen in quarantine and that is stored after
    all."""
    return replace(state, n_chunks=state.n_chunks + 1, n_steps=state.n_steps + arrival.n_steps)


def withdraw(state: SessionState, n_steps: int) -> SessionState:
    """The state after a stored data frame was taken out; its number stays seen."""
    return replace(state, n_chunks=state.n_chunks - 1, n_steps=state.n_steps - n_steps)


def _add_data(ranges: tuple[SeenRange, ...], arrival: Arrival) -> tuple[SeenRange, ...] | None:
    """Ranges with one more data number, or None when its steps contradict a neighbour's."""
    number = arrival.number
    first_step = arrival.first_step
    end_step = arrival.first_step + arrival.n_steps
    left = [one for one in ranges if one.last < number]
    right = [one for one in ranges if one.first > number]
    if any(first_step < one.end_step for one in left) or any(
        0 <= one.first_step < end_step for one in right
    ):
        return None
    if left and left[-1].last == number - 1 and left[-1].exact and first_step != left[-1].end_step:
        return None
    if right and right[0].first == number + 1 and right[0].first_step not in (-1, end_step):
        return None
    return _insert(ranges, SeenRange(number, number, first_step, end_step, True))


def _cover(ranges: tuple[SeenRange, ...], first: int, last: int) -> tuple[SeenRange, ...]:
    """Ranges with `first..last` marked as seen, whatever was seen of it before."""
    at = first
    for one in ranges:
        if one.last < at or one.first > last:
            continue
        if one.first > at:
            ranges = _insert(ranges, SeenRange(at, one.first - 1))
        at = one.last + 1
    return _insert(ranges, SeenRange(at, last)) if at <= last else ranges


def _insert(ranges: tuple[SeenRange, ...], new: SeenRange) -> tuple[SeenRange, ...]:
    before = [one for one in ranges if one.last < new.first]
    after = [one for one in ranges if one.first > new.last]
    if before and before[-1].last == new.first - 1:
        new = _merged(before.pop(), new)
    if after and after[0].first == new.last + 1:
        new = _merged(new, after.pop(0))
    return (*before, new, *after)


def _merged(left: SeenRange, right: SeenRange) -> SeenRange:
    return SeenRange(
        left.first, right.last, left.first_step, max(left.end_step, right.end_step), right.exact
    )


# --- How old a session may be ---------------------------------------------------------------------
#
# A session id carries the time its session began. No frame enters once its session is too old, so
# whatever removes duplicates need not remember sessions for ever. Age is counted to the moment a
# frame entered: an acknowledged frame stays good, however long ingest was down or a schema was
# missing.

DAY_S = 86_400.0

AHEAD_S = 1 * DAY_S
"""How far a player's clock may run ahead."""

SPOOL_S = 7 * DAY_S
"""How long a client tries to send what it recorded."""

INTAKE_MAX_AGE_S = SPOOL_S + 1 * DAY_S
"""A day more than clients try, so that clocks which differ refuse nothing that was sent in time."""

INGEST_S = INTAKE_MAX_AGE_S + 7 * DAY_S
"""A week more than the door takes: for streams that other doors append to and that stamp their
own time."""

REMEMBER_S = INGEST_S + AHEAD_S
"""How long what is gone is remembered after it came: a session that began AHEAD_S after its
first frame may go on entering for INGEST_S from there."""


def refused_session(session: uuid.UUID, *, entered_s: float, oldest_s: float) -> Refused | None:
    """Why a session's frame may not enter at this time, or None."""
    if session.version != 7:
        return Refused("bad_session", f"session {session} is no UUIDv7")
    age_s = entered_s - session_time_s(session)
    if not -AHEAD_S <= age_s <= oldest_s:
        return Refused(
            "bad_session_time",
            f"session {session} began {age_s / DAY_S:.1f} days before this frame came; "
            f"wanted {-AHEAD_S / DAY_S:.0f} to {oldest_s / DAY_S:.0f}",
        )
    return None
