"""Parquet: one row per step and the game's spec in the metadata; exported and imported bit for bit.

    session, chunk_no, step      identify the step; `episode` counts the episodes of a session
                                 within the file
    kind, consent, client, note  metadata of its chunk; `note` is the episode's, as JSON, and
                                 `model` is repeated from it
    obs, action, reward, …       the chunk's own columns, with their own names
    next_obs, next_action_mask   the observation and mask after the step, exact even if an
                                 episode ends or is cut there

A column that a chunk does not have is null in its rows.
"""

import json
import math
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from understudy.core.canonical import canonical_json
from understudy.core.errors import ConfigError, Refused, SpecError
from understudy.core.names import GameName, PlayerName, player_name
from understudy.core.tensors import Array
from understudy.exchange.exporting import (
    ExportedChunks,
    OnSteps,
    Written,
    atomic_path,
    import_extra,
    one_line,
    optional_columns,
)
from understudy.experience.chunk import (
    CHUNK_FORMAT,
    MAX_STEPS,
    REQUIRED,
    Chunk,
    ChunkMeta,
    RowKind,
    keeps_value_when_padded,
    read_meta,
)
from understudy.experience.game import GameSpec, spec_from_json

pa, pc, pq = (import_extra(name) for name in ("pyarrow", "pyarrow.compute", "pyarrow.parquet"))

FORMAT = "understudy-parquet/1"
FORMAT_KEY = b"understudy.format"
SPEC_KEY = b"understudy.spec"

TEXTS = ("session", "kind", "consent", "client", "note")
NUMBERS = ("chunk_no", "episode", "step")

