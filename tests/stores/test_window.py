"""A window is a complete local copy of another store, without repeated or removed chunks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from understudy.core.errors import ConfigError, Unreachable
from understudy.core.names import new_session
from understudy.experience.chunk import Chunk
from understudy.ports import Cursor, SessionFilter, Stored, Tail
from understudy.stores.local import LocalStore
from understudy.stores.window import Window
from understudy.testing.samples import OTHER_PLAYER, PLAYER, random_session
from understudy.testing.store_harness import SPEC, StoreHarness


def opened(harness: StoreHarness, folder: Path, *, max_steps: int | None = None) -> Window:
    return Window(harness.store, folder / "window", clock=harness.clock, max_steps=max_steps)


def follow(window: Window) -> None:
    while window.step():
        pass


def chunks_in(store: LocalStore) -> list[Chunk]:
    found: list[Chunk] = []
    cursor: Cursor | None = None
    while items := (page := store.tail(cursor, max_items=100, wait_s=0.0)).items:
        found += [
            item.chunk for item in items if isinstance(item, Stored) and item.chunk is not None
        ]
        cursor = page.cursor
    return found


def session(rng: np.random.Generator, count: int) -> list[Chunk]:
    return random_session(SPEC, rng, n_chunks=count)


def test_a_window_has_the_same_chunks_as_the_remote_store(
    harness: StoreHarness, tmp_path: Path, rng: np.random.Generator
) -> None:
    chunks = session(rng, 5)
    harness.put(*chunks)
    harness.write([harness.close_frame(chunks[0].meta.session, 5)])
    with opened(harness, tmp_path) as window:
        follow(window)
        assert chunks_in(window.local) == chunks
        there, here = (
            list(store.sessions(SessionFilter())) for store in (harness.store, window.local)
        )
        assert there == here
        audit = window.local.audit()
        assert (audit.chunks, audit.duplicate_chunks, audit.gap_chunks, list(audit.corrupt)) == (
            5,
            0,
            0,
            [],
        )


def test_a_window_resumes_at_its_cursor(
    harness: StoreHarness, tmp_path: Path, rng: np.random.Generator
) -> None:
    sent: list[Chunk] = []
    for _ in range(4):
        chunks = session(rng, 3)
        harness.put(*chunks)
        sent += chunks
        with opened(harness, tmp_path) as window:
            follow(window)
            assert window.items == 3, "nothing is read a second time"
            assert chunks_in(window.local) == sent


class _Dies(Exception):
    pass


class _Torn:
    """A remote store whose reader dies with a page that is partly applied."""

    def __init__(self, store: LocalStore, page: int) -> None:
        self._store = store
        self._page = page

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def tail(self, cursor: Cursor | None, *, max_items: int, wait_s: float) -> Tail:
        page = self._store.tail(cursor, max_items=self._page, wait_s=wait_s)
        return Tail(_Tearing(page.items), page.cursor) if page.items else page


class _Tearing(Sequence[Any]):
    def __init__(self, items: Sequence[object]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        if index >= len(self._items):
            raise _Dies
        return self._items[index]


def test_a_window_that_dies_during_a_page_copies_it_again(
    harness: StoreHarness, tmp_path: Path, rng: np.random.Generator
) -> None:
    mine = session(rng, 3)
    theirs = session(rng, 3)
    harness.put(*mine)
    harness.store.forget(PLAYER)
    harness.put(*theirs, player=OTHER_PLAYER)
    harness.store.quarantine([(theirs[0].meta.session, 1)], reason="guard")
    for _ in range(3):
        torn = Window(_Torn(harness.store, 100), tmp_path / "window", clock=harness.clock)  # type: ignore[arg-type]
        with torn, pytest.raises(_Dies):
            torn.step()
    with opened(harness, tmp_path) as window:
        follow(window)
        assert chunks_in(window.local) == [theirs[0], theirs[2]]
        assert window.local.audit().duplicate_chunks == 0


def test_chunks_removed_from_the_remote_are_removed_from_the_window(
    harness: StoreHarness, tmp_path: Path, rng: np.random.Generator
) -> None:
    mine = session(rng, 3)
    theirs = session(rng, 4)
    harness.put(*mine)
    harness.put(*theirs, player=OTHER_PLAYER)
    with opened(harness, tmp_path) as window:
        follow(window)
        harness.store.forget(PLAYER)
        harness.store.quarantine([(theirs[0].meta.session, 2)], reason="guard")
        follow(window)
        assert chunks_in(window.local) == [theirs[0], theirs[1], theirs[3]]
        assert {one.player for one in window.local.sessions(SessionFilter())} == {OTHER_PLAYER}
        (waiting,) = harness.store.quarantined()
        harness.store.replay([waiting.id], [harness.candidate(theirs[2], player=OTHER_PLAYER)])
        follow(window)
        assert chunks_in(window.local) == [theirs[0], theirs[1], theirs[3], theirs[2]], (
            "what comes back there, too"
        )


def test_chunks_replayed_at_the_remote_return_even_if_the_window_dies_meanwhile(
    harness: StoreHarness, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = session(rng, 3)
    harness.put(*chunks)
    with opened(harness, tmp_path) as window:
        follow(window)
        harness.store.quarantine([(chunks[0].meta.session, 1)], reason="guard")
        follow(window)
    (waiting,) = harness.store.quarantined()
    harness.store.replay([waiting.id], [harness.candidate(chunks[1])])

    def dies(*_: object) -> None:
        raise _Dies

    with opened(harness, tmp_path) as window, monkeypatch.context() as patched:
        patched.setattr(window.local, "replay", dies)
        with pytest.raises(_Dies):
            follow(window)
    with opened(harness, tmp_path) as window:
        follow(window)
        assert chunks_in(window.local) == [chunks[0], chunks[2], chunks[1]]


def test_a_window_may_copy_only_selected_chunks(
    harness: StoreHarness, tmp_path: Path, rng: np.random.Generator
) -> None:
    mine = session(rng, 3)
    theirs = session(rng, 3)
    harness.put(*mine, *theirs)
    harness.write([harness.close_frame(mine[0].meta.session, 3)])
    wanted = mine[0].meta.session
    with Window(
        harness.store,
        tmp_path / "window",
        clock=harness.clock,
        include=lambda meta: meta.session == wanted,
    ) as window:
        follow(window)
        assert chunks_in(window.local) == mine
        assert window.items == 7


def test_a_returning_player_is_not_forgotten_again(
    harness: StoreHarness, tmp_path: Path, rng: np.random.Generator
) -> None:
    harness.put(*session(rng, 2))
    harness.store.forget(PLAYER)
    harness.clock.advance(10.0)
    fresh = random_session(SPEC, rng, session=new_session(harness.clock.now(), rng.bytes(10)))
    harness.put(*fresh)
    harness.clock.advance(100.0)
    with opened(harness, tmp_path) as window:
        follow(window)
        assert chunks_in(window.local) == fresh


def test_a_session_continues_after_expired_chunks(
    harness: StoreHarness, tmp_path: Path, rng: np.random.Generator
) -> None:
    chunks = session(rng, 1100)
    harness.put(*chunks[:1090])
    harness.clock.advance(100.0)
    harness.put(*chunks[1090:])
    harness.store.expire(harness.clock.now() - 50.0)
    with opened(harness, tmp_path) as window:
        follow(window)
        assert chunks_in(window.local) == chunks[1090:]


def test_a_window_keeps_the_newest_steps(
    harness: StoreHarness, tmp_path: Path, rng: np.random.Generator
) -> None:
    sent: list[Chunk] = []
    for _ in range(20):
        sent += session(rng, 2)
        harness.put(*sent[-2:])
        harness.clock.advance(1.0)
    steps = sum(chunk.meta.n_steps for chunk in sent)
    with opened(harness, tmp_path, max_steps=steps // 3) as window:
        follow(window)
        window.enforce_limits()
        kept = chunks_in(window.local)
        assert kept == sent[-len(kept) :]
        assert steps // 4 < sum(chunk.meta.n_steps for chunk in kept) <= steps // 3
        assert window.enforce_limits() == 0
    with Window(harness.store, tmp_path / "young", keep_s=5, clock=harness.clock) as window:
        follow(window)
        window.enforce_limits()
        assert chunks_in(window.local) == sent[-10:]


class _Away:
    """A remote store that fails every other call."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._calls = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def tail(self, cursor: Cursor | None, *, max_items: int, wait_s: float) -> Tail:
        self._calls += 1
        if self._calls % 2:
            raise Unreachable("nobody answers")
        return self._store.tail(cursor, max_items=2, wait_s=0.0)


