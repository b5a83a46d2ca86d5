"""What comes from no stream: forgetting, quarantine by hand, replays, expiry.

Each decision is an admin commit. Writers are held still while it is made (`AdminLock`): no batch counts that was
decided without it. What follows from it is carried out behind it, and finished by the next claim after a crash.
"""

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from understudy.core.clock import Clock
from understudy.core.errors import ClaimLost, Unreachable
from understudy.core.frame import FrameKind
from understudy.core.ports import Candidate, Quarantined, Receipt
from understudy.stores.cassandra.commits import (
    ADMIN,
    CHUNK_BUCKET,
    FOREVER,
    QUARANTINE_BUCKET,
    Commit,
    CommitFacts,
    Event,
    apply,
    commit_row,
    commits_between,
    erased_frame,
    facts_of,
    frame_key,
    frame_row,
    numbered,
    redo,
    registered,
)
from understudy.stores.cassandra.known import STATE, Journal, Known, raws_of, stated
from understudy.stores.cassandra.partitions import Lease, Partitions
from understudy.stores.cassandra.wire import Row, Statement, Wire
from understudy.stores.draft import Draft, QuarantinedFrame

_POLL_S = 0.05
_TRIES = 20
_TAKEN_OUT = 64
"""Chunks that are withdrawn at once: writers wait meanwhile."""
_PAGE = 64

Decide = Callable[[], tuple[CommitFacts, Sequence[Statement]]]
"""What becomes true, and rows that are written before it counts."""


@dataclass(slots=True, kw_only=True)
class AdminLock:
    """One admin commit at a time, over all processes, with every writer held still while it is decided."""

    wire: Wire
    partitions: Partitions
    journal: Journal
    clock: Clock
    keep_s: int
    grace_s: float = 15.0
    """How long a decision may take before others presume that its process died."""
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def commit(self, decide: Decide, *, grace_s: float | None = None) -> None:
        """Hold all writers, decide, commit."""
        with self._lock:
            for _ in range(_TRIES):
                try:
                    return self._commit(decide, self.grace_s if grace_s is None else grace_s)
                except ClaimLost:
                    self.wire.wait(_POLL_S)  # another process took over: decide again
        raise Unreachable("other processes decide about this store all the time; try again")

    def _commit(self, decide: Decide, grace_s: float) -> None:
        lease = self.partitions.begin_admin(self._await_end(grace_s))
        self.journal.read_to(lease.commit_no)
        cql = "SELECT name FROM registry WHERE kind = 'head'"
        names = [row.name for row in self.wire.scan(self.wire.bind(cql)) if not row.name.startswith("~")]
        self.partitions.fence(names, lease.events)
        cql = "SELECT name, number FROM registry WHERE kind = 'applied'"
        applied = {row.name: row.number for row in self.wire.scan(self.wire.bind(cql))}
        for name, row in self.partitions.rows(names, serial=True).items():
            if row.commit_no > applied.get(name, 0):
                redo(self.wire, name, row.commit_no)
        try:
            facts, rows = decide()
        except BaseException:
            self._write(lease, CommitFacts(), [])  # writers wait for this number
            raise
        self._write(lease, facts, rows)

    def _write(self, lease: Lease, facts: CommitFacts, rows: Sequence[Statement]) -> None:
        number = lease.events
        commit = Commit(
            partition=ADMIN,
            number=number,
            events=number,
            at_s=self.clock.now(),
            keep_s=self.keep_s,
            before=lease.arrivals,
            facts=facts,
        )
        self.wire.all([*rows, commit_row(self.wire, commit, lease.next_attempt())])
        self.partitions.commit(lease, commit, None)
        self.wire.one(registered(self.wire, "head", ADMIN, number))
        self.journal.read_to(number)

    def _await_end(self, grace_s: float) -> Row:
        """The admin partition once no decision is under way, or one that takes too long to be alive."""
        deadline = time.monotonic() + grace_s
        while True:
            row = self.partitions.row(ADMIN)
            if row.events <= row.commit_no or time.monotonic() > deadline:
                return row
            self.wire.wait(_POLL_S)

    def await_number(self, number: int) -> None:
        """Wait until an admin commit is known; one whose process died is ended without effect."""
        if self.journal.head >= number:
            return
        deadline = time.monotonic() + self.grace_s
        while self.journal.refresh() < number:
            if time.monotonic() > deadline:
                self.commit(lambda: (CommitFacts(), []), grace_s=0.0)
            self.wire.wait(_POLL_S)


