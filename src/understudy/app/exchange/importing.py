"""Importing: chunks of files take the way that every game's take, through link, stream and ingest, each once.

A session keeps the random part of its id, or gets one that is made of its content; its time becomes that of the import
where it is too old to enter. So whatever was imported before, or recorded here, is found again in the store and left
out, and an import that was killed goes on where it ended.
"""

import uuid
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from understudy.app.crowd.ledger import LedgerLink
from understudy.app.data import DataFolder
from understudy.app.exchange.feed import Feed
from understudy.app.exchange.history import OnSteps, noise_of
from understudy.app.exchange.incoming import Incoming, Outline, same_spec, survey, with_session
from understudy.client.connect import local_link
from understudy.core.ages import DOOR_S, SPOOL_S, refused_session
from understudy.core.clock import Clock, SystemClock
from understudy.core.door import deployment_key, pseudonym
from understudy.core.errors import ConfigError, StorageFailed
from understudy.core.frame import (
    MAX_FRAMES_PER_SEND,
    CloseReport,
    DropReport,
    Frame,
    close_frame,
    drop_frame,
)
from understudy.core.game import GameSpec
from understudy.core.lock import FileLock
from understudy.core.names import PlayerName, player_name
from understudy.core.ports import Link, SessionFilter, SessionInfo
from understudy.stores.view import StoreView

SEND_BYTES = 4 * 1024 * 1024
NOBODY = player_name("imported")
"""Whose steps they are, where neither file nor caller says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What an import found and did."""

    game: str
    schema: str
    sessions: int
    steps: int
    """In the files."""
    stored_steps: int
    """New in the store."""
    there_sessions: int
    there_steps: int
    """In the store already, so left out."""
    refused_steps: int
    refusals: Mapping[str, int]
    by_running_ingest: bool
    details: Mapping[str, Any]
    """What else the files' format has to say."""

    def to_json(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in self.__slots__ if name != "details"}
        return {**own, "refusals": dict(self.refusals), **self.details}


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where a session goes: under which id and name; no id means it stays out."""

    owner: int
    """The file, of those given, that brings it."""
    outline: Outline
    player: PlayerName
    session: uuid.UUID | None = None
    had_steps: int = 0


def import_files(
    data: DataFolder, files: Sequence[Incoming], *, player: PlayerName | None = None, clock: Clock | None = None,
    on_steps: OnSteps | None = None,
) -> Imported:  # fmt: skip
    """Store every step of the files that is not in the store yet; nothing at all when one of the files is bad."""
    clock = clock or SystemClock()
    found = [survey(one, on_steps) for one in files]
    spec = same_spec(files)
    plans: dict[int, _Plan] = {}
    for owner, outlines in enumerate(found):
        for noise, outline in outlines.items():
            plans.setdefault(noise, _Plan(owner, outline, player or outline.player or NOBODY))
    origins = {noise: origin for one in files for noise, origin in one.origins.items()}
    with FileLock(data.root / "import.lock", what="an import into this folder"), Feed(data) as feed:
        feed.settle()  # what a killed import has sent counts as here
        known = _known(data, spec, {*plans, *origins.values()})
        key, now_s = deployment_key(data.root), clock.now()
        for noise, plan in plans.items():
            if known.get(origins.get(noise, -1)) is not None:
                continue  # recorded here, and exported from here
            plans[noise] = _placed(plan, known.get(noise), pseudonym(key, spec.game, plan.player), now_s)
        link = LedgerLink(local_link(data.root, spec, clock), data.ledger)
        try:
            link.register(spec)
            if any(plan.session is not None for plan in plans.values()):
                _send(link, feed, files, plans, on_steps)
        finally:
            link.close()
        feed.settle()
        return _counted(files, spec, plans, _known(data, spec, plans.keys()), feed)


def _known(data: DataFolder, spec: GameSpec, wanted: Container[int]) -> dict[int, SessionInfo]:
    """Sessions of the store by the random part of their ids; the fullest, should there be several."""
    known: dict[int, SessionInfo] = {}
    with StoreView(data.store) as view:
        for info in view.sessions(SessionFilter(game=spec.game)):
            noise = noise_of(info.session)
            if noise in wanted and (noise not in known or known[noise].n_steps < info.n_steps):
                known[noise] = info
    return known


def _placed(plan: _Plan, info: SessionInfo | None, player: bytes, now_s: float) -> _Plan:
    outline = plan.outline
    if info is None:
        return _Plan(plan.owner, outline, plan.player, _entering(outline.origin, now_s))
    if info.dropped_steps > outline.missing_steps:
        raise ConfigError(
            f"session {info.session} is here without {info.dropped_steps} steps that the file may have: it came "
            "from a narrower export; import into another folder, or forget its player first"
        )
    is_whole = info.n_steps >= outline.steps
    # A session under its own id may be the very one that was exported, and still be played: nobody else may close it.
    if info.closed or (is_whole and (info.player != player or info.session == outline.origin)):
        return plan
    if info.player != player:
        raise ConfigError(
            f"session {info.session} is here in part, and another player's: an import under another name was not "
            "finished; give the same --player as then"
        )
    # Begun by an import that was killed: the same frames again, and what is there counts once.
    if refused_session(info.session, entered_s=now_s, oldest_s=DOOR_S) is not None:
        if is_whole:
            return plan
        raise ConfigError(
            f"session {info.session} was begun by an import that was not finished, too long ago to go on; import into "
            "another folder, or forget its player first"
        )
    return _Plan(plan.owner, outline, plan.player, info.session, info.n_steps)


def _entering(origin: uuid.UUID, now_s: float) -> uuid.UUID:
    """The session's own id while it is young enough to enter, otherwise with the time of now."""
    if refused_session(origin, entered_s=now_s, oldest_s=SPOOL_S) is None:
        return origin
    return uuid.UUID(int=round(now_s * 1000) << 80 | origin.int & ((1 << 80) - 1))


