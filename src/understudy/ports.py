"""The whole system in one file: the ports between its parts and the records that cross them.

Read this file first.

    game ─► Episode or Recorder ─► spool ─► Link.send ─► intake ─► Stream ─► ingest
        ─► ExperienceStore ─► tail ─► replay ─► learner ─► registry (Objects) ─► gate
        ─► Link.bot ─► game

A port has at most six methods and a contract test in `understudy.testing` that every adapter
passes. Positions and cursors are opaque text: store them and pass them back unchanged, never parse
them. Delivery is at least once everywhere; the store is idempotent, so every step is stored exactly
once.
"""

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NewType, Protocol

from understudy.core.errors import Refused
from understudy.core.names import PlayerName
from understudy.core.tensors import Array
from understudy.experience.chunk import Chunk
from understudy.experience.frame import Frame
from understudy.experience.game import GameSpec
from understudy.nn.policy import Policy

Position = NewType("Position", str)
"""A place in one partition of a stream; opaque."""

Cursor = NewType("Cursor", str)
"""How far a reader has read a store; opaque."""

Fate = Literal["new", "duplicate", "conflict", "refused"]
"""The result of writing a frame.

`new`: stored now. `duplicate`: stored or quarantined before. `conflict`: rejected, because a frame
with the same number but another body was stored, or the number was reported as dropped. `refused`:
rejected by a rule. Only bodies are compared: if a frame is sent again, its header has another
`received_s`.
"""


# --- Stream: a partitioned, re-readable log of frames ---------------------------------------------


@dataclass(frozen=True, slots=True)
class Ack:
    """The result for one frame; stream, gateway and client all use this type.

    A frame that is neither accepted nor refused must be sent again after `retry_after_s`.
    """

    accepted: bool
    """The frame is durable in the stream: it survives a power cut."""
    refused: str | None = None
    """Why the frame will never be accepted, as `code: detail`."""
    retry_after_s: float = 0.0
    error: str = ""
    """Why the frame must be sent again, as text for people."""


def refused_ack(refused: Refused) -> Ack:
    """The ack of a frame that was rejected, for good or until it is sent again."""
    if refused.retry_after_s is None:
        return Ack(False, refused=str(refused))
    return Ack(False, retry_after_s=refused.retry_after_s, error=str(refused))


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition of a stream; it is read only after its parents have ended."""

    id: str
    parents: tuple[str, ...] = ()


DAMAGED_ENTRY = b"damaged stream entry"
"""The start of `Record.raw` where a stream can no longer read what it acknowledged."""

DAMAGED_STREAM = "damaged_stream"
"""The reason code of such a record in quarantine: every frame that it held is lost."""

CRASHED_INGEST = "crashed_ingest"
"""The reason code of a quarantined frame that repeatedly crashed ingest before it was checked."""


@dataclass(frozen=True, slots=True)
class Record:
    """One frame as the stream stores it, not yet validated."""

    position: Position
    """Just after this record: a read from here starts with the next one."""
    time_s: float
    raw: bytes


@dataclass(frozen=True, slots=True)
class Read:
    """The result of a read: records, the position to continue from, and whether more can follow."""

    records: Sequence[Record]
    next: Position | None
    ended: bool
    """The partition will never have more records."""
    complete_to_s: float | None = None
    """Every record that arrived before this time has been read, by the reader's monotonic clock.
    None if the records' `time_s` can be used instead, because this machine's clock set it."""


class Stream(Protocol):
    """A partitioned, re-readable log of frames; chunk numbers define the order, not the log."""

    def append(self, frames: Sequence[Frame]) -> Sequence[Ack]:
        """Make frames durable and return one ack per frame; safe to call from many threads."""
        ...

    def partitions(self) -> Sequence[Partition]:
        """Return every partition, parents before their children."""
        ...

    def read(
        self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float
    ) -> Read:
        """Return the records after a position, or from the start when it is None.

        Waits up to `wait_s` for the first record. Returns at least one record when there is one,
        even if it is larger than `max_bytes`. Raises PositionGone when the position was trimmed.
        """
        ...

    def close(self) -> None: ...


# --- ExperienceStore: durable history -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to write one partition's data, and the position up to which it is stored."""

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
    """Raw bytes that may not be stored, with the reason code; they go to quarantine."""

    raw: bytes
    reason: str
    detail: str
    received_s: float
    game: str = ""


