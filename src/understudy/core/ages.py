"""How old a session may be, at each place its frames pass; each number follows from the one before.

A session id carries the time its session began. Since no frame enters once its session is too old, whoever removes
duplicates need not remember sessions for ever. Age is counted to the moment a frame entered, not to the moment
somebody looks: a frame that was acknowledged stays good, however long ingest was down or a schema was missing.
"""

import uuid

from understudy.core.errors import Refused
from understudy.core.names import session_time_s

DAY_S = 86_400.0

AHEAD_S = 1 * DAY_S
"""How far a player's clock may run ahead."""

SPOOL_S = 7 * DAY_S
"""How long a client tries to send what it recorded."""

DOOR_S = SPOOL_S + 1 * DAY_S
"""A day more than clients try, so that clocks which differ refuse nothing that was sent in time."""

INGEST_S = DOOR_S + 7 * DAY_S
"""A week more than the door takes: for streams that other doors append to and that stamp their own time."""

REMEMBER_S = INGEST_S + AHEAD_S
"""How long what is gone is remembered after it came: a session that began AHEAD_S after its first frame may go on
entering for INGEST_S from there."""


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
