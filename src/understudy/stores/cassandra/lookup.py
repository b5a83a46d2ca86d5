"""What a draft must know before a commit: admin commits, sessions and chunk numbers."""

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
class CommittedState:
    """A committed session state."""

    game: str
    state: SessionState
    events: int
    """Number of admin commits included in the state."""
    version: int


def committed_state(row: Row) -> CommittedState | None:
    """The state in a session's row, or None."""
    if row.state is None:
        return None
    return CommittedState(row.game or "", unpack_state(row.state), row.state_events, row.version)


class AdminJournal:
    """The effects of all admin commits up to number `head`; thread-safe."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._lock = threading.Lock()
        self.head = 0
        self.expired_before_s = 0
        """Chunks received before this time have expired."""
        self.forgets: dict[bytes, tuple[int, float]] = {}
        """Per player: the newest admin commit that forgot them, and its time."""
        self.replayed: set[int] = set()
        """Quarantine ids that were replayed."""
        self._hidden: dict[Key, int] = {}
        self._effects: dict[bytes, list[tuple[int, Arrived | int]]] = {}
        """Per session: (admin commit, replayed frame, or number of steps of a withdrawn chunk)."""

    def refresh(self) -> int:
        """Read new admin commits; return the number of the last one."""
        row = self._wire.one(
            self._wire.bind("SELECT commit_no FROM partitions WHERE partition = ?", ADMIN)
        )
        return self.read_to(0 if row is None else row.commit_no)

    def read_to(self, number: int) -> int:
        """Read the admin commits up to this valid number; return the last number read so far."""
        with self._lock:
            if number > self.head:
                for commit in commits_between(self._wire, ADMIN, self.head, number):
                    self.apply(commit)
                self.head = number
            return self.head

    def apply(self, commit: Commit) -> None:
        """Add one admin commit."""
        number = commit.number
        event = commit.facts.event
        for arrived in commit.facts.stored:
            self.replayed.add(arrived.replays)
            self._effects.setdefault(arrived.session, []).append((number, arrived))
        if event is None:
            return
        if event.kind == "forget":
            before = self.forgets.get(event.player, (0, 0.0))
            self.forgets[event.player] = (number, max(event.at_s, before[1]))
        for session, chunk_no, n_steps in event.chunks:
            self._hidden[session, chunk_no] = number
            self._effects.setdefault(session, []).append((number, n_steps))

    # --- effects ----------------------------------------------------------------------------------

    def removal_reason(
        self, key: Key, player: bytes, kind: int, received_s: int, events: int
    ) -> Gone | None:
        """Why a frame, stored after admin commit `events`, is no longer readable, or None."""
        if events < self.forgets.get(player, (0, 0.0))[0]:
            return "forgotten"
        if events < self._hidden.get(key, 0):
            return "quarantined"
        return "expired" if kind == FrameKind.DATA and received_s < self.expired_before_s else None

    def arrival_removal_reason(self, arrived: Arrived, events: int) -> Gone | None:
        """Why the frame of an arrival is no longer readable, or None if it is."""
        return self.removal_reason(
            arrived.key, arrived.player, arrived.kind, arrived.received_s, events
        )

    def is_forgotten(self, player: bytes, session: uuid.UUID, received_s: float) -> bool:
        """Whether the player was erased after this session began or this frame was received."""
        if player not in self.forgets:
            return False
        at_s = self.forgets[player][1]
        return session_time_s(session) <= at_s or received_s < int(at_s)

    def up_to_date(
        self, session: uuid.UUID, committed: CommittedState | None
    ) -> CommittedState | None:
        """A session's state with the effects of all admin commits since it was written."""
        if committed is None or committed.events >= self.head:
            return committed
        state = committed.state
        for number, effect in self._effects.get(session.bytes, ()):
            if number > committed.events:
                state = (
                    withdraw(state, effect) if isinstance(effect, int) else _stored(state, effect)
                )
        if committed.events < self.forgets.get(state.player, (0, 0.0))[0]:
            state = replace(state, forgotten=True)
        return replace(committed, state=state, events=self.head)


def _stored(state: SessionState, arrived: Arrived) -> SessionState:
    after, reason = admit(state, arrived.arrival())
    return readmit(state, arrived.arrival()) if reason else after


