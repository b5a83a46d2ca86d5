"""Counting frames into sessions: the same for every store."""

import uuid
from collections.abc import Callable

from understudy.core.session import Arrival, SessionState, admit, readmit

Sessions = dict[uuid.UUID, tuple[str, SessionState]]
"""Game and state per session."""

StateOf = Callable[[uuid.UUID], tuple[str, SessionState] | None]
"""A session's game and state before."""


def count(sessions: Sessions, session: uuid.UUID, game: str, arrival: Arrival, *, before: StateOf) -> bool:
    """Add one frame to its session; whether it counted."""
    known = sessions.get(session) or before(session)
    state, verdict = admit(known[1] if known else None, arrival)
    if not verdict:
        sessions[session] = (known[0] if known and known[0] else game, state)
    return not verdict


def count_again(sessions: Sessions, session: uuid.UUID, game: str, arrival: Arrival, *, before: StateOf) -> None:
    """Add a frame whose number counted while it lay in quarantine."""
    known_game, state = sessions.get(session) or before(session) or (game, SessionState(player=arrival.player))
    sessions[session] = (known_game or game, readmit(state, arrival))
