"""A read-only look at a local store, from any process, while its writer writes, seals, forgets or dies."""

import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from understudy.core.chunk import chunk_of
from understudy.core.errors import ConfigError, UnderstudyError
from understudy.core.frame import FrameKind, decode_frame
from understudy.core.log import LogReader
from understudy.core.ports import Cursor, Forgotten, Gone, SessionFilter, SessionInfo, Stored, Tail
from understudy.core.session import SessionState, unpack_state
from understudy.stores.catalogue import (
    DAMAGED,
    EVENT_KIND,
    EXPIRED,
    FORGOTTEN,
    QUARANTINED,
    STORED,
    ArrivalRow,
    Catalogue,
)
from understudy.stores.commits import (
    Event,
    Watermark,
    WatermarkFile,
    commits_in,
    damage,
    log_numbers,
    log_path,
    unpack_keys,
)
from understudy.stores.generation import Generation
from understudy.stores.sealing import segment_path
from understudy.stores.segments import Segment

_POLL_S = 0.003
_TRIES = 1000

_FATES: dict[int, Gone] = {FORGOTTEN: "forgotten", EXPIRED: "expired", QUARANTINED: "quarantined", DAMAGED: "damaged"}
_EVENTS: dict[str, Gone] = {"forget": "forgotten", "quarantine": "quarantined", "damaged": "damaged"}


class Moved(UnderstudyError):
    """A file went away under the reader's hands because it was sealed or rewritten: look again."""

    retry_helps = True
    blame = "nobody"


@dataclass(frozen=True, slots=True)
class _Where:
    """An unsealed frame's raw bytes."""

    file: int
    offset: int
    length: int
    event: Event | None = None


