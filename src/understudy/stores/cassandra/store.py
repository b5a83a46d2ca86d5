"""The store on Cassandra: chunks, commits and sessions in tables, each commit made to count by one compare-and-set."""

import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress

from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import Closed, UnderstudyError
from understudy.core.location import Location
from understudy.core.ports import (
    Audit,
    Candidate,
    Claim,
    Cursor,
    Quarantined,
    Receipt,
    SessionFilter,
    SessionInfo,
    Specs,
    Tail,
    WriteBatch,
)
from understudy.stores.audit import Findings, summary
from understudy.stores.cassandra.admin import Admin, AdminLock
from understudy.stores.cassandra.auditing import audit
from understudy.stores.cassandra.keyspace import check, identity, numbers
from understudy.stores.cassandra.known import STATE, Journal, stated
from understudy.stores.cassandra.options import read_options
from understudy.stores.cassandra.partitions import Partitions
from understudy.stores.cassandra.tailing import Tailer
from understudy.stores.cassandra.wire import Row, Wire
from understudy.stores.cassandra.writing import Writer
from understudy.stores.view import info_of, matches


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
        self._journal = Journal(wire)
        self._partitions = Partitions(wire, clock)
        journal = self._journal
        partitions = self._partitions
        self.admin_lock = AdminLock(wire=wire, partitions=partitions, journal=journal, clock=clock, keep_s=keep_s)
        self._admin = Admin(wire=wire, journal=journal, lock=self.admin_lock, clock=clock, keep_s=keep_s)
        self._writer = Writer(
            wire=wire, partitions=partitions, journal=journal, admin=self.admin_lock, clock=clock, keep_s=keep_s
        )
        has_ttl = "ever_had_ttl" in facts
        self._tailer = Tailer(wire=wire, partitions=partitions, journal=journal, clock=clock, has_ttl=has_ttl)

    # --- the ExperienceStore port ---------------------------------------------------------------------------------

    def claim(self, partition: str, *, owner: str, ttl_s: float) -> Claim:
        self._check_open()
        claim = self._partitions.claim(partition, owner=owner, ttl_s=ttl_s)
        self._admin.finish()  # what a crash left of an erasure
        return claim

    def write(self, batch: WriteBatch) -> Receipt:
        self._check_open()
        return self._writer.write(batch)

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
            if found is not None and matches(found.game, found.state, wanted):
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
        """Everything a full check saw."""
        self._check_open()
        return audit(self.wire, self._partitions, self._journal, tailer=self._tailer, admin=self._admin)

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
