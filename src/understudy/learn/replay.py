"""The replay a learner samples: the host form, in NumPy and numba.

    insert(chunk) ─► ring of rows ─► draw(k) ─► batches[k, ...] ─► feedback(rows, stamps, priorities)

Each observation is kept once. A row's return, discount factor and reach are computed when it enters, so that a draw
is a look-up. Which rows may be sampled, and what leaves when, is decided by `ring.Ring`.
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from understudy.core.algorithm import Batch, Transitions
from understudy.core.chunk import Chunk, ChunkId
from understudy.core.errors import ConfigError
from understudy.core.game import GameSpec
from understudy.core.tensors import Array
from understudy.learn.layout import RowLayout, aligned_zeros
from understudy.learn.ring import (
    ALIGNMENT,
    Edit,
    Placed,
    ReadChunks,
    Ring,
    RingReader,
    check_layout,
    layout_facts,
    nothing_at,
    ring_state,
)
from understudy.learn.windows import ACTION, FACTOR, REACH, RETURN, STAMP, WEIGHT, WIDTH, stack_rows

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
        gaps, end = self._place[rows], self._n - len(rows)
        self._place[rows] = -1
        last = self._rows[end : self._n]
        movers, gaps = last[self._place[last] >= 0], gaps[gaps < end]
        self._rows[gaps], self._place[movers] = movers, gaps
        self._n = end


if TYPE_CHECKING:
    from understudy.learn.sum_tree import SumTree


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """How much a replay holds, and how strongly priorities count."""

    capacity: int = 100_000
    """Rows; a chunk takes its steps, one row for each episode's end, and up to n_step + stack - 2 of the one before."""
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


class Found(NamedTuple):
    """Drawn rows and what is known of each, in arrays [k, batch]."""

    places: NDArray[np.int64]  # [2, k, batch]: the rows, and the rows to bootstrap from
    weight: NDArray[np.float32]
    returns: NDArray[np.float32]
    factor: NDArray[np.float32]
    action: NDArray[np.int32]
    stamps: NDArray[np.int32]