class StoreView:
    """Tails a store in the order of arrival: every number once, as stored or as forgotten."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "catalogue.sqlite").exists():
            raise ConfigError(f"there is no store in {folder}; record something first, or give another --data folder")
        self.folder = folder
        self.catalogue = Catalogue(folder / "catalogue.sqlite", read_only=True)
        self._mark = WatermarkFile(folder / "watermark")
        self._readers: dict[int, LogReader] = {}
        self._segments: dict[int, Segment] = {}
        self._index: dict[int, _Where] = {}
        self._scanned = (0, 0)
        self._indexed_below = 0
        self._sealed_below = -1
        self._lock = threading.RLock()
        self._forgets: dict[bytes, int] = {}
        self._hidden: dict[tuple[bytes, int], int] = {}

    def mark(self) -> Watermark:
        """How far readers may look."""
        return self._mark.read() or Watermark(self.catalogue.fact("sealed_below", 1), 0, 0, 0)

    def tail(self, cursor: Cursor | None, *, max_items: int, wait_s: float) -> Tail:
        """The next items behind a cursor; empty when nothing came within `wait_s`."""
        want = 1 if cursor is None else _arrival(cursor) + 1
        deadline = time.monotonic() + wait_s
        tries = 0
        while True:
            try:
                with self._lock:
                    items = self._items(want, max_items)
            except Moved:
                tries += 1
                if tries > _TRIES:
                    raise
                time.sleep(_POLL_S)
                continue
            if items or time.monotonic() >= deadline:
                last = _last(items[-1]) if items else want - 1
                return Tail(items, Cursor(str(last)))
            time.sleep(_POLL_S)

    def behind(self, chunks: Iterable[tuple[uuid.UUID, int]]) -> Cursor:
        """A cursor behind which all of these chunks lie, of those that are here; only the catalogue is read."""
        first = self.catalogue.fact("sealed_below", 1)  # asked before the others: what they miss lies behind it
        query = f"SELECT min(no) FROM arrivals WHERE session = ? AND chunk_no = ? AND kind < 9 AND fate = {STORED}"
        for session, chunk_no in chunks:
            if (row := self.catalogue.one(query, session.bytes, chunk_no)) is not None and row[0] is not None:
                first = min(first, row[0])
        return Cursor(str(first - 1))

    def _items(self, want: int, max_items: int) -> list[Stored | Forgotten]:
        try:
            return self._look(want, max_items)
        except (Moved, FileNotFoundError) as error:
            self._forget_places()
            raise Moved(str(error)) from error

    def _look(self, want: int, max_items: int) -> list[Stored | Forgotten]:
        mark = self.mark()
        self._refresh(mark)
        items: list[Stored | Forgotten] = []
        if want < (pruned := self.catalogue.fact("pruned_below", 1)):
            items.append(Forgotten(want, pruned - 1, "expired"))
            want = pruned
        if want < mark.sealed_below:
            rows = self.catalogue.arrivals("no >= ? AND no < ? ORDER BY no LIMIT ?", want, mark.sealed_below, max_items)
            for row in rows:
                if row.no != want:
                    raise Moved(f"arrival {want} is not in the catalogue yet")
                items.append(self._sealed(row))
                want += 1
        while want < mark.next_arrival and len(items) < max_items and want >= mark.sealed_below:
            where = self._index.get(want)
            if where is None:
                raise Moved(f"arrival {want} is not in the log")
            item = self._from_log(want, where)
            items.append(item)
            want = _last(item) + 1
        return items

    # --- keeping up with the log --------------------------------------------------------------------------------

    def _refresh(self, mark: Watermark) -> None:
        if mark.sealed_below != self._sealed_below:
            self._sealed_below = mark.sealed_below
            self._indexed_below = max(self._indexed_below, mark.sealed_below)
            self._index = {no: where for no, where in self._index.items() if no >= mark.sealed_below}
            self._load_erasures()
        file, offset = self._scanned
        if (mark.file, mark.offset) == (file, offset):
            return
        for number in log_numbers(self.folder):
            if file <= number <= mark.file:
                self._scan(number, offset if number == file else 0, mark.offset if number == mark.file else None)
        if mark.has_moved(self.mark()):
            raise Moved("the log was sealed while it was read")
        self._index_damage(mark.next_arrival)
        self._scanned = (mark.file, mark.offset)
        files = {where.file for where in self._index.values()}
        for number in [number for number in self._readers if number not in files]:
            self._readers.pop(number).close()

    def _scan(self, number: int, offset: int, up_to: int | None) -> None:
        for commit in commits_in(self._reader(number), offset, up_to=up_to):
            arrival, event = commit.trailer.first_arrival, commit.trailer.event
            self._index_damage(arrival)
            for _, at, raw in commit.frames():
                self._index[arrival] = _Where(number, at, len(raw))
                arrival += 1
            if event is not None:
                for one in range(arrival, arrival + event.count):
                    self._index[one] = _Where(number, 0, 0, event)
                self._note(arrival, event.kind, event.player, event.chunks)
                arrival += event.count
            self._indexed_below = max(self._indexed_below, arrival)

    def _index_damage(self, below: int) -> None:
        """Numbers that were given out and are in no readable commit: shown as gone, so that nobody waits for them."""
        for number in range(self._indexed_below, below):
            self._index[number] = _Where(0, 0, 0, damage(number, number + 1))
        self._indexed_below = max(self._indexed_below, below)

    def _load_erasures(self) -> None:
        for player, arrival in self.catalogue.rows("SELECT player, arrival FROM tombstones"):
            self._note(arrival, "forget", player, [])
        for arrival, raw in self.catalogue.rows("SELECT arrival, chunks FROM erasures WHERE kind = 'quarantine'"):
            self._note(arrival, "quarantine", b"", unpack_keys(raw))

    def pending_erasures(self) -> list[Forgotten]:
        """What was promised to be erased and may still be in segments."""
        rows = self.catalogue.rows("SELECT arrival, kind, player, chunks FROM erasures")
        return [_forgotten(arrival, _EVENTS[kind], player, unpack_keys(raw)) for arrival, kind, player, raw in rows]

    def _note(self, arrival: int, kind: str, player: bytes, chunks: list[tuple[bytes, int]]) -> None:
        if kind == "forget":
            self._forgets[player] = max(arrival, self._forgets.get(player, 0))
        for key in chunks:
            self._hidden[key] = arrival

    def _forget_places(self) -> None:
        """Start over after files moved: read the whole log again."""
        self._index, self._scanned, self._indexed_below, self._sealed_below = {}, (0, 0), 0, -1
        for reader in self._readers.values():
            reader.close()
        self._readers = {}
        self._segments = {}

    # --- items ------------------------------------------------------------------------------------------------------

    def _sealed(self, row: ArrivalRow) -> Stored | Forgotten:
        gone = _FATES.get(row.fate) or self._gone(row.no, row.player, row.session, row.chunk_no)
        if gone is not None:
            keys = unpack_keys(row.body or b"") if row.kind == EVENT_KIND else [(row.session, row.chunk_no)]
            return _forgotten(row.no, gone, row.player, keys, at_s=row.received if row.kind == EVENT_KIND else 0.0)
        if row.segment is not None and row.chunk is not None:
            segment = self.segment(row.segment)
            return Stored(row.no, segment.frame(row.chunk), segment.chunk(row.chunk))
        return Stored(row.no, row.frame(), None)

    def _from_log(self, number: int, where: _Where) -> Stored | Forgotten:
        if where.event is not None:
            event = where.event
            return _forgotten(number, _EVENTS[event.kind], event.player, event.chunks, at_s=event.at_s)
        frame = decode_frame(self._reader(where.file).bytes_at(where.offset, where.length))
        if gone := self._gone(number, frame.player, frame.session.bytes, frame.chunk_no):
            return _forgotten(number, gone, frame.player, [(frame.session.bytes, frame.chunk_no)])
        return Stored(number, frame, chunk_of(frame) if frame.kind is FrameKind.DATA else None)

    def _gone(self, number: int, player: bytes, session: bytes, chunk_no: int) -> Gone | None:
        if number < self._forgets.get(player, 0):
            return "forgotten"
        return "quarantined" if number < self._hidden.get((session, chunk_no), 0) else None

    def _reader(self, number: int) -> LogReader:
        if number not in self._readers:
            self._readers[number] = LogReader(log_path(self.folder, number))
        return self._readers[number]

    def segment(self, number: int) -> Segment:
        """A sealed segment by its number; Moved when it was rewritten."""
        if number not in self._segments:
            try:
                self._segments[number] = Segment(segment_path(self.folder, number))
            except FileNotFoundError:
                raise Moved(f"segment {number} was rewritten") from None
            if len(self._segments) > 256:
                self._segments.pop(next(iter(self._segments)))
        return self._segments[number]

    # --- the unsealed part, for sessions and audits -----------------------------------------------------------------

    @contextmanager
    def snapshot(self) -> Iterator[Generation]:
        """One consistent look: the catalogue as of now, and everything behind its last sealing from the log."""
        for _ in range(_TRIES):
            with self.catalogue.looking():
                generation = self._unsealed()
                if generation is not None:
                    yield generation
                    return
            time.sleep(_POLL_S)
        raise Moved("the store is being sealed faster than it can be read")

    def _unsealed(self) -> Generation | None:
        """The log put together as the writer itself does; None when a part of it was sealed meanwhile."""
        mark, arrival = self.mark(), self.catalogue.fact("sealed_below", 1)
        generation = Generation(next_commit=self.catalogue.fact("next_commit", 1))
        if mark.sealed_below > arrival:
            return None
        try:
            for number in log_numbers(self.folder):
                if number <= mark.file:
                    arrival = self._apply(generation, number, mark, arrival)
        except FileNotFoundError:
            return None
        if mark.has_moved(self.mark()):
            return None
        if arrival < mark.next_arrival:
            generation.events.append((arrival, damage(arrival, mark.next_arrival)))
        return generation

    def _apply(self, generation: Generation, number: int, mark: Watermark, arrival: int) -> int:
        """Add a log file's commits; the arrival number that follows them."""
        with LogReader(log_path(self.folder, number)) as reader:
            generation.files.append(number)
            for commit in commits_in(reader, up_to=mark.offset if number == mark.file else None):
                trailer = commit.trailer
                if trailer.number < generation.next_commit:
                    continue
                if trailer.number > generation.next_commit:
                    generation.events.append((arrival, damage(arrival, trailer.first_arrival)))
                generation.apply(commit, number, before=self._state_before)
                arrival = trailer.first_arrival + trailer.n_arrivals
        return arrival

    def _state_before(self, session: uuid.UUID) -> tuple[str, SessionState] | None:
        row = self.catalogue.one("SELECT game, state FROM sessions WHERE session = ?", session.bytes)
        return None if row is None else (row[0], unpack_state(row[1]))

    def sessions(self, wanted: SessionFilter) -> Iterator[SessionInfo]:
        with self.snapshot() as unsealed:
            yield from session_infos(self.catalogue, unsealed.sessions, wanted)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers = {}
        self._mark.close()
        self.catalogue.close()

    def __enter__(self) -> "StoreView":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _forgotten(
    number: int, reason: Gone, player: bytes, keys: Iterable[tuple[bytes, int]], *, at_s: float = 0.0
) -> Forgotten:
    chunks = tuple((uuid.UUID(bytes=session), chunk_no) for session, chunk_no in keys)
    return Forgotten(number, number, reason, player or None, chunks, at_s)


