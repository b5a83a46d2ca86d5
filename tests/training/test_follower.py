"""One pass over a store serves all of its readers, and none gets an item twice or not at all."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from tests.training.test_from_store import GAME, played
from understudy.core.errors import ConfigError
from understudy.ports import Forgotten, Stored
from understudy.stores.view import StoreView
from understudy.testing.clock import ManualClock
from understudy.training.follower import (
    ReaderPosition,
    StoreFollower,
    position_from_json,
    stored_chunks,
)
from understudy.training.run_store import RunStore


def add(store: Path, *numbers: int) -> None:
    with contextlib.closing(RunStore(store, GAME, clock=ManualClock())) as history:
        history.add([played(number) for number in numbers])
        history.flush()


class Notes:
    """Writes down the chunk numbers it gets; refuses one of them."""

    def __init__(self, position: ReaderPosition | None = None, refuses: int = -1) -> None:
        self.position = position or ReaderPosition()
        self.numbers: list[int] = []
        self.refuses = refuses

    def read(self, item: Stored | Forgotten) -> None:
        assert isinstance(item, Stored)
        assert item.chunk is not None
        if item.chunk.meta.chunk_no == self.refuses:
            raise ConfigError("not this one")
        self.numbers.append(item.chunk.meta.chunk_no)


def catch_up(follower: StoreFollower, reader: Notes, **how: Any) -> None:
    while follower.follow(reader, **how):
        pass


def test_a_page_is_read_once_for_all_readers_at_its_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    add(tmp_path, 0, 1, 2)
    follower = StoreFollower(tmp_path)
    one = Notes()
    other = Notes()
    read = list[int]()
    tail = StoreView.tail

    def counted(view: StoreView, cursor: Any, **how: Any) -> Any:
        page = tail(view, cursor, **how)
        read.append(len(page.items))
        return page

    monkeypatch.setattr(StoreView, "tail", counted)
    follower.join(one)
    follower.join(other)
    for reader in (one, other):
        catch_up(follower, reader)
    assert one.numbers == other.numbers == [0, 1, 2]
    assert sum(read) == 3
    follower.leave(one)
    follower.leave(other)


class Slower(Notes):
    """For each chunk that it reads, another one is recorded."""

    def __init__(self, store: Path) -> None:
        super().__init__()
        self.store = store

    def read(self, item: Stored | Forgotten) -> None:
        super().read(item)
        add(self.store, len(self.numbers) + 1)


def test_a_reader_ends_also_where_more_is_recorded_than_it_reads(tmp_path: Path):
    add(tmp_path, 0, 1)
    follower = StoreFollower(tmp_path)
    one = Slower(tmp_path)
    follower.join(one)
    assert follower.catch_up(one, max_items=1)
    assert one.numbers == [0, 1]
    assert follower.catch_up(one, max_items=1, max_s=0.0)
    assert one.numbers == [0, 1, 2]
    follower.leave(one)


def test_a_reader_stops_after_the_page_in_which_its_time_is_over(tmp_path: Path):
    clock = ManualClock()

    class Slow(Notes):
        def read(self, item: Stored | Forgotten) -> None:
            super().read(item)
            clock.advance(1.0)

    add(tmp_path, 0, 1, 2, 3, 4)
    follower = StoreFollower(tmp_path, clock=clock)
    one = Slow()
    follower.join(one)
    assert follower.catch_up(one, max_items=1, max_s=2.5)
    assert one.numbers == [0, 1, 2]
    follower.leave(one)


def test_chunks_are_looked_for_up_to_where_the_store_ends_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One of them was erased, and more is recorded than is read."""
    add(tmp_path, 0, 1)
    tail = StoreView.tail
    pages = list[int]()

    def growing(view: StoreView, cursor: Any, **how: Any) -> Any:
        pages.append(len(pages) + 2)
        assert len(pages) < 9
        add(tmp_path, pages[-1])
        return tail(view, cursor, **{**how, "max_items": 1})

    monkeypatch.setattr(StoreView, "tail", growing)
    with contextlib.closing(StoreView(tmp_path)) as view:
        session = played(0).meta.session
        assert stored_chunks(view, {(session, 1), (session, 99)}).keys() == {(session, 1)}


@pytest.mark.parametrize("max_items", [1, 2, 100])
def test_a_later_reader_catches_up_and_no_item_is_read_twice(tmp_path: Path, max_items: int):
    add(tmp_path, 0, 1, 2)
    follower = StoreFollower(tmp_path)
    one = Notes()
    follower.join(one)
    follower.follow(one, max_items=max_items)
    late = Notes()
    follower.join(late)
    catch_up(follower, late, max_items=2)
    catch_up(follower, one, max_items=max_items)
    add(tmp_path, 3, 4)
    catch_up(follower, one, max_items=max_items)
    catch_up(follower, late)
    assert one.numbers == late.numbers == [0, 1, 2, 3, 4]
    resumed = Notes(position_from_json(one.position.to_json()))
    follower.join(resumed)
    add(tmp_path, 5)
    catch_up(follower, late)
    assert resumed.numbers == [5]
    for reader in (one, late, resumed):
        follower.leave(reader)


def test_an_error_of_one_reader_is_raised_to_that_reader_only(tmp_path: Path):
    add(tmp_path, 0, 1, 2)
    follower = StoreFollower(tmp_path)
    one = Notes()
    fails = Notes(refuses=1)
    follower.join(one)
    follower.join(fails)
    catch_up(follower, one)
    assert (one.numbers, fails.numbers) == ([0, 1, 2], [0])
    with pytest.raises(ConfigError, match="not this one"):
        follower.follow(fails)
    fails.refuses = -1
    catch_up(follower, fails)
    assert fails.numbers == [0, 1, 2]
    follower.leave(one)
    follower.leave(fails)
