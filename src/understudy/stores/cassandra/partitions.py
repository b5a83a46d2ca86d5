"""Partitions: who may write each, and how far it is committed; changed by compare-and-set alone."""

import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from understudy.core.clock import Clock
from understudy.core.errors import ClaimLost, ConfigError, UnderstudyError, Unreachable
from understudy.ports import Claim, Position
from understudy.stores.cassandra.commits import ADMIN, Commit, redo, registered
from understudy.stores.cassandra.lookup import Stated
from understudy.stores.cassandra.wire import OutcomeUnknown, Row, Wire

_READ = "SELECT * FROM partitions WHERE partition = ?"
_TRIES = 100
_MOST_STATES = 4096
_EPOCH = 1 << 32
"""From one epoch to the next; the numbers between are its attempts."""


class Outdated(Exception):
    """An admin commit takes place: what was decided without it does not count."""

    def __init__(self, events: int) -> None:
        super().__init__(f"admin commit {events}")
        self.events = events


@dataclass(slots=True)
class Lease:
    """A partition this instance may write, as it was last committed."""

    partition: str
    epoch: int
    ttl_s: float
    commit_no: int
    arrivals: int
    events: int
    """Admin commits that must be known before anything is decided."""
    attempts: int = 0
    states: OrderedDict[uuid.UUID, Stated] = field(default_factory=OrderedDict)
    """The sessions written last, as committed."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next_attempt(self) -> int:
        """The timestamp of an attempt: above those of this epoch, below those of later ones."""
        self.attempts += 1
        return self.epoch + self.attempts

    def remember(self, states: Iterable[tuple[uuid.UUID, Stated]]) -> None:
        for session, stated in states:
            self.states[session] = stated
            self.states.move_to_end(session)
        while len(self.states) > _MOST_STATES:
            self.states.popitem(last=False)


class Partitions:
    """Leases of this instance, and the committed heads of every partition."""

    def __init__(self, wire: Wire, clock: Clock) -> None:
        self._wire = wire
        self._clock = clock
        self._held: dict[str, Lease] = {}
        self._lock = threading.Lock()

    # --- claims ---------------------------------------------------------------------------------

    def claim(self, partition: str, *, owner: str, ttl_s: float) -> Claim:
        """A new epoch; ClaimLost while another owner's claim is fresh."""
        if partition.startswith("~"):
            raise ConfigError(
                f"partition {partition!r} begins with ~, which the store keeps for itself"
            )
        for _ in range(_TRIES):
            row = self.row(partition)
            now_s = self._clock.now()
            if row.owner not in ("", None, owner) and row.expires_s > now_s:
                left_s = row.expires_s - now_s
                raise ClaimLost(
                    f"partition {partition} is claimed by {row.owner} for {left_s:.1f} s more",
                    retry_after_s=left_s,
                )
            if self._changed(row, "owner = ?, expires_s = ?", owner, now_s + ttl_s):
                return self._begin(partition, row.epoch + _EPOCH, ttl_s)
        raise ClaimLost(
            f"partition {partition} is claimed by many at once; try again", retry_after_s=1.0
        )

    def begin_admin(self, row: Row) -> Lease:
        """The right to make the next admin commit; ClaimLost when another process was faster."""
        number = row.commit_no + 1
        if not self._changed(row, "events = ?", number):
            raise ClaimLost("another process decides about this store", retry_after_s=1.0)
        return Lease(ADMIN, row.epoch + _EPOCH, 0.0, row.commit_no, row.arrivals, number)

    def _changed(self, row: Row, sets: str, *values: object) -> bool:
        """Whether this call began the next epoch of a partition that is as the row says."""
        lease = uuid.uuid4().hex
        cql = (
            f"UPDATE partitions SET epoch = ?, lease = ?, {sets} WHERE partition = ? "
            "IF epoch = ? AND expires_s = ? AND commit_no = ?"
        )
        statement = self._wire.bind(
            cql,
            row.epoch + _EPOCH,
            lease,
            *values,
            row.partition,
            row.epoch,
            row.expires_s,
            row.commit_no,
        )
        try:
            return bool(self._wire.change(statement).applied)
        except OutcomeUnknown:
            return bool(self.row(row.partition).lease == lease)

    def _begin(self, partition: str, epoch: int, ttl_s: float) -> Claim:
        # First the claim, then the name, then the look at admin commits: one that takes place
        # meanwhile either finds the name or is found here.
        self._wire.one(
            registered(self._wire, "head", partition, self._own_row(partition, epoch).commit_no)
        )
        admin = self.row(ADMIN)
        self.fence([partition], max(admin.events, admin.commit_no))
        row = self._own_row(partition, epoch)
        redo(self._wire, partition, row.commit_no)
        lease = Lease(partition, epoch, ttl_s, row.commit_no, row.arrivals, row.events)
        with self._lock:
            self._held[partition] = lease
        return Claim(partition, epoch, None if row.position is None else Position(row.position))

    def _own_row(self, partition: str, epoch: int) -> Row:
        """A partition as it is now; ClaimLost when it was claimed since."""
        row = self.row(partition)
        if row.epoch != epoch:
            raise ClaimLost(f"epoch {epoch} of partition {partition} is stale")
        return row

    def held(self, partition: str, epoch: int) -> Lease:
        """The lease of a claim that this instance made; ClaimLost otherwise."""
        lease = self._held.get(partition)
        if lease is None or lease.epoch != epoch:
            raise ClaimLost(
                f"epoch {epoch} of partition {partition} is stale, or was claimed by another "
                "instance"
            )
        return lease

    def drop(self, lease: Lease) -> None:
        """Write no more under a lease; the next claim finds out how far it came."""
        with self._lock:
            if self._held.get(lease.partition) is lease:
                del self._held[lease.partition]

    def release(self) -> None:
        """Let others claim at once what this instance holds; when Cassandra does not answer,
        claims run out."""
        with suppress(UnderstudyError, OutcomeUnknown):
            for lease in list(self._held.values()):
                self.drop(lease)
                cql = (
                    "UPDATE partitions SET owner = '', expires_s = 0 WHERE partition = ? IF "
                    "epoch = ?"
                )
                self._wire.change(self._wire.bind(cql, lease.partition, lease.epoch))

    # --- committing -----------------------------------------------------------------------------

    def move(self, lease: Lease, position: str | None) -> None:
        """Set the position of a partition of which nothing else changes."""
        sets = "expires_s = ?, position = ?" if position is not None else "expires_s = ?"
        values = [self._clock.now() + lease.ttl_s, *([position] if position is not None else [])]
        self._settle(lease, lease.commit_no, sets, values)

    def commit(self, lease: Lease, commit: Commit, position: str | None) -> None:
        """Make a commit count; ClaimLost, Outdated or Unreachable when it does not."""
        arrivals = lease.arrivals + commit.facts.n_arrivals
        sets = "commit_no = ?, at_s = ?, keep_s = ?, arrivals = ?, expires_s = ?"
        values = [
            commit.number,
            commit.at_s,
            commit.keep_s,
            arrivals,
            self._clock.now() + lease.ttl_s,
        ]
        if position is not None:
            sets += ", position = ?"
            values.append(position)  # type: ignore[arg-type]
        self._settle(lease, commit.number, sets, values)
        lease.commit_no = commit.number
        lease.arrivals = arrivals

    def _settle(self, lease: Lease, number: int, sets: str, values: Iterable[object]) -> None:
        cql = (
            f"UPDATE partitions SET {sets} WHERE partition = ? IF epoch = ? AND commit_no = ? "
            "AND events = ?"
        )
        statement = self._wire.bind(
            cql, *values, lease.partition, lease.epoch, lease.commit_no, lease.events
        )
        answer = self._answer(lease, statement)
        if answer.applied:
            return
        # Without a row there is no epoch, either.
        if getattr(answer, "epoch", None) == lease.epoch:
            if answer.commit_no == number > lease.commit_no:
                return  # only this instance writes under its epoch: it was asked for twice
            if answer.events != lease.events:
                raise Outdated(answer.events)
        self.drop(lease)
        raise ClaimLost(f"epoch {lease.epoch} of partition {lease.partition} is stale")

    def _answer(self, lease: Lease, statement: object) -> Row:
        """The answer to a commit, asked for until there is one."""
        pause_s = 0.05
        waited_s = 0.0
        while True:
            try:
                return self._wire.change(statement)
            except OutcomeUnknown as error:
                if waited_s > self._wire.options.patience_s:
                    # It may happen yet. A new claim makes sure of one or the other.
                    self.drop(lease)
                    raise Unreachable(
                        f"Cassandra did not say whether a commit of partition {lease.partition} "
                        f"counts ({error}); "
                        "claim it again when Cassandra is back"
                    ) from error
                self._wire.wait(pause_s)
                waited_s += pause_s
                pause_s = min(2 * pause_s, 2.0)

    def fence(self, partitions: Iterable[str], events: int) -> None:
        """From now on no commit of these partitions counts that was decided before an admin
        commit of this number."""
        cql = "UPDATE partitions SET events = ? WHERE partition = ? IF events < ?"
        # Repeating one does no harm: the number only rises.
        self._wire.all([self._wire.bind(cql, events, name, events) for name in partitions])

    # --- looking --------------------------------------------------------------------------------

    def row(self, partition: str) -> Row:
        """A partition as it is now, whatever was left half way; created where there is none."""
        for _ in range(_TRIES):
            row = self._wire.one(self._wire.serial(_READ, partition))
            if row is not None:
                return row
            with suppress(OutcomeUnknown):
                cql = (
                    "INSERT INTO partitions (partition, epoch, owner, expires_s, commit_no, at_s, "
                    "keep_s, arrivals, "
                    "events) VALUES (?, 0, '', 0, 0, 0, 0, 0, 0) IF NOT EXISTS"
                )
                self._wire.change(self._wire.bind(cql, partition))
        raise Unreachable(f"partition {partition} could not be claimed; try again")

    def rows(self, partitions: Iterable[str], *, serial: bool = False) -> dict[str, Row]:
        """Partitions as they are committed; with `serial` whatever was left half way is ended
        first."""
        names = list(partitions)
        bind = self._wire.serial if serial else self._wire.bind
        found = self._wire.all([bind(_READ, name) for name in names])
        return {name: rows[0] for name, rows in zip(names, found, strict=True) if rows}

    def own_heads(self) -> dict[str, int]:
        """How far the partitions of this instance are committed."""
        with self._lock:
            return {name: lease.commit_no for name, lease in self._held.items()}
