"""Sealing: a frozen generation becomes segments, in the one transaction that also retires its log files."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from understudy.core.frame import HEADER_BYTES, FrameKind
from understudy.core.log import LogReader, remove
from understudy.core.ports import Specs
from understudy.core.session import unpack_state
from understudy.stores.catalogue import DAMAGED, EVENT_KIND, FORGOTTEN, QUARANTINED, STORED, ArrivalRow, Catalogue
from understudy.stores.commits import Event, log_path, pack_keys
from understudy.stores.generation import Generation, Item, Place, chunk_at
from understudy.stores.segments import Sealable, Written, plan_segments, write_segment

QUARANTINE_BYTES = 256 * 1024 * 1024
"""How much of refused frames is kept; what bad clients send must not fill the disk."""

_NO_ID = bytes(16)
_ADD_SCHEMA = (
    "INSERT INTO schemas (game, schema, spec) VALUES (?, ?, ?) "
    "ON CONFLICT (schema) DO UPDATE SET spec = coalesce(spec, excluded.spec)"
)
_EVENT_FATES = {"forget": FORGOTTEN, "quarantine": QUARANTINED, "damaged": DAMAGED}

SegmentRow = tuple[int, str, int, int, int, int, int]
"""Number, schema, rows, bytes, checksum, first and last time received."""


def write_segments(folder: Path, catalogue: Catalogue, generation: Generation) -> "Sealed":
    """Write a generation's chunks into segment files that nobody knows of yet."""
    forgets, sealed = forgotten_below(generation), Sealed()
    by_schema: dict[str, list[Item]] = {}
    for item in generation.items:
        if item.kind is FrameKind.DATA and not _is_forgotten(item, forgets):
            by_schema.setdefault(item.facts.schema, []).append(item)
    try:
        with _readers(folder, generation) as readers:
            for schema, items in by_schema.items():
                of_arrival = {item.arrival_no: item for item in items}
                for group in plan_segments([_sealable(item, readers) for item in items]):
                    number = next_segment(catalogue)
                    written = write_segment(segment_path(folder, number), group)
                    sealed.segments.append(segment_row(number, schema, written, group))
                    sealed.arrivals += [
                        _row(of_arrival[one.arrival_no], segment=number, chunk=index) for index, one in enumerate(group)
                    ]
    except BaseException:
        for number, *_ in sealed.segments:
            remove(segment_path(folder, number))
        raise
    return sealed


def register(
    folder: Path, catalogue: Catalogue, generation: Generation, sealed: "Sealed", *, specs: Specs | None
) -> None:
    """Tell the catalogue everything about a generation, in the transaction that retires its log files."""
    forgets = forgotten_below(generation)
    # Asked before anything is locked: specs may lie on other machines.
    schemas = _new_schemas(catalogue, generation, specs)
    with _readers(folder, generation) as readers, catalogue.changing():
        catalogue.many(_ADD_SCHEMA, schemas)
        catalogue.many("INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?, ?)", sealed.segments)
        catalogue.add_arrivals(sealed.arrivals)
        catalogue.add_arrivals(_control_rows(generation, readers, forgets))
        catalogue.add_arrivals(_event_rows(generation))
        _write_sessions(catalogue, generation, forgets)
        _write_quarantine(catalogue, generation, readers)
        catalogue.many("INSERT OR REPLACE INTO positions VALUES (?, ?)", generation.positions.items())
        _write_events(catalogue, generation)
        catalogue.set_fact("sealed_below", _next_arrival(catalogue, generation))
        catalogue.set_fact("log_floor", max(generation.files) + 1)
        catalogue.set_fact("next_commit", generation.next_commit)


@dataclass(slots=True)
class Sealed:
    """Segments on the disk, and the rows that will make them known."""

    segments: list[SegmentRow] = field(default_factory=list)
    arrivals: list[ArrivalRow] = field(default_factory=list)


@contextmanager
def _readers(folder: Path, generation: Generation) -> Iterator[dict[int, LogReader]]:
    with ExitStack() as stack:
        yield {number: stack.enter_context(LogReader(log_path(folder, number))) for number in generation.files}


def forgotten_below(generation: Generation) -> dict[bytes, int]:
    """Players that a generation forgets, and below which arrival number."""
    return {event.player: number for number, event in generation.events if event.kind == "forget"}


def next_segment(catalogue: Catalogue) -> int:
    """A segment number that was never used before, and will not be again whatever becomes of its file."""
    with catalogue.changing():
        number = catalogue.fact("next_segment", 1)
        catalogue.set_fact("next_segment", number + 1)
    return number


def segment_row(number: int, schema: str, written: Written, items: Sequence[Sealable]) -> SegmentRow:
    """What the catalogue keeps about a segment."""
    received = [one.received_s for one in items]
    return number, schema, written.n_rows, written.size_bytes, written.crc, min(received), max(received)


def segment_path(folder: Path, number: int) -> Path:
    return folder / "segments" / f"{number:08d}.safetensors"


def _sealable(item: Item, readers: dict[int, LogReader]) -> Sealable:
    chunk = item.chunk if item.chunk is not None else chunk_at(item.place, readers[item.place.file])
    return Sealable(item.arrival_no, item.crc, item.body_len, item.player, item.received_s, chunk)


def _is_forgotten(item: Item, forgets: dict[bytes, int]) -> bool:
    return item.arrival_no < forgets.get(item.player, 0)


