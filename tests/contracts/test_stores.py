"""The local store passes the contracts of ExperienceStore and StoreAdmin."""

from pathlib import Path

import pytest

from understudy.core.clock import Clock
from understudy.ports import FullStore
from understudy.stores.local import LocalStore
from understudy.testing.stores import StoreAdminContract, StoreContract


class TestLocalStore(StoreContract, StoreAdminContract):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path
        self.made = 0

    def make(self, clock: Clock) -> FullStore:
        self.made += 1
        return self.reopen(None, clock)

    def reopen(self, store: FullStore | None, clock: Clock) -> FullStore:
        return LocalStore(self.path / f"store-{self.made}", clock=clock)

    def settle(self, store: FullStore) -> None:
        assert isinstance(store, LocalStore)
        store.compact()
