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
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from understudy.core.chunk import Chunk
from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import ClaimLost, Closed, ConfigError, StorageFailed, UnderstudyError
from understudy.core.group import GroupCommit
from understudy.core.lock import FileLock
from understudy.core.log import LogFile, Sync, no_sync, remove, sync_data
from understudy.core.names import session_time_s
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
from understudy.core.session import SessionState, unpack_state
from understudy.stores.audit import audit, summary
from understudy.stores.catalogue import FORGOTTEN, Catalogue, quarantined
from understudy.stores.commits import Event, Trailer, Watermark, WatermarkFile, commit_parts, log_path, read_commit
from understudy.stores.draft import Draft
from understudy.stores.erasure import erase_pending, expire
from understudy.stores.generation import Generation
from understudy.stores.recovery import Recovered, recover
from understudy.stores.sealing import seal
from understudy.stores.segments import MAX_BYTES, MAX_ROWS
from understudy.stores.view import StoreView, session_infos

_CACHE_SESSIONS = 4096
_MOST_BYTES = 32 * 1024 * 1024


class LocalStore:
    """Stores each step exactly once on local disk; open it in one process, read it from any."""

    def __init__(
        self,
        folder: Path,
        *,
        specs: Specs | None = None,
        sync: Sync = sync_data,
        clock: Clock | None = None,
        seal_rows: int = MAX_ROWS,
        seal_bytes: int = MAX_BYTES,
    ) -> None:
        if sys.platform == "win32":
            raise ConfigError("the local store runs on Linux and macOS only")
        (folder / "log").mkdir(parents=True, exist_ok=True)
        (folder / "segments").mkdir(exist_ok=True)
        self.folder = folder
        self._lock_file = FileLock(folder / ".lock", what="the store")
        self._specs, self._sync, self._clock = specs, sync, clock or SystemClock()
        self._seal_rows, self._seal_bytes = seal_rows, seal_bytes
        self._state = threading.RLock()
        self._sealer: threading.Thread | None = None
        self._seal_error: BaseException | None = None
        self._failed: str | None = None
        self._closed = False
        self._cache: OrderedDict[uuid.UUID, tuple[str, SessionState]] = OrderedDict()
        self._frozen: Generation | None = None
        self._catalogue = Catalogue(folder / "catalogue.sqlite")
        self._lookup = Catalogue(folder / "catalogue.sqlite", read_only=True)
        self._mark = WatermarkFile(folder / "watermark", create=True)
        self._open(recover(folder, self._catalogue, self._mark.read(), now_s=self._clock.now()))
        erase_pending(folder, self._catalogue)
        self._view = StoreView(folder)
        self._group = GroupCommit[WriteBatch, Receipt | UnderstudyError](
            self._commit, size=_batch_bytes, most=_MOST_BYTES
        )

    # --- opening ------------------------------------------------------------------------------------------------

    def _open(self, found: Recovered) -> None:
        """Copy what the log held into a file of our own, made durable before anybody may read it."""
        self._next_commit, self._next_arrival = found.first_commit, found.first_arrival
        self._next_quarantine = self._catalogue.fact("next_quarantine", 1)
        self._sealed_below = found.first_arrival
        self._tombstones = {player: at for player, at in self._catalogue.rows("SELECT player, at FROM tombstones")}
        self._epochs = dict(self._catalogue.rows("SELECT partition, epoch FROM claims"))
        self._positions: dict[str, str | None] = dict(
            self._catalogue.rows("SELECT partition, position FROM positions")
        )
        self._file_no = found.next_file
        self._current = Generation(files=[self._file_no])
        self._log = LogFile(log_path(self.folder, self._file_no), sync=no_sync)
        for parts in found.entries():
            self._write_entry(parts, None)
        self._log.sync_with(self._sync)
        self._write_mark()
        for number in found.old_files:
            remove(log_path(self.folder, number))

    # --- the ExperienceStore port ---------------------------------------------------------------------------------

    def claim(self, partition: str, *, owner: str, ttl_s: float) -> Claim:
        self._check_open()
        now = self._clock.now()
        with self._state, self._catalogue.changing():
            row = self._catalogue.one("SELECT epoch, owner, expires FROM claims WHERE partition = ?", partition)
            if row is not None and row[1] != owner and row[2] > now:
                raise ClaimLost(
                    f"partition {partition} is claimed by {row[1]} for {row[2] - now:.1f} s more",
                    retry_after_s=row[2] - now,
                )
            epoch = (row[0] if row else 0) + 1
            self._catalogue.run("INSERT OR REPLACE INTO claims VALUES (?, ?, ?, ?)", partition, epoch, owner, now + ttl_s)
            self._epochs[partition] = epoch
            position = self._positions.get(partition)
        return Claim(partition, epoch, None if position is None else Position(position))

    def write(self, batch: WriteBatch) -> Receipt:
        self._check_open()
        result = self._group.submit(batch)
        if isinstance(result, UnderstudyError):
            raise result
        return result

    def tail(self, cursor: Cursor | None, *, max_items: int, wait_s: float) -> Tail:
        return self._view.tail(cursor, max_items=max_items, wait_s=wait_s)

    def sessions(self, wanted: SessionFilter) -> Iterator[SessionInfo]:
        with self._state:
            unsealed = {**(self._frozen.sessions if self._frozen else {}), **self._current.sessions}
        return session_infos(self._lookup, unsealed, wanted)

    def forget(self, player: bytes) -> int:
        """Erase a player: refused and hidden from the next moment on, off the disk when this returns."""
        with self._state:
            before = self._count_forgotten(player)
            self.commit_event(Event(kind="forget", at_s=self._clock.now(), player=player))
            self.erase()
            return self._count_forgotten(player) - before

    def _count_forgotten(self, player: bytes) -> int:
        query = "SELECT count(*) FROM arrivals WHERE player = ? AND kind = 0 AND fate = ?"
        return int(self._lookup.one(query, player, FORGOTTEN)[0])

    def erase(self) -> None:
        """Seal what is in the log and carry out promised erasures."""
        with self._state:
            self.freeze(wait=True)
            erase_pending(self.folder, self._catalogue)
            self._cache.clear()

    # --- the StoreAdmin port ----------------------------------------------------------------------------------------

    def audit(self) -> Audit:
        return summary(audit(self._view))

    def quarantined(self, *, after_id: int = 0, limit: int = 1000) -> Sequence[Quarantined]:
        self.freeze(wait=True)
        return quarantined(self._lookup, after_id=after_id, limit=limit)

    def quarantine(self, chunks: Sequence[tuple[uuid.UUID, int]], *, reason: str) -> int:
        with self._state:
            there = [(session.bytes, number) for session, number in chunks if self.key_of(session, number) is not None]
            if there:
                self.commit_event(Event(kind="quarantine", at_s=self._clock.now(), chunks=there, reason=reason))
                self.erase()
            return len(there)

    def replay(self, ids: Sequence[int], candidates: Sequence[Candidate]) -> Receipt:
        with self._state:
            self._check_open()
            self.freeze(wait=True)
            draft = Draft(self, self._next_arrival, self._next_quarantine)
            decided = [draft.replay(candidate, id) for id, candidate in zip(ids, candidates, strict=True)]
            if draft.is_worth_writing:
                self._append(draft.trailer(self._next_commit), draft.raws, draft.chunks)
            return Receipt([fate for fate, _ in decided], [reason for _, reason in decided])

    def expire(self, before_s: float) -> int:
        with self._state:
            self.freeze(wait=True)
            return expire(self.folder, self._catalogue, before_s)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with self._state:
            self._wait_for_sealer()
            self._log.close()
        self._view.close()
        self._mark.close()
        self._lookup.close()
        self._catalogue.close()
        self._lock_file.close()

    def __enter__(self) -> "LocalStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def positions(self) -> dict[str, Position | None]:
        """Every partition's durable position."""
        with self._state:
            return {name: None if text is None else Position(text) for name, text in self._positions.items()}

    @property
    def next_arrival(self) -> int:
        """The number the next stored frame gets; everything below it is durable."""
        return self._next_arrival

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the store was closed")
        if self._failed:
            raise StorageFailed(self._failed)
        if self._seal_error is not None:
            raise StorageFailed(f"sealing failed: {self._seal_error}; reopen the store") from self._seal_error

    # --- committing -----------------------------------------------------------------------------------------------

    def _commit(self, batches: Sequence[WriteBatch]) -> Sequence[Receipt | UnderstudyError]:
        with self._state:
            self._check_open()
            if self._sealer is not None and not self._sealer.is_alive():
                self._finish_sealing()
            draft = Draft(self, self._next_arrival, self._next_quarantine)
            results: list[Receipt | UnderstudyError] = []
            for batch in batches:
                if batch.epoch != self._epochs.get(batch.partition):
                    results.append(ClaimLost(f"epoch {batch.epoch} of partition {batch.partition} is stale"))
                else:
                    results.append(draft.take(batch))
            if draft.is_worth_writing:
                self._append(draft.trailer(self._next_commit), draft.raws, draft.chunks)
            return results

    def commit_event(self, event: Event) -> int:
        """Make an event durable under its own arrival number."""
        with self._state:
            self._check_open()
            number = self._next_arrival
            self._append(Trailer(number=self._next_commit, first_arrival=number, event=event), [], [])
            return number

    def _append(self, trailer: Trailer, raws: list[bytes], chunks: list[Chunk | None]) -> None:
        try:
            self._write_entry(commit_parts(trailer, raws), chunks)
        except StorageFailed as error:
            # Nobody knows whether the entry is on the disk: only a new start can tell.
            self._failed = f"{error} (the store must be reopened)"
            raise
        self._write_mark()
        self._maybe_freeze()

    def _write_entry(self, parts: Sequence[bytes], chunks: list[Chunk | None] | None) -> None:
        entry = self._log.append(parts)
        commit = read_commit(entry)
        self._current.apply(commit, self._file_no, before=self._state_before, chunks=chunks)
        trailer = commit.trailer
        self._next_commit = trailer.number + 1
        self._next_arrival = trailer.first_arrival + trailer.n_arrivals
        self._positions.update(dict(trailer.positions))
        for facts in trailer.quarantined:
            self._next_quarantine = max(self._next_quarantine, facts.id + 1)
        if trailer.event is not None and trailer.event.kind == "forget":
            self._tombstones[trailer.event.player] = trailer.event.at_s
            self._cache.clear()

    def _write_mark(self) -> None:
        self._mark.write(Watermark(self._sealed_below, self._next_arrival, self._file_no, self._log.size_bytes))

    # --- what is known of a session ---------------------------------------------------------------------------------

    def state_of(self, session: uuid.UUID) -> tuple[str, SessionState] | None:
        return self._current.sessions.get(session) or self._state_before(session)

    def _state_before(self, session: uuid.UUID) -> tuple[str, SessionState] | None:
        if self._frozen is not None and (known := self._frozen.sessions.get(session)):
            return known
        if session in self._cache:
            self._cache.move_to_end(session)
            return self._cache[session]
        row = self._lookup.one("SELECT game, state FROM sessions WHERE session = ?", session.bytes)
        if row is None:
            return None
        self._remember(session, (row[0], unpack_state(row[1])))
        return self._cache[session]

    def _remember(self, session: uuid.UUID, known: tuple[str, SessionState]) -> None:
        self._cache[session] = known
        self._cache.move_to_end(session)
        while len(self._cache) > _CACHE_SESSIONS:
            self._cache.popitem(last=False)

    def key_of(self, session: uuid.UUID, chunk_no: int) -> tuple[int, int] | None:
        """(crc, length) stored under a number."""
        for generation in (self._current, self._frozen):
            if generation is not None and (key := generation.keys.get((session, chunk_no))):
                return key
        return self._lookup.key_of(session, chunk_no)

    def quarantined_crcs(self, session: bytes, chunk_no: int) -> list[int]:
        found = self._lookup.quarantined_key(uuid.UUID(bytes=session), chunk_no)
        for generation in (self._current, self._frozen):
            if generation is not None:
                found += generation.quarantined_keys.get((session, chunk_no), [])
        return found

    def is_forgotten(self, player: bytes, session: uuid.UUID) -> bool:
        """Whether a player was erased after this session began."""
        at = self._tombstones.get(player)
        return at is not None and session_time_s(session) <= at

    # --- sealing ----------------------------------------------------------------------------------------------------

    def _maybe_freeze(self) -> None:
        current = self._current
        if (
            current.log_bytes >= self._seal_bytes
            or current.decoded_bytes >= self._seal_bytes
            or max(current.rows_by_schema.values(), default=0) >= self._seal_rows
        ):
            self.freeze()

    def freeze(self, *, wait: bool = False) -> None:
        """Start a new log file and seal the old ones in the background."""
        with self._state:
            self._wait_for_sealer()
            self._check_open()
            if self._current.log_bytes:
                self._log.close()
                self._file_no += 1
                self._log = LogFile(log_path(self.folder, self._file_no), sync=self._sync)
                self._frozen, self._current = self._current, Generation(files=[self._file_no])
                self._write_mark()
                self._sealer = threading.Thread(target=self._seal, name="understudy-seal", daemon=True)
                self._sealer.start()
            if wait:
                self._wait_for_sealer()
                self._check_open()

    def _wait_for_sealer(self) -> None:
        if self._sealer is not None:
            self._sealer.join()
            self._finish_sealing()

    def _finish_sealing(self) -> None:
        """Once the sealer is done: let readers look into the segments instead of the log, then drop the log."""
        self._sealer, frozen = None, self._frozen
        if self._seal_error is not None or frozen is None:
            return
        for session, known in list(frozen.sessions.items())[-_CACHE_SESSIONS:]:
            self._remember(session, known)
        self._frozen = None
        self._sealed_below = self._catalogue.fact("sealed_below")
        self._write_mark()
        for number in frozen.files:
            remove(log_path(self.folder, number))

    def _seal(self) -> None:
        # Runs beside the writer and takes none of its locks: the frozen generation no longer changes.
        assert self._frozen is not None
        try:
            seal(self.folder, self._catalogue, self._frozen, specs=self._specs)
        except BaseException as error:
            self._seal_error = error


def _batch_bytes(batch: WriteBatch) -> int:
    refused = sum(len(one.raw) for one in (*batch.refused, *batch.parked))
    return refused + sum(candidate.frame.size_bytes for candidate in batch.candidates)