def _row(
    item: Item, *, segment: int | None = None, chunk: int | None = None, fate: int = STORED, body: bytes | None = None
) -> ArrivalRow:
    return ArrivalRow(
        no=item.arrival_no, kind=item.kind, session=item.session.bytes, chunk_no=item.chunk_no, crc=item.crc,
        length=item.body_len, player=item.player, received=item.received_s, game=item.facts.game,
        first_step=item.facts.first_step, n_steps=item.facts.n_steps, segment=segment, chunk=chunk, fate=fate,
        body=body,
    )  # fmt: skip


def _control_rows(
    generation: Generation, readers: dict[int, LogReader], forgets: dict[bytes, int]
) -> Iterable[ArrivalRow]:
    """Drop reports and closes with their bodies, and data frames that were forgotten before they were sealed."""
    for item in generation.items:
        if _is_forgotten(item, forgets):
            yield _row(item, fate=FORGOTTEN)
        elif item.kind is not FrameKind.DATA:
            yield _row(item, body=_bytes(item.place, readers)[HEADER_BYTES:])


def _event_rows(generation: Generation) -> Iterable[ArrivalRow]:
    for first, event in generation.events:
        fate = _EVENT_FATES[event.kind]
        for number in range(first, first + event.count):
            yield event_row(number, event, fate)


def event_row(number: int, event: Event, fate: int) -> ArrivalRow:
    """An arrival number that is no frame."""
    return ArrivalRow(
        no=number, kind=EVENT_KIND, session=_NO_ID, chunk_no=0, crc=0, length=0, player=event.player,
        received=int(event.at_s), game="", first_step=0, n_steps=0, segment=None, chunk=None, fate=fate,
        body=pack_keys(event.chunks),
    )  # fmt: skip


def _new_schemas(
    catalogue: Catalogue, generation: Generation, specs: Specs | None
) -> list[tuple[str, str, bytes | None]]:  # fmt: skip
    found: list[tuple[str, str, bytes | None]] = []
    for game, schema in {(item.facts.game, item.facts.schema) for item in generation.items if item.facts.schema}:
        row = catalogue.one("SELECT spec FROM schemas WHERE schema = ?", schema)
        if row is None or row[0] is None:
            spec = specs.spec(game, schema) if specs is not None else None
            found.append((game, schema, spec.to_json() if spec is not None else None))
    return found


def _write_events(catalogue: Catalogue, generation: Generation) -> None:
    """Remember what is still to be erased; `erasure` does it, now or after a crash."""
    for number, event in generation.events:
        if event.kind == "damaged" and not event.count:
            # Commits that held no arrivals leave no row behind that could tell of them.
            catalogue.set_fact("damaged_commits", catalogue.fact("damaged_commits") + 1)
        if event.kind == "forget":
            catalogue.run("INSERT INTO tombstones VALUES (?, ?, ?)", event.player, event.at_s, number)
        if event.kind != "damaged":
            chunks = pack_keys(event.chunks)
            catalogue.run(
                "INSERT INTO erasures VALUES (?, ?, ?, ?, ?)", number, event.kind, event.player, chunks, event.reason
            )


def _write_sessions(catalogue: Catalogue, generation: Generation, forgets: dict[bytes, int]) -> None:
    for player in forgets:
        for session, raw in catalogue.rows("SELECT session, state FROM sessions WHERE player = ?", player):
            state = replace(unpack_state(raw), forgotten=True)
            catalogue.run("UPDATE sessions SET state = ? WHERE session = ?", state.pack(), session)
    catalogue.many(
        "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?)",
        (
            (session.bytes, game, state.player, state.last_received_s, state.pack())
            for session, (game, state) in generation.sessions.items()
        ),
    )


def _write_quarantine(catalogue: Catalogue, generation: Generation, readers: dict[int, LogReader]) -> None:
    catalogue.many(
        "INSERT OR REPLACE INTO quarantine VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?)",
        (
            (one.id, one.reason, one.detail, one.parked, one.received_s, one.game, one.session, one.chunk_no, one.crc,
             one.player, _bytes(place, readers))
            for one, place in generation.quarantined
        ),
    )  # fmt: skip
    catalogue.many(
        "UPDATE quarantine SET replayed = 1, raw = x'' WHERE id = ?", ((one,) for one in generation.replayed)
    )
    if generation.quarantined:
        catalogue.set_fact("next_quarantine", max(one.id for one, _ in generation.quarantined) + 1)
        _keep_quarantine_small(catalogue)


def _keep_quarantine_small(catalogue: Catalogue) -> None:
    """Let go of the oldest refused bytes beyond the limit; their reasons and checksums stay."""
    excess = catalogue.one("SELECT coalesce(sum(length(raw)), 0) FROM quarantine")[0] - QUARANTINE_BYTES
    while excess > 0:
        oldest = catalogue.rows("SELECT id, length(raw) FROM quarantine WHERE raw <> x'' ORDER BY id LIMIT 256")
        for number, length in oldest:
            if excess > 0:
                catalogue.run("UPDATE quarantine SET raw = x'' WHERE id = ?", number)
                excess -= length


def _bytes(place: Place, readers: dict[int, LogReader]) -> bytes:
    return readers[place.file].bytes_at(place.offset, place.length)


def _next_arrival(catalogue: Catalogue, generation: Generation) -> int:
    ends = [item.arrival_no + 1 for item in generation.items[-1:]]
    ends += [number + event.count for number, event in generation.events[-1:]]
    return max([catalogue.fact("sealed_below", 1), *ends])
