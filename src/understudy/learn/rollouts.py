"""Rollouts: chunks that were just played, laid side by side in time for an on-policy algorithm."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from understudy.core.algorithm import Rollout, Rollouts
from understudy.core.chunk import Chunk, RowKind
from understudy.core.errors import Refused
from understudy.core.game import GameSpec
from understudy.core.tensors import Array
from understudy.core.windows import join, stack

Columns = Mapping[str, Array]


class RolloutQueue:
    """Chunks by session until every env has played its share; then one rollout."""

    def __init__(self, game: GameSpec, needs: Rollouts) -> None:
        self._game, self._needs = game, needs
        self._first_action = game.discrete.start if game.discrete is not None else 0
        self._pending: dict[uuid.UUID, list[Chunk]] = {}
        self._steps: dict[uuid.UUID, int] = {}
        self._leads: dict[uuid.UUID, Columns] = {}
        """The last rows of each session that were taken, for the stacks that reach back to them."""

    def insert(self, chunk: Chunk) -> int:
        """Queue a chunk; how many steps it brought. Refused when it cannot be part of a rollout."""
        session, meta = chunk.meta.session, chunk.meta
        if meta.schema != self._game.schema:
            raise Refused("wrong_schema", f"a chunk of {meta.game}/{meta.schema[:12]} for {self._game.game}")
        steps = self._steps.get(session, 0) + meta.n_steps
        if steps > self._needs.steps or "logp" not in chunk.columns:
            raise Refused("bad_rollout", f"{steps} steps of one env; a rollout takes {self._needs.steps}, with logp")
        columns = {name: chunk.columns[name] for name in ("reward", *self._game.obs_columns)}
        if not all(np.isfinite(column).all() for column in columns.values() if column.dtype.kind == "f"):
            raise Refused("not_finite", f"chunk {session}/{meta.chunk_no} holds NaN or infinity")
        self._pending.setdefault(session, []).append(chunk)
        self._steps[session] = steps
        return meta.n_steps

    @property
    def is_ready(self) -> bool:
        return sum(steps == self._needs.steps for steps in self._steps.values()) >= self._needs.envs

    def waiting(self) -> list[list[tuple[uuid.UUID, int]]]:
        """(session, chunk_no) of the chunks that `take` will use, for each env."""
        chosen = list(self._pending.values())[: self._needs.envs]
        return [[(chunk.meta.session, chunk.meta.chunk_no) for chunk in chunks] for chunks in chosen]

    def take(self) -> Rollout:
        """The steps of all envs, in the order in which their sessions first came."""
        sessions = list(self._pending)[: self._needs.envs]
        parts = [self._part(session) for session in sessions]
        for session in sessions:
            self._pending[session], self._steps[session] = [], 0
        return _side_by_side(parts)

    def drop(self) -> None:
        """Forget what waits: the weights it was played with are no longer the learner's."""
        self._pending, self._steps = {}, {}

    def _part(self, session: uuid.UUID) -> Rollout:
        """One env's steps; next to each, what it led to."""
        chunks = [chunk.columns for chunk in self._pending[session]]
        lead, k = self._leads.get(session), self._needs.stack
        columns = _joined([lead, *chunks] if lead is not None else chunks)
        n_lead = int((lead["row"] == RowKind.STEP).sum()) if lead is not None else 0
        steps = np.flatnonzero(columns["row"] == RowKind.STEP)[n_lead:]
        rows, following = steps, steps + 1
        if k > 1:
            windows = stack(join([columns]), k=k).rows
            rows, following = windows[steps], windows[steps + 1]
            self._leads[session] = {name: column[-k:] for name, column in columns.items()}
        return Rollout(
            obs={name: columns[name][rows] for name in self._game.obs_columns},
            action=self._action(columns)[steps],
            reward=columns["reward"][steps],
            next_obs={name: columns[name][following] for name in self._game.obs_columns},
            terminated=columns["terminated"][steps],
            truncated=columns["truncated"][steps],
            logp=columns["logp"][steps],
            legal=columns["legal"][steps] if self._game.has_legal else None,
        )

    def _action(self, columns: Columns) -> Array:
        if self._game.discrete is not None:
            return (columns["action"] - self._first_action).astype(np.int32)
        raw = columns["raw_action"]
        return raw.reshape(len(raw), -1).astype(np.float32)

    # --- resume -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Array]:
        """What the next rollout needs of the last one; nothing waits at the end of a round."""
        return {
            f"{session.hex}.{name}": column for session, lead in self._leads.items() for name, column in lead.items()
        }

    def restore(self, arrays: Mapping[str, Array]) -> None:
        leads: dict[uuid.UUID, dict[str, Array]] = {}
        for key, column in arrays.items():
            session, name = key.split(".", 1)
            leads.setdefault(uuid.UUID(session[1:]), {})[name] = column
        self._pending, self._steps, self._leads = {}, {}, dict(leads)


def _joined(chunks: Sequence[Columns]) -> Columns:
    """The columns of consecutive chunks as one."""
    if len(chunks) == 1:
        return chunks[0]
    laid = join(chunks)
    starts = np.cumsum([0, *(len(chunk["row"]) for chunk in chunks[:-1])])
    rows = starts[laid.chunk] + laid.source_row
    return {name: np.concatenate([chunk[name] for chunk in chunks])[rows] for name in chunks[0]}


def _side_by_side(parts: Sequence[Rollout]) -> Rollout:
    """[envs] of [steps, ...] as [steps, envs, ...]."""

    def beside(values: Sequence[Any]) -> Any:
        if isinstance(values[0], Mapping):
            return {name: beside([value[name] for value in values]) for name in values[0]}
        return None if values[0] is None else np.stack(values, axis=1)

    return Rollout(*(beside(values) for values in zip(*parts, strict=True)))
