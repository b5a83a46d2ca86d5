"""One commit of a partition: its facts, the rows it writes, and how it is read back.

Writes may arrive twice or late, because each row has either a key that determines its content, or a
version that decides which of two contents is kept:

    frames        keyed by the hash of their bytes
    commits       keyed by partition and number; the later of two attempts wins, even if it is
                  written first
    sessions      a state has a version, which increases with each commit of the session
    all others    are derived from a valid commit, so writing them again changes nothing

A deletion (`FOREVER`) also deletes bytes that are written after it.
"""

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import msgspec

from understudy.core.errors import StorageFailed
from understudy.experience.frame import FrameKind, read_drop
from understudy.experience.session import REMEMBER_S, Arrival
from understudy.stores.cassandra.wire import OutcomeUnknown, Row, Statement, Wire
from understudy.stores.draft import Draft, QuarantinedFrame, StoredFrame

ADMIN = "~admin"
"""The partition of commits that do not come from a stream: erasures, manual quarantine, replays."""
STORED = 0
QUARANTINED = 1
"""Column `what` of a chunk number's row: whether the row is of a stored or a quarantined frame."""
FOREVER = 1 << 62
"""The timestamp of deletions, which beats every write, even later ones."""
CHUNK_BUCKET = 6
COMMIT_BUCKET = 10
QUARANTINE_BUCKET = 10
"""Numbers that differ only in this many low bits are in the same Cassandra partition."""
PAGE = 32
_TRIES = 1000
_LONGEST_S = 630_720_000
"""The longest time to live that Cassandra accepts."""
_BATCHED = 25
"""Most rows of one Cassandra partition per request; Amazon Keyspaces accepts 30."""

Key = tuple[bytes, int]
"""Session and chunk number."""
FrameKey = tuple[uuid.UUID, int, int, bytes]
"""Session, bucket, chunk number and hash: the key of a frame's bytes."""


class Arrived(msgspec.Struct, array_like=True, frozen=True):
    """One stored frame, without its bytes."""

    session: bytes
    chunk_no: int
    kind: int
    crc: int
    length: int
    """Length of the body in bytes."""
    player: bytes
    received_s: int
    first_step: int
    n_steps: int
    """Steps of a data frame; dropped steps of a drop report."""
    game: str
    schema: str
    digest: bytes
    """Hash of the whole frame."""
    replays: int = 0
    """The frame's quarantine id if it was replayed from there, else 0."""
    dropped: list[tuple[int, int]] = []
    """Ranges of chunk numbers that a drop report names, as (first, last)."""

    @property
    def key(self) -> Key:
        return self.session, self.chunk_no

    @property
    def frame_key(self) -> FrameKey:
        return frame_key(self.session, self.chunk_no, self.digest)

    def arrival(self) -> Arrival:
        """The facts of this frame that change the state of its session."""
        return Arrival(
            number=self.chunk_no,
            player=self.player,
            received_s=self.received_s,
            kind=_KINDS[FrameKind(self.kind)],
            first_step=self.first_step,
            n_steps=self.n_steps,
            dropped=tuple(self.dropped),
        )


_KINDS: dict[FrameKind, Literal["data", "drop", "close"]] = {
    FrameKind.DATA: "data",
    FrameKind.DROP: "drop",
    FrameKind.CLOSE: "close",
}


class Event(msgspec.Struct, array_like=True, frozen=True):
    """The erasure of a player or the withdrawal of chunks; has an arrival number like a frame."""

    kind: str
    """`forget` (a player) or `quarantine` (stored chunks)."""
    at_s: float
    player: bytes = b""
    chunks: list[tuple[bytes, int, int]] = []
    """Session, chunk number and number of steps of each withdrawn chunk."""


class CommitFacts(msgspec.Struct, array_like=True, frozen=True):
    """What a commit changes."""

    stored: list[Arrived] = []
    quarantined: list[QuarantinedFrame] = []
    forgotten: list[tuple[bytes, bytes]] = []
    """(session, player) of each new session of a forgotten player."""
    event: Event | None = None

    @property
    def n_arrivals(self) -> int:
        return len(self.stored) + (self.event is not None)


class SessionRecord(msgspec.Struct, array_like=True, frozen=True):
    """A session after a commit."""

    session: bytes
    player: bytes
    game: str
    state: bytes
    events: int
    """Number of admin commits included in this state."""
    version: int
    is_new: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One commit of a partition."""

    partition: str
    number: int
    events: int
    """Number of admin commits known when this commit was decided."""
    at_s: float
    keep_s: int
    """How long this commit's frames are kept; 0: forever."""
    before: int
    """Number of arrivals in the partition before this commit."""
    facts: CommitFacts
    states: Sequence[SessionRecord] = ()
    """Sessions after this commit; present only while it is written or applied."""


