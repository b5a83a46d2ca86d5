"""What the embedded store knows before a commit: sessions, frames under a key, quarantine, who is forgotten."""

import sqlite3
import uuid
from collections import OrderedDict

from understudy.core.errors import Corrupt
from understudy.core.names import session_time_s
from understudy.core.session import SessionState, tombstone_of, unpack_state
from understudy.stores.database import checked
from understudy.stores.view import COLUMNS, FrameRow

_RECENT = 4_096


class Known:
    """What the store knows before a commit; of sessions it keeps the last 4,096 at hand."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._recent: OrderedDict[uuid.UUID, tuple[int, str, SessionState]] = OrderedDict()
        rows = (checked("events", row) for row in db.execute("SELECT * FROM events WHERE player IS NOT NULL"))
        self._tombstones: dict[bytes, float] = {}
        for _, _, at_s, player in rows:
            self.forget(player, at_s)

    def state_of(self, session: uuid.UUID) -> tuple[str, SessionState] | None:
        """A session's game and state."""
        found = self._session(session)
        return None if found is None else found[1:]

    def id_of(self, session: uuid.UUID) -> int | None:
        """The number under which frames refer to a session."""
        found = self._session(session)
        return None if found is None else found[0]

    def _session(self, session: uuid.UUID) -> tuple[int, str, SessionState] | None:
        if (found := self._recent.get(session)) is not None:
            self._recent.move_to_end(session)
            return found
        row = self._db.execute("SELECT * FROM sessions WHERE session = ?", (session.bytes,)).fetchone()
        if row is not None:
            number, _, player, game, _, raw = checked("sessions", row)
            state = unpack_state(raw)
            if self._is_being_erased(number, player):
                state = SessionState(player=player, forgotten=True)
            self.remember(session, number, game, state)
            return number, game, state
        if self._tombstones and self._is_forgotten_session(session):
            return 0, "", SessionState(player=bytes(16), forgotten=True)
        return None

    def _is_being_erased(self, number: int, player: bytes) -> bool:
        if tombstone_of(player) not in self._tombstones:
            return False
        query = "SELECT 1 FROM erasures WHERE player = ? AND sessions_below > ?"
        return self._db.execute(query, (player, number)).fetchone() is not None

    def _is_forgotten_session(self, session: uuid.UUID) -> bool:
        query = "SELECT 1 FROM forgotten_sessions WHERE digest = ?"
        return self._db.execute(query, (tombstone_of(session.bytes),)).fetchone() is not None

    def must_know(self, session: uuid.UUID) -> tuple[str, SessionState]:
        """The same of a session that has stored frames."""
        if (found := self.state_of(session)) is None:
            raise Corrupt(f"session {session} has frames and is not in the store; restore it from a backup")
        return found

    def remember(self, session: uuid.UUID, number: int, game: str, state: SessionState) -> None:
        """A session as it is now."""
        self._recent[session] = (number, game, state)
        self._recent.move_to_end(session)
        if len(self._recent) > _RECENT:
            self._recent.popitem(last=False)

    def clear(self) -> None:
        """Ask the database again: what is at hand may be of a transaction that failed, or erased."""
        self._recent.clear()

    def frame(self, session: uuid.UUID, chunk_no: int) -> FrameRow | None:
        """The frame stored or recorded under a number: the one that can be read, if any."""
        if not (number := self.id_of(session)):
            return None
        query = f"SELECT {COLUMNS} FROM frames f WHERE session = ? AND chunk_no = ? ORDER BY gone LIMIT 1"
        row = self._db.execute(query, (number, chunk_no)).fetchone()
        return None if row is None else FrameRow(*row)

    def key_of(self, session: uuid.UUID, chunk_no: int) -> tuple[int, int] | None:
        """Checksum and length of the body stored or recorded under a number."""
        row = self.frame(session, chunk_no)
        return None if row is None else (row.body_crc, row.body_len)

    def is_stored(self, session: uuid.UUID, chunk_no: int) -> bool:
        """Whether a frame can be read under a number."""
        row = self.frame(session, chunk_no)
        return row is not None and row.gone == 0

    def quarantined_crcs(self, session: bytes, chunk_no: int) -> list[int]:
        """Checksums of quarantined frames under a number."""
        query = "SELECT body_crc FROM quarantine WHERE session = ? AND chunk_no = ?"
        return [row[0] for row in self._db.execute(query, (session, chunk_no))]

    def waiting(self, quarantine_id: int) -> tuple[str, bytes] | None:
        """Reason and bytes of a frame in quarantine that has not been stored since."""
        query = "SELECT reason, raw FROM quarantine WHERE id = ? AND replayed = 0"
        found: tuple[str, bytes] | None = self._db.execute(query, (quarantine_id,)).fetchone()
        return found

    def is_forgotten(self, player: bytes, session: uuid.UUID, received_s: float) -> bool:
        """Whether a player was erased after this session began, or after the frame came."""
        if not self._tombstones:
            return False
        at_s = self._tombstones.get(tombstone_of(player))
        return at_s is not None and (session_time_s(session) <= at_s or received_s < int(at_s))

    def forget(self, tombstone: bytes, at_s: float) -> None:
        """A player was erased."""
        self._tombstones[tombstone] = max(at_s, self._tombstones.get(tombstone, 0.0))
        self._recent.clear()
