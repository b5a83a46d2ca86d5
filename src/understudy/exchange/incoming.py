"""The files of an import: chunks of one game, read twice, once to check them and once to send."""

import hashlib
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from understudy.core.errors import ConfigError, Refused
from understudy.core.names import PlayerName, new_session
from understudy.core.tensors import Array
from understudy.exchange.exporting import OnSteps
from understudy.experience.chunk import (
    COMPRESS_FROM_BYTES,
    CUT_BYTES,
    MAX_DECODED_BYTES,
    MAX_STEPS,
    Chunk,
    ChunkMeta,
    EpisodeNote,
    RowKind,
    bootstrap_last_row,
    read_meta,
    split_chunk,
)
from understudy.experience.frame import MAX_BODY_BYTES
from understudy.experience.game import GameSpec
from understudy.experience.session import MAX_REPORT_AHEAD
from understudy.ingest.check import check_against_spec

MAX_GAPS = 1000
"""Maximum gaps in a session's chunk numbers that one drop report can describe."""
_HEADER_BYTES = 16 * 1024


class Incoming(Protocol):
    """A file of one game's steps."""

    name: str
    """The file, for messages."""
    spec: GameSpec

    @property
    def origins(self) -> Mapping[int, int]:
        """Random part of a session's id -> that of the exported session, if they differ."""
        ...

    def chunks(self) -> Iterator[tuple[Chunk, PlayerName | None]]:
        """Yield every chunk with its player, if the file names one; called twice.

        A session's chunks are consecutive and in order; an import may replace the time in its id.
        Raises ConfigError if the file is invalid.
        """
        ...

    def report(self) -> Mapping[str, Any]:
        """Return further figures about the file, complete after `chunks` was read to its end."""
        ...


def random_part_of(session: uuid.UUID) -> int:
    """Return the random part of a session's id; an import may change only the rest, the time."""
    return session.int & ((0xFFF << 64) | ((1 << 62) - 1))


def content_session_id(*parts: bytes | str) -> uuid.UUID:
    """Return a session id with time 0, whose random part is a hash of the content."""
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return new_session(0.0, digest.digest())


# --- checking a file ------------------------------------------------------------------------------


@dataclass(slots=True)
class Outline:
    """Summary of a session in a file."""

    origin: uuid.UUID
    player: PlayerName | None
    chunks: int = 0
    steps: int = 0
    last_no: int = -1
    end_step: int = 0
    missing: list[tuple[int, int]] = field(default_factory=list)
    missing_steps: int = 0

    def add(self, chunk: Chunk) -> None:
        """Add the session's next chunk; Refused if its numbers contradict the earlier ones."""
        meta = chunk.meta
        if meta.chunk_no <= self.last_no or meta.first_step < self.end_step:
            raise Refused("step_mismatch", f"chunk {meta.chunk_no} is out of order or repeated")
        skipped = meta.first_step - self.end_step
        if meta.chunk_no > self.last_no + 1:
            self.missing.append((self.last_no + 1, meta.chunk_no - 1))
        elif skipped:
            raise Refused(
                "step_mismatch",
                f"chunk {meta.chunk_no} starts {skipped} steps after the end of the previous one",
            )
        if self.missing and meta.chunk_no >= MAX_REPORT_AHEAD - 1:
            raise Refused(
                "too_many_gaps",
                f"chunk number {meta.chunk_no} is too high for a session with gaps; export it "
                "without a filter",
            )
        if len(self.missing) > MAX_GAPS:
            raise Refused(
                "too_many_gaps",
                f"the session has more than {MAX_GAPS} gaps; export it without a filter",
            )
        self.chunks += 1
        self.steps += meta.n_steps
        self.missing_steps += skipped
        self.last_no = meta.chunk_no
        self.end_step = meta.first_step + meta.n_steps

    def is_like(self, other: "Outline") -> bool:
        """Return whether another file has the same steps of the session, by number only."""
        return (self.steps, self.end_step, self.missing) == (
            other.steps,
            other.end_step,
            other.missing,
        )


