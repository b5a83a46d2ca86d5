"""The replay buffer on the host, in NumPy and numba.

    insert(chunk) ─► ring of rows ─► draw(k) ─► batches[k, …] ─► feedback(rows, stamps, priorities)

Each observation is stored once. A row's n-step return, its discount and the row it bootstraps from
are computed on insertion, so that a draw is a look-up. `ring.Ring` decides which rows may be
sampled and when they are evicted.
"""

import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from understudy.algorithm import Batch, Feedback, Transitions
from understudy.core.errors import ConfigError
from understudy.core.tensors import Array
from understudy.experience.chunk import Chunk, ChunkId, people_rows
from understudy.experience.game import GameSpec
from understudy.learn.best_episodes import (
    Pieces,
    known_returns,
    least_return,
    pieces_of,
    returns_of,
    rows_from,
)
from understudy.learn.outliers import (
    Limits,
    believable,
    false_rows,
    obs_limits,
    reward_scales,
    reward_size,
    shared_weights,
)
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

_MOST_COMPARED = 1_024
"""Rows of a player that tell the range of its observations."""
_LEAST_COMPARED = 32
_ALL_COMPARED = 65_536
"""Rows of all players together, of games with many."""


class Roster:
    """A set of row numbers below `capacity`; their order depends on earlier changes of the set."""

    def __init__(self, capacity: int) -> None:
        self._rows = np.zeros(capacity, np.int64)
        self._place = np.full(capacity, -1, np.int64)  # the index of each row in `rows`, or -1
        self._n = 0

    def __len__(self) -> int:
        return self._n

    @property
    def rows(self) -> Rows:
        """The rows in the set; must not be modified."""
        return self._rows[: self._n]

    def set_range(self, start: int, may_sample: NDArray[np.bool_]) -> None:
        """Set which of the rows from `start` on are in the set."""
        belonged = self._place[start : start + len(may_sample)] >= 0
        self._remove(start + np.flatnonzero(belonged & ~may_sample))
        self._add(start + np.flatnonzero(may_sample & ~belonged))

    def draw(
        self,
        rng: np.random.Generator,
        size: tuple[int, int],
        row_weights: NDArray[np.float32] | None = None,
    ) -> Rows:
        """Rows drawn uniformly or in proportion to their weights, with replacement."""
        if row_weights is None:
            return self._rows[rng.integers(0, self._n, size)]
        ends = np.cumsum(row_weights[self.rows], dtype=np.float64)
        at = np.searchsorted(ends, rng.random(size) * ends[-1], side="right")
        # A product may be rounded up to the end; the last rows may have no weight.
        return self._rows[np.minimum(at, np.searchsorted(ends, ends[-1]))]

    def restore(self, rows: NDArray[Any]) -> None:
        """Restore the set from its saved `rows`."""
        self._remove(self.rows.copy())
        self._add(rows.astype(np.int64))

    def _add(self, rows: Rows) -> None:
        end = self._n + len(rows)
        self._rows[self._n : end] = rows
        self._place[rows] = np.arange(self._n, end)
        self._n = end

    def _remove(self, rows: Rows) -> None:
        """Remove these rows; rows from the end of the array fill the gaps."""
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
    """The capacity and the prioritisation of a replay."""

    capacity: int = 100_000
    """In rows. A chunk takes a row per step, one per episode or chunk end, and up to
    n_step + stack - 2 rows that repeat the end of the previous chunk."""
    alpha: float = 0.6
    """Rows are drawn in proportion to their mass, weight * priority^alpha; 0 ignores priorities."""
    min_priority: float = 1e-6
    """Lower bound of priorities, so that every row can be drawn."""
    max_priority: float = 1e6
    """Upper bound of priorities, so that no row fills every batch."""

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
    """Batches, and the rows they were drawn from; a stamp shows if a row was overwritten since."""

    batches: Batch  # every array with the leading axes [k, batch]
    rows: NDArray[np.int64]  # [k, batch]
    stamps: NDArray[np.int32]  # [k, batch]


class DrawnRows(NamedTuple):
    """Drawn rows and their facts, in arrays [k, batch]."""

    places: NDArray[np.int64]  # [2, k, batch]: the rows, and the rows to bootstrap from
    weight: NDArray[np.float32]
    returns: NDArray[np.float32]
    discount: NDArray[np.float32]
    action: NDArray[np.int32]
    stamps: NDArray[np.int32]


