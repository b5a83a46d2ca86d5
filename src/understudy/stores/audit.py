"""A full check of a store: that it has every frame once, undamaged, and explains every gap.

All stores use `Findings` and `summary`. `audit` reads the embedded store, page by page, while other
processes may write.
"""

import uuid
from dataclasses import dataclass, field

from understudy.core.errors import Corrupt, Refused
from understudy.core.names import session_time_s
from understudy.experience.chunk import chunk_of
from understudy.experience.frame import FrameKind, decode_frame, read_close, read_drop
from understudy.experience.session import tombstone_of
from understudy.ports import DAMAGED_STREAM, Audit, Gone
from understudy.stores.database import EVICTED, checked, quarantine_check
from understudy.stores.view import (
    COLUMNS,
    EXPIRED,
    FORGOTTEN,
    STORED,
    FrameRow,
    StoreView,
    read_head,
)

Key = tuple[bytes, int]
"""Session and chunk number."""


@dataclass(frozen=True, slots=True)
class AuditedFrame:
    """A frame that is stored undamaged, or whose removal the store recorded."""

    crc: int
    kind: int
    first_step: int
    n_steps: int
    fate: int = STORED
    length: int = 0
    """Bytes of the body."""


@dataclass(slots=True)
class Findings:
    """All results of an audit; `summary` is the short form."""

    frames: dict[Key, AuditedFrame] = field(default_factory=dict)
    quarantined: dict[Key, list[int]] = field(default_factory=dict)
    """Checksums of quarantined and parked frames."""
    evicted: dict[Key, list[int]] = field(default_factory=dict)
    """Checksums of frames that were deleted because the quarantine was full."""
    removed: dict[Key, Gone] = field(default_factory=dict)
    """Why a frame was removed, where a remote store keeps no checksum of it."""
    forgotten_sessions: set[bytes] = field(default_factory=set)
    """The tombstones of sessions of forgotten players."""
    pruned_before_s: int = 0
    """The store may have pruned all records of sessions that began before this time."""
    dropped: dict[bytes, list[tuple[int, int]]] = field(default_factory=dict)
    dropped_steps: int = 0
    closes: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    duplicate_chunks: int = 0
    duplicate_steps: int = 0
    n_forgotten: int = 0
    """Forgotten chunks of which only the arrival number is left."""
    n_quarantined: int = 0
    n_parked: int = 0
    n_evicted: int = 0
    corrupt: list[str] = field(default_factory=list)

    def add_frame(self, key: Key, frame: AuditedFrame) -> None:
        earlier = self.frames.get(key)
        if earlier is not None and earlier.fate == frame.fate == STORED:
            self.duplicate_chunks += 1
            self.duplicate_steps += frame.n_steps
        elif earlier is None or frame.fate == STORED:
            # A chunk that was quarantined and replayed counts once.
            self.frames[key] = frame

    def control(self, session: bytes, number: int, kind: FrameKind, raw: bytes) -> None:
        frame = decode_frame(raw)
        if kind is FrameKind.DROP:
            report = read_drop(frame)
            self.dropped.setdefault(session, []).extend(report.ranges)
            self.dropped_steps += report.n_steps
        else:
            self.closes[session] = (number, read_close(frame).n_steps)


def audit(view: StoreView, *, is_alone: bool = False) -> Findings:
    """Read every stored byte once and compare it with its checksums and with the tables.

    Pass `is_alone` only while no process writes: SQLite's own check, one long transaction, then
    runs as well.
    """
    findings = Findings()
    try:
        if is_alone:
            with view.snapshot() as db:
                problems = [str(row[0]) for row in db.execute("PRAGMA integrity_check(5)")]
                (unknown,) = db.execute(
                    "SELECT count(*) FROM bodies WHERE arrival NOT IN (SELECT arrival FROM frames)"
                )
            findings.corrupt += [] if problems == ["ok"] else problems
            if unknown[0]:
                findings.corrupt.append(f"{unknown[0]} frame bodies belong to no known frame")
        _audit_frames(view, findings)
        _audit_quarantine(view, findings)
        _audit_tables(view, findings)
    except Corrupt as error:
        findings.corrupt.append(str(error))
    return findings


