"""What lies in the log and is not sealed yet, as one generation: items, keys, sessions, quarantine, events.

The writer fills a generation as it commits; recovery and read-only views fill the same one from the log, through the
same `apply`, so all three agree.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from understudy.core.chunk import Chunk, chunk_of
from understudy.core.frame import Frame, FrameKind, decode_frame, read_close, read_drop
from understudy.core.log import LogReader
from understudy.core.ports import Candidate
from understudy.core.session import Arrival, SessionState
from understudy.stores.commits import Commit, Event, QuarantinedFrame, StoredFrame
from understudy.stores.counting import StateOf, count, count_again


@dataclass(frozen=True, slots=True)
class Place:
    """Raw frame bytes in a log file."""

    file: int
    offset: int
    length: int


@dataclass(slots=True, frozen=True)
class Item:
    """One stored frame that is not sealed yet."""

    arrival_no: int
    kind: FrameKind
    session: uuid.UUID
    chunk_no: int
    crc: int
    body_len: int
    player: bytes
    received_s: int
    facts: StoredFrame
    place: Place
    chunk: Chunk | None = None
    """Decoded columns, while they are at hand."""


@dataclass(slots=True)
class Generation:
    """The unsealed part of a store, in memory; bounded by the size at which it is sealed."""

    files: list[int] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    keys: dict[tuple[uuid.UUID, int], tuple[int, int]] = field(default_factory=dict)
    sessions: dict[uuid.UUID, tuple[str, SessionState]] = field(default_factory=dict)
    quarantined: list[tuple[QuarantinedFrame, Place]] = field(default_factory=list)
    quarantined_keys: dict[tuple[bytes, int], list[int]] = field(default_factory=dict)
    replayed: set[int] = field(default_factory=set)
    events: list[tuple[int, Event]] = field(default_factory=list)
    positions: dict[str, str | None] = field(default_factory=dict)
    rows_by_schema: dict[str, int] = field(default_factory=dict)
    decoded_bytes: int = 0
    log_bytes: int = 0
    next_commit: int = 0

    def apply(
        self, commit: Commit, file: int, *, before: StateOf, candidates: Sequence[Candidate] | None = None
    ) -> None:
        """Take in one durable commit; `candidates` are its frames, where the caller still has them decoded."""
        trailer = commit.trailer
        self.next_commit = trailer.number + 1
        self.log_bytes += commit.entry.end - commit.entry.start
        self.positions.update(dict(trailer.positions))
        for index, (facts, offset, raw) in enumerate(commit.frames()):
            candidate = Candidate(decode_frame(raw), None) if candidates is None else candidates[index]
            place = Place(file, offset, len(raw))
            self._store(trailer.first_arrival + index, candidate, facts=facts, place=place, before=before)
        for one, offset, raw in commit.quarantined():
            self._refuse(one, Place(file, offset, len(raw)), before)
        for raw_session, player in trailer.forgotten:
            session = uuid.UUID(bytes=raw_session)
            if self._known(session, before) is None:
                self.sessions[session] = ("", SessionState(player=player, forgotten=True))
        if trailer.event is not None:
            self._happen(trailer.first_arrival + len(trailer.stored), trailer.event)

    def _store(
        self, arrival_no: int, candidate: Candidate, *, facts: StoredFrame, place: Place, before: StateOf
    ) -> None:
        frame = candidate.frame
        self.items.append(
            Item(
                arrival_no, frame.kind, frame.session, frame.chunk_no, frame.body_crc, len(frame.body), frame.player,
                frame.received_s, facts, place, candidate.chunk,
            )
        )  # fmt: skip
        self.keys[frame.session, frame.chunk_no] = (frame.body_crc, len(frame.body))
        if facts.replays:
            self.replayed.add(facts.replays)
        if frame.kind is FrameKind.DATA:
            self.rows_by_schema[facts.schema] = self.rows_by_schema.get(facts.schema, 0) + facts.n_rows
            self.decoded_bytes += facts.decoded_bytes
        arrival = arrival_of(frame, facts)
        if not count(self.sessions, frame.session, facts.game, arrival, before=before) and facts.replays:
            count_again(self.sessions, frame.session, facts.game, arrival, before=before)

    def _refuse(self, facts: QuarantinedFrame, place: Place, before: StateOf) -> None:
        self.quarantined.append((facts, place))
        if any(facts.session):
            self.quarantined_keys.setdefault((facts.session, facts.chunk_no), []).append(facts.crc)
            arrival = Arrival(
                number=facts.chunk_no, player=facts.player, received_s=int(facts.received_s), kind="refused"
            )
            count(self.sessions, uuid.UUID(bytes=facts.session), facts.game, arrival, before=before)

    def _happen(self, arrival_no: int, event: Event) -> None:
        self.events.append((arrival_no, event))
        if event.kind == "forget":
            for session, (game, state) in self.sessions.items():
                if state.player == event.player:
                    self.sessions[session] = (game, replace(state, forgotten=True))

    def _known(self, session: uuid.UUID, before: StateOf) -> tuple[str, SessionState] | None:
        return self.sessions.get(session) or before(session)


def arrival_of(frame: Frame, facts: StoredFrame) -> Arrival:
    """What counts about a frame."""
    number, player, received_s = frame.chunk_no, frame.player, frame.received_s
    if frame.kind is FrameKind.DATA:
        return Arrival(
            number=number, player=player, received_s=received_s, kind="data", first_step=facts.first_step,
            n_steps=facts.n_steps,
        )  # fmt: skip
    if frame.kind is FrameKind.DROP:
        report = read_drop(frame)
        return Arrival(
            number=number, player=player, received_s=received_s, kind="drop", n_steps=report.n_steps,
            dropped=report.ranges,
        )  # fmt: skip
    read_close(frame)
    return Arrival(number=number, player=player, received_s=received_s, kind="close")


def chunk_at(place: Place, reader: LogReader) -> Chunk:
    """The chunk whose frame lies at a place of the log."""
    return chunk_of(decode_frame(reader.bytes_at(place.offset, place.length)))