def facts_of(draft: Draft) -> CommitFacts:
    """The decisions of a draft as the facts of a commit; quarantine ids are still the draft's."""
    stored = [_arrived(new, raw) for new, raw in zip(draft.stored, draft.stored_raws, strict=True)]
    pairs = zip(draft.quarantined, draft.quarantined_raws, strict=True)
    quarantined = [msgspec.structs.replace(frame, digest=digest_of(raw)) for frame, raw in pairs]
    return CommitFacts(
        stored,
        quarantined,
        [(session.bytes, player) for session, player in draft.forgotten.items()],
    )


def _arrived(new: StoredFrame, raw: bytes) -> Arrived:
    frame = new.frame
    report = read_drop(frame) if frame.kind is FrameKind.DROP else None
    return Arrived(
        session=frame.session.bytes,
        chunk_no=frame.chunk_no,
        kind=int(frame.kind),
        crc=frame.body_crc,
        length=len(frame.body),
        player=frame.player,
        received_s=frame.received_s,
        first_step=new.first_step,
        n_steps=new.n_steps if report is None else report.n_steps,
        game=new.game,
        schema=new.schema,
        digest=digest_of(raw),
        replays=new.replays,
        dropped=[] if report is None else list(report.ranges),
    )


def with_quarantine_ids(wire: Wire, facts: CommitFacts) -> CommitFacts:
    """The facts with unique quarantine ids, which increase over the whole store."""
    if not facts.quarantined:
        return facts
    for _ in range(_TRIES):
        row = wire.one(wire.serial("SELECT number FROM meta WHERE name = 'quarantine_id'"))
        if row is None or row.number is None:
            raise StorageFailed(
                "the row quarantine_id of the store's table meta is missing; restore it from a "
                "backup"
            )
        first = row.number
        following = first + len(facts.quarantined)
        try:
            cql = "UPDATE meta SET number = ? WHERE name = 'quarantine_id' IF number = ?"
            answer = wire.change(wire.bind(cql, following, first))
        except OutcomeUnknown:
            continue  # if the update did happen, these ids stay unused
        if answer.applied:
            frames = [
                msgspec.structs.replace(frame, id=number)
                for number, frame in enumerate(facts.quarantined, first)
            ]
            return msgspec.structs.replace(facts, quarantined=frames)
    raise StorageFailed(
        "other processes kept changing the row quarantine_id of the store's table meta; try again"
    )


def digest_of(raw: bytes) -> bytes:
    """The hash under which a frame's bytes are stored."""
    return blake2b(raw, digest_size=16).digest()


def frame_key(session: bytes, chunk_no: int, digest: bytes) -> FrameKey:
    """The key of a frame's bytes; a frame without a readable header gets a bucket by its hash."""
    bucket = chunk_no >> CHUNK_BUCKET if any(session) else int.from_bytes(digest[:6], "big")
    return uuid.UUID(bytes=session), bucket, chunk_no, digest


def record_ttl_s(keep_s: int) -> int:
    """How long a frame's record is kept: until the frame is too old to be resent; 0: forever."""
    return min(keep_s + int(REMEMBER_S), _LONGEST_S) if keep_s else 0


# --- writing ------------------------------------------------------------------------------------


def frame_row(wire: Wire, key: FrameKey, raw: bytes, keep_s: int) -> Statement:
    """A statement that stores a frame's bytes; running it again changes nothing."""
    session, bucket, chunk_no, digest = key
    columns = {
        "session": session,
        "bucket": bucket,
        "chunk_no": chunk_no,
        "digest": digest,
        "frame": raw,
    }
    return wire.insert("chunks", columns, ttl_s=keep_s)


def erased_frame(wire: Wire, key: FrameKey) -> Statement:
    """A statement that deletes a frame's bytes, even those that are written later."""
    condition = "session = ? AND bucket = ? AND chunk_no = ? AND digest = ?"
    return wire.bind(f"DELETE FROM chunks USING TIMESTAMP {FOREVER} WHERE {condition}", *key)


def commit_row(wire: Wire, commit: Commit, attempt: int) -> Statement:
    """A statement that writes an attempt to commit; it beats earlier attempts, even late ones."""
    columns = {
        "partition": commit.partition,
        "bucket": commit.number >> COMMIT_BUCKET,
        "commit_no": commit.number,
        "events": commit.events,
        "at_s": commit.at_s,
        "keep_s": commit.keep_s,
        "before": commit.before,
        "facts": _pack.encode(commit.facts),
        "states": _pack.encode(commit.states),
    }
    # Admin commits are kept forever: erasures and withdrawals must stay known.
    remember_s = 0 if commit.partition == ADMIN else record_ttl_s(commit.keep_s)
    return wire.insert("commits", columns, at=attempt, ttl_s=remember_s)


