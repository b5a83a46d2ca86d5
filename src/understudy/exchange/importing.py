"""Importing: chunks of files take the way that every game's take, through link, stream and ingest,
each once.

A session keeps the random part of its id, or gets one that is made of its content; its time becomes
that of the import where it is too old to enter. So whatever was imported before, or recorded here,
is found again in the store and left out, and an import that was killed goes on where it ended.
"""

import uuid
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from threading import Event
from typing import Any

from understudy.backends.deployment import open_link, register
from understudy.backends.unfinished_imports import SendingSession, UnfinishedImports
from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import ConfigError, StorageFailed
from understudy.core.log import FileLock
from understudy.core.names import PlayerName, player_name
from understudy.exchange.destination import Destination, Landing
from understudy.exchange.exporting import OnSteps
from understudy.exchange.incoming import Incoming, Outline, noise_of, survey
from understudy.experience.chunk import Chunk
from understudy.experience.frame import (
    MAX_FRAMES_PER_SEND,
    CloseReport,
    DropReport,
    Frame,
    close_frame,
    drop_frame,
)
from understudy.experience.game import GameSpec
from understudy.experience.intake import deployment_key, pseudonym
from understudy.experience.session import DOOR_S, SPOOL_S, refused_session
from understudy.ports import Link, SessionFilter, SessionInfo
from understudy.simulation.ledger import LedgerLink

NOBODY = player_name("imported")
"""Whose steps they are, where neither file nor caller says."""

SEND_BYTES = 4 * 1024 * 1024
SEND_TRIES = 8
"""How often frames are handed to a stream that is busy or away, a few seconds apart at last."""


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
    place: Destination,
    files: Sequence[Incoming],
    *,
    player: PlayerName | None = None,
    clock: Clock | None = None,
    on_steps: OnSteps | None = None,
) -> Imported:
    """Store every step of the files that is not in the store yet; nothing at all when one of the
    files is bad."""
    clock = clock or SystemClock()
    surveys = [survey(file, on_steps) for file in files]
    spec = files[0].spec
    for file in files:
        if file.spec.schema != spec.schema:
            raise ConfigError(
                f"{files[0].name} and {file.name} are of different games or schemas; import them "
                "one by one"
            )
    plans = _planned(files, surveys, player)
    root = place.data.root
    lock = FileLock(root / "import.lock", what="an import into this folder")
    with lock, closing(place.landing(clock)) as landing:
        landing.settle(spec.game, {})  # what a killed import has sent counts as here
        begun = UnfinishedImports(root)
        key = deployment_key(root)
        now_s = clock.now()
        origins = {noise: origin for file in files for noise, origin in file.origins.items()}
        known = _known(landing, spec, {*plans, *origins.values()})
        players = {plan.player: pseudonym(key, spec.game, plan.player) for plan in plans.values()}
        for noise, plan in plans.items():
            if known.get(origins.get(noise, -1)) is not None:
                continue  # recorded here, and exported from here
            before = begun.sessions.get(noise) if landing.is_elsewhere else None
            plans[noise] = placed(
                plan, known.get(noise), players[plan.player], now_s=now_s, sent=before
            )
        sent = {
            noise: SendingSession(plan.session, players[plan.player])
            for noise, plan in plans.items()
            if plan.session is not None
        }
        link = open_link(place.data, spec, stream=place.config.stream.url, clock=clock)
        with closing(LedgerLink(link, place.data.ledger)) as noting:
            register(place.data, spec, link, models=place.config.models.url)
            if sent and landing.is_elsewhere:
                begun.add(sent)
            if sent:
                _send(files, plans, noting, clock, after_each=landing.step, on_steps=on_steps)
        landing.settle(spec.game, {one.session: one.player for one in sent.values()})
        after = _known(landing, spec, plans.keys())
        if landing.is_elsewhere:
            begun.finish([noise for noise in plans if noise in after and after[noise].closed])
        return _counted(files, spec, plans, after, landing)


