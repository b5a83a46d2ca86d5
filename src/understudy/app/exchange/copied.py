"""A store elsewhere, copied to this machine for the time of an export, which reads session by session."""

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from understudy.app.digest import items_of
from understudy.app.exchange.history import Wanted
from understudy.core.errors import StorageFailed
from understudy.core.ports import Candidate, ExperienceStore, Forgotten, Specs, WriteBatch
from understudy.stores.local import LocalStore
from understudy.stores.view import StoreView

_PARTITION = "copy"
_WRITE_CHUNKS = 256


@contextmanager
def copied(store: ExperienceStore, specs: Specs, wanted: Wanted, *, beside: Path) -> Iterator[StoreView]:
    """A view of what is wanted of a store, in a folder beside `beside` that goes when the block ends."""
    with tempfile.TemporaryDirectory(prefix=f".{beside.name}.", suffix=".copy", dir=beside.absolute().parent) as folder:
        with closing(LocalStore(Path(folder), specs=specs)) as copy:
            _fill(copy, store, wanted)
        with StoreView(Path(folder)) as view:
            yield view


def _fill(copy: LocalStore, store: ExperienceStore, wanted: Wanted) -> None:
    claim = copy.claim(_PARTITION, owner="export", ttl_s=1e9)
    waiting: list[Candidate] = []

    def flush() -> None:
        receipt = copy.write(WriteBatch(_PARTITION, claim.epoch, None, waiting))
        if bad := [reason for reason, fate in zip(receipt.reasons, receipt.fates, strict=False) if fate == "refused"]:
            raise StorageFailed(f"the copy of the store refused chunks: {bad[0]}; look at it with data verify")
        waiting.clear()

    for item in items_of(lambda cursor: store.tail(cursor, max_items=512, wait_s=0.0)):
        if isinstance(item, Forgotten):
            if item.player is not None and not item.chunks:
                flush()
                copy.forget(item.player)
            continue
        meta = None if item.chunk is None else item.chunk.meta
        if meta is not None and wanted.game in (None, meta.game) and meta.schema.startswith(wanted.schema):
            waiting.append(Candidate(item.frame, item.chunk))
        if len(waiting) == _WRITE_CHUNKS:
            flush()
    if waiting:
        flush()
