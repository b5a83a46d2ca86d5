"""Importing: sends the chunks of files through link, stream and ingest, as a game does, each once.

A session's id has a time and a random part. An import keeps the random part, or derives it from the
content if the file has no ids, and replaces the time if the session is too old to be accepted. So
it finds sessions in the store that were imported before or recorded here, and leaves them out, and
an interrupted import resumes.
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
from understudy.exchange.destination import Destination, ImportTarget
from understudy.exchange.exporting import OnSteps
from understudy.exchange.incoming import Incoming, Outline, random_part_of, survey
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
from understudy.experience.session import INTAKE_MAX_AGE_S, SPOOL_S, refused_session
from understudy.ports import Link, SessionFilter, SessionInfo
from understudy.simulation.ledger import LedgerLink

UNKNOWN_PLAYER = player_name("imported")
"""The player of steps for which neither the file nor the caller names one."""

SEND_BYTES = 4 * 1024 * 1024
SEND_TRIES = 8
"""Attempts to send frames to a busy or unreachable stream, with growing pauses between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The result of an import."""

    game: str
    schema: str
    sessions: int
    steps: int
    """Steps in the files."""
    stored_steps: int
    """Steps that are new in the store."""
    there_sessions: int
    there_steps: int
    """Steps that were already in the store, so they were left out."""
    refused_steps: int
    waiting_steps: int
    """Steps that are durable in the stream, but not visible in a remote store yet."""
    refusals: Mapping[str, int]
    by_running_ingest: bool
    details: Mapping[str, Any]
    """Further figures, which depend on the file format."""

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
    """Store every step of the files that is not stored yet.

    Raises ConfigError before anything is stored if a file is invalid.
    """
    clock = clock or SystemClock()
    surveys = [survey(file, on_steps) for file in files]
    spec = files[0].spec
    for file in files:
        if file.spec.schema != spec.schema:
            raise ConfigError(
                f"{files[0].name} and {file.name} hold different games or schemas; import them "
                "one by one"
            )
    plans = _planned(files, surveys, player)
    root = place.data.root
    lock = FileLock(root / "import.lock", what="an import into this folder")
    with lock, closing(place.open_target(clock)) as target:
        # Frames that an interrupted import sent are then in the store.
        target.wait_until_stored(spec.game, {})
        unfinished_imports = UnfinishedImports(root)
        key = deployment_key(root)
        now_s = clock.now()
        origins = {noise: origin for file in files for noise, origin in file.origins.items()}
        stored_sessions = _stored_sessions(target, spec, {*plans, *origins.values()})
        players = {plan.player: pseudonym(key, spec.game, plan.player) for plan in plans.values()}
        for noise, plan in plans.items():
            if stored_sessions.get(origins.get(noise, -1)) is not None:
                continue  # this session was recorded in this store and exported from it
            earlier = unfinished_imports.sessions.get(noise) if target.is_remote else None
            plans[noise] = assign_session(
                plan, stored_sessions.get(noise), players[plan.player], now_s=now_s, sent=earlier
            )
        sent = {
            noise: SendingSession(plan.session, players[plan.player])
            for noise, plan in plans.items()
            if plan.session is not None
        }
        link = open_link(place.data, spec, stream=place.config.stream.url, clock=clock)
        with closing(LedgerLink(link, place.data.ledger)) as noting:
            register(place.data, spec, link, models=place.config.models.url)
            if sent and target.is_remote:
                unfinished_imports.add(sent)
            if sent:
                _send(files, plans, noting, clock, after_each=target.step, on_steps=on_steps)
        target.wait_until_stored(
            spec.game, {sending.session: sending.player for sending in sent.values()}
        )
        after = _stored_sessions(target, spec, plans.keys())
        if target.is_remote:
            unfinished_imports.finish(
                [noise for noise in plans if noise in after and after[noise].closed]
            )
        return _counted(files, spec, plans, after, target)


def _stored_sessions(
    target: ImportTarget, spec: GameSpec, requested: Container[int]
) -> dict[int, SessionInfo]:
    """Return stored sessions by the random part of their ids.

    If several sessions have the same one, the longest is returned.
    """
    stored: dict[int, SessionInfo] = {}
    for info in target.sessions(SessionFilter(game=spec.game)):
        noise = random_part_of(info.session)
        if noise in requested and (noise not in stored or stored[noise].n_steps < info.n_steps):
            stored[noise] = info
    return stored


def _counted(
    files: Sequence[Incoming],
    spec: GameSpec,
    plans: Mapping[int, "Plan"],
    after: Mapping[int, SessionInfo],
    target: ImportTarget,
) -> Imported:
    sent = {noise: plan for noise, plan in plans.items() if plan.session is not None}
    now = {noise: after[noise].n_steps if noise in after else 0 for noise in sent}
    lacking = {noise: max(0, plan.outline.steps - now[noise]) for noise, plan in sent.items()}
    is_waiting = {
        noise: target.is_remote and not (noise in after and after[noise].closed) for noise in sent
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
        there_steps=sum(outline.steps for outline in out)
        + sum(plan.had_steps for plan in sent.values()),
        refused_steps=sum(steps for noise, steps in lacking.items() if not is_waiting[noise]),
        waiting_steps=sum(steps for noise, steps in lacking.items() if is_waiting[noise]),
        refusals=target.refusals,
        by_running_ingest=not target.ingests_here,
        details=details,
    )


# --- the session ids to send, given the store and earlier unfinished imports ----------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """The id and player name with which a session is imported; without an id, it is left out."""

    owner: int
    """Index of the file that provides the session."""
    outline: Outline
    player: PlayerName
    session: uuid.UUID | None = None
    had_steps: int = 0


def _planned(
    files: Sequence[Incoming], surveys: Sequence[Mapping[int, Outline]], player: PlayerName | None
) -> dict[int, Plan]:
    """Return a plan for each session; ConfigError if two files contradict each other."""
    plans: dict[int, Plan] = {}
    for owner, outlines in enumerate(surveys):
        for noise, outline in outlines.items():
            first = plans.setdefault(
                noise, Plan(owner, outline, player or outline.player or UNKNOWN_PLAYER)
            )
            if not first.outline.is_like(outline):
                raise ConfigError(
                    f"{files[first.owner].name} and {files[owner].name} hold different steps of "
                    f"session {outline.origin}; import only the file that has all of them"
                )
    return plans


def assign_session(
    plan: Plan,
    info: SessionInfo | None,
    player: bytes,
    *,
    now_s: float,
    sent: "SendingSession | None" = None,
) -> Plan:
    """Return the plan with an id, or without one if the store has all steps of the session.

    `info` is the session in the store, and `sent` the id that an unfinished import used. Raises
    ConfigError if the stored steps may differ from the file's.
    """
    outline = plan.outline
    if info is None:
        if sent is None:
            return replace(plan, session=accepted_id(outline.origin, now_s))
        _must_resume(sent.session, sent.player, player, now_s)
        return replace(plan, session=sent.session)
    if info.dropped_steps > outline.missing_steps:
        raise ConfigError(
            f"session {info.session} is stored without {info.dropped_steps} steps that the file "
            "may have: it was imported from a narrower export; import into another data folder, or "
            "erase its player first"
        )
    is_whole = info.n_steps >= outline.steps
    # A session with its original id may be the exported one and still be in play: an import must
    # not close it.
    if info.closed or (is_whole and (info.player != player or info.session == outline.origin)):
        return plan
    # Started by an interrupted import: the same frames are sent again, and stored ones count once.
    if is_whole and not _may_enter(info.session, now_s):
        return plan
    _must_resume(info.session, info.player, player, now_s)
    return replace(plan, session=info.session, had_steps=info.n_steps)


def _must_resume(session: uuid.UUID, stored_player: bytes, player: bytes, now_s: float) -> None:
    if stored_player != player:
        raise ConfigError(
            f"session {session} is stored in part for another player, by an unfinished import "
            "with another name; pass the same --player as for that import"
        )
    if not _may_enter(session, now_s):
        raise ConfigError(
            f"session {session} belongs to an unfinished import that is too old to resume; import "
            "into another data folder, or erase its player first"
        )


def _may_enter(session: uuid.UUID, now_s: float) -> bool:
    return refused_session(session, entered_s=now_s, oldest_s=INTAKE_MAX_AGE_S) is None


def accepted_id(origin: uuid.UUID, now_s: float) -> uuid.UUID:
    """Return the session's id, with the current time if its own is too old to be accepted."""
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
    """Send the frames of the planned sessions; `after_each` is called after each full batch."""
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
            or sum(frame.size_bytes for frame in waiting) > SEND_BYTES
        ):
            _send_batch(waiting, players, link, clock)
            waiting = []
            players = {}
            after_each()
        if on_steps is not None:
            on_steps(done, total)
    if waiting:
        _send_batch(waiting, players, link, clock)