def survey(incoming: Incoming, on_steps: OnSteps | None = None) -> dict[int, Outline]:
    """Check a whole file as ingest will; return its sessions by the random part of their ids.

    ConfigError states the first problem, before anything is stored. `on_steps` gets 0 as the total.
    """
    n_steps = 0
    outlines: dict[int, Outline] = {}
    for chunk, player in incoming.chunks():
        outline = outlines.setdefault(
            random_part_of(chunk.meta.session), Outline(chunk.meta.session, player)
        )
        try:
            if chunk.meta.session.version != 7:
                raise Refused("bad_session", "the session's id is not a UUIDv7")
            read_meta(chunk.meta.to_metadata())
            check_against_spec(chunk.validate(), incoming.spec)
            if chunk.size_bytes > MAX_BODY_BYTES // 2:
                chunk.frame()  # rejects a body that is too large even when compressed
            outline.add(chunk)
        except Refused as refused:
            where = f"session {chunk.meta.session}, step {chunk.meta.first_step}"
            raise ConfigError(
                f"{incoming.name} holds steps that cannot be stored: {refused} ({where}); correct "
                "or remove them, then import again"
            ) from None
        n_steps += chunk.meta.n_steps
        if on_steps is not None:
            on_steps(n_steps, 0)
    if not outlines:
        raise ConfigError(f"{incoming.name} holds no steps; pass a file with at least one")
    return outlines


# --- episodes, for formats without chunks ---------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedEpisode:
    """n steps of an episode; neither terminated nor truncated means that its end is unknown."""

    session: uuid.UUID
    obs: Mapping[str, Array]  # n + 1 rows each, by column
    action: Mapping[str, Array]  # n rows each
    reward: Array  # float32[n]
    terminated: bool
    truncated: bool
    extras: Mapping[str, Array] = field(default_factory=dict)
    """Optional columns: n + 1 rows of `action_mask`, n of the others."""
    note: EpisodeNote = field(default_factory=lambda: EpisodeNote(row=0))


def chunks_of(
    episode: ImportedEpisode, spec: GameSpec, *, consent: str, client: str
) -> Iterator[Chunk]:
    """Yield the episode as a session of its own, split into chunks that fit into frames."""
    n = len(episode.reward)
    has_ended = episode.terminated or episode.truncated
    at = np.arange(n + 1)
    padded = {"reward": episode.reward, **episode.action, **episode.extras}
    mask = {"action_mask": padded.pop("action_mask")} if "action_mask" in padded else {}
    columns: dict[str, Array] = {
        "is_first": at == 0,
        "terminated": (at == n - 1) & episode.terminated,
        "truncated": (at == n - 1) & episode.truncated,
        "row": np.where(
            at < n, RowKind.STEP, RowKind.FINAL if has_ended else RowKind.BOOTSTRAP
        ).astype(np.uint8),
        **{name: np.concatenate([rows, np.zeros_like(rows[:1])]) for name, rows in padded.items()},
        **episode.obs,
        **mask,
    }
    meta = ChunkMeta(
        game=spec.game,
        schema=spec.schema,
        session=episode.session,
        chunk_no=0,
        first_step=0,
        n_steps=n,
        consent=consent,
        client=client,
        episodes=(replace(episode.note, row=0, cut=not has_ended),),
    )
    number = 0
    most = _most_steps(columns)
    for start in range(0, n, most):
        end = min(n, start + most)
        part = {name: column[start : end + 1] for name, column in columns.items()}
        (note,) = meta.episodes
        if end < n:
            part = bootstrap_last_row(part)
            note = replace(note, cut=False, result=None)
        waiting = [
            Chunk(replace(meta, first_step=start, n_steps=end - start, episodes=(note,)), part)
        ]
        while waiting:
            chunk = waiting.pop()
            may_outgrow = chunk.meta.n_steps > 1 and chunk.size_bytes > CUT_BYTES - _HEADER_BYTES
            if may_outgrow and len(chunk.encode()) > CUT_BYTES:
                left, right = split_chunk(chunk)
                waiting += [right, left]
                continue
            yield Chunk(replace(chunk.meta, chunk_no=number), chunk.columns)
            number += 1


def _most_steps(columns: Mapping[str, Array]) -> int:
    """Return how many steps fit into a chunk; image columns are assumed to compress."""
    row_bytes = sum(column[0].nbytes for column in columns.values())
    shrinks = any(
        column.dtype.itemsize == 1
        and column.dtype.kind in "ui"
        and column[0].nbytes >= COMPRESS_FROM_BYTES
        for column in columns.values()
    )
    max_bytes = (MAX_DECODED_BYTES if shrinks else CUT_BYTES) - _HEADER_BYTES
    return max(1, min(MAX_STEPS, max_bytes // int(row_bytes) - 1))
