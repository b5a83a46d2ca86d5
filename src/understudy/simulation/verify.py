"""Sends unsent frames, verifies every ledger entry against the stored bytes, computes digests."""

import hashlib
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from understudy.backends.data import DataFolder
from understudy.backends.deployment import open_link, register
from understudy.backends.local import (
    EXPIRED,
    FORGOTTEN,
    QUARANTINED,
    STORED,
    AuditedFrame,
    Findings,
    audit_store,
    lost_in_stream,
    summary,
)
from understudy.client.receipts import AckedFrame
from understudy.client.sender import send_unsent_frames
from understudy.client.spool import unreadable_spools
from understudy.core.canonical import canonical_json
from understudy.core.clock import SystemClock
from understudy.core.errors import Corrupt, Locked, Refused
from understudy.core.names import session_time_s
from understudy.experience.chunk import Chunk
from understudy.experience.game import GameSpec
from understudy.experience.session import tombstone_of
from understudy.platform.config import Config
from understudy.platform.ingest import open_own_ingest
from understudy.platform.requests import send_request
from understudy.ports import (
    DAMAGED_STREAM,
    Audit,
    Cursor,
    Forgotten,
    FullStore,
    Gone,
    Link,
    Stored,
    Tail,
)
from understudy.simulation.ledger import LedgerEntry, LedgerLink, read_ledger

if TYPE_CHECKING:
    from understudy.stores.audit import Key

TailOf = Callable[[Cursor | None], Tail]
"""Returns a page of a store's tail after a cursor."""
FrameFate = Literal["stored", "quarantined", "expired", "forgotten", "evicted", "missing"]
"""What became of an acknowledged frame; parked frames are in quarantine, too.

An evicted one was deleted because the quarantine was full; it is lost, as a missing one is.
"""
_FATES: dict[int, FrameFate] = {
    STORED: "stored",
    QUARANTINED: "quarantined",
    EXPIRED: "expired",
    FORGOTTEN: "forgotten",
}
_ASK_S = 60.0


