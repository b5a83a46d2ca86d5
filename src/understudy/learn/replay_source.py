"""A learner's source of batches from a replay, and the balance of its samples and inserts.

    insert(chunk) ─► replay ─► weights and limits by player ─► draw ─► feedback

The other source is `RolloutQueue`, with the same interface.
"""

import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from understudy.algorithm import Batch, Feedback
from understudy.core.errors import ConfigError
from understudy.core.tensors import Array
from understudy.core.wording import joined
from understudy.experience.chunk import Chunk, ChunkId, people_rows
from understudy.learn.best_episodes import (
    Pieces,
    known_returns,
    least_return,
    pieces_of,
    returns_of,
    rows_from,
)
from understudy.learn.outliers import Limits
from understudy.learn.replay import RowWeights
from understudy.replay import Drawn, ReadChunks, Replay

# --- The balance of samples and inserts -----------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LimiterConfig:
    """How often a step is sampled, on average, before it is evicted from the replay."""

    samples_per_insert: float = 8.0
    """Raise for sample efficiency, lower for speed."""
    min_inserts: int = 1_000
    """Steps inserted before the first update; `samples_per_insert` does not apply to them."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.samples_per_insert) and self.samples_per_insert > 0):
            raise ConfigError(
                f"samples_per_insert is {self.samples_per_insert}; give a number above 0, such as 8"
            )
        if self.min_inserts < 0:
            raise ConfigError(
                f"min_inserts is {self.min_inserts}; give a whole number from 0, such as 1000"
            )


class Limiter:
    """Counts inserted and sampled rows, and computes the updates that are due."""

    def __init__(self, config: LimiterConfig) -> None:
        self._config = config
        self._n_inserted = 0
        self._n_sampled = 0

    def inserted(self, n_steps: int) -> None:
        """Count steps that entered the replay."""
        self._n_inserted += n_steps

    def sampled(self, n_rows: int) -> None:
        """Count rows that updates have consumed."""
        self._n_sampled += n_rows

    def updates_due(self, batch: int) -> int:
        """How many updates of this batch size the steps inserted so far allow."""
        beyond = max(0, self._n_inserted - self._config.min_inserts)
        owed = beyond * self._config.samples_per_insert - self._n_sampled
        # The tolerance is for rounding: 0.29 * 100 is 28.999999999999996.
        return max(0, math.floor(owed / batch + 1e-9))

    def state(self) -> dict[str, int]:
        """The state that `restore` needs."""
        return {"n_inserted": self._n_inserted, "n_sampled": self._n_sampled}

    def restore(self, facts: Mapping[str, int]) -> None:
        """Resume from what `state` returned."""
        self._n_inserted = int(facts["n_inserted"])
        self._n_sampled = int(facts["n_sampled"])


# --- The source of batches for one compiled call --------------------------------------------------


class PlayersReplay(Replay, Protocol):
    """A replay that can also learn from people: with a share for them, and without what is false.

    Their methods are described where `HostReplay` defines them.
    """

    n_edits: int

    @property
    def n_steps_inserted(self) -> int: ...

    @property
    def n_chunks(self) -> int: ...

    def steps_of_chunks(self) -> dict[ChunkId, int]: ...

    def limits(self, players: Mapping[uuid.UUID, bytes]) -> Limits: ...

    def reward_scales(
        self, players: Mapping[uuid.UUID, bytes], limits: Limits | None
    ) -> dict[bytes, float]: ...

    def row_weights(
        self,
        players: Mapping[uuid.UUID, bytes],
        bot_rows: Mapping[ChunkId, NDArray[np.bool_]],
        *,
        people_share: float,
        best_rows: Mapping[ChunkId, NDArray[np.bool_]] | None = None,
        reward_scales: Mapping[bytes, float] | None = None,
    ) -> RowWeights: ...

    def draw(
        self,
        k: int,
        *,
        rng: np.random.Generator,
        beta: float = 0.4,
        batch: int | None = None,
        row_weights: NDArray[np.float32] | None = None,
    ) -> Drawn: ...


_OF_PLAYERS = [part for part in (*vars(PlayersReplay), "n_edits") if part[0] != "_"]
_REPLAY_STREAM = 2
"""The replay's key among the random streams derived from a run's root seed."""


@dataclass(slots=True)
class ReplaySource:
    """A replay with its limiter; limiter None allows unlimited sampling, to train from a store.

    It has the same interface as `RolloutQueue`, so some of its methods do nothing.
    """

    is_on_policy: ClassVar[bool] = False
    """Whether it accepts only experience played with the newest weights."""
    replay: Replay
    limiter: Limiter | None
    updates: int
    batch: int
    root_seed: int
    limits: Limits | None = None
    """What the steps of most players allow to believe; None for play of the run's own actors."""
    measured_steps: int = 0
    """Steps that had been inserted when the limits were measured."""
    people_share: float = 0.0
    """The share of people in what is learned, if bots have played more than the rest of it; 0: as
    recorded. Set before the first chunk is inserted."""
    weights: RowWeights = field(default_factory=RowWeights)
    _bot_rows: dict[ChunkId, NDArray[np.bool_]] = field(default_factory=dict)
    """The rows that bots have decided, of chunks with such rows."""
    _pieces: dict[ChunkId, Pieces] = field(default_factory=dict)
    """The pieces of episodes in each chunk, if only the best episodes are drawn from."""
    least_return: float = -math.inf
    """The lowest return of the episodes that are drawn from, when the weights were computed."""
    _scales: Mapping[bytes, float] = field(default_factory=dict)
    """Factors of the rewards of some players, when the weights were computed."""
    metrics: dict[str, float] = field(default_factory=dict)
    """`best_episodes` and `known_episodes`, if only the best episodes are drawn from: how many are,
    and of how many the return is known. `unbelieved_players`, if there are any."""
    _weighed: int | None = None
    """Edits of the replay when these weights were computed."""
    _drawn: Drawn | None = None

    def __post_init__(self) -> None:
        if self.replay.needs.best_share < 1:
            self.check_players()

    def insert(self, chunk: Chunk) -> int:
        self.replay.insert(chunk)
        self._note(chunk)
        n_noted = max(len(self._bot_rows), len(self._pieces))
        if n_noted and n_noted > 2 * self.of_players.n_chunks:
            self._drop_evicted()
        if self.limiter is not None:
            self.limiter.inserted(chunk.meta.n_steps)
        return chunk.meta.n_steps

    @property
    def of_players(self) -> PlayersReplay:
        """The replay, as one that learns from people."""
        return cast(PlayersReplay, self.replay)

    def check_players(self) -> None:
        """ConfigError if the replay cannot learn from people."""
        missing = [part for part in _OF_PLAYERS if not hasattr(self.replay, part)]
        if missing:
            raise ConfigError(
                f"a {self.replay.__class__.__name__} cannot train from a store: it lacks "
                f"{joined(missing)}, which limit what steps of single players can do; add them as "
                "in understudy.learn.replay.HostReplay, or use replay='host'"
            )

    def skip_chunk(self, chunk: Chunk) -> None:
        """Does nothing for a stale chunk: windows that would reach into it end before it."""

    def end_sessions(self) -> None:
        """End all sessions, so that windows stop waiting for their next chunks."""
        for session in dict.fromkeys(session for session, _ in self.replay.chunk_ids()):
            self.replay.close(session)

    def on_weights_restored(self) -> None:
        """Does nothing: after a restore, the weights may still learn from the same data."""

    @property
    def may_update(self) -> bool:
        if self.limiter is None:
            return self.replay.n_sampleable > 0
        return self.replay.n_sampleable > 0 and self.limiter.updates_due(self.batch) >= self.updates

    @property
    def rows_per_call(self) -> int:
        return self.updates * self.batch

    def draw(self, call_no: int, *, importance_exponent: float) -> Any:
        """The batches of one call, on a leading axis of updates; `call_no` seeds the draw."""
        rng = np.random.Generator(
            np.random.Philox(key=[self.root_seed, _REPLAY_STREAM], counter=[0, 0, 0, call_no])
        )
        if self.weights.drawn is None:
            self._drawn = self.replay.draw(self.updates, rng=rng, beta=importance_exponent)
        else:
            self._drawn = self.of_players.draw(
                self.updates, rng=rng, beta=importance_exponent, row_weights=self.weights.drawn
            )
        if self.limiter is not None:
            self.limiter.sampled(self.rows_per_call)
        return self.limited(self._drawn)

    def limited(self, drawn: Drawn) -> Batch:
        """Drawn batches without what is not believed, and with the weights of their players."""
        batches = drawn.batches
        if self.limits is not None:
            batches = self.limits.apply(batches)
        if self.weights.learned is not None:
            batches = batches._replace(weight=batches.weight * self.weights.learned[drawn.rows])
        if self.weights.reward is not None:
            batches = batches._replace(reward=batches.reward * self.weights.reward[drawn.rows])
        return batches

    def measure(self, players: Mapping[uuid.UUID, bytes]) -> None:
        """Find the limits and weights, by the players of sessions.

        The limits are found again whenever the steps have doubled.
        """
        n_steps = self.of_players.n_steps_inserted
        if self.limits is None or n_steps >= 2 * self.measured_steps:
            self.limits = self.of_players.limits(players)
            self.measured_steps = n_steps
            self._weighed = None
        self.weigh(players)

    def weigh(self, players: Mapping[uuid.UUID, bytes]) -> None:
        """Find the weights, by the players of sessions, if the steps have changed."""
        replay = self.of_players
        if self._weighed != replay.n_edits:
            self._drop_evicted()
            self._scales = replay.reward_scales(players, self.limits)
            n_unbelieved = sum(not scale for scale in self._scales.values())
            self.metrics = {"unbelieved_players": n_unbelieved} if n_unbelieved else {}
            self.weights = replay.row_weights(
                players,
                self._bot_rows,
                people_share=self.people_share,
                best_rows=self._best_rows(players),
                reward_scales=self._scales,
            )
            self._weighed = replay.n_edits

    @property
    def max_reward(self) -> float:
        """The largest size of a reward that is believed."""
        return math.inf if self.limits is None else self.limits.max_reward

    def _best_rows(
        self, players: Mapping[uuid.UUID, bytes]
    ) -> dict[ChunkId, NDArray[np.bool_]] | None:
        """The rows of the best episodes; None if all are drawn from, ConfigError without any."""
        needs = self.replay.needs
        best_share = needs.best_share
        if best_share == 1:
            return None
        returns = returns_of(self._pieces, max_reward=self.max_reward)
        for (session, number), own in returns.items():
            scale = self._scales.get(players.get(session, session.bytes), 1.0)
            returns[session, number] = own * scale if scale else np.full_like(own, np.nan)
        self.least_return = least_return(
            self._pieces, returns, best_share, min_steps=needs.best_steps
        )
        if self.least_return == -math.inf:
            return None
        if self.least_return == math.inf:
            raise ConfigError(
                f"no recorded episode is whole, so best_share={best_share} has none to choose "
                "from; record episodes from their first step to their end, or set best_share=1"
            )
        known = known_returns(self._pieces, returns)
        n_best = int((known >= self.least_return).sum())
        self.metrics |= {"best_episodes": n_best, "known_episodes": len(known)}
        return rows_from(self._pieces, returns, self.least_return)

    def _note(self, chunk: Chunk) -> None:
        """Keep what weights need to know about a chunk."""
        if self.people_share and (by_bot := ~people_rows(chunk)).any():
            self._bot_rows[chunk.meta.id] = by_bot
        if self.replay.needs.best_share < 1:
            self._pieces[chunk.meta.id] = pieces_of(chunk)

    def _drop_evicted(self) -> None:
        """Forget what is known about chunks that have left the replay."""
        kept = set(self.replay.chunk_ids())
        self._bot_rows = {key: own for key, own in self._bot_rows.items() if key in kept}
        self._pieces = {key: own for key, own in self._pieces.items() if key in kept}

    def feedback(self, feedback: Feedback) -> Sequence[ChunkId]:
        """Set the priorities of the last draw; evicts and returns chunks that made updates fail."""
        drawn = self._drawn
        ok = np.asarray(feedback.ok)
        assert drawn is not None
        if feedback.priorities is not None:
            priorities = np.asarray(feedback.priorities)
            self.replay.feedback(drawn.rows[ok], drawn.stamps[ok], priorities[ok])
        if ok.all():
            return ()
        row_ok = np.asarray(feedback.row_ok)
        # If every row failed, the weights are the cause: restoring them helps, evicting the replay
        # does not.
        failed = ~ok[:, None] & ~row_ok & row_ok.any(axis=1, keepdims=True)
        bad = self.replay.chunks_of(np.unique(drawn.rows[failed]))
        for session, chunk_no in bad:
            self.replay.evict(session, chunk_no)
        return bad

    def needed_chunks(self) -> Sequence[ChunkId]:
        """The chunks that `restore` reads if the state is saved now."""
        return self.replay.needed_chunks()

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        arrays, facts = self.replay.state()
        limits = self.limits
        if limits is not None:
            arrays |= {f"limits.{name}": ends for name, ends in limits.obs.items()}
        return arrays, {
            "replay": facts,
            "limiter": None if self.limiter is None else self.limiter.state(),
            "limits": None if limits is None else [limits.reward, self.measured_steps],
        }

    def restore(
        self, arrays: Mapping[str, Array], facts: Mapping[str, Any], read: ReadChunks
    ) -> None:
        """Restore a new source from a checkpoint; `read` returns chunks by id from a store."""

        def read_again(ids: Sequence[ChunkId]) -> Iterator[Chunk]:
            for chunk in read(ids):
                self._note(chunk)
                yield chunk

        self.replay.restore(arrays, facts["replay"], read_again)
        self._weighed = None
        if self.limiter is not None:
            self.limiter.restore(facts["limiter"])
        if facts.get("limits") is not None:  # an earlier version had none
            reward, self.measured_steps = facts["limits"]
            ends = {
                name.removeprefix("limits."): array
                for name, array in arrays.items()
                if name.startswith("limits.")
            }
            self.limits = Limits(reward, ends)
