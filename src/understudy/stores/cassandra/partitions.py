"""Stream partitions: their owners and last commits, changed only by compare-and-set."""

import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from understudy.core.clock import Clock
from understudy.core.errors import ClaimLost, ConfigError, UnderstudyError, Unreachable
from understudy.ports import Claim, Position
from understudy.stores.cassandra.commits import ADMIN, Commit, redo, registry_row
from understudy.stores.cassandra.lookup import CommittedState
from understudy.stores.cassandra.wire import OutcomeUnknown, Row, Wire

_READ = "SELECT * FROM partitions WHERE partition = ?"
_TRIES = 100
_MOST_STATES = 4096
_EPOCH = 1 << 32
"""Epochs are multiples of this; the numbers in between are the timestamps of attempts to commit."""


class Outdated(Exception):
    """A newer admin commit exists, so decisions made without it are invalid."""

    def __init__(self, events: int) -> None:
        super().__init__(f"admin commit {events}")
        self.events = events


@dataclass(slots=True)
class Lease:
    """A partition that this `CassandraStore` may write, in its state after the last commit."""

    partition: str
    epoch: int
    ttl_s: float
    commit_no: int
    arrivals: int
    events: int
    """Decisions must take every admin commit up to this number into account."""
    attempts: int = 0
    states: OrderedDict[uuid.UUID, CommittedState] = field(default_factory=OrderedDict)
    """The committed states of the last written sessions."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next_attempt(self) -> int:
        """The next attempt's timestamp: above all earlier ones, below those of later epochs."""
        self.attempts += 1
        return self.epoch + self.attempts

    def remember(self, states: Iterable[tuple[uuid.UUID, CommittedState]]) -> None:
        for session, stated in states:
            self.states[session] = stated
            self.states.move_to_end(session)
        while len(self.states) > _MOST_STATES:
            self.states.popitem(last=False)


