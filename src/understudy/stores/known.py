"""Sessions the catalogue knows, with the last ones kept at hand."""

import uuid
from collections import OrderedDict
from collections.abc import Iterable

from understudy.core.session import SessionState, unpack_state
from understudy.stores.catalogue import Catalogue

Known = tuple[str, SessionState]
"""A session's game and state."""

_MOST = 4096


class KnownSessions:
    """Looks sessions up; however many there are, memory holds the last 4,096."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._recent: OrderedDict[uuid.UUID, Known] = OrderedDict()

    def get(self, session: uuid.UUID) -> Known | None:
        """What was known of a session when the log was last sealed."""
        if session not in self._recent:
            row = self._catalogue.one("SELECT game, state FROM sessions WHERE session = ?", session.bytes)
            if row is None:
                return None
            self.remember([(session, (row[0], unpack_state(row[1])))])
        self._recent.move_to_end(session)
        return self._recent[session]

    def remember(self, sessions: Iterable[tuple[uuid.UUID, Known]]) -> None:
        """Sessions as they were just sealed."""
        for session, known in sessions:
            self._recent[session] = known
            self._recent.move_to_end(session)
            if len(self._recent) > _MOST:
                self._recent.popitem(last=False)

    def clear(self) -> None:
        self._recent.clear()
