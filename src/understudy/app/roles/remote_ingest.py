"""The ingest role into a store on other machines: any number of them may run, each with partitions of its own."""

import socket
import time
from threading import Event

from understudy.app.data import DataFolder
from understudy.app.roles.ingest import RETENTION_S, TRIM_EVERY_S, drain, repeat
from understudy.core.lock import FileLock
from understudy.core.log import make_folder
from understudy.core.ports import FullStore, Specs, Stream
from understudy.ingest.service import IngestService
from understudy.streams.file import FileStream


class RemoteIngestRole:
    """Everything between a stream and a store elsewhere; a context manager that closes both."""

    def __init__(self, data: DataFolder, stream: Stream, store: FullStore, *, specs: Specs) -> None:
        make_folder(data.root)
        self._lock = FileLock(data.root / "ingest.lock", what="ingest")
        self._stream, self.store = stream, store
        # The owner is the folder, which the lock makes ours alone: after a crash the next process needs no patience.
        self.service = IngestService(stream, store, specs, owner=f"{data.root}@{socket.gethostname()}")
        self._next_trim_s = 0.0

    def step(self) -> int:
        """One round: move what came, trim a stream of our own; how many records moved."""
        moved = self.service.step()
        if isinstance(self._stream, FileStream) and time.monotonic() >= self._next_trim_s:
            self._next_trim_s = time.monotonic() + TRIM_EVERY_S
            self._stream.trim(self.service.positions(), before_s=time.time() - RETENTION_S)
        return moved

    def run(self, stop: Event) -> None:
        """Repeat `step` until told to stop, then store what is still in the stream."""
        repeat(self.step, stop)
        drain(self.service)

    def close(self) -> None:
        self._stream.close()
        self.store.close()
        self._lock.close()

    def __enter__(self) -> "RemoteIngestRole":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