class Partitions:
    """The leases of this `CassandraStore`, and the last commits of all partitions."""

    def __init__(self, wire: Wire, clock: Clock) -> None:
        self._wire = wire
        self._clock = clock
        self._held: dict[str, Lease] = {}
        self._lock = threading.Lock()

    # --- claims ---------------------------------------------------------------------------------

    def claim(self, partition: str, *, owner: str, ttl_s: float) -> Claim:
        """Start a new epoch; ClaimLost while another owner's claim is valid."""
        if partition.startswith("~"):
            raise ConfigError(
                f"partition {partition!r} starts with ~, which is reserved for the store; use "
                "another name"
            )
        for _ in range(_TRIES):
            row = self.row(partition)
            now_s = self._clock.now()
            if row.owner not in ("", None, owner) and row.expires_s > now_s:
                remaining_s = row.expires_s - now_s
                raise ClaimLost(
                    f"partition {partition} is claimed by {row.owner} for another "
                    f"{remaining_s:.1f} s; claim it again after that",
                    retry_after_s=remaining_s,
                )
            if self._changed(row, "owner = ?, expires_s = ?", owner, now_s + ttl_s):
                return self._begin(partition, row.epoch + _EPOCH, ttl_s)
        raise ClaimLost(
            f"too many processes claim partition {partition} at once; try again", retry_after_s=1.0
        )

    def begin_admin(self, row: Row) -> Lease:
        """Lease the admin partition for one commit; ClaimLost when another process was faster."""
        number = row.commit_no + 1
        if not self._changed(row, "events = ?", number):
            raise ClaimLost(
                "another process is forgetting, quarantining or replaying in this store; try again "
                "in a second",
                retry_after_s=1.0,
            )
        return Lease(ADMIN, row.epoch + _EPOCH, 0.0, row.commit_no, row.arrivals, number)

    def _changed(self, row: Row, sets: str, *values: object) -> bool:
        """Start the next epoch if the partition still matches the row; return whether it did."""
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
        # First the claim, then the registry, then the check for admin commits: a concurrent one
        # either finds the partition in the registry or is found here.
        self._wire.one(
            registry_row(self._wire, "head", partition, self._own_row(partition, epoch).commit_no)
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
        """The current row of a partition; ClaimLost if another claim has replaced this epoch."""
        row = self.row(partition)
        if row.epoch != epoch:
            raise ClaimLost(
                f"epoch {epoch} of partition {partition} is stale; claim the partition again"
            )
        return row

    def lease_of(self, partition: str, epoch: int) -> Lease:
        """The lease that this instance holds for a claim; ClaimLost if it holds none."""
        lease = self._held.get(partition)
        if lease is None or lease.epoch != epoch:
            raise ClaimLost(
                f"epoch {epoch} of partition {partition} is stale, or was claimed by another "
                "instance; claim the partition again"
            )
        return lease

    def drop(self, lease: Lease) -> None:
        """Stop using a lease; the next claim reads the partition's state from Cassandra."""
        with self._lock:
            if self._held.get(lease.partition) is lease:
                del self._held[lease.partition]

    def release(self) -> None:
        """Release all leases of this instance; if Cassandra does not respond, they expire."""
        with suppress(UnderstudyError, OutcomeUnknown):
            for lease in list(self._held.values()):
                self.drop(lease)
                cql = (
                    "UPDATE partitions SET owner = '', expires_s = 0 "
                    "WHERE partition = ? IF epoch = ?"
                )
                self._wire.change(self._wire.bind(cql, lease.partition, lease.epoch))

    # --- committing -----------------------------------------------------------------------------

    def move(self, lease: Lease, position: str | None) -> None:
        """Update a partition's position, if it is not None, and extend the claim; add no commit."""
        sets = "expires_s = ?, position = ?" if position is not None else "expires_s = ?"
        values = [self._clock.now() + lease.ttl_s, *([position] if position is not None else [])]
        self._settle(lease, lease.commit_no, sets, values)

    def commit(self, lease: Lease, commit: Commit, position: str | None) -> None:
        """Make a written commit valid; ClaimLost, Outdated or Unreachable on failure."""
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
        result = self._result(lease, statement)
        if result.applied:
            return
        # If the partition's row is missing, the result has no epoch.
        if getattr(result, "epoch", None) == lease.epoch:
            if result.commit_no == number > lease.commit_no:
                return  # applied before: only this instance writes in its epoch
            if result.events != lease.events:
                raise Outdated(result.events)
        self.drop(lease)
        raise ClaimLost(
            f"epoch {lease.epoch} of partition {lease.partition} is stale; claim the partition "
            "again"
        )

    def _result(self, lease: Lease, statement: object) -> Row:
        """The result of a commit, retried until it is known."""
        pause_s = 0.05
        waited_s = 0.0
        while True:
            try:
                return self._wire.change(statement)
            except OutcomeUnknown as error:
                if waited_s > self._wire.options.retry_s:
                    # The commit may still be applied; the next claim finds out.
                    self.drop(lease)
                    raise Unreachable(
                        f"the result of a commit to partition {lease.partition} is unknown "
                        f"({error}); claim the partition again when Cassandra responds"
                    ) from error
                self._wire.wait(pause_s)
                waited_s += pause_s
                pause_s = min(2 * pause_s, 2.0)

    def fence(self, partitions: Iterable[str], events: int) -> None:
        """Invalidate commits of these partitions that were decided before this admin commit."""
        cql = "UPDATE partitions SET events = ? WHERE partition = ? IF events < ?"
        # Idempotent, since the number only increases.
        self._wire.all([self._wire.bind(cql, events, name, events) for name in partitions])

    # --- reading --------------------------------------------------------------------------------

    def row(self, partition: str) -> Row:
        """The current row of a partition, after any pending change; created if missing."""
        for _ in range(_TRIES):
            row = self._wire.one(self._wire.serial(_READ, partition))
            if row is not None:
                return row
            with suppress(OutcomeUnknown):
                cql = (
                    "INSERT INTO partitions (partition, epoch, owner, expires_s, commit_no, at_s, "
                    "keep_s, arrivals, events) VALUES (?, 0, '', 0, 0, 0, 0, 0, 0) IF NOT EXISTS"
                )
                self._wire.change(self._wire.bind(cql, partition))
        raise Unreachable(f"the row of partition {partition} could not be created; try again")

    def rows(self, partitions: Iterable[str], *, serial: bool = False) -> dict[str, Row]:
        """The committed rows of partitions; with `serial`, pending changes are finished first."""
        names = list(partitions)
        bind = self._wire.serial if serial else self._wire.bind
        results = self._wire.all([bind(_READ, name) for name in names])
        return {name: rows[0] for name, rows in zip(names, results, strict=True) if rows}

    def own_heads(self) -> dict[str, int]:
        """The last commit number of each partition that this instance has leased."""
        with self._lock:
            return {name: lease.commit_no for name, lease in self._held.items()}
