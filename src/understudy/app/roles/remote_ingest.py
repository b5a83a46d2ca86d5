"""The ingest role into a store on other machines: any number of them may run, each with partitions of its own."""

import contextlib
import socket
import time
from collections.abc import Callable
from threading import Event

from understudy.app.data import DataFolder
from understudy.app.roles.ingest import RETENTION_S, TRIM_EVERY_S, checked_retention, drain, repeat, trim_own
from understudy.core.lock import FileLock
from understudy.core.log import make_folder
from understudy.core.ports import FullStore, Specs, Stream
from understudy.ingest.draining import DRAIN_S
from understudy.ingest.service import IngestService


class RemoteIngestRole:
    """Everything between a stream and a store elsewhere; a context manager that closes both."""

    def __init__(
        self,
        data: DataFolder,
        *,
        open_stream: Callable[[], Stream],
        open_store: Callable[[], FullStore],
        specs: Specs,
        retention_s: float = RETENTION_S,
    ) -> None:
        """`retention_s`: how long a stream of our own keeps what is stored."""
        make_folder(data.root)
        self._retention_s = checked_retention(retention_s)
        with contextlib.ExitStack() as opened:
            opened.callback(FileLock(data.root / "ingest.lock", what="ingest").close)
            self._stream = opened.enter_context(contextlib.closing(open_stream()))
            self.store = opened.enter_context(contextlib.closing(open_store()))
            # The owner is the folder, which the lock makes ours alone: after a crash the next one needs no patience.
            owner = f"{data.root}@{socket.gethostname()}"
            self.service = IngestService(self._stream, self.store, specs, owner=owner)
            self._opened = opened.pop_all()
        self._next_trim_s = 0.0

    def step(self) -> int:
        """One round: move what came, trim a stream of our own; how many records moved."""
        moved = self.service.step()
        if time.monotonic() >= self._next_trim_s:
            self._next_trim_s = time.monotonic() + TRIM_EVERY_S
            trim_own(self._stream, self.service.positions(), retention_s=self._retention_s)
        return moved

    def run(self, stop: Event, *, drain_s: float = DRAIN_S) -> None:
        """Repeat `step` until told to stop, then store what is still in the stream, for at most this long."""
        repeat(self.step, stop)
        drain(self.service, within_s=drain_s)

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> "RemoteIngestRole":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