@dataclass(frozen=True, slots=True)
class WriteBatch:
    """What ingest read between two positions of a partition.

    The frames and the new position are stored together or not at all.
    """

    partition: str
    epoch: int
    position: Position | None
    """None leaves the stored position as it is."""
    candidates: Sequence[Candidate] = ()
    refused: Sequence[RefusedFrame] = ()
    parked: Sequence[RefusedFrame] = ()
    """Valid frames whose schema is not registered yet; `replay` stores them later."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """One fate per candidate, in order; the batch is durable when this is returned."""

    fates: Sequence[Fate]
    reasons: Sequence[str] = ()
    """Reason code per candidate: empty for a stored frame, new or duplicate; `quarantined` for the
    duplicate of a quarantined frame; `conflict`; or the Rejection of `experience.session.admit`.
    `replay` also returns `not_quarantined`."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One stored frame, as a tail returns it."""

    arrival_no: int
    """Counts the items of a tail from its start: 1, 2, 3. A store with many writers has no single
    order, so two readers may count differently. Each counts without gaps, and a frame keeps its
    number within the tail that returned it."""
    frame: Frame
    chunk: Chunk | None
    """The decoded body of a data frame; None for drop reports and closes."""


Gone = Literal["forgotten", "expired", "quarantined", "damaged"]
"""Why stored bytes can no longer be read."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """An item of a tail that has no frame: a placeholder for removed frames, or an event.

    A placeholder stands for the frames with the arrival numbers `arrival_no..last_no`, which were
    removed for `reason`; one reader may get one for a range, another one for each number. An event
    tells a learner what to evict. With neither `chunks` nor `player`, there is nothing to evict.
    """

    arrival_no: int
    last_no: int
    reason: Gone
    player: bytes | None = None
    """Placeholder: the pseudonym of the frame's player, if known. Event `forgotten`: evict
    every earlier frame of the player with this tombstone (`experience.session.tombstone_of`)."""
    chunks: tuple[tuple[uuid.UUID, int], ...] = ()
    """As (session, chunk_no). Placeholder: the removed frame, if known; empty once the player is
    forgotten. Event `quarantined`: evict these chunks; `player` is None."""
    at_s: float = 0.0
    """When the event happened, if the store records it."""


TAIL_BYTES = 64 * 1024 * 1024
"""A page of a tail ends with the chunk that brings it to this many decoded bytes."""


@dataclass(frozen=True, slots=True)
class Tail:
    """One page of a tail: every arrival number once, in order, and the cursor after it.

    The cursor also stores the arrival number, so that a resumed tail continues the count.
    """

    items: Sequence[Stored | Forgotten]
    cursor: Cursor
    is_cut: bool = False
    """The page ended early, at TAIL_BYTES; more items may follow."""


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A summary of one session, even if all its frames are refused, parked, dropped or expired."""

    session: uuid.UUID
    game: str
    """Empty until the first data frame; drop reports and closes do not name the game."""
    player: bytes
    n_chunks: int
    """Stored data chunks, without quarantined ones; expired ones still count."""
    n_steps: int
    high: int
    """Every chunk number below this was seen."""
    missing: tuple[tuple[int, int], ...]
    """Ranges of chunk numbers that were not seen although later ones were."""
    dropped_steps: int
    closed: bool
    last_received_s: float


@dataclass(frozen=True, slots=True)
class SessionFilter:
    """Which sessions to list; fields left at their default match everything."""

    game: str | None = None
    player: bytes | None = None
    since_s: float = 0.0
    """Sessions whose last frame was received at or after this time, in whole seconds."""