GROUP_ROWS = 65_536
GROUP_BYTES = 32 * 1024 * 1024
"""A row group ends at whichever limit is reached first; one group at a time is in memory."""
_BATCH_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Column:
    """The NumPy and Arrow type of a column, and whether chunks may lack it.

    An Arrow value is a number, or nested lists of fixed sizes. Parquet's reader rejects nulls among
    such lists, so columns that may be missing use variable-size lists.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...] = ()
    is_optional: bool = False

    @property
    def arrow_type(self) -> Any:
        arrow_type = pa.from_numpy_dtype(self.dtype)
        for size in reversed(self.shape):
            arrow_type = pa.list_(arrow_type) if self.is_optional else pa.list_(arrow_type, size)
        return arrow_type

    def to_arrow(self, rows: Array) -> Any:
        values = pa.array(np.ascontiguousarray(rows).reshape(-1))
        for at in reversed(range(1, rows.ndim)):
            size = rows.shape[at]
            if self.is_optional:
                offsets = np.arange(math.prod(rows.shape[:at]) + 1, dtype=np.int32) * np.int32(size)
                values = pa.ListArray.from_arrays(pa.array(offsets), values)
            else:
                values = pa.FixedSizeListArray.from_arrays(values, size)
        return values

    def from_arrow(self, values: Any) -> Array | None:
        """Return the rows of an Arrow array without nulls, or None if their shape differs."""
        n_rows = len(values)
        for size in self.shape:
            if (
                values.null_count
                or not (pc.list_value_length(values).to_numpy(zero_copy_only=False) == size).all()
            ):
                return None
            values = values.flatten()
        if values.null_count:
            return None
        rows = np.asarray(values.to_numpy(zero_copy_only=False))
        if rows.dtype.newbyteorder("<") != self.dtype:
            return None
        return rows.astype(self.dtype, copy=False).reshape(n_rows, *self.shape)


def data_columns(spec: GameSpec) -> dict[str, Column]:
    """Return the chunk columns of this game by name, without `row`: every file row is a step."""
    columns = {name: Column(dtype) for name, dtype in REQUIRED.items() if name != "row"}
    for name, space in {**spec.obs_columns, **spec.action_columns}.items():
        columns[name] = Column(space.dtype, space.shape)
    for name, (dtype, shape) in optional_columns(spec).items():
        is_required = name == "action_mask" and spec.has_action_mask
        columns[name] = Column(dtype, shape, is_optional=not is_required)
    return columns


def parquet_schema(spec: GameSpec, *, with_player: bool) -> Any:
    """Return the Arrow schema of a file, with the spec in its metadata."""
    columns = data_columns(spec)
    columns |= {
        f"next_{name}": column for name, column in columns.items() if keeps_value_when_padded(name)
    }
    fields = [pa.field(name, pa.string(), nullable=False) for name in TEXTS]
    fields += [pa.field(name, pa.int64(), nullable=False) for name in NUMBERS]
    fields += [
        pa.field("model", pa.string()),
        *([pa.field("player", pa.string())] if with_player else []),
    ]
    fields += [
        pa.field(name, column.arrow_type, nullable=column.is_optional)
        for name, column in columns.items()
    ]
    return pa.schema(fields, metadata={FORMAT_KEY: FORMAT.encode(), SPEC_KEY: spec.to_json()})


# --- export ---------------------------------------------------------------------------------------


def write_parquet(
    history: ExportedChunks,
    path: Path,
    *,
    with_player: bool = False,
    on_steps: OnSteps | None = None,
) -> Written:
    """Write the chunks to one Parquet file; ConfigError, and no file, if there are no steps."""
    schema = parquet_schema(history.spec, with_player=with_player)
    columns = data_columns(history.spec)
    counter = _Episodes()
    steps = 0
    with atomic_path(path) as temporary:
        with pq.ParquetWriter(temporary, schema, compression="zstd", compression_level=3) as writer:
            chunks = history.chunks(on_steps)
            for group in _groups(
                _table(chunk, player, schema, columns, counter) for chunk, player in chunks
            ):
                writer.write_table(group, row_group_size=group.num_rows)
                steps += group.num_rows
        if not steps:
            raise ConfigError(history.why_empty())
    return Written(path.absolute(), path.stat().st_size, steps, counter.episodes, counter.sessions)


def _groups(tables: Iterable[Any]) -> Iterator[Any]:
    """Concatenate the tables into row groups."""
    waiting: list[Any] = []
    n_rows = n_bytes = 0
    for table in tables:
        waiting.append(table)
        n_rows += table.num_rows
        n_bytes += table.nbytes
        if n_rows >= GROUP_ROWS or n_bytes >= GROUP_BYTES:
            yield pa.concat_tables(waiting).combine_chunks()
            waiting = []
            n_rows = n_bytes = 0
    if waiting:
        yield pa.concat_tables(waiting).combine_chunks()


class _Episodes:
    """Numbers the episodes of each session, from 0, in the order of its chunks."""

    def __init__(self) -> None:
        self._session = b""
        self._expected = -1
        self._episode = -1
        self.episodes = self.sessions = 0

    def number(self, meta: ChunkMeta, is_first: "np.ndarray[Any, np.dtype[np.bool_]]") -> Any:
        """Return int64[steps], the episode that each step belongs to."""
        if meta.session.bytes != self._session:
            self._session = meta.session.bytes
            self._expected = -1
            self._episode = -1
            self.sessions += 1
        begins = is_first.copy()
        # The steps after a gap may belong to another episode than those before it.
        begins[0] |= meta.chunk_no != self._expected
        numbers = self._episode + np.cumsum(begins, dtype=np.int64)
        self.episodes += int(begins.sum())
        self._expected = meta.chunk_no + 1
        self._episode = int(numbers[-1])
        return numbers


def _table(
    chunk: Chunk, player: bytes, schema: Any, columns: Mapping[str, Column], counter: _Episodes
) -> Any:
    meta = chunk.meta
    steps = np.flatnonzero(chunk.columns["row"] == RowKind.STEP)
    n = len(steps)
    texts = {
        "session": str(meta.session),
        "kind": meta.kind,
        "consent": meta.consent,
        "client": meta.client,
        "player": player.hex(),
    }
    arrays = {name: pa.repeat(pa.scalar(text), n) for name, text in texts.items()}
    arrays["chunk_no"] = pa.array(np.full(n, meta.chunk_no, np.int64))
    arrays["step"] = pa.array(meta.first_step + np.arange(n, dtype=np.int64))
    arrays["episode"] = pa.array(counter.number(meta, chunk.columns["is_first"][steps]))
    which = pa.array(np.searchsorted([note.row for note in meta.episodes], steps, side="right") - 1)
    notes = [canonical_json({**note.to_json(), "row": 0}).decode() for note in meta.episodes]
    arrays["note"] = pa.array(notes).take(which)
    arrays["model"] = pa.array([note.model for note in meta.episodes], pa.string()).take(which)
    for name, column in columns.items():
        rows = chunk.columns.get(name)
        arrays[name] = (
            pa.nulls(n, column.arrow_type) if rows is None else column.to_arrow(rows[steps])
        )
        if keeps_value_when_padded(name):
            following = arrays[name] if rows is None else column.to_arrow(rows[steps + 1])
            arrays[f"next_{name}"] = following
    return pa.Table.from_arrays([arrays[name] for name in schema.names], schema=schema)


# --- import ---------------------------------------------------------------------------------------


class ParquetFile:
    """A file that `data export` wrote; opening checks its schema, reading restores the chunks."""

    origins: Mapping[int, int] = {}

    def __init__(
        self, path: Path, *, game: GameName | None = None, consent: str | None = None
    ) -> None:
        """`game` renames the game; `consent` replaces the file's consents, except "denied"."""
        if not path.is_file():
            raise ConfigError(
                f"{path} is not a file; pass a Parquet file that 'understudy data export' wrote"
            )
        self.name = str(path)
        self._consent = consent
        try:
            self._file = pq.ParquetFile(path)
            schema = self._file.schema_arrow
        except (OSError, ValueError, pa.ArrowException) as error:
            raise ConfigError(
                f"{path} is not a readable Parquet file: {one_line(error)}; export it again"
            ) from None
        metadata = schema.metadata or {}
        if metadata.get(FORMAT_KEY) != FORMAT.encode():
            raise ConfigError(
                f"{path} is a Parquet file of another program: its metadata lacks {FORMAT}; pass "
                "one that 'understudy data export' wrote"
            )
        try:
            self.spec: GameSpec = spec_from_json(metadata.get(SPEC_KEY, b""))
        except SpecError as error:
            raise ConfigError(
                f"{path} has no readable game spec in its metadata: {one_line(error)}; export it "
                "again"
            ) from None
        self._has_player = "player" in schema.names
        expected = parquet_schema(self.spec, with_player=self._has_player)
        if not schema.equals(expected):
            wrong = [
                name
                for name in {*schema.names, *expected.names}
                if _fields(schema, name) != _fields(expected, name)
            ]
            raise ConfigError(
                f"{path} has columns that do not match its game spec: "
                f"{', '.join(sorted(wrong)[:6]) or 'their order'}; import the original file"
            )
        self._columns = data_columns(self.spec)
        if game is not None:
            self.spec = replace(self.spec, game=game)

    def report(self) -> Mapping[str, Any]:
        return {}

    def chunks(self) -> Iterator[tuple[Chunk, PlayerName | None]]:
        """Yield the original chunks, assembled from rows."""
        waiting: list[Any] = []
        key = None
        for batch, batch_key in self._pieces():
            if waiting and batch_key != key:
                yield self._chunk(waiting)
                waiting = []
            key = batch_key
            waiting.append(batch)
            if sum(piece.num_rows for piece in waiting) > MAX_STEPS:
                raise ConfigError(
                    f"{self.name} was changed since it was exported: session {str(key[0])[:40]}, "
                    f"chunk {key[1]} has more than {MAX_STEPS} steps; import the original file"
                )
        if waiting:
            yield self._chunk(waiting)

    def _pieces(self) -> Iterator[tuple[Any, tuple[str, int]]]:
        """Yield record batches, split where a new chunk starts."""
        rows = max(1, min(8192, _BATCH_BYTES // (2 * self.spec.row_bytes)))
        try:
            for batch in self._file.iter_batches(batch_size=rows):
                if not batch.num_rows:
                    continue
                sessions = np.asarray(batch.column("session").to_pylist(), dtype=object)
                numbers = np.asarray(batch.column("chunk_no").to_pylist(), dtype=object)
                cuts = (
                    np.flatnonzero((sessions[1:] != sessions[:-1]) | (numbers[1:] != numbers[:-1]))
                    + 1
                )
                for start, end in pairwise([0, *cuts.tolist(), batch.num_rows]):
                    yield batch.slice(start, end - start), (sessions[start], numbers[start])
        except (OSError, ValueError, pa.ArrowException) as error:
            raise ConfigError(
                f"{self.name} is damaged: {one_line(error)}; export it again"
            ) from None

    def _chunk(self, pieces: list[Any]) -> tuple[Chunk, PlayerName | None]:
        table = pa.Table.from_batches(pieces).combine_chunks()
        shared = ("session", "chunk_no", "kind", "consent", "client")
        first = {name: table.column(name)[0].as_py() for name in (*shared, "step")}
        try:
            for name in shared:
                if len(table.column(name).unique()) != 1:
                    raise Refused("bad_rows", f"its rows differ in {name}")
            if table.column("step").to_pylist() != list(
                range(first["step"], first["step"] + table.num_rows)
            ):
                raise Refused("bad_rows", "its steps are not consecutive")
            player = table.column("player")[0].as_py() if self._has_player else None
            chunk = self._assemble(table, first)
            return chunk, None if player is None else player_name(f"imported-{player}")
        except (Refused, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(
                f"{self.name} was changed since it was exported: session {first['session']}, chunk "
                f"{first['chunk_no']}: {one_line(error)}; import the original file"
            ) from None

    def _assemble(self, table: Any, first: Mapping[str, Any]) -> Chunk:
        n = table.num_rows
        steps = {name: self._rows(table, name, column) for name, column in self._columns.items()}
        is_first, terminated, truncated = (
            np.asarray(steps[name]) for name in ("is_first", "terminated", "truncated")
        )
        ends = terminated | truncated
        # Each of these steps is followed by a row with the next observation and mask; its other
        # columns are padding.
        splits = ends.copy()
        splits[:-1] |= is_first[1:]
        splits[-1] = True
        last = np.flatnonzero(splits)
        inside = np.flatnonzero(~splits[:-1])
        at_steps = np.arange(n) + np.concatenate([[0], np.cumsum(splits)[:-1]])
        at_last = at_steps[last] + 1
        columns: dict[str, Array] = {"row": np.zeros(n + len(last), np.uint8)}
        columns["row"][at_last] = np.where(ends[last], RowKind.FINAL, RowKind.BOOTSTRAP)
        for name, rows in steps.items():
            following = None
            if keeps_value_when_padded(name):
                following = self._rows(table, f"next_{name}", self._columns[name])
                if (rows is None) != (following is None):
                    raise Refused("bad_columns", f"{name!r} and 'next_{name}' are not both present")
            if rows is None:
                continue
            columns[name] = np.zeros((n + len(last), *rows.shape[1:]), rows.dtype)
            columns[name][at_steps] = rows
            if following is not None:
                if following[inside].tobytes() != rows[inside + 1].tobytes():
                    raise Refused(
                        "bad_columns", f"'next_{name}' is not the {name!r} of the following step"
                    )
                columns[name][at_last] = following[last]
        starts = np.concatenate([[0], last[:-1] + 1])
        notes = [
            {**json.loads(table.column("note")[int(at)].as_py()), "row": int(at_steps[at])}
            for at in starts
        ]
        metadata = {
            "format": CHUNK_FORMAT,
            "game": self.spec.game,
            "schema": self.spec.schema,
            "session": str(uuid.UUID(first["session"])),
            "chunk_no": str(first["chunk_no"]),
            "first_step": str(first["step"]),
            "n_steps": str(n),
            "kind": first["kind"],
            "consent": first["consent"]
            if self._consent is None or first["consent"] == "denied"
            else self._consent,
            "client": first["client"],
            "episodes": json.dumps(notes),
        }
        return Chunk(read_meta(metadata), columns)

    def _rows(self, table: Any, name: str, column: Column) -> Array | None:
        """Return the values of a column, or None if the chunk does not have it."""
        values = table.column(name)
        values = values.combine_chunks() if values.num_chunks != 1 else values.chunk(0)
        if column.is_optional and values.null_count == len(values):
            return None
        rows = column.from_arrow(values)
        if rows is None:
            raise Refused(
                "bad_columns", f"{name!r} lacks values, or their shape is not that of the spec"
            )
        return rows


def _fields(schema: Any, name: str) -> list[tuple[Any, bool]]:
    """Return type and nullability of every column with this name."""
    fields = [schema.field(at) for at in schema.get_all_field_indices(name)]
    return [(field.type, field.nullable) for field in fields]
