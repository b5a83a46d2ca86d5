"""Writing one commit: rows that nobody sees yet, then the one compare-and-set that makes all of them count.

    1. what is known of the sessions, their numbers and their players    so that an erasure finds whatever comes next
    2. frames, quarantined frames, and the commit's own row
    3. the lane: commit number, attempt, position                         only by the claim's epoch

Rows of 1 and 2 carry the attempt that wrote them. A crash before 3 leaves rows that count for nobody and that the next
attempt overwrites.
"""

import uuid
from collections.abc import Mapping, Sequence

from understudy.core.clock import Clock
from understudy.core.frame import identity_of
from understudy.core.ports import Receipt, WriteBatch
from understudy.core.session import Arrival, SessionState
from understudy.stores.cassandra.facts import CommitFacts, Tag, facts_of
from understudy.stores.cassandra.journal import Journal
from understudy.stores.cassandra.known import Known, Stated
from understudy.stores.cassandra.lanes import Lane, Lanes, Outdated
from understudy.stores.cassandra.rows import (
    Rows,
    commit_row,
    erased_row,
    frame_rows,
    head_row,
    quarantine_rows,
    released_row,
    state_rows,
)
from understudy.stores.cassandra.tags import Tags
from understudy.stores.cassandra.turns import Turns
from understudy.stores.cassandra.wire import Wire
from understudy.stores.draft import Draft, Sessions, count


class Writer:
    """Writes batches through the lanes of one instance."""

    def __init__(self, wire: Wire, lanes: Lanes, journal: Journal, *, tags: Tags, turns: Turns, clock: Clock) -> None:
        self._wire, self._lanes, self._journal, self._tags, self._turns = wire, lanes, journal, tags, turns
        self._clock = clock

    def write(self, batch: WriteBatch) -> Receipt:
        """Store a batch with its position; decided anew when an erasure came in between."""
        lane = self._lanes.held(batch.partition, batch.epoch)
        with lane.lock:
            while True:
                self._turns.await_number(lane.events)
                try:
                    return self._attempt(lane, batch)
                except Outdated as outdated:
                    lane.events, lane.stamps = outdated.events, None

    def _attempt(self, lane: Lane, batch: WriteBatch) -> Receipt:
        n_stamps = 1 + len(batch.candidates) + len(batch.refused) + len(batch.parked)
        attempt = self._lanes.reserve(lane, n_stamps)
        known = self.known(lane.states)
        known.look_up(
            [(one.frame.session, one.frame.chunk_no) for one in batch.candidates],
            [key for one in (*batch.refused, *batch.parked) if (key := _key(one.raw)) is not None],
        )
        if known.newest_stamp >= attempt:
            attempt = self._lanes.reserve(lane, n_stamps, above=known.newest_stamp)
        draft = Draft(known, attempt + 1)
        receipt = draft.take(batch)
        facts = facts_of(draft.trailer(), draft.candidates)
        self._erase_forgotten(batch, receipt, known, attempt)
        if not (facts.stored or facts.quarantined or facts.forgotten):
            tag = Tag(lane.partition, lane.commit_no, lane.attempt)
            self._lanes.commit(lane, tag, n_arrivals=0, position=batch.position)
            return receipt
        tag = Tag(lane.partition, lane.commit_no + 1, attempt)
        states = states_after(facts, known, lane.events)
        rows = state_rows(self._wire, tag, states, known)
        rows.add(self.rows(tag, facts, draft.raws, events=lane.events))
        at_s = self._clock.now()
        rows.then.append(commit_row(self._wire, tag, facts, events=lane.events, at_s=at_s, before=lane.arrivals))
        rows.write(self._wire)
        try:
            self._lanes.commit(lane, tag, n_arrivals=facts.n_arrivals, position=batch.position)
        except Outdated:
            # An erasure may have looked through the quarantine before these were there.
            self._wire.all([released_row(self._wire, one.id, attempt) for one in facts.quarantined])
            raise
        self._tags.remember([tag])
        lane.remember(states.items())
        self._tell(tag)
        return receipt

    def _erase_forgotten(self, batch: WriteBatch, receipt: Receipt, known: Known, stamp: int) -> None:
        """Take away what an attempt left that had not heard of the erasure, also one of a process that died."""
        frames = [one.frame for one, why in zip(batch.candidates, receipt.reasons, strict=True) if why == "forgotten"]
        # A session of somebody else stays as it is, whoever a frame says it is from.
        theirs = [one for one in frames if (at := known.state_of(one.session)) is None or at[1].player == one.player]
        self._wire.all([erased_row(self._wire, one.session, one.chunk_no, stamp) for one in theirs])

    def known(self, recent: Mapping[uuid.UUID, Stated] | None = None) -> Known:
        """What the store knows now, for one decision."""
        return Known(self._wire, self._journal, self._tags, {} if recent is None else recent)

    def rows(self, tag: Tag, facts: CommitFacts, raws: Sequence[bytes], *, events: int) -> Rows:
        """The rows of frames; `raws` are those of stored ones, then of quarantined ones."""
        n_stored = len(facts.stored)
        rows = frame_rows(self._wire, tag, facts.stored, raws[:n_stored], events=events)
        rows.add(quarantine_rows(self._wire, tag, facts.quarantined, raws[n_stored:], events=events))
        return rows

    def _tell(self, tag: Tag) -> None:
        """Let readers know; should this be lost, they find out a little later."""
        self._wire.post(head_row(self._wire, tag.partition, tag.commit_no, tag.attempt))


def states_after(facts: CommitFacts, known: Known, events: int) -> dict[uuid.UUID, Stated]:
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
    return {session: Stated(game, state, events) for session, (game, state) in sessions.items()}


def _key(raw: bytes) -> tuple[uuid.UUID, int] | None:
    session, chunk_no, _ = identity_of(raw)
    return (uuid.UUID(bytes=session), chunk_no) if any(session) else None