@dataclass(frozen=True, slots=True)
class CheckedReceipt:
    """A client's receipt, and what became of its frame."""

    session: str
    chunk_no: int
    fate: FrameFate


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of verify.

    `exit_code` is 0; 1 for a loss, gap, duplicate or damage; or 2 if there are neither a ledger nor
    receipts to compare with.
    """

    steps: int
    sessions: int
    chunks: int
    ledger_chunks: int
    ledger_steps: int
    lost_chunks: int
    lost_steps: int
    set_aside_steps: int
    """Acknowledged but not readable by learners: quarantined, parked, erased or expired steps."""
    duplicate_steps: int
    gap_steps: int
    gap_chunks: int
    dropped_steps: int
    quarantined_chunks: int
    parked_chunks: int
    evicted_chunks: int
    forgotten_chunks: int
    expired_chunks: int
    corrupt: tuple[str, ...]
    recovered_frames: int
    live_writer: bool
    receipts: tuple[CheckedReceipt, ...] = ()
    unreadable_spools: tuple[str, ...] = ()
    """Folders of frames that cannot be sent, and were never acknowledged: a damaged spool.json,
    as after a power cut."""

    @property
    def receipt_fates(self) -> dict[FrameFate, int]:
        """The number of receipts by fate."""
        counts = Counter(receipt.fate for receipt in self.receipts)
        return {fate: counts[fate] for fate in get_args(FrameFate)}

    @property
    def has_only_gaps(self) -> bool:
        """Whether chunks are missing that were not acknowledged as far as is known, and no more."""
        return bool(self.gap_chunks) and not (self.live_writer or self._is_broken)

    @property
    def _is_broken(self) -> bool:
        return bool(
            self.lost_chunks
            or self.duplicate_steps
            or self.corrupt
            or self.receipt_fates["missing"]
            or self.receipt_fates["evicted"]
        )

    @property
    def exit_code(self) -> int:
        if self._is_broken or self.has_only_gaps:
            return 1
        return 0 if self.ledger_chunks or self.receipts else 2

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        counts = self.receipt_fates
        return {
            **fields,
            "corrupt": list(self.corrupt),
            "receipt_fates": counts,
            "ok": self.exit_code == 0,
        }


def verify(
    data: DataFolder,
    *,
    config: Config | None = None,
    finish: bool = True,
    receipts: Iterable[AckedFrame] = (),
) -> Verification:
    """Store everything recorded before this call in the data folder's own store, and check it.

    `config` locates the stream and the games; by default they are in the data folder. Without
    `finish`, only steps that are already stored are checked. `receipts` are checked beside the
    ledger.
    """
    config = config or Config()
    promises = list(read_ledger(data.ledger))
    # Without a ledger there is nothing to check, and frames sent here must not create one.
    recovered = finish_unsent_frames(data, config, with_ledger=bool(promises)) if finish else 0
    promises = list(read_ledger(data.ledger)) if recovered else promises
    try:
        live = _settle(data, config) if finish else data.has_writer()
        findings = audit_store(data.store, is_alone=not live)
    except (Corrupt, Refused) as error:
        live = False
        findings = Findings(corrupt=[f"the store cannot be opened: {error}"])
    found = _compare(findings, promises, recovered, live, receipts=receipts)
    return replace(found, unreadable_spools=tuple(map(str, unreadable_spools(data.spool))))


def verify_remote_store(
    data: DataFolder, store: FullStore, *, live: bool, receipts: Iterable[AckedFrame] = ()
) -> Verification:
    """Check ledger and receipts against a remote store; `live`: a process may be writing to it."""
    promises = list(read_ledger(data.ledger))
    stored: dict[Key, AuditedFrame] = {}
    removed: dict[Key, Gone] = {}
    for item in tail_items(lambda cursor: store.tail(cursor, max_items=512, wait_s=0.0)):
        if isinstance(item, Stored):
            steps = item.chunk.meta.n_steps if item.chunk is not None else 0
            stored[item.frame.session.bytes, item.frame.chunk_no] = AuditedFrame(
                item.frame.body_crc, item.frame.kind, 0, steps, length=len(item.frame.body)
            )
        else:
            removed |= {(session.bytes, number): item.reason for session, number in item.chunks}
    quarantined: dict[Key, list[int]] = {}
    totals = store.audit()
    lost: list[str] = []
    after = 0
    while page := store.quarantined(after_id=after):
        after = page[-1].id
        for entry in page:
            if entry.reason == DAMAGED_STREAM:
                lost.append(lost_in_stream(entry.detail))
            if entry.session is not None and entry.chunk_no is not None:
                quarantined.setdefault((entry.session.bytes, entry.chunk_no), []).append(entry.crc)
    findings = Findings(frames=stored, quarantined=quarantined, removed=removed)
    totals = replace(totals, corrupt=(*totals.corrupt, *lost))
    return _compare(findings, promises, 0, live, totals=totals, receipts=receipts)


def finish_unsent_frames(data: DataFolder, config: Config, *, with_ledger: bool) -> int:
    """Send the frames that killed games left in the spool; return how many were acknowledged."""

    def link_to(spec: GameSpec) -> Link:
        link = open_link(data, spec, stream=config.stream.url, clock=SystemClock())
        try:
            register(data, spec, link, models=config.models.url)
        except BaseException:
            link.close()
            raise
        return LedgerLink(link, data.ledger) if with_ledger else link

    folders = sorted(data.spool.iterdir()) if data.spool.is_dir() else []
    return sum(send_unsent_frames(folder, link_to) for folder in folders if folder.is_dir())


def _settle(data: DataFolder, config: Config) -> bool:
    """Store all frames of the stream, here or in the process that has the store open.

    Returns whether there is such a process.
    """
    for _ in range(3):
        if data.has_writer():
            try:
                send_request(data.requests, "barrier", timeout_s=_ASK_S)
            except Locked:
                if data.has_writer():
                    raise
                continue
            return True
        try:
            with open_own_ingest(data, config) as role:
                role.service.drain()
            return False
        except Locked:
            time.sleep(0.2)
    raise Locked("other processes keep opening and closing the store; try again")


def _compare(
    findings: Findings,
    promises: Iterable[LedgerEntry],
    recovered: int,
    live: bool,
    *,
    totals: Audit | None = None,
    receipts: Iterable[AckedFrame] = (),
) -> Verification:
    totals = totals or summary(findings)
    counted = set()
    lost_chunks = lost_steps = set_aside_steps = ledger_steps = 0
    for promise in promises:
        key = (promise.session, promise.chunk_no)
        if key in counted:
            continue  # acknowledged again after a retry
        counted.add(key)
        ledger_steps += promise.n_steps
        fate = _fate(findings, key, promise.crc, n_steps=promise.n_steps)
        if fate in ("missing", "evicted"):
            lost_chunks += 1
            lost_steps += promise.n_steps
        elif fate != "stored":
            set_aside_steps += promise.n_steps
    checked = {
        acked: _fate(findings, (acked.session, acked.chunk_no), acked.crc, length=acked.length)
        for acked in receipts
    }
    return Verification(
        steps=totals.steps,
        sessions=totals.sessions,
        chunks=totals.chunks,
        ledger_chunks=len(counted),
        ledger_steps=ledger_steps,
        lost_chunks=lost_chunks,
        lost_steps=lost_steps,
        set_aside_steps=set_aside_steps,
        duplicate_steps=totals.duplicate_steps,
        gap_steps=totals.gap_steps,
        gap_chunks=totals.gap_chunks,
        dropped_steps=totals.dropped_steps,
        quarantined_chunks=totals.quarantined,
        parked_chunks=totals.parked,
        evicted_chunks=totals.evicted,
        forgotten_chunks=totals.forgotten_chunks,
        expired_chunks=totals.expired_chunks,
        corrupt=tuple(totals.corrupt),
        recovered_frames=recovered,
        live_writer=live,
        receipts=tuple(
            CheckedReceipt(str(uuid.UUID(bytes=acked.session)), acked.chunk_no, fate)
            for acked, fate in checked.items()
        ),
    )


def _fate(
    findings: Findings,
    key: "Key",
    crc: int,
    *,
    n_steps: int | None = None,
    length: int | None = None,
) -> FrameFate:
    """Return what became of a frame with this checksum, and these steps or this length if known."""
    frame = findings.frames.get(key)
    is_stored = frame is not None and frame.fate == STORED
    if crc in findings.evicted.get(key, ()) and not is_stored:
        return "evicted"
    if frame is not None and frame.crc == crc:
        has_other_steps = frame.kind == 0 and n_steps not in (None, frame.n_steps)
        is_other = has_other_steps or length not in (None, frame.length)
        return "missing" if is_other and frame.fate == STORED else _FATES[frame.fate]
    if crc in findings.quarantined.get(key, ()):
        return "quarantined"
    if frame is None and (reason := findings.removed.get(key, "damaged")) != "damaged":
        return reason
    if tombstone_of(key[0]) in findings.forgotten_sessions:
        return "forgotten"
    is_pruned = session_time_s(uuid.UUID(bytes=key[0])) < findings.pruned_before_s
    return "expired" if is_pruned else "missing"


# --- Digests: one hash per session, to compare the contents of two stores -------------------------


def tail_items(page_behind: TailOf) -> Iterator[Stored | Forgotten]:
    """Yield everything a store holds now, in the order of arrival."""
    cursor: Cursor | None = None
    while items := (page := page_behind(cursor)).items:
        yield from items
        cursor = page.cursor


def digests(page_behind: TailOf) -> dict[str, str]:
    """Return a SHA-256 per session over chunk numbers, columns, dtypes and metadata, in order."""
    parts: dict[uuid.UUID, dict[int, list[bytes]]] = {}
    for item in tail_items(page_behind):
        if isinstance(item, Stored):
            body = item.frame.body if item.chunk is None else _bytes_of(item.chunk)
            chunk = hashlib.sha256(bytes([item.frame.kind]) + body).digest()
            # A duplicate chunk number must change the digest, so all chunks are hashed.
            parts.setdefault(item.frame.session, {}).setdefault(item.frame.chunk_no, []).append(
                chunk
            )
    return {str(session): _digest(numbers) for session, numbers in sorted(parts.items())}


def combined_digest(session_digests: dict[str, str]) -> str:
    """Return one digest over all sessions."""
    return hashlib.sha256(canonical_json(session_digests)).hexdigest()


def _digest(numbers: dict[int, list[bytes]]) -> str:
    total = hashlib.sha256()
    for number, chunks in sorted(numbers.items()):
        for chunk in chunks:
            total.update(number.to_bytes(8, "little") + chunk)
    return total.hexdigest()


def _bytes_of(chunk: Chunk) -> bytes:
    columns = [
        f"{name} {column.dtype.str} {column.shape}\n".encode()
        + np.ascontiguousarray(column).tobytes()
        for name, column in sorted(chunk.columns.items())
    ]
    return b"\n".join([canonical_json(chunk.meta.to_metadata()), *columns])
