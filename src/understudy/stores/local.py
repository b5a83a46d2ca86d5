"""The embedded store: whole frames in one SQLite database, one durable transaction per batch.

Only one process writes, guarded by a `FileLock`. Frames, positions, sessions, quarantine and
erasures change together in that transaction, so a crash leaves either all of a batch or none of it.
"""

import sqlite3
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import (
    ClaimLost,
    Closed,
    ConfigError,
    Corrupt,
    Refused,
    StorageFailed,
    StorageFull,
    UnderstudyError,
)
from understudy.core.log import FileLock, GroupCommit, make_folder, write_file
from understudy.experience.frame import FrameKind, decode_frame
from understudy.experience.game import GameSpec
from understudy.experience.session import REMEMBER_S, tombstone_of, withdraw
from understudy.ports import (
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
from understudy.stores.database import (
    EVICTED,
    FILE_NAME,
    IS_REPLAYABLE,
    PAGE_BYTES,
    REPLAYED,
    RESERVE_BYTES,
    Database,
    Synchronous,
    check_folder,
    check_of,
    checked,
    disk,
    quarantine_check,
)
from understudy.stores.draft import Draft, Sessions, StoredFrame
from understudy.stores.view import (
    COLUMNS,
    EXPIRED,
    FORGOTTEN,
    QUARANTINED,
    STORED,
    FrameRow,
    LocalLookup,
    StoreCounters,
    StoreView,
    read_head,
)

_GROUP_BYTES = 32 * 1024 * 1024

_SLICE_ROWS = 256
_SLICE_BYTES = 1024 * 1024
_SLICE_REFUSED = 4
"""Quarantined frames, of up to 512 KiB each, that one transaction erases."""
QUARANTINE_BYTES = 256 * 1024 * 1024
"""Most bytes of rejected frames in quarantine, and of replayable ones; beyond that, the oldest of
the same kind are evicted."""
_LEAST_BYTES = 1024
"""A quarantined frame counts as at least this many bytes, so that a large frame does not evict
thousands of small ones in one commit."""

_COMPACT_PAGES = 8


@dataclass(slots=True)
class _Ownership:
    """Which owner may write a partition, and until when."""

    owner: str
    epoch: int
    ttl_s: float
    expires_s: float


class LocalStore:
    """Stores each step exactly once on local disk.

    Only one process at a time may open it; others read it with `StoreView`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        specs: Specs | None = None,
        clock: Clock | None = None,
        synchronous: Synchronous = "FULL",
        reserve_bytes: int = RESERVE_BYTES,
    ) -> None:
        """`specs` returns a game's spec when its first chunk arrives; the store keeps a copy."""
        if sys.platform == "win32":
            raise ConfigError(
                "the local store runs on Linux and macOS only; on Windows connect to a gateway "
                "instead"
            )
        check_folder(folder)
        make_folder(folder)
        self.folder = folder
        self._specs = specs
        self._clock = clock or SystemClock()
        self._closed = False
        self.is_erasing = True
        """Whether erased bytes may still be in SQLite's log because of a reader; `erase` retries.

        True until the first check, since a crash may have left some.
        """
        self._group = GroupCommit[WriteBatch, Receipt | UnderstudyError](
            self._commit, size=_batch_bytes, most=_GROUP_BYTES
        )
        with ExitStack() as opened:
            opened.enter_context(FileLock(folder / ".lock", what="the store", timeout_s=0.3))
            database = Database(folder, synchronous=synchronous, reserve_bytes=reserve_bytes)
            self._database = opened.enter_context(closing(database))
            self._db = database.db
            self._state = database.lock
            with disk("opening the store"):
                self._load()
            self._finish_erasures()
            self._view = opened.enter_context(StoreView(folder))
            self._opened = opened.pop_all()

    def _load(self) -> None:
        db = self._db
        self._head = read_head(db)
        positions = (checked("positions", row) for row in db.execute("SELECT * FROM positions"))
        self._positions: dict[str, str | None] = dict(positions)
        claims = (checked("claims", row) for row in db.execute("SELECT * FROM claims"))
        self._owners = {partition: _Ownership("", epoch, 0.0, 0.0) for partition, epoch in claims}
        schemas = [checked("schemas", row) for row in db.execute("SELECT * FROM schemas")]
        self._schemas: dict[str, int] = {schema: number for number, _, schema, _ in schemas}
        self._without_spec = {schema for _, _, schema, spec in schemas if spec is None}
        self._held_bytes = self._count_held()
        self.lookup = LocalLookup(db)

    # --- the ExperienceStore port -----------------------------------------------------------------

    def claim(self, partition: str, *, owner: str, ttl_s: float) -> Claim:
        with self._state:
            self._check_open()
            now_s = self._clock.now()
            ownership = self._owners.get(partition) or _Ownership("", 0, 0.0, 0.0)
            if ownership.owner != owner and ownership.expires_s > now_s:
                remaining_s = ownership.expires_s - now_s
                raise ClaimLost(
                    f"partition {partition} is claimed by {ownership.owner} for another "
                    f"{remaining_s:.1f} s; claim it again after that",
                    retry_after_s=remaining_s,
                )
            epoch = ownership.epoch + 1
            with self._changing("a claim"):
                row = (partition, epoch, check_of(partition, epoch))
                self._db.execute("REPLACE INTO claims VALUES (?, ?, ?)", row)
            self._owners[partition] = _Ownership(owner, epoch, ttl_s, now_s + ttl_s)
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
        try:
            return self._view.tail(cursor, max_items=max_items, wait_s=wait_s)
        except StorageFailed:
            self._check_not_closed()  # closed while it waited
            raise

    def cursor_before(self, chunks: Iterable[tuple[uuid.UUID, int]]) -> Cursor:
        """A cursor after which a tail returns each of these chunks that is stored."""
        self._check_not_closed()
        return self._view.cursor_before(chunks)

    def sessions(self, session_filter: SessionFilter) -> Iterator[SessionInfo]:
        self._check_not_closed()
        return self._view.sessions(session_filter)

    def forget(self, player: bytes, *, at_s: float | None = None) -> int:
        """Erase a player; return the number of erased data chunks.

        The player's frames are hidden, and late ones refused, at once. On return their bytes are
        off the disk, unless `is_erasing`. `at_s` is the time of the decision if it was made earlier
        elsewhere; later sessions of the player are kept.
        """
        at_s = self._clock.now() if at_s is None else at_s

        def promise() -> int:
            number = self._event("forgotten", at_s, player=tombstone_of(player))
            row = (number, player, self._head.next_session)
            self._db.execute("INSERT INTO erasures VALUES (?, ?, ?, ?)", (*row, check_of(*row)))
            return 0

        with self._state:
            # Under one lock: a commit in between would store a new session that is never erased.
            self._erasing("forgetting a player", promise)
            self.lookup.forget(tombstone_of(player), at_s)
            self.mark()
        return self.erase()

    def forget_tombstone(self, tombstone: bytes, *, at_s: float | None = None) -> int:
        """Erase the player with this tombstone; for a window, which learns only the tombstone."""
        self._check_open()
        players = self._database.rows(
            "SELECT player FROM sessions UNION SELECT player FROM quarantine"
        )
        matches = [player for (player,) in players if tombstone_of(player) == tombstone]
        if matches:
            return sum(self.forget(player, at_s=at_s) for player in matches)
        at_s = self._clock.now() if at_s is None else at_s
        with self._state:
            with self._changing("forgetting a player"):
                self._event("forgotten", at_s, player=tombstone)
            self.lookup.forget(tombstone, at_s)
            self.mark()
        return 0

    # --- the StoreAdmin port ----------------------------------------------------------------------

    def audit(self) -> Audit:
        self._check_not_closed()
        return summary(audit(self._view))

    def quarantined(self, *, after_id: int = 0, limit: int = 1000) -> Sequence[Quarantined]:
        self._check_not_closed()
        return self._view.quarantined(after_id=after_id, limit=limit)

    def quarantine(self, chunks: Sequence[tuple[uuid.UUID, int]], *, reason: str) -> int:
        """Withdraw stored chunks from learners; return how many were stored."""
        keys = sorted(set(chunks))
        return sum(
            self._quarantine(keys[at : at + _SLICE_ROWS], reason)
            for at in range(0, len(keys), _SLICE_ROWS)
        )

    def _quarantine(self, chunks: Sequence[tuple[uuid.UUID, int]], reason: str) -> int:
        with self._state:
            self._check_open()
            with disk("reading the store"):
                frames = [self.lookup.frame(*key) for key in chunks]
            rows = [row for row in frames if row is not None and row.gone == 0]
            if not rows:
                return 0
            sessions: Sessions = {}
            with self._changing("quarantine"):
                event = self._event("quarantined", self._clock.now())
                first = self._head.next_quarantine
                for number, row in enumerate(rows, first):
                    body = self._db.execute(
                        "SELECT raw FROM bodies WHERE arrival = ?", (row.arrival,)
                    ).fetchone()
                    try:
                        raw = body[0] if body is not None else b""
                        frame = decode_frame(raw)
                    except Refused as error:
                        raise Corrupt(
                            f"the frame with arrival number {row.arrival} of the store is damaged "
                            "and cannot be quarantined; run `understudy data verify` to see its "
                            "chunk"
                        ) from error
                    game, state = sessions.get(frame.session) or self.lookup.require_state(
                        frame.session
                    )
                    sessions[frame.session] = (game, withdraw(state, row.n_steps))
                    columns = (
                        number,
                        reason,
                        "",
                        0,
                        float(frame.received_s),
                        game,
                        frame.session.bytes,
                        frame.chunk_no,
                        frame.body_crc,
                        frame.player,
                        0,
                    )
                    self._put_quarantined(columns, raw)
                    self._remove_bytes(row, QUARANTINED, event=event)
                self._save_sessions(sessions)
                self._save_head(next_quarantine=first + len(rows))
                held_bytes = self._bound_quarantine(first)
            self._held_bytes = held_bytes
            self._database.wrote(sum(2 * row.body_len for row in rows))
            self.mark()
            return len(rows)

    def replay(self, ids: Sequence[int], candidates: Sequence[Candidate]) -> Receipt:
        with self._state:
            self._check_open()
            with disk("reading the store"):
                draft = Draft(self.lookup, self._head.next_quarantine)
                decided = [
                    draft.replay(candidate, number)
                    for number, candidate in zip(ids, candidates, strict=True)
                ]
            if draft.is_worth_writing:
                self._save(draft)
                self.mark()
            return Receipt([fate for fate, _ in decided], [reason for _, reason in decided])

    def expire(self, before_s: float) -> int:
        """Drop chunks and quarantined bytes received before a time; return the number of chunks.

        The records of these chunks stay until the chunks are too old to be sent again. Drop reports
        stay that long too, since they explain gaps.
        """
        self._check_open()
        query = (
            f"SELECT {COLUMNS} FROM frames f WHERE fate = {STORED} "
            f"AND kind <> {int(FrameKind.DROP)} AND received < ? ORDER BY received LIMIT ?"
        )
        n_erased = self._erase_frames(query, (int(before_s),), EXPIRED, "expiry")
        refused = (
            "SELECT * FROM quarantine WHERE id > ? AND received < ? AND raw <> x'' ORDER BY id "
            "LIMIT ?"
        )
        last = 0
        while rows := self._database.rows(refused, (last, before_s, _SLICE_REFUSED)):
            last = rows[-1][0]

            def empty(rows: list[tuple[Any, ...]] = rows) -> int:
                for *columns, _, _ in rows:
                    self._put_quarantined(columns, b"")
                return sum(len(row[-1]) for row in rows)

            self._erasing("expiry", empty)
        with self._state:
            self._held_bytes = self._count_held()
        self._prune(min(before_s, self._clock.now() - REMEMBER_S))
        self._database.truncate_log()
        self._database.keep_reserve()
        return n_erased

    def close(self) -> None:
        with self._state:
            if self._closed:
                return
            self._closed = True
        self._opened.close()

    def __enter__(self) -> "LocalStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- for the process that has it open ---------------------------------------------------------

    def release(self, partitions: Iterable[str]) -> None:
        """Delete the positions and claims of partitions that the stream no longer has."""
        names = list(partitions)
        with self._state:
            with self._changing("positions"):
                for table in ("positions", "claims"):
                    self._db.executemany(
                        f"DELETE FROM {table} WHERE partition = ?", [(name,) for name in names]
                    )
            for name in names:
                self._positions.pop(name, None)
                self._owners.pop(name, None)

    def stored_specs(self) -> list[GameSpec]:
        """The specs of all stored chunks, as far as they were registered."""
        self._check_not_closed()
        return self._view.specs()

    def positions(self) -> dict[str, Position | None]:
        """Every partition's durable position."""
        with self._state:
            return {
                name: None if text is None else Position(text)
                for name, text in self._positions.items()
            }

    def mark(self) -> None:
        """Make older copies of the database detectable; call after the stream was trimmed."""
        self._database.mark(self._head.next_arrival)

    @property
    def next_arrival(self) -> int:
        """The arrival number of the next frame or event; everything below it is durable."""
        return self._head.next_arrival

    def sizes(self) -> list[tuple[int, int, int]]:
        """(second, steps, bytes) of what is stored, by second of arrival, newest first."""
        query = (
            "SELECT received, sum(n_steps), sum(body_len) FROM frames "
            f"WHERE fate = {STORED} GROUP BY received ORDER BY received DESC"
        )
        return self._database.rows(query)

    def back_up(self, target: Path, *, between: Callable[[], object] | None = None) -> None:
        """Copy the store to `target`, a new folder, as it is when the copy is done.

        `between` is called between the steps of the copy and may write to the store; the copy
        includes that too.
        """
        self._check_open()
        make_folder(target)
        # Read first: the copy has everything up to this mark.
        facts = (self.folder / "store.json").read_bytes()
        with disk("a copy of the store"):
            (target / FILE_NAME).touch(0o600, exist_ok=False)  # as private as the database itself
            with closing(sqlite3.connect(target / FILE_NAME, isolation_level=None)) as copy:
                self._db.backup(
                    copy, pages=256, progress=lambda *_: between() if between is not None else None
                )
                # One file, which can be read from a read-only disk.
                copy.execute("PRAGMA journal_mode = DELETE")
            write_file(target / "store.json", facts)

    def compact(self, *, slice_s: float = 0.05, between: Callable[[], object] | None = None) -> int:
        """Shrink the database in slices of about `slice_s`; return the bytes freed.

        `between` is called after each slice.
        """
        self._check_open()
        before = self._database.pragma("page_count")
        work_s = slice_s / 8
        while self._database.pragma("freelist_count"):
            with self._state:
                self._check_open()
                began_s = time.monotonic()
                moved = 0
                with self._changing("compacting"):
                    # At least once per slice, even if its time is already over, so that this ends.
                    while not moved or (
                        time.monotonic() < began_s + work_s
                        and self._database.pragma("freelist_count")
                    ):
                        self._db.execute(f"PRAGMA incremental_vacuum({_COMPACT_PAGES})").fetchall()
                        moved += _COMPACT_PAGES
                self._database.wrote(moved * PAGE_BYTES)
                # Sync and checkpoint take longer than the work itself: leave them time in the next
                # slice.
                took_s = time.monotonic() - began_s
                work_s = min(
                    slice_s / 2, max(slice_s / 100, work_s * min(1.2, slice_s / 3 / took_s))
                )
            if between is not None:
                between()
        self._database.truncate_log()
        return (before - self._database.pragma("page_count")) * PAGE_BYTES

    def trim(self, keep: Iterable[tuple[uuid.UUID, int]]) -> int:
        """Delete all frames that arrived before each of these chunks; return how many.

        Their records are deleted, too, so that the database stops growing: for a store whose
        frames are never sent again. Quarantined frames stay.
        """
        with self._state:
            self._check_open()
            with disk("reading the store"):
                kept = [self.lookup.frame(*key) for key in keep]
        below = min((row.arrival for row in kept if row is not None), default=0)
        query = f"SELECT {COLUMNS} FROM frames f WHERE arrival < ? ORDER BY arrival LIMIT ?"
        total = 0
        while page := self._database.rows(query, (below, _SLICE_ROWS)):
            rows = _first_slice(page)

            def delete(rows: list[FrameRow] = rows) -> int:
                last = rows[-1].arrival
                received_s = max(row.received for row in rows)
                self._save_head(
                    pruned_below=max(self._head.pruned_below, last + 1),
                    pruned_before_s=max(self._head.pruned_before_s, received_s + 1),
                )
                for table in ("bodies", "frames"):
                    self._db.execute(f"DELETE FROM {table} WHERE arrival <= ?", (last,))
                return sum(row.body_len for row in rows)

            self._erasing("trimming the store", delete)
            total += len(rows)
        return total

    def erase(self) -> int:
        """Finish pending erasures, also after a crash; return the number of erased chunks."""
        with self._state:
            self._check_open()
            return self._finish_erasures()

    # --- committing -------------------------------------------------------------------------------

    def _commit(self, batches: Sequence[WriteBatch]) -> Sequence[Receipt | UnderstudyError]:
        with self._state:
            self._check_open()
            with disk("reading the store"):
                draft = Draft(self.lookup, self._head.next_quarantine)
                results = [self._add(draft, batch) for batch in batches]
            if draft.is_worth_writing:
                self._save(draft)
            return results

    def _add(self, draft: Draft, batch: WriteBatch) -> Receipt | ClaimLost:
        ownership = self._owners.get(batch.partition)
        if ownership is None or ownership.epoch != batch.epoch:
            return ClaimLost(
                f"epoch {batch.epoch} of partition {batch.partition} is stale; claim the partition "
                "again"
            )
        ownership.expires_s = self._clock.now() + ownership.ttl_s
        return draft.add(batch)

    def _save(self, draft: Draft) -> None:
        """Write a draft in one durable transaction."""
        fresh = self._fresh_schemas(draft.stored)
        schemas = {**self._schemas, **{schema: number for number, _, schema, _ in fresh}}
        with disk("reading the store"):
            sessions = draft.sessions()
        has_replayed = any(new.replays for new in draft.stored)
        with self._changing("a commit"):
            rows_of_schemas = [(*row, check_of(*row)) for row in fresh]
            self._db.executemany("REPLACE INTO schemas VALUES (?, ?, ?, ?, ?)", rows_of_schemas)
            ids = self._save_sessions(sessions)
            arrival = self._head.next_arrival
            rows: list[tuple[int, ...]] = []
            for number, new in enumerate(draft.stored, arrival):
                frame = new.frame
                row = (
                    number,
                    ids[frame.session],
                    frame.chunk_no,
                    0,
                    int(frame.kind),
                    STORED,
                    0,
                    frame.received_s,
                    schemas.get(new.schema, 0),
                    new.first_step,
                    new.n_steps,
                    frame.body_crc,
                    len(frame.body),
                )
                rows.append((*row, check_of(*row)))
                if new.replays:
                    query = "SELECT * FROM quarantine WHERE id = ?"
                    *columns, _, _, _ = self._db.execute(query, (new.replays,)).fetchone()
                    self._put_quarantined((*columns, REPLAYED), b"")
            self._db.executemany(_ADD_FRAME, rows)
            self._db.executemany(
                "INSERT INTO bodies VALUES (?, ?)", enumerate(draft.stored_raws, arrival)
            )
            for refused, raw in zip(draft.quarantined, draft.quarantined_raws, strict=True):
                columns = [
                    refused.id,
                    refused.reason,
                    refused.detail,
                    int(refused.parked),
                    refused.received_s,
                    refused.game,
                    refused.session,
                    refused.chunk_no,
                    refused.crc,
                    refused.player,
                    0,
                ]
                self._put_quarantined(columns, raw)
            held_bytes = self._bound_quarantine(self._head.next_quarantine, recount=has_replayed)
            positions = [
                (name, text, check_of(name, text)) for name, text in draft.positions.items()
            ]
            self._db.executemany("REPLACE INTO positions VALUES (?, ?, ?)", positions)
            self._forget_sessions(session.bytes for session in draft.forgotten)
            self._save_head(
                next_arrival=arrival + len(draft.stored),
                next_quarantine=self._head.next_quarantine + len(draft.quarantined),
            )
        self._schemas = schemas
        self._without_spec -= {schema for _, _, schema, spec in fresh if spec is not None}
        self._without_spec |= {schema for _, _, schema, spec in fresh if spec is None}
        self._positions.update(draft.positions)
        self._held_bytes = held_bytes
        self._database.wrote(
            sum(map(len, draft.stored_raws)) + sum(map(len, draft.quarantined_raws))
        )

    def _fresh_schemas(
        self, stored: Sequence[StoredFrame]
    ) -> list[tuple[int, str, str, bytes | None]]:
        """Rows of the schemas that are new, or whose spec was unknown until now."""
        games = {new.schema: str(new.game) for new in stored if new.frame.kind is FrameKind.DATA}
        rows: list[tuple[int, str, str, bytes | None]] = []
        following = max(self._schemas.values(), default=0) + 1
        for schema, game in games.items():
            if schema in self._schemas and schema not in self._without_spec:
                continue
            spec = self._specs.spec(game, schema) if self._specs is not None else None
            if schema not in self._schemas or spec is not None:
                number = self._schemas.get(schema, following + len(rows))
                rows.append((number, game, schema, None if spec is None else spec.to_json()))
        return rows

    def _save_sessions(self, sessions: Sessions) -> dict[uuid.UUID, int]:
        """Store the current state of sessions; return the id of each."""
        ids: dict[uuid.UUID, int] = {}
        rows: list[tuple[Any, ...]] = []
        for session, (game, state) in sessions.items():
            number = self.lookup.id_of(session)
            if number is None:
                number = self._head.next_session
                self._head = self._head._replace(next_session=number + 1)
            ids[session] = number
            self.lookup.remember(session, number, game, state)
            row = (number, session.bytes, state.player, game, state.last_received_s, state.pack())
            rows.append((*row, check_of(*row)))
        self._db.executemany(_PUT_SESSION, rows)
        return ids

    def _event(self, reason: str, at_s: float, *, player: bytes | None = None) -> int:
        """Add an event, which uses an arrival number like a frame."""
        number = self._head.next_arrival
        row = (number, reason, at_s, player)
        self._db.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?)", (*row, check_of(*row)))
        self._save_head(next_arrival=number + 1)
        return number

    def _save_head(self, **changes: Any) -> None:
        self._head = self._head._replace(**changes)
        row = (1, *self._head)
        self._db.execute(_PUT_HEAD, (*row, check_of(*row)))

    def _put_quarantined(self, columns: Sequence[Any], raw: bytes) -> None:
        self._db.execute(_PUT_QUARANTINED, (*columns, quarantine_check(columns, raw), raw))

    def _bound_quarantine(self, first_id: int, *, recount: bool = False) -> Counter[int]:
        """Evict the oldest frames beyond the limits, after those from `first_id` on were added.

        Returns the bytes that are left, by whether the frames are replayable. `recount`: others
        were removed.
        """
        held_bytes = (
            self._count_held() if recount else self._held_bytes + self._count_held(first_id)
        )
        for kind, size in held_bytes.items():
            excess = size - QUARANTINE_BYTES
            evicted: list[tuple[Any, ...]] = []
            oldest = self._db.execute(_OLDEST_HELD, (kind,))
            while excess > 0 and (row := oldest.fetchone()) is not None:
                *columns, replayed, _, counted_bytes = row
                evicted.append((*columns, replayed or EVICTED))
                excess -= counted_bytes
            oldest.close()
            for columns in evicted:
                self._put_quarantined(columns, b"")
            held_bytes[kind] = QUARANTINE_BYTES + excess
        return held_bytes

    def _count_held(self, first_id: int = 0) -> Counter[int]:
        """The bytes of quarantined frames from an id on, by whether the frames are replayable."""
        return Counter(dict(self._database.rows(_HELD_BYTES, (first_id,))))

    def _forget_sessions(self, sessions: Iterable[bytes]) -> None:
        digests = [tombstone_of(session) for session in sessions]
        rows = [(digest, check_of(digest)) for digest in digests]
        self._db.executemany("INSERT OR IGNORE INTO forgotten_sessions VALUES (?, ?)", rows)

    # --- erasing ----------------------------------------------------------------------------------

    def _remove_bytes(self, row: FrameRow, fate: int, *, event: int = 0) -> None:
        """Delete a frame's bytes; keep its record, or only the arrival number if forgotten."""
        self._db.execute("DELETE FROM bodies WHERE arrival = ?", (row.arrival,))
        removed = row.changed(gone=row.arrival, fate=fate, event=event)
        if fate == FORGOTTEN:
            now_s = int(self._clock.now())
            removed = removed.changed(session=None, chunk_no=None, received=now_s, schema=0)
            removed = removed.changed(first_step=-1, n_steps=0, body_crc=0, body_len=0)
        self._db.execute(_PUT_FRAME, removed)

    def _erase_frames(self, query: str, values: tuple[Any, ...], fate: int, doing: str) -> int:
        """Remove the bytes of a query's frames in slices; return how many were stored chunks."""
        total = 0
        while page := self._database.rows(query, (*values, _SLICE_ROWS)):
            rows = _first_slice(page)

            def remove_bytes(rows: list[FrameRow] = rows) -> int:
                for row in rows:
                    self._remove_bytes(row, fate)
                return sum(row.body_len for row in rows)

            self._erasing(doing, remove_bytes)
            total += sum(row.kind == FrameKind.DATA and row.fate == STORED for row in rows)
        return total

    def _finish_erasures(self) -> int:
        pending = self._database.rows("SELECT * FROM erasures")
        total = sum(self._erase_player(*checked("erasures", row)) for row in pending)
        if pending or self.is_erasing:
            # An erasure is complete only when no old page is left in the write-ahead log.
            self.is_erasing = not self._database.truncate_log()
            self._database.keep_reserve()
        return total

    def _erase_player(self, arrival: int, player: bytes, sessions_below: int) -> int:
        """Erase a player's data up to the time of forgetting; return the number of chunks."""
        doing = "forgetting a player"
        player_sessions = "SELECT id FROM sessions WHERE player = ? AND id < ?"
        frames = f"SELECT {COLUMNS} FROM frames f WHERE session IN ({player_sessions}) LIMIT ?"
        total = self._erase_frames(frames, (player, sessions_below), FORGOTTEN, doing)
        ((at_s,),) = self._database.rows("SELECT at FROM events WHERE arrival = ?", (arrival,))
        # Frames with a damaged header have no player, but may contain the pseudonym anywhere.
        refused = (
            "SELECT id FROM quarantine WHERE id > ?5 AND received <= ?1 AND (player = ?2 OR "
            "instr(raw, ?2) > 0 OR session IN (SELECT session FROM sessions WHERE player = ?2 AND "
            "id < ?3)) ORDER BY id LIMIT ?4"
        )
        last = 0
        while ids := self._database.rows(
            refused, (at_s, player, sessions_below, _SLICE_REFUSED, last)
        ):
            last = ids[-1][0]

            def drop(ids: list[tuple[Any, ...]] = ids) -> int:
                self._db.executemany("DELETE FROM quarantine WHERE id = ?", ids)
                return len(ids) * _SLICE_BYTES // _SLICE_REFUSED

            self._erasing(doing, drop)
        named = "SELECT id, session FROM sessions WHERE player = ? AND id < ? LIMIT ?"
        while rows := self._database.rows(named, (player, sessions_below, _SLICE_ROWS)):

            def unname(rows: list[tuple[Any, ...]] = rows) -> int:
                self._forget_sessions(session for _, session in rows)
                self._db.executemany(
                    "DELETE FROM sessions WHERE id = ?", [(number,) for number, _ in rows]
                )
                return 0

            self._erasing(doing, unname)

        def finish() -> int:
            self._db.execute("DELETE FROM erasures WHERE arrival = ?", (arrival,))
            return 0

        self._erasing(doing, finish)
        self.lookup.clear()
        self._held_bytes = self._count_held()
        return total

    def _prune(self, before_s: float) -> None:
        """Delete the records of removed frames from the oldest on, up to the first one to keep.

        A record is kept while its chunk is readable, or if its frame was received since `before_s`
        and may be sent again.
        """
        oldest_query = (
            "SELECT arrival, received FROM frames WHERE (fate = ? AND kind = ?) OR received >= ? "
            "ORDER BY arrival LIMIT 1"
        )
        rows = self._database.rows(oldest_query, (STORED, int(FrameKind.DATA), int(before_s)))
        below = rows[0][0] if rows else self._head.next_arrival
        before_s = min(before_s, rows[0][1]) if rows else before_s
        if below <= self._head.pruned_below:
            return
        unused = "NOT EXISTS (SELECT 1 FROM frames WHERE frames.session = sessions.id)"
        for table, key, condition, value in (
            ("bodies", "arrival", "arrival < ?", below),
            ("frames", "arrival", "arrival < ?", below),
            ("sessions", "id", f"last_received < ? AND {unused}", int(before_s)),
            ("quarantine", "id", "received < ? AND raw = x''", before_s),
        ):
            query = (
                f"DELETE FROM {table} WHERE {key} IN (SELECT {key} FROM {table} WHERE "
                f"{condition} LIMIT ?)"
            )
            has_more = True
            while has_more:
                with self._state:
                    self._check_open()
                    with self._changing("pruning"):
                        # Saved with the first transaction, so that an audit after a crash finds no
                        # unexplained gap.
                        self._save_head(pruned_below=below, pruned_before_s=int(before_s))
                        has_more = self._db.execute(query, (value, _SLICE_ROWS)).rowcount > 0
                    self._database.wrote(0)
        self.lookup.clear()

    def _check_not_closed(self) -> None:
        if self._closed:
            raise Closed("the store was closed")

    def _check_open(self) -> None:
        self._check_not_closed()
        self._database.check()

    @contextmanager
    def _changing(self, doing: str) -> Iterator[None]:
        """A durable transaction; if it fails, the state in memory is restored."""
        head = self._head
        try:
            with self._database.transaction(doing):
                yield
        except BaseException:
            self._head = head
            self.lookup.clear()
            raise

    def _erasing(self, doing: str, change: Callable[[], int]) -> None:
        """Run a transaction that may use the reserve; `change` returns the bytes written."""
        with self._state:
            self._check_open()
            try:
                with self._changing(doing):
                    written = change()
            except StorageFull:
                if not self._database.use_reserve():
                    raise
                with self._changing(doing):
                    written = change()
            self._database.wrote(written)


