"""The replay buffer on a device: rows, windows and masses are JAX arrays, used without host copies.

`sample` and `write_back` are pure functions of a `DeviceRing`: call them inside a jitted
`lax.scan`, between the gradient steps. Inserts are sent in blocks of a fixed size, so that chunks
of any length use one compiled program.
"""

import uuid
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from understudy.algorithm import Batch, Transitions
from understudy.core.errors import ConfigError
from understudy.core.tensors import Array
from understudy.experience.chunk import Chunk, ChunkId
from understudy.experience.game import GameSpec
from understudy.learn.replay import FIRST_PRIORITIES, saved_priorities
from understudy.learn.ring import Edit, Placed, Ring
from understudy.learn.rows import RowLayout
from understudy.replay import Drawn, ReadChunks, ReplayConfig

# --- The sum tree: as in `sum_tree`, but usable inside a compiled scan ----------------------------


WIDTH = 16
NO_ROW = 1 << 30
"""A row outside every tree: writes to it are dropped at every level."""

Levels = tuple[jax.Array, ...]
"""Leaves first; each level sums 16 entries of the previous one; the last has 16 entries."""

_UPPER = np.triu(np.ones((WIDTH, WIDTH), np.float32))


def empty_levels(capacity: int) -> Levels:
    """A tree of `capacity` rows, all with mass 0."""
    sizes = [-(-capacity // WIDTH) * WIDTH]
    while sizes[-1] > WIDTH:
        sizes.append(-(-(sizes[-1] // WIDTH) // WIDTH) * WIDTH)
    return tuple(jnp.zeros(size, jnp.float32) for size in sizes)


def set_leaves(levels: Levels, rows: jax.Array, masses: jax.Array) -> Levels:
    """The tree with these masses set; rows that are NO_ROW are ignored."""
    changed = [levels[0].at[rows].set(masses, mode="drop")]
    for level in levels[1:]:
        rows = rows // WIDTH
        children = changed[-1].reshape(-1, WIDTH).at[rows].get(mode="clip")
        changed.append(level.at[rows].set(_sum(children), mode="drop"))
    return tuple(changed)


def levels_of(leaves: jax.Array, like: Levels) -> Levels:
    """The tree over these leaves, bit-identical to one built by `set_leaves`."""
    levels = [leaves]
    for level in like[1:]:
        sums = _sum(levels[-1].reshape(-1, WIDTH))
        levels.append(jnp.zeros_like(level).at[: len(sums)].set(sums))
    return tuple(levels)


def find(levels: Levels, key: jax.Array, n: int) -> jax.Array:
    """Draw n rows (int32) in proportion to their mass, one from each n-th of the total mass."""
    over, inside = jax.random.uniform(key, (2, n))
    remaining = (jnp.arange(n) + over) * (_sum(levels[-1]) / n)
    rows = jnp.zeros(n, jnp.int32)
    for depth, level in reversed(list(enumerate(levels))):
        children = level.reshape(-1, WIDTH)[rows]  # float32[n, 16]
        # XLA's cumulative sum is slow on a CPU. A triangular matrix product is fast, but must not
        # be rounded to TF32.
        prefix = jnp.matmul(children, _UPPER, precision=jax.lax.Precision.HIGHEST)
        if depth == 1 and len(levels) > 2:
            # float32 has 2^24 steps, too few to select one of a million rows. Within 256 rows, a
            # new random number is precise enough.
            remaining = inside * prefix[:, -1]
        has_mass = children > 0
        passes = (prefix > remaining[:, None]) & has_mass
        last = WIDTH - 1 - jnp.argmax(has_mass[:, ::-1], axis=1)
        child = jnp.where(passes.any(axis=1), jnp.argmax(passes, axis=1), last)
        below = jnp.take_along_axis(prefix - children, child[:, None], axis=1)[:, 0]
        remaining = jnp.maximum(remaining - below, 0.0)
        rows = rows * WIDTH + child.astype(jnp.int32)
    return rows


def _sum(children: jax.Array) -> jax.Array:
    """Sums over the last axis, added in a fixed order, so bit-identical however XLA fuses them."""
    while children.shape[-1] > 1:
        half = children.shape[-1] // 2
        children = children[..., :half] + children[..., half:]
    return children[..., 0]


# --- Rows -----------------------------------------------------------------------------------------


BLOCK = 256
"""Rows sent to the device at once; shorter spans are padded, longer ones split."""


class DeviceRing(NamedTuple):
    """A replay's data on the device; one entry per row."""

    columns: dict[str, jax.Array]  # the columns of the host replay, and the windows (`_FACTS`)
    levels: Levels
    priorities: tuple[jax.Array, ...]  # float32: BEFORE, NOW and COUNT (see `rows`)


_FACTS = {
    "returns": np.float32,
    "discount": np.float32,
    "weight": np.float32,
    "ahead": np.int32,
    "behind": np.int32,
    "stamp": np.int32,
}


def insert_block(ring: DeviceRing, rows: jax.Array, block: Mapping[str, jax.Array]) -> DeviceRing:
    """The ring with these columns set at these rows; rows that are NO_ROW are padding."""
    columns = {
        name: column.at[rows].set(block[name], mode="drop") for name, column in ring.columns.items()
    }
    return ring._replace(columns=columns)


def set_masses(
    ring: DeviceRing,
    rows: jax.Array,
    weight: jax.Array,
    priority: jax.Array,
    *,
    config: ReplayConfig,
) -> DeviceRing:
    """The ring with masses weight * priority^alpha; a NaN priority means the largest lately."""
    is_new = (priority >= 0) & (rows < NO_ROW) & (weight > 0)
    before, now, count = ring.priorities
    priority = jnp.where(priority >= 0, priority, jnp.maximum(before, now))
    priority = jnp.clip(priority, config.min_priority, config.max_priority)
    now = jnp.maximum(now, jnp.max(jnp.where(is_new, priority, 0.0)))
    count += is_new.sum(dtype=jnp.float32)  # exact up to 2^24
    is_over = count >= min(ring.levels[0].size, 1 << 24)
    return ring._replace(
        levels=set_leaves(ring.levels, rows, weight * priority**config.alpha),
        priorities=(
            jnp.where(is_over, now, before),
            jnp.where(is_over, 0.0, now),
            jnp.where(is_over, 0.0, count),
        ),
    )


def sample(
    ring: DeviceRing, key: jax.Array, beta: Any, *, layout: RowLayout, needs: Transitions
) -> tuple[Batch, Any]:
    """A batch and its rows, int32[batch]; stratified, with importance weights of at most 1."""
    rows = find(ring.levels, key, needs.batch)
    columns = ring.columns
    # Importance weights correct for priorities only, not for the weights of chunks, which are meant
    # to have an effect.
    mass = ring.levels[0][rows] / columns["weight"][rows]
    following = rows + columns["ahead"][rows]
    stacks, next_stacks = (_stacked(at, columns["behind"], needs.stack) for at in (rows, following))
    batch = Batch(
        obs={name: _frames(columns[name][stacks]) for name in layout.obs},
        action=columns["action"][rows],
        reward=columns["returns"][rows],
        next_obs={name: _frames(columns[name][next_stacks]) for name in layout.obs},
        discount=columns["discount"][rows],
        weight=(mass / mass.min()) ** -jnp.asarray(beta, jnp.float32),
        action_mask=columns["action_mask"][rows] if "action_mask" in columns else None,
        next_action_mask=columns["action_mask"][following] if "action_mask" in columns else None,
        extras={name: columns[name][rows] for name in layout.extras},
    )
    return batch, rows


def write_back(
    ring: DeviceRing, rows: jax.Array, priorities: jax.Array, *, config: ReplayConfig
) -> DeviceRing:
    """The ring with new priorities of these rows; NaN, infinite and negative ones are ignored."""
    is_good = (
        (priorities >= 0) & (priorities < jnp.inf) & (ring.levels[0].at[rows].get(mode="clip") > 0)
    )
    weight = ring.columns["weight"].at[rows].get(mode="clip")
    return set_masses(ring, jnp.where(is_good, rows, NO_ROW), weight, priorities, config=config)


def _frames(observations: jax.Array) -> jax.Array:
    """The same frames; keeps XLA from converting the whole ring to floats to gather a few."""
    if observations.dtype != jnp.uint8:
        return observations
    frames: jax.Array = jax.lax.optimization_barrier(observations)
    return frames


def _stacked(rows: jax.Array, behind: jax.Array, stack: int) -> jax.Array:
    if stack == 1:
        return rows
    return rows[:, None] - jnp.minimum(jnp.arange(stack - 1, -1, -1), behind[rows][:, None])


# Compiled once for all replays of one shape.
_insert = jax.jit(insert_block, donate_argnums=0)
_set_masses = jax.jit(set_masses, donate_argnums=0, static_argnames="config")
_levels_of = jax.jit(levels_of)


@partial(jax.jit, static_argnames=("k", "layout", "needs"))
def _draw(
    ring: DeviceRing,
    key: jax.Array,
    beta: jax.Array,
    *,
    k: int,
    layout: RowLayout,
    needs: Transitions,
) -> tuple[Batch, jax.Array, jax.Array]:
    keys = jax.random.split(key, k)
    batches, rows = jax.lax.map(
        lambda batch_key: sample(ring, batch_key, beta, layout=layout, needs=needs), keys
    )
    return batches, rows, ring.columns["stamp"][rows]


@partial(jax.jit, donate_argnums=0, static_argnames="config")
def _feedback(
    ring: DeviceRing,
    rows: jax.Array,
    stamps: jax.Array,
    priorities: jax.Array,
    *,
    config: ReplayConfig,
) -> DeviceRing:
    rows = jnp.ravel(rows)
    stamps = jnp.ravel(stamps)
    priorities = jnp.ravel(priorities)
    is_same = ring.columns["stamp"].at[rows].get(mode="clip") == stamps
    return write_back(ring, rows, jnp.where(is_same, priorities, jnp.nan), config=config)


class DeviceReplay:
    """`HostReplay` on the device; `ring` may be carried through a scan and then assigned back."""

    def __init__(
        self, game: GameSpec, needs: Transitions, config: ReplayConfig | None = None
    ) -> None:
        self.needs = needs
        config = config or ReplayConfig()
        self._ring = Ring(game, needs, config.capacity)
        self._ring.fixed["form"] = "device"
        self.layout = self._ring.layout
        self.capacity = self._ring.capacity
        self._may_sample = np.zeros(self.capacity, np.bool_)
        columns = {
            name: (column.shape, np.dtype(jax.dtypes.canonicalize_dtype(column.dtype)))
            for name, column in self.layout.columns.items()
        }
        columns |= {name: ((), np.dtype(dtype)) for name, dtype in _FACTS.items()}
        self._kinds = columns
        self.ring = DeviceRing(
            {
                name: jnp.zeros((self.capacity, *shape), dtype)
                for name, (shape, dtype) in columns.items()
            },
            empty_levels(self.capacity),
            tuple(map(jnp.float32, FIRST_PRIORITIES)),
        )
        self.sample = partial(sample, layout=self.layout, needs=needs)
        self.write_back = partial(write_back, config=config)
        self._set_masses = partial(_set_masses, config=config)
        self._feedback = partial(_feedback, config=config)

    @property
    def n_sampleable(self) -> int:
        """Steps that may be drawn."""
        return int(np.count_nonzero(self._may_sample))

    @property
    def n_steps_inserted(self) -> int:
        """Steps ever inserted, including evicted ones."""
        return self._ring.n_steps_inserted

    def insert(self, chunk: Chunk, *, weight: float = 1.0) -> int:
        """Insert a chunk; returns how many steps became sampleable. An error changes nothing."""
        placed = self._ring.place(chunk, weight=weight)
        self._write(placed)
        return self._apply(placed.edits)

    def close(self, session: uuid.UUID) -> int:
        """End a session; returns how many steps became sampleable that waited for a next chunk."""
        return self._apply(self._ring.close(session))

    def evict(self, session: uuid.UUID, chunk_no: int) -> bool:
        """Evict a chunk, so that none of its rows is drawn again; returns whether it had any."""
        edits = self._ring.evict(session, chunk_no)
        self._apply(edits)
        return bool(edits)

    def chunk_ids(self) -> list[ChunkId]:
        """(session, chunk_no) of the chunks in the ring, oldest first."""
        return list(self._ring.spans)

    def needed_chunks(self) -> list[ChunkId]:
        """The chunks that `restore` needs besides the state, some of them twice."""
        return self._ring.needed_chunks()

    def chunks_of(self, rows: NDArray[np.int64]) -> list[ChunkId]:
        """The chunks that the transitions at these rows come from, each once."""
        return self._ring.chunks_of(rows)

    def draw(self, k: int, *, rng: np.random.Generator, beta: float = 0.4) -> Drawn:
        """k batches, as device arrays."""
        if not self._may_sample.any():
            raise ConfigError(
                "the replay has no sampleable steps to draw; insert chunks until n_sampleable is "
                "above 0"
            )
        key = jax.random.key(rng.integers(1 << 32))
        return Drawn(*_draw(self.ring, key, beta, k=k, layout=self.layout, needs=self.needs))

    def feedback(self, rows: Any, stamps: Any, priorities: Any) -> None:
        """Set new priorities of drawn rows; ignores evicted rows and invalid priorities."""
        if self.needs.prioritised and len(rows):
            self.ring = self._feedback(self.ring, rows, stamps, priorities)

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """The state that `restore` needs, besides the chunks themselves."""
        arrays, facts = self._ring.state()
        used = self._ring.used
        arrays["weights"] = np.asarray(self.ring.columns["weight"][:used])
        arrays["masses"] = np.asarray(self.ring.levels[0][:used])
        return arrays, facts | {"priorities": [float(number) for number in self.ring.priorities]}

    def restore(
        self, arrays: Mapping[str, Array], facts: Mapping[str, Any], read: ReadChunks
    ) -> None:
        """Restore the replay from its `state`; every later draw is bit-identical."""
        placed_spans, cleared = self._ring.restore(arrays, facts, read)
        for placed in placed_spans:
            self._write(placed)
        masses = np.zeros(self.capacity, np.float32)
        masses[: len(arrays["masses"])] = arrays["masses"]
        self._may_sample = masses > 0
        levels = _levels_of(jnp.asarray(masses), self.ring.levels)
        priorities = tuple(map(jnp.float32, saved_priorities(facts)))
        self.ring = self.ring._replace(levels=levels, priorities=priorities)
        self._apply(cleared)

    def _write(self, placed: Placed) -> None:
        span = placed.span
        windows = placed.windows
        facts = {
            "returns": windows.returns,
            "discount": windows.discount,
            "weight": windows.weight,
            "ahead": windows.ahead,
            "behind": windows.behind,
            "stamp": np.full(span.n_rows, span.stamp),
        }
        columns = {
            name: np.concatenate([part[name] for part in placed.parts])
            for name in self.layout.columns
        } | facts
        for first in range(0, span.n_rows, BLOCK):
            part = {name: column[first : first + BLOCK] for name, column in columns.items()}
            rows = span.start + first + np.arange(len(part["stamp"]))
            block = {
                name: _padded(part[name], shape, dtype)
                for name, (shape, dtype) in self._kinds.items()
            }
            self.ring = _insert(
                self.ring, _padded(rows, (), np.dtype(np.int32), fill=NO_ROW), block
            )

    def _apply(self, edits: Iterable[Edit]) -> int:
        """Apply edits in order; returns how many rows became sampleable."""
        changed: dict[str, list[Array]] = {"rows": [], "weight": [], "priority": []}
        n_sampleable = 0
        for edit in edits:
            may_sample = edit.weight > 0
            end = edit.start + len(edit.weight)
            n_sampleable += int(may_sample.sum())
            self._may_sample[edit.start : end] = may_sample
            changed["rows"].append(np.arange(edit.start, end))
            changed["weight"].append(edit.weight if self.needs.prioritised else may_sample)
            priority = edit.priority if self.needs.prioritised else None
            changed["priority"].append(np.ones(len(may_sample)) if priority is None else priority)
        if changed["rows"]:
            self._send_masses(*(np.concatenate(parts) for parts in changed.values()))
        return n_sampleable

    def _send_masses(self, rows: Array, weight: Array, priority: Array) -> None:
        # If a row occurs twice, a scatter may keep either value, so only its last value is sent.
        _, last = np.unique(rows[::-1], return_index=True)
        last = len(rows) - 1 - last
        for first in range(0, len(last), BLOCK):
            at = last[first : first + BLOCK]
            self.ring = self._set_masses(
                self.ring,
                _padded(rows[at], (), np.dtype(np.int32), fill=NO_ROW),
                _padded(weight[at], (), np.dtype(np.float32)),
                _padded(priority[at], (), np.dtype(np.float32)),
            )


def _padded(rows: Array, shape: tuple[int, ...], dtype: np.dtype[Any], *, fill: int = 0) -> Array:
    padded = np.full((BLOCK, *shape), fill, dtype)
    padded[: len(rows)] = rows
    return padded
