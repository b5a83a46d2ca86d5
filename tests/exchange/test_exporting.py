"""Exporting: the copy of a remote store is complete; a missing package is reported."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ingest.specs import KnownSpecs
from understudy.core.errors import MissingExtra, StorageFailed
from understudy.core.names import new_session
from understudy.exchange.exporting import ExportFilter, import_extra, local_copy, one_line
from understudy.experience.chunk import Chunk
from understudy.experience.frame import DropReport, drop_frame
from understudy.ports import Candidate, Cursor, Stored, Tail
from understudy.stores.view import StoreView
from understudy.stores.window import Window
from understudy.testing.samples import PLAYER, random_session
from understudy.testing.store_harness import SPEC, StoreHarness


def chunks_in(view: StoreView) -> list[Chunk]:
    page = view.tail(None, max_items=10_000, wait_s=0.0)
    return [
        item.chunk for item in page.items if isinstance(item, Stored) and item.chunk is not None
    ]


def copy_of(harness: StoreHarness, folder: Path) -> list[Chunk]:
    with local_copy(
        harness.store, KnownSpecs(SPEC), ExportFilter(game=SPEC.game), beside=folder / "out.parquet"
    ) as view:
        return chunks_in(view)


def test_new_steps_of_an_erased_player_are_copied(
    harness: StoreHarness, tmp_path: Path, rng: np.random.Generator
) -> None:
    harness.put(*random_session(SPEC, rng, n_chunks=2))
    harness.store.forget(PLAYER)
    harness.clock.advance(10.0)
    fresh = random_session(
        SPEC, rng, session=new_session(harness.clock.now(), rng.bytes(10)), n_chunks=3
    )
    harness.put(*fresh)
    assert copy_of(harness, tmp_path) == fresh
    assert [path.name for path in tmp_path.iterdir()] == ["remote"], "the copy is gone"


def test_quarantined_and_dropped_numbers_do_not_stop_a_copy(
    harness: StoreHarness, tmp_path: Path, rng: np.random.Generator
) -> None:
    chunks = random_session(SPEC, rng, n_chunks=1300)
    session = chunks[0].meta.session
    left = chunks[1200:]
    report = DropReport(((1, 1199),), sum(chunk.meta.n_steps for chunk in chunks[1:1200]))
    harness.put(chunks[0])
    harness.write(
        [
            Candidate(
                drop_frame(session, 1300, report).stamped(PLAYER, int(harness.clock.now())), None
            )
        ]
    )
    harness.put(*left)
    harness.store.quarantine([(session, 1250)], reason="guard")
    assert copy_of(harness, tmp_path) == [
        chunks[0],
        *(one for one in left if one.meta.chunk_no != 1250),
    ]


def test_the_copy_of_a_store_that_is_always_written_to_ends(
    harness: StoreHarness, tmp_path: Path, rng: np.random.Generator
) -> None:
    class Busy:
        """Something new has come whenever it is asked."""

        def __getattr__(self, name: str) -> object:
            return getattr(harness.store, name)

        def tail(self, cursor: Cursor | None, *, max_items: int, wait_s: float) -> Tail:
            harness.put(*random_session(SPEC, rng, n_chunks=1))
            return harness.store.tail(cursor, max_items=max_items, wait_s=wait_s)

    before = random_session(SPEC, rng, n_chunks=3)
    harness.put(*before)
    with local_copy(Busy(), KnownSpecs(SPEC), ExportFilter(), beside=tmp_path / "out") as view:  # type: ignore[arg-type]
        assert chunks_in(view)[:3] == before


def test_an_incomplete_copy_is_an_error(
    harness: StoreHarness, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = random_session(SPEC, rng, n_chunks=1100)
    harness.put(*chunks)

    def cut(*arguments: Any, **named: Any) -> Window:
        """Filters half of a session out, which no export does."""
        return Window(*arguments, **{**named, "include": lambda meta: meta.chunk_no >= 1090})

    monkeypatch.setattr("understudy.exchange.exporting.open_window", cut)
    with pytest.raises(StorageFailed, match="conflicts with other chunks"):
        copy_of(harness, tmp_path)


@pytest.mark.parametrize("module", ["pyarrow.parquet", "minari", "h5py"])
def test_a_missing_package_is_reported_with_the_install_command(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        MissingExtra, match=r"needs the package .*; pip install 'understudy\[export\]'$"
    ):
        import_extra(module)


def test_an_error_of_a_library_becomes_one_line() -> None:
    assert one_line(ValueError("a\n  b\tc")) == "a b c"
    assert one_line(KeyError("rewards")) == "'rewards' is missing"
    assert one_line(AssertionError()) == "the library reported no details (AssertionError)"
    assert len(one_line(ValueError("x" * 999))) == 160
