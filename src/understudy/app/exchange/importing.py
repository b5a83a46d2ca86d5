"""Importing: chunks of files take the way that every game's take, through link, stream and ingest, each once.

A session keeps the random part of its id, or gets one that is made of its content; its time becomes that of the import
where it is too old to enter. So whatever was imported before, or recorded here, is found again in the store and left
out, and an import that was killed goes on where it ended.
"""

import uuid
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any

from understudy.app.crowd.ledger import LedgerLink
from understudy.app.exchange.begun import Begun, Sent
from understudy.app.exchange.destination import Destination
from understudy.app.exchange.elsewhere import Elsewhere
from understudy.app.exchange.feed import Feed
from understudy.app.exchange.history import OnSteps, noise_of
from understudy.app.exchange.incoming import Incoming, same_spec, survey, with_session
from understudy.app.exchange.plan import Plan, placed
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

SEND_BYTES = 4 * 1024 * 1024
SEND_TRIES = 8
"""How often frames are handed to a stream that is busy or away, a few seconds apart at last."""
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
    waiting_steps: int
    """In the stream for good, and not seen in a store elsewhere yet."""
    refusals: Mapping[str, int]
    by_running_ingest: bool
    details: Mapping[str, Any]
    """What else the files' format has to say."""

    def to_json(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in self.__slots__ if name != "details"}
        return {**own, "refusals": dict(self.refusals), **self.details}


def import_files(
    place: Destination, files: Sequence[Incoming], *, player: PlayerName | None = None, clock: Clock | None = None,
    on_steps: OnSteps | None = None,
) -> Imported:  # fmt: skip
    """Store every step of the files that is not in the store yet; nothing at all when one of the files is bad."""
    clock, data = clock or SystemClock(), place.data
    found = [survey(one, on_steps) for one in files]
    spec = same_spec(files)
    plans: dict[int, Plan] = {}
    for owner, outlines in enumerate(found):
        for noise, outline in outlines.items():
            first = plans.setdefault(noise, Plan(owner, outline, player or outline.player or NOBODY))
            if not first.outline.is_like(outline):
                raise ConfigError(
                    f"{files[first.owner].name} and {files[owner].name} hold different steps of session "
                    f"{outline.origin}; import the one that has them all"
                )
    with FileLock(data.root / "import.lock", what="an import into this folder"), place.feed(clock) as feed:
        feed.settle(spec.game, {})  # what a killed import has sent counts as here
        begun, key = Begun(data.root), deployment_key(data.root)
        players = {one.player: pseudonym(key, spec.game, one.player) for one in plans.values()}
        _place(plans, _origins(files), feed, spec, begun.sessions, players, clock.now())
        sent = {
            noise: Sent(plan.session, players[plan.player])
            for noise, plan in plans.items() if plan.session is not None
        }  # fmt: skip
        link = place.link(spec, clock)
        noting = LedgerLink(link, data.ledger)
        try:
            place.register(spec, link)
            if sent:
                if feed.is_elsewhere:
                    begun.add(sent)
                _send(_Sender(noting, clock), feed, files, plans, on_steps)
        finally:
            noting.close()
        feed.settle(spec.game, {one.session: one.player for one in sent.values()})
        after = _known(feed, spec, plans.keys())
        if feed.is_elsewhere:
            begun.finish([noise for noise in plans if noise in after and after[noise].closed])
        return _counted(files, spec, plans, after, feed)


def _origins(files: Sequence[Incoming]) -> dict[int, int]:
    return {noise: origin for one in files for noise, origin in one.origins.items()}


def _place(
    plans: dict[int, Plan], origins: Mapping[int, int], feed: Feed | Elsewhere, spec: GameSpec,
    begun: Mapping[int, Sent],
    players: Mapping[PlayerName, bytes], now_s: float,
) -> None:  # fmt: skip
    """Give an id to each plan that is to be sent."""
    known = _known(feed, spec, {*plans, *origins.values()})
    for noise, plan in plans.items():
        if known.get(origins.get(noise, -1)) is not None:
            continue  # recorded here, and exported from here
        sent = begun.get(noise) if feed.is_elsewhere else None
        plans[noise] = placed(plan, known.get(noise), players[plan.player], now_s=now_s, sent=sent)


def _known(feed: Feed | Elsewhere, spec: GameSpec, wanted: Container[int]) -> dict[int, SessionInfo]:
    """Sessions of the store by the random part of their ids; the fullest, should there be several."""
    known: dict[int, SessionInfo] = {}
    for info in feed.sessions(SessionFilter(game=spec.game)):
        noise = noise_of(info.session)
        if noise in wanted and (noise not in known or known[noise].n_steps < info.n_steps):
            known[noise] = info
    return known


def _send(
    sender: "_Sender",
    feed: Feed | Elsewhere,
    files: Sequence[Incoming],
    plans: Mapping[int, Plan],
    on_steps: OnSteps | None,
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
            sender.send(waiting, players)
            waiting, players = [], {}
            feed.step()
        if on_steps is not None:
            on_steps(done, total)
    if waiting:
        sender.send(waiting, players)


def _frames(files: Sequence[Incoming], plans: Mapping[int, Plan]) -> Iterator[tuple[Frame | None, PlayerName, int]]:
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


class _Sender:
    """Hands frames over, and again while that may help."""

    def __init__(self, link: Link, clock: Clock) -> None:
        self._link, self._clock = link, clock

    def send(self, frames: Sequence[Frame], players: Mapping[uuid.UUID, PlayerName]) -> None:
        """All of them are durable in the stream; StorageFailed when one is not."""
        for tried in range(SEND_TRIES):
            acks = self._link.send(frames, players)
            left = [(frame, ack) for frame, ack in zip(frames, acks, strict=True) if not ack.accepted]
            if not left:
                return
            refused = next((ack.refused for _, ack in left if ack.refused), None)
            if refused or tried + 1 == SEND_TRIES:
                raise StorageFailed(
                    f"the stream did not take a frame: {refused or left[0][1].error}; mend that, then run the same "
                    "command again, which goes on where this one ended"
                )
            frames = [frame for frame, _ in left]
            self._clock.wait(Event(), min(max(ack.retry_after_s for _, ack in left), 0.1 * 2**tried))


def _counted(
    files: Sequence[Incoming],
    spec: GameSpec,
    plans: Mapping[int, Plan],
    after: Mapping[int, SessionInfo],
    feed: Feed | Elsewhere,
) -> Imported:
    sent = {noise: plan for noise, plan in plans.items() if plan.session is not None}
    now = {noise: after[noise].n_steps if noise in after else 0 for noise in sent}
    lacking = {noise: max(0, plan.outline.steps - now[noise]) for noise, plan in sent.items()}
    is_waiting = {noise: feed.is_elsewhere and not (noise in after and after[noise].closed) for noise in sent}
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
        refused_steps=sum(steps for noise, steps in lacking.items() if not is_waiting[noise]),
        waiting_steps=sum(steps for noise, steps in lacking.items() if is_waiting[noise]),
        refusals=feed.refusals, by_running_ingest=not feed.is_ours, details=details,
    )  # fmt: skip
