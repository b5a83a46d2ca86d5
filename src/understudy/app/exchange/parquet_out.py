"""Export to Parquet: one row for each step, streamed in row groups."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from understudy.app.exchange.arrow import to_arrow
from understudy.app.exchange.extra import extra
from understudy.app.exchange.history import History, Item, OnSteps
from understudy.app.exchange.parquet_columns import Column, data_columns, next_columns, parquet_schema
from understudy.app.exchange.target import whole
from understudy.core.canonical import canonical_json
from understudy.core.chunk import Chunk, ChunkMeta, RowKind
from understudy.core.errors import ConfigError

GROUP_ROWS = 65_536
GROUP_BYTES = 32 * 1024 * 1024
"""A row group ends at whichever comes first, so that memory holds one of them."""


@dataclass(frozen=True, slots=True)
class Written:
    """What an export left behind."""

    path: Path
    size_bytes: int
    steps: int
    episodes: int
    sessions: int


def write_parquet(
    history: History, path: Path, *, with_player: bool = False, on_steps: OnSteps | None = None
) -> Written:
    """Write what is wanted as one Parquet file; ConfigError, and no file, when that is nothing."""
    parquet = extra("pyarrow.parquet")
    schema = parquet_schema(history.spec, with_player=with_player)
    counter, steps = _Episodes(), 0
    with whole(path) as temporary:
        with parquet.ParquetWriter(temporary, schema, compression="zstd", compression_level=3) as writer:
            group = _Group(writer, schema)
            for item in history.items(on_steps):
                group.add(_table(history, item, schema, counter))
                steps += item.chunk.meta.n_steps
            group.flush()
        if not steps:
            raise ConfigError(nothing_left(history))
    return Written(path.absolute(), path.stat().st_size, steps, counter.episodes, counter.sessions)


def nothing_left(history: History) -> str:
    """Why an export would be empty."""
    left = ", ".join(f"{steps} steps with consent {name}" for name, steps in sorted(history.left_out.items()))
    return f"nothing is left to export of {history.spec.game}: left out {left or 'nothing'}; name others with --consent"


class _Group:
    """Tables that wait for the next row group."""

    def __init__(self, writer: Any, schema: Any) -> None:
        self._writer, self._schema = writer, schema
        self._tables: list[Any] = []
        self._rows = self._bytes = 0

    def add(self, table: Any) -> None:
        self._tables.append(table)
        self._rows, self._bytes = self._rows + table.num_rows, self._bytes + table.nbytes
        if self._rows >= GROUP_ROWS or self._bytes >= GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._tables:
            table = extra("pyarrow").concat_tables(self._tables).combine_chunks()
            self._writer.write_table(table, row_group_size=table.num_rows)
        self._tables, self._rows, self._bytes = [], 0, 0


class _Episodes:
    """Numbers the episodes of each session, from 0, in the order of its chunks."""

    def __init__(self) -> None:
        self._session, self._expected, self._episode = b"", -1, -1
        self.episodes = self.sessions = 0

    def number(self, meta: ChunkMeta, is_first: "np.ndarray[Any, np.dtype[np.bool_]]") -> Any:
        """int64[steps]: the episode that each step belongs to."""
        if meta.session.bytes != self._session:
            self._session, self._expected, self._episode = meta.session.bytes, -1, -1
            self.sessions += 1
        begins = is_first.copy()
        # What follows a gap may belong to another episode than what came before it.
        begins[0] |= meta.chunk_no != self._expected
        numbers = self._episode + np.cumsum(begins, dtype=np.int64)
        self.episodes += int(begins.sum())
        self._expected, self._episode = meta.chunk_no + 1, int(numbers[-1])
        return numbers


def _table(history: History, item: Item, schema: Any, counter: _Episodes) -> Any:
    pa, chunk, meta = extra("pyarrow"), item.chunk, item.chunk.meta
    steps = np.flatnonzero(chunk.columns["row"] == RowKind.STEP)
    n = len(steps)
    columns = data_columns(history.spec)
    arrays = {
        "session": _repeated(str(meta.session), n), "kind": _repeated(meta.kind, n),
        "consent": _repeated(meta.consent, n), "client": _repeated(meta.client, n),
        "player": _repeated(item.player.hex(), n), "chunk_no": pa.array(np.full(n, meta.chunk_no, np.int64)),
        "step": pa.array(meta.first_step + np.arange(n, dtype=np.int64)),
        "episode": pa.array(counter.number(meta, chunk.columns["is_first"][steps])),
    }  # fmt: skip
    which = np.searchsorted([note.row for note in meta.episodes], steps, side="right") - 1
    notes = [canonical_json({**note.to_json(), "row": 0}).decode() for note in meta.episodes]
    arrays["note"] = pa.array(notes).take(pa.array(which))
    arrays["model"] = pa.array([note.model for note in meta.episodes], pa.string()).take(pa.array(which))
    for name, column in columns.items():
        arrays[name] = _values(chunk, name, steps, column)
    for name, following in next_columns(columns).items():
        arrays[following] = _values(chunk, name, steps + 1, columns[name])
    return pa.Table.from_arrays([arrays[name] for name in schema.names], schema=schema)


def _values(chunk: Chunk, name: str, rows: Any, column: Column) -> Any:
    found = chunk.columns.get(name)
    if found is None:
        return extra("pyarrow").nulls(len(rows), column.arrow)
    return to_arrow(found[rows], may_miss=column.may_miss)


def _repeated(text: str, count: int) -> Any:
    pa = extra("pyarrow")
    return pa.repeat(pa.scalar(text), count)
