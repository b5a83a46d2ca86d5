"""Sealed segments: the rows of many chunks of one schema, in memory-mapped columns.

A segment is one safetensors file: the rows' own columns, and a chunk table (`chunk.*`) that keeps for every chunk what
its frame and metadata said, where its rows are, and a checksum per column. Row and chunk counts are padded to 64, so
that every column is 64-byte aligned. A segment is written once and never edited.
"""

import mmap
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from understudy.core import tensors
from understudy.core.canonical import canonical_json, strict_json
from understudy.core.chunk import OPTIONAL, Chunk
from understudy.core.errors import Corrupt, Refused
from understudy.core.frame import Frame, FrameKind
from understudy.core.log import remove, sync_folder
from understudy.core.meta import CONSENTS, read_meta
from understudy.core.tensors import Array
from understudy.stores.disk import disk

MAX_ROWS = 65_536
MAX_BYTES = 64 * 1024 * 1024
FORMAT = "understudy-segment/1"
DEFAULTS: dict[str, Any] = {"legal": True, "frames": 1}
"""What absent optional columns read as; 0 where nothing is said."""

_PAD = tensors.ALIGNMENT
_MAX_HEADER = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Sealable:
    """A chunk on its way into a segment, with what its frame said."""

    arrival_no: int
    crc: int
    length: int
    player: bytes
    received_s: int
    chunk: Chunk

    @property
    def order(self) -> tuple[bytes, int]:
        return self.chunk.meta.session.bytes, self.chunk.meta.chunk_no


def plan_segments(items: Sequence[Sealable]) -> list[list[Sealable]]:
    """The chunks of one schema, by session and number, cut into segments of at most 64k rows or 64 MiB.

    Chunks whose columns differ in more than the optional numbers (a mask, a raw action of another width) go apart.
    """
    alike: dict[frozenset[object], list[Sealable]] = {}
    for item in sorted(items, key=lambda item: item.order):
        alike.setdefault(_layout(item.chunk), []).append(item)
    return [group for same in alike.values() for group in _cut(same)]


def _layout(chunk: Chunk) -> frozenset[object]:
    return frozenset(
        (name, one.dtype.str, one.shape[1:]) for name, one in chunk.columns.items() if name not in OPTIONAL
    )


def _cut(items: Sequence[Sealable]) -> Iterator[list[Sealable]]:
    group: list[Sealable] = []
    rows = size = 0
    for item in items:
        rows, size = rows + item.chunk.n_rows, size + item.chunk.size_bytes
        if group and (rows > MAX_ROWS or size > MAX_BYTES):
            yield group
            group, rows, size = [], item.chunk.n_rows, item.chunk.size_bytes
        group.append(item)
    yield group


@dataclass(frozen=True, slots=True)
class Written:
    """What the catalogue needs to know about a segment file."""

    n_rows: int
    size_bytes: int
    crc: int


def write_segment(path: Path, items: Sequence[Sealable]) -> Written:
    """Write a segment durably under its final name."""
    columns, metadata = _columns(items)
    head = tensors.encode_header({name: (column.dtype, column.shape) for name, column in columns.items()}, metadata)
    temporary = path.with_suffix(".tmp")
    crc, size = crc32(head), len(head)
    try:
        with disk("a segment"), temporary.open("wb") as file:
            file.write(head)
            for name in sorted(columns):
                raw = np.ascontiguousarray(columns[name]).view(np.uint8).data
                crc, size = crc32(raw, crc), size + len(raw)
                file.write(raw)
            file.flush()
            os.fsync(file.fileno())
            temporary.rename(path)
            sync_folder(path.parent)
    except BaseException:
        remove(temporary)
        remove(path)
        raise
    return Written(sum(item.chunk.n_rows for item in items), size, crc)