def _send_batch(
    frames: Sequence[Frame], players: Mapping[uuid.UUID, PlayerName], link: Link, clock: Clock
) -> None:
    """Send frames until all are durable in the stream; StorageFailed if one is not."""
    for attempt in range(SEND_TRIES):
        acks = link.send(frames, players)
        unaccepted = [
            (frame, ack) for frame, ack in zip(frames, acks, strict=True) if not ack.accepted
        ]
        if not unaccepted:
            return
        refused = next((ack.refused for _, ack in unaccepted if ack.refused), None)
        if refused or attempt + 1 == SEND_TRIES:
            raise StorageFailed(
                f"the stream did not accept a frame: {refused or unaccepted[0][1].error}; fix "
                "that, then run the same command again, which resumes the import"
            )
        frames = [frame for frame, _ in unaccepted]
        clock.wait(Event(), min(max(ack.retry_after_s for _, ack in unaccepted), 0.1 * 2**attempt))


def _frames(
    files: Sequence[Incoming], plans: Mapping[int, Plan]
) -> Iterator[tuple[Frame | None, PlayerName, int]]:
    """Yield every frame to send with its player and steps; None as the frame of chunks left out."""
    sent: dict[int, int] = {}
    for owner, file in enumerate(files):
        for chunk, _ in file.chunks():
            noise = random_part_of(chunk.meta.session)
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
