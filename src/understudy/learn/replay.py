"""The replay a learner samples: the host form, in NumPy and numba.

    insert(chunk) ─► ring of rows ─► draw(k) ─► batches[k, …] ─► feedback(rows, stamps, priorities)

Each observation is kept once. A row's return, discount factor and reach are computed when it
enters, so that a draw is a look-up. Which rows may be sampled, and what leaves when, is decided by
`ring.Ring`.
"""

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from understudy.algorithm import Batch, Feedback, Transitions
from understudy.core.errors import ConfigError
from understudy.core.tensors import Array
from understudy.experience.chunk import Chunk, ChunkId
from understudy.experience.game import GameSpec
from understudy.learn.ring import Edit, Placed, ReadChunks, Ring
from understudy.learn.rows import (
    ACTION,
    DISCOUNT,
    REACH,
    RETURN,
    STAMP,
    WEIGHT,
    WIDTH,
    RowLayout,
    aligned_zeros,
    stack_rows,
    windows_of,
)

Rows = NDArray[np.int64]


class Roster:
    """A set of rows below `capacity`; `rows` lists them in an order that their history decides."""

    def __init__(self, capacity: int) -> None:
        self._rows = np.zeros(capacity, np.int64)
        self._place = np.full(capacity, -1, np.int64)  # where in `rows` each row stands, or -1
        self._n = 0

    def __len__(self) -> int:
        return self._n

    @property
    def rows(self) -> Rows:
        """The rows, to be read only."""
        return self._rows[: self._n]

    def set_range(self, start: int, may_sample: NDArray[np.bool_]) -> None:
        """Say for the rows from `start` on which of them belong."""
        belonged = self._place[start : start + len(may_sample)] >= 0
        self._remove(start + np.flatnonzero(belonged & ~may_sample))
        self._add(start + np.flatnonzero(may_sample & ~belonged))

    def draw(self, rng: np.random.Generator, size: tuple[int, int]) -> Rows:
        """Rows drawn evenly, each independently of the others."""
        return self._rows[rng.integers(0, self._n, size)]

    def restore(self, rows: NDArray[Any]) -> None:
        """Become the roster whose `rows` these were."""
        self._remove(self.rows.copy())
        self._add(rows.astype(np.int64))

    def _add(self, rows: Rows) -> None:
        end = self._n + len(rows)
        self._rows[self._n : end] = rows
        self._place[rows] = np.arange(self._n, end)
        self._n = end

    def _remove(self, rows: Rows) -> None:
        """Fill the gaps that these rows leave with the last ones that stay."""
        if not len(rows):
            return
        gaps = self._place[rows]
        end = self._n - len(rows)
        self._place[rows] = -1
        last = self._rows[end : self._n]
        movers = last[self._place[last] >= 0]
        gaps = gaps[gaps < end]
        self._rows[gaps] = movers
        self._place[movers] = gaps
        self._n = end


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """How much a replay holds, and how strongly priorities count."""

    capacity: int = 100_000
    """Rows; a chunk takes its steps, one row for each episode's end, and up to n_step + stack -
    2 of the one before."""
    alpha: float = 0.6
    """A row's mass is weight * priority^alpha: 0 is uniform, 1 in proportion."""
    min_priority: float = 1e-6
    """Smaller ones count as this, so that no row is lost for good."""
    max_priority: float = 1e6
    """Larger ones count as this, so that no row takes every batch."""

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ConfigError(f"capacity is {self.capacity}; give a number of rows, such as 100000")
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha is {self.alpha}; give a number from 0 to 1, such as 0.6")
        if not 0 < self.min_priority <= self.max_priority <= 1e30:
            raise ConfigError(
                f"min_priority is {self.min_priority} and max_priority {self.max_priority}; "
                "give 0 < min_priority <= max_priority <= 1e30"
            )


class Drawn(NamedTuple):
    """Batches, and where their rows came from, for `feedback`."""

    batches: Batch  # every array with the leading axes [k, batch]
    rows: NDArray[np.int64]  # [k, batch]
    stamps: NDArray[np.int32]  # [k, batch]


class DrawnRows(NamedTuple):
    """Drawn rows and what is known of each, in arrays [k, batch]."""

    places: NDArray[np.int64]  # [2, k, batch]: the rows, and the rows to bootstrap from
    weight: NDArray[np.float32]
    returns: NDArray[np.float32]
    discount: NDArray[np.float32]
    action: NDArray[np.int32]
    stamps: NDArray[np.int32]


