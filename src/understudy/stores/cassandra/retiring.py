"""Retiring lanes: partitions that nobody has claimed for long are listed apart, and asked no more.

What they hold is read as before, up to the last commit, which no owner of before can pass. A claim brings a lane back.
"""

import time

import structlog

from understudy.core.ages import DAY_S
from understudy.core.clock import Clock
from understudy.core.errors import UnderstudyError
from understudy.stores.cassandra.facts import ADMIN
from understudy.stores.cassandra.lanes import Lanes
from understudy.stores.cassandra.rows import ended_row
from understudy.stores.cassandra.stamps import draw
from understudy.stores.cassandra.wire import Row, Unsure, Wire

_log = structlog.get_logger("understudy.store")
IDLE_S = 7 * DAY_S
"""How long nobody has claimed a partition or stored anything of it; whom that hits too early claims again."""
_EVERY_S = 3600.0


class Retirer:
    """Looks for idle lanes now and then."""

    def __init__(self, wire: Wire, lanes: Lanes, *, clock: Clock) -> None:
        self._wire, self._lanes, self._clock = wire, lanes, clock
        self._next_s = float("-inf")

    def step(self) -> None:
        """Retire what is idle; does nothing within an hour of the last time."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _EVERY_S
        try:
            self._look()
        except (UnderstudyError, Unsure) as error:
            _log.warning("partitions_not_retired", error=str(error), next="it is tried again in an hour")

    def _look(self) -> None:
        names = [row.name for row in self._wire.scan(self._wire.bind("SELECT name FROM registry WHERE kind = 'head'"))]
        mine, now_s = self._lanes.own_heads(), self._clock.now()
        rows = self._lanes.rows(name for name in names if not name.startswith(ADMIN[0]) and name not in mine)
        if idle := [row for row in rows.values() if _is_idle(row, now_s)]:
            stamp = draw(self._wire, self._clock)
            for row in idle:
                self._retire(row, stamp)

    def _retire(self, row: Row, stamp: int) -> None:
        """End a lane as it was seen, by a new epoch; one that was claimed or written meanwhile stays as it is."""
        wire = self._wire
        try:
            is_ended = wire.change(wire.bind(
                "UPDATE lanes SET epoch = ?, owner = '', expires_s = 0 WHERE partition = ? IF epoch = ? AND "
                "commit_no = ? AND expires_s = ?", stamp, row.partition, row.epoch, row.commit_no, row.expires_s,
            )).applied  # fmt: skip
        except Unsure:
            now = self._lanes.row(row.partition)
            is_ended = now is not None and now.epoch == stamp
        if is_ended:
            # Never in neither list. Whoever claims it from now on lists it by a higher stamp.
            wire.one(ended_row(wire, row.partition, row.commit_no, stamp))
            wire.one(wire.bind(
                "DELETE FROM registry USING TIMESTAMP ? WHERE kind = 'head' AND name = ?", stamp, row.partition
            ))  # fmt: skip


def _is_idle(row: Row, now_s: float) -> bool:
    """By stamps, which are near the time in microseconds: of the last claim and of the last commit."""
    return bool(row.expires_s < now_s and max(row.epoch, row.attempt) / 1e6 < now_s - IDLE_S)
