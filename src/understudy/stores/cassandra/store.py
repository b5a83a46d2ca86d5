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
from understudy.stores.cassandra.auditing import audit
from understudy.stores.cassandra.erasing import Eraser
from understudy.stores.cassandra.journal import Journal
from understudy.stores.cassandra.keeping import read_keeping
from understudy.stores.cassandra.known import STATICS, stated, tag_of
from understudy.stores.cassandra.lanes import Lanes
from understudy.stores.cassandra.options import read_options
from understudy.stores.cassandra.quarantine import Quarantine
from understudy.stores.cassandra.retiring import Retirer
from understudy.stores.cassandra.tables import check, identity
from understudy.stores.cassandra.tags import Tags
from understudy.stores.cassandra.tailing import Tailer
from understudy.stores.cassandra.turns import Turns
from understudy.stores.cassandra.wire import Row, Wire
from understudy.stores.cassandra.writing import Writer
from understudy.stores.view import info_of, matches

_PAGE = 256


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
        self.wire = wire
        """The way to the servers."""
        self._tags, self._journal, self._lanes = Tags(wire), Journal(wire), Lanes(wire, clock)
        self.turns = Turns(wire, self._lanes, self._journal, clock=clock)
        self._writer = Writer(wire, self._lanes, self._journal, tags=self._tags, turns=self.turns, clock=clock)
        self._tailer = Tailer(wire, self._lanes, self._journal, clock=clock, keeping=read_keeping(wire))
        self._retirer = Retirer(wire, self._lanes, clock=clock)
        self._quarantine = Quarantine(wire, self._journal, self._tags)
        self._eraser = Eraser(
            wire, self._journal, self.turns, writer=self._writer, tailer=self._tailer, quarantine=self._quarantine,
            clock=clock,
        )  # fmt: skip

    # --- the ExperienceStore port ---------------------------------------------------------------------------------

    def claim(self, partition: str, *, owner: str, ttl_s: float) -> Claim:
        self._check_open()
        claim = self._lanes.claim(partition, owner=owner, ttl_s=ttl_s)
        # Whoever begins to write also ends what a crash left of an erasure.
        self._eraser.finish()
        self._retirer.step()
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
        page: list[Row] = []
        for row in self._session_rows(wanted):
            page.append(row)
            if len(page) >= _PAGE:
                yield from self._infos(page, wanted)
                page = []
        yield from self._infos(page, wanted)

    def _session_rows(self, wanted: SessionFilter) -> Iterator[Row]:
        bind = self.wire.bind
        if wanted.player is None:
            yield from self.wire.scan(bind(f"SELECT DISTINCT {STATICS} FROM sessions"))
            return
        for one in self.wire.scan(bind("SELECT session FROM players WHERE player = ?", wanted.player)):
            row = self.wire.one(bind(f"SELECT {STATICS} FROM sessions WHERE session = ? LIMIT 1", one.session))
            if row is not None:
                yield row

    def _infos(self, rows: Sequence[Row], wanted: SessionFilter) -> Iterator[SessionInfo]:
        committed = self._tags.committed(tag for row in rows if (tag := tag_of(row)) is not None)
        for row in rows:
            tag = tag_of(row)
            found = None if tag is None else self._journal.up_to_date(row.session, stated(row, tag in committed))
            if found is not None and matches(found.game, found.state, wanted):
                yield info_of(row.session, found.game, found.state)

    def forget(self, player: bytes) -> int:
        """Erase a player: refused and hidden from the next moment on, deleted when this returns."""
        self._check_open()
        return self._eraser.forget(player)

    # --- the StoreAdmin port ----------------------------------------------------------------------------------------

    def audit(self) -> Audit:
        return summary(self.findings())

    def findings(self) -> Findings:
        """Everything a full check saw."""
        self._check_open()
        return audit(self.wire, self._lanes, self._journal, tailer=self._tailer, quarantine=self._quarantine)

    def quarantined(self, *, after_id: int = 0, limit: int = 1000) -> Sequence[Quarantined]:
        self._check_open()
        return self._quarantine.page(after_id=after_id, limit=limit)

    def quarantine(self, chunks: Sequence[tuple[uuid.UUID, int]], *, reason: str) -> int:
        self._check_open()
        return self._eraser.quarantine(chunks, reason=reason)

    def replay(self, ids: Sequence[int], candidates: Sequence[Candidate]) -> Receipt:
        self._check_open()
        return self._eraser.replay(ids, candidates)

    def expire(self, before_s: float) -> int:
        self._check_open()
        return self._eraser.expire(before_s)

    # --- what tells it from others, and the end ---------------------------------------------------------------------

    @property
    def identity(self) -> str:
        """What tells this store from every other one."""
        self._check_open()
        return identity(self.wire)

    @property
    def is_erasing(self) -> bool:
        """Whether something that was erased may still have bytes here, after a crash; the next claim ends it."""
        return self._eraser.is_erasing

    def close(self) -> None:
        if self.wire.is_closed:
            return
        with suppress(UnderstudyError):
            self._lanes.release()
        self.wire.close()

    def __enter__(self) -> "CassandraStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self.wire.is_closed:
            raise Closed("the store was closed")
