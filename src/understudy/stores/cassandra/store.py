"""The store on Cassandra: chunks, commits and sessions in tables, each commit made to count by one
compare-and-set.

A batch is written as bytes and facts that are not seen yet, the compare-and-set that makes them
count, then the rest:

1. frames, and the commit's row             keyed so that a crash or a late write
                                            leaves nothing to undo
2. the partition: commit number, position   only under the claim's epoch
3. sessions, numbers, players, quarantine   derived from the commit; the next claim
                                            repeats it after a crash

What comes from no stream (forgetting, quarantine by hand, replays) is decided by admin commits.
Writers are held still while one is made (`AdminLock`): no batch counts that was decided without it.
What follows from it is carried out behind it, and finished by the next claim after a crash.
"""

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import ClaimLost, Closed, Refused, UnderstudyError, Unreachable
from understudy.core.location import Location
from understudy.experience.chunk import chunk_of
from understudy.experience.frame import Frame, FrameKind, identity_of
from understudy.experience.session import SessionState, tombstone_of
from understudy.ports import (
    Audit,
    Candidate,
    Claim,
    Cursor,
    Gone,
    Quarantined,
    Receipt,
    SessionFilter,
    SessionInfo,
    Specs,
    Tail,
    WriteBatch,
)
from understudy.stores.audit import Findings, Held, summary
from understudy.stores.cassandra.commits import (
    ADMIN,
    CHUNK_BUCKET,
    FOREVER,
    QUARANTINE_BUCKET,
    Arrived,
    Commit,
    CommitFacts,
    Event,
    SessionRecord,
    apply,
    commit_row,
    commits_between,
    digest_of,
    erased_frame,
    facts_of,
    frame_key,
    frame_row,
    lasting_s,
    numbered,
    redo,
    registered,
)
from understudy.stores.cassandra.keyspace import check, identity, numbers
from understudy.stores.cassandra.lookup import (
    STATE,
    AdminJournal,
    CassandraLookup,
    Stated,
    raws_of,
    stated,
)
from understudy.stores.cassandra.partitions import Lease, Outdated, Partitions
from understudy.stores.cassandra.tailing import Tailer
from understudy.stores.cassandra.wire import Row, Statement, Wire, read_options
from understudy.stores.draft import Draft, QuarantinedFrame
from understudy.stores.view import EXPIRED, FORGOTTEN, QUARANTINED, STORED, info_of

_AT_ONCE = 256
_TAKEN_OUT = 64
"""Chunks that are withdrawn at once: writers wait meanwhile."""
_PAGE = 64
_POLL_S = 0.05
_TRIES = 20

Decide = Callable[[], tuple[CommitFacts, Sequence[Statement]]]
"""What becomes true, and rows that are written before it counts."""
_FATES: dict[Gone, int] = {"forgotten": FORGOTTEN, "expired": EXPIRED, "quarantined": QUARANTINED}


@dataclass(slots=True, kw_only=True)
class AdminLock:
    """One admin commit at a time, over all processes, with every writer held still while it is
    decided."""

    wire: Wire
    partitions: Partitions
    journal: AdminJournal
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
        names = [
            row.name for row in self.wire.scan(self.wire.bind(cql)) if not row.name.startswith("~")
        ]
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
        """The admin partition once no decision is under way, or one that takes too long to be
        alive."""
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


def open_cassandra(
    location: Location, *, specs: Specs, clock: Clock | None = None
) -> "CassandraStore":
    """The store of an address; ConfigError or Unreachable in one line when there is none.

    `specs` is what every store is opened with; this one keeps chunks as they came and asks for
    none.
    """
    wire = Wire(read_options(location))
    try:
        check(wire)
        return CassandraStore(wire, clock=clock)
    except BaseException:
        wire.close()
        raise


