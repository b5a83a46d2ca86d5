"""The ingest role: one process that has the store open, follows the stream and answers requests."""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event
from typing import Any

import structlog

from understudy.app.data import DataFolder
from understudy.app.roles.requests import answer_all, forget_stale
from understudy.core.door import deployment_key
from understudy.core.errors import ConfigError, StorageFull, Unreachable
from understudy.core.ports import Candidate, FullStore, Position, Specs, Stream
from understudy.ingest.check import check
from understudy.ingest.draining import DRAIN_S, TOO_MUCH, leaving_the_rest, tell_not_drained
from understudy.ingest.service import IngestService
from understudy.ingest.specs import SpecFolder
from understudy.stores.local import LocalStore
from understudy.streams.file import FileStream

_log = structlog.get_logger("understudy.ingest")
REQUEST_EVERY_S = 0.05
TRIM_EVERY_S = 20.0
EXPIRE_EVERY_S = 600.0
_IDLE_S, _TROUBLE_S = 0.004, 1.0
RETENTION_S = 3600.0
"""How long the stream keeps what is already stored."""
ROLE_DRAIN_S = 100.0
"""What a gateway acknowledged last is stored, too, when `up` ends; a little less than a role is given."""


def repeat(step: Callable[[], int], stop: Event) -> None:
    """Call `step` until told to stop, waiting a little when nothing moved and longer while nothing can be stored."""
    while not stop.is_set():
        try:
            moved = step()
        except StorageFull as error:
            _log.warning("store_full", error=str(error), next="free some space; nothing acknowledged is lost")
            stop.wait(_TROUBLE_S)
            continue
        except Unreachable as error:
            _log.warning("unreachable", error=str(error), next="it is tried again; nothing acknowledged is lost")
            stop.wait(_TROUBLE_S)
            continue
        if not moved:
            stop.wait(_IDLE_S)


def drain(service: IngestService, *, within_s: float) -> None:
    """Store what is still in the stream; what cannot be read or stored now, or in time, is left to the next start."""
    with leaving_the_rest():
        if not service.drain(within_s=within_s):
            tell_not_drained(TOO_MUCH)


def trim_own(stream: Stream, positions: Mapping[str, Position | None], *, retention_s: float) -> int:
    """Delete stored parts of a stream of our own that are older than this; one elsewhere has a rule of its own."""
    if not isinstance(stream, FileStream):
        return 0
    return stream.trim(positions, before_s=time.time() - retention_s)


def checked_retention(retention_s: float) -> float:
    """The time itself; ConfigError when a stream cannot keep anything for so long."""
    if not 0 <= retention_s < 1e10:
        raise ConfigError(f"the stream keeps what is stored for {retention_s} s; give a time from 0, such as 3600")
    return retention_s


