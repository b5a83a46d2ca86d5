"""The replay a learner samples: the host form, in NumPy and numba.

    insert(chunk) ─► ring of rows ─► draw(k) ─► batches[k, ...] ─► feedback(rows, stamps, priorities)

Each observation is kept once. A row's return, discount factor and reach are computed when it enters, so that a draw
is a look-up. Which rows may be sampled, and what leaves when, is decided by `ring.Ring`.
"""

import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from understudy.core.algorithm import Batch, Transitions
from understudy.core.chunk import Chunk
from understudy.core.errors import ConfigError
from understudy.core.game import GameSpec
from understudy.core.tensors import Array
from understudy.learn.layout import RowLayout
from understudy.learn.replay_state import ReadChunks, RingReader, check_layout, layout_facts, ring_state
from understudy.learn.ring import ALIGNMENT, ChunkId, Edit, Placed, Ring, nothing_at
from understudy.learn.roster import Roster

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


# One row's small facts lie together, half a cache line, so that a draw fetches them at once.
_RETURN, _FACTOR, _ACTION, _REACH, _STAMP, _WEIGHT, _WIDTH = 0, 1, 2, 3, 4, 5, 8


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
        self._facts = np.zeros((self.capacity, _WIDTH), np.float32)
        self._whole = self._facts.view(np.int32)
        self._largest = 1.0

    def _sample_by_priority(self) -> None:
        # Half a second of import that uniform replays do without.
        from understudy.learn import compiled_rows
        from understudy.learn.compiled_windows import compiled_windows_of
        from understudy.learn.sum_tree import SumTree

        self._compiled = compiled_rows
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
        """How many starts became sampleable; a chunk that is Refused changes nothing."""
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"a chunk's weight is {weight}; give a number from 0, where 0 keeps it from being drawn")
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
            rows, weight = self._masses.draw(rng, size), np.ones(size, np.float32)
        else:
            values = (np.arange(size[1]) + rng.random(size)) * (self._masses.total / size[1])
            rows = self._masses.find(values)
            mass = self._masses.leaves.take(rows)
            # (n * p)^-beta over its largest in the batch: n and the total cancel.
            weight = np.power(mass / mass.min(axis=1, keepdims=True), -beta).astype(np.float32)
        facts = self._facts.take(rows, axis=0)
        return Drawn(self._gather(rows, facts, weight), rows, facts.view(np.int32)[..., _STAMP].copy())

    def feedback(self, rows: NDArray[np.int64], stamps: NDArray[np.int32], priorities: Array) -> None:
        """Give drawn rows new priorities; rows that have left meanwhile and priorities without sense are ignored."""
        if isinstance(self._masses, Roster):
            return
        rows, stamps = np.asarray(rows).ravel(), np.asarray(stamps).ravel()
        priorities = np.asarray(priorities, np.float64).ravel()
        is_good = (priorities >= 0) & (priorities < np.inf)
        n_good = np.count_nonzero(is_good)
        if n_good < len(rows):
            self.n_bad_priorities += len(rows) - int(n_good)
            rows, stamps, priorities = rows[is_good], stamps[is_good], priorities[is_good]
        if not len(rows):
            return
        rows, weight = self._compiled.accepted(self._facts, rows, stamps, stamp_at=_STAMP, weight_at=_WEIGHT)
        self._masses.set(rows, self._mass(weight, priorities), only_positive=True)

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """What `restore` needs besides the chunks themselves."""
        arrays, facts = ring_state(self._ring)
        used = self._ring.used
        arrays["weights"] = np.zeros(used, np.float32)
        for one in self._ring.stretches.values():  # between them lies what was there before, which nobody reads
            rows = slice(one.start, one.start + one.n_rows)
            arrays["weights"][rows] = self._facts[rows, _WEIGHT]
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
        stretch, windows, at = placed.stretch, placed.windows, placed.stretch.start
        for part in placed.parts:
            end = at + len(part["action"])
            for name, column in self._columns.items():
                column[at:end] = part[name]
            if self.layout.discrete:
                self._whole[at:end, _ACTION] = part["action"]
            at = end
        facts, whole = self._facts[stretch.start : at], self._whole[stretch.start : at]
        facts[:, _RETURN], facts[:, _FACTOR], facts[:, _WEIGHT] = windows.returns, windows.factor, placed.weight
        whole[:, _REACH] = windows.ahead | windows.behind << 16
        whole[:, _STAMP] = stretch.stamp

    def _apply(self, edit: Edit) -> int:
        """Carry out an edit; how many rows it made sampleable."""
        before = len(self._masses)
        if isinstance(self._masses, Roster):
            self._masses.set_range(edit.start, edit.weight > 0)
        elif edit.priority is None:
            self._masses.clear_range(edit.start, len(edit.weight))
        else:
            self._masses.set_range(edit.start, self._mass(edit.weight, edit.priority))
        return max(0, len(self._masses) - before)

    def _mass(self, weight: Array, priority: Array) -> NDArray[np.float64]:
        low, high = self.config.min_priority, self.config.max_priority
        cleaned, largest = self._compiled.clean(priority, self._largest, low=low, high=high)
        self._largest = max(self._largest, largest)
        # NumPy's power runs on whole vectors, a compiled loop's on one number at a time.
        return np.asarray(weight * np.power(cleaned, self.config.alpha))

    def _gather(self, rows: NDArray[np.int64], facts: Array, weight: Array) -> Batch:
        whole, layout = facts.view(np.int32), self.layout
        following = rows + (whole[..., _REACH] & 0xFFFF)
        if self.needs.stack == 1:
            seen, seen_next = rows, following
        else:
            seen = _stacked(rows, whole[..., _REACH] >> 16, self.needs.stack)
            next_whole = self._facts.take(following, axis=0).view(np.int32)
            seen_next = _stacked(following, next_whole[..., _REACH] >> 16, self.needs.stack)
        legal = self._columns.get("legal")
        return Batch(
            obs={name: self._columns[name].take(seen, axis=0) for name in layout.obs},
            action=whole[..., _ACTION].copy() if layout.discrete else self._columns["action"].take(rows, axis=0),
            reward=facts[..., _RETURN].copy(),
            next_obs={name: self._columns[name].take(seen_next, axis=0) for name in layout.obs},
            factor=facts[..., _FACTOR].copy(),
            weight=weight,
            legal=None if legal is None else legal.take(rows, axis=0),
            next_legal=None if legal is None else legal.take(following, axis=0),
            extras={name: self._columns[name].take(rows, axis=0) for name in layout.extras},
        )


def _stacked(rows: NDArray[np.int64], behind: Array, stack: int) -> NDArray[np.int64]:
    """The rows of each stack, oldest first; the episode's first row is repeated."""
    back = np.minimum(np.arange(stack - 1, -1, -1), behind[..., None])
    return np.asarray(rows[..., None] - back)
