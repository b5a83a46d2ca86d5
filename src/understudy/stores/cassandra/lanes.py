"""Lanes: who may write a partition, and how far it is committed; changed by compare-and-set alone."""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from uuid import UUID

from understudy.core.clock import Clock
from understudy.core.errors import ClaimLost, ConfigError, UnderstudyError, Unreachable
from understudy.core.ports import Claim, Position
from understudy.stores.cassandra.facts import ADMIN, Tag
from understudy.stores.cassandra.known import Stated
from understudy.stores.cassandra.rows import head_row
from understudy.stores.cassandra.stamps import Stamps, draw
from understudy.stores.cassandra.wire import Row, Unsure, Wire

_READ = "SELECT * FROM lanes WHERE partition = ?"
_TRIES = 100
_MOST_STATES = 4096


class Outdated(Exception):
    """An admin commit takes place: what was decided without it does not count."""

    def __init__(self, events: int) -> None:
        super().__init__(f"admin commit {events}")
        self.events = events


@dataclass(slots=True)
class Lane:
    """A partition this instance holds, as it was last committed."""

    partition: str
    epoch: int
    ttl_s: float
    commit_no: int
    attempt: int
    arrivals: int
    events: int
    """Admin commits that must be known before anything is decided."""
    stamps: Stamps | None = None
    """Drawn by the first attempt that knows those admin commits: above whatever an erasure before it deletes."""
    states: OrderedDict[UUID, Stated] = field(default_factory=OrderedDict)
    """The sessions written last, as committed."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def remember(self, states: Iterable[tuple[UUID, Stated]]) -> None:
        for session, stated in states:
            self.states[session] = stated
            self.states.move_to_end(session)
        while len(self.states) > _MOST_STATES:
            self.states.popitem(last=False)


class Lanes:
    """Claims of this instance, and the committed heads of everybody's."""

    def __init__(self, wire: Wire, clock: Clock) -> None:
        self._wire, self._clock = wire, clock
        self._held: dict[str, Lane] = {}
        self._lock = threading.Lock()

    # --- claims -------------------------------------------------------------------------------------------------

    def claim(self, partition: str, *, owner: str, ttl_s: float) -> Claim:
        """A new epoch; ClaimLost while another owner's claim is fresh."""
        if partition.startswith("~"):
            raise ConfigError(f"partition {partition!r} begins with ~, which the store keeps for itself")
        wire = self._wire
        epoch = draw(wire, self._clock)
        for _ in range(_TRIES):
            row = self.row(partition) or self._made(partition)
            now_s = self._clock.now()
            if row.owner not in ("", None, owner) and row.expires_s > now_s:
                left_s = row.expires_s - now_s
                raise ClaimLost(
                    f"partition {partition} is claimed by {row.owner} for {left_s:.1f} s more", retry_after_s=left_s
                )
            if row.epoch >= epoch:
                epoch = draw(wire, self._clock)
                continue
            try:
                answer = wire.change(wire.bind(
                    "UPDATE lanes SET epoch = ?, owner = ?, ttl_s = ?, expires_s = ? WHERE partition = ? IF epoch = ? "
                    "AND expires_s = ?", epoch, owner, ttl_s, now_s + ttl_s, partition, row.epoch, row.expires_s,
                ))  # fmt: skip
                if answer.applied:
                    break
            except Unsure:
                if (self.row(partition) or row).epoch == epoch:
                    break
        else:
            raise ClaimLost(f"partition {partition} is claimed by many at once; try again", retry_after_s=1.0)
        return self._take(partition, epoch, ttl_s)

    def _take(self, partition: str, epoch: int, ttl_s: float) -> Claim:
        # First the claim, then the name, then the look at admin commits: one that goes on either finds the name or is
        # found here. By the epoch as its stamp, the name outlives the end of this lane at an earlier one.
        head = self._own_row(partition, epoch).commit_no
        self._wire.one(head_row(self._wire, partition, head, epoch))
        admin = self.row(ADMIN)
        events = 0 if admin is None else max(admin.events, admin.commit_no)
        self.fence([partition], events)
        row = self._own_row(partition, epoch)
        lane = Lane(partition, epoch, ttl_s, row.commit_no, row.attempt, row.arrivals, row.events)
        with self._lock:
            self._held[partition] = lane
        return Claim(partition, epoch, None if row.position is None else Position(row.position))

    def _own_row(self, partition: str, epoch: int) -> Row:
        """A lane as it is now; ClaimLost when it was claimed since."""
        row = self.row(partition)
        if row is None or row.epoch != epoch:
            raise ClaimLost(f"epoch {epoch} of partition {partition} is stale")
        return row

    def held(self, partition: str, epoch: int) -> Lane:
        """The lane of a claim that this instance took; ClaimLost otherwise."""
        lane = self._held.get(partition)
        if lane is None or lane.epoch != epoch:
            raise ClaimLost(f"epoch {epoch} of partition {partition} is stale, or was claimed by another instance")
        return lane

    def drop(self, lane: Lane) -> None:
        with self._lock:
            if self._held.get(lane.partition) is lane:
                del self._held[lane.partition]

    def release(self) -> None:
        """Let others claim at once what this instance holds; when Cassandra does not answer, claims run out."""
        with suppress(UnderstudyError, Unsure):
            for lane in list(self._held.values()):
                self.drop(lane)
                self._wire.change(self._wire.bind(
                    "UPDATE lanes SET owner = '', expires_s = 0 WHERE partition = ? IF epoch = ?", lane.partition,
                    lane.epoch,
                ))  # fmt: skip

    def reserve(self, lane: Lane, count: int, *, above: int = 0) -> int:
        """This many stamps in a row for one attempt, above everything the attempt overwrites.

        ClaimLost or Outdated when the lane is no longer as it was.
        """
        stamps = lane.stamps
        if stamps is None or stamps.is_spent(count, int(self._clock.now() * 1e6), above=above):
            stamps = Stamps(draw(self._wire, self._clock))
            # Asked after the draw: whoever claims or erases from now on draws above it.
            try:
                row = self._own_row(lane.partition, lane.epoch)
            except ClaimLost:
                self.drop(lane)
                raise
            if row.events != lane.events:
                raise Outdated(row.events)
            lane.stamps = stamps
        return stamps.take(count)

    # --- committing -----------------------------------------------------------------------------------------------

    def commit(self, lane: Lane, tag: Tag, *, n_arrivals: int, position: str | None) -> None:
        """Make one attempt count; ClaimLost, Outdated or Unreachable when it does not."""
        wire, expires_s = self._wire, self._clock.now() + lane.ttl_s
        arrivals = lane.arrivals + n_arrivals
        sets = "commit_no = ?, attempt = ?, arrivals = ?, expires_s = ?"
        values: list[object] = [tag.commit_no, tag.attempt, arrivals, expires_s]
        if position is not None:
            sets += ", position = ?"
            values.append(position)
        statement = wire.bind(
            f"UPDATE lanes SET {sets} WHERE partition = ? "
            "IF epoch = ? AND commit_no = ? AND attempt = ? AND events = ?",
            *values, lane.partition, lane.epoch, lane.commit_no, lane.attempt, lane.events,
        )  # fmt: skip
        answer = self._answer(lane, statement)
        if not answer.applied:
            # Without a row there is no epoch, either: somebody emptied the table.
            if getattr(answer, "epoch", None) != lane.epoch:
                self.drop(lane)
                raise ClaimLost(f"epoch {lane.epoch} of partition {lane.partition} is stale")
            is_ours = tag.attempt != lane.attempt and (answer.commit_no, answer.attempt) == (tag.commit_no, tag.attempt)
            if not is_ours:
                if answer.events != lane.events:
                    raise Outdated(answer.events)
                self.drop(lane)
                raise ClaimLost(f"partition {lane.partition} was written by somebody else under epoch {lane.epoch}")
        lane.commit_no, lane.attempt, lane.arrivals = tag.commit_no, tag.attempt, arrivals

    def _answer(self, lane: Lane, statement: object) -> Row:
        """The answer to a commit, asked for until there is one: the same attempt may be committed again and again."""
        pause_s, waited_s = 0.05, 0.0
        while True:
            try:
                return self._wire.change(statement)
            except Unsure as error:
                if waited_s > self._wire.options.patience_s:
                    # It may happen yet. A new claim makes sure of one or the other.
                    self.drop(lane)
                    raise Unreachable(
                        f"Cassandra did not say whether a commit of partition {lane.partition} counts ({error}); "
                        "claim it again when Cassandra is back"
                    ) from error
                self._wire.wait(pause_s)
                waited_s += pause_s
                pause_s = min(2 * pause_s, 2.0)

    def fence(self, partitions: Iterable[str], events: int) -> None:
        """From now on no commit of these partitions counts that was decided before an admin commit of this number."""
        left = list(partitions)
        for _ in range(_TRIES):
            if not left:
                return
            statements = [
                self._wire.bind("UPDATE lanes SET events = ? WHERE partition = ? IF events < ?", events, name, events)
                for name in left
            ]
            # Repeating one is no harm: the number only rises.
            self._wire.all(statements)
            rows = {name: self.row(name) for name in left}
            left = [name for name, row in rows.items() if row is not None and row.events < events]
        raise Unreachable(f"partitions {', '.join(left)} could not be fenced; try again")

    # --- looking ----------------------------------------------------------------------------------------------------

    def row(self, partition: str) -> Row | None:
        """A lane as it is now, whatever was left half way."""
        return self._wire.one(self._wire.serial(_READ, partition))

    def rows(self, partitions: Iterable[str]) -> dict[str, Row]:
        """Lanes as they are committed."""
        names = list(partitions)
        found = self._wire.all([self._wire.bind(_READ, name) for name in names])
        return {name: rows[0] for name, rows in zip(names, found, strict=True) if rows}

    def own_heads(self) -> dict[str, int]:
        """How far the lanes of this instance are committed."""
        with self._lock:
            return {name: lane.commit_no for name, lane in self._held.items()}

    def made_admin(self) -> Row:
        """The admin lane."""
        return self.row(ADMIN) or self._made(ADMIN)

    def _made(self, partition: str) -> Row:
        with suppress(Unsure):
            self._wire.change(self._wire.bind(
                "INSERT INTO lanes (partition, epoch, owner, ttl_s, expires_s, commit_no, attempt, arrivals, events) "
                "VALUES (?, 0, '', 0, 0, 0, 0, 0, 0) IF NOT EXISTS", partition,
            ))  # fmt: skip
        row = self.row(partition)
        if row is None:
            raise Unreachable(f"partition {partition} could not be claimed; try again")
        return row
