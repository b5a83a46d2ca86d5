"""The whole system on one page: who hands what to whom. Read this first.

    game ─ Recorder ─ spool ─► Link ─► (door) ─► Stream ─► ingest ─► ExperienceStore
        ─► tail ─► replay ─► learner

A port has at most six methods and a contract test in `understudy.testing` that every adapter
passes. Positions and cursors are opaque text: keep them, hand them back, never take them apart.
Delivery is at least once everywhere; the store is idempotent, so every step is stored exactly once.
"""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NewType, Protocol

from understudy.core.names import PlayerName
from understudy.experience.chunk import Chunk
from understudy.experience.frame import Frame
from understudy.experience.game import GameSpec

Position = NewType("Position", str)
"""A place in one partition of a stream; opaque."""

Cursor = NewType("Cursor", str)
"""How far a reader of a store came; opaque."""

Fate = Literal["new", "duplicate", "conflict", "refused"]
"""What became of a frame that was written: stored now, stored before, other bytes under its
number, not admitted."""


# --- Stream: a partitioned, re-readable log of frames ---------------------------------------------


@dataclass(frozen=True, slots=True)
class Ack:
    """What became of one frame, the same from the stream to the client: accepted, refused, or
    neither.

    Neither means: send it again, after `retry_after_s`.
    """

    accepted: bool
    """The frame is durable in the stream: it survives a power cut."""
    refused: str | None = None
    """Why it will never be accepted, as `code: detail`."""
    retry_after_s: float = 0.0
    error: str = ""
    """Why it must be sent again, for people."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A lane of a stream; it is read only after its parents have ended."""

    id: str
    parents: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Record:
    """One frame as the stream holds it, not yet checked."""

    position: Position
    time_s: float
    raw: bytes


@dataclass(frozen=True, slots=True)
class Read:
    """What a read gave: records, where to go on, and whether nothing more will ever come."""

    records: Sequence[Record]
    next: Position | None
    ended: bool
    complete_to_s: float | None = None
    """By the reader's monotonic clock: all that came in before this was read by now. None: as
    the records' times say, which are by this machine's clock."""


class Stream(Protocol):
    """A partitioned, re-readable log of frames; chunk numbers give the order, not the log."""

    def append(self, frames: Sequence[Frame]) -> Sequence[Ack]:
        """Make frames durable, one ack for each; many threads may call at once."""
        ...

    def partitions(self) -> Sequence[Partition]: ...

    def read(
        self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float
    ) -> Read:
        """Records behind a position (None: from the start), waiting up to `wait_s` for the first
        one.

        At least one record comes when there is one, however large. PositionGone when it was
        trimmed.
        """
        ...

    def close(self) -> None: ...


# --- ExperienceStore: durable history -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to write one partition's data, and the position up to which it is already
    stored."""

    partition: str
    epoch: int
    position: Position | None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A frame that passed every check; `chunk` is the decoded body of a data frame."""

    frame: Frame
    chunk: Chunk | None


@dataclass(frozen=True, slots=True)
class RefusedFrame:
    """Raw bytes that may not be stored, with the reason code; kept in quarantine."""

    raw: bytes
    reason: str
    detail: str
    received_s: float
    game: str = ""


@dataclass(frozen=True, slots=True)
class WriteBatch:
    """What ingest read between two positions of a partition; stored together with the new
    position, or not at all."""

    partition: str
    epoch: int
    position: Position | None
    candidates: Sequence[Candidate] = ()
    refused: Sequence[RefusedFrame] = ()
    parked: Sequence[RefusedFrame] = ()
    """Healthy frames of a schema nobody has registered yet; `replay` stores them later."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """One fate per candidate, in order; the batch is durable when this is returned."""

    fates: Sequence[Fate]
    reasons: Sequence[str] = ()
    """Reason code per candidate; empty text where it was stored."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A frame in the order of arrival; `chunk` for data, None for drop reports and closes."""

    arrival_no: int
    """Counts the items of a tail from its start, 1, 2, 3. A store with many writers has no one
    order: two readers of it may count differently, each without a gap, and a frame keeps its
    number along the tail that showed it."""
    frame: Frame
    chunk: Chunk | None


Gone = Literal["forgotten", "expired", "quarantined", "damaged"]
"""Why stored bytes can no longer be read."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Arrival numbers `arrival_no..last_no` that hold no bytes (any more), and what a learner
    evicts for it."""

    arrival_no: int
    last_no: int
    reason: Gone
    player: bytes | None = None
    """With no `chunks`: everything that came before of the player with this tombstone
    (`tombstone_of`)."""
    chunks: tuple[tuple[uuid.UUID, int], ...] = ()
    """(session, chunk_no) that came before, or that stood under this number."""
    at_s: float = 0.0
    """With a player and no `chunks`: when they were forgotten, where the store tells."""


