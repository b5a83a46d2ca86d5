"""A window holds what the store it follows holds: each step once, after kills, and without what was taken away."""

from pathlib import Path

import pytest

from understudy.core.ports import SessionFilter, Stored
from understudy.stores.local import LocalStore
from understudy.stores.window import Window
from understudy.testing.clock import ManualClock
from understudy.testing.desk import Desk, StoreFactory
from understudy.testing.samples import OTHER_PLAYER, PLAYER


class _Factory(StoreFactory):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def make(self, clock):
        return LocalStore(self._folder / "there", clock=clock)


class _Crash(Exception):
    pass


class _Specs:
    def spec(self, game: str, schema: str) -> None:
        return None

    def knows(self, game: str) -> bool:
        return True


@pytest.fixture
def factory(tmp_path: Path) -> _Factory:
    return _Factory(tmp_path)


@pytest.fixture
def there(factory: _Factory) -> Desk:
    return factory.desk()


def window(there: Desk, folder: Path, clock: ManualClock | None = None, page: int = 4) -> Window:
    return Window(there.store, folder / "here", specs=_Specs(), clock=clock or there.clock, page=page)


def follow(one: Window) -> None:
    while one.step():
        pass


def chunks(one: Window) -> list[object]:
    items = one.local.tail(None, max_items=1000, wait_s=0.0).items
    return [item.chunk for item in items if isinstance(item, Stored) and item.chunk is not None]


def test_it_holds_what_the_store_holds_in_its_order(there: Desk, factory: _Factory, tmp_path: Path):
    one, other = factory.chunks(7), factory.chunks(5)
    there.put(*one[:3])
    there.put(*other, player=OTHER_PLAYER)
    there.write([there.close(other[0].meta.session, 5)])
    there.put(*one[3:])
    with window(there, tmp_path) as copy:
        follow(copy)
        assert chunks(copy) == [*one[:3], *other, *one[3:]]
        infos = {info.session: info for info in copy.local.sessions(SessionFilter())}
        assert infos == {info.session: info for info in there.store.sessions(SessionFilter())}
        assert copy.steps == sum(chunk.meta.n_steps for chunk in [*one, *other])


def test_opened_again_it_goes_on_where_it_was(there: Desk, factory: _Factory, tmp_path: Path):
    sent = factory.chunks(10)
    there.put(*sent[:6])
    with window(there, tmp_path) as copy:
        copy.step()
    there.put(*sent[6:])
    with window(there, tmp_path) as copy:
        follow(copy)
        assert chunks(copy) == sent
        assert copy.steps == sum(chunk.meta.n_steps for chunk in sent[4:]), "what was here is not taken again"
        assert copy.local.audit().duplicate_chunks == 0


def test_a_crash_before_the_cursor_is_kept_stores_nothing_twice(
    there: Desk, factory: _Factory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sent = factory.chunks(4)
    there.put(*sent[:2])
    there.store.forget(OTHER_PLAYER)
    there.put(*sent[2:])
    copy = window(there, tmp_path, page=100)
    with monkeypatch.context() as patch:
        patch.setattr(copy, "_let_go", lambda _: (_ for _ in ()).throw(_Crash))
        with pytest.raises(_Crash):
            copy.step()
    assert chunks(copy) == sent[:2], "what came before the event is here, its cursor is not"
    copy.close()
    with window(there, tmp_path) as copy:
        follow(copy)
        assert chunks(copy) == sent
        assert copy.local.audit().duplicate_chunks == 0


def test_a_forgotten_player_goes_here_as_well(there: Desk, factory: _Factory, tmp_path: Path):
    mine, theirs = factory.chunks(3), factory.chunks(3)
    there.put(*mine)
    there.put(*theirs, player=OTHER_PLAYER)
    with window(there, tmp_path) as copy:
        follow(copy)
        there.clock.advance(5.0)
        there.store.forget(PLAYER)
        follow(copy)
        assert chunks(copy) == theirs
    with window(there, tmp_path / "late") as late:
        follow(late)
        assert chunks(late) == theirs, "a window that comes later never sees them"


def test_quarantined_chunks_leave(there: Desk, factory: _Factory, tmp_path: Path):
    sent = factory.chunks(3)
    there.put(*sent)
    with window(there, tmp_path) as copy:
        follow(copy)
        there.store.quarantine([sent[1].meta.id], reason="not_finite")
        follow(copy)
        assert chunks(copy) == [sent[0], sent[2]]


def test_steps_stay_as_long_as_they_may(there: Desk, factory: _Factory, tmp_path: Path):
    old, new = factory.chunks(2), factory.chunks(2)
    there.put(*old)
    with Window(there.store, tmp_path / "here", specs=_Specs(), keep_s=100.0, clock=there.clock) as copy:
        follow(copy)
        there.clock.advance(1000.0)
        there.put(*new)
        follow(copy)
        copy.step()
        assert copy.local.audit().expired_chunks == 2
        assert chunks(copy) == new
