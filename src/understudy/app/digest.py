"""Digests: what a store holds as one number per session, so that two stores can be compared."""

import hashlib
import uuid
from collections.abc import Callable, Iterator

import numpy as np

from understudy.core.canonical import canonical_json
from understudy.core.chunk import Chunk
from understudy.core.ports import Cursor, Forgotten, Stored, Tail

TailOf = Callable[[Cursor | None], Tail]
"""One page of a store's tail behind a cursor."""


def items_of(page_behind: TailOf) -> Iterator[Stored | Forgotten]:
    """Everything a store holds now, in the order of arrival."""
    cursor: Cursor | None = None
    while items := (page := page_behind(cursor)).items:
        yield from items
        cursor = page.cursor


def digests(page_behind: TailOf) -> dict[str, str]:
    """SHA-256 per session over chunk numbers, columns, dtypes and metadata, in the order of the numbers."""
    parts: dict[uuid.UUID, dict[int, list[bytes]]] = {}
    for item in items_of(page_behind):
        if isinstance(item, Stored):
            body = item.frame.body if item.chunk is None else _bytes_of(item.chunk)
            chunk = hashlib.sha256(bytes([item.frame.kind]) + body).digest()
            # A number that is there twice must change the digest, so all of them are kept.
            parts.setdefault(item.frame.session, {}).setdefault(item.frame.chunk_no, []).append(chunk)
    return {str(session): _digest(numbers) for session, numbers in sorted(parts.items())}


def whole(found: dict[str, str]) -> str:
    """One digest over all sessions."""
    return hashlib.sha256(canonical_json(found)).hexdigest()


def _digest(numbers: dict[int, list[bytes]]) -> str:
    total = hashlib.sha256()
    for number, chunks in sorted(numbers.items()):
        for chunk in chunks:
            total.update(number.to_bytes(8, "little") + chunk)
    return total.hexdigest()


def _bytes_of(chunk: Chunk) -> bytes:
    columns = [
        f"{name} {column.dtype.str} {column.shape}\n".encode() + np.ascontiguousarray(column).tobytes()
        for name, column in sorted(chunk.columns.items())
    ]
    return b"\n".join([canonical_json(chunk.meta.to_metadata()), *columns])
