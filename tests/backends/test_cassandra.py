"""The store on a real Cassandra keeps the contracts of ExperienceStore and StoreAdmin."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.backends.keyspaces import Keyspace
from understudy.core.clock import Clock
from understudy.core.ports import FullStore
from understudy.testing.admin import StoreAdminContract
from understudy.testing.stores import StoreContract


@pytest.fixture(scope="module")
def keyspace(cassandra_server: Any) -> Iterator[Keyspace]:
    made = Keyspace(cassandra_server, cassandra_server.credentials_file, "contract")
    yield made
    made.close()


class TestCassandraStore(StoreContract, StoreAdminContract):
    @pytest.fixture(autouse=True)
    def given(self, keyspace: Keyspace) -> None:
        self.keyspace = keyspace

    def make(self, clock: Clock) -> FullStore:
        self.keyspace.empty()
        return self.keyspace.open(clock)

    def reopen(self, store: FullStore, clock: Clock) -> FullStore:
        return self.keyspace.open(clock)