class ExperienceStore(Protocol):
    """Durable experience, each step once; a position is stored together with the data it covers.

    A store keeps one `SessionState` per session, and inside the commit `experience.session.admit`
    decides about each frame; `readmit` and `withdraw` are for `StoreAdmin`. `stores.draft.Draft`
    applies all rules below for a store that implements its `CommitLookup`. Every method may be
    called from many threads. Other processes open the store themselves, the embedded store as a
    `StoreView`.
    """

    def claim(self, partition: str, *, owner: str, ttl_s: float) -> Claim:
        """Start a new epoch for a partition; ClaimLost while another owner's claim is fresh.

        A claim is fresh until the store is closed, or until `ttl_s` have passed since the claim or
        its last write, by the store's clock. Its own owner may claim again at any time.
        """
        ...

    def write(self, batch: WriteBatch) -> Receipt:
        """Store a batch and its position in one durable commit; ClaimLost if the epoch is stale.

        A candidate that conflicts or is refused goes to quarantine with its reason, as `refused`
        and `parked` frames do; the same number and body are quarantined once. Frames of forgotten
        players are not kept. After the candidates, `admit` gets each quarantined frame with an
        intact header (`identity_of`) as kind `refused`: its number then counts as seen, unless it
        is after the close, outside the window or in another player's session.
        """
        ...

    def tail(self, cursor: Cursor | None, *, max_items: int, wait_s: float) -> Tail:
        """Return the items after a cursor (None: from the start), waiting up to `wait_s` for one.

        A commit ends the wait. The cursor of an empty store stays valid. A page also ends at
        TAIL_BYTES, so that memory does not depend on how well frames are compressed. Raises
        ConfigError if the text is not a cursor, and Corrupt if the store notices that the cursor is
        ahead of it.
        """
        ...

    def sessions(self, session_filter: SessionFilter) -> Iterator[SessionInfo]:
        """Return each matching session once, without those of forgotten players."""
        ...

    def forget(self, player: bytes) -> int:
        """Erase a player (pseudonym) for good and return the number of erased data chunks.

        Erases frames, sessions and quarantined bytes, and appends one `forgotten` event. Later,
        a frame of the player is refused if it was received before the second of this call, or if
        its session was erased or began before this call. Frames of later sessions are stored.
        """
        ...

    def close(self) -> None:
        """Release all claims and resources; may be called twice.

        Every waiting or later call raises Closed.
        """
        ...


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of a full check of the stored bytes."""

    steps: int
    chunks: int
    sessions: int
    """Sessions with a stored frame."""
    duplicate_chunks: int
    duplicate_steps: int
    gap_chunks: int
    """Chunk numbers of which nothing is known, although later ones of their session arrived."""
    gap_steps: int
    """Steps missing in these gaps, as far as the chunks before and after them show."""
    dropped_steps: int
    quarantined: int
    parked: int
    forgotten_chunks: int
    expired_chunks: int
    corrupt: Sequence[str] = field(default=())
    """One line per damaged chunk or file."""
    evicted: int = 0
    """Quarantined or parked frames whose bytes were deleted because the quarantine was full."""


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
    """CRC-32 of the body, or of all bytes if the header is damaged."""
    raw: bytes


class StoreAdmin(Protocol):
    """What the `data` commands and the learner's guard call; every store implements it."""

    def audit(self) -> Audit: ...

    def quarantined(self, *, after_id: int = 0, limit: int = 1000) -> Sequence[Quarantined]:
        """Return quarantined frames by id, without replayed, expired and evicted ones."""
        ...

    def quarantine(self, chunks: Sequence[tuple[uuid.UUID, int]], *, reason: str) -> int:
        """Move chunks from the store to quarantine and return how many of them were in the store.

        Appends a `quarantined` event that names them. Their numbers still count as seen.
        """
        ...

    def replay(self, ids: Sequence[int], candidates: Sequence[Candidate]) -> Receipt:
        """Store quarantined frames that now pass every check; each at most once.

        `ids[i]` is the entry of `candidates[i]`, which must have the same bytes. Entries stored as
        `new` leave quarantine, others stay. If a number already counts as seen, `readmit` adds its
        steps to the session.
        """
        ...

    def expire(self, before_s: float) -> int:
        """Delete chunks and quarantined bytes received before a time; return how many chunks.

        Times are whole seconds; `before_s` itself is kept. Numbers still count as seen, and drop
        reports stay stored. Appends no event.
        """
        ...


