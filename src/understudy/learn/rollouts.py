"""Rollouts: the newest chunks of all envs, aligned in time for an on-policy algorithm."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import jax
import numpy as np

from understudy.algorithm import Feedback, Rollout, Rollouts, Transitions
from understudy.core.errors import Refused
from understudy.core.tensors import Array, arrays_under
from understudy.experience.chunk import REQUIRED, Chunk, ChunkId, RowKind, chunk_name
from understudy.experience.game import GameSpec
from understudy.experience.spaces import check_recordable
from understudy.learn.rows import stack_rows, windows_of

Columns = Mapping[str, Array]


@dataclass(slots=True)
class _Track:
    """The state of one session."""

    chunks: list[Chunk] = field(default_factory=list)
    lead: Columns | None = None
    """The last rows before its chunks, for frame stacks that reach back to them."""
    last_no: int = -1
    """The number of the last chunk received, whether it was used or not."""

    @property
    def steps(self) -> int:
        return sum(chunk.meta.n_steps for chunk in self.chunks)


class RolloutQueue:
    """Collects the newest steps of each session until every env has enough for one rollout.

    A rollout has no gaps: when a chunk is skipped, its session's earlier chunks are discarded too.
    Until that session has enough steps again, the other sessions replace their oldest steps with
    newer ones. Skipped rows are still used as history by frame stacks.

    A source of the learner, like `ReplaySource`: one update per rollout.
    """

    is_on_policy: ClassVar[bool] = True

    def __init__(self, game: GameSpec, needs: Rollouts) -> None:
        self._game = game
        self._needs = needs
        self.rows_per_call = needs.steps * needs.envs
        self._played: Sequence[Sequence[ChunkId]] = ()
        self._tracks: dict[uuid.UUID, _Track] = {}

    def insert(self, chunk: Chunk) -> int:
        """Queue a chunk and return its number of steps; Refused if it does not fit a rollout."""
        columns = self._columns(chunk)
        track = self._track(chunk)
        try:
            self._check(chunk, columns, has_past=bool(track.chunks) or track.lead is not None)
        except Refused:
            self._skip(track, chunk)
            raise
        track.chunks.append(chunk)
        track.last_no = chunk.meta.chunk_no
        while track.steps > self._needs.steps:
            self._drop(track, 1)
        return chunk.meta.n_steps

    def skip_chunk(self, chunk: Chunk) -> None:
        """Skip a stale chunk; frame stacks of the next one may reach back to it."""
        self._skip(self._track(chunk), chunk)

    def end_sessions(self) -> None:
        """Does nothing: a rollout never waits for the end of a session."""

    def on_weights_restored(self) -> None:
        """Drop queued chunks: the weights that played them are no longer the learner's."""
        for track in self._tracks.values():
            self._drop(track, len(track.chunks))

    @property
    def may_update(self) -> bool:
        return len(self._full()) >= self._needs.envs

    def draw(self, call_no: int, *, importance_exponent: float) -> Any:
        """The next rollout, with a leading axis for one update."""
        self._played = self.waiting()
        return jax.tree.map(lambda column: column[None], self.take())

    def feedback(self, feedback: Feedback) -> Sequence[ChunkId]:
        """The chunks of the last drawn rollout that caused a failed update."""
        if bool(np.asarray(feedback.ok).all()):
            return ()
        row_ok = np.asarray(feedback.row_ok).reshape(-1, len(self._played))
        # If every row failed, the weights are the cause.
        has_failed = [bool(row_ok.any()) and not env_ok.all() for env_ok in row_ok.T]  # by env
        return [
            chunk_id
            for chunk_ids, is_bad in zip(self._played, has_failed, strict=True)
            if is_bad
            for chunk_id in chunk_ids
        ]

    def waiting(self) -> list[list[ChunkId]]:
        """The chunks that `take` will use, by env."""
        chosen = [self._tracks[session].chunks for session in self._full()[: self._needs.envs]]
        return [[chunk.meta.id for chunk in chunks] for chunks in chosen]

    def take(self) -> Rollout:
        """The steps of all envs, ordered by session; other queued chunks are stale and dropped."""
        parts = [self._part(self._tracks[session]) for session in self._full()[: self._needs.envs]]
        self.on_weights_restored()
        rollout: Rollout = jax.tree.map(lambda *columns: np.stack(columns, axis=1), *parts)
        return rollout

    def _full(self) -> list[uuid.UUID]:
        return sorted(
            session for session, track in self._tracks.items() if track.steps == self._needs.steps
        )

    # --- Received chunks --------------------------------------------------------------------------

    def _columns(self, chunk: Chunk) -> Columns:
        """The columns that a rollout needs; a missing action mask allows every action."""
        meta = chunk.meta
        columns = dict(chunk.columns)
        if meta.schema != self._game.schema:
            raise Refused(
                "wrong_schema",
                f"the chunk belongs to {meta.game}, schema {meta.schema[:8]}; expected "
                f"{self._game.game}, schema {self._game.schema[:8]}",
            )
        names = [*REQUIRED, *self._game.obs_columns, "action", "logp"]
        names += ["raw_action"] if self._game.discrete is None else []
        if missing := [name for name in names if name not in columns]:
            raise Refused(
                "bad_rollout", f"chunk {chunk_name(meta.id)} lacks the column {missing[0]!r}"
            )
        if self._game.has_action_mask and self._game.discrete is not None:
            columns.setdefault(
                "action_mask", np.ones((chunk.n_rows, self._game.discrete.n), np.bool_)
            )
            names.append("action_mask")
        return {name: columns[name] for name in names}

    def _track(self, chunk: Chunk) -> _Track:
        """The state of the chunk's session, without chunks before a gap; Refused unless newer."""
        track = self._tracks.setdefault(chunk.meta.session, _Track())
        if chunk.meta.chunk_no <= track.last_no:
            raise Refused("duplicate", f"chunk {chunk_name(chunk.meta.id)} was received before")
        if chunk.meta.chunk_no > track.last_no + 1:
            track.chunks = []
            track.lead = None
        return track

    def _check(self, chunk: Chunk, columns: Columns, *, has_past: bool) -> None:
        name = f"chunk {chunk_name(chunk.meta.id)}"
        for key, column in columns.items():
            if column.dtype.kind == "f":
                check_recordable(f"{name}: {key}", column)
        if chunk.meta.n_steps > self._needs.steps:
            raise Refused(
                "bad_rollout",
                f"{name} has {chunk.meta.n_steps} steps; a rollout has only {self._needs.steps}",
            )
        if self._needs.stack > 1 and not has_past and not columns["is_first"][0]:
            raise Refused(
                "bad_rollout",
                f"{name} starts inside an episode whose previous frames are missing",
            )

    def _skip(self, track: _Track, chunk: Chunk) -> None:
        track.chunks.append(chunk)
        track.last_no = chunk.meta.chunk_no
        self._drop(track, len(track.chunks))

    def _drop(self, track: _Track, count: int) -> None:
        """Drop the oldest chunks, except for the rows that frame stacks reach back to."""
        if count == 0:
            return
        if (k := self._needs.stack) > 1:
            columns = self._joined(track, count)
            track.lead = {name: column[-k:] for name, column in columns.items()}
        track.chunks = track.chunks[count:]

    def _joined(self, track: _Track, count: int) -> Columns:
        """The columns of the lead and the oldest chunks, concatenated."""
        parts = [
            *([track.lead] if track.lead is not None else []),
            *map(self._columns, track.chunks[:count]),
        ]
        if len(parts) == 1:
            return parts[0]
        # A chunk that continues an episode repeats the previous bootstrap row as its first row.
        ends = [
            -1 if before["row"][-1] == RowKind.BOOTSTRAP and not after["is_first"][0] else None
            for before, after in pairwise(parts)
        ]
        cut = list(zip(parts, [*ends, None], strict=True))
        return {name: np.concatenate([part[name][:end] for part, end in cut]) for name in parts[0]}

    def _part(self, track: _Track) -> Rollout:
        """One env's steps, each with its next observation."""
        columns = self._joined(track, len(track.chunks))
        steps = np.flatnonzero(columns["row"] == RowKind.STEP)[-self._needs.steps :]
        rows = steps
        following = steps + 1
        if (k := self._needs.stack) > 1:
            weighed = {**columns, "weight": np.ones(len(columns["row"]), np.float32)}
            behind = windows_of(weighed, 0, needs=Transitions(batch=1, stack=k)).behind
            rows, following = (stack_rows(at, behind[at], k) for at in (steps, steps + 1))
        if self._game.discrete is not None:
            action = (columns["action"][steps] - self._game.discrete.start).astype(np.int32)
        else:
            action = columns["raw_action"][steps].reshape(len(steps), -1).astype(np.float32)
        # An episode that is cut off inside the rollout also ends there: advantages must not cross
        # into the next one.
        is_cut = (columns["row"][steps + 1] == RowKind.BOOTSTRAP) & (
            steps + 2 < len(columns["row"])
        )
        return Rollout(
            obs={name: columns[name][rows] for name in self._game.obs_columns},
            action=action,
            reward=columns["reward"][steps],
            next_obs={name: columns[name][following] for name in self._game.obs_columns},
            terminated=columns["terminated"][steps],
            truncated=columns["truncated"][steps] | is_cut,
            logp=columns["logp"][steps],
            action_mask=columns["action_mask"][steps] if "action_mask" in columns else None,
        )

    # --- Checkpoints ------------------------------------------------------------------------------

    def needed_chunks(self) -> Sequence[ChunkId]:
        """No chunk: `restore` reads none."""
        return ()

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """The rows that later frame stacks reach back to; queued chunks are not saved."""
        arrays: dict[str, Array] = {
            "sessions": np.frombuffer(
                b"".join(session.bytes for session in self._tracks), np.uint8
            ).reshape(-1, 16),
            "last_no": np.array([track.last_no for track in self._tracks.values()], np.int64),
        }
        for at, track in enumerate(self._tracks.values()):
            copy = _Track(list(track.chunks), track.lead)
            self._drop(copy, len(copy.chunks))
            arrays |= {f"lead{at}.{name}": column for name, column in (copy.lead or {}).items()}
        return arrays, {}

    def restore(self, arrays: Mapping[str, Array], facts: Mapping[str, Any], read: Any) -> None:
        """Resume from what `state` returned."""
        self._tracks = {}
        for at, (session, last_no) in enumerate(
            zip(arrays["sessions"], arrays["last_no"], strict=True)
        ):
            lead = arrays_under(arrays, f"lead{at}")
            self._tracks[uuid.UUID(bytes=session.tobytes())] = _Track(
                lead=lead or None, last_no=int(last_no)
            )