def _audit_frames(view: StoreView, findings: Findings) -> None:
    with view.snapshot() as db:
        head = read_head(db)
        erasures = db.execute(
            "SELECT player, max(sessions_below) FROM erasures GROUP BY player"
        ).fetchall()
    findings.pruned_before_s = head.pruned_before_s
    being_erased = dict(erasures)
    query = (
        f"SELECT {COLUMNS}, s.player, s.session, b.raw FROM frames f "
        "LEFT JOIN sessions s ON s.id = f.session LEFT JOIN bodies b USING (arrival) "
        "WHERE f.arrival > ? ORDER BY f.arrival LIMIT ?"
    )
    number = head.pruned_below
    for *columns, player, session, raw in view.rows(query, start=head.pruned_below - 1):
        row = FrameRow(*columns)
        _audit_missing(view, number, row.arrival, findings)
        number = row.arrival + 1
        if not row.is_sound:
            findings.corrupt.append(
                f"the record of arrival number {row.arrival} does not match its checksum"
            )
        elif row.fate == FORGOTTEN or (
            player in being_erased and (row.session or 0) < being_erased[player]
        ):
            findings.n_forgotten += row.kind == FrameKind.DATA
        elif session is None or row.chunk_no is None:
            findings.corrupt.append(
                f"the session of arrival number {row.arrival} is not in the store"
            )
        elif row.fate != STORED:
            fields = (row.body_crc, row.kind, row.first_step, row.n_steps, row.fate, row.body_len)
            frame = AuditedFrame(*fields)
            findings.add_frame((session, row.chunk_no), frame)
        else:
            _audit_frame(row, (session, row.chunk_no), player, raw or b"", findings)
    _audit_missing(view, number, head.next_arrival, findings)


def _audit_missing(view: StoreView, first: int, following: int, findings: Findings) -> None:
    """Check arrival numbers without a frame: each belongs to an event, or its frame is lost."""
    if first >= following:
        return
    with view.snapshot() as db:
        query = "SELECT count(*) FROM events WHERE arrival >= ? AND arrival < ?"
        (events,) = db.execute(query, (first, following)).fetchone()
    if lost := following - first - events:
        findings.corrupt.append(
            f"{lost} frames or events from arrival number {first} on were stored but can no longer "
            "be read"
        )


def _audit_frame(row: FrameRow, key: Key, player: bytes, raw: bytes, findings: Findings) -> None:
    session, number = key
    try:
        frame = decode_frame(raw)
        chunk = chunk_of(frame) if frame.kind is FrameKind.DATA else None
    except Refused as error:
        findings.corrupt.append(f"{_name(session, number)}: {error}")
        return
    recorded = (row.kind, session, number, row.body_crc, row.body_len, row.received, player)
    actual = (
        int(frame.kind),
        frame.session.bytes,
        frame.chunk_no,
        frame.body_crc,
        len(frame.body),
        frame.received_s,
        frame.player,
    )
    steps = (-1, 0) if chunk is None else (chunk.meta.first_step, chunk.meta.n_steps)
    if recorded != actual or steps != (row.first_step, row.n_steps):
        findings.corrupt.append(f"{_name(session, number)} does not match its record in the store")
        return
    kind = int(frame.kind)
    findings.add_frame(key, AuditedFrame(frame.body_crc, kind, *steps, length=len(frame.body)))
    if chunk is None:
        try:
            findings.control(session, number, frame.kind, raw)
        except Refused as error:
            findings.corrupt.append(f"{_name(session, number)}: {error}")


def lost_in_stream(detail: str) -> str:
    """What a quarantined note about a damaged stream means, and the next step."""
    return (
        f"acknowledged frames of the stream are lost: {detail}; restore that file from a copy of "
        "the disk"
    )


def _audit_quarantine(view: StoreView, findings: Findings) -> None:
    for *columns, crc, raw in view.rows(
        "SELECT * FROM quarantine WHERE id > ? ORDER BY id LIMIT ?", start=0
    ):
        number, reason, detail, parked, _, _, session, chunk_no, body_crc, _, replayed = columns
        if quarantine_check(columns, raw) != crc:
            findings.corrupt.append(f"frame {number} in quarantine does not match its checksum")
            continue
        if reason == DAMAGED_STREAM:
            findings.corrupt.append(lost_in_stream(detail))
        key = (session, chunk_no)
        if replayed == EVICTED:
            findings.n_evicted += 1
            findings.evicted.setdefault(key, []).append(body_crc)
            continue
        if not replayed:
            findings.n_parked += parked
            findings.n_quarantined += not parked
        findings.quarantined.setdefault(key, []).append(body_crc)


