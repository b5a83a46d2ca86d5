"""What a Parquet file of ours looks like: one row for each step, and the game's spec in the file's metadata.

    session, chunk_no, step      which step it is; `episode` counts the episodes of a session within the file
    kind, consent, client, note  what its chunk said; `note` is the episode's, as JSON, and `model` is repeated from it
    obs, action, reward, …       the chunk's own columns, under their own names
    next_obs, next_legal         the observation and mask behind the step, exact also where an episode ends or is cut

A column that a chunk did not bring is null in its rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from understudy.app.exchange.arrow import arrow_type
from understudy.app.exchange.extra import extra
from understudy.core.builder import raw_name
from understudy.core.chunk import OPTIONAL, REQUIRED
from understudy.core.game import GameSpec
from understudy.core.writer import raw_space

FORMAT = "understudy-parquet/1"
FORMAT_KEY, SPEC_KEY = b"understudy.format", b"understudy.spec"

TEXTS = ("session", "kind", "consent", "client", "note")
NUMBERS = ("chunk_no", "episode", "step")


@dataclass(frozen=True, slots=True)
class Column:
    """One column of rows: its type, and whether chunks may lack it."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...] = ()
    may_miss: bool = False

    @property
    def arrow(self) -> Any:
        return arrow_type(self.dtype, self.shape, may_miss=self.may_miss)


def data_columns(spec: GameSpec) -> dict[str, Column]:
    """The columns of chunks of this game by name, `row` left out: every row of a file is a step."""
    columns = {name: Column(dtype) for name, dtype in REQUIRED.items() if name != "row"}
    columns |= {name: Column(space.dtype, space.shape) for name, space in spec.obs_columns.items()}
    columns |= {name: Column(space.dtype, space.shape) for name, space in spec.action_columns.items()}
    for name, space in spec.action_columns.items():
        columns[raw_name(name)] = Column(raw_space(space).dtype, space.shape, may_miss=True)
    columns |= {name: Column(dtype, may_miss=True) for name, dtype in OPTIONAL.items()}
    if spec.discrete is not None:
        columns["legal"] = Column(np.dtype(np.bool_), (spec.discrete.n,), may_miss=not spec.has_legal)
    return columns


def next_columns(columns: Mapping[str, Column]) -> dict[str, str]:
    """For observations and the mask: the name under which the row behind a step stands."""
    return {name: f"next_{name}" for name in columns if name.split(".", 1)[0] in ("obs", "legal")}


def parquet_schema(spec: GameSpec, *, with_player: bool) -> Any:
    """The Arrow schema of a file, with the spec in its metadata."""
    pa = extra("pyarrow")
    columns = data_columns(spec)
    fields = [pa.field(name, pa.string(), nullable=False) for name in TEXTS]
    fields += [pa.field(name, pa.int64(), nullable=False) for name in NUMBERS]
    fields += [pa.field("model", pa.string()), *([pa.field("player", pa.string())] if with_player else [])]
    fields += [pa.field(name, one.arrow, nullable=one.may_miss) for name, one in columns.items()]
    for name, following in next_columns(columns).items():
        fields.append(pa.field(following, columns[name].arrow, nullable=columns[name].may_miss))
    return pa.schema(fields, metadata={FORMAT_KEY: FORMAT.encode(), SPEC_KEY: spec.to_json()})
