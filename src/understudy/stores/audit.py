"""A full check of a local store's bytes: what is really there, once, whole, and without unexplained gaps."""

import contextlib
import uuid
from contextlib import ExitStack
from dataclasses import dataclass, field

from understudy.core.chunk import chunk_of
from understudy.core.errors import Corrupt, Refused
from understudy.core.frame import FrameKind, decode_frame, read_close, read_drop
from understudy.core.log import LogReader
from understudy.core.names import session_time_s
from understudy.core.ports import Audit
from understudy.core.session import unpack_state
from understudy.stores.catalogue import DAMAGED, EXPIRED, FORGOTTEN, QUARANTINED, STORED, ArrivalRow
from understudy.stores.commits import log_path
from understudy.stores.generation import Generation, Item
from understudy.stores.sealing import segment_path
from understudy.stores.segments import Segment
from understudy.stores.view import Moved, StoreView

_TRIES = 100

Key = tuple[bytes, int]
"""Session and number."""


@dataclass(frozen=True, slots=True)
class Held:
    """A frame that is there, whole, or whose absence the store itself recorded."""

    crc: int
    kind: int
    first_step: int
    n_steps: int
    fate: int = STORED


@dataclass(slots=True)
class Findings:
    """Everything an audit saw; `summary` is the short form."""

    held: dict[Key, Held] = field(default_factory=dict)
    quarantined: dict[Key, list[int]] = field(default_factory=dict)
    """Checksums of quarantined and parked frames."""
    forgotten_sessions: set[bytes] = field(default_factory=set)
    pruned_before_s: int = 0
    """Sessions that began before this may have expired so long ago that nothing is known of them any more."""
    dropped: dict[bytes, list[tuple[int, int]]] = field(default_factory=dict)
    dropped_steps: int = 0
    closes: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    duplicate_chunks: int = 0
    duplicate_steps: int = 0
    n_quarantined: int = 0
    n_parked: int = 0
    corrupt: list[str] = field(default_factory=list)

    def hold(self, key: Key, held: Held) -> None:
        known = self.held.get(key)
        if known is not None and known.fate == held.fate == STORED:
            self.duplicate_chunks += 1
            self.duplicate_steps += held.n_steps
        elif known is None or held.fate == STORED:
            # What was taken out and came back by replay is there once.
            self.held[key] = held

    def control(self, session: bytes, number: int, kind: FrameKind, raw: bytes) -> None:
        frame = decode_frame(raw)
        if kind is FrameKind.DROP:
            report = read_drop(frame)
            self.dropped.setdefault(session, []).extend(report.ranges)
            self.dropped_steps += report.n_steps
        else:
            self.closes[session] = (number, read_close(frame).n_steps)


def audit(view: StoreView) -> Findings:
    """Read every stored byte once and compare it with its checksums and with the catalogue."""
    for _ in range(_TRIES):
        with contextlib.suppress(Moved):
            return _audit(view)
    raise Moved("segments are rewritten faster than they can be checked")


def _audit(view: StoreView) -> Findings:
    findings = Findings()
    if trouble := view.catalogue.is_sound():
        findings.corrupt.append(f"catalogue: {trouble}")
        return findings
    with view.snapshot() as unsealed, ExitStack() as stack:
        try:
            readers = {file: stack.enter_context(LogReader(log_path(view.folder, file))) for file in unsealed.files}
        except FileNotFoundError as error:
            raise Moved(f"{error.filename} was sealed") from None
        missing = _audit_segments(view, findings)
        _audit_catalogue(view, findings)
        _audit_log(readers, unsealed, findings)
    for number, n_chunks in missing.items():
        # Asked outside the snapshot: a segment that is no longer registered was rewritten meanwhile.
        if view.catalogue.one("SELECT 1 FROM segments WHERE id = ?", number) is None:
            raise Moved(f"segment {number} was rewritten")
        findings.corrupt.append(f"segment {number} with {n_chunks} chunks is not there")
    return findings