def _audit_tables(view: StoreView, findings: Findings) -> None:
    """Verify the checksums of all other tables, and collect the forgotten sessions."""
    for table, key, start in (
        ("sessions", "id", 0),
        ("events", "arrival", 0),
        ("erasures", "arrival", 0),
        ("schemas", "id", 0),
        ("positions", "partition", ""),
        ("claims", "partition", ""),
        ("forgotten_sessions", "digest", b""),
    ):
        for row in view.rows(
            f"SELECT * FROM {table} WHERE {key} > ? ORDER BY {key} LIMIT ?", start=start
        ):
            try:
                values = checked(table, row)
            except Corrupt as error:
                findings.corrupt.append(str(error))
                continue
            if table == "forgotten_sessions":
                findings.forgotten_sessions.add(values[0])


def summary(findings: Findings) -> Audit:
    """The counts of an audit."""
    gap_chunks, gap_steps = _gaps(findings)
    data = [frame for frame in findings.frames.values() if frame.kind == FrameKind.DATA]
    stored = [frame for frame in data if frame.fate == STORED]
    return Audit(
        steps=sum(frame.n_steps for frame in stored),
        chunks=len(stored),
        sessions=len({key[0] for key, frame in findings.frames.items() if frame.fate == STORED}),
        duplicate_chunks=findings.duplicate_chunks,
        duplicate_steps=findings.duplicate_steps,
        gap_chunks=gap_chunks,
        gap_steps=gap_steps,
        dropped_steps=findings.dropped_steps,
        quarantined=findings.n_quarantined,
        parked=findings.n_parked,
        forgotten_chunks=findings.n_forgotten + sum(frame.fate == FORGOTTEN for frame in data),
        expired_chunks=sum(frame.fate == EXPIRED for frame in data),
        corrupt=tuple(findings.corrupt),
        evicted=findings.n_evicted,
    )


def _gaps(findings: Findings) -> tuple[int, int]:
    """Number of missing chunks, and of their steps, that nothing in the store explains."""
    sessions: dict[bytes, list[tuple[int, int, AuditedFrame | None]]] = {}
    for (session, number), frame in findings.frames.items():
        sessions.setdefault(session, []).append((number, number, frame))
    for session, number in (*findings.quarantined, *findings.evicted):
        sessions.setdefault(session, []).append((number, number, None))
    for session, ranges in findings.dropped.items():
        sessions.setdefault(session, []).extend((first, last, None) for first, last in ranges)
    chunks = 0
    steps = 0
    for session, ranges_of_session in sessions.items():
        if any(session) and tombstone_of(session) not in findings.forgotten_sessions:
            is_pruned = session_time_s(uuid.UUID(bytes=session)) < findings.pruned_before_s
            # A quarantined frame may be older than what was pruned.
            stored = [first for first, _, frame in ranges_of_session if frame is not None]
            known = stored or [first for first, _, _ in ranges_of_session]
            start = min(known) if is_pruned else 0
            missing, lost_steps = _session_gaps(ranges_of_session, start=start)
            chunks += missing
            steps += lost_steps
    return chunks, steps


def _session_gaps(
    ranges: list[tuple[int, int, AuditedFrame | None]], *, start: int
) -> tuple[int, int]:
    """Count numbers from `start` on that are in no range, and the steps lost with them."""
    missing = 0
    lost_steps = 0
    end_step = 0
    at = start
    is_exact = True
    # A stored frame comes before a quarantined one or a drop report with the same number.
    for first, last, frame in sorted(ranges, key=lambda entry: (entry[0], entry[2] is None)):
        gap = max(0, first - at)
        missing += gap
        if frame is not None and frame.kind == FrameKind.DATA:
            if gap and is_exact:
                lost_steps += max(0, frame.first_step - end_step)
            end_step = frame.first_step + frame.n_steps
            is_exact = True
        elif frame is None and last >= at:
            is_exact = False
        at = max(at, last + 1)
    return missing, lost_steps


def _name(session: bytes, number: int) -> str:
    return f"chunk {number} of session {uuid.UUID(bytes=session)}"