def _known(landing: Landing, spec: GameSpec, wanted: Container[int]) -> dict[int, SessionInfo]:
    """Sessions of the store by the random part of their ids; the fullest, should there be
    several."""
    known: dict[int, SessionInfo] = {}
    for info in landing.sessions(SessionFilter(game=spec.game)):
        noise = noise_of(info.session)
        if noise in wanted and (noise not in known or known[noise].n_steps < info.n_steps):
            known[noise] = info
    return known


def _counted(
    files: Sequence[Incoming],
    spec: GameSpec,
    plans: Mapping[int, "Plan"],
    after: Mapping[int, SessionInfo],
    landing: Landing,
) -> Imported:
    sent = {noise: plan for noise, plan in plans.items() if plan.session is not None}
    now = {noise: after[noise].n_steps if noise in after else 0 for noise in sent}
    lacking = {noise: max(0, plan.outline.steps - now[noise]) for noise, plan in sent.items()}
    is_waiting = {
        noise: landing.is_elsewhere and not (noise in after and after[noise].closed)
        for noise in sent
    }
    out = [plan.outline for plan in plans.values() if plan.session is None]
    details: dict[str, Any] = {}
    for file in files:
        for name, value in file.report().items():
            is_number = isinstance(value, int) and not isinstance(value, bool)
            details[name] = details.get(name, 0) + value if is_number else value
    return Imported(
        game=spec.game,
        schema=spec.schema,
        sessions=len(plans),
        steps=sum(plan.outline.steps for plan in plans.values()),
        stored_steps=sum(now[noise] - plan.had_steps for noise, plan in sent.items()),
        there_sessions=len(out),
        there_steps=sum(one.steps for one in out) + sum(plan.had_steps for plan in sent.values()),
        refused_steps=sum(steps for noise, steps in lacking.items() if not is_waiting[noise]),
        waiting_steps=sum(steps for noise, steps in lacking.items() if is_waiting[noise]),
        refusals=landing.refusals,
        by_running_ingest=not landing.is_ours,
        details=details,
    )


# --- where each session goes, by what is in the store and what an earlier import has begun --------


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a session goes: under which id and name; no id means it stays out."""

    owner: int
    """The file, of those given, that brings it."""
    outline: Outline
    player: PlayerName
    session: uuid.UUID | None = None
    had_steps: int = 0


def _planned(
    files: Sequence[Incoming], surveys: Sequence[Mapping[int, Outline]], player: PlayerName | None
) -> dict[int, Plan]:
    """A plan for each session; ConfigError when two files contradict each other."""
    plans: dict[int, Plan] = {}
    for owner, outlines in enumerate(surveys):
        for noise, outline in outlines.items():
            first = plans.setdefault(
                noise, Plan(owner, outline, player or outline.player or NOBODY)
            )
            if not first.outline.is_like(outline):
                raise ConfigError(
                    f"{files[first.owner].name} and {files[owner].name} hold different steps of "
                    "session "
                    f"{outline.origin}; import the one that has them all"
                )
    return plans


def placed(
    plan: Plan,
    info: SessionInfo | None,
    player: bytes,
    *,
    now_s: float,
    sent: "SendingSession | None" = None,
) -> Plan:
    """The plan with an id, or without one where everything is there; ConfigError where the two may
    differ.

    `info`: what the store has of the session; `sent`: under which id an import that was not
    finished has sent it.
    """
    outline = plan.outline
    if info is None:
        if sent is None:
            return replace(plan, session=entering(outline.origin, now_s))
        _must_go_on(sent.session, sent.player, player, now_s)
        return replace(plan, session=sent.session)
    if info.dropped_steps > outline.missing_steps:
        raise ConfigError(
            f"session {info.session} is here without {info.dropped_steps} steps that the file may "
            "have: it came "
            "from a narrower export; import into another folder, or forget its player first"
        )
    is_whole = info.n_steps >= outline.steps
    # A session under its own id may be the very one that was exported, and still be played: no
    # import may close it.
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
            f"session {session} is here in part, and another player's: an import under another "
            "name was not "
            "finished; give the same --player as then"
        )
    if not _may_enter(session, now_s):
        raise ConfigError(
            f"session {session} was begun by an import that was not finished, too long ago to go "
            "on; import into "
            "another folder, or forget its player first"
        )


def _may_enter(session: uuid.UUID, now_s: float) -> bool:
    return refused_session(session, entered_s=now_s, oldest_s=DOOR_S) is None


def entering(origin: uuid.UUID, now_s: float) -> uuid.UUID:
    """The session's own id while it is young enough to enter, otherwise with the time of now."""
    if refused_session(origin, entered_s=now_s, oldest_s=SPOOL_S) is None:
        return origin
    return uuid.UUID(int=round(now_s * 1000) << 80 | origin.int & ((1 << 80) - 1))