def _audit_segments(view: StoreView, findings: Findings) -> dict[int, int]:
    """Check every registered segment; those whose file is not there, with how many chunks they should hold."""
    missing: dict[int, int] = {}
    for number, crc in view.catalogue.rows("SELECT id, crc FROM segments ORDER BY id"):
        rows: dict[int | None, list[ArrivalRow]] = {}
        for row in view.catalogue.arrivals("segment = ?", number):
            rows.setdefault(row.chunk, []).append(row)
        try:
            segment = Segment(segment_path(view.folder, number))
            is_whole = segment.crc() == crc
            bad = set() if is_whole else set(segment.damaged())
            if not is_whole:
                findings.corrupt.append(f"segment {number} does not match its checksum; damaged chunks: {sorted(bad)}")
            for index in range(segment.n_chunks):
                _audit_chunk(segment, index, rows.pop(index, []), index in bad, findings)
        except FileNotFoundError:
            missing[number] = len(rows)
            continue
        except (Corrupt, Refused, ValueError, IndexError, KeyError, OverflowError) as error:
            # The table itself is damaged: nothing it says about its chunks can be trusted.
            findings.corrupt.append(f"segment {number} with {len(rows)} chunks is not readable: {error}")
            continue
        for row in (row for left in rows.values() for row in left):
            findings.corrupt.append(f"{_name(row.session, row.chunk_no)} is not in segment {number}")
    return missing


def _audit_chunk(segment: Segment, index: int, rows: list[ArrivalRow], is_bad: bool, findings: Findings) -> None:
    table = segment.table
    session, number = table["session"][index].tobytes(), int(table["no"][index])
    said = (session, number, int(table["crc"][index]), int(table["arrival"][index]))
    if said not in [(row.session, row.chunk_no, row.crc, row.no) for row in rows]:
        findings.corrupt.append(f"{_name(session, number)} in {segment.path.name} is not what the catalogue says")
        return
    for row in rows:
        if row.no != said[3]:
            findings.duplicate_chunks += 1
            findings.duplicate_steps += row.n_steps
            findings.corrupt.append(f"{_name(session, number)} is listed twice, as arrivals {said[3]} and {row.no}")
    if is_bad:
        return
    try:
        meta = segment.chunk(index).meta
    except Refused as error:
        findings.corrupt.append(f"{_name(session, number)} has unreadable metadata: {error}")
        return
    facts = (STORED, meta.first_step, meta.n_steps, meta.game)
    if any((row.fate, row.first_step, row.n_steps, row.game) != facts for row in rows):
        findings.corrupt.append(f"the catalogue tells of {_name(session, number)} what its metadata does not")
    findings.hold((session, number), Held(said[2], FrameKind.DATA, meta.first_step, meta.n_steps))


def _audit_catalogue(view: StoreView, findings: Findings) -> None:
    catalogue = view.catalogue
    if lost := catalogue.fact("damaged_commits"):
        findings.corrupt.append(f"commits of quarantined frames or positions could not be read {lost} times")
    findings.pruned_before_s = catalogue.fact("pruned_before_s")
    known = catalogue.one("SELECT count(*) FROM arrivals")[0]
    sealed = catalogue.fact("sealed_below", 1) - catalogue.fact("pruned_below", 1)
    if known != sealed:
        findings.corrupt.append(f"the catalogue lists {known} of {sealed} arrivals")
    for row in view.catalogue.arrivals("segment IS NULL ORDER BY no"):
        if row.fate == DAMAGED:
            findings.corrupt.append(f"arrival {row.no} was stored and can no longer be read")
        elif row.kind == 9:
            continue
        elif row.fate in (FORGOTTEN, EXPIRED, QUARANTINED):
            findings.hold((row.session, row.chunk_no), Held(row.crc, row.kind, row.first_step, row.n_steps, row.fate))
        elif row.kind == FrameKind.DATA:
            findings.corrupt.append(f"{_name(row.session, row.chunk_no)} is in no segment")
        else:
            findings.hold((row.session, row.chunk_no), Held(row.crc, row.kind, -1, 0))
            _control(findings, row.session, row.chunk_no, FrameKind(row.kind), row.frame().encode())
    for session, number, crc, parked, replayed in view.catalogue.rows(
        "SELECT session, chunk_no, crc, parked, replayed FROM quarantine"
    ):
        _quarantined(findings, session, number, crc, bool(parked), bool(replayed))
    for session, state in view.catalogue.rows("SELECT session, state FROM sessions"):
        if unpack_state(state).forgotten:
            findings.forgotten_sessions.add(session)


def _quarantined(findings: Findings, session: bytes, number: int, crc: int, parked: bool, replayed: bool) -> None:
    if not replayed:
        findings.n_parked += parked
        findings.n_quarantined += not parked
    findings.quarantined.setdefault((session, number), []).append(crc)


def _control(findings: Findings, session: bytes, number: int, kind: FrameKind, raw: bytes) -> None:
    try:
        findings.control(session, number, kind, raw)
    except Refused as error:
        findings.corrupt.append(f"{_name(session, number)}: {error}")


