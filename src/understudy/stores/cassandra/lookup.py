"""What the store knows: admin commits, kept at hand, and the sessions and numbers that a
decision needs."""

import threading
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from understudy.core.names import session_time_s
from understudy.experience.frame import FrameKind
from understudy.experience.session import SessionState, admit, readmit, unpack_state, withdraw
from understudy.ports import Gone
from understudy.stores.cassandra.commits import (
    ADMIN,
    QUARANTINE_BUCKET,
    QUARANTINED,
    STORED,
    Arrived,
    Commit,
    Key,
    commits_between,
    frame_key,
)
from understudy.stores.cassandra.wire import Row, Wire

STATE = "session, game, state, state_events, version"


@dataclass(frozen=True, slots=True)
class Stated:
    """A session as it was committed."""

    game: str
    state: SessionState
    events: int
    """The admin commits that the state takes into account."""
    version: int


def stated(row: Row) -> Stated | None:
    """What a session's row says."""
    if row.state is None:
        return None
    return Stated(row.game or "", unpack_state(row.state), row.state_events, row.version)


class AdminJournal:
    """Admin commits up to `head`; many threads may ask at once."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._lock = threading.Lock()
        self.head = 0
        self.expired_before_s = 0
        """Data received before this is gone."""
        self.forgets: dict[bytes, tuple[int, float]] = {}
        """Per player: the newest admin commit that forgot them, and when."""
        self.replayed: set[int] = set()
        """Quarantine ids that were stored after all."""
        self._hidden: dict[Key, int] = {}
        self._effects: dict[bytes, list[tuple[int, Arrived | int]]] = {}
        """Per session: replayed frames, and steps of chunks that were taken out."""

    def refresh(self) -> int:
        """Read what came since; the number of the last admin commit."""
        row = self._wire.one(
            self._wire.bind("SELECT commit_no FROM partitions WHERE partition = ?", ADMIN)
        )
        return self.read_to(0 if row is None else row.commit_no)

    def read_to(self, number: int) -> int:
        """Read the admin commits up to a number that is committed."""
        with self._lock:
            if number > self.head:
                for commit in commits_between(self._wire, ADMIN, self.head, number):
                    self.apply(commit)
                self.head = number
            return self.head

    def apply(self, commit: Commit) -> None:
        """Take in one admin commit."""
        number = commit.number
        event = commit.facts.event
        for one in commit.facts.stored:
            self.replayed.add(one.replays)
            self._effects.setdefault(one.session, []).append((number, one))
        if event is None:
            return
        if event.kind == "forget":
            before = self.forgets.get(event.player, (0, 0.0))
            self.forgets[event.player] = (number, max(event.at_s, before[1]))
        for session, chunk_no, n_steps in event.chunks:
            self._hidden[session, chunk_no] = number
            self._effects.setdefault(session, []).append((number, n_steps))

    # --- what it means ----------------------------------------------------------------------------

    def gone(self, key: Key, player: bytes, kind: int, received_s: int, events: int) -> Gone | None:
        """Why a frame can no longer be read that was stored when `events` admin commits were
        there."""
        if events < self.forgets.get(player, (0, 0.0))[0]:
            return "forgotten"
        if events < self._hidden.get(key, 0):
            return "quarantined"
        return "expired" if kind == FrameKind.DATA and received_s < self.expired_before_s else None

    def arrival_gone(self, one: Arrived, events: int) -> Gone | None:
        """The same, for an arrival."""
        return self.gone(one.key, one.player, one.kind, one.received_s, events)

    def is_forgotten(self, player: bytes, session: uuid.UUID, received_s: float) -> bool:
        """Whether a player was erased after this session began, or after the frame came."""
        found = self.forgets.get(player)
        return found is not None and (
            session_time_s(session) <= found[1] or received_s < int(found[1])
        )

    def up_to_date(self, session: uuid.UUID, found: Stated | None) -> Stated | None:
        """A session's state with everything in it that was decided since it was written."""
        if found is None or found.events >= self.head:
            return found
        state = found.state
        for number, effect in self._effects.get(session.bytes, ()):
            if number > found.events:
                state = (
                    withdraw(state, effect) if isinstance(effect, int) else _stored(state, effect)
                )
        if found.events < self.forgets.get(state.player, (0, 0.0))[0]:
            state = replace(state, forgotten=True)
        return replace(found, state=state, events=self.head)


def _stored(state: SessionState, one: Arrived) -> SessionState:
    after, verdict = admit(state, one.arrival())
    return readmit(state, one.arrival()) if verdict else after


