"""Turns: one admin commit at a time, with every writer held still while it is decided."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from understudy.core.clock import Clock
from understudy.core.errors import Unreachable
from understudy.stores.cassandra.facts import ADMIN, CommitFacts, Tag
from understudy.stores.cassandra.journal import Journal
from understudy.stores.cassandra.lanes import Lanes
from understudy.stores.cassandra.rows import Rows, commit_row, head_row
from understudy.stores.cassandra.stamps import draw
from understudy.stores.cassandra.wire import Row, Unsure, Wire

_POLL_S = 0.05
_TRIES = 20


class TurnLost(Exception):
    """Another process took the turn over; decide again."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The right to decide one admin commit."""

    tag: Tag
    epoch: int
    arrivals: int
    """How many arrivals the admin lane had before."""

    @property
    def number(self) -> int:
        return self.tag.commit_no

    @property
    def first_id(self) -> int:
        """The first of about a million numbers for quarantined frames."""
        return self.tag.attempt + 1


@dataclass(frozen=True, slots=True)
class Decided:
    """What a turn brings: its facts, and rows that are written before it counts."""

    facts: CommitFacts
    rows: Rows


class Turns:
    """Takes turns with every other process at this store."""

    def __init__(self, wire: Wire, lanes: Lanes, journal: Journal, *, clock: Clock, grace_s: float = 15.0) -> None:
        self._wire, self._lanes, self._journal, self._clock = wire, lanes, journal, clock
        self.grace_s = grace_s
        """How long a turn may take before others believe that its process died."""
        self._lock = threading.RLock()

    def take(self, decide: Callable[[Turn], Decided], *, grace_s: float | None = None) -> Turn:
        """Hold all writers, decide, commit; the turn that counted."""
        with self._lock:
            for _ in range(_TRIES):
                try:
                    return self._take(decide, self.grace_s if grace_s is None else grace_s)
                except TurnLost:
                    self._wire.wait(_POLL_S)
        raise Unreachable("other processes decide about this store all the time; try again")

    def _take(self, decide: Callable[[Turn], Decided], grace_s: float) -> Turn:
        before = self._await_end(grace_s)
        epoch, number = draw(self._wire, self._clock), before.commit_no + 1
        self._begin(before, epoch, number)
        self._journal.read_to(before.commit_no)
        names = [row.name for row in self._wire.scan(self._wire.bind("SELECT name FROM registry WHERE kind = 'head'"))]
        self._lanes.fence([name for name in names if not name.startswith("~")], number)
        # Drawn only now: whatever an attempt wrote that the fence made void lies below, so that an erasure covers it.
        turn = Turn(Tag(ADMIN, number, draw(self._wire, self._clock)), epoch, before.arrivals)
        if self._lanes.made_admin().epoch != epoch:
            # Asked after the draw: whoever takes the turn over from now on draws above it.
            raise TurnLost
        try:
            decided = decide(turn)
        except TurnLost:
            raise
        except BaseException:
            self._commit(turn, Decided(CommitFacts(), Rows()))
            raise
        self._commit(turn, decided)
        return turn

    def _begin(self, before: Row, epoch: int, number: int) -> None:
        try:
            answer = self._wire.change(self._wire.bind(
                "UPDATE lanes SET epoch = ?, events = ? WHERE partition = ? IF epoch = ? AND commit_no = ?", epoch,
                number, ADMIN, before.epoch, before.commit_no,
            ))  # fmt: skip
        except Unsure:
            row = self._lanes.made_admin()
            if row.epoch == epoch:
                return
            raise TurnLost from None
        if not answer.applied:
            raise TurnLost

    def _commit(self, turn: Turn, decided: Decided) -> None:
        wire, tag, facts = self._wire, turn.tag, decided.facts
        at_s = self._clock.now()
        row = commit_row(wire, tag, facts, events=tag.commit_no, at_s=at_s, before=turn.arrivals)
        decided.rows.then.append(row)
        decided.rows.write(wire)
        statement = wire.bind(
            "UPDATE lanes SET commit_no = ?, attempt = ?, arrivals = ? WHERE partition = ? IF epoch = ? AND "
            "commit_no = ? AND attempt > ?", tag.commit_no, tag.attempt, turn.arrivals + facts.n_arrivals, ADMIN,
            turn.epoch, tag.commit_no - 1, -1,
        )  # fmt: skip
        deadline = time.monotonic() + wire.options.patience_s
        while True:
            try:
                answer = wire.change(statement)
                break
            except Unsure as error:
                if time.monotonic() > deadline:
                    raise Unreachable(
                        f"Cassandra did not say whether an erasure counts ({error}); try again"
                    ) from error
                wire.wait(_POLL_S)
        found = (getattr(answer, "commit_no", None), getattr(answer, "attempt", None))
        if not answer.applied and found != (tag.commit_no, tag.attempt):
            raise TurnLost
        wire.one(head_row(wire, ADMIN, tag.commit_no, tag.attempt))
        self._journal.read_to(tag.commit_no)

    def _await_end(self, grace_s: float) -> Row:
        """The admin lane once no turn is under way, or one that takes too long to be alive."""
        deadline = time.monotonic() + grace_s
        while True:
            row = self._lanes.made_admin()
            if row.events <= row.commit_no or time.monotonic() > deadline:
                return row
            self._wire.wait(_POLL_S)

    def await_number(self, number: int) -> None:
        """Wait until an admin commit is known; one whose process died is ended without effect."""
        if self._journal.head >= number:
            return
        deadline = time.monotonic() + self.grace_s
        while self._journal.refresh() < number:
            if time.monotonic() > deadline:
                self.take(lambda _: Decided(CommitFacts(), Rows()), grace_s=0.0)
            self._wire.wait(_POLL_S)