class CassandraLookup:
    """The Cassandra store's `CommitLookup`; reads what is not cached in `recent`."""

    def __init__(
        self, wire: Wire, journal: AdminJournal, recent: Mapping[uuid.UUID, CommittedState]
    ) -> None:
        self._wire = wire
        self._journal = journal
        self._recent = recent
        self._states: dict[uuid.UUID, CommittedState | None] = {}
        self._numbers: dict[tuple[uuid.UUID, int], list[Row]] = {}

    # --- reading ahead --------------------------------------------------------------------------

    def look_up(
        self, arrivals: Iterable[tuple[uuid.UUID, int]], doubtful: Iterable[tuple[uuid.UUID, int]]
    ) -> None:
        """Read all that a draft needs at once: sessions, and the rows of chunk numbers.

        Rows are read for every number in `doubtful`, and for those in `arrivals` that their session
        has already seen.
        """
        numbers = list(arrivals)
        doubts = list(doubtful)
        self._load_states({session for session, _ in [*numbers, *doubts]})
        seen_keys = [
            key
            for key in numbers
            if (game_and_state := self.state_of(key[0])) is not None
            and game_and_state[1].has_seen(key[1])
        ]
        self._load_numbers({*seen_keys, *doubts})

    def _load_states(self, sessions: Iterable[uuid.UUID]) -> None:
        missing = [
            session
            for session in sessions
            if session not in self._states and session not in self._recent
        ]
        cql = f"SELECT {STATE} FROM sessions WHERE session = ? LIMIT 1"
        results = self._wire.all([self._wire.bind(cql, session) for session in missing])
        for session, rows in zip(missing, results, strict=True):
            self._states[session] = committed_state(rows[0]) if rows else None

    def _load_numbers(self, keys: Iterable[tuple[uuid.UUID, int]]) -> None:
        missing = [key for key in keys if key not in self._numbers]
        cql = "SELECT * FROM sessions WHERE session = ? AND chunk_no = ?"
        results = self._wire.all([self._wire.bind(cql, *key) for key in missing])
        for key, rows in zip(missing, results, strict=True):
            self._numbers[key] = [row for row in rows if row.what is not None]

    # --- the CommitLookup of a draft --------------------------------------------------------------

    def committed_state(self, session: uuid.UUID) -> CommittedState | None:
        """A session's state with the effects of all admin commits; None if it is unknown."""
        if session in self._recent:
            committed: CommittedState | None = self._recent[session]
        else:
            if session not in self._states:
                self._load_states([session])
            committed = self._states[session]
        return self._journal.up_to_date(session, committed)

    def state_of(self, session: uuid.UUID) -> tuple[str, SessionState] | None:
        current = self.committed_state(session)
        return None if current is None else (current.game, current.state)

    def _rows(self, session: uuid.UUID, chunk_no: int, what: int) -> list[Row]:
        if (session, chunk_no) not in self._numbers:
            self._load_numbers([(session, chunk_no)])
        return [row for row in self._numbers[session, chunk_no] if row.what == what]

    def key_of(self, session: uuid.UUID, chunk_no: int) -> tuple[int, int] | None:
        """Checksum and length of the body that was stored under a chunk number."""
        rows = self._rows(session, chunk_no, STORED)
        return (rows[0].crc, rows[0].length) if rows else None

    def is_stored(self, session: uuid.UUID, chunk_no: int) -> bool:
        """Whether a chunk number has a readable frame."""
        return any(self.is_readable(row) for row in self._rows(session, chunk_no, STORED))

    def is_readable(self, row: Row) -> bool:
        """Whether the frame of a row can still be read: not forgotten, quarantined or expired."""
        session = self.committed_state(row.session)
        player = b"" if session is None else session.state.player
        key = (row.session.bytes, row.chunk_no)
        return (
            self._journal.removal_reason(key, player, row.kind, row.received_s, row.events) is None
        )

    def data_rows(self, session: uuid.UUID, chunk_no: int) -> list[Row]:
        """Rows of readable data frames of a chunk number."""
        rows = self._rows(session, chunk_no, STORED)
        return [row for row in rows if row.kind == FrameKind.DATA and self.is_readable(row)]

    def quarantined_crcs(self, session: bytes, chunk_no: int) -> list[int]:
        return [row.crc for row in self._rows(uuid.UUID(bytes=session), chunk_no, QUARANTINED)]

    def waiting(self, quarantine_id: int) -> tuple[str, bytes] | None:
        """Reason and bytes of a quarantined frame that has not been replayed."""
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
    """The bytes of quarantined frames; None for erased ones."""
    cql = (
        "SELECT frame FROM chunks WHERE session = ? AND bucket = ? AND chunk_no = ? AND digest = ?"
    )
    results = wire.all(
        [wire.bind(cql, *frame_key(row.session, row.chunk_no, row.digest)) for row in rows]
    )
    return [frames[0].frame if frames else None for frames in results]
