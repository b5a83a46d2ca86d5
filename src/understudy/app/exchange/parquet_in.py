"""Import of Parquet files that `data export` wrote: rows become the chunks they were."""

import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from understudy.app.exchange.arrow import from_arrow
from understudy.app.exchange.extra import extra, one_line
from understudy.app.exchange.parquet_columns import (
    FORMAT,
    FORMAT_KEY,
    SPEC_KEY,
    data_columns,
    next_columns,
    parquet_schema,
)
from understudy.core.chunk import CHUNK_FORMAT, MAX_STEPS, Chunk, RowKind, keeps_value_when_padded, read_meta
from understudy.core.errors import ConfigError, Refused, SpecError
from understudy.core.game import GameSpec, spec_from_json
from understudy.core.names import GameName, PlayerName, player_name
from understudy.core.tensors import Array

_BATCH_BYTES = 16 * 1024 * 1024


class ParquetFile:
    """One file; opening it checks that it is ours, and of which game."""

    def __init__(self, path: Path, *, game: GameName | None = None, consent: str | None = None) -> None:
        """`game`: another name for it; `consent`: in place of what the file says, except where a player said no."""
        if not path.is_file():
            raise ConfigError(f"{path} is no file; give a Parquet file that 'understudy data export' wrote")
        self.name, self._path, self._consent = str(path), path, consent
        parquet = extra("pyarrow.parquet")
        try:
            self._file = parquet.ParquetFile(path)
            schema = self._file.schema_arrow
        except (OSError, ValueError, extra("pyarrow").ArrowException) as error:
            raise ConfigError(f"{path} is no readable Parquet file: {one_line(error)}; export it again") from None
        metadata = schema.metadata or {}
        if metadata.get(FORMAT_KEY) != FORMAT.encode():
            raise ConfigError(
                f"{path} is a Parquet file of somebody else's: its metadata do not say {FORMAT}; give one that "
                "'understudy data export' wrote"
            )
        try:
            self.spec: GameSpec = spec_from_json(metadata.get(SPEC_KEY, b""))
        except SpecError as error:
            raise ConfigError(f"{path} has no readable game spec in its metadata: {one_line(error)}") from None
        self._has_player = "player" in schema.names
        wanted = parquet_schema(self.spec, with_player=self._has_player)
        if not schema.equals(wanted):
            wrong = [name for name in {*schema.names, *wanted.names} if _fields(schema, name) != _fields(wanted, name)]
            raise ConfigError(
                f"{path} has other columns than its game: {', '.join(sorted(wrong)[:6]) or 'their order'}"
            )
        self._columns = data_columns(self.spec)
        if game is not None:
            self.spec = replace(self.spec, game=game)

    @property
    def origins(self) -> Mapping[int, int]:
        return {}

    def report(self) -> Mapping[str, Any]:
        return {}

    def chunks(self) -> Iterator[tuple[Chunk, PlayerName | None]]:
        """Rows put together to chunks, as each was."""
        waiting: list[Any] = []
        key = None
        for batch, found in self._pieces():
            if waiting and found != key:
                yield self._chunk(waiting)
                waiting = []
            key = found
            waiting.append(batch)
            if sum(piece.num_rows for piece in waiting) > MAX_STEPS:
                raise ConfigError(
                    f"{self.name} was changed since it was exported: session {str(key[0])[:40]}, chunk {key[1]} has "
                    f"more than {MAX_STEPS} steps; import it as it was written"
                )
        if waiting:
            yield self._chunk(waiting)

    def _pieces(self) -> Iterator[tuple[Any, tuple[str, int]]]:
        """Record batches cut where the next chunk begins."""
        rows = max(1, min(8192, _BATCH_BYTES // (2 * self.spec.row_bytes)))
        try:
            for batch in self._file.iter_batches(batch_size=rows):
                if not batch.num_rows:
                    continue
                sessions = np.asarray(batch.column("session").to_pylist(), dtype=object)
                numbers = np.asarray(batch.column("chunk_no").to_pylist(), dtype=object)
                cuts = np.flatnonzero((sessions[1:] != sessions[:-1]) | (numbers[1:] != numbers[:-1])) + 1
                bounds = [0, *cuts.tolist(), batch.num_rows]
                for start, end in pairwise(bounds):
                    yield batch.slice(start, end - start), (sessions[start], numbers[start])
        except (OSError, ValueError, extra("pyarrow").ArrowException) as error:
            raise ConfigError(f"{self.name} is damaged: {one_line(error)}; export it again") from None

    def _chunk(self, pieces: list[Any]) -> tuple[Chunk, PlayerName | None]:
        pa = extra("pyarrow")
        table = pa.Table.from_batches(pieces).combine_chunks()
        first = {name: table.column(name)[0].as_py() for name in ("session", "chunk_no", "step", "kind", "client")}
        try:
            return self._made(table, first), self._player(table)
        except (Refused, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(
                f"{self.name} was changed since it was exported: session {first['session']}, chunk "
                f"{first['chunk_no']}: {one_line(error)}; import it as it was written"
            ) from None

    def _player(self, table: Any) -> PlayerName | None:
        text = table.column("player")[0].as_py() if self._has_player else None
        return None if text is None else player_name(f"imported-{text}")

    def _made(self, table: Any, first: Mapping[str, Any]) -> Chunk:
        n = table.num_rows
        for name in ("session", "chunk_no", "kind", "consent", "client"):
            if len(table.column(name).unique()) != 1:
                raise Refused("bad_rows", f"its rows differ in {name}")
        if table.column("step").to_pylist() != list(range(first["step"], first["step"] + n)):
            raise Refused("bad_rows", "its steps do not follow one another")
        steps = {name: self._rows(table, name) for name in self._columns}
        following = {name: self._rows(table, after, like=name) for name, after in next_columns(self._columns).items()}
        is_first, terminated, truncated = (np.asarray(steps[name]) for name in ("is_first", "terminated", "truncated"))
        ends = terminated | truncated
        splits = ends.copy()
        splits[:-1] |= is_first[1:]
        splits[-1] = True
        _check_following(steps, following, splits)
        columns = _with_last_rows(steps, following, splits, ends)
        starts = np.concatenate([[0], np.flatnonzero(splits)[:-1] + 1])
        at = starts + np.concatenate([[0], np.cumsum(splits)])[starts]  # each split before it added a row
        notes = [json.loads(table.column("note")[int(one)].as_py()) for one in starts]
        consent = table.column("consent")[0].as_py()
        metadata = {
            "format": CHUNK_FORMAT, "game": self.spec.game, "schema": self.spec.schema,
            "session": str(uuid.UUID(first["session"])), "chunk_no": str(first["chunk_no"]),
            "first_step": str(first["step"]), "n_steps": str(n), "kind": first["kind"],
            "consent": consent if self._consent is None or consent == "denied" else self._consent,
            "client": first["client"],
            "episodes": json.dumps([{**note, "row": int(row)} for note, row in zip(notes, at, strict=True)]),
        }  # fmt: skip
        return Chunk(read_meta(metadata), columns)

    def _rows(self, table: Any, name: str, *, like: str = "") -> Array | None:
        """The values of a column, or None where the chunk did not bring it."""
        column, values = self._columns[like or name], table.column(name)
        values = values.combine_chunks() if values.num_chunks != 1 else values.chunk(0)
        if column.may_miss and values.null_count == len(values):
            return None
        rows = from_arrow(values, column.dtype, column.shape)
        if rows is None:
            raise Refused("bad_columns", f"{name!r} has values of another shape, or lacks some")
        return rows


def _fields(schema: Any, name: str) -> list[tuple[Any, bool]]:
    """The type of every column of a name, and whether it may be null."""
    fields = [schema.field(at) for at in schema.get_all_field_indices(name)]
    return [(one.type, one.nullable) for one in fields]


def _check_following(steps: Mapping[str, Array | None], following: Mapping[str, Array | None], splits: Array) -> None:
    inside = np.flatnonzero(~splits[:-1])
    for name, after in following.items():
        rows = steps[name]
        if (rows is None) != (after is None):
            raise Refused("bad_columns", f"{name!r} and 'next_{name}' do not go together")
        if rows is not None and after is not None and after[inside].tobytes() != rows[inside + 1].tobytes():
            raise Refused("bad_columns", f"'next_{name}' is not the {name!r} of the step that follows")


def _with_last_rows(
    steps: Mapping[str, Array | None], following: Mapping[str, Array | None], splits: Array, ends: Array
) -> dict[str, Array]:
    """The chunk's columns: behind each split a row that keeps observation and mask, and is padding otherwise."""
    n, last = len(splits), np.flatnonzero(splits)
    at_steps = np.arange(n) + np.concatenate([[0], np.cumsum(splits)[:-1]])
    at_last = at_steps[last] + 1
    columns: dict[str, Array] = {}
    for name, rows in steps.items():
        if rows is None:
            continue
        columns[name] = column = np.zeros((n + len(last), *rows.shape[1:]), rows.dtype)
        column[at_steps] = rows
        after = following.get(name)
        if keeps_value_when_padded(name) and after is not None:
            column[at_last] = after[last]
    columns["row"] = row = np.zeros(n + len(last), np.uint8)
    row[at_last] = np.where(ends[last], RowKind.FINAL, RowKind.BOOTSTRAP)
    return columns
