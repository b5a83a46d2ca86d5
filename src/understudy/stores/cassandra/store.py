"""The store on Cassandra: chunks, commits and sessions in tables, each commit made to count by one compare-and-set.

A batch is written as bytes and facts that are not seen yet, the compare-and-set that makes them count, then the rest:

1. frames, and the commit's row             keyed so that a crash or a late write leaves nothing to undo
2. the partition: commit number, position   only under the claim's epoch
3. sessions, numbers, players, quarantine   derived from the commit; the next claim repeats it after a crash
"""

import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice

from understudy.core.chunk import chunk_of
from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import Closed, Refused, UnderstudyError
from understudy.core.frame import Frame, FrameKind, identity_of
from understudy.core.location import Location
from understudy.core.ports import (
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
from understudy.core.session import SessionState, tombstone_of
from understudy.stores.audit import Findings, Held, summary
from understudy.stores.cassandra.admin import Admin, AdminLock
from understudy.stores.cassandra.commits import (
    Arrived,
    Commit,
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
)
from understudy.stores.cassandra.keyspace import check, identity, numbers
from understudy.stores.cassandra.known import STATE, Journal, Known, Stated, stated
from understudy.stores.cassandra.partitions import Lease, Outdated, Partitions
from understudy.stores.cassandra.tailing import Tailer
from understudy.stores.cassandra.wire import Row, Wire, read_options
from understudy.stores.draft import Draft
from understudy.stores.view import EXPIRED, FORGOTTEN, QUARANTINED, STORED, info_of

_AT_ONCE = 256
_FATES: dict[Gone, int] = {"forgotten": FORGOTTEN, "expired": EXPIRED, "quarantined": QUARANTINED}


def open_cassandra(location: Location, *, specs: Specs, clock: Clock | None = None) -> "CassandraStore":
    """The store of an address; ConfigError or Unreachable in one line when there is none.

    `specs` is what every store is opened with; this one keeps chunks as they came and asks for none.
    """
    wire = Wire(read_options(location))
    try:
        check(wire)
        return CassandraStore(wire, clock=clock)
    except BaseException:
        wire.close()
        raise


class CassandraStore:
    """Stores each step exactly once; open it in as many processes as you like, each writes what it claimed."""

    def __init__(self, wire: Wire, *, clock: Clock | None = None) -> None:
        clock = clock or SystemClock()
        facts = numbers(wire)
        keep_s = facts.get("ttl_s", 0)
        self.wire = wire
        """The way to the servers."""
        self._clock = clock
        self._keep_s = keep_s
        self._journal = Journal(wire)
        self._partitions = Partitions(wire, clock)
        journal = self._journal
        partitions = self._partitions
        self.admin_lock = AdminLock(wire=wire, partitions=partitions, journal=journal, clock=clock, keep_s=keep_s)
        self._admin = Admin(wire=wire, journal=journal, lock=self.admin_lock, clock=clock, keep_s=keep_s)
        has_ttl = "ever_had_ttl" in facts
        self._tailer = Tailer(wire=wire, partitions=partitions, journal=journal, clock=clock, has_ttl=has_ttl)

    # --- the ExperienceStore port ---------------------------------------------------------------------------------

    def claim(self, partition: str, *, owner: str, ttl_s: float) -> Claim:
        self._check_open()
        claim = self._partitions.claim(partition, owner=owner, ttl_s=ttl_s)
        self._admin.finish()  # what a crash left of an erasure
        return claim

    def write(self, batch: WriteBatch) -> Receipt:
        """Store a batch with its position; decided anew when an admin commit came in between."""
        self._check_open()
        lease = self._partitions.held(batch.partition, batch.epoch)
        with lease.lock:
            while True:
                self.admin_lock.await_number(lease.events)
                try:
                    return self._attempt(lease, batch)
                except Outdated as outdated:
                    lease.events = outdated.events

    def _attempt(self, lease: Lease, batch: WriteBatch) -> Receipt:
        known = Known(self.wire, self._journal, lease.states)
        withheld = [(one.raw, identity_of(one.raw), one.received_s) for one in (*batch.refused, *batch.parked)]
        known.look_up(
            [(one.frame.session, one.frame.chunk_no) for one in batch.candidates],
            [(uuid.UUID(bytes=session), number) for _, (session, number, _), _ in withheld if any(session)],
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
            [erased_frame(self.wire, frame_key(session, number, digest_of(raw))) for session, number, raw in forgotten]
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
        rows = [frame_row(self.wire, key, raw, self._keep_s) for key, raw in zip(keys, raws, strict=True)]
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
        self._check_open()
        return self._tailer.tail(cursor, max_items=max_items, wait_s=wait_s)

    def sessions(self, wanted: SessionFilter) -> Iterator[SessionInfo]:
        self._check_open()
        self._journal.refresh()
        return self._sessions(wanted)

    def _sessions(self, wanted: SessionFilter) -> Iterator[SessionInfo]:
        for row in self._session_rows(wanted):
            found = self._journal.up_to_date(row.session, stated(row))
            if found is None or found.state.forgotten or found.state.last_received_s < int(wanted.since_s):
                continue
            if wanted.game in (None, found.game) and wanted.player in (None, found.state.player):
                yield info_of(row.session, found.game, found.state)

    def _session_rows(self, wanted: SessionFilter) -> Iterator[Row]:
        bind = self.wire.bind
        if wanted.player is None:
            yield from self.wire.scan(bind(f"SELECT DISTINCT {STATE} FROM sessions"))
            return
        for one in self.wire.scan(bind("SELECT session FROM players WHERE player = ?", wanted.player)):
            row = self.wire.one(bind(f"SELECT {STATE} FROM sessions WHERE session = ? LIMIT 1", one.session))
            if row is not None:
                yield row

    def forget(self, player: bytes) -> int:
        """Erase a player: refused and hidden from the next moment on, deleted when this returns."""
        self._check_open()
        return self._admin.forget(player)

    # --- the StoreAdmin port ----------------------------------------------------------------------------------------

    def audit(self) -> Audit:
        return summary(self.findings())

    def findings(self) -> Findings:
        """Everything a full check saw: every committed frame is read, compared with its checksums, and counted."""
        self._check_open()
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
        for row in self._admin.quarantine_rows():
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
                findings.corrupt.append(f"{lost} arrivals before commit {commit.number} of {name} are not there")
            seen = commit.before + commit.facts.n_arrivals
            last = commit
            for one in commit.facts.quarantined:
                if commit.events >= self._journal.forgets.get(one.player, (0, 0.0))[0] and any(one.session):
                    findings.quarantined.setdefault((one.session, one.chunk_no), []).append(one.crc)
            findings.forgotten_sessions.update(tombstone_of(session) for session, _ in commit.facts.forgotten)
            yield from ((commit, one) for one in commit.facts.stored)
        last_no = 0 if last is None else last.number
        if last_no < row.commit_no and not self._tailer.is_past(row.at_s, lasting_s(row.keep_s)):
            findings.corrupt.append(f"commits {last_no + 1} to {row.commit_no} of {name} are not there")

    def _audit_page(self, page: Sequence[tuple[Commit, Arrived]], findings: Findings) -> None:
        there = [one for commit, one in page if self._journal.arrival_gone(one, commit.events) is None]
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
                findings.hold(one.key, Held(one.crc, one.kind, one.first_step, one.n_steps, _FATES[gone]))
                if gone == "forgotten":
                    findings.forgotten_sessions.add(tombstone_of(one.session))
            elif frame is not None:
                _audit_frame(one, frame, findings)

    def quarantined(self, *, after_id: int = 0, limit: int = 1000) -> Sequence[Quarantined]:
        self._check_open()
        return self._admin.quarantined(after_id=after_id, limit=limit)

    def quarantine(self, chunks: Sequence[tuple[uuid.UUID, int]], *, reason: str) -> int:
        self._check_open()
        return self._admin.quarantine(chunks, reason=reason)

    def replay(self, ids: Sequence[int], candidates: Sequence[Candidate]) -> Receipt:
        self._check_open()
        return self._admin.replay(ids, candidates)

    def expire(self, before_s: float) -> int:
        self._check_open()
        return self._admin.expire(before_s, self._tailer.heads(look=True))

    # --- what tells it from others, and the end ---------------------------------------------------------------------

    @property
    def identity(self) -> str:
        """What tells this store from every other one."""
        self._check_open()
        return identity(self.wire)

    @property
    def is_erasing(self) -> bool:
        """Whether something that was erased may still have bytes here, after a crash; the next claim ends it."""
        return self._admin.is_erasing

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

    def _check_open(self) -> None:
        if self.wire.is_closed:
            raise Closed("the store was closed")


def _states_after(draft: Draft, known: Known, *, events: int, now_us: int) -> dict[uuid.UUID, Stated]:
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
    """Above the version before; near the time, so that it also beats a state that ran out unseen."""
    return now_us if before is None else max(before.version + 1, now_us)


def _record(session: uuid.UUID, after: Stated, known: Known) -> SessionRecord:
    return SessionRecord(
        session=session.bytes,
        player=after.state.player,
        game=after.game,
        state=after.state.pack(),
        events=after.events,
        version=after.version,
        is_new=known.stated(session) is None,
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
    if (meta.first_step, meta.n_steps, meta.game, frame.player) != (one.first_step, one.n_steps, one.game, one.player):
        findings.corrupt.append(f"its commit tells of {_name(one)} what its metadata does not")
    findings.hold(one.key, Held(one.crc, one.kind, meta.first_step, meta.n_steps, STORED))


def _name(one: Arrived) -> str:
    return f"chunk {one.chunk_no} of session {uuid.UUID(bytes=one.session)}"
