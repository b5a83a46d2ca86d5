"""A draft of a commit: decides the fate of every frame of its batches before anything is written.

Every store uses it, so duplicates, conflicts and rejections are decided the same way in all stores.
"""

import uuid
from dataclasses import dataclass, replace
from typing import Protocol
from zlib import crc32

import msgspec

from understudy.core.wording import shortened
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
    """A frame that a commit stores; drop reports and closes have no steps, game or schema."""

    frame: Frame
    first_step: int
    n_steps: int
    game: str
    schema: str
    replays: int = 0
    """The frame's quarantine id if it is replayed from there, else 0."""


class QuarantinedFrame(msgspec.Struct, array_like=True, frozen=True):
    """A refused, parked or withdrawn frame without its bytes.

    Cassandra stores the fields in this order, so it must not change.
    """

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
    """Hash of the whole frame, for a store that finds its bytes by hash."""


class CommitLookup(Protocol):
    """What a draft asks its store before the commit."""

    def state_of(self, session: uuid.UUID) -> tuple[str, SessionState] | None: ...
    def key_of(self, session: uuid.UUID, chunk_no: int) -> tuple[int, int] | None: ...
    def is_stored(self, session: uuid.UUID, chunk_no: int) -> bool: ...
    def quarantined_crcs(self, session: bytes, chunk_no: int) -> list[int]: ...
    def waiting(self, quarantine_id: int) -> tuple[str, bytes] | None: ...
    def is_forgotten(self, player: bytes, session: uuid.UUID, received_s: float) -> bool: ...


_NEVER_REPLAYED = ("conflict", "step_mismatch")
"""Quarantine reasons of frames that contradict other frames of their session. Such a frame is not
replayed once its number counts as seen."""


class Draft:
    """Collects batches; its public fields are what the commit writes."""

    def __init__(self, lookup: CommitLookup, first_quarantine: int) -> None:
        self._lookup = lookup
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
        """The new position of each partition."""
        self.forgotten: dict[uuid.UUID, bytes] = {}
        """New sessions of forgotten players, each with its player; their frames are not stored."""

    @property
    def is_worth_writing(self) -> bool:
        return bool(self.stored or self.quarantined or self.positions)

    def sessions(self) -> Sessions:
        """The changed sessions with their new state; refused frames count after stored ones."""
        sessions = dict(self._sessions)
        for frame in self.quarantined:
            if any(frame.session):
                session = uuid.UUID(bytes=frame.session)
                game, before = sessions.get(session) or self._lookup.state_of(session) or ("", None)
                arrival = Arrival(
                    number=frame.chunk_no,
                    player=frame.player,
                    received_s=int(frame.received_s),
                    kind="refused",
                )
                state, reason = admit(before, arrival)
                if not reason:
                    sessions[session] = (game or frame.game, state)
        return sessions

    def add(self, batch: WriteBatch) -> Receipt:
        """Add a batch; return the decision about each of its frames."""
        if batch.position is not None:
            self.positions[batch.partition] = batch.position
        decided = [self._decide(candidate) for candidate in batch.candidates]
        for refused in batch.refused:
            self._quarantine(refused, parked=False)
        for parked in batch.parked:
            self._quarantine(parked, parked=True)
        return Receipt([fate for fate, _ in decided], [reason for _, reason in decided])

    def replay(self, candidate: Candidate, quarantine_id: int) -> tuple[Fate, str]:
        """Add a quarantined frame unless its number is stored already; return its fate and reason.

        A number that only counts as seen, without a stored frame, does not prevent the replay.
        """
        frame = candidate.frame
        waiting = self._lookup.waiting(quarantine_id)
        if self._lookup.is_forgotten(frame.player, frame.session, frame.received_s):
            return "refused", "forgotten"
        key = (frame.session, frame.chunk_no)
        if key in self._keys or self._lookup.is_stored(*key):
            return "duplicate", ""
        if waiting is None or waiting[1] != frame.encode():
            return "refused", "not_quarantined"
        new = _stored(candidate, quarantine_id)
        arrival = _arrival(new)
        game, before = self._session(frame.session) or ("", None)
        state, reason = admit(before, arrival)
        if reason not in ("", "seen"):
            return "refused", reason
        if reason == "seen":
            if waiting[0] in _NEVER_REPLAYED:
                return "refused", waiting[0]
            state = readmit(state, arrival)  # its number counted as seen while it was in quarantine
        self._store(new, game, state)
        return "new", ""

    def _decide(self, candidate: Candidate) -> tuple[Fate, str]:
        frame = candidate.frame
        if self._is_forgotten(frame.player, frame.session, frame.received_s):
            return "refused", "forgotten"
        new = _stored(candidate)
        game, before = self._session(frame.session) or ("", None)
        state, reason = admit(before, _arrival(new))
        if reason == "":
            self._store(new, game, state)
            return "new", ""
        if reason == "seen":
            return self._decide_seen(frame, new.game)
        if reason != "forgotten":
            self._quarantine(
                _refusal(frame, reason, "does not match the known state of its session", new.game)
            )
        return "refused", reason

    def _is_forgotten(self, player: bytes, session: uuid.UUID, received_s: float) -> bool:
        """Whether the player was forgotten; remembers a new session, so that audits see no gap."""
        if not self._lookup.is_forgotten(player, session, received_s):
            return False
        if self._lookup.state_of(session) is None:
            self.forgotten[session] = player
        return True

    def _decide_seen(self, frame: Frame, game: str) -> tuple[Fate, str]:
        key = (frame.session, frame.chunk_no)
        if (self._keys.get(key) or self._lookup.key_of(*key)) == (frame.body_crc, len(frame.body)):
            return "duplicate", ""
        if frame.body_crc in self._crcs(frame.session.bytes, frame.chunk_no):
            return "duplicate", "quarantined"
        self._quarantine(
            _refusal(
                frame, "conflict", "this number already has other bytes or a drop report", game
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
        return self._sessions.get(session) or self._lookup.state_of(session)

    def _quarantine(self, refused: RefusedFrame, *, parked: bool = False) -> None:
        session, chunk_no, player = identity_of(refused.raw)
        if any(session) and self._is_forgotten(
            player, uuid.UUID(bytes=session), refused.received_s
        ):
            return
        crc = crc32(refused.raw[HEADER_BYTES:]) if any(session) else crc32(refused.raw)
        if any(session) and crc in self._crcs(session, chunk_no):
            return
        # Without lone surrogates, which no store can write.
        detail = shortened(refused.detail, 300).encode("utf-8", "replace").decode()
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
        return self._crcs_here.get((session, chunk_no), []) + self._lookup.quarantined_crcs(
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
    """The facts of a frame that change its session's state."""
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
