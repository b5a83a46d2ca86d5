"""The embedded store's writer: one process, one log commit per write, sealed into segments in the background.

STORE/.lock           held by the writer
STORE/log/N.log       commits not sealed yet
STORE/watermark       how far readers may look
STORE/segments/N.safetensors
STORE/catalogue.sqlite
"""

import sys
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import (
    ClaimLost,
    Closed,
    ConfigError,
    StorageFailed,
    StorageFull,
    UnderstudyError,
    Unreachable,
)
from understudy.core.group import GroupCommit
from understudy.core.lock import FileLock
from understudy.core.log import LogFile, Sync, make_folder, no_sync, remove, sync_data
from understudy.core.ports import (
    Audit,
    Candidate,
    Claim,
    Cursor,
    Position,
    Quarantined,
    Receipt,
    SessionFilter,
    SessionInfo,
    Specs,
    Tail,
    WriteBatch,
)
from understudy.stores.audit import audit, summary
from understudy.stores.catalogue import FORGOTTEN, Catalogue, quarantined
from understudy.stores.claims import Claims
from understudy.stores.commits import Event, Trailer, Watermark, WatermarkFile, commit_parts, log_path, read_commit
from understudy.stores.disk import disk
from understudy.stores.draft import Draft
from understudy.stores.erasure import erase_pending, expire, has_pending
from understudy.stores.generation import Generation
from understudy.stores.local_known import LocalKnown
from understudy.stores.recovery import Recovered, recover
from understudy.stores.sealer import Sealer
from understudy.stores.segments import MAX_BYTES
from understudy.stores.view import StoreView, session_infos

_MOST_BYTES = 32 * 1024 * 1024
SEAL_ROWS = 56_000
"""A little below a segment, so that what the last commit brought still fits into the same one."""


