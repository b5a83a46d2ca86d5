"""Stores on a real Cassandra for tests: one keyspace a module, emptied for every store, since making tables is slow."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from understudy.core.clock import Clock
from understudy.core.game import GameSpec
from understudy.core.location import Location, parse_location
from understudy.stores.cassandra import CassandraStore, init, open_cassandra
from understudy.stores.cassandra.options import read_options
from understudy.stores.cassandra.tables import TABLES, use
from understudy.stores.cassandra.wire import Wire
from understudy.testing.desk import SPEC


class AnyServer(Protocol):
    """Where a Cassandra is, ours or somebody else's."""

    @property
    def address(self) -> str: ...


class OneSpec:
    """Knows one game."""

    def spec(self, game: str, schema: str) -> GameSpec | None:
        return SPEC if (game, schema) == (SPEC.game, SPEC.schema) else None

    def knows(self, game: str) -> bool:
        return game == SPEC.game


class Keyspace:
    """A keyspace of a server, with tables that can be emptied."""

    def __init__(self, server: AnyServer, credentials: object, name: str, *, options: str = "") -> None:
        self.url = f"cassandra://{server.address}/{name}?credentials={credentials}&replication=1{options}"
        init(self.location)
        self._wire = Wire(read_options(self.location))
        use(self._wire)

    @property
    def location(self) -> Location:
        return parse_location(self.url)

    def empty(self) -> None:
        """Take every row away, and make the store anew."""
        names = [name for name in TABLES if name != "meta"]
        futures = [self._wire.session.execute_async(f"TRUNCATE {name}", timeout=120.0) for name in names]
        for future in futures:
            future.result()

    def open(self, clock: Clock | None = None, *, options: str = "") -> CassandraStore:
        return open_cassandra(parse_location(self.url + options), specs=OneSpec(), clock=clock)

    @contextmanager
    def opened(self, clock: Clock | None = None, *, options: str = "") -> Iterator[CassandraStore]:
        with self.open(clock, options=options) as store:
            yield store

    def close(self) -> None:
        self._wire.close()
