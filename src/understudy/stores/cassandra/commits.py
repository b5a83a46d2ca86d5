"""One commit of a partition: what it says, the rows it writes, and how it is read back.

Every row has a key under which only one content can ever be written, or a version that decides
between two:

    frames        keyed by the hash of their bytes
    commits       keyed by partition and number; of two attempts, the later epoch's wins
    sessions      a state has a version, which rises with each commit of the session
    all others    are derived from a commit that counts, so writing them again changes nothing

So a write may arrive twice or late, and a deletion (`FOREVER`) may come before the write that it
deletes.
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
"""The partition of what comes from no stream: erasures, quarantine by hand, replays."""
STORED = 0
QUARANTINED = 1
"""What a row of a chunk number tells of."""
FOREVER = 1 << 62
"""The timestamp of deletions: it beats every write, also those that have yet to arrive."""
CHUNK_BUCKET = 6
COMMIT_BUCKET = 10
QUARANTINE_BUCKET = 10
"""How many low bits of a number one Cassandra partition covers."""
PAGE = 32
_TRIES = 1000
_LONGEST_S = 630_720_000
"""The longest time to live that Cassandra accepts."""
_BATCHED = 25
"""Rows of one Cassandra partition in a request; Amazon Keyspaces accepts 30."""

Key = tuple[bytes, int]
"""Session and number."""
FrameKey = tuple[uuid.UUID, int, int, bytes]
"""Session, bucket, number and hash: the key of a frame's bytes."""


class Arrived(msgspec.Struct, array_like=True, frozen=True):
    """One stored frame, without its bytes."""

    session: bytes
    chunk_no: int
    kind: int
    crc: int
    length: int
    """Bytes of the body."""
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
    """Quarantine id this frame came from, or 0."""
    dropped: list[tuple[int, int]] = []
    """Numbers that a drop report covers."""

    @property
    def key(self) -> Key:
        return self.session, self.chunk_no

    @property
    def frame_key(self) -> FrameKey:
        return frame_key(self.session, self.chunk_no, self.digest)

    def arrival(self) -> Arrival:
        """What counts about it."""
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
    """Something other than a frame that takes an arrival number."""

    kind: str
    """`forget` (a player) or `quarantine` (stored chunks)."""
    at_s: float
    player: bytes = b""
    chunks: list[tuple[bytes, int, int]] = []
    """Session, number and steps."""


class CommitFacts(msgspec.Struct, array_like=True, frozen=True):
    """What became true with a commit."""

    stored: list[Arrived] = []
    quarantined: list[QuarantinedFrame] = []
    forgotten: list[tuple[bytes, bytes]] = []
    """(session, player) of sessions that first came after their player was forgotten."""
    event: Event | None = None

    @property
    def n_arrivals(self) -> int:
        return len(self.stored) + (self.event is not None)


class SessionRecord(msgspec.Struct, array_like=True, frozen=True):
    """A session as it is after a commit."""

    session: bytes
    player: bytes
    game: str
    state: bytes
    events: int
    """The admin commits that this state takes into account."""
    version: int
    is_new: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One commit of a partition."""

    partition: str
    number: int
    events: int
    """The admin commits that were known when it was decided."""
    at_s: float
    keep_s: int
    """How long its frames are kept; 0: for ever."""
    before: int
    """How many arrivals the partition had before."""
    facts: CommitFacts
    states: Sequence[SessionRecord] = ()
    """Only of a commit that is written or applied."""


def facts_of(draft: Draft) -> CommitFacts:
    """What a draft decided, as the facts of a commit; quarantined frames keep the ids of the
    draft."""
    stored = [_arrived(one, raw) for one, raw in zip(draft.stored, draft.stored_raws, strict=True)]
    pairs = zip(draft.quarantined, draft.quarantined_raws, strict=True)
    quarantined = [msgspec.structs.replace(one, digest=digest_of(raw)) for one, raw in pairs]
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


def numbered(wire: Wire, facts: CommitFacts) -> CommitFacts:
    """The same facts with quarantine ids that no other frame has; they rise over the whole
    store."""
    if not facts.quarantined:
        return facts
    for _ in range(_TRIES):
        row = wire.one(wire.serial("SELECT number FROM meta WHERE name = 'quarantine_id'"))
        if row is None or row.number is None:
            raise StorageFailed(
                "the row quarantine_id of table meta is lost; restore it from a backup"
            )
        first = row.number
        following = first + len(facts.quarantined)
        try:
            cql = "UPDATE meta SET number = ? WHERE name = 'quarantine_id' IF number = ?"
            answer = wire.change(wire.bind(cql, following, first))
        except OutcomeUnknown:
            continue  # if these were drawn after all, they stay unused
        if answer.applied:
            frames = [
                msgspec.structs.replace(one, id=first + at)
                for at, one in enumerate(facts.quarantined)
            ]
            return msgspec.structs.replace(facts, quarantined=frames)
    raise StorageFailed("the row quarantine_id of table meta changes all the time; try again")


def digest_of(raw: bytes) -> bytes:
    """What a frame's bytes are found by."""
    return blake2b(raw, digest_size=16).digest()