# --- sending --------------------------------------------------------------------------------------


def _send(
    files: Sequence[Incoming],
    plans: Mapping[int, Plan],
    link: Link,
    clock: Clock,
    *,
    after_each: Callable[[], None],
    on_steps: OnSteps | None,
) -> None:
    """Send what has an id; `after_each` is called whenever some of it is in the stream."""
    total = sum(plan.outline.steps for plan in plans.values())
    done = 0
    waiting: list[Frame] = []
    players: dict[uuid.UUID, PlayerName] = {}
    for frame, player, steps in _frames(files, plans):
        if frame is not None:
            waiting.append(frame)
            players[frame.session] = player
        done += steps
        if (
            len(waiting) == MAX_FRAMES_PER_SEND
            or sum(one.size_bytes for one in waiting) > SEND_BYTES
        ):
            _hand_over(waiting, players, link, clock)
            waiting = []
            players = {}
            after_each()
        if on_steps is not None:
            on_steps(done, total)
    if waiting:
        _hand_over(waiting, players, link, clock)


def _hand_over(
    frames: Sequence[Frame], players: Mapping[uuid.UUID, PlayerName], link: Link, clock: Clock
) -> None:
    """All of them are durable in the stream, also after several tries; StorageFailed when one is
    not."""
    for tried in range(SEND_TRIES):
        acks = link.send(frames, players)
        left = [(frame, ack) for frame, ack in zip(frames, acks, strict=True) if not ack.accepted]
        if not left:
            return
        refused = next((ack.refused for _, ack in left if ack.refused), None)
        if refused or tried + 1 == SEND_TRIES:
            raise StorageFailed(
                f"the stream did not take a frame: {refused or left[0][1].error}; mend that, then "
                "run the same "
                "command again, which goes on where this one ended"
            )
        frames = [frame for frame, _ in left]
        clock.wait(Event(), min(max(ack.retry_after_s for _, ack in left), 0.1 * 2**tried))


def _frames(
    files: Sequence[Incoming], plans: Mapping[int, Plan]
) -> Iterator[tuple[Frame | None, PlayerName, int]]:
    """Every frame of the files, whose it is, and how many steps it brings; no frame for what
    stays out."""
    sent: dict[int, int] = {}
    for owner, file in enumerate(files):
        for chunk, _ in file.chunks():
            noise = noise_of(chunk.meta.session)
            n_steps = chunk.meta.n_steps
            plan = plans.get(noise)
            if plan is None or plan.owner != owner:
                continue
            outline = plan.outline
            session = plan.session
            if session is None:
                yield None, plan.player, n_steps
                continue
            number = outline.last_no + 1
            if noise not in sent and outline.missing:
                report = DropReport(tuple(outline.missing), outline.missing_steps)
                yield drop_frame(session, number, report), plan.player, 0
            yield (
                Chunk(replace(chunk.meta, session=session), chunk.columns).frame(),
                plan.player,
                n_steps,
            )
            sent[noise] = sent.get(noise, 0) + 1
            if sent[noise] == outline.chunks:
                number += bool(outline.missing)
                yield (
                    close_frame(session, number, CloseReport(number, outline.steps)),
                    plan.player,
                    0,
                )
