"""A commit being put together: every frame of some batches gets its fate before anything is written."""

import uuid
from collections.abc import Sequence
from typing import Protocol
from zlib import crc32

from understudy.core.frame import HEADER_BYTES, Frame, identity_of
from understudy.core.ports import Candidate, Fate, Receipt, RefusedFrame, WriteBatch
from understudy.core.session import SessionState, admit
from understudy.stores.commits import QuarantinedFrame, StoredFrame, Trailer
from understudy.stores.generation import arrival_of


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
    """Collects batches; `trailer`, `raws` and `candidates` are what is to be written."""

    def __init__(self, known: Known, first_arrival: int, first_quarantine: int) -> None:
        self._known = known
        self._first_arrival = first_arrival
        self._next_quarantine = first_quarantine
        self._states: dict[uuid.UUID, SessionState] = {}
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
        return self._stored_raws + self._quarantined_raws

    @property
    def is_worth_writing(self) -> bool:
        return bool(self._stored or self._quarantined or self._positions)

    def trailer(self, number: int) -> Trailer:
        """The facts of the commit, which is the store's `number`th."""
        return Trailer(
            number=number, first_arrival=self._first_arrival, positions=self._positions, stored=self._stored,
            quarantined=self._quarantined,
            forgotten=[(session.bytes, player) for session, player in self._forgotten.items()],
        )  # fmt: skip

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
        state, verdict = admit(self._state(frame.session), arrival_of(frame, _facts(candidate)))
        if verdict == "":
            self._states[frame.session] = state
        elif verdict != "seen":
            return "refused", verdict
        elif waiting[0] in _NEVER_REPLAYED:
            return "refused", waiting[0]
        self._store(candidate, quarantine_id)
        return "new", ""

    def _is_stored(self, frame: Frame) -> bool:
        key = (frame.session, frame.chunk_no)
        return key in self._keys or self._known.is_stored(*key)

    def _decide(self, candidate: Candidate) -> tuple[Fate, str]:
        frame = candidate.frame
        if self._is_forgotten(frame.player, frame.session, frame.received_s):
            return "refused", "forgotten"
        facts = _facts(candidate)
        state, verdict = admit(self._state(frame.session), arrival_of(frame, facts))
        if verdict == "":
            self._states[frame.session] = state
            self._store(candidate)
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
        if frame.body_crc in self._known.quarantined_crcs(frame.session.bytes, frame.chunk_no):
            return "duplicate", "quarantined"
        self._quarantine(_refusal(frame, "conflict", "other bytes, or a drop report, took this number before", game))
        return "conflict", "conflict"

    def _store(self, candidate: Candidate, replays: int = 0) -> None:
        frame = candidate.frame
        self._stored.append(_facts(candidate, replays))
        self._stored_raws.append(frame.encode())
        self.candidates.append(candidate)
        self._keys[frame.session, frame.chunk_no] = (frame.body_crc, len(frame.body))

    def _state(self, session: uuid.UUID) -> SessionState | None:
        if session in self._states:
            return self._states[session]
        known = self._known.state_of(session)
        return known[1] if known else None

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
