"""What a local store knows before a commit: from the log, from what is being sealed, and from its catalogue."""

import uuid
from collections.abc import Callable, Sequence

from understudy.core.names import session_time_s
from understudy.core.session import SessionState
from understudy.stores.catalogue import Catalogue
from understudy.stores.generation import Generation
from understudy.stores.known import KnownSessions


class LocalKnown:
    """Answers by session, number or player; the store tells it what is not sealed yet and who is forgotten."""

    def __init__(self, catalogue: Catalogue, unsealed: Callable[[], Sequence[Generation]]) -> None:
        """`unsealed`: the generations that the catalogue does not know yet, the newest first."""
        self._catalogue, self._unsealed = catalogue, unsealed
        self.sealed_sessions = KnownSessions(catalogue)
        self._tombstones: dict[bytes, float] = dict(
            catalogue.rows("SELECT player, max(at) FROM tombstones GROUP BY player")
        )

    def state_of(self, session: uuid.UUID) -> tuple[str, SessionState] | None:
        """A session's game and state."""
        for generation in self._unsealed():
            if known := generation.sessions.get(session):
                return known
        return self.sealed_sessions.get(session)

    def key_of(self, session: uuid.UUID, chunk_no: int) -> tuple[int, int] | None:
        """(crc, length) stored or recorded under a number."""
        for generation in self._unsealed():
            if key := generation.keys.get((session, chunk_no)):
                return key
        return self._catalogue.key_of(session, chunk_no)

    def is_stored(self, session: uuid.UUID, chunk_no: int) -> bool:
        """Whether a frame can be read under a number."""
        is_here = any((session, chunk_no) in generation.keys for generation in self._unsealed())
        return is_here or self._catalogue.is_stored(session, chunk_no)

    def quarantined_crcs(self, session: bytes, chunk_no: int) -> list[int]:
        found = self._catalogue.quarantined_key(uuid.UUID(bytes=session), chunk_no)
        for generation in self._unsealed():
            found += generation.quarantined_keys.get((session, chunk_no), [])
        return found

    def waiting(self, quarantine_id: int) -> tuple[str, bytes] | None:
        return self._catalogue.waiting(quarantine_id)

    def is_forgotten(self, player: bytes, session: uuid.UUID, received_s: float) -> bool:
        """Whether a player was erased after this session began, or after the frame came."""
        at = self._tombstones.get(player)
        return at is not None and (session_time_s(session) <= at or received_s < int(at))

    def forget(self, player: bytes, at_s: float) -> None:
        """A player was erased."""
        self._tombstones[player] = max(at_s, self._tombstones.get(player, 0.0))
        self.sealed_sessions.clear()
