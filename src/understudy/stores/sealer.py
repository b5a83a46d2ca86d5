"""Seals one frozen generation at a time beside the writer, and tries again where that helps."""

import threading
from contextlib import suppress
from pathlib import Path

from understudy.core.errors import Corrupt, StorageFailed, StorageFull, Unreachable
from understudy.core.ports import Specs
from understudy.stores.catalogue import Catalogue
from understudy.stores.generation import Generation
from understudy.stores.rewriting import merge_small
from understudy.stores.sealing import Sealed, register, write_segments

_PASSING = (StorageFull, Unreachable)
"""What comes right by itself: no room, or nobody who says what a schema means."""


class Sealer:
    """Holds the frozen generation until it is sealed; takes none of the writer's locks."""

    def __init__(self, folder: Path, catalogue: Catalogue, specs: Specs | None) -> None:
        self._folder, self._catalogue, self._specs = folder, catalogue, specs
        self.frozen: Generation | None = None
        self._written: Sealed | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, generation: Generation) -> None:
        """Seal a generation that no longer changes; the one before must be finished."""
        assert self.frozen is None
        self.frozen, self._written = generation, None
        self._thread = threading.Thread(target=self._seal, name="understudy-seal", daemon=True)
        self._thread.start()

    def finish(self, *, wait: bool) -> Generation | None:
        """The generation that has been sealed, once; None while nothing is (or, without `wait`, not yet).

        StorageFull when there is no room, Unreachable when specs lie elsewhere and nobody answers: it stays frozen, and
        the next call with `wait` tries again. StorageFailed when only a new start can help.
        """
        if self._thread is not None:
            if not wait and self._thread.is_alive():
                return None
            self._thread.join()
            self._thread = None
        elif wait and isinstance(self._error, _PASSING):
            self._seal()
        if isinstance(self._error, _PASSING):
            if wait:
                raise self._error
            return None
        if self._error is not None:
            raise StorageFailed(f"sealing failed: {self._error}; reopen the store") from self._error
        sealed, self.frozen, self._written = self.frozen, None, None
        return sealed

    def _seal(self) -> None:
        assert self.frozen is not None
        self._error = None
        try:
            # Kept across tries, so that a full disk does not fill with copies of the same segments.
            if self._written is None:
                self._written = write_segments(self._folder, self._catalogue, self.frozen)
            register(self._folder, self._catalogue, self.frozen, self._written, specs=self._specs)
        except BaseException as error:
            self._error = error
            return
        # Only tidier and faster to sample: what stands in its way now is met again at the next sealing, or by an audit.
        with suppress(StorageFull, Corrupt, FileNotFoundError):
            merge_small(self._folder, self._catalogue)
