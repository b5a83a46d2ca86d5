"""A commit being put together: every frame of some batches gets its fate before anything is written.

Every store uses it: the rule by which a frame counts once is the same wherever frames are kept.
"""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol
from zlib import crc32

import msgspec

from understudy.core.frame import HEADER_BYTES, Frame, FrameKind, identity_of, read_close, read_drop
from understudy.core.ports import Candidate, Fate, Receipt, RefusedFrame, WriteBatch
from understudy.core.session import Arrival, SessionState, admit, readmit

Sessions = dict[uuid.UUID, tuple[str, SessionState]]
"""Game and state per session."""

StateOf = Callable[[uuid.UUID], tuple[str, SessionState] | None]
"""A session's game and state before."""


class StoredFrame(msgspec.Struct, array_like=True, frozen=True):
    """What is known of a stored frame besides its bytes."""

    length: int
    first_step: int
    n_steps: int
    n_rows: int
    decoded_bytes: int
    game: str
    schema: str
    replays: int = 0
    """Quarantine id this frame came from, or 0."""


class QuarantinedFrame(msgspec.Struct, array_like=True, frozen=True):
    """One refused or parked frame, without its raw bytes."""

    id: int
    length: int
    reason: str
    detail: str
    parked: bool
    received_s: float
    game: str
    session: bytes
    chunk_no: int
    crc: int
    player: bytes


class Trailer(msgspec.Struct, frozen=True):
    """The facts of one commit."""

    positions: list[tuple[str, str | None]] = []
    """(partition, position) that this commit covers."""
    stored: list[StoredFrame] = []
    quarantined: list[QuarantinedFrame] = []
    forgotten: list[tuple[bytes, bytes]] = []
    """(session, player) of sessions that first came after their player was forgotten; no frame of them is kept."""


class Known(Protocol):
    """What the store knows before the commit."""

    def state_of(self, session: uuid.UUID) -> tuple[str, SessionState] | None: ...
    def key_of(self, session: uuid.UUID, chunk_no: int) -> tuple[int, int] | None: ...
    def is_stored(self, session: uuid.UUID, chunk_no: int) -> bool: ...
    def quarantined_crcs(self, session: bytes, chunk_no: int) -> list[int]: ...
    def waiting(self, quarantine_id: int) -> tuple[str, bytes] | None: ...
    def is_forgotten(self, player: bytes, session: uuid.UUID, received_s: float) -> bool: ...


_NEVER_REPLAYED = ("conflict", "step_mismatch")
"""What was refused because of its neighbours is not made right by time."""