def _send(
    link: Link, feed: Feed, files: Sequence[Incoming], plans: Mapping[int, _Plan], on_steps: OnSteps | None
) -> None:
    total, done = sum(plan.outline.steps for plan in plans.values()), 0
    waiting: list[Frame] = []
    players: dict[uuid.UUID, PlayerName] = {}
    for frame, player, steps in _frames(files, plans):
        if frame is not None:
            waiting.append(frame)
            players[frame.session] = player
        done += steps
        if len(waiting) == MAX_FRAMES_PER_SEND or sum(one.size_bytes for one in waiting) > SEND_BYTES:
            _flush(link, waiting, players)
            waiting, players = [], {}
            feed.step()
        if on_steps is not None:
            on_steps(done, total)
    if waiting:
        _flush(link, waiting, players)


def _frames(files: Sequence[Incoming], plans: Mapping[int, _Plan]) -> Iterator[tuple[Frame | None, PlayerName, int]]:
    """Every frame of the files, whose it is, and how many steps it brings; no frame for what stays out."""
    sent: dict[int, int] = {}
    for owner, one in enumerate(files):
        for chunk, _ in one.chunks():
            noise, n_steps = noise_of(chunk.meta.session), chunk.meta.n_steps
            plan = plans.get(noise)
            if plan is None or plan.owner != owner:
                continue
            outline, session = plan.outline, plan.session
            if session is None:
                yield None, plan.player, n_steps
                continue
            number = outline.last_no + 1
            if noise not in sent and outline.missing:
                report = DropReport(tuple(outline.missing), outline.missing_steps)
                yield drop_frame(session, number, report), plan.player, 0
            yield with_session(chunk, session).frame(), plan.player, n_steps
            sent[noise] = sent.get(noise, 0) + 1
            if sent[noise] == outline.chunks:
                number += bool(outline.missing)
                yield close_frame(session, number, CloseReport(number, outline.steps)), plan.player, 0


def _flush(link: Link, frames: Sequence[Frame], players: Mapping[uuid.UUID, PlayerName]) -> None:
    for ack in link.send(frames, players):
        if not ack.accepted:
            raise StorageFailed(
                f"the stream did not take a frame: {ack.refused or ack.error}; mend that, then run the same command "
                "again, which goes on where this one ended"
            )


def _counted(
    files: Sequence[Incoming], spec: GameSpec, plans: Mapping[int, _Plan], after: Mapping[int, SessionInfo], feed: Feed
) -> Imported:
    sent = {noise: plan for noise, plan in plans.items() if plan.session is not None}
    now = {noise: after[noise].n_steps if noise in after else 0 for noise in sent}
    out = [plan.outline for plan in plans.values() if plan.session is None]
    details: dict[str, Any] = {}
    for one in files:
        for name, value in one.report().items():
            is_number = isinstance(value, int) and not isinstance(value, bool)
            details[name] = details.get(name, 0) + value if is_number else value
    return Imported(
        game=spec.game, schema=spec.schema, sessions=len(plans),
        steps=sum(plan.outline.steps for plan in plans.values()),
        stored_steps=sum(now[noise] - plan.had_steps for noise, plan in sent.items()),
        there_sessions=len(out),
        there_steps=sum(one.steps for one in out) + sum(plan.had_steps for plan in sent.values()),
        refused_steps=sum(max(0, plan.outline.steps - now[noise]) for noise, plan in sent.items()),
        refusals=feed.refusals, by_running_ingest=not feed.is_ours, details=details,
    )  # fmt: skip
