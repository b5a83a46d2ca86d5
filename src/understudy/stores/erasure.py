"""Taking stored bytes away for good: segments are rewritten without them, and nothing of them stays on the disk."""

import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from zlib import crc32

from understudy.core.ages import REMEMBER_S
from understudy.core.frame import Frame, FrameKind
from understudy.core.session import unpack_state, withdraw
from understudy.stores.catalogue import EXPIRED, FORGOTTEN, QUARANTINED, STORED, Catalogue
from understudy.stores.commits import unpack_keys
from understudy.stores.rewriting import rewrite
from understudy.stores.segments import Sealable

Taken = tuple[int, int]
"""Arrival number and segment."""

_PLACE = f"SELECT no, segment FROM arrivals WHERE fate = {STORED} AND segment IS NOT NULL AND "


def erase_pending(folder: Path, catalogue: Catalogue) -> bool:
    """Carry out every erasure that was promised; whether nothing is left of it. Safe to repeat, also after a crash."""
    pending = catalogue.rows("SELECT * FROM erasures ORDER BY arrival")
    for arrival, kind, player, chunks, reason in pending:
        if kind == "forget":
            _forget(folder, catalogue, player, arrival)
        else:
            _quarantine(folder, catalogue, chunks, arrival, reason)
    # An erasure is done when no old page is left in the write-ahead log either; a reader may be in the way of that.
    if not pending:
        return True
    if not catalogue.truncate_wal():
        return False
    with catalogue.changing():
        catalogue.many("DELETE FROM erasures WHERE arrival = ?", [row[:1] for row in pending])
    return True


def has_pending(catalogue: Catalogue) -> bool:
    """Whether an erasure was promised and not finished."""
    return catalogue.one("SELECT 1 FROM erasures LIMIT 1") is not None


def expire(folder: Path, catalogue: Catalogue, before_s: float, *, now_s: float) -> int:
    """Drop sealed chunks received before a time, and the bytes of quarantined frames; how many chunks went.

    What is known of them stays until their sessions are too old to be sent again; then that goes too.
    """
    gone = _take_out(folder, catalogue, catalogue.rows(f"{_PLACE} received < ?", int(before_s)), EXPIRED)
    with catalogue.changing():
        emptied = catalogue.run("UPDATE quarantine SET raw = x'' WHERE received < ? AND raw <> x''", before_s)
    if emptied:
        catalogue.truncate_wal()
    _prune(catalogue, now_s - REMEMBER_S)
    return gone


def _prune(catalogue: Catalogue, before_s: float) -> None:
    """Delete the catalogue's oldest rows whose bytes are gone and whose sessions can no longer come back."""
    kept = catalogue.one(
        "SELECT min(no) FROM arrivals WHERE fate NOT IN (?, ?) OR received >= ?", FORGOTTEN, EXPIRED, int(before_s)
    )[0]
    pruned_below = catalogue.fact("sealed_below", 1) if kept is None else kept
    if kept is not None:
        before_s = min(before_s, catalogue.one("SELECT received FROM arrivals WHERE no = ?", kept)[0])
    if pruned_below <= catalogue.fact("pruned_below", 1):
        return
    with catalogue.changing():
        catalogue.run("DELETE FROM arrivals WHERE no < ?", pruned_below)
        catalogue.run(
            "DELETE FROM sessions WHERE last_received < ? AND session NOT IN (SELECT session FROM arrivals)",
            int(before_s),
        )
        catalogue.run("DELETE FROM quarantine WHERE received < ? AND raw = x''", before_s)
        catalogue.set_fact("pruned_below", pruned_below)
        catalogue.set_fact("pruned_before_s", int(before_s))


def _forget(folder: Path, catalogue: Catalogue, player: bytes, arrival: int) -> None:
    _take_out(folder, catalogue, catalogue.rows(f"{_PLACE} player = ? AND no < ?", player, arrival), FORGOTTEN)
    with catalogue.changing():
        catalogue.run(
            "UPDATE arrivals SET fate = ?, body = NULL WHERE player = ? AND no < ? AND kind < 9",
            FORGOTTEN, player, arrival,
        )  # fmt: skip
        # Frames with a damaged header name no player, but carry the pseudonym somewhere.
        catalogue.run(
            "DELETE FROM quarantine WHERE (player = ?1 OR instr(raw, ?1) > 0) "
            "AND received <= (SELECT max(at) FROM tombstones WHERE player = ?1)", player,
        )  # fmt: skip


def _quarantine(folder: Path, catalogue: Catalogue, chunks: bytes, arrival: int, reason: str) -> None:
    taken: list[Taken] = []
    for session, number in unpack_keys(chunks):
        taken += catalogue.rows(
            f"{_PLACE} session = ? AND chunk_no = ? AND kind < 9 AND no < ?", session, number, arrival
        )

    def keep_frame(one: Sealable) -> None:
        body, meta = one.chunk.encode(), one.chunk.meta
        frame = Frame(
            kind=FrameKind.DATA, session=meta.session, chunk_no=meta.chunk_no, body=body, body_crc=crc32(body),
            player=one.player, received_s=one.received_s,
        )  # fmt: skip
        number = catalogue.fact("next_quarantine", 1)
        catalogue.set_fact("next_quarantine", number + 1)
        catalogue.run(
            "INSERT INTO quarantine VALUES (?, ?, '', 0, ?, ?, ?, ?, ?, ?, 0, ?)", number, reason,
            float(one.received_s), meta.game, meta.session.bytes, meta.chunk_no, one.crc, one.player, frame.encode(),
        )  # fmt: skip
        _withdraw(catalogue, meta.session, meta.n_steps)

    _take_out(folder, catalogue, taken, QUARANTINED, keep_frame)


def _withdraw(catalogue: Catalogue, session: uuid.UUID, n_steps: int) -> None:
    row = catalogue.one("SELECT state FROM sessions WHERE session = ?", session.bytes)
    if row is not None:
        state = withdraw(unpack_state(row[0]), n_steps)
        catalogue.run("UPDATE sessions SET state = ? WHERE session = ?", state.pack(), session.bytes)


def _take_out(
    folder: Path,
    catalogue: Catalogue,
    taken: Iterable[Taken],
    fate: int,
    save: Callable[[Sealable], None] | None = None,
) -> int:
    """Rewrite each segment that holds some of these chunks without them, in one transaction a segment."""
    by_segment: dict[int, dict[int, int]] = {}
    for no, segment in taken:
        by_segment.setdefault(segment, {})[no] = fate
    for number, out in by_segment.items():
        rewrite(folder, catalogue, [number], out=out, save=save)
    return sum(len(out) for out in by_segment.values())
