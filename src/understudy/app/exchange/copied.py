"""A store elsewhere, copied to this machine for the time of an export, which reads session by session."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

from understudy.app.exchange.history import Wanted
from understudy.core.chunk import ChunkMeta
from understudy.core.errors import StorageFailed
from understudy.core.ports import ExperienceStore, Gone, Specs
from understudy.stores.view import StoreView
from understudy.stores.window import PAGE, Window

_SHORT_PAGES = 3
"""A page that is not full has reached the end of that moment; while others write, no page may ever be empty."""


@contextmanager
def copied(store: ExperienceStore, specs: Specs, wanted: Wanted, *, beside: Path) -> Iterator[StoreView]:
    """A view of what is wanted of a store, in a folder beside `beside` that goes when the block ends."""

    def is_wanted(meta: ChunkMeta) -> bool:
        return wanted.game in (None, meta.game) and meta.schema.startswith(wanted.schema)

    with tempfile.TemporaryDirectory(prefix=f".{beside.name}.", suffix=".copy", dir=beside.absolute().parent) as folder:
        with Window(store, Path(folder), specs=specs, wanted=is_wanted) as window:
            short = 0
            while short < _SHORT_PAGES and (items := window.step()):
                short += items < PAGE
            _check(window)
        with StoreView(Path(folder)) as view:
            yield view


def _check(window: Window) -> None:
    """StorageFailed where the copy lacks what the store has: an export of it would look whole."""
    after = 0
    while page := window.local.quarantined(after_id=after):
        after = page[-1].id
        for one in page:
            if one.reason not in get_args(Gone):
                raise StorageFailed(
                    f"chunk {one.chunk_no} of session {one.session} does not fit what the store holds beside it "
                    f"({one.reason}); look at it with understudy data verify"
                )