@dataclass(frozen=True, slots=True)
class Tail:
    """One page of a tail: every arrival number once, in order, and the cursor behind it; the
    cursor holds the count."""

    items: Sequence[Stored | Forgotten]
    cursor: Cursor


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What the store knows about a session."""

    session: uuid.UUID
    game: str
    player: bytes
    n_chunks: int
    n_steps: int
    high: int
    """Every number below this was seen."""
    missing: tuple[tuple[int, int], ...]
    """Ranges of numbers not seen although later ones were."""
    dropped_steps: int
    closed: bool
    last_received_s: float


@dataclass(frozen=True, slots=True)
class SessionFilter:
    """Which sessions to list; empty fields match everything."""

    game: str | None = None
    player: bytes | None = None
    since_s: float = 0.0


class ExperienceStore(Protocol):
    """Durable experience, each step once; positions move with the data they cover."""

    def claim(self, partition: str, *, owner: str, ttl_s: float) -> Claim:
        """A new epoch for a partition; ClaimLost while another owner's claim is fresh."""
        ...

    def write(self, batch: WriteBatch) -> Receipt:
        """Store a batch and its position in one durable commit; ClaimLost when the epoch is
        stale."""
        ...

    def tail(self, cursor: Cursor | None, *, max_items: int, wait_s: float) -> Tail: ...

    def sessions(self, wanted: SessionFilter) -> Iterator[SessionInfo]: ...

    def forget(self, player: bytes) -> int:
        """Erase a player (pseudonym) for good; how many chunks went. Older frames of theirs are
        refused from now on."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Audit:
    """What a full check of the stored bytes found."""

    steps: int
    chunks: int
    sessions: int
    duplicate_chunks: int
    duplicate_steps: int
    gap_chunks: int
    gap_steps: int
    dropped_steps: int
    quarantined: int
    parked: int
    forgotten_chunks: int
    expired_chunks: int
    corrupt: Sequence[str] = field(default=())
    """One line per damaged chunk or file."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """One frame in quarantine; `reason` is `unknown_schema` for parked ones."""

    id: int
    reason: str
    detail: str
    parked: bool
    received_s: float
    game: str
    session: uuid.UUID | None
    chunk_no: int | None
    crc: int
    raw: bytes


class StoreAdmin(Protocol):
    """What the `data` commands and the learner's guard call, on every store."""

    def audit(self) -> Audit: ...

    def quarantined(self, *, after_id: int = 0, limit: int = 1000) -> Sequence[Quarantined]: ...

    def quarantine(self, chunks: Sequence[tuple[uuid.UUID, int]], *, reason: str) -> int:
        """Take stored chunks out of learners' sight; how many were there."""
        ...

    def replay(self, ids: Sequence[int], candidates: Sequence[Candidate]) -> Receipt:
        """Store frames from quarantine that now pass every check; each at most once."""
        ...

    def expire(self, before_s: float) -> int:
        """Drop chunks received before a time; how many went."""
        ...


class FullStore(ExperienceStore, StoreAdmin, Protocol):
    """Both ports of a store."""


# --- Link: how anything that plays reaches a learner ----------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveModels:
    """Who plays a game now, as signed documents that whoever asked checks for itself."""

    number: int
    """The newest entry of the game's journal; give it as `after` to wait for a newer one."""
    champion: str | None = None
    champion_release: str | None = None
    canary: str | None = None
    canary_release: str | None = None
    canary_share: float = 0.0
    """The share of episodes that the canary plays."""
    trust: tuple[str, ...] = ()
    """Public keys of the deployment, as texts; pinned by whoever meets it for the first time."""


class Link(Protocol):
    """The way from a client to the platform; never goes back a version. LinkFailed: try the
    whole call again later."""

    @property
    def recording_rate(self) -> float:
        """The probability with which the next episode should be recorded, by the last answer; 1
        until one came."""
        ...

    def register(self, spec: GameSpec) -> None:
        """Tell the platform what this game's rows look like; the same spec twice is fine."""
        ...

    def send(
        self,
        frames: Sequence[Frame],
        players: Mapping[uuid.UUID, PlayerName],
        *,
        skipped_steps: int = 0,
    ) -> Sequence[Ack]:
        """Hand over at most 64 frames; one ack for each. `skipped_steps` were played and not
        recorded."""
        ...

    def bot(self, after: int, *, wait_s: float) -> LiveModels | None:
        """Who plays, once that is newer than number `after`; None when nothing came within
        `wait_s`."""
        ...

    def policy(self, model_no: int) -> bytes:
        """A model's policy as bytes, not checked."""
        ...

    def close(self) -> None:
        """Let go of everything; whoever waits in another call is woken."""
        ...


class Specs(Protocol):
    """Where ingest finds a game's spec."""

    def spec(self, game: str, schema: str) -> GameSpec | None: ...
    def knows(self, game: str) -> bool:
        """Whether any schema of this game is registered."""
        ...


# --- Objects: the ground of the registry ----------------------------------------------------------


class Objects(Protocol):
    """Named bytes that are created once and never changed; a name is parts of A-Z a-z 0-9 . _ -
    joined by slashes."""

    look_every_s: float
    """How often it is worth looking for what others created: each look takes its time, and may
    be paid for."""

    def get(self, name: str) -> bytes | None: ...

    def create(self, name: str, raw: bytes) -> bool:
        """Whether the object is new and durable now; False when one of that name is there, which
        stays as it is."""
        ...

    def list(self, prefix: str) -> Sequence[str]:
        """Names that begin with a folder's name and a slash, in order."""
        ...

    def delete(self, name: str) -> None:
        """Remove an object that nobody refers to any more; none of that name is fine."""
        ...
