"""Reading the embedded store.

`StoreView` reads it from any process, while its writer writes, forgets or dies. Most reads run one
short transaction per page, since a long one would prevent the reuse of SQLite's write-ahead log.
`LocalLookup` answers what the writer must know before a commit.
"""

import sqlite3
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from understudy.core.errors import ConfigError, Corrupt, Refused
from understudy.core.names import session_time_s
from understudy.experience.chunk import chunk_of
from understudy.experience.frame import FrameKind, decode_frame
from understudy.experience.game import GameSpec, spec_from_json
from understudy.experience.session import SessionState, tombstone_of, unpack_state
from understudy.ports import (
    TAIL_BYTES,
    Cursor,
    Forgotten,
    Gone,
    Quarantined,
    SessionFilter,
    SessionInfo,
    Stored,
    Tail,
)
from understudy.stores.database import EVICTED, check_of, checked, disk, open_reader

STORED, FORGOTTEN, EXPIRED, QUARANTINED = range(4)
"""Column `fate` of a frame: stored, or why its bytes were removed."""

_READ_BYTES = 32 * 1024 * 1024
"""A page of a tail or a table ends with the row that brings it to this size."""

_POLL_S = 0.003
_ROWS = 1000
_RECENT = 4_096
_GONE: dict[int, Gone] = {FORGOTTEN: "forgotten", EXPIRED: "expired", QUARANTINED: "quarantined"}


class StoreCounters(NamedTuple):
    """The store's id and counters: the row of table `head`."""

    store: bytes
    next_arrival: int
    next_quarantine: int
    next_session: int
    pruned_below: int
    """The records of all arrival numbers below this were deleted."""
    pruned_before_s: int
    """The records of sessions that began before this time may have been deleted."""


def read_head(db: sqlite3.Connection) -> StoreCounters:
    """The store's id and current counters."""
    row = db.execute("SELECT * FROM head").fetchone()
    if row is None:
        raise Corrupt("the store's table head is empty; restore the store from a backup")
    return StoreCounters(*checked("head", row)[1:])


class FrameRow(NamedTuple):
    """The store's record of one frame, without its bytes."""

    arrival: int
    session: int | None
    chunk_no: int | None
    gone: int
    kind: int
    fate: int
    event: int
    received: int
    schema: int
    first_step: int
    n_steps: int
    body_crc: int
    body_len: int
    crc: int

    @property
    def is_sound(self) -> bool:
        return check_of(*self[:-1]) == self.crc

    def changed(self, **fields: Any) -> "FrameRow":
        """A copy of the row with these fields replaced and its checksum updated."""
        row = self._replace(**fields)
        return row._replace(crc=check_of(*row[:-1]))


COLUMNS = ", ".join(f"f.{name}" for name in FrameRow._fields)


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """The contents of a store, counted from its tables."""

    chunks: int
    steps_by_game: dict[str, int]
    sessions: int
    quarantined: dict[str, int]
    """By reason."""
    parked: int
    evicted: int
    """Quarantined and parked frames that were deleted because the quarantine was full."""
    free_bytes: int
    """Unused bytes inside the database file, which new frames use first."""


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """Facts of a stored chunk, so that chunks can be selected and read in any order."""

    session: bytes
    chunk_no: int
    arrival_no: int
    n_steps: int
    game: str
    schema: str