@dataclass(slots=True, kw_only=True)
class Admin:
    """Forgets, withdraws, replays and expires."""

    wire: Wire
    journal: Journal
    lock: AdminLock
    clock: Clock
    keep_s: int

    def _known(self) -> Known:
        return Known(self.wire, self.journal, {})

    def _decide(self, decide: Decide) -> None:
        def decided() -> tuple[CommitFacts, Sequence[Statement]]:
            self.finish()  # what another process decided and did not carry out
            return decide()

        self.lock.commit(decided)
        self.finish()

    # --- forgetting -----------------------------------------------------------------------------

    def forget(self, player: bytes) -> int:
        """Reject and hide a player from now on, then delete what is there; how many chunks went."""
        self.journal.refresh()
        counted = 0
        for session in self._sessions(player):
            numbers = {row.chunk_no for row in self._numbers(session)}
            known = self._known()
            known.look_up([], [(session, number) for number in numbers])
            counted += sum(len(known.data_rows(session, number)) for number in numbers)
        self._decide(lambda: (CommitFacts(event=Event("forget", self.clock.now(), player)), []))
        return counted

    def _sessions(self, player: bytes) -> list[uuid.UUID]:
        rows = self.wire.scan(self.wire.bind("SELECT session FROM players WHERE player = ?", player))
        return [row.session for row in rows]

    def _numbers(self, session: uuid.UUID) -> list[Row]:
        cql = "SELECT chunk_no, what FROM sessions WHERE session = ?"
        return [row for row in self.wire.scan(self.wire.bind(cql, session)) if row.what is not None]

    def _erase(self, event: Event) -> None:
        """Delete a forgotten player's bytes: whole sessions, to which nothing can be added any more."""
        for session in self._sessions(event.player):
            row = self.wire.one(self.wire.bind(f"SELECT {STATE} FROM sessions WHERE session = ? LIMIT 1", session))
            found = None if row is None else self.journal.up_to_date(session, stated(row))
            if found is not None and not found.state.forgotten:
                continue  # it began since then
            cql = f"DELETE FROM chunks USING TIMESTAMP {FOREVER} WHERE session = ? AND bucket = ?"
            buckets = {row.chunk_no >> CHUNK_BUCKET for row in self._numbers(session)}
            self.wire.all([self.wire.bind(cql, session, bucket) for bucket in buckets])
        for rows in self._quarantine_pages():
            # Also frames whose damaged header names no player, but that carry the pseudonym.
            raws = raws_of(self.wire, rows)
            theirs = [
                row
                for row, raw in zip(rows, raws, strict=True)
                if (row.player == event.player or event.player in (raw or b"")) and row.received_s <= event.at_s
            ]
            cql = f"DELETE FROM quarantine USING TIMESTAMP {FOREVER} WHERE bucket = ? AND id = ?"
            self.wire.all([erased_frame(self.wire, frame_key(row.session, row.chunk_no, row.digest)) for row in theirs])
            self.wire.all([self.wire.bind(cql, row.id >> QUARANTINE_BUCKET, row.id) for row in theirs])

    # --- quarantine -----------------------------------------------------------------------------

    def quarantined(self, *, after_id: int, limit: int) -> list[Quarantined]:
        """Frames in quarantine by id, without those that were stored since or whose bytes are gone."""
        self.journal.refresh()
        found: list[Quarantined] = []
        for rows in self._quarantine_pages(after_id):
            waiting = [row for row in rows if self._is_waiting(row)]
            found += [
                _quarantined(row, raw)
                for row, raw in zip(waiting, raws_of(self.wire, waiting), strict=True)
                if raw is not None
            ]
            if len(found) >= limit:
                break
        return found[:limit]

    def quarantine_rows(self) -> Iterator[Row]:
        """Every frame in quarantine, without its bytes."""
        return (row for rows in self._quarantine_pages() for row in rows if self._is_waiting(row))

    def _is_waiting(self, row: Row) -> bool:
        """Whether a frame was not stored since, and its player was not forgotten."""
        is_forgotten = row.events < self.journal.forgets.get(row.player, (0, 0.0))[0]
        return not is_forgotten and row.id not in self.journal.replayed

    def _quarantine_pages(self, after_id: int = 0) -> Iterator[list[Row]]:
        drawn = self.wire.one(self.wire.bind("SELECT number FROM meta WHERE name = 'quarantine_id'"))
        cql = f"SELECT * FROM quarantine WHERE bucket = ? AND id > ? LIMIT {_PAGE}"
        last = 0 if drawn is None else drawn.number
        for bucket in range(after_id >> QUARANTINE_BUCKET, (last >> QUARANTINE_BUCKET) + 1):
            at = after_id
            while rows := self.wire.all([self.wire.bind(cql, bucket, at)])[0]:
                yield rows
                at = rows[-1].id

    def quarantine(self, chunks: Sequence[tuple[uuid.UUID, int]], *, reason: str) -> int:
        """Take stored chunks out of readers' sight and keep their bytes; how many were there."""
        wanted = sorted(set(chunks))
        return sum(self._withdraw(wanted[at : at + _TAKEN_OUT], reason) for at in range(0, len(wanted), _TAKEN_OUT))

    def _withdraw(self, wanted: Sequence[tuple[uuid.UUID, int]], reason: str) -> int:
        self.journal.refresh()
        if not self._there(self._known(), wanted):
            return 0
        taken: list[int] = []

        def decide() -> tuple[CommitFacts, Sequence[Statement]]:
            known = self._known()
            there = self._there(known, wanted)
            frames = [_withdrawn(row, known, reason) for row in there]
            gone = [(row.session.bytes, row.chunk_no, row.n_steps) for row in there]
            event = Event("quarantine", self.clock.now(), b"", gone)
            taken[:] = [len(there)]
            return numbered(self.wire, CommitFacts(quarantined=frames, event=event)), []

        self._decide(decide)
        return taken[0]

    def _there(self, known: Known, wanted: Sequence[tuple[uuid.UUID, int]]) -> list[Row]:
        known.look_up([], wanted)
        return [row for key in wanted for row in known.data_rows(*key)]

    def replay(self, ids: Sequence[int], candidates: Sequence[Candidate]) -> Receipt:
        """Store frames from quarantine after all, each at most once."""
        if not candidates:
            return Receipt([], [])
        receipts: list[Receipt] = []

        def decide() -> tuple[CommitFacts, Sequence[Statement]]:
            known = self._known()
            known.look_up([], [(one.frame.session, one.frame.chunk_no) for one in candidates])
            draft = Draft(known, 0)
            decided = [draft.replay(one, number) for number, one in zip(ids, candidates, strict=True)]
            receipts[:] = [Receipt([fate for fate, _ in decided], [reason for _, reason in decided])]
            facts = facts_of(draft)
            # The bytes are there already; this lets them last as long as those of other new chunks.
            pairs = zip(facts.stored, draft.stored_raws, strict=True)
            return facts, [frame_row(self.wire, one.frame_key, raw, self.keep_s) for one, raw in pairs]

        self._decide(decide)
        return receipts[0]

    # --- expiry ---------------------------------------------------------------------------------

    def expire(self, before_s: float, heads: dict[str, int]) -> int:
        """Drop chunks received before a time, and the bytes of quarantined frames; how many chunks went."""
        self.journal.refresh()
        old = self.journal.expired_before_s
        new = int(before_s)
        if new <= old:
            return 0
        # First hidden, then deleted.
        self.wire.one(registered(self.wire, "head", "~expired", new))
        gone = sum(self._expire_partition(name, head, old, new) for name, head in heads.items())
        for rows in self._quarantine_pages():
            keys = [
                frame_key(row.session, row.chunk_no, row.digest) for row in rows if old <= row.received_s < before_s
            ]
            self.wire.all([erased_frame(self.wire, key) for key in keys])
        self.journal.expired_before_s = new
        return gone

    def _expire_partition(self, name: str, head: int, old: int, new: int) -> int:
        row = self.wire.one(self.wire.bind("SELECT number FROM registry WHERE kind = 'swept' AND name = ?", name))
        swept = 0 if row is None else row.number
        gone = 0
        is_swept = True
        for commit in commits_between(self.wire, name, swept, head):
            data = [one for one in commit.facts.stored if one.kind == FrameKind.DATA]
            out = [one for one in data if one.received_s < new]
            self.wire.all([erased_frame(self.wire, one.frame_key) for one in out])
            gone += sum(one.received_s >= old and self.journal.arrival_gone(one, commit.events) is None for one in out)
            is_swept = is_swept and len(out) == len(data)
            if is_swept:
                swept = commit.number
        self.wire.one(registered(self.wire, "swept", name, swept))
        return gone

    # --- finishing ------------------------------------------------------------------------------

    @property
    def is_erasing(self) -> bool:
        """Whether something that was decided is not carried out yet, after a crash."""
        return self._applied() < self.journal.refresh()

    def finish(self) -> None:
        """Carry out every admin commit; may be repeated."""
        head = self.journal.refresh()
        applied = self._applied()
        if applied >= head:
            return
        for commit in commits_between(self.wire, ADMIN, applied, head):
            event = commit.facts.event
            if event is not None and event.kind == "forget":
                self._erase(event)
            apply(self.wire, commit)
        self.wire.one(registered(self.wire, "applied", ADMIN, head))

    def _applied(self) -> int:
        cql = "SELECT number FROM registry WHERE kind = 'applied' AND name = ?"
        row = self.wire.one(self.wire.bind(cql, ADMIN))
        return 0 if row is None else int(row.number)


def _withdrawn(row: Row, known: Known, reason: str) -> QuarantinedFrame:
    session = known.stated(row.session)
    return QuarantinedFrame(
        id=0,
        reason=reason,
        detail="",
        parked=False,
        received_s=float(row.received_s),
        game="" if session is None else session.game,
        session=row.session.bytes,
        chunk_no=row.chunk_no,
        crc=row.crc,
        player=bytes(16) if session is None else session.state.player,
        digest=row.digest,
    )


def _quarantined(row: Row, raw: bytes) -> Quarantined:
    has_session = any(row.session)
    return Quarantined(
        id=row.id,
        reason=row.reason,
        detail=row.detail,
        parked=row.parked,
        received_s=row.received_s,
        game=row.game,
        session=uuid.UUID(bytes=row.session) if has_session else None,
        chunk_no=row.chunk_no if has_session else None,
        crc=row.crc,
        raw=raw,
    )