class HostReplay:
    """A window of recent steps of one game, sampled uniformly or by priority."""

    def __init__(
        self, game: GameSpec, needs: Transitions, config: ReplayConfig | None = None
    ) -> None:
        self.config = config or ReplayConfig()
        self.needs = needs
        self.n_bad_priorities = 0
        """Priorities that were NaN, infinite or negative, and left out."""
        windows = windows_of
        if needs.prioritised:
            # Half a second of import that uniform replays do without.
            from understudy.learn.sum_tree import SumTree, compiled_windows_of

            windows = compiled_windows_of
        self._ring = Ring(game, needs, self.config.capacity, windows=windows)
        self.layout: RowLayout = self._ring.layout
        self.capacity = self._ring.capacity
        self._masses: SumTree | Roster = (
            SumTree(self.capacity) if needs.prioritised else Roster(self.capacity)
        )
        self._columns = {
            name: np.zeros((self.capacity, *kept.shape), kept.dtype)
            for name, kept in self.layout.columns.items()
            if not (name == "action" and self.layout.discrete)
        }
        self._facts = aligned_zeros((self.capacity, WIDTH), np.dtype(np.float32))
        self._whole = self._facts.view(np.int32)
        obs = self._columns[self.layout.obs[0]]
        raw, obs = (
            column.view(np.uint8).reshape(self.capacity, -1) for column in (self._facts, obs)
        )
        self._lines = self._facts, self._whole, raw, obs
        self._rule = np.array(
            [self.config.alpha, self.config.min_priority, self.config.max_priority]
        )
        self._largest = 1.0

    @property
    def n_sampleable(self) -> int:
        """Starts that may be drawn."""
        return len(self._masses)

    @property
    def n_steps_inserted(self) -> int:
        """Steps ever inserted, those that have left included."""
        return self._ring.n_steps_inserted

    def insert(self, chunk: Chunk, *, weight: float = 1.0) -> int:
        """How many starts became sampleable; a chunk that is Refused changes nothing.

        Its steps are drawn `weight` times as often as others, and no importance weight takes that
        back.
        """
        placed = self._ring.place(chunk, weight=weight)
        self._write(placed)
        return sum(self._apply(edit) for edit in placed.edits)

    def close(self, session: uuid.UUID) -> int:
        """How many waiting starts became sampleable, shortened, because no more chunks of this
        session come."""
        return sum(self._apply(edit) for edit in self._ring.close(session))

    def evict(self, session: uuid.UUID, chunk_no: int) -> bool:
        """Whether rows of this chunk were here; none is drawn any more."""
        edits = self._ring.evict(session, chunk_no)
        for edit in edits:
            self._apply(edit)
        return bool(edits)

    def held(self) -> list[ChunkId]:
        """(session, chunk_no) of what is in the ring, oldest first."""
        return list(self._ring.spans)

    def chunks_of(self, rows: NDArray[np.int64]) -> list[ChunkId]:
        """The chunks that what was drawn at these rows came from, each once."""
        return self._ring.chunks_of(rows)

    def draw(
        self, k: int, *, rng: np.random.Generator, beta: float = 0.4, batch: int | None = None
    ) -> Drawn:
        """k batches; prioritised ones are stratified, with importance weights of at most 1."""
        if self.n_sampleable == 0:
            raise ConfigError(
                "a draw from a replay without sampleable steps; insert chunks first, and see "
                "n_sampleable"
            )
        size = (k, batch or self.needs.batch)
        if isinstance(self._masses, Roster):
            found = self._look_up(self._masses.draw(rng, size))
        else:
            found = DrawnRows(
                *self._masses.draw(rng.random(size), beta=float(beta), lines=self._lines)
            )
        return Drawn(self._gather(found), found.places[0], found.stamps)

    def feedback(
        self, rows: NDArray[np.int64], stamps: NDArray[np.int32], priorities: Array
    ) -> None:
        """Give drawn rows new priorities; rows that have left meanwhile and priorities without
        sense are ignored."""
        if isinstance(self._masses, Roster):
            return
        n_bad, largest = self._masses.feed_back(
            np.asarray(rows, np.int64).ravel(),
            stamps=np.asarray(stamps, np.int32).ravel(),
            priorities=np.asarray(priorities, np.float64).ravel(),
            lines=self._lines,
            rule=self._rule,
        )
        self.n_bad_priorities += n_bad
        self._largest = max(self._largest, largest)

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """What `restore` needs besides the chunks themselves."""
        arrays, facts = self._ring.state()
        used = self._ring.used
        arrays["weights"] = np.zeros(used, np.float32)
        for one in (
            self._ring.spans.values()
        ):  # between them lies what was there before, which nobody reads
            rows = slice(one.start, one.start + one.n_rows)
            arrays["weights"][rows] = self._facts[rows, WEIGHT]
        masses = self._masses
        arrays["masses"] = (
            masses.rows if isinstance(masses, Roster) else masses.leaves[:used]
        ).copy()
        return arrays, facts | {"largest": self._largest, "n_bad_priorities": self.n_bad_priorities}

    def restore(
        self, arrays: Mapping[str, Array], facts: Mapping[str, Any], read: ReadChunks
    ) -> None:
        """Become the replay that `state` described: every later draw has the same bits."""
        written, gone = self._ring.restore(arrays, facts, read)
        self._largest = float(facts["largest"])
        self.n_bad_priorities = int(facts["n_bad_priorities"])
        for placed in written:
            self._write(placed)
        if isinstance(self._masses, Roster):
            self._masses.restore(arrays["masses"])
        else:
            masses = np.zeros(self.capacity)
            masses[: len(arrays["masses"])] = arrays["masses"]
            self._masses.set_range(0, masses)
        for edit in gone:
            self._apply(edit)

    def _write(self, placed: Placed) -> None:
        span = placed.span
        at = placed.span.start
        self._facts[at : at + span.n_rows] = placed.windows.facts
        self._whole[at : at + span.n_rows, STAMP] = span.stamp
        for part in placed.parts:
            end = at + len(part["action"])
            for name, column in self._columns.items():
                column[at:end] = part[name]
            if self.layout.discrete:
                self._whole[at:end, ACTION] = part["action"]
            at = end

    def _apply(self, edit: Edit) -> int:
        """Carry out an edit; how many rows it made sampleable."""
        if isinstance(self._masses, Roster):
            self._masses.set_range(edit.start, edit.weight > 0)
        elif edit.priority is None:
            self._masses.set_range(edit.start, np.zeros(len(edit.weight)))
        else:
            largest = self._masses.weigh(edit, rule=self._rule, missing=self._largest)
            self._largest = max(self._largest, largest)
        return int(np.count_nonzero(edit.weight))

    def _look_up(self, rows: NDArray[np.int64]) -> DrawnRows:
        facts = self._facts.take(rows, axis=0)
        whole = facts.view(np.int32)
        return DrawnRows(
            np.stack([rows, rows + (whole[..., REACH] & 0xFFFF)]),
            np.ones(rows.shape, np.float32),
            facts[..., RETURN].copy(),
            facts[..., DISCOUNT].copy(),
            whole[..., ACTION].copy(),
            whole[..., STAMP].copy(),
        )

    def _gather(self, found: DrawnRows) -> Batch:
        layout = self.layout
        places = found.places
        rows = found.places[0]
        seen = places
        if self.needs.stack > 1:
            seen = stack_rows(places, self._whole[places, REACH] >> 16, self.needs.stack)
        obs = {
            name: self._columns[name].take(seen, axis=0) for name in layout.obs
        }  # and the next ones, at [1]
        action_mask = self._columns["action_mask"].take(places, axis=0) if "action_mask" in self._columns else None
        return Batch(
            obs={name: both[0] for name, both in obs.items()},
            action=found.action if layout.discrete else self._columns["action"].take(rows, axis=0),
            reward=found.returns,
            next_obs={name: both[1] for name, both in obs.items()},
            discount=found.discount,
            weight=found.weight,
            action_mask=None if action_mask is None else action_mask[0],
            next_action_mask=None if action_mask is None else action_mask[1],
            extras={name: self._columns[name].take(rows, axis=0) for name in layout.extras},
        )