class StoreView:
    """Reads an embedded store, also while another process writes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._db = open_reader(folder)
        self._lock = threading.RLock()

    @contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """A consistent read transaction; keep it short."""
        with self._lock, disk(f"reading the store in {self.folder}"):
            self._db.execute("BEGIN")
            try:
                yield self._db
            finally:
                self._db.execute("COMMIT")

    @property
    def next_arrival(self) -> int:
        """The arrival number of the next frame or event."""
        with self.snapshot() as db:
            return read_head(db).next_arrival

    @property
    def identity(self) -> uuid.UUID:
        """The store's own id."""
        with self.snapshot() as db:
            return uuid.UUID(bytes=read_head(db).store)

    def damage(self) -> str:
        """The problems that SQLite's quick check finds, or ""; reads in one long transaction."""
        with self.snapshot() as db:
            problems = [str(row[0]) for row in db.execute("PRAGMA quick_check(3)")]
        return "" if problems == ["ok"] else "; ".join(problems)

    def tail(self, cursor: Cursor | None, *, max_items: int, wait_s: float) -> Tail:
        """The next items after a cursor; empty when none arrive within `wait_s`."""
        if cursor is not None and not cursor.isdigit():
            raise ConfigError(
                f"{cursor!r} is not a cursor of a local store; pass a number that tail() returned, "
                "or None to start at the beginning"
            )
        first = 1 if cursor is None else int(cursor) + 1
        deadline = time.monotonic() + wait_s
        while True:
            page = self._page(first, max_items)
            if page is not None:
                items = page.items()
                last = items[-1]
                number = last.last_no if isinstance(last, Forgotten) else last.arrival_no
                return Tail(items, Cursor(str(number)), is_cut=number < page.last)
            if time.monotonic() >= deadline:
                return Tail([], Cursor(str(first - 1)))
            time.sleep(_POLL_S)

    def _page(self, first: int, max_items: int) -> "_Page | None":
        """The page of arrival numbers from `first` on; None if nothing has arrived there yet."""
        with self.snapshot() as db:
            head = read_head(db)
            if first > head.next_arrival:
                raise Corrupt(
                    f"cursor {first - 1} is ahead of the store in {self.folder}, which ends at "
                    f"{head.next_arrival - 1}: the store was truncated or replaced; restore it, or "
                    "read from the start"
                )
            if first == head.next_arrival:
                return None
            query = (
                f"SELECT {COLUMNS}, b.raw FROM frames f LEFT JOIN bodies b USING (arrival) "
                "WHERE f.arrival >= ? ORDER BY f.arrival LIMIT ?"
            )
            rows: list[tuple[Any, ...]] = []
            size = 0
            selected = db.execute(query, (first, max_items))
            while size < _READ_BYTES and (row := selected.fetchone()) is not None:
                rows.append(row)
                size += len(row[-1] or b"")
            selected.close()
            is_last = len(rows) < max_items and size < _READ_BYTES
            last = head.next_arrival - 1 if is_last else rows[-1][0]
            return _Page(db, first, min(last, first + max_items - 1), head, rows)

    def cursor_before(self, chunks: Iterable[tuple[uuid.UUID, int]]) -> Cursor:
        """A cursor after which a tail returns each of these chunks that is stored."""
        query = (
            "SELECT arrival FROM frames WHERE session = (SELECT id FROM sessions WHERE session = "
            "?) AND chunk_no = ? AND gone = 0"
        )
        with self.snapshot() as db:
            first = read_head(db).next_arrival
            for session, chunk_no in chunks:
                if (row := db.execute(query, (session.bytes, chunk_no)).fetchone()) is not None:
                    first = min(first, row[0])
        return Cursor(str(first - 1))

    def forgets_of(self, player: bytes) -> dict[int, float]:
        """When a player was forgotten, in seconds, by the arrival number of the event."""
        with self.snapshot() as db:
            query = "SELECT * FROM events WHERE player = ?"
            rows = db.execute(query, (tombstone_of(player),)).fetchall()
        return {number: at_s for number, _, at_s, _ in (checked("events", row) for row in rows)}

    def first_arrivals(self, player: bytes) -> dict[str, int] | None:
        """The arrival number of a player's first steps, by schema; None if records were deleted.

        Includes steps that were withdrawn or have expired since.
        """
        query = (
            "SELECT c.schema, min(f.arrival) FROM frames f JOIN sessions s ON s.id = f.session "
            "JOIN schemas c ON c.id = f.schema WHERE s.player = ? AND f.kind = 0 GROUP BY c.schema"
        )
        with self.snapshot() as db:
            if read_head(db).pruned_below > 1:
                return None
            return dict(db.execute(query, (player,)).fetchall())

    def sessions(self, session_filter: SessionFilter) -> Iterator[SessionInfo]:
        """Matching sessions, each once, in order of first arrival; none of forgotten players."""
        query = (
            "SELECT id, session, player, game, last_received, state, crc FROM sessions "
            "WHERE id > ? AND (? IS NULL OR game = ?) AND (? IS NULL OR player = ?) "
            "AND last_received >= ? ORDER BY id LIMIT ?"
        )
        after = 0
        while True:
            values = (
                after,
                session_filter.game,
                session_filter.game,
                session_filter.player,
                session_filter.player,
                int(session_filter.since_s),
                _ROWS,
            )
            with self.snapshot() as db:
                rows = db.execute(query, values).fetchall()
                erased = {player for (player,) in db.execute("SELECT player FROM erasures")}
            if not rows:
                return
            after = rows[-1][0]
            for row in rows:
                _, session, player, game, _, state, _ = row
                checked("sessions", row)
                if player not in erased:
                    yield info_of(uuid.UUID(bytes=session), game, unpack_state(state))

    def quarantined(self, *, after_id: int = 0, limit: int = 1000) -> list[Quarantined]:
        """Quarantined frames, oldest first, without replayed, expired and evicted ones."""
        query = (
            "SELECT id, reason, detail, parked, received, game, session, chunk_no, body_crc, raw "
            "FROM quarantine WHERE id > ? AND replayed = 0 AND raw <> x'' ORDER BY id LIMIT ?"
        )
        frames: list[Quarantined] = []
        size = 0
        with self.snapshot() as db:
            for (
                number,
                reason,
                detail,
                parked,
                received_s,
                game,
                raw_session,
                chunk_no,
                crc,
                raw,
            ) in db.execute(query, (after_id, limit)):
                session = uuid.UUID(bytes=raw_session) if any(raw_session) else None
                frames.append(
                    Quarantined(
                        id=number,
                        reason=reason,
                        detail=detail,
                        parked=bool(parked),
                        received_s=received_s,
                        game=game,
                        session=session,
                        chunk_no=None if session is None else chunk_no,
                        crc=crc,
                        raw=raw,
                    )
                )
                size += len(raw)
                if size >= _READ_BYTES:
                    break
        return frames

    def steps_by_schema(self, *, until_no: int) -> dict[str, int]:
        """Steps that are stored now, by schema, of chunks up to an arrival number."""
        query = (
            "SELECT c.schema, sum(f.n_steps) FROM frames f JOIN schemas c ON c.id = f.schema WHERE "
            "f.kind = 0 AND f.fate = 0 AND f.arrival <= ? AND f.session NOT IN (SELECT s.id FROM "
            "sessions s JOIN erasures e ON e.player = s.player AND s.id < e.sessions_below) "
            "GROUP BY c.schema"
        )
        with self.snapshot() as db:
            return dict(db.execute(query, (until_no,)).fetchall())

    def counts(self) -> StoreCounts:
        """Count the store's contents from its tables."""
        by_game = (
            "SELECT s.game, count(*), sum(f.n_steps) FROM frames f "
            "JOIN schemas s ON s.id = f.schema WHERE f.kind = 0 AND f.fate = 0 GROUP BY s.game"
        )
        by_reason = (
            "SELECT reason, parked, count(*) FROM quarantine WHERE replayed = 0 GROUP BY "
            "reason, parked"
        )
        with self.snapshot() as db:
            games = db.execute(by_game).fetchall()
            refused = db.execute(by_reason).fetchall()
            (evicted,) = db.execute(
                "SELECT count(*) FROM quarantine WHERE replayed = ?", (EVICTED,)
            ).fetchone()
            (sessions,) = db.execute("SELECT count(*) FROM sessions").fetchone()
            (free,) = db.execute("PRAGMA freelist_count").fetchone()
            (page_size,) = db.execute("PRAGMA page_size").fetchone()
        return StoreCounts(
            chunks=sum(chunks for _, chunks, _ in games),
            steps_by_game={game: steps for game, _, steps in games},
            sessions=sessions,
            quarantined={reason: number for reason, parked, number in refused if not parked},
            parked=sum(number for _, parked, number in refused if parked),
            evicted=evicted,
            free_bytes=free * page_size,
        )

    def chunks(self, *, game: str | None, player: bytes | None, since_s: float) -> list[ChunkRow]:
        """Matching stored chunks, in order of arrival."""
        query = (
            "SELECT f.arrival, s.session, f.chunk_no, f.n_steps, c.game, c.schema FROM frames f "
            "JOIN sessions s ON s.id = f.session JOIN schemas c ON c.id = f.schema "
            "WHERE f.arrival > ? AND f.kind = 0 AND f.fate = 0 AND (? IS NULL OR c.game = ?) "
            "AND (? IS NULL OR s.player = ?) AND f.received >= ? ORDER BY f.arrival LIMIT ?"
        )
        chunks: list[ChunkRow] = []
        after = 0
        while True:
            with self.snapshot() as db:
                rows = db.execute(
                    query, (after, game, game, player, player, int(since_s), 10 * _ROWS)
                ).fetchall()
            if not rows:
                return chunks
            after = rows[-1][0]
            chunks += [
                ChunkRow(session, chunk_no, arrival, n_steps, of_game, schema)
                for arrival, session, chunk_no, n_steps, of_game, schema in rows
            ]

    def specs(self, game: str | None = None) -> list[GameSpec]:
        """The specs of stored schemas, of one game or of all, newest first."""
        query = (
            "SELECT id, game, schema, spec, crc FROM schemas WHERE ? IS NULL OR game = ? ORDER "
            "BY id DESC"
        )
        with self.snapshot() as db:
            rows = [checked("schemas", row) for row in db.execute(query, (game, game))]
        return [spec_from_json(spec) for *_, spec in rows if spec is not None]

    def rows(self, query: str, *, start: Any) -> Iterator[tuple[Any, ...]]:
        """All rows of a query, read page by page.

        The query must have `> ? ORDER BY ... LIMIT ?` on its first column; the rows start after
        `start`.
        """
        while True:
            page: list[tuple[Any, ...]] = []
            size = 0
            with self.snapshot() as db:
                selected = db.execute(query, (start, _ROWS))
                while size < _READ_BYTES and (row := selected.fetchone()) is not None:
                    page.append(row)
                    size += len(row[-1]) if isinstance(row[-1], bytes) else 0
                selected.close()
            if not page:
                return
            yield from page
            start = page[-1][0]

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def __enter__(self) -> "StoreView":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Page:
    """What a store has for the arrival numbers `first..last`: frames, events and removed frames."""

    def __init__(
        self,
        db: sqlite3.Connection,
        first: int,
        last: int,
        head: StoreCounters,
        rows: Sequence[tuple[Any, ...]],
    ) -> None:
        self._first = first
        self.last = last
        self._pruned_below = head.pruned_below
        self._rows = {row[0]: row for row in rows}
        self._events = _events(db, first, last)
        self._erasures = dict(
            db.execute("SELECT player, max(arrival) FROM erasures GROUP BY player").fetchall()
        )
        forgotten_sessions = sorted({row[1] for row in rows if row[3] and row[1] is not None})
        self._sessions: dict[int, tuple[bytes, bytes]] = {}
        for session in forgotten_sessions:
            row = db.execute(
                "SELECT session, player FROM sessions WHERE id = ?", (session,)
            ).fetchone()
            if row is not None:
                self._sessions[session] = row

    def items(self) -> list[Stored | Forgotten]:
        """Every arrival number once, up to TAIL_BYTES; missing ones are reported as damaged."""
        items: list[Stored | Forgotten] = []
        decoded_bytes = 0
        first = self._first
        if first < self._pruned_below:
            items.append(Forgotten(first, self._pruned_below - 1, "expired"))
            first = self._pruned_below
        for number in range(first, self.last + 1):
            if decoded_bytes >= TAIL_BYTES:
                break
            if (event := self._events.get(number)) is not None:
                items.append(event)
            elif (row := self._rows.get(number)) is not None:
                item = self._item(FrameRow(*row[:-1]), row[-1])
                items.append(item)
                if isinstance(item, Stored) and item.chunk is not None:
                    decoded_bytes += item.chunk.size_bytes
            else:
                items.append(Forgotten(number, number, "damaged"))
        return items

    def _item(self, row: FrameRow, raw: bytes | None) -> Stored | Forgotten:
        number = row.arrival
        if not row.is_sound:
            return Forgotten(number, number, "damaged")
        if row.fate != STORED:
            session, player = self._sessions.get(row.session or 0, (None, None))
            if session is None or row.chunk_no is None or player in self._erasures:
                return Forgotten(number, number, _GONE[row.fate])
            key = (uuid.UUID(bytes=session), row.chunk_no)
            return Forgotten(number, number, _GONE[row.fate], player, (key,))
        try:
            frame = decode_frame(raw or b"")
            chunk = chunk_of(frame) if frame.kind is FrameKind.DATA else None
        except Refused:
            return Forgotten(number, number, "damaged")
        if number < self._erasures.get(frame.player, 0):
            return Forgotten(number, number, "forgotten")
        return Stored(number, frame, chunk)


