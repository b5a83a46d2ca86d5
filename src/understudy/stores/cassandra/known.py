"""What the store knows before a commit: sessions, numbers, quarantine. Read for a whole batch at once."""

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from understudy.core.frame import FrameKind
from understudy.core.session import SessionState, unpack_state
from understudy.stores.cassandra.facts import Arrived, Tag
from understudy.stores.cassandra.journal import Journal
from understudy.stores.cassandra.tables import QUARANTINE_BUCKET
from understudy.stores.cassandra.tags import Tags
from understudy.stores.cassandra.wire import Row, Wire

STORED, QUARANTINED = 0, 1
"""What a row of a number tells of."""

STATICS = (
    "session, game, player, state, state_events, state_partition, state_commit, state_attempt, previous, "
    "previous_game, previous_events"
)
_STATE = f"SELECT {STATICS} FROM sessions WHERE session = ? LIMIT 1"
_NUMBER = "SELECT * FROM sessions WHERE session = ? AND chunk_no = ?"


@dataclass(frozen=True, slots=True)
class Stated:
    """A session as it was committed, with the admin commits up to a number already in it."""

    game: str
    state: SessionState
    events: int


def tag_of(row: Row) -> Tag | None:
    """The attempt that wrote a session's state."""
    return None if row.state is None else Tag(row.state_partition, row.state_commit, row.state_attempt)


def stated(row: Row, is_committed: bool) -> Stated | None:
    """What a session's row says; what an attempt that came to nothing wrote is passed over."""
    if is_committed:
        return Stated(row.game or "", unpack_state(row.state), row.state_events)
    if row.previous:
        return Stated(row.previous_game or "", unpack_state(row.previous), row.previous_events)
    return None


class Known:
    """Answers a draft's questions; what is not at hand is read."""

    def __init__(self, wire: Wire, journal: Journal, tags: Tags, recent: Mapping[uuid.UUID, Stated]) -> None:
        self._wire, self._journal, self._tags, self._recent = wire, journal, tags, recent
        self._states: dict[uuid.UUID, Stated | None] = {}
        self._numbers: dict[tuple[uuid.UUID, int], list[Row]] = {}
        self.newest_stamp = 0
        """The highest stamp met on rows that the commit may overwrite."""

    # --- reading ahead ------------------------------------------------------------------------------------------

    def look_up(self, arrivals: Iterable[tuple[uuid.UUID, int]], doubtful: Iterable[tuple[uuid.UUID, int]]) -> None:
        """Read the sessions of all these numbers, and the numbers that were seen before or are in doubt."""
        numbers = list(arrivals)
        self._load_states({session for session, _ in [*numbers, *doubtful]})
        seen = [key for key in numbers if (known := self.state_of(key[0])) is not None and known[1].has_seen(key[1])]
        self._load_numbers({*seen, *doubtful})

    def _load_states(self, sessions: Iterable[uuid.UUID]) -> None:
        wanted = [one for one in sessions if one not in self._states and one not in self._recent]
        rows = [found[0] for found in self._wire.all([self._wire.bind(_STATE, one) for one in wanted]) if found]
        committed = self._tags.committed(tag for row in rows if (tag := tag_of(row)) is not None)
        self._states.update(dict.fromkeys(wanted))
        for row in rows:
            tag = tag_of(row)
            if tag is not None:
                self.newest_stamp = max(self.newest_stamp, tag.attempt)
                self._states[row.session] = stated(row, tag in committed)

    def _load_numbers(self, keys: Iterable[tuple[uuid.UUID, int]]) -> None:
        wanted = [key for key in keys if key not in self._numbers]
        found = self._wire.all([self._wire.bind(_NUMBER, *key) for key in wanted])
        every = [row for rows in found for row in rows if row.what is not None]
        committed = self._tags.committed(Tag(row.partition, row.commit_no, row.attempt) for row in every)
        for key, rows in zip(wanted, found, strict=True):
            self._numbers[key] = [
                row
                for row in rows
                if row.what is not None and Tag(row.partition, row.commit_no, row.attempt) in committed
            ]

    # --- what a draft asks --------------------------------------------------------------------------------------

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
        one = Arrived(
            row.session.bytes,
            row.chunk_no,
            row.kind,
            row.crc,
            row.length,
            player,
            row.received_s,
            0,
            row.n_steps,
            "",
            "",
        )
        return self._journal.gone(one, row.events) is None

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
        row = self._wire.one(self._wire.bind(
            "SELECT * FROM quarantine WHERE bucket = ? AND id = ?", quarantine_id >> QUARANTINE_BUCKET, quarantine_id
        ))  # fmt: skip
        if row is None or row.raw is None or row.reason is None:
            return None
        tag = Tag(row.partition, row.commit_no, row.attempt)
        return (row.reason, row.raw) if tag in self._tags.committed([tag]) else None

    def is_forgotten(self, player: bytes, session: uuid.UUID, received_s: float) -> bool:
        return self._journal.is_forgotten(player, session, received_s)