class RowWeights(NamedTuple):
    """Weights of rows, float32[capacity]; None: all are 1."""

    learned: NDArray[np.float32] | None = None
    """How much an update counts them, so that no player decides alone what is learned."""
    drawn: NDArray[np.float32] | None = None
    """How often they are drawn, so that bots do not decide alone, and bad episodes not at all."""
    reward: NDArray[np.float32] | None = None
    """The factor of their rewards, so that players with much larger ones do not decide alone."""


class HostReplay:
    """The recent steps of one game, sampled uniformly or by priority."""

    def __init__(
        self, game: GameSpec, needs: Transitions, config: ReplayConfig | None = None
    ) -> None:
        self.config = config or ReplayConfig()
        self.needs = needs
        self.n_bad_priorities = 0
        self.n_edits = 0
        """Changes so far of which rows may be sampled."""
        """Priorities that were NaN, infinite or negative, and ignored."""
        windows = windows_of
        if needs.prioritised:
            # Imported late: it takes half a second, and uniform replays do not need it.
            from understudy.learn.sum_tree import SumTree, compiled_windows_of

            windows = compiled_windows_of
        self._ring = Ring(game, needs, self.config.capacity, windows=windows)
        self.layout: RowLayout = self._ring.layout
        self.capacity = self._ring.capacity
        self._masses: SumTree | Roster = (
            SumTree(self.capacity) if needs.prioritised else Roster(self.capacity)
        )
        self._columns = {
            name: np.zeros((self.capacity, *column.shape), column.dtype)
            for name, column in self.layout.columns.items()
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
        """Steps that may be drawn."""
        return len(self._masses)

    @property
    def n_steps_inserted(self) -> int:
        """Steps ever inserted, including evicted ones."""
        return self._ring.n_steps_inserted

    def insert(self, chunk: Chunk, *, weight: float = 1.0) -> int:
        """Insert a chunk; returns how many steps became sampleable. If it raises, nothing changes.

        Its steps are drawn `weight` times as often as others; importance weights do not correct
        for that.
        """
        placed = self._ring.place(chunk, weight=weight)
        self._write(placed)
        return sum(self._apply(edit) for edit in placed.edits)

    def close(self, session: uuid.UUID) -> int:
        """End a session; returns how many steps became sampleable that waited for a next chunk."""
        return sum(self._apply(edit) for edit in self._ring.close(session))

    def evict(self, session: uuid.UUID, chunk_no: int) -> bool:
        """Evict a chunk, so that none of its rows is drawn again; returns whether it had any."""
        edits = self._ring.evict(session, chunk_no)
        for edit in edits:
            self._apply(edit)
        return bool(edits)

    @property
    def n_chunks(self) -> int:
        return len(self._ring.spans)

    def chunk_ids(self) -> list[ChunkId]:
        """(session, chunk_no) of the chunks in the ring, oldest first."""
        return list(self._ring.spans)

    def steps_of_chunks(self) -> dict[ChunkId, int]:
        """The sampleable steps of each chunk in the ring, oldest first."""
        may_sample = self._may_sample()
        return {
            key: int(np.count_nonzero(may_sample[span.start : span.start + span.n_rows]))
            for key, span in self._ring.spans.items()
        }

    def _may_sample(self) -> NDArray[np.bool_]:
        may_sample = np.zeros(self.capacity, np.bool_)
        masses = self._masses
        may_sample[masses.rows if isinstance(masses, Roster) else masses.leaves > 0] = True
        return may_sample

    def chunks_of(self, rows: NDArray[np.int64]) -> list[ChunkId]:
        """The chunks that the transitions at these rows come from, each once."""
        return self._ring.chunks_of(rows)

    def row_weights(
        self,
        players: Mapping[uuid.UUID, bytes],
        bot_rows: Mapping[ChunkId, NDArray[np.bool_]],
        *,
        people_share: float,
        best_rows: Mapping[ChunkId, NDArray[np.bool_]] | None = None,
        reward_scales: Mapping[bytes, float] | None = None,
    ) -> RowWeights:
        """The weights of rows by the players of sessions, with a share for people.

        `bot_rows`: the rows of chunks that bots have decided; chunks without any may be omitted.
        `best_rows`: the rows of chunks that are drawn; None: all. Only players of such rows count.
        `reward_scales`: factors of players' rewards, if they are not 1. Steps of players whose
        rewards are not believed are not learned from.
        """
        may_sample = self._may_sample()
        by_bot = self._marked(bot_rows)
        if best_rows is not None:
            is_best = self._marked(best_rows)
            may_sample &= is_best
        people: dict[bytes, int] = {}
        bots: dict[bytes, int] = {}
        for (session, _), span in self._ring.spans.items():
            rows = slice(span.start, span.start + span.n_rows)
            player = players.get(session, session.bytes)
            n_steps = int(np.count_nonzero(may_sample[rows]))
            if best_rows is not None and not n_steps:
                continue
            n_bot_steps = int(np.count_nonzero(may_sample[rows] & by_bot[rows]))
            people[player] = people.get(player, 0) + n_steps - n_bot_steps
            bots[player] = bots.get(player, 0) + n_bot_steps
        weights = shared_weights(
            list(people.values()), list(bots.values()), people_share=people_share
        )
        drawn = None
        if weights.bot_rate < 1:
            drawn = np.where(by_bot, np.float32(weights.bot_rate), np.float32(1))
        if best_rows is not None:
            drawn = (np.float32(1) if drawn is None else drawn) * is_best
        if min((*weights.people, *weights.bots), default=1.0) == 1.0 and not reward_scales:
            return RowWeights(None, drawn)
        weights_of = dict(zip(people, zip(weights.people, weights.bots, strict=True), strict=True))
        learned, reward = np.ones((2, self.capacity), np.float32)
        for (session, _), span in self._ring.spans.items():
            rows = slice(span.start, span.start + span.n_rows)
            player = players.get(session, session.bytes)
            of_people, of_bots = weights_of.get(player, (1.0, 1.0))
            scale = (reward_scales or {}).get(player, 1.0)
            reward[rows] = scale
            learned[rows] = np.where(by_bot[rows], of_bots, of_people) * (scale > 0)
        return RowWeights(learned, drawn, reward if reward_scales else None)

    def reward_scales(
        self, players: Mapping[uuid.UUID, bytes], limits: Limits | None
    ) -> dict[bytes, float]:
        """Factors of the rewards of players who differ much from most; those of others are 1.

        Rewards beyond the limits, which are not believed anyway, do not count.
        """
        index: dict[bytes, int] = {}
        owner = np.zeros(self.capacity, np.int64)
        for (session, _), span in self._ring.spans.items():
            player = players.get(session, session.bytes)
            rows = slice(span.start, span.start + span.n_rows)
            owner[rows] = index.setdefault(player, len(index))

        def by_player(rows: Rows, values: Any = None) -> Any:
            return np.bincount(owner[rows], values, minlength=len(index))

        every = np.flatnonzero(self._may_sample())
        sizes = np.abs(self._facts[every, RETURN]).astype(np.float64)
        is_counted = (sizes > 0) & (sizes <= (math.inf if limits is None else limits.max_reward))
        rewarded = every[is_counted]
        false_shares = np.zeros(len(index))
        if limits is not None and limits.obs:
            few = np.linspace(0, len(every) - 1, min(len(every), _ALL_COMPARED)).astype(np.int64)
            some = every[few]
            is_false = false_rows(
                {name: self._columns[name][some] for name in limits.obs}, limits.obs
            )
            false_shares = by_player(some, is_false) / np.maximum(1, by_player(some))
        scales = reward_scales(
            by_player(rewarded, sizes[is_counted]) / np.maximum(1, by_player(rewarded)),
            by_player(every),
            false_shares,
        )
        return {player: float(scales[at]) for player, at in index.items() if scales[at] < 1}

    def _marked(self, rows_of: Mapping[ChunkId, NDArray[np.bool_]]) -> NDArray[np.bool_]:
        """The rows of the ring that are marked in their chunk."""
        is_marked = np.zeros(self.capacity, np.bool_)
        for key, span in self._ring.spans.items():
            if (own := rows_of.get(key)) is not None:
                # A lead-in is of the episode that the chunk continues.
                rows = slice(span.start, span.start + span.n_rows)
                is_marked[rows] = np.concatenate([np.full(span.lead, own[0]), own])
        return is_marked

    def limits(self, players: Mapping[uuid.UUID, bytes]) -> Limits:
        """The limits of rewards and observations, by the players of these sessions."""
        spans: dict[bytes, list[Rows]] = {}
        for (session, _), span in self._ring.spans.items():
            rows = np.arange(span.start, span.start + span.n_rows)
            spans.setdefault(players.get(session, session.bytes), []).append(rows)
        rows_of = [np.concatenate(own) for own in spans.values()]
        few = max(_LEAST_COMPARED, min(_MOST_COMPARED, _ALL_COMPARED // max(1, len(rows_of))))
        compared = [
            rows[np.linspace(0, len(rows) - 1, min(few, len(rows))).astype(np.int64)]
            for rows in rows_of
        ]
        return Limits(
            believable([reward_size(self._facts[rows, RETURN]) for rows in rows_of]),
            {
                name: obs_limits([self._columns[name][rows] for rows in compared])
                for name in self.layout.obs
                if self._columns[name].dtype.kind in "fiu"
                and self._columns[name].dtype != np.uint8
                and rows_of
            },
        )

    def draw(
        self,
        k: int,
        *,
        rng: np.random.Generator,
        beta: float = 0.4,
        batch: int | None = None,
        row_weights: NDArray[np.float32] | None = None,
    ) -> Drawn:
        """k batches; prioritised ones are stratified, with importance weights of at most 1.

        `row_weights`: how often each row is drawn. A prioritised replay, which draws by other
        weights, multiplies those of its batches by them instead.
        """
        if self.n_sampleable == 0:
            raise ConfigError(
                "the replay has no sampleable steps to draw; insert chunks until n_sampleable is "
                "above 0"
            )
        size = (k, batch or self.needs.batch)
        if isinstance(self._masses, Roster):
            drawn = self._look_up(self._masses.draw(rng, size, row_weights))
        else:
            drawn = DrawnRows(
                *self._masses.draw(rng.random(size), beta=float(beta), lines=self._lines)
            )
            if row_weights is not None:
                drawn = drawn._replace(weight=drawn.weight * row_weights[drawn.places[0]])
        return Drawn(self._gather(drawn), drawn.places[0], drawn.stamps)

    def feedback(
        self, rows: NDArray[np.int64], stamps: NDArray[np.int32], priorities: Array
    ) -> None:
        """Set new priorities of drawn rows; ignores evicted rows and invalid priorities."""
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
        """The state that `restore` needs, besides the chunks themselves."""
        arrays, facts = self._ring.state()
        used = self._ring.used
        arrays["weights"] = np.zeros(used, np.float32)
        for span in self._ring.spans.values():  # rows between spans are stale and never read
            rows = slice(span.start, span.start + span.n_rows)
            arrays["weights"][rows] = self._facts[rows, WEIGHT]
        masses = self._masses
        arrays["masses"] = (
            masses.rows if isinstance(masses, Roster) else masses.leaves[:used]
        ).copy()
        return arrays, facts | {"largest": self._largest, "n_bad_priorities": self.n_bad_priorities}

    def restore(
        self, arrays: Mapping[str, Array], facts: Mapping[str, Any], read: ReadChunks
    ) -> None:
        """Restore the replay from its `state`; every later draw is bit-identical."""
        placed_spans, cleared = self._ring.restore(arrays, facts, read)
        self._largest = float(facts["largest"])
        self.n_bad_priorities = int(facts["n_bad_priorities"])
        for placed in placed_spans:
            self._write(placed)
        if isinstance(self._masses, Roster):
            self._masses.restore(arrays["masses"])
        else:
            masses = np.zeros(self.capacity)
            masses[: len(arrays["masses"])] = arrays["masses"]
            self._masses.set_range(0, masses)
        for edit in cleared:
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
        """Apply an edit; returns how many rows became sampleable."""
        self.n_edits += 1
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
        ints = facts.view(np.int32)
        return DrawnRows(
            np.stack([rows, rows + (ints[..., REACH] & 0xFFFF)]),
            np.ones(rows.shape, np.float32),
            facts[..., RETURN].copy(),
            facts[..., DISCOUNT].copy(),
            ints[..., ACTION].copy(),
            ints[..., STAMP].copy(),
        )

    def _gather(self, drawn: DrawnRows) -> Batch:
        layout = self.layout
        places = drawn.places
        rows = places[0]
        stacks = places
        if self.needs.stack > 1:
            stacks = stack_rows(places, self._whole[places, REACH] >> 16, self.needs.stack)
        # Observations are at [0], next observations at [1].
        obs = {name: self._columns[name].take(stacks, axis=0) for name in layout.obs}
        masks = None
        if "action_mask" in self._columns:
            masks = self._columns["action_mask"].take(places, axis=0)
        return Batch(
            obs={name: both[0] for name, both in obs.items()},
            action=drawn.action if layout.discrete else self._columns["action"].take(rows, axis=0),
            reward=drawn.returns,
            next_obs={name: both[1] for name, both in obs.items()},
            discount=drawn.discount,
            weight=drawn.weight,
            action_mask=None if masks is None else masks[0],
            next_action_mask=None if masks is None else masks[1],
            extras={name: self._columns[name].take(rows, axis=0) for name in layout.extras},
        )


# --- The balance of samples and inserts -----------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LimiterConfig:
    """How often a step is sampled, on average, before it is evicted from the replay."""

    samples_per_insert: float = 8.0
    """Raise for sample efficiency, lower for speed."""
    min_inserts: int = 1_000
    """Steps inserted before the first update; `samples_per_insert` does not apply to them."""
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
    """Counts inserted and sampled rows; computes the updates due and whether actors may continue.

    Players never wait: their steps are counted, but `may_insert` applies to actors only.
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
        """Count rows that updates have consumed."""
        self._n_sampled += n_rows

    @property
    def may_insert(self) -> bool:
        """Whether actors may continue: the learner is less than `slack` steps behind them."""
        return self._owed() < self._config.slack * self._config.samples_per_insert

    def updates_due(self, batch: int) -> int:
        """How many updates of this batch size the steps inserted so far allow."""
        self._check(batch)
        # The tolerance is for rounding: 0.29 * 100 is 28.999999999999996.
        return max(0, math.floor(self._owed() / batch + 1e-9))

    def state(self) -> dict[str, int]:
        """The state that `restore` needs."""
        return {"n_inserted": self._n_inserted, "n_sampled": self._n_sampled}

    def restore(self, facts: Mapping[str, int]) -> None:
        """Resume from what `state` returned."""
        self._n_inserted = int(facts["n_inserted"])
        self._n_sampled = int(facts["n_sampled"])

    def _owed(self) -> float:
        beyond = max(0, self._n_inserted - self._config.min_inserts)
        return beyond * self._config.samples_per_insert - self._n_sampled

    def _check(self, batch: int) -> None:
        """ConfigError if the settings deadlock: actors would wait while no whole batch is due."""
        config = self._config
        if config.slack * config.samples_per_insert < batch:
            raise ConfigError(
                f"a slack of {config.slack} steps allows "
                f"{config.slack * config.samples_per_insert:g} samples, less than one batch of "
                f"{batch}, so learner and actors would wait for each other; "
                f"give a slack of at least {math.ceil(batch / config.samples_per_insert)}"
            )


# --- The learner's source of batches for one compiled call; the other source is `RolloutQueue` ----


_REPLAY_STREAM = 2
"""The replay's key among the random streams derived from a run's root seed."""


@dataclass(slots=True)
class ReplaySource:
    """A replay with its limiter; limiter None allows unlimited sampling, to train from a store.

    It has the same interface as `RolloutQueue`, so some of its methods do nothing.
    """

    is_on_policy: ClassVar[bool] = False
    """Whether it accepts only experience played with the newest weights."""
    replay: HostReplay
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

    def insert(self, chunk: Chunk) -> int:
        self.replay.insert(chunk)
        self._note(chunk)
        if max(len(self._bot_rows), len(self._pieces)) > 2 * self.replay.n_chunks:
            self._drop_evicted()
        if self.limiter is not None:
            self.limiter.inserted(chunk.meta.n_steps)
        return chunk.meta.n_steps

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
        self._drawn = self.replay.draw(
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
        n_steps = self.replay.n_steps_inserted
        if self.limits is None or n_steps >= 2 * self.measured_steps:
            self.limits = self.replay.limits(players)
            self.measured_steps = n_steps
            self._weighed = None
        self.weigh(players)

    def weigh(self, players: Mapping[uuid.UUID, bytes]) -> None:
        """Find the weights, by the players of sessions, if the steps have changed."""
        if self._weighed != self.replay.n_edits:
            self._drop_evicted()
            self._scales = self.replay.reward_scales(players, self.limits)
            n_unbelieved = sum(not scale for scale in self._scales.values())
            self.metrics = {"unbelieved_players": n_unbelieved} if n_unbelieved else {}
            self.weights = self.replay.row_weights(
                players,
                self._bot_rows,
                people_share=self.people_share,
                best_rows=self._best_rows(players),
                reward_scales=self._scales,
            )
            self._weighed = self.replay.n_edits

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