def session_infos(
    catalogue: Catalogue, unsealed: Mapping[uuid.UUID, tuple[str, SessionState]], wanted: SessionFilter
) -> Iterator[SessionInfo]:
    """Sessions of catalogue and log that match, each once; forgotten ones are not listed."""
    for session, (game, state) in unsealed.items():
        if matches(game, state, wanted):
            yield info_of(session, game, state)
    at = b""
    while rows := catalogue.rows(
        "SELECT session, game, state FROM sessions WHERE session > ? AND (? IS NULL OR game = ?) "
        "AND (? IS NULL OR player = ?) AND last_received >= ? ORDER BY session LIMIT 1000",
        at, wanted.game, wanted.game, wanted.player, wanted.player, int(wanted.since_s),
    ):  # fmt: skip
        at = rows[-1][0]
        for raw_session, game, raw_state in rows:
            session = uuid.UUID(bytes=raw_session)
            state = unpack_state(raw_state)
            if session not in unsealed and not state.forgotten:
                yield info_of(session, game, state)


def matches(game: str, state: SessionState, wanted: SessionFilter) -> bool:
    return (
        not state.forgotten
        and wanted.game in (None, game)
        and wanted.player in (None, state.player)
        and state.last_received_s >= int(wanted.since_s)
    )


def info_of(session: uuid.UUID, game: str, state: SessionState) -> SessionInfo:
    return SessionInfo(
        session=session, game=game, player=state.player, n_chunks=state.n_chunks, n_steps=state.n_steps,
        high=state.high, missing=state.missing(), dropped_steps=state.dropped_steps, closed=state.closed,
        last_received_s=float(state.last_received_s),
    )  # fmt: skip


def _arrival(cursor: Cursor) -> int:
    if not cursor.isdigit():
        raise ConfigError(f"{cursor!r} is no cursor of a local store")
    return int(cursor)


def _last(item: Stored | Forgotten) -> int:
    return item.last_no if isinstance(item, Forgotten) else item.arrival_no