def _events(db: sqlite3.Connection, first: int, last: int) -> dict[int, Forgotten]:
    query = "SELECT arrival, reason, at, player, crc FROM events WHERE arrival BETWEEN ? AND ?"
    events: dict[int, Forgotten] = {}
    for row in db.execute(query, (first, last)).fetchall():
        number, reason, at_s, player = checked("events", row)
        chunks = db.execute(
            "SELECT s.session, f.chunk_no FROM frames f JOIN sessions s ON s.id = f.session "
            "WHERE f.event = ? ORDER BY f.arrival",
            (number,),
        ).fetchall()
        keys = tuple((uuid.UUID(bytes=session), chunk_no) for session, chunk_no in chunks)
        events[number] = Forgotten(number, number, reason, player, keys, at_s)
    return events


class LocalLookup:
    """The embedded store's `CommitLookup`; caches the last 4,096 sessions."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._recent: OrderedDict[uuid.UUID, tuple[int, str, SessionState]] = OrderedDict()
        rows = (
            checked("events", row)
            for row in db.execute("SELECT * FROM events WHERE player IS NOT NULL")
        )
        self._tombstones: dict[bytes, float] = {}
        for _, _, at_s, player in rows:
            self.forget(player, at_s)

    def state_of(self, session: uuid.UUID) -> tuple[str, SessionState] | None:
        """A session's game and state; None if it is unknown."""
        row = self._session(session)
        return None if row is None else row[1:]

    def id_of(self, session: uuid.UUID) -> int | None:
        """A session's id in table `frames`; None if it is unknown, 0 if it was forgotten."""
        row = self._session(session)
        return None if row is None else row[0]

    def _session(self, session: uuid.UUID) -> tuple[int, str, SessionState] | None:
        if (recent := self._recent.get(session)) is not None:
            self._recent.move_to_end(session)
            return recent
        row = self._db.execute(
            "SELECT * FROM sessions WHERE session = ?", (session.bytes,)
        ).fetchone()
        if row is not None:
            number, _, player, game, _, raw = checked("sessions", row)
            state = unpack_state(raw)
            erasing = "SELECT 1 FROM erasures WHERE player = ? AND sessions_below > ?"
            if (
                tombstone_of(player) in self._tombstones
                and self._db.execute(erasing, (player, number)).fetchone()
            ):
                state = SessionState(player=player, forgotten=True)
            self.remember(session, number, game, state)
            return number, game, state
        if self._tombstones:
            query = "SELECT 1 FROM forgotten_sessions WHERE digest = ?"
            if self._db.execute(query, (tombstone_of(session.bytes),)).fetchone() is not None:
                return 0, "", SessionState(player=bytes(16), forgotten=True)
        return None

    def require_state(self, session: uuid.UUID) -> tuple[str, SessionState]:
        """Game and state of a session that has stored frames; Corrupt when its row is missing."""
        if (game_and_state := self.state_of(session)) is None:
            raise Corrupt(
                f"session {session} has frames but no row in table sessions; restore the store "
                "from a backup"
            )
        return game_and_state

    def remember(self, session: uuid.UUID, number: int, game: str, state: SessionState) -> None:
        """Cache the current state of a session."""
        self._recent[session] = (number, game, state)
        self._recent.move_to_end(session)
        if len(self._recent) > _RECENT:
            self._recent.popitem(last=False)

    def clear(self) -> None:
        """Clear the cache, which may hold erased data or data of a failed transaction."""
        self._recent.clear()

    def frame(self, session: uuid.UUID, chunk_no: int) -> FrameRow | None:
        """The record of the readable frame with this chunk number, else of a removed one."""
        if not (number := self.id_of(session)):
            return None
        query = (
            f"SELECT {COLUMNS} FROM frames f WHERE session = ? AND chunk_no = ? ORDER BY gone "
            "LIMIT 1"
        )
        row = self._db.execute(query, (number, chunk_no)).fetchone()
        return None if row is None else FrameRow(*row)

    def key_of(self, session: uuid.UUID, chunk_no: int) -> tuple[int, int] | None:
        """Checksum and length of the body that was stored under a chunk number."""
        row = self.frame(session, chunk_no)
        return None if row is None else (row.body_crc, row.body_len)

    def is_stored(self, session: uuid.UUID, chunk_no: int) -> bool:
        """Whether a chunk number has a readable frame."""
        row = self.frame(session, chunk_no)
        return row is not None and row.gone == 0

    def quarantined_crcs(self, session: bytes, chunk_no: int) -> list[int]:
        """Checksums of the quarantined frames of a chunk number."""
        query = "SELECT body_crc FROM quarantine WHERE session = ? AND chunk_no = ?"
        return [row[0] for row in self._db.execute(query, (session, chunk_no))]

    def waiting(self, quarantine_id: int) -> tuple[str, bytes] | None:
        """Reason and bytes of a quarantined frame that has not been replayed."""
        query = "SELECT reason, raw FROM quarantine WHERE id = ? AND replayed = 0"
        row: tuple[str, bytes] | None = self._db.execute(query, (quarantine_id,)).fetchone()
        return row

    def is_forgotten(self, player: bytes, session: uuid.UUID, received_s: float) -> bool:
        """Whether the player was erased after this session began or this frame was received."""
        if not self._tombstones:
            return False
        at_s = self._tombstones.get(tombstone_of(player))
        return at_s is not None and (session_time_s(session) <= at_s or received_s < int(at_s))

    def forget(self, tombstone: bytes, at_s: float) -> None:
        """Reject older frames of the player with this tombstone from now on."""
        self._tombstones[tombstone] = max(at_s, self._tombstones.get(tombstone, 0.0))
        self._recent.clear()


def info_of(session: uuid.UUID, game: str, state: SessionState) -> SessionInfo:
    """A session as the port's SessionInfo."""
    return SessionInfo(
        session=session,
        game=game,
        player=state.player,
        n_chunks=state.n_chunks,
        n_steps=state.n_steps,
        high=state.high,
        missing=state.missing(),
        dropped_steps=state.dropped_steps,
        closed=state.closed,
        last_received_s=float(state.last_received_s),
    )