class CassandraStore:
    """Stores each step exactly once; open it in as many processes as you like, each writes what
    it claimed."""

    def __init__(self, wire: Wire, *, clock: Clock | None = None) -> None:
        clock = clock or SystemClock()
        facts = numbers(wire)
        keep_s = facts.get("ttl_s", 0)
        self.wire = wire
        """The way to the servers."""
        self._clock = clock
        self._keep_s = keep_s
        self._journal = AdminJournal(wire)
        self._partitions = Partitions(wire, clock)
        journal = self._journal
        partitions = self._partitions
        self.admin_lock = AdminLock(
            wire=wire, partitions=partitions, journal=journal, clock=clock, keep_s=keep_s
        )
        has_ttl = "ever_had_ttl" in facts
        self._tailer = Tailer(
            wire=wire, partitions=partitions, journal=journal, clock=clock, has_ttl=has_ttl
        )

    # --- the ExperienceStore port -----------------------------------------------------------------

    def claim(self, partition: str, *, owner: str, ttl_s: float) -> Claim:
        claim = self._partitions.claim(partition, owner=owner, ttl_s=ttl_s)
        self._finish()  # what a crash left of an erasure
        return claim

    def write(self, batch: WriteBatch) -> Receipt:
        """Store a batch with its position; decided anew when an admin commit came in between."""
        if self.wire.is_closed:
            raise Closed("the store was closed")
        lease = self._partitions.held(batch.partition, batch.epoch)
        with lease.lock:
            while True:
                self.admin_lock.await_number(lease.events)
                try:
                    return self._attempt(lease, batch)
                except Outdated as outdated:
                    lease.events = outdated.events

    def _attempt(self, lease: Lease, batch: WriteBatch) -> Receipt:
        known = CassandraLookup(self.wire, self._journal, lease.states)
        withheld = [
            (one.raw, identity_of(one.raw), one.received_s)
            for one in (*batch.refused, *batch.parked)
        ]
        known.look_up(
            [(one.frame.session, one.frame.chunk_no) for one in batch.candidates],
            [
                (uuid.UUID(bytes=session), number)
                for _, (session, number, _), _ in withheld
                if any(session)
            ],
        )
        draft = Draft(known, 0)
        receipt = draft.take(batch)
        # Also what an attempt left that had not heard of the erasure, or a process that died.
        forgotten = [
            (one.frame.session.bytes, one.frame.chunk_no, one.frame.encode())
            for one, reason in zip(batch.candidates, receipt.reasons, strict=True)
            if reason == "forgotten"
        ] + [
            (session, number, raw)
            for raw, (session, number, player), received_s in withheld
            if any(session) and known.is_forgotten(player, uuid.UUID(bytes=session), received_s)
        ]
        self.wire.all(
            [
                erased_frame(self.wire, frame_key(session, number, digest_of(raw)))
                for session, number, raw in forgotten
            ]
        )
        facts = facts_of(draft)
        if not (facts.stored or facts.quarantined or facts.forgotten):
            self._partitions.move(lease, batch.position)
            return receipt
        facts = numbered(self.wire, facts)
        now_s = self._clock.now()
        states = _states_after(draft, known, events=lease.events, now_us=int(now_s * 1e6))
        commit = Commit(
            partition=lease.partition,
            number=lease.commit_no + 1,
            events=lease.events,
            at_s=now_s,
            keep_s=self._keep_s,
            before=lease.arrivals,
            facts=facts,
            states=[_record(session, after, known) for session, after in states.items()],
        )
        keys = [one.frame_key for one in facts.stored]
        keys += [frame_key(one.session, one.chunk_no, one.digest) for one in facts.quarantined]
        raws = draft.stored_raws + draft.quarantined_raws
        rows = [
            frame_row(self.wire, key, raw, self._keep_s)
            for key, raw in zip(keys, raws, strict=True)
        ]
        self.wire.all([*rows, commit_row(self.wire, commit, lease.next_attempt())])
        self._partitions.commit(lease, commit, batch.position)
        try:
            apply(self.wire, commit)
        except BaseException:
            self._partitions.drop(lease)  # the next claim applies it
            raise
        lease.remember(states.items())
        return receipt

    def tail(self, cursor: Cursor | None, *, max_items: int, wait_s: float) -> Tail:
        return self._tailer.tail(cursor, max_items=max_items, wait_s=wait_s)

    def sessions(self, wanted: SessionFilter) -> Iterator[SessionInfo]:
        self._journal.refresh()
        return self._sessions(wanted)

    def _sessions(self, wanted: SessionFilter) -> Iterator[SessionInfo]:
        for row in self._session_rows(wanted):
            found = self._journal.up_to_date(row.session, stated(row))
            if (
                found is None
                or found.state.forgotten
                or found.state.last_received_s < int(wanted.since_s)
            ):
                continue
            if wanted.game in (None, found.game) and wanted.player in (None, found.state.player):
                yield info_of(row.session, found.game, found.state)

    def _session_rows(self, wanted: SessionFilter) -> Iterator[Row]:
        bind = self.wire.bind
        if wanted.player is None:
            yield from self.wire.scan(bind(f"SELECT DISTINCT {STATE} FROM sessions"))
            return
        for one in self.wire.scan(
            bind("SELECT session FROM players WHERE player = ?", wanted.player)
        ):
            row = self.wire.one(
                bind(f"SELECT {STATE} FROM sessions WHERE session = ? LIMIT 1", one.session)
            )
            if row is not None:
                yield row

    # --- the StoreAdmin port ----------------------------------------------------------------------

    def audit(self) -> Audit:
        return summary(self.findings())

    def findings(self) -> Findings:
        """Everything a full check saw: every committed frame is read, compared with its
        checksums, and counted."""
        findings = Findings()
        heads = self._tailer.heads(look=True)
        rows = self._partitions.rows(heads)
        findings.corrupt += [
            f"the row of partition {name}, which was committed up to {head}, is not there"
            for name, head in sorted(heads.items())
            if head and name not in rows
        ]
        self._journal.refresh()
        arrivals = (one for _, row in sorted(rows.items()) for one in self._arrivals(row, findings))
        while page := list(islice(arrivals, _AT_ONCE)):
            self._audit_page(page, findings)
        for row in (
            row for rows in self._quarantine_pages() for row in rows if self._is_waiting(row)
        ):
            findings.n_parked += row.parked
            findings.n_quarantined += not row.parked
        return findings

    def _arrivals(self, row: Row, findings: Findings) -> Iterator[tuple[Commit, Arrived]]:
        """Every arrival of a partition; what else its commits tell is noted on the way."""
        name = row.partition
        seen = 0
        last: Commit | None = None
        for commit in commits_between(self.wire, name, 0, row.commit_no):
            if commit.before > seen and not self._tailer.may_have_run_out(last):
                lost = commit.before - seen
                findings.corrupt.append(
                    f"{lost} arrivals before commit {commit.number} of {name} are not there"
                )
            seen = commit.before + commit.facts.n_arrivals
            last = commit
            for one in commit.facts.quarantined:
                if commit.events >= self._journal.forgets.get(one.player, (0, 0.0))[0] and any(
                    one.session
                ):
                    findings.quarantined.setdefault((one.session, one.chunk_no), []).append(one.crc)
            findings.forgotten_sessions.update(
                tombstone_of(session) for session, _ in commit.facts.forgotten
            )
            yield from ((commit, one) for one in commit.facts.stored)
        last_no = 0 if last is None else last.number
        if last_no < row.commit_no and not self._tailer.is_past(row.at_s, lasting_s(row.keep_s)):
            findings.corrupt.append(
                f"commits {last_no + 1} to {row.commit_no} of {name} are not there"
            )

    def _audit_page(self, page: Sequence[tuple[Commit, Arrived]], findings: Findings) -> None:
        there = [
            one for commit, one in page if self._journal.arrival_gone(one, commit.events) is None
        ]
        frames = self._tailer.frames(there)
        if any(one.frame_key not in frames for one in there):
            self._journal.refresh()
            self._tailer.heads()
        for commit, one in page:
            gone = self._journal.arrival_gone(one, commit.events)
            frame = frames.get(one.frame_key)
            if gone is None and frame is None:
                gone = self._tailer.lost(commit)
            if gone == "damaged":
                findings.corrupt.append(f"{_name(one)} is not there, or not whole")
            elif gone is not None:
                findings.hold(
                    one.key, Held(one.crc, one.kind, one.first_step, one.n_steps, _FATES[gone])
                )
                if gone == "forgotten":
                    findings.forgotten_sessions.add(tombstone_of(one.session))
            elif frame is not None:
                _audit_frame(one, frame, findings)

    def _known(self) -> CassandraLookup:
        return CassandraLookup(self.wire, self._journal, {})

    def _decide(self, decide: Decide) -> None:
        def decided() -> tuple[CommitFacts, Sequence[Statement]]:
            self._finish()  # what another process decided and did not carry out
            return decide()

        self.admin_lock.commit(decided)
        self._finish()

    # --- forgetting -----------------------------------------------------------------------------

    def forget(self, player: bytes) -> int:
        """Erase a player: rejected and hidden from now on, deleted when this returns; how many
        chunks went."""
        self._journal.refresh()
        counted = 0
        for session in self._sessions_of(player):
            chunk_nos = {row.chunk_no for row in self._numbers(session)}
            known = self._known()
            known.look_up([], [(session, chunk_no) for chunk_no in chunk_nos])
            counted += sum(len(known.data_rows(session, chunk_no)) for chunk_no in chunk_nos)
        self._decide(lambda: (CommitFacts(event=Event("forget", self._clock.now(), player)), []))
        return counted

    def _sessions_of(self, player: bytes) -> list[uuid.UUID]:
        rows = self.wire.scan(
            self.wire.bind("SELECT session FROM players WHERE player = ?", player)
        )
        return [row.session for row in rows]

    def _numbers(self, session: uuid.UUID) -> list[Row]:
        cql = "SELECT chunk_no, what FROM sessions WHERE session = ?"
        return [row for row in self.wire.scan(self.wire.bind(cql, session)) if row.what is not None]

    def _erase(self, event: Event) -> None:
        """Delete a forgotten player's bytes: whole sessions, to which nothing can be added any
        more."""
        for session in self._sessions_of(event.player):
            row = self.wire.one(
                self.wire.bind(f"SELECT {STATE} FROM sessions WHERE session = ? LIMIT 1", session)
            )
            found = None if row is None else self._journal.up_to_date(session, stated(row))
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
                if (row.player == event.player or event.player in (raw or b""))
                and row.received_s <= event.at_s
            ]
            cql = f"DELETE FROM quarantine USING TIMESTAMP {FOREVER} WHERE bucket = ? AND id = ?"
            self.wire.all(
                [
                    erased_frame(self.wire, frame_key(row.session, row.chunk_no, row.digest))
                    for row in theirs
                ]
            )
            self.wire.all(
                [self.wire.bind(cql, row.id >> QUARANTINE_BUCKET, row.id) for row in theirs]
            )

    # --- quarantine -----------------------------------------------------------------------------

    def quarantined(self, *, after_id: int = 0, limit: int = 1000) -> Sequence[Quarantined]:
        """Frames in quarantine by id, without those that were stored since or whose bytes are
        gone."""
        self._journal.refresh()
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

    def _is_waiting(self, row: Row) -> bool:
        """Whether a frame was not stored since, and its player was not forgotten."""
        is_forgotten = row.events < self._journal.forgets.get(row.player, (0, 0.0))[0]
        return not is_forgotten and row.id not in self._journal.replayed

    def _quarantine_pages(self, after_id: int = 0) -> Iterator[list[Row]]:
        drawn = self.wire.one(
            self.wire.bind("SELECT number FROM meta WHERE name = 'quarantine_id'")
        )
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
        return sum(
            self._withdraw(wanted[at : at + _TAKEN_OUT], reason)
            for at in range(0, len(wanted), _TAKEN_OUT)
        )

    def _withdraw(self, wanted: Sequence[tuple[uuid.UUID, int]], reason: str) -> int:
        self._journal.refresh()
        if not self._there(self._known(), wanted):
            return 0
        taken: list[int] = []

        def decide() -> tuple[CommitFacts, Sequence[Statement]]:
            known = self._known()
            there = self._there(known, wanted)
            frames = [_withdrawn(row, known, reason) for row in there]
            gone = [(row.session.bytes, row.chunk_no, row.n_steps) for row in there]
            event = Event("quarantine", self._clock.now(), b"", gone)
            taken[:] = [len(there)]
            return numbered(self.wire, CommitFacts(quarantined=frames, event=event)), []

        self._decide(decide)
        return taken[0]

    def _there(self, known: CassandraLookup, wanted: Sequence[tuple[uuid.UUID, int]]) -> list[Row]:
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
            decided = [
                draft.replay(one, number) for number, one in zip(ids, candidates, strict=True)
            ]
            receipts[:] = [
                Receipt([fate for fate, _ in decided], [reason for _, reason in decided])
            ]
            facts = facts_of(draft)
            # The bytes are there already; this lets them last as long as those of other new chunks.
            pairs = zip(facts.stored, draft.stored_raws, strict=True)
            return facts, [
                frame_row(self.wire, one.frame_key, raw, self._keep_s) for one, raw in pairs
            ]

        self._decide(decide)
        return receipts[0]

    # --- expiry ---------------------------------------------------------------------------------

    def expire(self, before_s: float) -> int:
        """Drop chunks received before a time, and the bytes of quarantined frames; how many
        chunks went."""
        heads = self._tailer.heads(look=True)
        self._journal.refresh()
        old = self._journal.expired_before_s
        new = int(before_s)
        if new <= old:
            return 0
        # First hidden, then deleted.
        self.wire.one(registered(self.wire, "head", "~expired", new))
        gone = sum(self._expire_partition(name, head, old, new) for name, head in heads.items())
        for rows in self._quarantine_pages():
            keys = [
                frame_key(row.session, row.chunk_no, row.digest)
                for row in rows
                if old <= row.received_s < before_s
            ]
            self.wire.all([erased_frame(self.wire, key) for key in keys])
        self._journal.expired_before_s = new
        return gone

    def _expire_partition(self, name: str, head: int, old: int, new: int) -> int:
        row = self.wire.one(
            self.wire.bind("SELECT number FROM registry WHERE kind = 'swept' AND name = ?", name)
        )
        swept = 0 if row is None else row.number
        gone = 0
        is_swept = True
        for commit in commits_between(self.wire, name, swept, head):
            data = [one for one in commit.facts.stored if one.kind == FrameKind.DATA]
            out = [one for one in data if one.received_s < new]
            self.wire.all([erased_frame(self.wire, one.frame_key) for one in out])
            gone += sum(
                one.received_s >= old and self._journal.arrival_gone(one, commit.events) is None
                for one in out
            )
            is_swept = is_swept and len(out) == len(data)
            if is_swept:
                swept = commit.number
        self.wire.one(registered(self.wire, "swept", name, swept))
        return gone

    # --- finishing ------------------------------------------------------------------------------

    @property
    def is_erasing(self) -> bool:
        """Whether something that was erased may still have bytes here, after a crash; the next
        claim ends it."""
        return self._applied() < self._journal.refresh()

    def _finish(self) -> None:
        """Carry out every admin commit; may be repeated."""
        head = self._journal.refresh()
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

    # --- what tells it from others, and the end ---------------------------------------------------

    @property
    def identity(self) -> str:
        """What tells this store from every other one."""
        return identity(self.wire)

    def close(self) -> None:
        if self.wire.is_closed:
            return
        with suppress(UnderstudyError):
            self._partitions.release()
        self.wire.close()

    def __enter__(self) -> "CassandraStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _states_after(
    draft: Draft, known: CassandraLookup, *, events: int, now_us: int
) -> dict[uuid.UUID, Stated]:
    """The sessions that a commit changes, as they are then."""
    sessions = draft.sessions()
    for session, player in draft.forgotten.items():
        if session not in sessions and known.state_of(session) is None:
            sessions[session] = ("", SessionState(player=player, forgotten=True))
    return {
        session: Stated(game, state, events, version_after(known.stated(session), now_us))
        for session, (game, state) in sessions.items()
    }