class FullStore(ExperienceStore, StoreAdmin, Protocol):
    """Both ports of a store."""


# --- Link: how games, bots and workers reach a learner --------------------------------------------


MAX_CANARY_SHARE = 0.5
"""The largest probability of a canary in a draw between it and the champion."""
CANARY_BESIDE_CONTROL = 0.6
"""The probability of the canary in a draw between it and the control. No canary has as large a
share beside the champion, so a ticket's probability tells which of the two draws it was."""
MAX_CONTROL_SHARE = 0.2
"""The largest share of episodes that a control plays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveModels:
    """The models that play a game now, as signed documents; the client verifies the signatures."""

    number: int
    """The newest entry of the game's journal; pass it as `after` to wait for a newer one."""
    champion: str | None = None
    champion_release: str | None = None
    canary: str | None = None
    canary_release: str | None = None
    canary_share: float = 0.0
    """The share of episodes that the canary plays."""
    control_release: str | None = None
    """The release of the control, which the canary's document names with its share."""
    noise: str | None = None
    """The signed noise of each skill; None: not calibrated yet."""
    trust: tuple[str, ...] = ()
    """Public keys of the deployment, as text; a client pins them on first contact."""


MAX_TICKETS = 128
"""The largest number of tickets in one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTicket:
    """The model that plays one episode, and the sealed text for the episode's note."""

    model_no: int
    ticket: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketBatch:
    """The bots of the next episodes, drawn by the gateway while a canary is on trial."""

    entry: int
    """The canary's journal entry by which they were drawn; 0: there is no canary."""
    models: tuple[int, ...] = ()
    """The models between which they were drawn: champion, canary and, if requested, control.

    A client that plays other models uses none of the tickets: with only some outcomes of a draw,
    the comparison would be biased.
    """
    valid_s: float = 0.0
    """An episode is not compared if its first chunk arrives more than this many seconds later."""
    tickets: tuple[DrawnTicket, ...] = ()
    """To be used in this order, one per episode."""


class Link(Protocol):
    """The connection from a client to the platform. After LinkFailed, retry the whole call later.

    `bot` never returns older live models: those with a journal number below an earlier result's.
    """

    @property
    def recording_rate(self) -> float:
        """Probability to record the next episode, as in the last response; 1 before the first."""
        ...

    def register(self, spec: GameSpec) -> None:
        """Register the layout of this game's rows; registering the same spec twice is fine."""
        ...

    def send(
        self,
        frames: Sequence[Frame],
        players: Mapping[uuid.UUID, PlayerName],
        *,
        skipped_steps: int = 0,
    ) -> Sequence[Ack]:
        """Send at most 64 frames and return one ack per frame.

        `players` names the player of each session. `skipped_steps` were played but not recorded.
        """
        ...

    def bot(self, after: int, *, wait_s: float, schema: str | None = None) -> LiveModels | None:
        """Return live models with a number above `after`; None if `wait_s` pass without any.

        They are those of `schema`; by default of the newest schema that has a champion.
        """
        ...

    def tickets(self, n: int, *, schema: str, with_control: bool = True) -> TicketBatch:
        """Return `n` draws between the bots of a schema's trial, at most MAX_TICKETS.

        Without `with_control`, all are between canary and champion.
        """
        ...

    def policy(self, model_no: int) -> bytes:
        """Return a model's policy as bytes, not verified."""
        ...

    def close(self) -> None:
        """Release all resources; a call that waits in another thread ends."""
        ...


