"""The store on Cassandra: chunks, commits and sessions in tables; a compare-and-set per commit.

A batch is written in three steps. Readers see it after the second:

1. frames, and the commit's row             keyed so that a crash or a late write
                                            leaves nothing to undo
2. the partition: commit number, position   compare-and-set, only in the claim's epoch
3. sessions, numbers, players, quarantine   derived from the commit; written by the
                                            next claim if this writer crashes

Changes that do not come from a stream (forgetting, manual quarantine, replays) are admin commits.
Writers are blocked during an admin commit (`AdminLock`); a batch that was decided without it is
decided again. Its effects are applied after it, by the next claim if its process crashes.
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
from understudy.stores.audit import AuditedFrame, Findings, summary
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
    record_ttl_s,
    redo,
    registry_row,
    with_quarantine_ids,
)
from understudy.stores.cassandra.keyspace import check, identity, read_meta
from understudy.stores.cassandra.lookup import (
    STATE,
    AdminJournal,
    CassandraLookup,
    CommittedState,
    committed_state,
    raws_of,
)
from understudy.stores.cassandra.partitions import Lease, Outdated, Partitions
from understudy.stores.cassandra.tailing import Tailer
from understudy.stores.cassandra.wire import Row, Statement, Wire, read_options
from understudy.stores.draft import Draft, QuarantinedFrame
from understudy.stores.view import EXPIRED, FORGOTTEN, QUARANTINED, STORED, info_of

_AT_ONCE = 256
_WITHDRAWN_AT_ONCE = 64
"""Most chunks that one admin commit withdraws, since writers wait for it."""
_PAGE = 64
_READ_BYTES = 32 * 1024 * 1024
"""A list of quarantined frames ends with the page that brings it to this size."""
_POLL_S = 0.05
_TRIES = 20

Decide = Callable[[], tuple[CommitFacts, Sequence[Statement]]]
"""Returns the facts of an admin commit, and rows to write before it."""
_FATES: dict[Gone, int] = {"forgotten": FORGOTTEN, "expired": EXPIRED, "quarantined": QUARANTINED}


@dataclass(slots=True, kw_only=True)
class AdminLock:
    """Allows one admin commit at a time in all processes, and blocks all writers during it."""

    wire: Wire
    partitions: Partitions
    journal: AdminJournal
    clock: Clock
    keep_s: int
    grace_s: float = 15.0
    """How long an admin commit may take before its process is presumed dead."""
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def commit(self, decide: Decide, *, grace_s: float | None = None) -> None:
        """Block all writers, call `decide` and commit the facts that it returns."""
        with self._lock:
            for _ in range(_TRIES):
                try:
                    return self._commit(decide, self.grace_s if grace_s is None else grace_s)
                except ClaimLost:
                    self.wire.wait(_POLL_S)  # another process took over: decide again
        raise Unreachable(
            "other processes kept forgetting, quarantining or replaying in this store; try again "
            "later"
        )

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
            self._write(lease, CommitFacts(), [])  # writers already wait for this number
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
        self.wire.one(registry_row(self.wire, "head", ADMIN, number))
        self.journal.read_to(number)

    def _await_end(self, grace_s: float) -> Row:
        """Wait up to `grace_s` until no admin commit is in progress; return the admin partition."""
        deadline = time.monotonic() + grace_s
        while True:
            row = self.partitions.row(ADMIN)
            if row.events <= row.commit_no or time.monotonic() > deadline:
                return row
            self.wire.wait(_POLL_S)

    def await_number(self, number: int) -> None:
        """Wait for an admin commit; if its process died, commit an empty one in its place."""
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
    """Open the store at a `cassandra://` address; ConfigError or StorageFailed on failure.

    `specs` is a common parameter of all stores; this one does not use it.
    """
    wire = Wire(read_options(location))
    try:
        check(wire)
        return CassandraStore(wire, clock=clock)
    except BaseException:
        wire.close()
        raise


class CassandraStore:
    """Stores each step exactly once in Cassandra.

    Many processes may open it; each writes only the partitions that it has claimed.
    """

    def __init__(self, wire: Wire, *, clock: Clock | None = None) -> None:
        clock = clock or SystemClock()
        facts = read_meta(wire)
        keep_s = facts.get("ttl_s", 0)
        self.wire = wire
        """The connection to the servers."""
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
        self._finish()  # admin commits that a crash interrupted, such as an erasure
        return claim

    def write(self, batch: WriteBatch) -> Receipt:
        """Store a batch with its position; decides again if an admin commit came in between."""
        if self.wire.is_closed:
            raise Closed("the store was closed")
        lease = self._partitions.lease_of(batch.partition, batch.epoch)
        with lease.lock:
            while True:
                self.admin_lock.await_number(lease.events)
                try:
                    return self._attempt(lease, batch)
                except Outdated as outdated:
                    lease.events = outdated.events

    def _attempt(self, lease: Lease, batch: WriteBatch) -> Receipt:
        lookup = CassandraLookup(self.wire, self._journal, lease.states)
        withheld = [
            (refused.raw, identity_of(refused.raw), refused.received_s)
            for refused in (*batch.refused, *batch.parked)
        ]
        lookup.look_up(
            [(candidate.frame.session, candidate.frame.chunk_no) for candidate in batch.candidates],
            [
                (uuid.UUID(bytes=session), number)
                for _, (session, number, _), _ in withheld
                if any(session)
            ],
        )
        draft = Draft(lookup, 0)
        receipt = draft.add(batch)
        # Delete bytes that an attempt before the erasure, or a dead process, may have written.
        forgotten = [
            (candidate.frame.session.bytes, candidate.frame.chunk_no, candidate.frame.encode())
            for candidate, reason in zip(batch.candidates, receipt.reasons, strict=True)
            if reason == "forgotten"
        ] + [
            (session, number, raw)
            for raw, (session, number, player), received_s in withheld
            if any(session) and lookup.is_forgotten(player, uuid.UUID(bytes=session), received_s)
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
        facts = with_quarantine_ids(self.wire, facts)
        now_s = self._clock.now()
        states = _states_after(draft, lookup, events=lease.events, now_us=int(now_s * 1e6))
        commit = Commit(
            partition=lease.partition,
            number=lease.commit_no + 1,
            events=lease.events,
            at_s=now_s,
            keep_s=self._keep_s,
            before=lease.arrivals,
            facts=facts,
            states=[_record(session, after, lookup) for session, after in states.items()],
        )
        keys = [arrived.frame_key for arrived in facts.stored]
        keys += [
            frame_key(frame.session, frame.chunk_no, frame.digest) for frame in facts.quarantined
        ]
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
            self._partitions.drop(lease)  # the commit is valid, and the next claim applies it
            raise
        lease.remember(states.items())
        return receipt

    def tail(self, cursor: Cursor | None, *, max_items: int, wait_s: float) -> Tail:
        return self._tailer.tail(cursor, max_items=max_items, wait_s=wait_s)

    def sessions(self, session_filter: SessionFilter) -> Iterator[SessionInfo]:
        self._journal.refresh()
        return self._sessions(session_filter)

    def _sessions(self, session_filter: SessionFilter) -> Iterator[SessionInfo]:
        for row in self._session_rows(session_filter.player):
            current = self._journal.up_to_date(row.session, committed_state(row))
            if current is None or current.state.forgotten:
                continue
            if (
                current.state.last_received_s >= int(session_filter.since_s)
                and session_filter.game in (None, current.game)
                and session_filter.player in (None, current.state.player)
            ):
                yield info_of(row.session, current.game, current.state)

    def _session_rows(self, player: bytes | None) -> Iterator[Row]:
        bind = self.wire.bind
        if player is None:
            yield from self.wire.scan(bind(f"SELECT DISTINCT {STATE} FROM sessions"))
            return
        for played in self.wire.scan(bind("SELECT session FROM players WHERE player = ?", player)):
            row = self.wire.one(
                bind(f"SELECT {STATE} FROM sessions WHERE session = ? LIMIT 1", played.session)
            )
            if row is not None:
                yield row

    # --- the StoreAdmin port ----------------------------------------------------------------------

    def audit(self) -> Audit:
        return summary(self.findings())

    def findings(self) -> Findings:
        """A full check: read, verify and count every committed frame."""
        findings = Findings()
        heads = self._tailer.heads(look=True)
        rows = self._partitions.rows(heads)
        findings.corrupt += [
            f"the row of partition {name}, which has commits up to {head}, is missing"
            for name, head in sorted(heads.items())
            if head and name not in rows
        ]
        self._journal.refresh()
        arrivals = (
            arrival for _, row in sorted(rows.items()) for arrival in self._arrivals(row, findings)
        )
        while page := list(islice(arrivals, _AT_ONCE)):
            self._audit_page(page, findings)
        for row in (
            row for rows in self._quarantine_pages() for row in rows if self._is_waiting(row)
        ):
            findings.n_parked += row.parked
            findings.n_quarantined += not row.parked
        return findings

    def _arrivals(self, row: Row, findings: Findings) -> Iterator[tuple[Commit, Arrived]]:
        """Yield a partition's arrivals; add gaps, quarantine and forgotten sessions to findings."""
        name = row.partition
        arrivals = 0
        last: Commit | None = None
        for commit in commits_between(self.wire, name, 0, row.commit_no):
            if commit.before > arrivals and not self._tailer.may_have_expired(last):
                n_missing = commit.before - arrivals
                findings.corrupt.append(
                    f"{n_missing} arrivals before commit {commit.number} of partition {name} are "
                    "missing"
                )
            arrivals = commit.before + commit.facts.n_arrivals
            last = commit
            for frame in commit.facts.quarantined:
                is_kept = commit.events >= self._journal.forgets.get(frame.player, (0, 0.0))[0]
                if is_kept and any(frame.session):
                    key = (frame.session, frame.chunk_no)
                    findings.quarantined.setdefault(key, []).append(frame.crc)
            findings.forgotten_sessions.update(
                tombstone_of(session) for session, _ in commit.facts.forgotten
            )
            yield from ((commit, arrived) for arrived in commit.facts.stored)
        last_no = 0 if last is None else last.number
        if last_no < row.commit_no and not self._tailer.is_expired(
            row.at_s, record_ttl_s(row.keep_s)
        ):
            findings.corrupt.append(
                f"commits {last_no + 1} to {row.commit_no} of partition {name} are missing"
            )

    def _audit_page(self, page: Sequence[tuple[Commit, Arrived]], findings: Findings) -> None:
        readable = [
            arrived
            for commit, arrived in page
            if self._journal.arrival_removal_reason(arrived, commit.events) is None
        ]
        frames = self._tailer.frames(readable)
        if any(arrived.frame_key not in frames for arrived in readable):
            self._journal.refresh()
            self._tailer.heads()
        for commit, arrived in page:
            reason = self._journal.arrival_removal_reason(arrived, commit.events)
            frame = frames.get(arrived.frame_key)
            if reason is None and frame is None:
                reason = self._tailer.lost(commit)
            if reason == "damaged":
                findings.corrupt.append(f"{_name(arrived)} is missing or damaged")
            elif reason is not None:
                steps = (arrived.first_step, arrived.n_steps)
                findings.add_frame(
                    arrived.key, AuditedFrame(arrived.crc, arrived.kind, *steps, _FATES[reason])
                )
                if reason == "forgotten":
                    findings.forgotten_sessions.add(tombstone_of(arrived.session))
            elif frame is not None:
                _audit_frame(arrived, frame, findings)

    def _new_lookup(self) -> CassandraLookup:
        return CassandraLookup(self.wire, self._journal, {})

    def _decide(self, decide: Decide) -> None:
        def decided() -> tuple[CommitFacts, Sequence[Statement]]:
            self._finish()  # first apply admin commits of processes that crashed
            return decide()

        self.admin_lock.commit(decided)
        self._finish()

    # --- forgetting -----------------------------------------------------------------------------

    def forget(self, player: bytes) -> int:
        """Erase a player, hidden from readers at once; return the number of erased data chunks."""
        self._journal.refresh()
        counted = 0
        for session in self._sessions_of(player):
            chunk_nos = {row.chunk_no for row in self._numbers(session)}
            lookup = self._new_lookup()
            lookup.look_up([], [(session, chunk_no) for chunk_no in chunk_nos])
            counted += sum(len(lookup.data_rows(session, chunk_no)) for chunk_no in chunk_nos)
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
        """Delete the bytes of a forgotten player's sessions, which accept no more frames."""
        for session in self._sessions_of(event.player):
            row = self.wire.one(
                self.wire.bind(f"SELECT {STATE} FROM sessions WHERE session = ? LIMIT 1", session)
            )
            current = (
                None if row is None else self._journal.up_to_date(session, committed_state(row))
            )
            if current is not None and not current.state.forgotten:
                continue  # it began after the player was forgotten
            cql = f"DELETE FROM chunks USING TIMESTAMP {FOREVER} WHERE session = ? AND bucket = ?"
            buckets = {row.chunk_no >> CHUNK_BUCKET for row in self._numbers(session)}
            self.wire.all([self.wire.bind(cql, session, bucket) for bucket in buckets])
        for rows in self._quarantine_pages():
            # Includes frames with a damaged header that contain the pseudonym elsewhere.
            raws = raws_of(self.wire, rows)
            quarantined = [
                row
                for row, raw in zip(rows, raws, strict=True)
                if (row.player == event.player or event.player in (raw or b""))
                and row.received_s <= event.at_s
            ]
            cql = f"DELETE FROM quarantine USING TIMESTAMP {FOREVER} WHERE bucket = ? AND id = ?"
            self.wire.all(
                [
                    erased_frame(self.wire, frame_key(row.session, row.chunk_no, row.digest))
                    for row in quarantined
                ]
            )
            self.wire.all(
                [self.wire.bind(cql, row.id >> QUARANTINE_BUCKET, row.id) for row in quarantined]
            )

    # --- quarantine -----------------------------------------------------------------------------

    def quarantined(self, *, after_id: int = 0, limit: int = 1000) -> Sequence[Quarantined]:
        """Quarantined frames in order of their ids, without replayed and expired ones."""
        self._journal.refresh()
        frames: list[Quarantined] = []
        for rows in self._quarantine_pages(after_id):
            waiting = [row for row in rows if self._is_waiting(row)]
            frames += [
                _quarantined(row, raw)
                for row, raw in zip(waiting, raws_of(self.wire, waiting), strict=True)
                if raw is not None
            ]
            if len(frames) >= limit or sum(len(frame.raw) for frame in frames) >= _READ_BYTES:
                break
        return frames[:limit]

    def _is_waiting(self, row: Row) -> bool:
        """Whether a frame was not replayed, and its player was not forgotten."""
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
        """Hide stored chunks from readers but keep their bytes; return how many were stored."""
        keys = sorted(set(chunks))
        return sum(
            self._withdraw(keys[at : at + _WITHDRAWN_AT_ONCE], reason)
            for at in range(0, len(keys), _WITHDRAWN_AT_ONCE)
        )

    def _withdraw(self, keys: Sequence[tuple[uuid.UUID, int]], reason: str) -> int:
        self._journal.refresh()
        if not self._readable(self._new_lookup(), keys):
            return 0
        withdrawn = 0

        def decide() -> tuple[CommitFacts, Sequence[Statement]]:
            nonlocal withdrawn
            lookup = self._new_lookup()
            rows = self._readable(lookup, keys)
            frames = [_withdrawn(row, lookup, reason) for row in rows]
            chunks = [(row.session.bytes, row.chunk_no, row.n_steps) for row in rows]
            event = Event("quarantine", self._clock.now(), b"", chunks)
            withdrawn = len(rows)
            return with_quarantine_ids(self.wire, CommitFacts(quarantined=frames, event=event)), []

        self._decide(decide)
        return withdrawn

    def _readable(
        self, lookup: CassandraLookup, keys: Sequence[tuple[uuid.UUID, int]]
    ) -> list[Row]:
        lookup.look_up([], keys)
        return [row for key in keys for row in lookup.data_rows(*key)]

    def replay(self, ids: Sequence[int], candidates: Sequence[Candidate]) -> Receipt:
        """Store frames from quarantine, each at most once."""
        if not candidates:
            return Receipt([], [])
        receipts: list[Receipt] = []

        def decide() -> tuple[CommitFacts, Sequence[Statement]]:
            lookup = self._new_lookup()
            frames = [candidate.frame for candidate in candidates]
            lookup.look_up([], [(frame.session, frame.chunk_no) for frame in frames])
            draft = Draft(lookup, 0)
            decided = [
                draft.replay(candidate, number)
                for number, candidate in zip(ids, candidates, strict=True)
            ]
            receipts[:] = [
                Receipt([fate for fate, _ in decided], [reason for _, reason in decided])
            ]
            facts = facts_of(draft)
            # The bytes exist already; this renews their time to live.
            pairs = zip(facts.stored, draft.stored_raws, strict=True)
            return facts, [
                frame_row(self.wire, arrived.frame_key, raw, self._keep_s) for arrived, raw in pairs
            ]

        self._decide(decide)
        return receipts[0]

    # --- expiry ---------------------------------------------------------------------------------

    def expire(self, before_s: float) -> int:
        """Drop chunks and quarantined bytes received before a time; return how many chunks."""
        heads = self._tailer.heads(look=True)
        self._journal.refresh()
        old = self._journal.expired_before_s
        new = int(before_s)
        if new <= old:
            return 0
        # Hide them from readers before deleting them.
        self.wire.one(registry_row(self.wire, "head", "~expired", new))
        n_expired = sum(
            self._expire_partition(name, head, old, new) for name, head in heads.items()
        )
        for rows in self._quarantine_pages():
            # Includes frames that were older than an earlier expiry when they were quarantined.
            expired = [row for row in rows if row.received_s < before_s]
            keys = [
                frame_key(row.session, row.chunk_no, row.digest)
                for row, raw in zip(expired, raws_of(self.wire, expired), strict=True)
                if raw is not None
            ]
            self.wire.all([erased_frame(self.wire, key) for key in keys])
        self._journal.expired_before_s = new
        return n_expired

    def _expire_partition(self, name: str, head: int, old: int, new: int) -> int:
        row = self.wire.one(
            self.wire.bind("SELECT number FROM registry WHERE kind = 'swept' AND name = ?", name)
        )
        swept = 0 if row is None else row.number
        n_expired = 0
        is_swept = True
        for commit in commits_between(self.wire, name, swept, head):
            data = [arrived for arrived in commit.facts.stored if arrived.kind == FrameKind.DATA]
            expired = [arrived for arrived in data if arrived.received_s < new]
            self.wire.all([erased_frame(self.wire, arrived.frame_key) for arrived in expired])
            n_expired += sum(
                arrived.received_s >= old
                and self._journal.arrival_removal_reason(arrived, commit.events) is None
                for arrived in expired
            )
            is_swept = is_swept and len(expired) == len(data)
            if is_swept:
                swept = commit.number
        self.wire.one(registry_row(self.wire, "swept", name, swept))
        return n_expired

    # --- finishing ------------------------------------------------------------------------------

    @property
    def is_erasing(self) -> bool:
        """Whether erased bytes may still be stored after a crash; the next claim deletes them."""
        return self._applied() < self._journal.refresh()

    def _finish(self) -> None:
        """Apply all pending admin commits; idempotent."""
        head = self._journal.refresh()
        applied = self._applied()
        if applied >= head:
            return
        for commit in commits_between(self.wire, ADMIN, applied, head):
            event = commit.facts.event
            if event is not None and event.kind == "forget":
                self._erase(event)
            apply(self.wire, commit)
        self.wire.one(registry_row(self.wire, "applied", ADMIN, head))

    def _applied(self) -> int:
        cql = "SELECT number FROM registry WHERE kind = 'applied' AND name = ?"
        row = self.wire.one(self.wire.bind(cql, ADMIN))
        return 0 if row is None else int(row.number)

    # --- identity and closing ---------------------------------------------------------------------

    @property
    def identity(self) -> str:
        """The unique id of this store."""
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
    draft: Draft, lookup: CassandraLookup, *, events: int, now_us: int
) -> dict[uuid.UUID, CommittedState]:
    """The sessions that a commit changes, with their new states."""
    sessions = draft.sessions()
    for session, player in draft.forgotten.items():
        if session not in sessions and lookup.state_of(session) is None:
            sessions[session] = ("", SessionState(player=player, forgotten=True))
    return {
        session: CommittedState(
            game, state, events, version_after(lookup.committed_state(session), now_us)
        )
        for session, (game, state) in sessions.items()
    }


