"""Sources: where a learner's batches come from, replay or rollouts, behind the same few calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import jax
import numpy as np

from understudy.core.algorithm import Feedback
from understudy.core.chunk import Chunk
from understudy.core.meta import ChunkId
from understudy.core.tensors import Array
from understudy.learn.limiter import Limiter
from understudy.learn.replay import Drawn, HostReplay
from understudy.learn.replay_state import ReadChunks
from understudy.learn.rollouts import RolloutQueue

_REPLAY_STREAM = 2
"""Tag of the replay's random numbers among those that come from a run's root seed."""


class Source(Protocol):
    """Batches for one compiled call, and what that call said about them."""

    def insert(self, chunk: Chunk) -> int: ...
    def pass_over(self, chunk: Chunk) -> None:
        """A chunk was played too long ago to learn from it; others may follow it."""
        ...

    def end_sessions(self) -> None:
        """No chunk that comes goes on where one that is here ends."""
        ...

    def go_back(self) -> None:
        """The weights were taken back: what only the newer ones may learn from leaves."""
        ...

    @property
    def may_update(self) -> bool: ...
    def draw(self, call_no: int, *, importance: float) -> Any:
        """Batches with a leading axis of one entry per update; the same call number gives the same ones."""
        ...

    def feedback(self, told: Feedback) -> Sequence[ChunkId]:
        """Take what the last drawn batches came to; the chunks that spoiled an update."""
        ...

    @property
    def rows_per_call(self) -> int: ...
    @property
    def is_on_policy(self) -> bool:
        """Whether only what the newest weights have played may be learned from."""
        ...

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]: ...
    def restore(self, arrays: Mapping[str, Array], facts: Mapping[str, Any], read: ReadChunks) -> None:
        """Come, fresh, to the state of a checkpoint; `read` gives chunks by id from the run's store."""
        ...


@dataclass(slots=True)
class ReplaySource:
    """A replay with its limiter; None: no bound, for training from a store."""

    is_on_policy: ClassVar[bool] = False
    replay: HostReplay
    limiter: Limiter | None
    updates: int
    batch: int
    root_seed: int
    _drawn: Drawn | None = None

    def insert(self, chunk: Chunk) -> int:
        self.replay.insert(chunk)
        if self.limiter is not None:
            self.limiter.inserted(chunk.meta.n_steps)
        return chunk.meta.n_steps

    def pass_over(self, chunk: Chunk) -> None:
        """Windows that would run into it end at the gap."""

    def end_sessions(self) -> None:
        """Windows that waited for the next chunk end with what there is."""
        for session in dict.fromkeys(session for session, _ in self.replay.held()):
            self.replay.close(session)

    def go_back(self) -> None:
        """Any weights may learn from a replay."""

    @property
    def may_update(self) -> bool:
        if self.limiter is None:
            return self.replay.n_sampleable > 0
        return self.replay.n_sampleable > 0 and self.limiter.updates_due(self.batch) >= self.updates

    @property
    def rows_per_call(self) -> int:
        return self.updates * self.batch

    def draw(self, call_no: int, *, importance: float) -> Any:
        rng = np.random.Generator(np.random.Philox(key=[self.root_seed, _REPLAY_STREAM], counter=[0, 0, 0, call_no]))
        self._drawn = self.replay.draw(self.updates, rng=rng, beta=importance)
        if self.limiter is not None:
            self.limiter.sampled(self.rows_per_call)
        return self._drawn.batches

    def feedback(self, told: Feedback) -> Sequence[ChunkId]:
        drawn, ok = self._drawn, np.asarray(told.ok)
        assert drawn is not None
        if told.priorities is not None:
            priorities = np.asarray(told.priorities)
            self.replay.feedback(drawn.rows[ok], drawn.stamps[ok], priorities[ok])
        if ok.all():
            return ()
        row_ok = np.asarray(told.row_ok)
        # Where not a single row went well, the weights are to blame: going back mends that, losing the replay does not.
        spoiled = ~ok[:, None] & ~row_ok & row_ok.any(axis=1, keepdims=True)
        bad = self.replay.chunks_of(np.unique(drawn.rows[spoiled]))
        for session, chunk_no in bad:
            self.replay.evict(session, chunk_no)
        return bad

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        arrays, facts = self.replay.state()
        return arrays, {"replay": facts, "limiter": None if self.limiter is None else self.limiter.state()}

    def restore(self, arrays: Mapping[str, Array], facts: Mapping[str, Any], read: ReadChunks) -> None:
        self.replay.restore(arrays, facts["replay"], read)
        if self.limiter is not None:
            self.limiter.restore(facts["limiter"])


@dataclass(slots=True)
class RolloutSource:
    """A queue of what the current weights have just played; one update per rollout."""

    is_on_policy: ClassVar[bool] = True
    queue: RolloutQueue
    rows: int
    _played: Sequence[Sequence[ChunkId]] = ()

    def insert(self, chunk: Chunk) -> int:
        return self.queue.insert(chunk)

    def pass_over(self, chunk: Chunk) -> None:
        self.queue.pass_over(chunk)

    def end_sessions(self) -> None:
        """A rollout never waits."""

    def go_back(self) -> None:
        self.queue.drop()

    @property
    def may_update(self) -> bool:
        return self.queue.is_ready

    @property
    def rows_per_call(self) -> int:
        return self.rows

    def draw(self, call_no: int, *, importance: float) -> Any:
        self._played = self.queue.waiting()
        rollout = self.queue.take()
        return jax.tree.map(lambda column: column[None], rollout)

    def feedback(self, told: Feedback) -> Sequence[ChunkId]:
        if bool(np.asarray(told.ok).all()):
            return ()
        row_ok = np.asarray(told.row_ok).reshape(-1, len(self._played))
        # Where not a single row went well, the weights are to blame.
        spoiled = [bool(row_ok.any()) and not one.all() for one in row_ok.T]  # by env
        return [one for chunks, is_bad in zip(self._played, spoiled, strict=True) if is_bad for one in chunks]

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        return self.queue.state(), {}

    def restore(self, arrays: Mapping[str, Array], facts: Mapping[str, Any], read: ReadChunks) -> None:
        self.queue.restore(arrays)
