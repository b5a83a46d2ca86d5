"""Feed: stores what lies in a data folder's stream while an import writes to it."""

import time

from understudy.app.data import DataFolder
from understudy.app.roles.ingest import IngestRole
from understudy.app.roles.requests import ask
from understudy.core.errors import Locked

_ASK_S = 600.0
_TRIES = 3


class Feed:
    """Ingest in this process, or the one that another process runs; a context manager."""

    def __init__(self, data: DataFolder) -> None:
        self._data = data
        self._role: IngestRole | None = None
        self._open()

    def _open(self) -> None:
        if self._role is None and not self._data.has_writer():
            try:
                self._role = IngestRole(self._data)
            except Locked:
                self._role = None

    @property
    def is_ours(self) -> bool:
        """Whether this process stores; otherwise another one does."""
        return self._role is not None

    @property
    def refusals(self) -> dict[str, int]:
        """Frames that were refused by this process, by reason."""
        return {} if self._role is None else dict(self._role.service.stats.refusals)

    def step(self) -> None:
        """Store some of what waits, where that is up to us."""
        if self._role is not None:
            self._role.step()

    def settle(self) -> None:
        """Return when everything that was in the stream is stored; Locked when nobody does it."""
        for _ in range(_TRIES):
            if self._role is not None:
                self._role.service.drain()
                return
            try:
                ask(self._data.requests, "barrier", timeout_s=_ASK_S)
                return
            except Locked:
                if self._data.has_writer():
                    raise
                time.sleep(0.2)
                self._open()
        raise Locked("the store is opened and closed by others all the time; try again")

    def close(self) -> None:
        if self._role is not None:
            self._role.close()
            self._role = None

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
