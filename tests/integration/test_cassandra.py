"""The store on a real Cassandra fulfils the contracts of ExperienceStore and StoreAdmin."""

import pytest

from tests.integration.keyspaces import Keyspace
from understudy.core.clock import Clock
from understudy.experience.frame import Frame
from understudy.ports import FullStore
from understudy.stores.cassandra.commits import digest_of, erased_frame, frame_key
from understudy.stores.cassandra.store import CassandraStore
from understudy.testing.stores import StoreAdminContract, StoreContract

IS_QUICK = True


class TestCassandraStore(StoreContract, StoreAdminContract):
    @pytest.fixture(autouse=True)
    def given(self, module_keyspace: Keyspace) -> None:
        self.keyspace = module_keyspace

    def make(self, clock: Clock) -> FullStore:
        self.keyspace.empty()
        return self.keyspace.open(clock)

    def reopen(self, store: FullStore, clock: Clock) -> FullStore:
        return self.keyspace.open(clock)

    def damage(self, store: FullStore, frame: Frame) -> None:
        assert isinstance(store, CassandraStore)
        key = frame_key(frame.session.bytes, frame.chunk_no, digest_of(frame.encode()))
        store.wire.one(erased_frame(store.wire, key))