class IngestRole:
    """Everything between a data folder's stream and its store; a context manager."""

    def __init__(
        self, data: DataFolder, *, retention_s: float = RETENTION_S, keep_s: float | None = None,
        specs: Specs | None = None, open_stream: Callable[[], Stream] | None = None,
    ) -> None:  # fmt: skip
        """`retention_s`: how long the stream keeps what is stored; `keep_s`: how long the store does, or for ever.

        `specs`: where games are registered, and `open_stream`: what frames come from, when not in the data folder.
        """
        if keep_s is not None and not 0 < keep_s < 1e10:
            raise ConfigError(f"stored steps are kept for {keep_s} s; give a time above 0, or none to keep them")
        self._data, self._retention_s, self._keep_s = data, checked_retention(retention_s), keep_s
        self._specs: Specs = specs or SpecFolder(data.games)
        if not data.has_store():
            deployment_key(data.root)  # before the store: a store without a key is refused by every game
        with contextlib.ExitStack() as opened:
            # The store first, since its lock says that nobody else is here: so the owner is the folder, no process.
            self.store = opened.enter_context(LocalStore(data.store, specs=self._specs))
            stream = open_stream() if open_stream is not None else FileStream(data.stream)
            self._stream = opened.enter_context(contextlib.closing(stream))
            owner = f"embedded@{socket.gethostname()}"
            self.service = IngestService(self._stream, self.store, self._specs, owner=owner)
            self._opened = opened.pop_all()
        self._next_requests_s = self._next_trim_s = self._next_expiry_s = 0.0

    def step(self) -> int:
        """One round: move what came, answer requests, trim the stream; how many records moved."""
        now_s = time.monotonic()
        if now_s >= self._next_requests_s:
            self._next_requests_s = now_s + REQUEST_EVERY_S
            answer_all(self._data.requests, self._handlers())
        if now_s >= self._next_trim_s:
            self._next_trim_s = now_s + TRIM_EVERY_S
            self.trim(self._retention_s)
            forget_stale(self._data.requests, older_than_s=600.0)
            if self.store.is_erasing:
                self.store.erase()
        if self._keep_s is not None and now_s >= self._next_expiry_s:
            self._next_expiry_s = now_s + EXPIRE_EVERY_S
            gone = self.store.expire(time.time() - self._keep_s)
            _log.info("expired", chunks=gone)
        return self.service.step()

    def run(self, stop: Event, *, drain_s: float = DRAIN_S) -> None:
        """Repeat `step` until told to stop, then store what is still in the stream, for at most this long."""
        repeat(self.step, stop)
        drain(self.service, within_s=drain_s)

    def trim(self, retention_s: float) -> int:
        """Delete stored parts of a stream of our own that are older than this; how many bytes that freed."""
        freed = trim_own(self._stream, self.store.positions(), retention_s=retention_s)
        if freed:  # only that makes partitions go
            left = {partition.id for partition in self._stream.partitions()}
            self.store.release([name for name in self.store.positions() if name not in left])
        return freed

    def _handlers(self) -> Mapping[str, Any]:
        return {
            "barrier": self._barrier, "forget": self._forget, "replay": self._replay, "snapshot": self._snapshot,
            "compact": self._compact,
        }  # fmt: skip

    def _barrier(self, _: Mapping[str, Any]) -> Mapping[str, Any]:
        self.service.drain()
        return {"arrival": self.store.next_arrival - 1, "pid": os.getpid()}

    def _snapshot(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        self.snapshot(self._data.root / "snapshots" / Path(str(asked["name"])).name)
        return {}

    def snapshot(self, target: Path) -> None:
        """Copy the store with all that the stream held; what comes meanwhile is stored, and copied too."""
        self.service.drain()
        self.store.back_up(target, between=self.service.step)

    def _compact(self, _: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"freed_bytes": self.store.compact(between=self.service.step)}

    def _forget(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        return self.forget([bytes.fromhex(text) for text in asked["players"]])

    def forget(self, players: list[bytes]) -> dict[str, int | bool]:
        """Erase players by pseudonym, and what the stream still holds of stored data."""
        self.service.drain()
        chunks = sum(self.store.forget(player) for player in players)
        return {"chunks": chunks, "stream_bytes": self.trim(0.0), "is_finished": not self.store.is_erasing}

    def _replay(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        return self.replay(asked.get("ids"))

    def replay(self, ids: list[int] | None) -> dict[str, int]:
        """Check quarantined frames again and store those that pass; None means all."""
        return replay(self.store, self._specs, ids)

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> "IngestRole":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def replay(store: FullStore, specs: Specs, ids: list[int] | None) -> dict[str, int]:
    """Check a store's quarantined frames again and store those that pass; None means all."""
    counts, after = {"tried": 0, "stored": 0, "still_refused": 0, "duplicates": 0}, 0
    while page := store.quarantined(after_id=after, limit=256):
        after = page[-1].id
        passed: list[tuple[int, Candidate]] = []
        for one in page:
            if ids is not None and one.id not in ids:
                continue
            counts["tried"] += 1
            checked = check(one.raw, specs=specs, received_s=one.received_s)
            if checked.candidate is None:
                counts["still_refused"] += 1
            else:
                passed.append((one.id, checked.candidate))
        receipt = store.replay([id_ for id_, _ in passed], [candidate for _, candidate in passed])
        counts["stored"] += sum(fate == "new" for fate in receipt.fates)
        counts["duplicates"] += sum(fate == "duplicate" for fate in receipt.fates)
        counts["still_refused"] += sum(fate in ("refused", "conflict") for fate in receipt.fates)
    return counts
