"""A block: closed rows on their way from the game's thread to the sender, in columns that are used again."""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from understudy.core.chunk import (
    COMPRESS_FROM_BYTES,
    CUT_BYTES,
    MAX_DECODED_BYTES,
    MAX_STEPS,
    OPTIONAL,
    REQUIRED,
    Chunk,
    keeps_value_when_padded,
    split_chunk,
)
from understudy.core.errors import Refused
from understudy.core.frame import Frame, data_frame
from understudy.core.game import GameSpec
from understudy.core.meta import ChunkMeta
from understudy.core.spaces import Space
from understudy.core.tensors import Array
from understudy.core.writer import raw_space

EXTRAS = ("logp", "value", "priority", "version")
"""Optional columns with one number per step; a chunk carries them only when a step of it used them."""

_HEADER_BYTES = 8 * 1024
_KEPT_SETS = 8


class Columns:
    """One preallocated array per column; decision columns of unused rows hold zeros."""

    __slots__ = ("action", "all", "legal", "obs", "padded", "raw_action", "row", "views")

    def __init__(self, pool: "BlockPool") -> None:
        self.all: dict[str, Array] = {
            name: np.zeros((pool.n_rows, *shape), dtype) for name, (dtype, shape) in pool.layout.items()
        }
        self.obs = [self.all[name] for name in pool.spec.obs_columns]
        self.action = [self.all[name] for name in pool.spec.action_columns]
        self.raw_action = [self.all[raw_name(name)] for name in pool.spec.action_columns]
        self.legal = self.all.get("legal")
        self.row = self.all["row"]
        self.views: dict[str, Any] = {name: self.all[name].data for name in ("reward", "by", "frames", "t_ms")}
        self.padded = [column for name, column in self.all.items() if not keeps_value_when_padded(name)]

    def pad(self, at: int) -> None:
        """Make a row carry no decision; its observation and mask stay."""
        for column in self.padded:
            column[at] = 0

    def copy_row(self, source: "Columns", at: int) -> None:
        """Take over another set's row as row 0."""
        for name, column in self.all.items():
            column[0] = source.all[name][at]

    def clear(self) -> None:
        """Zero every decision column, for the next use."""
        for column in self.padded:
            column.fill(0)


class BlockPool:
    """Hands out column sets for one game and takes them back; many threads may share it."""

    def __init__(self, spec: GameSpec, *, max_steps: int = MAX_STEPS) -> None:
        self.spec = spec
        self.max_steps = min(max_steps, MAX_STEPS)
        self.layout = _layout(spec)
        self.n_rows = _n_rows(spec, self.layout, self.max_steps)
        self.set_bytes = self.n_rows * _row_bytes(self.layout)
        self._free: deque[Columns] = deque(maxlen=_KEPT_SETS)

    def take(self) -> Columns:
        """A clean set: a used one when there is one."""
        try:
            return self._free.pop()
        except IndexError:
            return Columns(self)

    def give(self, columns: Columns) -> None:
        """Clean a set for the next user; called away from the game's thread."""
        columns.clear()
        self._free.append(columns)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Closed rows; `meta` is complete but for chunk_no and first_step, which are given when it is encoded."""

    columns: Columns
    n_rows: int
    meta: ChunkMeta
    used: frozenset[str]
    """Optional columns that some step of it used."""

    @property
    def n_steps(self) -> int:
        return self.meta.n_steps

    def chunk(self, *, chunk_no: int, first_step: int) -> Chunk:
        """The chunk, as views into the columns."""
        views = {name: column[: self.n_rows] for name, column in self.columns.all.items() if self._has(name)}
        return Chunk(replace(self.meta, chunk_no=chunk_no, first_step=first_step), views)

    def _has(self, name: str) -> bool:
        return name in self.used or (name not in EXTRAS and not name.startswith("raw_action"))


@dataclass(frozen=True, slots=True)
class Encoded:
    """One number of a session: its frame, or None where a single step was too large to travel."""

    chunk_no: int
    n_steps: int
    frame: Frame | None


def encode_block(block: Block, *, chunk_no: int, first_step: int) -> Iterator[Encoded]:
    """The frames of a block, split until every body is small enough; numbers are dense from `chunk_no`."""
    waiting = [block.chunk(chunk_no=chunk_no, first_step=first_step)]
    while waiting:
        chunk = waiting.pop()
        if chunk.meta.chunk_no != chunk_no:
            chunk = Chunk(replace(chunk.meta, chunk_no=chunk_no), chunk.columns)
        body = chunk.encode()
        if len(body) > CUT_BYTES and chunk.meta.n_steps > 1:
            left, right = split_chunk(chunk)
            waiting += [right, left]
            continue
        try:
            frame: Frame | None = data_frame(chunk.meta.session, chunk_no, body)
        except Refused:
            frame = None
        yield Encoded(chunk_no, chunk.meta.n_steps, frame)
        chunk_no += 1


def raw_name(action_column: str) -> str:
    """`action.x` becomes `raw_action.x`."""
    return f"raw_{action_column}"


def _layout(spec: GameSpec) -> dict[str, tuple[np.dtype[np.generic], tuple[int, ...]]]:
    spaces: dict[str, Space] = {**spec.obs_columns, **spec.action_columns}
    spaces |= {raw_name(name): raw_space(space) for name, space in spec.action_columns.items()}
    layout: dict[str, tuple[np.dtype[np.generic], tuple[int, ...]]] = {
        name: (space.dtype, space.shape) for name, space in spaces.items()
    }
    layout |= {name: (dtype, ()) for name, dtype in (REQUIRED | OPTIONAL).items() if name != "event"}
    if spec.has_legal and spec.discrete is not None:
        layout["legal"] = (np.dtype(np.bool_), (spec.discrete.n,))
    return layout


def _row_bytes(layout: dict[str, tuple[np.dtype[np.generic], tuple[int, ...]]]) -> int:
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in layout.values())


def _n_rows(spec: GameSpec, layout: dict[str, tuple[np.dtype[np.generic], tuple[int, ...]]], max_steps: int) -> int:
    """Rows that fit: within one body when nothing shrinks, within the decoded limit when images are compressed."""
    shrinks = any(
        space.dtype.itemsize == 1 and space.dtype.kind in "ui" and math.prod(space.shape) >= COMPRESS_FROM_BYTES
        for space in spec.obs.values()
    )
    room = (MAX_DECODED_BYTES if shrinks else CUT_BYTES) - _HEADER_BYTES
    # Short episodes add a final row each; an eighth is room for episodes of eight steps and more.
    return max(2, min(room // _row_bytes(layout), max_steps + max_steps // 8 + 2))
