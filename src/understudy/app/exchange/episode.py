"""A whole episode in columns, and the chunks of the session that it becomes."""

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from understudy.core.chunk import (
    COMPRESS_FROM_BYTES,
    CUT_BYTES,
    MAX_DECODED_BYTES,
    MAX_STEPS,
    Chunk,
    ChunkMeta,
    EpisodeNote,
    RowKind,
    bootstrap_last_row,
    split_chunk,
)
from understudy.core.game import GameSpec
from understudy.core.tensors import Array

_HEADER_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """n steps from a beginning to an end; neither terminated nor truncated means that nobody saw the end."""

    session: uuid.UUID
    obs: Mapping[str, Array]  # n + 1 rows each, by column
    action: Mapping[str, Array]  # n rows each
    reward: Array  # float32[n]
    terminated: bool
    truncated: bool
    extras: Mapping[str, Array] = field(default_factory=dict)
    """Optional columns: n + 1 rows of `legal`, n of the others."""
    note: EpisodeNote = field(default_factory=lambda: EpisodeNote(row=0))

    @property
    def n_steps(self) -> int:
        return len(self.reward)


def chunks_of(episode: Episode, spec: GameSpec, *, consent: str, client: str) -> Iterator[Chunk]:
    """The episode as a session of its own, cut into chunks that fit into frames."""
    whole = _whole(episode, spec, consent=consent, client=client)
    n_steps, most, number = episode.n_steps, _most_steps(whole), 0
    for start in range(0, n_steps, most):
        waiting = [_part(whole, start, min(n_steps, start + most))]
        while waiting:
            chunk = waiting.pop()
            may_outgrow = chunk.meta.n_steps > 1 and chunk.size_bytes > CUT_BYTES - _HEADER_BYTES
            if may_outgrow and len(chunk.encode()) > CUT_BYTES:
                left, right = split_chunk(chunk)
                waiting += [right, left]
                continue
            yield Chunk(replace(chunk.meta, chunk_no=number), chunk.columns)
            number += 1


def _whole(episode: Episode, spec: GameSpec, *, consent: str, client: str) -> Chunk:
    """All of it as one chunk, however large."""
    n, has_ended = episode.n_steps, episode.terminated or episode.truncated
    at = np.arange(n + 1)
    columns: dict[str, Array] = {
        "reward": _padded(episode.reward), "is_first": at == 0, "terminated": (at == n - 1) & episode.terminated,
        "truncated": (at == n - 1) & episode.truncated,
        "row": np.where(at < n, RowKind.STEP, RowKind.FINAL if has_ended else RowKind.BOOTSTRAP).astype(np.uint8),
    }  # fmt: skip
    columns |= dict(episode.obs)
    columns |= {name: _padded(rows) for name, rows in episode.action.items()}
    columns |= {name: rows if name == "legal" else _padded(rows) for name, rows in episode.extras.items()}
    meta = ChunkMeta(
        game=spec.game, schema=spec.schema, session=episode.session, chunk_no=0, first_step=0, n_steps=n,
        consent=consent, client=client, episodes=(replace(episode.note, row=0, cut=not has_ended),),
    )  # fmt: skip
    return Chunk(meta, columns)


def _padded(rows: Array) -> Array:
    return np.concatenate([rows, np.zeros((1, *rows.shape[1:]), rows.dtype)])


def _part(whole: Chunk, start: int, end: int) -> Chunk:
    is_last = end == whole.meta.n_steps
    columns: dict[str, Array] = {name: column[start : end + 1] for name, column in whole.columns.items()}
    if not is_last:
        columns = bootstrap_last_row(columns)
    (note,) = whole.meta.episodes
    return Chunk(
        replace(
            whole.meta, first_step=start, n_steps=end - start,
            episodes=(replace(note, cut=note.cut and is_last, result=note.result if is_last else None),),
        ),
        columns,
    )  # fmt: skip


def _most_steps(whole: Chunk) -> int:
    """Steps of a chunk that is sure to fit, or that will once its images are compressed."""
    row_bytes = sum(column[0].nbytes for column in whole.columns.values())
    shrinks = any(
        column.dtype.itemsize == 1 and column.dtype.kind in "ui" and column[0].nbytes >= COMPRESS_FROM_BYTES
        for column in whole.columns.values()
    )
    room = (MAX_DECODED_BYTES if shrinks else CUT_BYTES) - _HEADER_BYTES
    return max(1, min(MAX_STEPS, room // int(row_bytes) - 1))