# --- Balance of samples and inserts ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LimiterConfig:
    """How often a step is sampled, on average, before it leaves the replay."""

    samples_per_insert: float = 8.0
    """Raise for sample efficiency, lower for speed."""
    min_inserts: int = 1_000
    """Steps before the first update; they owe no samples."""
    slack: int = 2_048
    """Steps that actors may be ahead of the learner before they wait."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.samples_per_insert) and self.samples_per_insert > 0):
            raise ConfigError(
                f"samples_per_insert is {self.samples_per_insert}; give a number above 0, such as 8"
            )
        if self.min_inserts < 0:
            raise ConfigError(
                f"min_inserts is {self.min_inserts}; give a whole number from 0, such as 1000"
            )
        if self.slack < 1:
            raise ConfigError(
                f"slack is {self.slack}; give at least 1 step, or actors could never start"
            )


class Limiter:
    """Counts steps in and samples out; says how many updates are due, and whether actors may go on.

    Players are never asked to wait: count what they send, and leave `may_insert` to the actors.
    """

    def __init__(self, config: LimiterConfig, *, batch: int = 1) -> None:
        self._config = config
        self._n_inserted = 0
        self._n_sampled = 0
        self._check(batch)

    def inserted(self, n_steps: int) -> None:
        """Count steps that entered the replay."""
        self._n_inserted += n_steps

    def sampled(self, n_rows: int) -> None:
        """Count rows that updates have eaten."""
        self._n_sampled += n_rows

    @property
    def may_insert(self) -> bool:
        """Whether actors may go on: the learner is less than `slack` steps behind them."""
        return self._owed() < self._config.slack * self._config.samples_per_insert

    def updates_due(self, batch: int) -> int:
        """How many updates of this batch the steps so far pay for."""
        self._check(batch)
        # A hair more, since 0.29 * 100 is 28.999999999999996.
        return max(0, math.floor(self._owed() / batch + 1e-9))

    def state(self) -> dict[str, int]:
        """What `restore` needs."""
        return {"n_inserted": self._n_inserted, "n_sampled": self._n_sampled}

    def restore(self, facts: Mapping[str, int]) -> None:
        """Go on from what `state` returned."""
        self._n_inserted = int(facts["n_inserted"])
        self._n_sampled = int(facts["n_sampled"])

    def _owed(self) -> float:
        beyond = max(0, self._n_inserted - self._config.min_inserts)
        return beyond * self._config.samples_per_insert - self._n_sampled

    def _check(self, batch: int) -> None:
        """Refuse what would end in a deadlock: actors that wait while no whole batch is due."""
        config = self._config
        if config.slack * config.samples_per_insert < batch:
            raise ConfigError(
                f"a slack of {config.slack} steps pays for "
                f"{config.slack * config.samples_per_insert:g} samples, less "
                f"than one batch of {batch}, so learner and actors would wait for each other; "
                f"give a slack of at least {math.ceil(batch / config.samples_per_insert)}"
            )


# --- A learner's source: batches for one compiled call, and what came of them;
#     the other source is `RolloutQueue`


_REPLAY_STREAM = 2
"""Tag of the replay's random numbers among those that come from a run's root seed."""


@dataclass(slots=True)
class ReplaySource:
    """A replay with its limiter; None: no bound, for training from a store."""

    is_on_policy: ClassVar[bool] = False
    """Whether only what the newest weights have played may be learned from."""
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
        """A chunk was played too long ago to learn from it: windows that would run into it end
        at the gap."""

    def end_sessions(self) -> None:
        """No chunk that comes goes on where one that is here ends: windows that waited for one
        wait no longer."""
        for session in dict.fromkeys(session for session, _ in self.replay.held()):
            self.replay.close(session)

    def go_back(self) -> None:
        """The weights were taken back: nothing leaves, since any weights may learn from a
        replay."""

    @property
    def may_update(self) -> bool:
        if self.limiter is None:
            return self.replay.n_sampleable > 0
        return self.replay.n_sampleable > 0 and self.limiter.updates_due(self.batch) >= self.updates

    @property
    def rows_per_call(self) -> int:
        return self.updates * self.batch

    def draw(self, call_no: int, *, importance_exponent: float) -> Any:
        """Batches with a leading axis of one entry per update; the same call number gives the
        same ones."""
        rng = np.random.Generator(
            np.random.Philox(key=[self.root_seed, _REPLAY_STREAM], counter=[0, 0, 0, call_no])
        )
        self._drawn = self.replay.draw(self.updates, rng=rng, beta=importance_exponent)
        if self.limiter is not None:
            self.limiter.sampled(self.rows_per_call)
        return self._drawn.batches

    def feedback(self, feedback: Feedback) -> Sequence[ChunkId]:
        """Take what the last drawn batches came to; the chunks that spoiled an update."""
        drawn = self._drawn
        ok = np.asarray(feedback.ok)
        assert drawn is not None
        if feedback.priorities is not None:
            priorities = np.asarray(feedback.priorities)
            self.replay.feedback(drawn.rows[ok], drawn.stamps[ok], priorities[ok])
        if ok.all():
            return ()
        row_ok = np.asarray(feedback.row_ok)
        # Where not a single row went well, the weights are to blame: going back mends that, losing
        # the replay does not.
        spoiled = ~ok[:, None] & ~row_ok & row_ok.any(axis=1, keepdims=True)
        bad = self.replay.chunks_of(np.unique(drawn.rows[spoiled]))
        for session, chunk_no in bad:
            self.replay.evict(session, chunk_no)
        return bad

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        arrays, facts = self.replay.state()
        return arrays, {
            "replay": facts,
            "limiter": None if self.limiter is None else self.limiter.state(),
        }

    def restore(
        self, arrays: Mapping[str, Array], facts: Mapping[str, Any], read: ReadChunks
    ) -> None:
        """Come, fresh, to the state of a checkpoint; `read` gives chunks by id from the run's
        store."""
        self.replay.restore(arrays, facts["replay"], read)
        if self.limiter is not None:
            self.limiter.restore(facts["limiter"])
