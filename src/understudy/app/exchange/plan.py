"""Plan: where each session of an import goes, by what is in the store and what an earlier import has begun."""

import uuid
from dataclasses import dataclass, replace

from understudy.app.exchange.begun import Sent
from understudy.app.exchange.incoming import Outline
from understudy.core.errors import ConfigError
from understudy.core.names import PlayerName
from understudy.core.ports import SessionInfo
from understudy.core.session import DOOR_S, SPOOL_S, refused_session


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a session goes: under which id and name; no id means it stays out."""

    owner: int
    """The file, of those given, that brings it."""
    outline: Outline
    player: PlayerName
    session: uuid.UUID | None = None
    had_steps: int = 0


def placed(plan: Plan, info: SessionInfo | None, player: bytes, *, now_s: float, sent: Sent | None = None) -> Plan:
    """The plan with an id, or without one where everything is there; ConfigError where the two cannot be told apart.

    `info`: what the store has of the session; `sent`: under which id an import that was not finished has sent it.
    """
    outline = plan.outline
    if info is None:
        if sent is None:
            return replace(plan, session=entering(outline.origin, now_s))
        _must_go_on(sent.session, sent.player, player, now_s)
        return replace(plan, session=sent.session)
    if info.dropped_steps > outline.missing_steps:
        raise ConfigError(
            f"session {info.session} is here without {info.dropped_steps} steps that the file may have: it came "
            "from a narrower export; import into another folder, or forget its player first"
        )
    is_whole = info.n_steps >= outline.steps
    # A session under its own id may be the very one that was exported, and still be played: nobody else may close it.
    if info.closed or (is_whole and (info.player != player or info.session == outline.origin)):
        return plan
    # Begun by an import that was killed: the same frames again, and what is there counts once.
    if is_whole and not _may_enter(info.session, now_s):
        return plan
    _must_go_on(info.session, info.player, player, now_s)
    return replace(plan, session=info.session, had_steps=info.n_steps)


def _must_go_on(session: uuid.UUID, begun_by: bytes, player: bytes, now_s: float) -> None:
    if begun_by != player:
        raise ConfigError(
            f"session {session} is here in part, and another player's: an import under another name was not "
            "finished; give the same --player as then"
        )
    if not _may_enter(session, now_s):
        raise ConfigError(
            f"session {session} was begun by an import that was not finished, too long ago to go on; import into "
            "another folder, or forget its player first"
        )


def _may_enter(session: uuid.UUID, now_s: float) -> bool:
    return refused_session(session, entered_s=now_s, oldest_s=DOOR_S) is None


def entering(origin: uuid.UUID, now_s: float) -> uuid.UUID:
    """The session's own id while it is young enough to enter, otherwise with the time of now."""
    if refused_session(origin, entered_s=now_s, oldest_s=SPOOL_S) is None:
        return origin
    return uuid.UUID(int=round(now_s * 1000) << 80 | origin.int & ((1 << 80) - 1))