class Specs(Protocol):
    """Where ingest looks up a game's spec."""

    def spec(self, game: str, schema: str) -> GameSpec | None: ...
    def has_game(self, game: str) -> bool:
        """Return whether any schema of this game is registered."""
        ...


# --- Objects: the storage of the model registry ---------------------------------------------------


class Objects(Protocol):
    """Named bytes that are created once and never changed.

    A name consists of one or more parts of A-Z a-z 0-9 . _ - separated by slashes.
    """

    poll_every_s: float
    """Seconds between two checks for new objects; each check takes time and may cost money."""

    def get(self, name: str) -> bytes | None: ...

    def create(self, name: str, raw: bytes) -> bool:
        """Create a durable object and return True, or False if the name exists (left unchanged)."""
        ...

    def list(self, prefix: str) -> Sequence[str]:
        """Return, in order, the names that begin with a folder's name and a slash."""
        ...

    def delete(self, name: str) -> None:
        """Delete an object that is no longer referenced; a missing name is fine."""
        ...


# --- Team: actors that play one policy ------------------------------------------------------------


class PlayedEpisode(NamedTuple):
    """An episode that ended during `Team.collect`; `env` is numbered over all actors of a run."""

    env: int
    return_: float
    """The sum of the game's rewards, below any wrappers."""
    length: int
    seed: int | None
    """None if a vector env started the episode by itself."""


class PlayedEvaluation(NamedTuple):
    """Returns of a version's greedy policy on held-out seeds, which no replay contains."""

    version: int
    returns: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamReport:
    """The work of a team of workers, over about the last second."""

    workers: Mapping[str, int]
    """Workers by task, `train` and `evaluate`."""
    chunks_s: float
    """Chunks that were inserted or rejected, per second."""
    steps_s: float
    handling_s: float
    """Mean time from the arrival of chunks until they are inserted or rejected."""
    learner_load: float
    """Share of the time that the learner spent in updates."""
    lag_versions: int
    """The largest lag of a round."""
    queue_bytes: int
    """Bytes that have arrived and are not inserted yet."""


@dataclass(frozen=True, slots=True)
class Collected:
    """The steps of a round: chunks, env by env, and the episodes that ended."""

    chunks: list[Chunk]
    episodes: list[PlayedEpisode]
    env_steps: int
    replaced: Sequence[str] = ()
    """A message about each actor that was lost, replaced or joined later, or whose chunks were
    rejected."""
    evaluations: Sequence[PlayedEvaluation] = ()
    report: TeamReport | None = None
    on_inserted: Callable[[float], None] | None = field(default=None, compare=False)
    """Called once the chunks are in the replay, or rejected or dropped as too old, with the seconds
    spent in updates so far."""


class Team(Protocol):
    """Actors that play one policy together, in this process or in others; an actor is one, too.

    What a team plays depends only on its settings, the round numbers and the policies; an actor
    that is lost is replaced, and plays the same. An asynchronous team is different: `collect`
    returns the rounds that are over, played with an earlier policy, and after a wait perhaps none;
    lost actors begin new episodes; and `state` and `restore` raise ConfigError.
    """

    @property
    def num_envs(self) -> int:
        """The envs of all actors."""
        ...

    def collect(
        self, policy: Policy, steps: int, *, round_no: int, explore: Any = None
    ) -> Collected:
        """Play `steps` steps in every env; `explore` is epsilon, one number or one per env.

        Never use a `round_no` twice: the round's noise is computed from it.
        """
        ...

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return the arrays and JSON facts that `restore` needs; call it between two collects."""
        ...

    def restore(self, arrays: Mapping[str, Array], facts: Mapping[str, Any]) -> None:
        """Resume from a `state` of a team with the same actors, of this or another kind.

        ConfigError if an env does not return the same observations as before, or if a team with
        other actors saved the state.
        """
        ...

    def close(self) -> None:
        """End all actors and close their envs; may be called twice."""
        ...