def version_after(before: CommittedState | None, now_us: int) -> int:
    """A version above that of `before`, and near the current time so as to beat expired states."""
    return now_us if before is None else max(before.version + 1, now_us)


def _record(session: uuid.UUID, after: CommittedState, lookup: CassandraLookup) -> SessionRecord:
    return SessionRecord(
        session=session.bytes,
        player=after.state.player,
        game=after.game,
        state=after.state.pack(),
        events=after.events,
        version=after.version,
        is_new=lookup.committed_state(session) is None,
    )


def _withdrawn(row: Row, lookup: CassandraLookup, reason: str) -> QuarantinedFrame:
    session = lookup.committed_state(row.session)
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


def _audit_frame(arrived: Arrived, frame: Frame, findings: Findings) -> None:
    try:
        if frame.kind is not FrameKind.DATA:
            findings.add_frame(arrived.key, AuditedFrame(arrived.crc, arrived.kind, -1, 0))
            findings.control(arrived.session, arrived.chunk_no, frame.kind, frame.encode())
            return
        meta = chunk_of(frame).meta
    except Refused as error:
        findings.corrupt.append(f"{_name(arrived)}: {error}")
        return
    actual = (meta.first_step, meta.n_steps, meta.game, frame.player)
    if actual != (arrived.first_step, arrived.n_steps, arrived.game, arrived.player):
        findings.corrupt.append(f"{_name(arrived)} does not match its commit")
    steps = (meta.first_step, meta.n_steps)
    findings.add_frame(arrived.key, AuditedFrame(arrived.crc, arrived.kind, *steps, STORED))


def _name(arrived: Arrived) -> str:
    return f"chunk {arrived.chunk_no} of session {uuid.UUID(bytes=arrived.session)}"
