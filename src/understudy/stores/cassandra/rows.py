"""The rows of one commit; each carries its attempt as timestamp, and as the tag that tells whether it counts."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from understudy.stores.cassandra.facts import ADMIN, Arrived, CommitFacts, Tag
from understudy.stores.cassandra.known import QUARANTINED, STORED, Known, Stated
from understudy.stores.cassandra.tables import CHUNK_BUCKET, COMMIT_BUCKET, QUARANTINE_BUCKET
from understudy.stores.cassandra.wire import Statement, Wire
from understudy.stores.draft import QuarantinedFrame

_NUMBER = (
    "INSERT INTO sessions (session, chunk_no, what, crc, length, kind, n_steps, received_s, events, partition, "
    "commit_no, attempt) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) USING TIMESTAMP ?"
)
_STATE = (
    "INSERT INTO sessions (session, game, player, state, state_events, state_partition, state_commit, state_attempt, "
    "previous, previous_game, previous_events) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) USING TIMESTAMP ?"
)
_PLAYER = "INSERT INTO players (player, session) VALUES (?, ?) USING TIMESTAMP ?"
_CHUNK = "INSERT INTO chunks (session, bucket, chunk_no, attempt, frame) VALUES (?, ?, ?, ?, ?) USING TIMESTAMP ?"
_ERASE = "DELETE FROM chunks USING TIMESTAMP ? WHERE session = ? AND bucket = ? AND chunk_no = ?"
_RELEASE = "DELETE FROM quarantine USING TIMESTAMP ? WHERE bucket = ? AND id = ?"
_COMMIT = (
    "INSERT INTO commits (partition, bucket, commit_no, attempt, events, at_s, before, facts) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?) USING TIMESTAMP ?"
)
_QUARANTINE = (
    "INSERT INTO quarantine (bucket, id, reason, detail, parked, received_s, game, session, chunk_no, crc, player, "
    "events, partition, commit_no, attempt, raw) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
    "USING TIMESTAMP ?"
)
_TOGETHER = 25
"""Rows of one partition in a request; Amazon Keyspaces takes 30."""
_REGISTER = "INSERT INTO registry (kind, name, number) VALUES (?, ?, ?) USING TIMESTAMP ?"


@dataclass(slots=True)
class Rows:
    """The rows of an attempt in the order in which they may be written."""

    first: list[Statement] = field(default_factory=list)
    sessions: dict[uuid.UUID, list[Statement]] = field(default_factory=dict)
    """What is known of sessions and numbers: an erasure goes by it, so it is there before any frame is."""
    then: list[Statement] = field(default_factory=list)

    def add(self, other: "Rows") -> None:
        self.first += other.first
        self.then += other.then
        for session, statements in other.sessions.items():
            self.sessions.setdefault(session, []).extend(statements)

    def about(self, session: uuid.UUID, statement: Statement) -> None:
        """One more row of a session's partition."""
        self.sessions.setdefault(session, []).append(statement)

    def write(self, wire: Wire) -> None:
        together = [
            wire.together(statements[at : at + _TOGETHER])
            for statements in self.sessions.values()
            for at in range(0, len(statements), _TOGETHER)
        ]
        wire.all(self.first + together)
        wire.all(self.then)


def frame_rows(wire: Wire, tag: Tag, stored: Sequence[Arrived], raws: Sequence[bytes], *, events: int) -> Rows:
    """Stored frames and their numbers."""
    rows, stamp = Rows(), tag.attempt
    for one, raw in zip(stored, raws, strict=True):
        session, bucket = uuid.UUID(bytes=one.session), one.chunk_no >> CHUNK_BUCKET
        rows.about(session, wire.bind(
            _NUMBER, session, one.chunk_no, STORED, one.crc, one.length, one.kind, one.n_steps, one.received_s, events,
            tag.partition, tag.commit_no, stamp, stamp,
        ))  # fmt: skip
        rows.then.append(wire.bind(_CHUNK, session, bucket, one.chunk_no, stamp, raw, stamp))
    return rows


def quarantine_rows(
    wire: Wire, tag: Tag, frames: Sequence[QuarantinedFrame], raws: Sequence[bytes], *, events: int
) -> Rows:
    """Quarantined frames, and their numbers where their headers tell."""
    rows, stamp = Rows(), tag.attempt
    for bucket in {one.id >> QUARANTINE_BUCKET for one in frames}:
        rows.first.append(wire.bind(_REGISTER, "quarantine", f"{bucket:020d}", bucket, stamp))
    for one, raw in zip(frames, raws, strict=True):
        if any(one.session):
            session = uuid.UUID(bytes=one.session)
            rows.about(session, wire.bind(
                _NUMBER, session, one.chunk_no, QUARANTINED, one.crc, one.length, 0, 0,
                int(one.received_s), events, tag.partition, tag.commit_no, stamp, stamp,
            ))  # fmt: skip
        rows.then.append(wire.bind(
            _QUARANTINE, one.id >> QUARANTINE_BUCKET, one.id, one.reason, one.detail, one.parked, one.received_s,
            one.game, one.session, one.chunk_no, one.crc, one.player, events, tag.partition, tag.commit_no, stamp, raw,
            stamp,
        ))  # fmt: skip
    return rows


def state_rows(wire: Wire, tag: Tag, states: Mapping[uuid.UUID, Stated], known: Known) -> Rows:
    """Sessions as they are after a commit, beside what they were before: a crash leaves the latter to read."""
    rows = Rows()
    for session, after in states.items():
        before = known.stated(session)
        rows.about(session, wire.bind(
            _STATE, session, after.game, after.state.player, after.state.pack(), after.events, tag.partition,
            tag.commit_no, tag.attempt, b"" if before is None else before.state.pack(),
            "" if before is None else before.game, 0 if before is None else before.events, tag.attempt,
        ))  # fmt: skip
        if before is None:
            rows.first.append(wire.bind(_PLAYER, after.state.player, session, tag.attempt))
    return rows


def commit_row(wire: Wire, tag: Tag, facts: CommitFacts, *, events: int, at_s: float, before: int) -> Statement:
    """What arrived."""
    # What was forgotten or set aside must be known for as long as anything tells of it.
    statement = f"{_COMMIT} AND TTL 0" if tag.partition == ADMIN else _COMMIT
    return wire.bind(
        statement, tag.partition, tag.commit_no >> COMMIT_BUCKET, tag.commit_no, tag.attempt, events, at_s, before,
        facts.pack(), tag.attempt,
    )  # fmt: skip


def head_row(wire: Wire, name: str, number: int, stamp: int) -> Statement:
    """How far readers may look in a partition."""
    return wire.bind(_REGISTER, "head", name, number, stamp)


def ended_row(wire: Wire, name: str, number: int, stamp: int) -> Statement:
    """How far a partition that was retired is committed."""
    return wire.bind(_REGISTER, "ended", name, number, stamp)


def erased_row(wire: Wire, session: uuid.UUID, chunk_no: int, stamp: int) -> Statement:
    """No frame under a number, whatever was written there by lower stamps."""
    return wire.bind(_ERASE, stamp, session, chunk_no >> CHUNK_BUCKET, chunk_no)


def released_row(wire: Wire, quarantine_id: int, stamp: int) -> Statement:
    """No frame in quarantine under a number, whatever was written there by lower stamps or this one."""
    return wire.bind(_RELEASE, stamp, quarantine_id >> QUARANTINE_BUCKET, quarantine_id)


def swept_row(wire: Wire, name: str, number: int, stamp: int) -> Statement:
    """Up to where a partition holds no data any more."""
    return wire.bind(_REGISTER, "swept", name, number, stamp)
