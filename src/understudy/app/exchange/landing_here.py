"""Landing here: what an import sends is stored in the data folder's own store, by this process or by another."""

import time
import uuid
from collections.abc import Callable, Iterator, Mapping

from understudy.app.data import DataFolder
from understudy.app.roles.ingest import IngestRole
from understudy.app.roles.requests import ask
from understudy.core.errors import Locked
from understudy.core.ports import SessionFilter, SessionInfo
from understudy.stores.view import StoreView

_ASK_S = 600.0
_TRIES = 3


class LandingHere:
    """Ingest in this process, or the one that another process runs; a context manager."""

    is_elsewhere = False
    """Whether the store lies on other machines; in one of our own, all that was sent is seen once this has settled."""

    def __init__(self, data: DataFolder, open_role: Callable[[], IngestRole] | None = None) -> None:
        """`open_role`: ingest as the deployment's config wants it; by itself, everything is in the data folder."""
        self._data, self._open_role = data, open_role or (lambda: IngestRole(data))
        self._role: IngestRole | None = None
        self._open()

    def _open(self) -> None:
        if self._role is None and not self._data.has_writer():
            try:
                self._role = self._open_role()
            except Locked:
                self._role = None

    @property
    def is_ours(self) -> bool:
        """Whether this process stores; otherwise another one does."""
        return self._role is not None

    @property
    def refusals(self) -> Mapping[str, int]:
        """Frames that were refused by this process, by reason."""
        return {} if self._role is None else dict(self._role.service.stats.refusals)

    def sessions(self, wanted: SessionFilter) -> Iterator[SessionInfo]:
        with StoreView(self._data.store) as view:
            yield from view.sessions(wanted)

    def step(self) -> None:
        """Store some of what waits, where that is up to us."""
        if self._role is not None:
            self._role.step()

    def settle(self, game: str, sent: Mapping[uuid.UUID, bytes]) -> None:
        """Return when everything that was in the stream is stored, of whichever game; Locked when nobody does it."""
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

    def __enter__(self) -> "LandingHere":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
