"""Frames that cost much more than they weigh: a few kilobytes that decode to megabytes or take
long to check."""

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from understudy.core import tensors
from understudy.core.canonical import canonical_json
from understudy.core.names import new_session
from understudy.core.tensors import DTYPE_NAMES, DTYPES, Array
from understudy.experience.chunk import Chunk, ChunkMeta, EpisodeNote, RowKind
from understudy.experience.frame import (
    CloseReport,
    DropReport,
    Frame,
    close_frame,
    data_frame,
    drop_frame,
)
from understudy.experience.game import GameSpec, game_spec
from understudy.experience.spaces import Box
from understudy.testing.samples import PLAYER

ROWS = 500
SPECS: dict[str, GameSpec] = {
    "bytes": game_spec("bytes", obs=Box((32_000,), DTYPES["U8"]), actions=2),
    "bounded": game_spec("bounded", obs=Box((32_000,), DTYPES["U8"], 0, 9), actions=2),
    "doubles": game_spec("doubles", obs=Box((4_000,), DTYPES["F64"]), actions=2),
    "small": game_spec("small", obs=Box((4,), DTYPES["F32"]), actions=2),
}
UNKNOWN = game_spec("bytes", obs=Box((32_001,), DTYPES["U8"]), actions=2)
"""A schema of a known game that is not registered: its frames are parked."""


class Amplifier:
    """Makes frames of every kind, each in a session of its own unless it needs a history."""

    def __init__(self, seed: int, *, now_s: float) -> None:
        self._rng = random.Random(seed)
        self._now_s = now_s
        self._packed: dict[bytes, bytes] = {}
        self.kinds: dict[str, Callable[[int], Iterator[Frame]]] = {
            "many bytes": lambda n: self._images(n, SPECS["bytes"]),
            "many doubles": lambda n: self._images(n, SPECS["doubles"]),
            "bytes outside their bounds": lambda n: self._images(n, SPECS["bounded"], value=10),
            "bytes of an unknown schema": lambda n: self._images(n, UNKNOWN),
            "bytes of another game's shape": lambda n: self._images(
                n, SPECS["small"], columns_of=SPECS["bytes"]
            ),
            "very many rows": self._rows,
            "very many columns": self._columns,
            "very many notes": self._notes,
            "drop reports of 1,024 ranges": self._drops,
            "small frames": self._closes,
        }

    def frame(self, frame: Frame) -> Frame:
        return frame.stamped(PLAYER, int(self._now_s))

    def honest(self) -> Frame:
        """A frame of a player who does nothing wrong."""
        return self.frame(self._chunk(SPECS["small"], np.zeros((3, 4), np.float32)).frame())

    def _images(
        self, n: int, spec: GameSpec, *, value: int = 0, columns_of: GameSpec | None = None
    ) -> Iterator[Frame]:
        (space,) = (columns_of or spec).obs_columns.values()
        obs = np.full((ROWS, *space.shape), value, space.dtype)
        for _ in range(n):
            yield self.pack(self._chunk(spec, obs))

    def _rows(self, n: int) -> Iterator[Frame]:
        spec = SPECS["small"]
        for _ in range(n):
            yield self.pack(self._chunk(spec, np.zeros((500_000, 4), np.float32)))

    def _columns(self, n: int) -> Iterator[Frame]:
        for _ in range(n // 4):
            chunk = self._chunk(SPECS["small"], np.zeros((2, 4), np.float32))
            names = (f"obs.{number}" for number in range(2_500))
            more = {name: np.zeros((2, 1), np.uint8) for name in names}
            columns = {name: column for name, column in chunk.columns.items() if name != "obs"}
            yield self.frame(Chunk(chunk.meta, {**columns, **more}).frame())

    def _notes(self, n: int) -> Iterator[Frame]:
        n_rows = 1024
        for _ in range(n // 2):
            chunk = self._chunk(SPECS["small"], np.zeros((n_rows, 4), np.float32))
            columns = {**chunk.columns}
            columns["row"] = np.tile(np.array([0, 1], np.uint8), n_rows // 2)
            columns["is_first"] = columns["row"] == 0
            columns["terminated"] = columns["row"] == 0
            notes = tuple(EpisodeNote(row=row, opponents=("",) * 64) for row in range(0, n_rows, 2))
            meta = replace(chunk.meta, n_steps=n_rows // 2, episodes=notes)
            yield self.pack(Chunk(meta, columns))

    def _drops(self, n: int) -> Iterator[Frame]:
        session = self._session()
        for block in range(0, 2048 * 2 * n, 2048):
            # The second report fills the gaps of the first.
            even = tuple((block + 2 * index, block + 2 * index) for index in range(1022))
            odd = tuple((first + 1, first + 1) for first, _ in even)
            yield self.frame(drop_frame(session, block + 2046, DropReport(even, 1)))
            rest = (block + 2044, block + 2045)
            yield self.frame(drop_frame(session, block + 2047, DropReport((*odd, rest), 1)))

    def _closes(self, n: int) -> Iterator[Frame]:
        for _ in range(50 * n):
            yield self.frame(close_frame(self._session(), 0, CloseReport(0, 0)))

    def _session(self) -> Any:
        return new_session(self._now_s, self._rng.randbytes(10))

    def _chunk(self, spec: GameSpec, obs: Array) -> Chunk:
        n_rows = len(obs)
        row = np.zeros(n_rows, np.uint8)
        row[-1] = RowKind.BOOTSTRAP
        columns = {
            "row": row,
            "is_first": np.arange(n_rows) == 0,
            "terminated": np.zeros(n_rows, np.bool_),
            "truncated": np.zeros(n_rows, np.bool_),
            "reward": np.zeros(n_rows, np.float32),
            "obs": obs,
            "action": np.zeros(n_rows, spec.action_columns["action"].dtype),
        }
        meta = ChunkMeta(
            game=spec.game,
            schema=spec.schema,
            session=self._session(),
            chunk_no=0,
            first_step=0,
            n_steps=n_rows - 1,
            episodes=(EpisodeNote(row=0),),
        )
        return Chunk(meta, columns)

    def pack(self, chunk: Chunk) -> Frame:
        """The frame of a chunk with every column compressed as much as possible."""
        columns: dict[str, Array] = {}
        codecs: dict[str, list[Any]] = {}
        for name, column in chunk.columns.items():
            raw = column.tobytes()
            key = column.dtype.str.encode() + raw[:1] + str(column.shape).encode() + name.encode()
            if key not in self._packed:
                self._packed[key] = zlib.compress(raw, 9)
            columns[name] = np.frombuffer(self._packed[key], np.uint8)
            codecs[name] = ["zlib", DTYPE_NAMES[column.dtype], list(column.shape)]
        metadata = chunk.meta.to_metadata() | {"codec": canonical_json(codecs).decode()}
        body = tensors.encode(columns, metadata)
        return self.frame(data_frame(chunk.meta.session, chunk.meta.chunk_no, body))