def test_a_window_waits_for_an_unreachable_remote_store(
    harness: StoreHarness, tmp_path: Path, rng: np.random.Generator
) -> None:
    chunks = session(rng, 9)
    troubles = set[str]()
    harness.put(*chunks)

    class Until:
        """Set once everything is copied."""

        def is_set(self) -> bool:
            troubles.add(window.error)
            return window.items == 9

    with Window(_Away(harness.store), tmp_path / "window", clock=harness.clock) as window:  # type: ignore[arg-type]
        window.run(Until())  # type: ignore[arg-type]
        assert chunks_in(window.local) == chunks
        assert troubles == {"", "nobody answers"}, "it says so meanwhile"
        assert not window.error


def test_a_limit_of_zero_is_rejected(harness: StoreHarness, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_steps of a window is 0"):
        opened(harness, tmp_path, max_steps=0)


def test_a_window_of_another_store_is_rejected(
    harness: StoreHarness, tmp_path: Path, rng: np.random.Generator
) -> None:
    class Other:
        identity = "other"

        def __getattr__(self, name: str) -> object:
            return getattr(harness.store, name)

    harness.put(*session(rng, 2))
    with opened(harness, tmp_path) as window:
        follow(window)
    for _ in range(2):
        with pytest.raises(ConfigError, match="follows another store"):
            Window(Other(), tmp_path / "window", clock=harness.clock)  # type: ignore[arg-type]
