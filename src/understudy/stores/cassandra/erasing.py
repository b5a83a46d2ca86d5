"""Taking stored bytes away: decided in a turn, carried out behind it, finished by whoever comes next after a crash."""

import uuid
from collections.abc import Iterable, Sequence
from zlib import crc32

from understudy.core.clock import Clock
from understudy.core.frame import HEADER_BYTES, FrameKind, identity_of
from understudy.core.ports import Candidate, Receipt
from understudy.stores.cassandra.facts import CommitFacts, Event, Key, facts_of
from understudy.stores.cassandra.journal import Journal
from understudy.stores.cassandra.known import STORED, Known
from understudy.stores.cassandra.quarantine import Quarantine
from understudy.stores.cassandra.reading import commits_between
from understudy.stores.cassandra.rows import Rows, erased_row, head_row, swept_row
from understudy.stores.cassandra.stamps import draw
from understudy.stores.cassandra.tables import CHUNK_BUCKET
from understudy.stores.cassandra.tailing import Tailer
from understudy.stores.cassandra.turns import Decided, Turn, Turns
from understudy.stores.cassandra.wire import Row, Wire
from understudy.stores.cassandra.writing import Writer
from understudy.stores.draft import Draft, QuarantinedFrame

_NUMBERS = "SELECT * FROM sessions WHERE session = ?"
_A_TURN = 64
"""Chunks that are taken out at once: writers wait meanwhile."""
_WINDOW = 17
"""Buckets ahead of the last number that a late write may reach: as far as a session may run ahead, and one."""


