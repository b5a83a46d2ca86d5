"""A commit being put together: every frame of some batches gets its fate before anything is
written.

Every store uses it: the rule by which a frame counts once is the same wherever frames are kept.
"""

import uuid
from dataclasses import dataclass, replace
from typing import Protocol
from zlib import crc32

import msgspec

from understudy.experience.frame import (
    HEADER_BYTES,
    Frame,
    FrameKind,
    identity_of,
    read_close,
    read_drop,
)
from understudy.experience.session import Arrival, SessionState, admit, readmit
from understudy.ports import Candidate, Fate, Receipt, RefusedFrame, WriteBatch

Sessions = dict[uuid.UUID, tuple[str, SessionState]]
"""Game and state per session."""


@dataclass(frozen=True, slots=True)
class StoredFrame:
    """A frame that a commit stores; of a report there are no steps, and neither game nor schema."""

    frame: Frame
    first_step: int
    n_steps: int
    game: str
    schema: str
    replays: int = 0
    """Quarantine id this frame came from, or 0."""


class QuarantinedFrame(msgspec.Struct, array_like=True, frozen=True):
    """One refused, parked or withdrawn frame, without its bytes; Cassandra keeps it in this
    order."""

    id: int
    reason: str
    detail: str
    parked: bool
    received_s: float
    game: str
    session: bytes
    chunk_no: int
    crc: int
    player: bytes
    digest: bytes = b""
    """Hash of the whole frame, in a store that finds its bytes by that."""


