"""Taking stored bytes away for good: segments are rewritten without them, and nothing of them stays on the disk."""

import uuid
from collections.abc import Callable
from pathlib import Path

from understudy.core.frame import Frame, FrameKind
from understudy.core.log import remove
from understudy.stores.catalogue import EXPIRED, FORGOTTEN, QUARANTINED, STORED, Catalogue
from understudy.stores.sealing import segment_path
from understudy.stores.segments import Sealable, Segment, write_segment


def erase_pending(folder: Path, catalogue: Catalogue) -> int:
    """Carry out every erasure that was promised; how many chunks went. Safe to repeat after a crash."""
    erased = 0
    for arrival, kind, player, chunks, reason in catalogue.rows("SELECT * FROM erasures ORDER BY arrival"):
        if kind == "forget":
            erased += _take_out(folder, catalogue, "player = ? AND no < ?", (player, arrival), FORGOTTEN)
            with catalogue.changing():
                catalogue.run("UPDATE arrivals SET fate = ?, body = NULL WHERE player = ? AND no < ? AND kind < 9", FORGOTTEN, player, arrival)
                catalogue.run("DELETE FROM quarantine WHERE player = ?", player)
        else:
            for at in range(0, len(chunks), 24):
                key = (chunks[at : at + 16], int.from_bytes(chunks[at + 16 : at + 24], "little"))
                erased += _quarantine(folder, catalogue, key, arrival, reason)
        with catalogue.changing():
            catalogue.run("DELETE FROM erasures WHERE arrival = ?", arrival)
    if erased:
        catalogue.truncate_wal()
    return erased


def expire(folder: Path, catalogue: Catalogue, before_s: float) -> int:
    """Drop sealed chunks received before a time; how many went."""
    return _take_out(folder, catalogue, "received < ?", (int(before_s),), EXPIRED)


def _quarantine(folder: Path, catalogue: Catalogue, key: tuple[bytes, int], arrival: int, reason: str) -> int:
    def keep_frame(one: Sealable) -> None:
        frame = Frame(
            kind=FrameKind.DATA, session=uuid.UUID(bytes=key[0]), chunk_no=key[1], body=one.chunk.encode(),
            body_crc=one.crc, player=one.player, received_s=one.received_s,
        )  # fmt: skip
        number = catalogue.fact("next_quarantine", 1)
        catalogue.set_fact("next_quarantine", number + 1)
        catalogue.run(
            "INSERT INTO quarantine VALUES (?, ?, '', 0, ?, ?, ?, ?, ?, ?, 0, ?)", number, reason,
            float(one.received_s), one.chunk.meta.game, *key, one.crc, one.player, frame.encode(),
        )  # fmt: skip

    where = "session = ? AND chunk_no = ? AND no < ?"
    return _take_out(folder, catalogue, where, (*key, arrival), QUARANTINED, keep_frame)


def _take_out(
    folder: Path,
    catalogue: Catalogue,
    where: str,
    values: tuple[object, ...],
    fate: int,
    save: Callable[[Sealable], None] | None = None,
) -> int:
    """Rewrite each segment that holds matching chunks without them, in one transaction a segment."""
    condition = f"{where} AND fate = {STORED} AND segment IS NOT NULL"
    gone = 0
    for (number,) in catalogue.rows(f"SELECT DISTINCT segment FROM arrivals WHERE {condition}", *values):
        rows = catalogue.rows(f"SELECT no, chunk FROM arrivals WHERE segment = ? AND {condition}", number, *values)
        gone += len(rows)
        _rewrite(folder, catalogue, number, {index: no for no, index in rows}, fate, save)
    return gone


def _rewrite(
    folder: Path,
    catalogue: Catalogue,
    number: int,
    out: dict[int, int],
    fate: int,
    save: Callable[[Sealable], None] | None,
) -> None:
    segment = Segment(segment_path(folder, number))
    kept = [segment.sealable(index) for index in range(segment.n_chunks) if index not in out]
    new = catalogue.fact("next_segment", 1)
    with catalogue.changing():
        catalogue.set_fact("next_segment", new + 1)
    written = write_segment(segment_path(folder, new), kept) if kept else None
    with catalogue.changing():
        for index, no in out.items():
            if save is not None:
                save(segment.sealable(index))
            catalogue.run("UPDATE arrivals SET fate = ?, segment = NULL, chunk = NULL WHERE no = ?", fate, no)
        if written is not None:
            received = [one.received_s for one in kept]
            catalogue.run(
                "INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?, ?)", new, segment.schema, written.n_rows,
                written.size_bytes, written.crc, min(received), max(received),
            )  # fmt: skip
            catalogue.many(
                "UPDATE arrivals SET segment = ?, chunk = ? WHERE no = ?",
                ((new, index, one.arrival_no) for index, one in enumerate(kept)),
            )
        catalogue.run("DELETE FROM segments WHERE id = ?", number)
    segment.close()
    remove(segment_path(folder, number))