class Draft:
    """Collects batches; `trailer`, `raws`, `candidates` and `sessions` are what is to be written."""

    def __init__(self, known: Known, first_quarantine: int) -> None:
        self._known = known
        self._next_quarantine = first_quarantine
        self.sessions: Sessions = {}
        """Sessions that the commit changes; `trailer` adds what was refused, which counts behind what was stored."""
        self._keys: dict[tuple[uuid.UUID, int], tuple[int, int]] = {}
        self._stored: list[StoredFrame] = []
        self._stored_raws: list[bytes] = []
        self._quarantined: list[QuarantinedFrame] = []
        self._quarantined_raws: list[bytes] = []
        self._crcs_here: dict[tuple[bytes, int], list[int]] = {}
        self._positions: list[tuple[str, str | None]] = []
        self._forgotten: dict[uuid.UUID, bytes] = {}
        self.candidates: list[Candidate] = []

    @property
    def raws(self) -> list[bytes]:
        """The bytes of stored frames, then those of quarantined ones."""
        return self._stored_raws + self._quarantined_raws

    @property
    def is_worth_writing(self) -> bool:
        return bool(self._stored or self._quarantined or self._positions)

    def trailer(self) -> Trailer:
        """The facts of the commit, once everything was taken."""
        for one in self._quarantined:
            if any(one.session):
                received_s = int(one.received_s)
                arrival = Arrival(number=one.chunk_no, player=one.player, received_s=received_s, kind="refused")
                count(self.sessions, uuid.UUID(bytes=one.session), one.game, arrival, before=self._known.state_of)
        return Trailer(
            positions=self._positions,
            stored=self._stored,
            quarantined=self._quarantined,
            forgotten=[(session.bytes, player) for session, player in self._forgotten.items()],
        )

    def take(self, batch: WriteBatch) -> Receipt:
        """Decide about every frame of a batch."""
        if batch.position is not None:
            self._positions.append((batch.partition, batch.position))
        decided = [self._decide(candidate) for candidate in batch.candidates]
        for refused in batch.refused:
            self._quarantine(refused, parked=False)
        for parked in batch.parked:
            self._quarantine(parked, parked=True)
        return Receipt([fate for fate, _ in decided], [reason for _, reason in decided])

    def replay(self, candidate: Candidate, quarantine_id: int) -> tuple[Fate, str]:
        """A frame out of quarantine: its number may count as seen already, and is stored unless something is there."""
        frame, waiting = candidate.frame, self._known.waiting(quarantine_id)
        if self._known.is_forgotten(frame.player, frame.session, frame.received_s):
            return "refused", "forgotten"
        if self._is_stored(frame):
            return "duplicate", "seen"
        if waiting is None or waiting[1] != frame.encode():
            return "refused", "not_quarantined"
        facts = _facts(candidate, quarantine_id)
        arrival = arrival_of(frame, facts)
        game, before = self._session(frame.session) or (facts.game, None)
        state, verdict = admit(before, arrival)
        if verdict not in ("", "seen"):
            return "refused", verdict
        if verdict == "seen":
            if waiting[0] in _NEVER_REPLAYED:
                return "refused", waiting[0]
            state = readmit(state, arrival)  # its number counted while it lay in quarantine
        self.sessions[frame.session] = (game or facts.game, state)
        self._store(candidate, facts)
        return "new", ""

    def _is_stored(self, frame: Frame) -> bool:
        key = (frame.session, frame.chunk_no)
        return key in self._keys or self._known.is_stored(*key)

    def _decide(self, candidate: Candidate) -> tuple[Fate, str]:
        frame = candidate.frame
        if self._is_forgotten(frame.player, frame.session, frame.received_s):
            return "refused", "forgotten"
        facts = _facts(candidate)
        game, before = self._session(frame.session) or (facts.game, None)
        state, verdict = admit(before, arrival_of(frame, facts))
        if verdict == "":
            self.sessions[frame.session] = (game or facts.game, state)
            self._store(candidate, facts)
            return "new", ""
        if verdict == "seen":
            return self._seen(frame, facts.game)
        if verdict != "forgotten":
            self._quarantine(_refusal(frame, verdict, "does not fit what is known of its session", facts.game))
        return "refused", verdict

    def _is_forgotten(self, player: bytes, session: uuid.UUID, received_s: float) -> bool:
        """Whether a frame is refused for that; a session that was never heard of is noted, so that it is not missed."""
        if not self._known.is_forgotten(player, session, received_s):
            return False
        if self._known.state_of(session) is None:
            self._forgotten[session] = player
        return True

    def _seen(self, frame: Frame, game: str) -> tuple[Fate, str]:
        if self._key(frame.session, frame.chunk_no) == (frame.body_crc, len(frame.body)):
            return "duplicate", ""
        if frame.body_crc in self._crcs(frame.session.bytes, frame.chunk_no):
            return "duplicate", "quarantined"
        self._quarantine(_refusal(frame, "conflict", "other bytes, or a drop report, took this number before", game))
        return "conflict", "conflict"

    def _store(self, candidate: Candidate, facts: StoredFrame) -> None:
        frame = candidate.frame
        self._stored.append(facts)
        self._stored_raws.append(frame.encode())
        self.candidates.append(candidate)
        self._keys[frame.session, frame.chunk_no] = (frame.body_crc, len(frame.body))

    def _session(self, session: uuid.UUID) -> tuple[str, SessionState] | None:
        return self.sessions.get(session) or self._known.state_of(session)

    def _key(self, session: uuid.UUID, chunk_no: int) -> tuple[int, int] | None:
        return self._keys.get((session, chunk_no)) or self._known.key_of(session, chunk_no)

    def _quarantine(self, refused: RefusedFrame, *, parked: bool = False) -> None:
        session, chunk_no, player = identity_of(refused.raw)
        if any(session) and self._is_forgotten(player, uuid.UUID(bytes=session), refused.received_s):
            return
        crc = crc32(refused.raw[HEADER_BYTES:]) if any(session) else crc32(refused.raw)
        if any(session) and crc in self._crcs(session, chunk_no):
            return
        self._quarantined.append(
            QuarantinedFrame(
                id=self._next_quarantine, length=len(refused.raw), reason=refused.reason, detail=_text(refused.detail),
                parked=parked, received_s=refused.received_s, game=refused.game, session=session, chunk_no=chunk_no,
                crc=crc, player=player,
            )
        )  # fmt: skip
        self._next_quarantine += 1
        self._crcs_here.setdefault((session, chunk_no), []).append(crc)
        self._quarantined_raws.append(refused.raw)

    def _crcs(self, session: bytes, chunk_no: int) -> Sequence[int]:
        return self._crcs_here.get((session, chunk_no), []) + self._known.quarantined_crcs(session, chunk_no)


def _text(detail: str) -> str:
    """At most 300 characters that can be written anywhere."""
    return detail[:300].encode("utf-8", "replace").decode()


def _facts(candidate: Candidate, replays: int = 0) -> StoredFrame:
    length, chunk = candidate.frame.size_bytes, candidate.chunk
    if chunk is None:
        return StoredFrame(length, -1, 0, 0, 0, "", "", replays)
    meta = chunk.meta
    return StoredFrame(
        length, meta.first_step, meta.n_steps, chunk.n_rows, chunk.size_bytes, meta.game, meta.schema, replays
    )


def _refusal(frame: Frame, reason: str, detail: str, game: str) -> RefusedFrame:
    return RefusedFrame(frame.encode(), reason, detail, float(frame.received_s), game)


def arrival_of(frame: Frame, facts: StoredFrame) -> Arrival:
    """What counts about a frame."""
    arrival = Arrival(number=frame.chunk_no, player=frame.player, received_s=frame.received_s, kind="close")
    if frame.kind is FrameKind.DATA:
        return replace(arrival, kind="data", first_step=facts.first_step, n_steps=facts.n_steps)
    if frame.kind is FrameKind.DROP:
        report = read_drop(frame)
        return replace(arrival, kind="drop", n_steps=report.n_steps, dropped=report.ranges)
    read_close(frame)
    return arrival


def count(sessions: Sessions, session: uuid.UUID, game: str, arrival: Arrival, *, before: StateOf) -> bool:
    """Add one frame to its session; whether it counted."""
    known = sessions.get(session) or before(session)
    state, verdict = admit(known[1] if known else None, arrival)
    if not verdict:
        sessions[session] = (known[0] if known and known[0] else game, state)
    return not verdict