def _columns(items: Sequence[Sealable]) -> tuple[dict[str, Array], dict[str, str]]:
    shapes: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
    for item in items:
        for name, column in item.chunk.columns.items():
            shapes.setdefault(name, (column.dtype, column.shape[1:]))
    names = sorted(shapes)
    optional = [name for name in names if name in OPTIONAL]
    n_rows = sum(item.chunk.n_rows for item in items)
    columns: dict[str, Array] = {}
    sums = np.zeros((_padded(len(items)), len(names)), np.uint32)
    for index, name in enumerate(names):
        columns[name] = _gather(items, name, shapes[name], _padded(n_rows), sums[:, index])
    metas = [canonical_json(item.chunk.meta.to_metadata()) for item in items]
    blob = b"".join(metas)
    table = _table(items, optional, [len(meta) for meta in metas])
    fact_sums = [_fact_sum(table, index, meta) for index, meta in enumerate(metas)]
    columns |= {f"chunk.{name}": column for name, column in table.items()}
    columns["chunk.fact_sum"] = _numbers(fact_sums, np.uint32)
    columns["chunk.sums"] = sums
    columns["chunk.metadata"] = np.frombuffer(blob + b" " * (-len(blob) % _PAD), np.uint8)
    first = items[0].chunk.meta
    metadata = {
        "format": FORMAT, "game": first.game, "schema": first.schema, "n_rows": str(n_rows),
        "n_chunks": str(len(items)), "columns": canonical_json(names).decode(),
        "optional": canonical_json(optional).decode(),
    }  # fmt: skip
    return columns, metadata


def _gather(
    items: Sequence[Sealable], name: str, shape: tuple[np.dtype[Any], tuple[int, ...]], n_rows: int, sums: Array
) -> Array:
    dtype, row_shape = shape
    column = np.zeros((n_rows, *row_shape), dtype)
    at = 0
    for index, item in enumerate(items):
        rows, source = item.chunk.n_rows, item.chunk.columns.get(name)
        column[at : at + rows] = DEFAULTS.get(name, 0) if source is None else source
        sums[index] = _sum(column[at : at + rows])
        at += rows
    return column


def _sum(rows: Array) -> int:
    return crc32(np.ascontiguousarray(rows).view(np.uint8).data if rows.size else b"")


def _numbers(values: list[int], dtype: type[np.generic]) -> Array:
    return np.array(values + [0] * (_padded(len(values)) - len(values)), dtype)


def _ids(values: list[bytes]) -> Array:
    raw = b"".join(values) + bytes(16 * (_padded(len(values)) - len(values)))
    return np.frombuffer(raw, np.uint8).reshape(-1, 16)


_FACTS = (
    "arrival", "consent", "crc", "first_row", "kind", "length", "metadata_end", "n_rows", "no", "player", "presence",
    "received", "session",
)  # fmt: skip
"""What the chunk table says of each chunk, besides its checksums and metadata."""


def _fact_sum(table: Mapping[str, Array], index: int, metadata: bytes) -> int:
    """Checksum of a chunk's row in the table, and of its metadata."""
    return crc32(b"".join([*(table[name][index].tobytes() for name in _FACTS), metadata]))


def _table(items: Sequence[Sealable], optional: list[str], meta_lengths: list[int]) -> dict[str, Array]:
    bits = {name: 1 << index for index, name in enumerate(optional)}
    rows = [item.chunk.n_rows for item in items]
    return {
        "session": _ids([item.chunk.meta.session.bytes for item in items]),
        "player": _ids([item.player for item in items]),
        "no": _numbers([item.chunk.meta.chunk_no for item in items], np.uint64),
        "arrival": _numbers([item.arrival_no for item in items], np.uint64),
        "first_row": _numbers([0, *np.cumsum(rows)[:-1].tolist()], np.uint32),
        "n_rows": _numbers(rows, np.uint32),
        "crc": _numbers([item.crc for item in items], np.uint32),
        "length": _numbers([item.length for item in items], np.uint32),
        "received": _numbers([item.received_s for item in items], np.uint32),
        "kind": _numbers([int(item.chunk.meta.kind == "actor") for item in items], np.uint8),
        "consent": _numbers([CONSENTS.index(item.chunk.meta.consent) for item in items], np.uint8),
        "presence": _numbers(
            [sum(bits.get(name, 0) for name in item.chunk.columns) for item in items], np.uint64
        ),
        "metadata_end": _numbers(np.cumsum(meta_lengths).tolist(), np.uint64),
    }  # fmt: skip