class LocalStore:
    """Stores each step exactly once on local disk; open it in one process, read it from any."""

    def __init__(
        self,
        folder: Path,
        *,
        specs: Specs | None = None,
        sync: Sync = sync_data,
        clock: Clock | None = None,
        seal_rows: int = SEAL_ROWS,
        seal_bytes: int = MAX_BYTES,
    ) -> None:
        if sys.platform == "win32":
            raise ConfigError("the local store runs on Linux and macOS only")
        make_folder(folder / "log")
        make_folder(folder / "segments")
        self.folder = folder
        self._sync, self._clock = sync, clock or SystemClock()
        self._seal_rows, self._seal_bytes = seal_rows, seal_bytes
        self._state = threading.RLock()
        self._failed: str | None = None
        self._closed = False
        self.is_erasing = False
        """Whether erased bytes are still in SQLite's log because a reader was in the way; `erase` tries again."""
        self._group = GroupCommit[WriteBatch, Receipt | UnderstudyError](
            self._commit, size=_batch_bytes, most=_MOST_BYTES
        )
        with ExitStack() as opened:
            # Whatever was opened is closed again when opening fails half way, and by `close` otherwise.
            opened.enter_context(FileLock(folder / ".lock", what="the store", patience_s=0.3))
            self._catalogue = opened.enter_context(closing(Catalogue(folder / "catalogue.sqlite")))
            self._lookup = opened.enter_context(closing(Catalogue(folder / "catalogue.sqlite", read_only=True)))
            self._mark = opened.enter_context(closing(WatermarkFile(folder / "watermark", create=True)))
            self._claims = Claims(self._catalogue)
            self._sealer = Sealer(folder, self._catalogue, specs)
            found = recover(folder, self._catalogue, self._mark.read(), now_s=self._clock.now())
            self.known = LocalKnown(self._lookup, self._unsealed)
            self._open(found)
            opened.callback(lambda: self._log.close())
            if self._current.events or has_pending(self._catalogue):
                self.erase()
            self._view = opened.enter_context(StoreView(folder))
            self._opened = opened.pop_all()

    # --- opening ------------------------------------------------------------------------------------------------

    def _open(self, found: Recovered) -> None:
        """Copy what the log held into a file of our own, made durable before anybody may read it."""
        self._next_commit, self._next_arrival = found.first_commit, found.first_arrival
        self._next_quarantine = self._catalogue.fact("next_quarantine", 1)
        self._sealed_below = found.first_arrival
        self._positions: dict[str, str | None] = dict(self._catalogue.rows("SELECT partition, position FROM positions"))
        self._file_no = found.next_file
        self._current = Generation(files=[self._file_no])
        with disk("a log file"):
            self._log = LogFile(log_path(self.folder, self._file_no), sync=no_sync)
        try:
            for parts in found.entries():
                self._write_entry(parts, None)
            self._log.sync_with(self._sync)
            self._write_mark()
        except BaseException:
            self._log.close()
            raise
        for number in found.old_files:
            remove(log_path(self.folder, number))

    # --- the ExperienceStore port ---------------------------------------------------------------------------------

    def claim(self, partition: str, *, owner: str, ttl_s: float) -> Claim:
        with self._state:
            self._check_open()
            epoch = self._claims.take(partition, owner=owner, ttl_s=ttl_s, now_s=self._clock.now())
            position = self._positions.get(partition)
        return Claim(partition, epoch, None if position is None else Position(position))

    def write(self, batch: WriteBatch) -> Receipt:
        self._check_open()
        result = self._group.submit(batch)
        if isinstance(result, UnderstudyError):
            raise result
        return result

    def tail(self, cursor: Cursor | None, *, max_items: int, wait_s: float) -> Tail:
        self._check_not_closed()
        return self._view.tail(cursor, max_items=max_items, wait_s=wait_s)

    def behind(self, chunks: Iterable[tuple[uuid.UUID, int]]) -> Cursor:
        """A cursor behind which all of these chunks lie, of those that are stored."""
        self._check_not_closed()
        return self._view.behind(chunks)

    def sessions(self, wanted: SessionFilter) -> Iterator[SessionInfo]:
        self._check_not_closed()
        with self._state:
            frozen = self._sealer.frozen
            unsealed = {**(frozen.sessions if frozen is not None else {}), **self._current.sessions}
        return session_infos(self._lookup, unsealed, wanted)

    def forget(self, player: bytes, *, at_s: float | None = None) -> int:
        """Erase a player: refused and hidden from the next moment on, off the disk unless `is_erasing` says not yet.

        `at_s`: when it was decided, where that was earlier and elsewhere; what they played since then is theirs anew.
        """
        with self._state:
            self._check_open()
            before = self._count_forgotten(player)
            self.commit_event(Event(kind="forget", at_s=self._clock.now() if at_s is None else at_s, player=player))
            self.erase()
            return self._count_forgotten(player) - before

    def _count_forgotten(self, player: bytes) -> int:
        query = "SELECT count(*) FROM arrivals WHERE player = ? AND kind = 0 AND fate = ?"
        return int(self._lookup.one(query, player, FORGOTTEN)[0])

    def erase(self) -> None:
        """Seal what is in the log and carry out promised erasures."""
        with self._state:
            self.freeze(wait=True)
            self.is_erasing = not erase_pending(self.folder, self._catalogue)
            self.known.sealed_sessions.clear()
            self._next_quarantine = self._catalogue.fact("next_quarantine", 1)

    # --- the StoreAdmin port ----------------------------------------------------------------------------------------

    def audit(self) -> Audit:
        self._check_not_closed()
        return summary(audit(self._view))

    def quarantined(self, *, after_id: int = 0, limit: int = 1000) -> Sequence[Quarantined]:
        self.freeze(wait=True)
        return quarantined(self._lookup, after_id=after_id, limit=limit)

    def quarantine(self, chunks: Sequence[tuple[uuid.UUID, int]], *, reason: str) -> int:
        with self._state:
            wanted = {key for key in chunks if self.known.is_stored(*key)}
            there = [(session.bytes, number) for session, number in sorted(wanted)]
            if there:
                self.commit_event(Event(kind="quarantine", at_s=self._clock.now(), chunks=there, reason=reason))
                self.erase()
            return len(there)

    def replay(self, ids: Sequence[int], candidates: Sequence[Candidate]) -> Receipt:
        with self._state:
            self._check_open()
            self.freeze(wait=True)
            draft = Draft(self.known, self._next_arrival, self._next_quarantine)
            decided = [draft.replay(candidate, number) for number, candidate in zip(ids, candidates, strict=True)]
            if draft.is_worth_writing:
                self._append(draft.trailer(self._next_commit), draft.raws, draft.candidates)
            return Receipt([fate for fate, _ in decided], [reason for _, reason in decided])

    def expire(self, before_s: float) -> int:
        with self._state:
            self.freeze(wait=True)
            return expire(self.folder, self._catalogue, before_s, now_s=self._clock.now())

    def close(self) -> None:
        if self._closed:
            return
        with self._state:
            self._closed = True
            with suppress(StorageFull, StorageFailed):
                self._finish_sealing(wait=True)
        self._opened.close()

    def __enter__(self) -> "LocalStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def release(self, partitions: Iterable[str]) -> None:
        """Forget the positions and claims of partitions that are gone from the stream."""
        with self._state, self._catalogue.changing():
            for name in partitions:
                self._positions.pop(name, None)
                self._claims.drop(name)
                self._catalogue.run("DELETE FROM positions WHERE partition = ?", name)

    def positions(self) -> dict[str, Position | None]:
        """Every partition's durable position."""
        with self._state:
            return {name: None if text is None else Position(text) for name, text in self._positions.items()}

    @property
    def next_arrival(self) -> int:
        """The number the next stored frame gets; everything below it is durable."""
        return self._next_arrival

    def _check_not_closed(self) -> None:
        if self._closed:
            raise Closed("the store was closed")

    def _check_open(self) -> None:
        self._check_not_closed()
        if self._failed:
            raise StorageFailed(self._failed)

    # --- committing -----------------------------------------------------------------------------------------------

    def _commit(self, batches: Sequence[WriteBatch]) -> Sequence[Receipt | UnderstudyError]:
        with self._state:
            self._check_open()
            self._finish_sealing(wait=False)
            if self._is_due():
                self.freeze()
            draft, now_s = Draft(self.known, self._next_arrival, self._next_quarantine), self._clock.now()
            results: list[Receipt | UnderstudyError] = []
            for batch in batches:
                if self._claims.renew(batch.partition, batch.epoch, now_s=now_s):
                    results.append(draft.take(batch))
                else:
                    results.append(ClaimLost(f"epoch {batch.epoch} of partition {batch.partition} is stale"))
            if draft.is_worth_writing:
                self._append(draft.trailer(self._next_commit), draft.raws, draft.candidates)
            return results

    def commit_event(self, event: Event) -> int:
        """Make an event durable under its own arrival number."""
        with self._state:
            self._check_open()
            number = self._next_arrival
            self._append(Trailer(number=self._next_commit, first_arrival=number, event=event), [], [])
            return number

    def _append(self, trailer: Trailer, raws: list[bytes], candidates: Sequence[Candidate]) -> None:
        try:
            self._write_entry(commit_parts(trailer, raws), candidates)
        except StorageFailed as error:
            # Nobody knows whether the entry is on the disk: only a new start can tell.
            self._failed = f"{error} (the store must be reopened)"
            raise
        self._write_mark()

    def _write_entry(self, parts: Sequence[bytes], candidates: Sequence[Candidate] | None) -> None:
        entry = self._log.append(parts)
        commit = read_commit(entry)
        self._current.apply(commit, self._file_no, before=self.known.state_of, candidates=candidates)
        trailer = commit.trailer
        self._next_commit = trailer.number + 1
        self._next_arrival = trailer.first_arrival + trailer.n_arrivals
        self._positions.update(dict(trailer.positions))
        for facts in trailer.quarantined:
            self._next_quarantine = max(self._next_quarantine, facts.id + 1)
        if trailer.event is not None and trailer.event.kind == "forget":
            self.known.forget(trailer.event.player, trailer.event.at_s)

    def _write_mark(self) -> None:
        self._mark.write(Watermark(self._sealed_below, self._next_arrival, self._file_no, self._log.size_bytes))

    # --- sealing ----------------------------------------------------------------------------------------------------

    def _unsealed(self) -> list[Generation]:
        return [one for one in (self._current, self._sealer.frozen) if one is not None]

    def _is_due(self) -> bool:
        current = self._current
        return (
            current.log_bytes >= self._seal_bytes
            or current.decoded_bytes >= self._seal_bytes
            or max(current.rows_by_schema.values(), default=0) >= self._seal_rows
        )

    def freeze(self, *, wait: bool = False) -> None:
        """Start a new log file and seal the old ones in the background."""
        with self._state:
            self._check_open()
            self._finish_sealing(wait=True)
            if self._current.log_bytes:
                self._file_no += 1
                with disk("a log file"):
                    following = LogFile(log_path(self.folder, self._file_no), sync=self._sync)
                self._log.close()
                self._log = following
                frozen, self._current = self._current, Generation(files=[self._file_no])
                self._sealer.start(frozen)
                self._write_mark()
            if wait:
                self._finish_sealing(wait=True)

    def _finish_sealing(self, *, wait: bool) -> None:
        """Once the sealer is done: let readers look into the segments instead of the log, then drop the log."""
        try:
            sealed = self._sealer.finish(wait=wait)
        except Unreachable:
            raise
        except StorageFailed as error:
            self._failed = str(error)
            raise
        if sealed is None:
            return
        self.known.sealed_sessions.remember(sealed.sessions.items())
        self._sealed_below = self._catalogue.fact("sealed_below")
        self._write_mark()
        for number in sealed.files:
            remove(log_path(self.folder, number))


def _batch_bytes(batch: WriteBatch) -> int:
    refused = sum(len(one.raw) for one in (*batch.refused, *batch.parked))
    return refused + sum(candidate.frame.size_bytes for candidate in batch.candidates)