def _first_slice(page: Sequence[tuple[Any, ...]]) -> list[FrameRow]:
    """The first frames of a page, of at most _SLICE_BYTES together, but at least one."""
    rows = [FrameRow(*row) for row in page]
    sizes = accumulate(row.body_len for row in rows)
    return [row for row, size in zip(rows, sizes, strict=True) if size <= _SLICE_BYTES] or rows[:1]


def _marks(count: int) -> str:
    return ", ".join("?" * count)


_ADD_FRAME = f"INSERT INTO frames VALUES ({_marks(len(FrameRow._fields))})"
_PUT_FRAME = f"REPLACE INTO frames VALUES ({_marks(len(FrameRow._fields))})"
_PUT_HEAD = f"REPLACE INTO head VALUES ({_marks(len(StoreCounters._fields) + 2)})"
_COUNTED_BYTES = f"max(length(raw), {_LEAST_BYTES})"
_HELD_BYTES = (
    f"SELECT {IS_REPLAYABLE}, sum({_COUNTED_BYTES}) FROM quarantine "
    "WHERE id >= ? AND raw <> x'' GROUP BY 1"
)
_OLDEST_HELD = (
    "SELECT id, reason, detail, parked, received, game, session, chunk_no, body_crc, player, "
    f"replayed, crc, {_COUNTED_BYTES} FROM quarantine "
    f"WHERE {IS_REPLAYABLE} = ? AND raw <> x'' ORDER BY id"
)
_PUT_QUARANTINED = f"REPLACE INTO quarantine VALUES ({_marks(13)})"
_PUT_SESSION = (
    f"INSERT INTO sessions VALUES ({_marks(7)}) ON CONFLICT (id) DO UPDATE SET "
    "game = excluded.game, last_received = excluded.last_received, state = excluded.state, "
    "crc = excluded.crc"
)


def _batch_bytes(batch: WriteBatch) -> int:
    refused = sum(len(frame.raw) for frame in (*batch.refused, *batch.parked))
    return refused + sum(candidate.frame.size_bytes for candidate in batch.candidates)
