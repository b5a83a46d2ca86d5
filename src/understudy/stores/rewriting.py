"""Rewriting segments: without chunks that must go, or many small ones into few. No segment is ever edited."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from understudy.core.log import remove
from understudy.stores.catalogue import DAMAGED, Catalogue
from understudy.stores.sealing import SegmentRow, next_segment, segment_path, segment_row
from understudy.stores.segments import MAX_BYTES, MAX_ROWS, Sealable, Segment, plan_segments, write_segment

SMALL = 8
"""Segments below this share of a full one are small; this many small ones are merged."""


def rewrite(
    folder: Path,
    catalogue: Catalogue,
    numbers: Sequence[int],
    *,
    out: Mapping[int, int],
    save: Callable[[Sealable], None] | None = None,
) -> None:
    """Replace segments of one schema by new ones without the arrivals in `out`, which get the fate given there.

    `save` sees each of those inside the same transaction. Damage is not carried over under fresh checksums: a chunk
    that does not match its old ones is recorded as damaged.
    """
    segments = {number: Segment(segment_path(folder, number)) for number in numbers}
    kept, gone, damaged = _sort(segments, catalogue, out)
    groups = {next_segment(catalogue): group for group in plan_segments(kept)}
    try:
        rows = [_write(folder, number, group) for number, group in groups.items()]
        with catalogue.changing():
            if save is not None:
                for one in gone:
                    save(one)
            catalogue.many(
                "UPDATE arrivals SET fate = ?, segment = NULL, chunk = NULL WHERE no = ?",
                [(fate, no) for no, fate in out.items()] + [(DAMAGED, no) for no in damaged],
            )
            catalogue.many("INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            catalogue.many(
                "UPDATE arrivals SET segment = ?, chunk = ? WHERE no = ?",
                ((new, at, one.arrival_no) for new, group in groups.items() for at, one in enumerate(group)),
            )
            catalogue.many("DELETE FROM segments WHERE id = ?", ((number,) for number in numbers))
    except BaseException:
        for number in groups:
            remove(segment_path(folder, number))
        raise
    for number, segment in segments.items():
        segment.close()
        remove(segment_path(folder, number))


def _write(folder: Path, number: int, group: Sequence[Sealable]) -> SegmentRow:
    return segment_row(number, group[0].chunk.meta.schema, write_segment(segment_path(folder, number), group), group)


def _sort(
    segments: Mapping[int, Segment], catalogue: Catalogue, out: Mapping[int, int]
) -> tuple[list[Sealable], list[Sealable], list[int]]:
    """Chunks that stay, chunks that go, and arrivals that the catalogue expects and no sound chunk stands for."""
    kept: list[Sealable] = []
    gone: list[Sealable] = []
    damaged: list[int] = []
    for number, segment in segments.items():
        (crc,) = catalogue.one("SELECT crc FROM segments WHERE id = ?", number)
        bad = set(segment.damaged()) if segment.crc() != crc else set()
        for row in catalogue.arrivals("segment = ?", number):
            is_sound = row.chunk is not None and row.chunk < segment.n_chunks and row.chunk not in bad
            one = segment.sealable(row.chunk) if is_sound and row.chunk is not None else None
            if one is None or (one.arrival_no, one.crc, *one.order) != (row.no, row.crc, row.session, row.chunk_no):
                damaged += [row.no] if row.no not in out else []
            elif row.no in out:
                gone.append(one)
            else:
                kept.append(one)
    return kept, gone, damaged


def merge_small(folder: Path, catalogue: Catalogue) -> int:
    """Make few segments of many small ones, schema by schema, so that sampling stays fast; how many were merged."""
    merged = 0
    small = "n_rows < ? AND size_bytes < ?"
    limits = (MAX_ROWS // SMALL, MAX_BYTES // SMALL)
    for (schema,) in catalogue.rows(
        f"SELECT schema FROM segments WHERE {small} GROUP BY schema HAVING count(*) >= ?", *limits, SMALL
    ):
        query = f"SELECT id FROM segments WHERE schema = ? AND {small} ORDER BY id"
        numbers = [row[0] for row in catalogue.rows(query, schema, *limits)]
        rewrite(folder, catalogue, numbers, out={})
        merged += len(numbers)
    return merged