def registry_row(wire: Wire, kind: str, name: str, number: int) -> Statement:
    """A statement that sets a number of the registry, unless a higher one is there."""
    return wire.insert("registry", {"kind": kind, "name": name, "number": number}, at=number + 1)


def apply(wire: Wire, commit: Commit) -> None:
    """Write all rows derived from a valid commit; any process may repeat this at any time."""
    remember_s = record_ttl_s(commit.keep_s)
    rows: list[Statement] = [registry_row(wire, "head", commit.partition, commit.number)]
    by_session: dict[uuid.UUID, list[Statement]] = {}

    def add(session: bytes, columns: dict[str, object], *, at: int | None = None) -> None:
        key = uuid.UUID(bytes=session)
        row = wire.insert("sessions", {"session": key, **columns}, at=at, ttl_s=remember_s)
        by_session.setdefault(key, []).append(row)

    for state in commit.states:
        fields = {
            "game": state.game,
            "state": state.state,
            "state_events": state.events,
            "version": state.version,
        }
        add(state.session, fields, at=state.version)
        if state.is_new or remember_s:
            columns = {"player": state.player, "session": uuid.UUID(bytes=state.session)}
            rows.append(wire.insert("players", columns, ttl_s=remember_s))
    for arrived in commit.facts.stored:
        columns = {
            name: getattr(arrived, name)
            for name in ("chunk_no", "crc", "digest", "length", "kind", "n_steps", "received_s")
        }
        columns |= {"what": STORED, "quarantine_id": arrived.replays, "events": commit.events}
        add(arrived.session, columns)
    for frame in commit.facts.quarantined:
        if any(frame.session):
            columns = {
                "chunk_no": frame.chunk_no,
                "crc": frame.crc,
                "digest": frame.digest,
                "what": QUARANTINED,
            }
            add(frame.session, columns | {"quarantine_id": frame.id})
        columns = msgspec.structs.asdict(frame)
        columns |= {"bucket": frame.id >> QUARANTINE_BUCKET, "events": commit.events}
        rows.append(wire.insert("quarantine", columns, ttl_s=commit.keep_s))
    for statements in by_session.values():
        rows += [
            wire.batched(statements[at : at + _BATCHED])
            for at in range(0, len(statements), _BATCHED)
        ]
    wire.all(rows)
    wire.post(registry_row(wire, "applied", commit.partition, commit.number))


# --- reading ------------------------------------------------------------------------------------

_pack = msgspec.msgpack.Encoder()
_read_facts = msgspec.msgpack.Decoder(CommitFacts)
_read_states = msgspec.msgpack.Decoder(list[SessionRecord])


def commits_after(wire: Wire, partition: str, after: int, up_to: int) -> Statement:
    """A query for the next commits after a number, as far as one Cassandra partition has them."""
    cql = (
        "SELECT partition, commit_no, events, at_s, keep_s, before, facts FROM commits "
        f"WHERE partition = ? AND bucket = ? AND commit_no > ? AND commit_no <= ? LIMIT {PAGE}"
    )
    return wire.bind(cql, partition, (after + 1) >> COMMIT_BUCKET, after, up_to)


def commit_of(row: Row) -> Commit:
    """Decode the commit of a row."""
    raw_states = getattr(row, "states", None)
    return Commit(
        partition=row.partition,
        number=row.commit_no,
        events=row.events,
        at_s=row.at_s,
        keep_s=row.keep_s,
        before=row.before,
        facts=_read_facts.decode(row.facts),
        states=() if raw_states is None else _read_states.decode(raw_states),
    )


def commits_between(wire: Wire, partition: str, after: int, up_to: int) -> Iterator[Commit]:
    """Every commit after `after`, up to the valid commit `up_to`; expired ones are skipped."""
    while after < up_to:
        rows = wire.all([commits_after(wire, partition, after, up_to)])[0]
        yield from map(commit_of, rows)
        last_of_bucket = (after + 1) | ((1 << COMMIT_BUCKET) - 1)
        after = last_of_bucket if len(rows) < PAGE else rows[-1].commit_no


def redo(wire: Wire, partition: str, head: int) -> None:
    """Apply the last commit of a partition, in case its writer died before applying it."""
    row = wire.one(
        wire.bind("SELECT number FROM registry WHERE kind = 'applied' AND name = ?", partition)
    )
    if head <= (0 if row is None else row.number):
        return
    cql = "SELECT * FROM commits WHERE partition = ? AND bucket = ? AND commit_no = ?"
    last = wire.one(wire.bind(cql, partition, head >> COMMIT_BUCKET, head))
    if last is not None and last.facts is not None:
        apply(wire, commit_of(last))
