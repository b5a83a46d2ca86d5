"""The local store passes the contracts of ExperienceStore and StoreAdmin."""

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest

from understudy.core.clock import Clock
from understudy.experience.frame import Frame
from understudy.ports import FullStore
from understudy.stores.database import FILE_NAME
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

    def files(self, store: FullStore) -> Iterable[Path]:
        assert isinstance(store, LocalStore)
        return [path for path in store.folder.rglob("*") if path.is_file()]

    def damage(self, store: FullStore, frame: Frame) -> None:
        assert isinstance(store, LocalStore)
        with closing(sqlite3.connect(store.folder / FILE_NAME)) as db, db:
            zeroed = "UPDATE bodies SET raw = zeroblob(length(raw)) WHERE raw = ?"
            assert db.execute(zeroed, (frame.encode(),)).rowcount == 1