class Eraser:
    """Forgets, withdraws, expires and brings back."""

    def __init__(
        self, wire: Wire, journal: Journal, turns: Turns, writer: Writer, tailer: Tailer, quarantine: Quarantine, *,
        clock: Clock,
    ) -> None:  # fmt: skip
        self._wire, self._journal, self._turns, self._writer = wire, journal, turns, writer
        self._tailer, self._quarantine, self._clock = tailer, quarantine, clock

    # --- forgetting -----------------------------------------------------------------------------------------------

    def forget(self, player: bytes) -> int:
        """Refuse and hide a player from now on, then delete what is there; how many chunks went."""
        self._journal.refresh()
        counted = sum(self._count(session) for session in self._sessions(player))

        def decide(turn: Turn) -> Decided:
            return Decided(CommitFacts(event=Event("forget", self._clock.now(), player)), Rows())

        self._turns.take(decide)
        self.finish()
        return counted

    def _count(self, session: uuid.UUID) -> int:
        """How many chunks of a session can be read."""
        known, numbers = self._writer.known(), {row.chunk_no for row in self._numbers(session)}
        known.look_up([], [(session, number) for number in numbers])
        return sum(len(known.data_rows(session, number)) for number in numbers)

    def _sessions(self, player: bytes) -> list[uuid.UUID]:
        rows = self._wire.scan(self._wire.bind("SELECT session FROM players WHERE player = ?", player))
        return [row.session for row in rows]

    def _numbers(self, session: uuid.UUID) -> list[Row]:
        rows = self._wire.scan(self._wire.bind(_NUMBERS, session))
        return [row for row in rows if row.what == STORED]

    def _erase_player(self, player: bytes, stamp: int, at_s: float) -> None:
        for session in self._sessions(player):
            buckets = {row.chunk_no >> CHUNK_BUCKET for row in self._numbers(session)}
            last = max(buckets, default=0)
            ahead = range(last + 1, last + _WINDOW + 1)
            # Numbers are written before frames, so no frame lies where no number does, unless it comes late.
            self._wire.all([
                self._wire.bind("DELETE FROM chunks USING TIMESTAMP ? WHERE session = ? AND bucket = ?",
                                stamp, session, bucket)
                for bucket in (*buckets, *ahead, 0)
            ])  # fmt: skip
        self._quarantine.erase_player(player, stamp, at_s)

    # --- by hand ----------------------------------------------------------------------------------------------------

    def quarantine(self, chunks: Sequence[tuple[uuid.UUID, int]], *, reason: str) -> int:
        """Take stored chunks out of readers' sight and keep their bytes; how many were there."""
        wanted = sorted(set(chunks))
        return sum(self._take_out(wanted[at : at + _A_TURN], reason) for at in range(0, len(wanted), _A_TURN))

    def _take_out(self, wanted: Sequence[tuple[uuid.UUID, int]], reason: str) -> int:
        self._journal.refresh()
        if not self._there(self._writer.known(), wanted):
            return 0
        taken: list[int] = []

        def decide(turn: Turn) -> Decided:
            known = self._writer.known()
            there = self._there(known, wanted)
            raws = self._raws(there)
            frames = [
                self._withdrawn(turn.first_id + index, known, row, raws[row.session, row.chunk_no], reason)
                for index, row in enumerate(there)
            ]
            gone = [(row.session.bytes, row.chunk_no, row.n_steps) for row in there]
            facts = CommitFacts(quarantined=frames, event=Event("quarantine", self._clock.now(), b"", gone))
            taken[:] = [len(there)]
            return Decided(facts, self._writer.rows(turn.tag, facts, list(raws.values()), events=turn.number))

        self._turns.take(decide)
        self.finish()
        return taken[0]

    def _there(self, known: Known, wanted: Sequence[tuple[uuid.UUID, int]]) -> list[Row]:
        known.look_up([], wanted)
        return [row for key in wanted for row in known.data_rows(*key)]

    def _raws(self, rows: Iterable[Row]) -> dict[tuple[uuid.UUID, int], bytes]:
        """The frames of stored numbers; what is damaged comes as no bytes."""
        wanted = list(rows)
        found = self._wire.all([
            self._wire.bind("SELECT frame FROM chunks WHERE session = ? AND bucket = ? AND chunk_no = ?",
                            row.session, row.chunk_no >> CHUNK_BUCKET, row.chunk_no)
            for row in wanted
        ])  # fmt: skip
        pairs = zip(wanted, found, strict=True)
        return {(row.session, row.chunk_no): (raws[0].frame or b"") if raws else b"" for row, raws in pairs}

    def _withdrawn(self, number: int, known: Known, row: Row, raw: bytes, reason: str) -> QuarantinedFrame:
        stated = known.stated(row.session)
        return QuarantinedFrame(
            id=number, length=len(raw), reason=reason, detail="", parked=False, received_s=float(row.received_s),
            game="" if stated is None else stated.game, session=row.session.bytes, chunk_no=row.chunk_no,
            crc=crc32(raw[HEADER_BYTES:]) if raw else row.crc, player=identity_of(raw)[2],
        )  # fmt: skip

    def replay(self, ids: Sequence[int], candidates: Sequence[Candidate]) -> Receipt:
        """Store frames from quarantine after all, each at most once."""
        if not candidates:
            return Receipt([], [])
        receipts: list[Receipt] = []

        def decide(turn: Turn) -> Decided:
            known = self._writer.known()
            known.look_up([], [(one.frame.session, one.frame.chunk_no) for one in candidates])
            draft = Draft(known, turn.first_id)
            decided = [draft.replay(one, number) for number, one in zip(ids, candidates, strict=True)]
            receipts[:] = [Receipt([fate for fate, _ in decided], [reason for _, reason in decided])]
            facts = facts_of(draft.trailer(), draft.candidates)
            return Decided(facts, self._writer.rows(turn.tag, facts, draft.raws, events=turn.number))

        self._turns.take(decide)
        return receipts[0]

    # --- by age -----------------------------------------------------------------------------------------------------

    def expire(self, before_s: float) -> int:
        """Drop chunks received before a time, and the bytes of quarantined frames; how many chunks went."""
        heads = self._tailer.heads(look=True)
        self._journal.refresh()
        old, new = self._journal.expired_before_s, int(before_s)
        if new <= old:
            return 0
        stamp = draw(self._wire, self._clock)
        # First hidden, then deleted.
        self._wire.one(head_row(self._wire, "~expired", new, stamp))
        gone = sum(self._expire_lane(name, head, old, new, stamp) for name, head in heads.items() if head)
        self._quarantine.expire(old, before_s, stamp)
        self._journal.expired_before_s = new
        return gone

    def _expire_lane(self, name: str, head: int, old: int, new: int, stamp: int) -> int:
        row = self._wire.one(self._wire.bind("SELECT number FROM registry WHERE kind = 'swept' AND name = ?", name))
        swept, gone, is_swept = 0 if row is None else row.number, 0, True
        for commit in commits_between(self._wire, name, swept, head):
            data = [one for one in commit.facts.stored if one.kind == FrameKind.DATA]
            out = [one for one in data if one.received_s < new]
            self._delete([one.key for one in out], stamp)
            gone += sum(one.received_s >= old and self._journal.gone(one, commit.events) is None for one in out)
            is_swept = is_swept and len(out) == len(data)
            if is_swept:
                swept = commit.tag.commit_no
        self._wire.one(swept_row(self._wire, name, swept, stamp))
        return gone

    # --- finishing ----------------------------------------------------------------------------------------------------

    @property
    def is_erasing(self) -> bool:
        """Whether bytes of something that was erased may still be there."""
        return self._erased() < self._journal.refresh()

    def finish(self) -> None:
        """Carry out every erasure that was decided; safe to repeat, also after a crash."""
        head, erased = self._journal.refresh(), self._erased()
        if erased >= head:
            return
        for commit, event in self._journal.events(erased):
            stamp = commit.tag.attempt
            if event.kind == "forget":
                self._erase_player(event.player, stamp, event.at_s)
            # By the stamp of the decision: what was stored again since then has a higher one.
            self._delete([(session, number) for session, number, _ in event.chunks], stamp)
        self._wire.one(head_row(self._wire, "~erased", head, head))

    def _delete(self, chunks: Iterable[Key], stamp: int) -> None:
        self._wire.all([
            erased_row(self._wire, uuid.UUID(bytes=session), number, stamp) for session, number in chunks
        ])  # fmt: skip

    def _erased(self) -> int:
        row = self._wire.one(self._wire.bind("SELECT number FROM registry WHERE kind = 'head' AND name = '~erased'"))
        return 0 if row is None else int(row.number)
