"""Shared code of the tests of exports and imports."""

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.simulation.recordings import recording
from understudy.backends.data import DataFolder
from understudy.core.names import new_session
from understudy.exchange.destination import Destination
from understudy.exchange.exporting import ExportFilter, Written, open_history
from understudy.exchange.importing import Imported, import_files
from understudy.exchange.incoming import random_part_of
from understudy.exchange.minari import WrittenDataset, write_minari
from understudy.exchange.parquet import ParquetFile, write_parquet
from understudy.experience.chunk import Chunk
from understudy.experience.game import GameSpec
from understudy.experience.intake import deployment_key
from understudy.ports import Cursor, Forgotten, Stored
from understudy.stores.view import StoreView
from understudy.testing.clock import START_S
from understudy.testing.samples import random_session, random_spec

OPTIONAL = (
    "logp",
    "value",
    "version",
    "by",
    "frames",
    "t_ms",
    "event",
    "raw_action",
    "action_mask",
)


def recorded(root: Path, spec: GameSpec, chunks: Sequence[Chunk]) -> DataFolder:
    """A data folder with these chunks in its store."""
    data = DataFolder(root)
    deployment_key(root)
    recording(data, spec).store(chunks)
    return data


def random_chunks(seed: int, *, n_sessions: int = 2) -> tuple[GameSpec, list[Chunk]]:
    """Sessions of any game, some columns in some chunks."""
    rng = np.random.default_rng(seed)
    spec = random_spec(rng)
    chunks = [
        one
        for _ in range(n_sessions)
        for one in random_session(spec, rng, n_chunks=3, optional=OPTIONAL)
    ]
    return spec, chunks


def file_of_steps(
    folder: Path,
    spec: GameSpec,
    *,
    n_sessions: int = 3,
    n_chunks: int = 5,
    began_s: float = START_S,
) -> tuple[Path, int]:
    """A file of some sessions, and the steps in it; by themselves so old that they enter under
    new ids."""
    rng = np.random.default_rng(0)
    chunks = [
        chunk
        for _ in range(n_sessions)
        for chunk in random_session(
            spec, rng, n_chunks=n_chunks, session=new_session(began_s, rng.bytes(10))
        )
    ]
    path = folder / "a.parquet"
    to_parquet(recorded(folder / "source", spec, chunks), path)
    return path, sum(chunk.meta.n_steps for chunk in chunks)


def to_parquet(
    data: DataFolder, path: Path, *, with_player: bool = False, **wanted: Any
) -> Written:
    with StoreView(data.store) as view:
        return write_parquet(
            open_history(data, view, ExportFilter(**wanted)), path, with_player=with_player
        )


def to_minari(data: DataFolder, path: Path, **wanted: Any) -> WrittenDataset:
    with StoreView(data.store) as view:
        return write_minari(open_history(data, view, ExportFilter(**wanted)), path)


def from_parquet(data: DataFolder, *paths: Path, **options: Any) -> Imported:
    return import_files(Destination(data), [ParquetFile(one) for one in paths], **options)


def steps_in(path: Path) -> list[tuple[Any, ...]]:
    """A file's rows as bits, in order; the session as what stays of it."""
    table = pq.read_table(path)
    noise = {
        text: random_part_of(uuid.UUID(text))
        for text in table.column("session").unique().to_pylist()
    }
    columns = [
        _bits(table.column(name).combine_chunks())
        for name in table.column_names
        if name != "session"
    ]
    sessions = [noise[text] for text in table.column("session").to_pylist()]
    return sorted(zip(sessions, *columns, strict=True), key=lambda row: (row[0], row[5], row[7]))


def _bits(values: Any) -> list[Any]:
    if pa.types.is_floating(values.type):
        whole = np.nan_to_num(values.to_numpy(zero_copy_only=False))
        return list(
            zip(values.is_null().to_pylist(), [one.tobytes() for one in whole], strict=True)
        )
    rows: list[Any] = [str(one) if isinstance(one, list) else one for one in values.to_pylist()]
    return rows


def stored(data: DataFolder) -> list[Chunk]:
    """Every chunk of a store."""
    found: list[Chunk] = []
    cursor: Cursor | None = None
    with StoreView(data.store) as view:
        while (page := view.tail(cursor, max_items=1024, wait_s=0.0)).items:
            cursor = page.cursor
            assert not any(isinstance(one, Forgotten) for one in page.items)
            found += [
                one.chunk for one in page.items if isinstance(one, Stored) and one.chunk is not None
            ]
    return found


def is_untouched(data: DataFolder) -> bool:
    """Whether nothing was stored, registered or sent."""
    return not data.root.exists() or not any(data.root.iterdir())