class CommitLookup(Protocol):
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
    """Collects batches; its public fields are what is to be written."""

    def __init__(self, known: CommitLookup, first_quarantine: int) -> None:
        self._known = known
        self._next_quarantine = first_quarantine
        self._sessions: Sessions = {}
        self._keys: dict[tuple[uuid.UUID, int], tuple[int, int]] = {}
        self._crcs_here: dict[tuple[bytes, int], list[int]] = {}
        self.stored: list[StoredFrame] = []
        self.quarantined: list[QuarantinedFrame] = []
        self.stored_raws: list[bytes] = []
        """The bytes of each stored frame."""
        self.quarantined_raws: list[bytes] = []
        self.positions: dict[str, str] = {}
        """By partition."""
        self.forgotten: dict[uuid.UUID, bytes] = {}
        """Sessions, with their player, that first came after that player was forgotten; no frame
        of them is kept."""

    @property
    def is_worth_writing(self) -> bool:
        return bool(self.stored or self.quarantined or self.positions)

    def sessions(self) -> Sessions:
        """The sessions that the commit changes, as they are then: what was refused counts behind
        what was stored."""
        sessions = dict(self._sessions)
        for one in self.quarantined:
            if any(one.session):
                session = uuid.UUID(bytes=one.session)
                game, before = sessions.get(session) or self._known.state_of(session) or ("", None)
                received_s = int(one.received_s)
                arrival = Arrival(
                    number=one.chunk_no, player=one.player, received_s=received_s, kind="refused"
                )
                state, verdict = admit(before, arrival)
                if not verdict:
                    sessions[session] = (game or one.game, state)
        return sessions

    def take(self, batch: WriteBatch) -> Receipt:
        """Decide about every frame of a batch."""
        if batch.position is not None:
            self.positions[batch.partition] = batch.position
        decided = [self._decide(candidate) for candidate in batch.candidates]
        for refused in batch.refused:
            self._quarantine(refused, parked=False)
        for parked in batch.parked:
            self._quarantine(parked, parked=True)
        return Receipt([fate for fate, _ in decided], [reason for _, reason in decided])

    def replay(self, candidate: Candidate, quarantine_id: int) -> tuple[Fate, str]:
        """A frame out of quarantine: its number may count as seen already, and is stored unless
        something is there."""
        frame = candidate.frame
        waiting = self._known.waiting(quarantine_id)
        if self._known.is_forgotten(frame.player, frame.session, frame.received_s):
            return "refused", "forgotten"
        key = (frame.session, frame.chunk_no)
        if key in self._keys or self._known.is_stored(*key):
            return "duplicate", "seen"
        if waiting is None or waiting[1] != frame.encode():
            return "refused", "not_quarantined"
        new = _stored(candidate, quarantine_id)
        arrival = _arrival(new)
        game, before = self._session(frame.session) or ("", None)
        state, verdict = admit(before, arrival)
        if verdict not in ("", "seen"):
            return "refused", verdict
        if verdict == "seen":
            if waiting[0] in _NEVER_REPLAYED:
                return "refused", waiting[0]
            state = readmit(state, arrival)  # its number counted while it lay in quarantine
        self._store(new, game, state)
        return "new", ""

    def _decide(self, candidate: Candidate) -> tuple[Fate, str]:
        frame = candidate.frame
        if self._is_forgotten(frame.player, frame.session, frame.received_s):
            return "refused", "forgotten"
        new = _stored(candidate)
        game, before = self._session(frame.session) or ("", None)
        state, verdict = admit(before, _arrival(new))
        if verdict == "":
            self._store(new, game, state)
            return "new", ""
        if verdict == "seen":
            return self._seen(frame, new.game)
        if verdict != "forgotten":
            self._quarantine(
                _refusal(frame, verdict, "does not fit what is known of its session", new.game)
            )
        return "refused", verdict

    def _is_forgotten(self, player: bytes, session: uuid.UUID, received_s: float) -> bool:
        """Whether a frame is refused for that; a session that was never heard of is noted, so
        that it is not missed."""
        if not self._known.is_forgotten(player, session, received_s):
            return False
        if self._known.state_of(session) is None:
            self.forgotten[session] = player
        return True

    def _seen(self, frame: Frame, game: str) -> tuple[Fate, str]:
        key = (frame.session, frame.chunk_no)
        if (self._keys.get(key) or self._known.key_of(*key)) == (frame.body_crc, len(frame.body)):
            return "duplicate", ""
        if frame.body_crc in self._crcs(frame.session.bytes, frame.chunk_no):
            return "duplicate", "quarantined"
        self._quarantine(
            _refusal(
                frame, "conflict", "other bytes, or a drop report, took this number before", game
            )
        )
        return "conflict", "conflict"

    def _store(self, new: StoredFrame, game: str, state: SessionState) -> None:
        frame = new.frame
        self._sessions[frame.session] = (game or new.game, state)
        self.stored.append(new)
        self.stored_raws.append(frame.encode())
        self._keys[frame.session, frame.chunk_no] = (frame.body_crc, len(frame.body))

    def _session(self, session: uuid.UUID) -> tuple[str, SessionState] | None:
        return self._sessions.get(session) or self._known.state_of(session)

    def _quarantine(self, refused: RefusedFrame, *, parked: bool = False) -> None:
        session, chunk_no, player = identity_of(refused.raw)
        if any(session) and self._is_forgotten(
            player, uuid.UUID(bytes=session), refused.received_s
        ):
            return
        crc = crc32(refused.raw[HEADER_BYTES:]) if any(session) else crc32(refused.raw)
        if any(session) and crc in self._crcs(session, chunk_no):
            return
        detail = (
            refused.detail[:300].encode("utf-8", "replace").decode()
        )  # what can be written anywhere
        self.quarantined.append(
            QuarantinedFrame(
                id=self._next_quarantine,
                reason=refused.reason,
                detail=detail,
                parked=parked,
                received_s=refused.received_s,
                game=refused.game,
                session=session,
                chunk_no=chunk_no,
                crc=crc,
                player=player,
            )
        )
        self._next_quarantine += 1
        self._crcs_here.setdefault((session, chunk_no), []).append(crc)
        self.quarantined_raws.append(refused.raw)

    def _crcs(self, session: bytes, chunk_no: int) -> list[int]:
        return self._crcs_here.get((session, chunk_no), []) + self._known.quarantined_crcs(
            session, chunk_no
        )


def _stored(candidate: Candidate, replays: int = 0) -> StoredFrame:
    if candidate.chunk is None:
        return StoredFrame(candidate.frame, -1, 0, "", "", replays)
    meta = candidate.chunk.meta
    return StoredFrame(
        candidate.frame, meta.first_step, meta.n_steps, meta.game, meta.schema, replays
    )


def _refusal(frame: Frame, reason: str, detail: str, game: str) -> RefusedFrame:
    return RefusedFrame(frame.encode(), reason, detail, float(frame.received_s), game)


def _arrival(new: StoredFrame) -> Arrival:
    """What counts about a frame."""
    frame = new.frame
    arrival = Arrival(
        number=frame.chunk_no, player=frame.player, received_s=frame.received_s, kind="close"
    )
    if frame.kind is FrameKind.DATA:
        return replace(arrival, kind="data", first_step=new.first_step, n_steps=new.n_steps)
    if frame.kind is FrameKind.DROP:
        report = read_drop(frame)
        return replace(arrival, kind="drop", n_steps=report.n_steps, dropped=report.ranges)
    read_close(frame)
    return arrival