def frame_key(session: bytes, chunk_no: int, digest: bytes) -> FrameKey:
    """Where a frame's bytes lie; those without a readable header lie apart from one another."""
    bucket = chunk_no >> CHUNK_BUCKET if any(session) else int.from_bytes(digest[:6], "big")
    return uuid.UUID(bytes=session), bucket, chunk_no, digest


def lasting_s(keep_s: int) -> int:
    """How long a frame is remembered: for as long as it can be sent again after it is gone; 0:
    for ever."""
    return min(keep_s + int(REMEMBER_S), _LONGEST_S) if keep_s else 0


# --- writing ------------------------------------------------------------------------------------


def frame_row(wire: Wire, key: FrameKey, raw: bytes, keep_s: int) -> Statement:
    """A frame's bytes; whoever writes them again writes the same."""
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
    """No bytes under a key, now and later."""
    there = "session = ? AND bucket = ? AND chunk_no = ? AND digest = ?"
    return wire.bind(f"DELETE FROM chunks USING TIMESTAMP {FOREVER} WHERE {there}", *key)


def commit_row(wire: Wire, commit: Commit, attempt: int) -> Statement:
    """What an attempt wants to make true; it beats those of earlier epochs, however late they
    arrive."""
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
    # What was forgotten or withdrawn must be known for as long as anything tells of it.
    remember_s = 0 if commit.partition == ADMIN else lasting_s(commit.keep_s)
    return wire.insert("commits", columns, at=attempt, ttl_s=remember_s)


def registered(wire: Wire, kind: str, name: str, number: int) -> Statement:
    """A number of the registry; the highest one wins."""
    return wire.insert("registry", {"kind": kind, "name": name, "number": number}, at=number + 1)


def apply(wire: Wire, commit: Commit) -> None:
    """Write everything that follows from a commit that counts; may be repeated at any time, by
    any process."""
    remember_s = lasting_s(commit.keep_s)
    rows: list[Statement] = [registered(wire, "head", commit.partition, commit.number)]
    by_session: dict[uuid.UUID, list[Statement]] = {}

    def about(session: bytes, columns: dict[str, object], *, at: int | None = None) -> None:
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
        about(state.session, fields, at=state.version)
        if state.is_new or remember_s:
            columns = {"player": state.player, "session": uuid.UUID(bytes=state.session)}
            rows.append(wire.insert("players", columns, ttl_s=remember_s))
    for one in commit.facts.stored:
        columns = {
            name: getattr(one, name)
            for name in ("chunk_no", "crc", "digest", "length", "kind", "n_steps")
        }
        columns |= {"received_s": one.received_s, "what": STORED, "quarantine_id": one.replays}
        about(one.session, columns | {"events": commit.events})
    for two in commit.facts.quarantined:
        if any(two.session):
            columns = {
                "chunk_no": two.chunk_no,
                "crc": two.crc,
                "digest": two.digest,
                "what": QUARANTINED,
            }
            about(two.session, columns | {"quarantine_id": two.id})
        columns = msgspec.structs.asdict(two)
        columns |= {"bucket": two.id >> QUARANTINE_BUCKET, "events": commit.events}
        rows.append(wire.insert("quarantine", columns, ttl_s=commit.keep_s))
    for statements in by_session.values():
        rows += [
            wire.together(statements[at : at + _BATCHED])
            for at in range(0, len(statements), _BATCHED)
        ]
    wire.all(rows)
    wire.post(registered(wire, "applied", commit.partition, commit.number))


# --- reading ------------------------------------------------------------------------------------

_pack = msgspec.msgpack.Encoder()
_read_facts = msgspec.msgpack.Decoder(CommitFacts)
_read_states = msgspec.msgpack.Decoder(list[SessionRecord])


def commits_after(wire: Wire, partition: str, after: int, up_to: int) -> Statement:
    """The next commits behind a number, as far as they lie in one Cassandra partition."""
    cql = (
        "SELECT partition, commit_no, events, at_s, keep_s, before, facts FROM commits "
        f"WHERE partition = ? AND bucket = ? AND commit_no > ? AND commit_no <= ? LIMIT {PAGE}"
    )
    return wire.bind(cql, partition, (after + 1) >> COMMIT_BUCKET, after, up_to)


def commit_of(row: Row) -> Commit:
    """The commit of a row."""
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
    """Every commit behind a number, up to one that counts; those that are gone are passed over."""
    while after < up_to:
        rows = wire.all([commits_after(wire, partition, after, up_to)])[0]
        yield from map(commit_of, rows)
        last_of_bucket = (after + 1) | ((1 << COMMIT_BUCKET) - 1)
        after = last_of_bucket if len(rows) < PAGE else rows[-1].commit_no


def redo(wire: Wire, partition: str, head: int) -> None:
    """Apply the last commit of a partition, should whoever made it have died before that was
    done."""
    row = wire.one(
        wire.bind("SELECT number FROM registry WHERE kind = 'applied' AND name = ?", partition)
    )
    if head <= (0 if row is None else row.number):
        return
    cql = "SELECT * FROM commits WHERE partition = ? AND bucket = ? AND commit_no = ?"
    found = wire.one(wire.bind(cql, partition, head >> COMMIT_BUCKET, head))
    if found is not None and found.facts is not None:
        apply(wire, commit_of(found))
