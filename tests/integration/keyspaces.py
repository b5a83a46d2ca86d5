"""Stores on a real Cassandra: few keyspaces, emptied for every store, as creating them is slow."""

import time
from collections.abc import Callable
from typing import Any, Protocol

from understudy.core.clock import Clock
from understudy.core.location import Location, parse_location
from understudy.experience.game import GameSpec
from understudy.stores.cassandra import CassandraStore, init, open_cassandra
from understudy.stores.cassandra.keyspace import TABLES, check
from understudy.stores.cassandra.wire import Send, Wire, read_options
from understudy.testing.store_harness import SPEC

_BACK_S = 60.0
"""How long a server that was killed may take to be found again."""


class AnyServer(Protocol):
    """The location of a Cassandra, ours or another."""

    @property
    def address(self) -> str: ...


class OneSpec:
    """Knows one game."""

    def spec(self, game: str, schema: str) -> GameSpec | None:
        return SPEC if (game, schema) == (SPEC.game, SPEC.schema) else None

    def has_game(self, game: str) -> bool:
        return game == SPEC.game


def elsewhere(url: str, keyspace: str) -> str:
    """The same address with another keyspace."""
    return url.replace(f"/{parse_location(url).path}?", f"/{keyspace}?")


class Keyspace:
    """A keyspace of a server, with tables that can be emptied."""

    def __init__(
        self,
        server: AnyServer,
        credentials: object,
        name: str,
        *,
        replication: int = 1,
        options: str = "",
        is_durable: bool = True,
    ) -> None:
        """A non-durable keyspace is emptied ten times as fast, and lost if its server is killed."""
        self.place = f"cassandra://{server.address}/{name}"
        self.url = f"{self.place}?credentials={credentials}&replication={replication}{options}"
        init(self.location)
        self._wire = Wire(read_options(self.location))
        check(self._wire)
        if not is_durable:
            self.run(f"ALTER KEYSPACE {name} WITH durable_writes = false")

    @property
    def location(self) -> Location:
        return parse_location(self.url)

    def empty(self) -> None:
        """Take every row away, and make the store anew."""
        from cassandra.cluster import NoHostAvailable

        give_up_s = time.monotonic() + _BACK_S
        while True:
            try:
                return self._truncate()
            except NoHostAvailable:
                # The test before may have killed the server: this connection finds out later than
                # it is back.
                if time.monotonic() > give_up_s:
                    raise
                time.sleep(0.5)

    def _truncate(self) -> None:
        session = self._wire.session
        qualified = self._wire.qualified
        names = [name for name in TABLES if name != "meta"]
        # Where nothing was ever claimed, nothing was written. The release of a claim may come
        # behind the first try.
        while self.rows("SELECT partition FROM partitions LIMIT 1"):
            for future in [
                session.execute_async(qualified(f"TRUNCATE {name}"), timeout=120.0)
                for name in names
            ]:
                future.result()

    def open(
        self,
        clock: Clock | None = None,
        *,
        options: str = "",
        between: Callable[[Send], Send] | None = None,
    ) -> CassandraStore:
        """A store on it; `between` wraps the requests to its server once it is open."""
        if between is None:
            return open_cassandra(parse_location(self.url + options), specs=OneSpec(), clock=clock)
        wire = Wire(read_options(parse_location(self.url + options)))
        check(wire)
        store = CassandraStore(wire, clock=clock)
        wire.send = between(wire.send)
        return store

    def keep(self, ttl_s: int) -> None:
        """Set the TTL of stores opened from now on, without waiting for a table change."""
        self.rows(f"UPDATE meta SET number = {ttl_s} WHERE name = 'ttl_s'")
        if ttl_s:
            self.rows("UPDATE meta SET number = 1 WHERE name = 'ever_had_ttl'")
        else:
            self.rows("DELETE FROM meta WHERE name = 'ever_had_ttl'")

    @staticmethod
    def open_at(url: str) -> CassandraStore:
        return open_cassandra(parse_location(url), specs=OneSpec())

    def rows(self, query: str) -> list[Any]:
        """What the tables really hold."""
        return list(self._wire.session.execute(self._wire.qualified(query)))

    def run(self, cql: str) -> list[Any]:
        """The answer to a statement that names its keyspace itself."""
        return list(self._wire.session.execute(cql, timeout=120.0))

    def close(self) -> None:
        self._wire.close()