def _audit_log(readers: dict[int, LogReader], unsealed: Generation, findings: Findings) -> None:
    forgets = {event.player: number for number, event in unsealed.events if event.kind == "forget"}
    for number, event in unsealed.events:
        if event.kind == "damaged":
            findings.corrupt.append(f"{event.count} arrivals from {number} on can no longer be read")
    for item in unsealed.items:
        _audit_item(item, readers[item.place.file], forgets, findings)
    for one, _ in unsealed.quarantined:
        _quarantined(findings, one.session, one.chunk_no, one.crc, one.parked, one.id in unsealed.replayed)
    for session, (_, state) in unsealed.sessions.items():
        if state.forgotten:
            findings.forgotten_sessions.add(session.bytes)


def _audit_item(item: Item, reader: LogReader, forgets: dict[bytes, int], findings: Findings) -> None:
    key = (item.session.bytes, item.chunk_no)
    if item.arrival_no < forgets.get(item.player, 0):
        findings.hold(key, Held(item.crc, item.kind, item.facts.first_step, item.facts.n_steps, FORGOTTEN))
        return
    raw = reader.bytes_at(item.place.offset, item.place.length)
    try:
        if item.kind is FrameKind.DATA:
            meta = chunk_of(decode_frame(raw)).meta
            findings.hold(key, Held(item.crc, item.kind, meta.first_step, meta.n_steps))
        else:
            findings.hold(key, Held(item.crc, item.kind, -1, 0))
            findings.control(*key, item.kind, raw)
    except Refused as error:
        findings.corrupt.append(f"{_name(*key)} in the log: {error}")


def summary(findings: Findings) -> Audit:
    """Counts of what an audit found."""
    gap_chunks, gap_steps = _gaps(findings)
    data = [held for held in findings.held.values() if held.kind == FrameKind.DATA]
    stored = [held for held in data if held.fate == STORED]
    return Audit(
        steps=sum(held.n_steps for held in stored),
        chunks=len(stored),
        sessions=len({key[0] for key, held in findings.held.items() if held.fate == STORED}),
        duplicate_chunks=findings.duplicate_chunks,
        duplicate_steps=findings.duplicate_steps,
        gap_chunks=gap_chunks,
        gap_steps=gap_steps,
        dropped_steps=findings.dropped_steps,
        quarantined=findings.n_quarantined,
        parked=findings.n_parked,
        forgotten_chunks=sum(held.fate == FORGOTTEN for held in data),
        expired_chunks=sum(held.fate == EXPIRED for held in data),
        corrupt=tuple(findings.corrupt),
    )


def _gaps(findings: Findings) -> tuple[int, int]:
    """Numbers and steps that are missing and that nobody reported."""
    sessions: dict[bytes, list[tuple[int, int, Held | None]]] = {}
    for (session, number), held in findings.held.items():
        sessions.setdefault(session, []).append((number, number, held))
    for session, number in findings.quarantined:
        sessions.setdefault(session, []).append((number, number, None))
    for session, ranges in findings.dropped.items():
        sessions.setdefault(session, []).extend((first, last, None) for first, last in ranges)
    chunks = steps = 0
    for session, seen in sessions.items():
        if session not in findings.forgotten_sessions and any(session):
            is_pruned = session_time_s(uuid.UUID(bytes=session)) < findings.pruned_before_s
            missing, lost = _session_gaps(seen, start=min(one[0] for one in seen) if is_pruned else 0)
            chunks, steps = chunks + missing, steps + lost
    return chunks, steps


def _session_gaps(seen: list[tuple[int, int, Held | None]], *, start: int) -> tuple[int, int]:
    """Numbers from `start` on that are in no range, and the steps between the data frames around them."""
    missing = lost = end_step = 0
    at, is_exact = start, True
    # A number's frame comes before whatever else is known of the number.
    for first, last, held in sorted(seen, key=lambda one: (one[0], one[2] is None)):
        gap = max(0, first - at)
        missing += gap
        if held is not None and held.kind == FrameKind.DATA:
            if gap and is_exact:
                lost += max(0, held.first_step - end_step)
            end_step, is_exact = held.first_step + held.n_steps, True
        elif held is None and last >= at:
            is_exact = False
        at = max(at, last + 1)
    return missing, lost


def _name(session: bytes, number: int) -> str:
    return f"chunk {number} of session {uuid.UUID(bytes=session)}"