class HostReplay:
    """A window of recent steps of one game, sampled uniformly or by priority."""

    def __init__(self, game: GameSpec, needs: Transitions, config: ReplayConfig | None = None) -> None:
        self.config = config or ReplayConfig()
        self.needs = needs
        self.layout = RowLayout(game, needs)
        self.capacity = -(-self.config.capacity // ALIGNMENT) * ALIGNMENT
        self.n_bad_priorities = 0
        """Priorities that were NaN, infinite or negative, and left out."""
        self._game = game
        self._masses: SumTree | Roster = Roster(self.capacity)
        self._ring = Ring(self.capacity, needs)
        if needs.prioritised:
            self._sample_by_priority()
        self._columns = {
            name: np.zeros((self.capacity, *kept.shape), kept.dtype)
            for name, kept in self.layout.columns.items()
            if not (name == "action" and self.layout.discrete)
        }
        self._facts = aligned_zeros((self.capacity, WIDTH), np.dtype(np.float32))
        self._whole = self._facts.view(np.int32)
        obs = self._columns[self.layout.obs[0]]
        raw, obs = (column.view(np.uint8).reshape(self.capacity, -1) for column in (self._facts, obs))
        self._lines = self._facts, self._whole, raw, obs
        self._rule = np.array([self.config.alpha, self.config.min_priority, self.config.max_priority])
        self._largest = 1.0

    def _sample_by_priority(self) -> None:
        # Half a second of import that uniform replays do without.
        from understudy.learn.sum_tree import SumTree, compiled_windows_of

        self._masses = SumTree(self.capacity)
        self._ring = Ring(self.capacity, self.needs, windows=compiled_windows_of)

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

        Its steps are drawn `weight` times as often as others, and no importance weight takes that back.
        """
        placed = self._ring.place(chunk, self.layout.take(chunk), weight=weight)
        self._write(placed)
        return sum(self._apply(edit) for edit in placed.edits)

    def close(self, session: uuid.UUID) -> int:
        """How many waiting starts became sampleable, shortened, because no more chunks of this session come."""
        return sum(self._apply(edit) for edit in self._ring.close(session))

    def evict(self, session: uuid.UUID, chunk_no: int) -> bool:
        """Whether rows of this chunk were here; none is drawn any more."""
        edits = self._ring.evict(session, chunk_no)
        for edit in edits:
            self._apply(edit)
        return bool(edits)

    def held(self) -> list[ChunkId]:
        """(session, chunk_no) of what is in the ring, oldest first."""
        return list(self._ring.stretches)

    def chunks_of(self, rows: NDArray[np.int64]) -> list[ChunkId]:
        """The chunks that what was drawn at these rows came from, each once."""
        return self._ring.chunks_of(rows)

    def draw(self, k: int, *, rng: np.random.Generator, beta: float = 0.4, batch: int | None = None) -> Drawn:
        """k batches; prioritised ones are stratified, with importance weights of at most 1."""
        if self.n_sampleable == 0:
            raise ConfigError(
                "a draw from a replay without sampleable steps; insert chunks first, and see n_sampleable"
            )
        size = (k, batch or self.needs.batch)
        if isinstance(self._masses, Roster):
            found = self._look_up(self._masses.draw(rng, size))
        else:
            found = Found(*self._masses.draw(rng.random(size), beta=float(beta), lines=self._lines))
        return Drawn(self._gather(found), found.places[0], found.stamps)

    def feedback(self, rows: NDArray[np.int64], stamps: NDArray[np.int32], priorities: Array) -> None:
        """Give drawn rows new priorities; rows that have left meanwhile and priorities without sense are ignored."""
        if isinstance(self._masses, Roster):
            return
        n_bad, largest = self._masses.feed_back(
            np.asarray(rows, np.int64).ravel(), stamps=np.asarray(stamps, np.int32).ravel(),
            priorities=np.asarray(priorities, np.float64).ravel(), lines=self._lines, rule=self._rule,
        )  # fmt: skip
        self.n_bad_priorities += n_bad
        self._largest = max(self._largest, largest)

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """What `restore` needs besides the chunks themselves."""
        arrays, facts = ring_state(self._ring)
        used = self._ring.used
        arrays["weights"] = np.zeros(used, np.float32)
        for one in self._ring.stretches.values():  # between them lies what was there before, which nobody reads
            rows = slice(one.start, one.start + one.n_rows)
            arrays["weights"][rows] = self._facts[rows, WEIGHT]
        masses = self._masses
        arrays["masses"] = (masses.rows if isinstance(masses, Roster) else masses.leaves[:used]).copy()
        facts |= self._layout_facts() | {"largest": self._largest, "n_bad_priorities": self.n_bad_priorities}
        return arrays, facts

    def restore(self, arrays: Mapping[str, Array], facts: Mapping[str, Any], read: ReadChunks) -> None:
        """Become the replay that `state` described: every later draw has the same bits."""
        check_layout(facts, self._layout_facts())
        self._largest, self.n_bad_priorities = float(facts["largest"]), int(facts["n_bad_priorities"])
        reader = RingReader(self._ring, self.layout, self.needs)
        for placed in reader.placed(arrays, facts, read, weight=arrays["weights"]):
            self._write(placed)
        if isinstance(self._masses, Roster):
            self._masses.restore(arrays["masses"])
        else:
            masses = np.zeros(self.capacity)
            masses[: len(arrays["masses"])] = arrays["masses"]
            self._masses.set_range(0, masses)
        for stretch in reader.gone:
            self._apply(nothing_at(stretch.start, stretch.n_rows))

    def _layout_facts(self) -> dict[str, Any]:
        return layout_facts(self.needs, capacity=self.capacity, schema=self._game.schema)

    def _write(self, placed: Placed) -> None:
        stretch, at = placed.stretch, placed.stretch.start
        self._facts[at : at + stretch.n_rows] = placed.windows.facts
        self._whole[at : at + stretch.n_rows, STAMP] = stretch.stamp
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
            self._masses.clear_range(edit.start, len(edit.weight))
        else:
            largest = self._masses.weigh(edit, rule=self._rule, missing=self._largest)
            self._largest = max(self._largest, largest)
        return int(np.count_nonzero(edit.weight))

    def _look_up(self, rows: NDArray[np.int64]) -> Found:
        facts = self._facts.take(rows, axis=0)
        whole = facts.view(np.int32)
        return Found(
            np.stack([rows, rows + (whole[..., REACH] & 0xFFFF)]), np.ones(rows.shape, np.float32),
            facts[..., RETURN].copy(), facts[..., FACTOR].copy(), whole[..., ACTION].copy(), whole[..., STAMP].copy(),
        )  # fmt: skip

    def _gather(self, found: Found) -> Batch:
        layout, places, rows = self.layout, found.places, found.places[0]
        seen = places
        if self.needs.stack > 1:
            seen = stack_rows(places, self._whole[places, REACH] >> 16, self.needs.stack)
        obs = {name: self._columns[name].take(seen, axis=0) for name in layout.obs}  # and the next ones, at [1]
        legal = self._columns["legal"].take(places, axis=0) if "legal" in self._columns else None
        return Batch(
            obs={name: both[0] for name, both in obs.items()},
            action=found.action if layout.discrete else self._columns["action"].take(rows, axis=0),
            reward=found.returns,
            next_obs={name: both[1] for name, both in obs.items()},
            factor=found.factor,
            weight=found.weight,
            legal=None if legal is None else legal[0],
            next_legal=None if legal is None else legal[1],
            extras={name: self._columns[name].take(rows, axis=0) for name in layout.extras},
        )
