"""The replay buffer on the host, in NumPy and numba.

    insert(chunk) ─► ring of rows ─► draw(k) ─► batches[k, …] ─► feedback(rows, stamps, priorities)

Each observation is stored once. A row's n-step return, its discount and the row it bootstraps from
are computed on insertion, so that a draw is a look-up. `ring.Ring` decides which rows may be
sampled and when they are evicted.
"""

import math
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from understudy.algorithm import Batch, Transitions
from understudy.core.errors import ConfigError
from understudy.core.tensors import Array
from understudy.experience.chunk import Chunk, ChunkId
from understudy.experience.game import GameSpec
from understudy.learn.outliers import (
    Limits,
    believable,
    false_rows,
    obs_limits,
    reward_scales,
    reward_size,
    shared_weights,
)
from understudy.learn.ring import Edit, Placed, Ring
from understudy.learn.rows import (
    ACTION,
    BEFORE,
    DISCOUNT,
    PERIOD,
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
from understudy.replay import Drawn, ReadChunks, ReplayConfig

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


FIRST_PRIORITIES = (1.0, 0.0, 0.0)
"""BEFORE, NOW and COUNT before there are any priorities (see `rows`)."""


def saved_priorities(facts: Mapping[str, Any]) -> tuple[float, float, float]:
    """BEFORE, NOW and COUNT of a state."""
    if "priorities" not in facts:  # an earlier version had only one largest priority
        return float(facts["largest"]), 0.0, 0.0
    before, now, count = facts["priorities"]
    return before, now, count


class HostReplay:
    """The recent steps of one game, sampled uniformly or by priority."""

    def __init__(
        self, game: GameSpec, needs: Transitions, config: ReplayConfig | None = None
    ) -> None:
        self.config = config or ReplayConfig()
        self.needs = needs
        self.n_bad_priorities = 0
        """Priorities that were NaN, infinite or negative, and ignored."""
        self.n_edits = 0
        """Changes so far of which rows may be sampled."""
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
        rule = (self.config.alpha, self.config.min_priority, self.config.max_priority)
        self._rule = np.array([*rule, *FIRST_PRIORITIES, self.capacity])

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

    def sampleable_rows(self) -> Rows:
        """The rows that may be drawn, in the order of the ring; ConfigError if there are none."""
        self._check_sampleable()
        return np.flatnonzero(self._may_sample())

    def at(self, rows: Rows) -> Drawn:
        """The batches of these rows, [k, batch], with weights of 1."""
        drawn = self._look_up(rows)
        return Drawn(self._gather(drawn), rows, drawn.stamps)

    def _check_sampleable(self) -> None:
        if self.n_sampleable == 0:
            raise ConfigError(
                "the replay has no sampleable steps to draw; insert chunks until n_sampleable is "
                "above 0"
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
        self._check_sampleable()
        size = (k, batch or self.needs.batch)
        if isinstance(self._masses, Roster):
            return self.at(self._masses.draw(rng, size, row_weights))
        drawn = DrawnRows(*self._masses.draw(rng.random(size), beta=float(beta), lines=self._lines))
        if row_weights is not None:
            drawn = drawn._replace(weight=drawn.weight * row_weights[drawn.places[0]])
        return Drawn(self._gather(drawn), drawn.places[0], drawn.stamps)

    def feedback(
        self, rows: NDArray[np.int64], stamps: NDArray[np.int32], priorities: Array
    ) -> None:
        """Set new priorities of drawn rows; ignores evicted rows and invalid priorities."""
        if isinstance(self._masses, Roster):
            return
        self.n_bad_priorities += self._masses.feed_back(
            np.asarray(rows, np.int64).ravel(),
            stamps=np.asarray(stamps, np.int32).ravel(),
            priorities=np.asarray(priorities, np.float64).ravel(),
            lines=self._lines,
            rule=self._rule,
        )

    def needed_chunks(self) -> list[ChunkId]:
        """The chunks that `restore` needs besides the state, some of them twice."""
        return self._ring.needed_chunks()

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
        return arrays, facts | {
            "priorities": self._rule[BEFORE:PERIOD].tolist(),
            "n_bad_priorities": self.n_bad_priorities,
        }

    def restore(
        self, arrays: Mapping[str, Array], facts: Mapping[str, Any], read: ReadChunks
    ) -> None:
        """Restore the replay from its `state`; every later draw is bit-identical."""
        placed_spans, cleared = self._ring.restore(arrays, facts, read)
        self._rule[BEFORE:PERIOD] = saved_priorities(facts)
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
            self._masses.weigh(edit, rule=self._rule)
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