class CassandraLookup:
    """Answers a draft's questions; what is not at hand is read."""

    def __init__(
        self, wire: Wire, journal: AdminJournal, recent: Mapping[uuid.UUID, Stated]
    ) -> None:
        self._wire = wire
        self._journal = journal
        self._recent = recent
        self._states: dict[uuid.UUID, Stated | None] = {}
        self._numbers: dict[tuple[uuid.UUID, int], list[Row]] = {}

    # --- reading ahead --------------------------------------------------------------------------

    def look_up(
        self, arrivals: Iterable[tuple[uuid.UUID, int]], doubtful: Iterable[tuple[uuid.UUID, int]]
    ) -> None:
        """Read the sessions of all these numbers, and the numbers that were seen before or are
        in doubt."""
        numbers = list(arrivals)
        doubts = list(doubtful)
        self._load_states({session for session, _ in [*numbers, *doubts]})
        seen = [
            key
            for key in numbers
            if (known := self.state_of(key[0])) is not None and known[1].has_seen(key[1])
        ]
        self._load_numbers({*seen, *doubts})

    def _load_states(self, sessions: Iterable[uuid.UUID]) -> None:
        wanted = [one for one in sessions if one not in self._states and one not in self._recent]
        cql = f"SELECT {STATE} FROM sessions WHERE session = ? LIMIT 1"
        found = self._wire.all([self._wire.bind(cql, one) for one in wanted])
        for session, rows in zip(wanted, found, strict=True):
            self._states[session] = stated(rows[0]) if rows else None

    def _load_numbers(self, keys: Iterable[tuple[uuid.UUID, int]]) -> None:
        wanted = [key for key in keys if key not in self._numbers]
        cql = "SELECT * FROM sessions WHERE session = ? AND chunk_no = ?"
        found = self._wire.all([self._wire.bind(cql, *key) for key in wanted])
        for key, rows in zip(wanted, found, strict=True):
            self._numbers[key] = [row for row in rows if row.what is not None]

    # --- what a draft asks ----------------------------------------------------------------------

    def stated(self, session: uuid.UUID) -> Stated | None:
        """A session with every admin commit in it."""
        if session in self._recent:
            found: Stated | None = self._recent[session]
        else:
            if session not in self._states:
                self._load_states([session])
            found = self._states[session]
        return self._journal.up_to_date(session, found)

    def state_of(self, session: uuid.UUID) -> tuple[str, SessionState] | None:
        found = self.stated(session)
        return None if found is None else (found.game, found.state)

    def _rows(self, session: uuid.UUID, chunk_no: int, what: int) -> list[Row]:
        if (session, chunk_no) not in self._numbers:
            self._load_numbers([(session, chunk_no)])
        return [row for row in self._numbers[session, chunk_no] if row.what == what]

    def key_of(self, session: uuid.UUID, chunk_no: int) -> tuple[int, int] | None:
        """(crc, length) stored or recorded under a number."""
        rows = self._rows(session, chunk_no, STORED)
        return (rows[0].crc, rows[0].length) if rows else None

    def is_stored(self, session: uuid.UUID, chunk_no: int) -> bool:
        """Whether a frame can be read under a number."""
        return any(self.is_there(row) for row in self._rows(session, chunk_no, STORED))

    def is_there(self, row: Row) -> bool:
        """Whether the frame that a number's row tells of was not taken away since."""
        known = self.stated(row.session)
        player = b"" if known is None else known.state.player
        key = (row.session.bytes, row.chunk_no)
        return self._journal.gone(key, player, row.kind, row.received_s, row.events) is None

    def data_rows(self, session: uuid.UUID, chunk_no: int) -> list[Row]:
        """Rows of stored data under a number that can still be read."""
        rows = self._rows(session, chunk_no, STORED)
        return [row for row in rows if row.kind == FrameKind.DATA and self.is_there(row)]

    def quarantined_crcs(self, session: bytes, chunk_no: int) -> list[int]:
        return [row.crc for row in self._rows(uuid.UUID(bytes=session), chunk_no, QUARANTINED)]

    def waiting(self, quarantine_id: int) -> tuple[str, bytes] | None:
        """Reason and bytes of a frame in quarantine that was not stored since."""
        if quarantine_id in self._journal.replayed or not 0 <= quarantine_id < 1 << 62:
            return None
        cql = "SELECT reason, session, chunk_no, digest FROM quarantine WHERE bucket = ? AND id = ?"
        row = self._wire.one(
            self._wire.bind(cql, quarantine_id >> QUARANTINE_BUCKET, quarantine_id)
        )
        if row is None:
            return None
        raw = raws_of(self._wire, [row])[0]
        return None if raw is None else (row.reason, raw)

    def is_forgotten(self, player: bytes, session: uuid.UUID, received_s: float) -> bool:
        return self._journal.is_forgotten(player, session, received_s)


def raws_of(wire: Wire, rows: Iterable[Row]) -> list[bytes | None]:
    """The bytes of quarantined frames; None where they are gone."""
    cql = (
        "SELECT frame FROM chunks WHERE session = ? AND bucket = ? AND chunk_no = ? AND digest = ?"
    )
    found = wire.all(
        [wire.bind(cql, *frame_key(row.session, row.chunk_no, row.digest)) for row in rows]
    )
    return [answer[0].frame if answer else None for answer in found]
