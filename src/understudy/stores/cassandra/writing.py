"""Writing a batch: bytes and facts that nobody sees yet, the one compare-and-set that makes them count, then the rest.

1. frames, and the commit's row             keyed so that a crash or a late write leaves nothing to undo
2. the partition: commit number, position   only under the claim's epoch
3. sessions, numbers, players, quarantine   derived from the commit; the next claim repeats it after a crash
"""

import uuid
from dataclasses import dataclass

from understudy.core.clock import Clock
from understudy.core.frame import identity_of
from understudy.core.ports import Receipt, WriteBatch
from understudy.core.session import Arrival, SessionState
from understudy.stores.cassandra.admin import AdminLock
from understudy.stores.cassandra.commits import (
    Commit,
    CommitFacts,
    SessionRecord,
    apply,
    commit_row,
    digest_of,
    erased_frame,
    facts_of,
    frame_key,
    frame_row,
    numbered,
)
from understudy.stores.cassandra.known import Journal, Known, Stated
from understudy.stores.cassandra.partitions import Lease, Outdated, Partitions
from understudy.stores.cassandra.wire import Wire
from understudy.stores.draft import Draft, Sessions, count


@dataclass(slots=True, kw_only=True)
class Writer:
    """Writes batches under the leases of one instance."""

    wire: Wire
    partitions: Partitions
    journal: Journal
    admin: AdminLock
    clock: Clock
    keep_s: int

    def write(self, batch: WriteBatch) -> Receipt:
        """Store a batch with its position; decided anew when an admin commit came in between."""
        lease = self.partitions.held(batch.partition, batch.epoch)
        with lease.lock:
            while True:
                self.admin.await_number(lease.events)
                try:
                    return self._attempt(lease, batch)
                except Outdated as outdated:
                    lease.events = outdated.events

    def _attempt(self, lease: Lease, batch: WriteBatch) -> Receipt:
        known = Known(self.wire, self.journal, lease.states)
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
        facts = facts_of(draft.trailer(), draft.candidates, draft.raws)
        if not (facts.stored or facts.quarantined or facts.forgotten):
            self.partitions.move(lease, batch.position)
            return receipt
        facts = numbered(self.wire, facts)
        now_s = self.clock.now()
        states = states_after(facts, known, events=lease.events, now_us=int(now_s * 1e6))
        commit = Commit(
            partition=lease.partition,
            number=lease.commit_no + 1,
            events=lease.events,
            at_s=now_s,
            keep_s=self.keep_s,
            before=lease.arrivals,
            facts=facts,
            states=[_record(session, after, known) for session, after in states.items()],
        )
        keys = [one.frame_key for one in facts.stored]
        keys += [frame_key(one.session, one.chunk_no, one.digest) for one in facts.quarantined]
        rows = [frame_row(self.wire, key, raw, self.keep_s) for key, raw in zip(keys, draft.raws, strict=True)]
        self.wire.all([*rows, commit_row(self.wire, commit, lease.next_attempt())])
        self.partitions.commit(lease, commit, batch.position)
        try:
            apply(self.wire, commit)
        except BaseException:
            self.partitions.drop(lease)  # the next claim applies it
            raise
        lease.remember(states.items())
        return receipt


def states_after(facts: CommitFacts, known: Known, *, events: int, now_us: int) -> dict[uuid.UUID, Stated]:
    """The sessions that a commit changes, as they are then."""
    sessions: Sessions = {}
    for one in facts.stored:
        count(sessions, uuid.UUID(bytes=one.session), one.game, one.arrival(), before=known.state_of)
    for two in facts.quarantined:
        if any(two.session):
            arrival = Arrival(number=two.chunk_no, player=two.player, received_s=int(two.received_s), kind="refused")
            count(sessions, uuid.UUID(bytes=two.session), two.game, arrival, before=known.state_of)
    for raw, player in facts.forgotten:
        session = uuid.UUID(bytes=raw)
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