def _padded(count: int) -> int:
    return -(-count // _PAD) * _PAD


class Segment:
    """A sealed segment, memory-mapped; columns are views, and chunks come back bit-exact."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            layout = tensors.parse_header(
                memoryview(self._map), total_bytes=len(self._map), max_header_bytes=_MAX_HEADER
            )
            metadata = layout.metadata
            self.n_rows, self.n_chunks = int(metadata["n_rows"]), int(metadata["n_chunks"])
            self.game, self.schema = metadata["game"], metadata["schema"]
            self.names: list[str] = strict_json(metadata["columns"])
            self._optional: list[str] = strict_json(metadata["optional"])
        except (Refused, KeyError, ValueError) as error:
            raise Corrupt(f"segment {path.name} has no readable header: {error}") from error
        start = layout.data_start
        arrays = {name: tensors.view(self._map, entry, data_start=start) for name, entry in layout.entries.items()}  # type: ignore[arg-type]
        self.columns = {name: arrays[name][: self.n_rows] for name in self.names}
        self.table = {name.removeprefix("chunk."): array for name, array in arrays.items() if name.startswith("chunk.")}

    @property
    def size_bytes(self) -> int:
        return len(self._map)

    def crc(self) -> int:
        """CRC-32 of the whole file."""
        return crc32(self._map)

    @cached_property
    def _metadata_ends(self) -> list[int]:
        return [0, *self.table["metadata_end"][: self.n_chunks].tolist()]

    def metadata(self, index: int) -> dict[str, str]:
        """A chunk's metadata strings."""
        fields = strict_json(self._metadata_bytes(index))
        if not isinstance(fields, dict):
            raise Corrupt(f"segment {self.path.name} holds no metadata for chunk {index}")
        return fields

    def _metadata_bytes(self, index: int) -> bytes:
        start, end = self._metadata_ends[index : index + 2]
        return self.table["metadata"][start:end].tobytes()

    def rows(self, index: int) -> slice:
        first = int(self.table["first_row"][index])
        return slice(first, first + int(self.table["n_rows"][index]))

    def chunk(self, index: int) -> Chunk:
        """A chunk as it arrived: only the columns it brought."""
        presence, rows = int(self.table["presence"][index]), self.rows(index)
        absent = {name for bit, name in enumerate(self._optional) if not presence >> bit & 1}
        columns = {name: self.columns[name][rows] for name in self.names if name not in absent}
        return Chunk(read_meta(self.metadata(index)), columns)

    def sealable(self, index: int) -> Sealable:
        return Sealable(
            arrival_no=int(self.table["arrival"][index]), crc=int(self.table["crc"][index]),
            length=int(self.table["length"][index]), player=self.table["player"][index].tobytes(),
            received_s=int(self.table["received"][index]), chunk=self.chunk(index),
        )  # fmt: skip

    def frame(self, index: int) -> Frame:
        """The chunk's frame; its body is encoded anew, under the checksum and number that were acknowledged."""
        one = self.sealable(index)
        return Frame(
            kind=FrameKind.DATA, session=uuid.UUID(bytes=one.order[0]), chunk_no=one.order[1],
            body=one.chunk.encode(), body_crc=one.crc, player=one.player, received_s=one.received_s,
        )  # fmt: skip

    def damaged(self) -> list[int]:
        """Indices of chunks whose columns, metadata or row in the table do not match their checksums."""
        sums, facts, bad = self.table["sums"], self.table["fact_sum"], []
        for index in range(self.n_chunks):
            rows = self.rows(index)
            if _fact_sum(self.table, index, self._metadata_bytes(index)) != facts[index] or any(
                _sum(self.columns[name][rows]) != sums[index, at] for at, name in enumerate(self.names)
            ):
                bad.append(index)
        return bad

    def close(self) -> None:
        """Let go of the views; the map itself goes when the last array that looks into it does."""
        self.columns, self.table = {}, {}