def version_after(before: Stated | None, now_us: int) -> int:
    """Above the version before; near the time, so that it also beats a state that ran out
    unseen."""
    return now_us if before is None else max(before.version + 1, now_us)


def _record(session: uuid.UUID, after: Stated, known: CassandraLookup) -> SessionRecord:
    return SessionRecord(
        session=session.bytes,
        player=after.state.player,
        game=after.game,
        state=after.state.pack(),
        events=after.events,
        version=after.version,
        is_new=known.stated(session) is None,
    )


def _withdrawn(row: Row, known: CassandraLookup, reason: str) -> QuarantinedFrame:
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


def _audit_frame(one: Arrived, frame: Frame, findings: Findings) -> None:
    try:
        if frame.kind is not FrameKind.DATA:
            findings.hold(one.key, Held(one.crc, one.kind, -1, 0))
            findings.control(one.session, one.chunk_no, frame.kind, frame.encode())
            return
        meta = chunk_of(frame).meta
    except Refused as error:
        findings.corrupt.append(f"{_name(one)}: {error}")
        return
    if (meta.first_step, meta.n_steps, meta.game, frame.player) != (
        one.first_step,
        one.n_steps,
        one.game,
        one.player,
    ):
        findings.corrupt.append(f"its commit tells of {_name(one)} what its metadata does not")
    findings.hold(one.key, Held(one.crc, one.kind, meta.first_step, meta.n_steps, STORED))


def _name(one: Arrived) -> str:
    return f"chunk {one.chunk_no} of session {uuid.UUID(bytes=one.session)}"
