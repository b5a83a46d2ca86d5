"""What one commit of a partition says: the frames that became stored with it, in order, and what else happened."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from understudy.core.frame import Frame, FrameKind, read_drop
from understudy.core.ports import Candidate
from understudy.core.session import Arrival
from understudy.stores.draft import QuarantinedFrame, StoredFrame, Trailer

ADMIN = "~admin"
"""The partition of everything that comes from no stream: erasures, quarantine by hand, replays."""

Key = tuple[bytes, int]
"""Session and number."""


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
    replays: int = 0
    """Quarantine id this frame came from, or 0."""
    dropped: list[tuple[int, int]] = []
    """Numbers that a drop report covers."""

    @property
    def key(self) -> Key:
        return self.session, self.chunk_no

    def arrival(self) -> Arrival:
        """What counts about it."""
        return Arrival(
            number=self.chunk_no, player=self.player, received_s=self.received_s, kind=_KINDS[FrameKind(self.kind)],
            first_step=self.first_step, n_steps=self.n_steps, dropped=tuple(self.dropped),
        )  # fmt: skip


_KINDS: dict[FrameKind, Literal["data", "drop", "close"]] = {
    FrameKind.DATA: "data", FrameKind.DROP: "drop", FrameKind.CLOSE: "close"
}  # fmt: skip


class Event(msgspec.Struct, array_like=True, frozen=True):
    """Something other than a frame that takes an arrival number."""

    kind: str
    """`forget` (a player) or `quarantine` (stored chunks)."""
    at_s: float
    player: bytes = b""
    chunks: list[tuple[bytes, int, int]] = []
    """Session, number and steps."""


class CommitFacts(msgspec.Struct, array_like=True, frozen=True):
    """The facts of one commit, as its row keeps them."""

    stored: list[Arrived] = []
    quarantined: list[QuarantinedFrame] = []
    forgotten: list[tuple[bytes, bytes]] = []
    """(session, player) of sessions that first came after their player was forgotten."""
    event: Event | None = None

    @property
    def n_arrivals(self) -> int:
        return len(self.stored) + (self.event is not None)

    def pack(self) -> bytes:
        return _encoder.encode(self)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(CommitFacts)


@dataclass(frozen=True, slots=True)
class Tag:
    """The attempt at a commit that wrote a row; the row counts once that very attempt was committed."""

    partition: str
    commit_no: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Commit:
    """One committed commit of a partition."""

    tag: Tag
    events: int
    """The admin commits that were there before it, and none after those."""
    at_s: float
    before: int
    """How many arrivals the partition had before."""
    facts: CommitFacts


def read_facts(raw: bytes) -> CommitFacts:
    """The facts that `pack` wrote."""
    return _decoder.decode(raw)


def facts_of(trailer: Trailer, candidates: Sequence[Candidate]) -> CommitFacts:
    """A draft's trailer as the facts of a commit."""
    pairs = zip(trailer.stored, candidates, strict=True)
    stored = [_arrived(facts, candidate.frame) for facts, candidate in pairs]
    return CommitFacts(stored, trailer.quarantined, trailer.forgotten)


def _arrived(facts: StoredFrame, frame: Frame) -> Arrived:
    dropped: tuple[tuple[int, int], ...] = ()
    n_steps = facts.n_steps
    if frame.kind is FrameKind.DROP:
        report = read_drop(frame)
        dropped, n_steps = report.ranges, report.n_steps
    return Arrived(
        session=frame.session.bytes, chunk_no=frame.chunk_no, kind=int(frame.kind), crc=frame.body_crc,
        length=len(frame.body), player=frame.player, received_s=frame.received_s, first_step=facts.first_step,
        n_steps=n_steps, game=facts.game, schema=facts.schema, replays=facts.replays, dropped=list(dropped),
    )  # fmt: skip


def keys(chunks: Sequence[tuple[bytes, int, int]]) -> tuple[tuple[uuid.UUID, int], ...]:
    """(session, number) of an event's chunks."""
    return tuple((uuid.UUID(bytes=session), number) for session, number, _ in chunks)
