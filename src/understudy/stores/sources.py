"""Where sampled rows come from: a mapped segment, or the unsealed chunks kept in memory. Both look the same."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from understudy.core.chunk import RowKind
from understudy.core.meta import CONSENTS
from understudy.core.ports import Stored
from understudy.core.tensors import Array
from understudy.stores.segments import DEFAULTS, Segment

CHUNK_FIELDS: Mapping[str, Any] = {
    "first_row": np.int64, "n_rows": np.int64, "no": np.int64, "arrival": np.int64, "received": np.int64,
    "kind": np.uint8, "consent": np.uint8, "starts_episode": np.bool_, "ends_open": np.bool_,
    "session": "V16", "player": "V16",
}  # fmt: skip
"""What a reader knows about each chunk."""


class Source(Protocol):
    """Columns of rows, and a table of the chunks they belong to."""

    n_rows: int
    chunks: Mapping[str, Array]

    @property
    def names(self) -> Collection[str]: ...

    def column(self, name: str) -> Array | None:
        """All rows of a column, or None when no chunk here brought it."""
        ...


class SegmentSource:
    """A sealed segment."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.n_rows = segment.n_rows
        table, count = segment.table, segment.n_chunks
        first, rows = table["first_row"][:count].astype(np.int64), table["n_rows"][:count].astype(np.int64)
        columns = segment.columns
        self.chunks: Mapping[str, Array] = {
            "first_row": first, "n_rows": rows, "no": table["no"][:count].astype(np.int64),
            "arrival": table["arrival"][:count].astype(np.int64),
            "received": table["received"][:count].astype(np.int64),
            "kind": table["kind"][:count], "consent": table["consent"][:count],
            "starts_episode": columns["is_first"][first],
            "ends_open": columns["row"][first + rows - 1] == RowKind.BOOTSTRAP,
            "session": np.ascontiguousarray(table["session"][:count]).view("V16").ravel(),
            "player": np.ascontiguousarray(table["player"][:count]).view("V16").ravel(),
        }  # fmt: skip

    @property
    def names(self) -> Collection[str]:
        return self.segment.columns

    def column(self, name: str) -> Array | None:
        return self.segment.columns.get(name)


class MemorySource:
    """Chunks that are not sealed yet, in columns that grow by doubling."""

    def __init__(self) -> None:
        self.n_rows = 0
        self._columns: dict[str, Array] = {}
        self._items: list[Stored] = []
        self._rows: list[tuple[Any, ...]] = []
        self.chunks: Mapping[str, Array] = _table([])

    def extend(self, items: Sequence[Stored]) -> None:
        """Take in chunks in the order of arrival."""
        for item in items:
            self._append(item)
        if items:
            self.chunks = _table(self._rows)

    def without_sealed(self, sealed_below: int) -> "MemorySource":
        """The part that is still unsealed."""
        if not self._items or self._items[0].arrival_no >= sealed_below:
            return self
        rest = MemorySource()
        rest.extend([item for item in self._items if item.arrival_no >= sealed_below])
        return rest

    def _append(self, item: Stored) -> None:
        chunk = item.chunk
        assert chunk is not None
        first, end = self.n_rows, self.n_rows + chunk.n_rows
        for name in chunk.columns.keys() | self._columns.keys():
            source = chunk.columns.get(name)
            column = self._room(name, source, end)
            column[first:end] = DEFAULTS.get(name, 0) if source is None else source
        self.n_rows = end
        self._items.append(item)
        meta = chunk.meta
        self._rows.append((
            first, chunk.n_rows, meta.chunk_no, item.arrival_no, item.frame.received_s, int(meta.kind == "actor"),
            CONSENTS.index(meta.consent), bool(chunk.columns["is_first"][0]),
            int(chunk.columns["row"][-1]) == RowKind.BOOTSTRAP, meta.session.bytes, item.frame.player,
        ))  # fmt: skip

    def _room(self, name: str, like: Array | None, end: int) -> Array:
        column = self._columns.get(name)
        if column is None:
            assert like is not None
            column = np.full((max(1024, end), *like.shape[1:]), DEFAULTS.get(name, 0), like.dtype)
        elif len(column) < end:
            grown = np.full((max(2 * len(column), end), *column.shape[1:]), DEFAULTS.get(name, 0), column.dtype)
            grown[: self.n_rows] = column[: self.n_rows]
            column = grown
        self._columns[name] = column
        return column

    @property
    def names(self) -> Collection[str]:
        return self._columns

    def column(self, name: str) -> Array | None:
        column = self._columns.get(name)
        return None if column is None else column[: self.n_rows]


def _table(rows: list[tuple[Any, ...]]) -> dict[str, Array]:
    table = {}
    for at, (name, dtype) in enumerate(CHUNK_FIELDS.items()):
        values = [row[at] for row in rows]
        table[name] = np.frombuffer(b"".join(values), dtype) if dtype == "V16" else np.array(values, dtype)
    return table
