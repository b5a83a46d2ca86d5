"""The replay in its device form: rows, windows and masses are JAX arrays, and a whole update stays
on the device.

`sample` and `write_back` are pure functions of a `DeviceRing`: call them inside a jitted
`lax.scan`, between the gradient steps. Inserts come in blocks of a fixed size, so that chunks of
any length need one compiled program.
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
from understudy.learn.replay import Drawn, ReplayConfig
from understudy.learn.ring import Edit, Placed, ReadChunks, Ring
from understudy.learn.rows import RowLayout

# --- The sum tree: the rules of `sum_tree`, usable inside a compiled scan -------------------------


WIDTH = 16
NOWHERE = 1 << 30
"""A row that no tree has: what is written there is dropped, at every level."""

Levels = tuple[jax.Array, ...]
"""Leaves first; each further level holds the sums of 16 entries of the one before; the last has
16 entries."""

_UPPER = np.triu(np.ones((WIDTH, WIDTH), np.float32))


def empty_levels(capacity: int) -> Levels:
    """A tree of `capacity` rows without masses."""
    sizes = [-(-capacity // WIDTH) * WIDTH]
    while sizes[-1] > WIDTH:
        sizes.append(-(-(sizes[-1] // WIDTH) // WIDTH) * WIDTH)
    return tuple(jnp.zeros(size, jnp.float32) for size in sizes)


def set_leaves(levels: Levels, rows: jax.Array, masses: jax.Array) -> Levels:
    """The tree in which these rows have these masses; rows that are NOWHERE are left out."""
    changed = [levels[0].at[rows].set(masses, mode="drop")]
    for level in levels[1:]:
        rows = rows // WIDTH
        children = changed[-1].reshape(-1, WIDTH).at[rows].get(mode="clip")
        changed.append(level.at[rows].set(_sum(children), mode="drop"))
    return tuple(changed)


def levels_of(leaves: jax.Array, like: Levels) -> Levels:
    """The tree over these leaves, with the bits that any history of `set_leaves` would have
    given it."""
    levels = [leaves]
    for level in like[1:]:
        sums = _sum(levels[-1].reshape(-1, WIDTH))
        levels.append(jnp.zeros_like(level).at[: len(sums)].set(sums))
    return tuple(levels)


def find(levels: Levels, key: jax.Array, n: int) -> jax.Array:
    """n rows, int32, drawn in proportion to their masses, one from each n-th part of the total."""
    over, inside = jax.random.uniform(key, (2, n))
    left = (jnp.arange(n) + over) * (_sum(levels[-1]) / n)
    rows = jnp.zeros(n, jnp.int32)
    for depth, level in reversed(list(enumerate(levels))):
        children = level.reshape(-1, WIDTH)[rows]  # float32[n, 16]
        # XLA's cumulative sum is slow on a CPU; a product with a triangle is not, but must not be
        # rounded to TF32.
        prefix = jnp.matmul(children, _UPPER, precision=jax.lax.Precision.HIGHEST)
        if depth == 1 and len(levels) > 2:
            # float32 has 2^24 steps: too few to point into a million rows. Inside 256 rows a fresh
            # number points well.
            left = inside * prefix[:, -1]
        has_mass = children > 0
        passes = (prefix > left[:, None]) & has_mass
        last = WIDTH - 1 - jnp.argmax(has_mass[:, ::-1], axis=1)
        child = jnp.where(passes.any(axis=1), jnp.argmax(passes, axis=1), last)
        below = jnp.take_along_axis(prefix - children, child[:, None], axis=1)[:, 0]
        left = jnp.maximum(left - below, 0.0)
        rows = rows * WIDTH + child.astype(jnp.int32)
    return rows


def _sum(children: jax.Array) -> jax.Array:
    """Sums over the last axis in one fixed order, so that equal leaves give equal bits, whatever
    XLA fuses."""
    while children.shape[-1] > 1:
        half = children.shape[-1] // 2
        children = children[..., :half] + children[..., half:]
    return children[..., 0]


# --- Rows -----------------------------------------------------------------------------------------


BLOCK = 256
"""Rows that travel to the device at once; shorter stretches are padded, longer ones cut."""


class DeviceRing(NamedTuple):
    """Everything a replay keeps on the device; one entry per row."""

    columns: dict[str, jax.Array]  # what the host form keeps, and the windows: see `_FACTS`
    levels: Levels
    largest: jax.Array  # float32, the largest priority seen


_FACTS = {
    "returns": np.float32,
    "discount": np.float32,
    "weight": np.float32,
    "ahead": np.int32,
    "behind": np.int32,
    "stamp": np.int32,
}


def insert_block(ring: DeviceRing, rows: jax.Array, block: Mapping[str, jax.Array]) -> DeviceRing:
    """The ring with these columns at these rows; rows that are NOWHERE are padding."""
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
    """The ring in which these rows weigh weight * priority^alpha; a NaN priority is the largest
    seen."""
    priority = jnp.where(priority >= 0, priority, ring.largest)
    priority = jnp.clip(priority, config.min_priority, config.max_priority)
    largest = jnp.maximum(ring.largest, jnp.max(jnp.where(rows < NOWHERE, priority, 0.0)))
    return ring._replace(
        levels=set_leaves(ring.levels, rows, weight * priority**config.alpha), largest=largest
    )


def sample(
    ring: DeviceRing, key: jax.Array, beta: Any, *, layout: RowLayout, needs: Transitions
) -> tuple[Batch, Any]:
    """A batch and its rows, int32[batch]; stratified, with importance weights of at most 1."""
    rows = find(ring.levels, key, needs.batch)
    columns = ring.columns
    mass = (
        ring.levels[0][rows] / columns["weight"][rows]
    )  # only what priorities did is undone, weights are meant
    following = rows + columns["ahead"][rows]
    seen, seen_next = (_stacked(at, columns["behind"], needs.stack) for at in (rows, following))
    batch = Batch(
        obs={name: _frames(columns[name][seen]) for name in layout.obs},
        action=columns["action"][rows],
        reward=columns["returns"][rows],
        next_obs={name: _frames(columns[name][seen_next]) for name in layout.obs},
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
    """The ring in which these rows have new priorities; those that are NaN, infinite or negative
    are left out."""
    is_good = (
        (priorities >= 0) & (priorities < jnp.inf) & (ring.levels[0].at[rows].get(mode="clip") > 0)
    )
    weight = ring.columns["weight"].at[rows].get(mode="clip")
    return set_masses(ring, jnp.where(is_good, rows, NOWHERE), weight, priorities, config=config)


def _frames(observations: jax.Array) -> jax.Array:
    """Keeps XLA from turning the whole ring of frames into floats before it gathers a few of
    them."""
    if observations.dtype != jnp.uint8:
        return observations
    held: jax.Array = jax.lax.optimization_barrier(observations)
    return held


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
        lambda one: sample(ring, one, beta, layout=layout, needs=needs), keys
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
    """The contract of `HostReplay` on the device; `ring` may be carried through a scan and put
    back."""

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
            name: (kept.shape, np.dtype(jax.dtypes.canonicalize_dtype(kept.dtype)))
            for name, kept in self.layout.columns.items()
        }
        columns |= {name: ((), np.dtype(dtype)) for name, dtype in _FACTS.items()}
        self._kinds = columns
        self.ring = DeviceRing(
            {
                name: jnp.zeros((self.capacity, *shape), dtype)
                for name, (shape, dtype) in columns.items()
            },
            empty_levels(self.capacity),
            jnp.float32(1.0),
        )
        self.sample = partial(sample, layout=self.layout, needs=needs)
        self.write_back = partial(write_back, config=config)
        self._set_masses = partial(_set_masses, config=config)
        self._feedback = partial(_feedback, config=config)

    @property
    def n_sampleable(self) -> int:
        """Starts that may be drawn."""
        return int(np.count_nonzero(self._may_sample))

    @property
    def n_steps_inserted(self) -> int:
        """Steps ever inserted, those that have left included."""
        return self._ring.n_steps_inserted

    def insert(self, chunk: Chunk, *, weight: float = 1.0) -> int:
        """How many starts became sampleable; a chunk that is Refused changes nothing."""
        placed = self._ring.place(chunk, weight=weight)
        self._write(placed)
        return self._apply(placed.edits)

    def close(self, session: uuid.UUID) -> int:
        """How many waiting starts became sampleable, shortened, because no more chunks of this
        session come."""
        return self._apply(self._ring.close(session))

    def evict(self, session: uuid.UUID, chunk_no: int) -> bool:
        """Whether rows of this chunk were here; none is drawn any more."""
        edits = self._ring.evict(session, chunk_no)
        self._apply(edits)
        return bool(edits)

    def chunks_of(self, rows: NDArray[np.int64]) -> list[ChunkId]:
        """The chunks that what was drawn at these rows came from, each once."""
        return self._ring.chunks_of(rows)

    def draw(self, k: int, *, rng: np.random.Generator, beta: float = 0.4) -> Drawn:
        """k batches, as device arrays."""
        if not self._may_sample.any():
            raise ConfigError(
                "a draw from a replay without sampleable steps; insert chunks first, and see "
                "n_sampleable"
            )
        key = jax.random.key(rng.integers(1 << 32))
        return Drawn(*_draw(self.ring, key, beta, k=k, layout=self.layout, needs=self.needs))

    def feedback(self, rows: Any, stamps: Any, priorities: Any) -> None:
        """Give drawn rows new priorities; rows that have left meanwhile and priorities without
        sense are ignored."""
        if self.needs.prioritised:
            self.ring = self._feedback(self.ring, rows, stamps, priorities)

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """What `restore` needs besides the chunks themselves."""
        arrays, facts = self._ring.state()
        used = self._ring.used
        arrays["weights"] = np.asarray(self.ring.columns["weight"][:used])
        arrays["masses"] = np.asarray(self.ring.levels[0][:used])
        return arrays, facts | {"largest": float(self.ring.largest)}

    def restore(
        self, arrays: Mapping[str, Array], facts: Mapping[str, Any], read: ReadChunks
    ) -> None:
        """Become the replay that `state` described: every later draw has the same bits."""
        written, gone = self._ring.restore(arrays, facts, read)
        for placed in written:
            self._write(placed)
        masses = np.zeros(self.capacity, np.float32)
        masses[: len(arrays["masses"])] = arrays["masses"]
        self._may_sample = masses > 0
        levels = _levels_of(jnp.asarray(masses), self.ring.levels)
        self.ring = self.ring._replace(levels=levels, largest=jnp.float32(facts["largest"]))
        self._apply(gone)

    def _write(self, placed: Placed) -> None:
        span = placed.span
        windows = placed.windows
        small = {
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
        } | small
        for first in range(0, span.n_rows, BLOCK):
            here = {name: column[first : first + BLOCK] for name, column in columns.items()}
            rows = span.start + first + np.arange(len(here["stamp"]))
            block = {
                name: _padded(here[name], shape, dtype)
                for name, (shape, dtype) in self._kinds.items()
            }
            self.ring = _insert(
                self.ring, _padded(rows, (), np.dtype(np.int32), fill=NOWHERE), block
            )

    def _apply(self, edits: Iterable[Edit]) -> int:
        """Carry out edits, of which a later one wins; how many rows they made sampleable."""
        changed: dict[str, list[Array]] = {"rows": [], "weight": [], "priority": []}
        became = 0
        for edit in edits:
            may = edit.weight > 0
            here = slice(edit.start, edit.start + len(edit.weight))
            became += int(may.sum())
            self._may_sample[here] = may
            changed["rows"].append(np.arange(here.start, here.stop))
            changed["weight"].append(edit.weight if self.needs.prioritised else may)
            priority = edit.priority if self.needs.prioritised else None
            changed["priority"].append(np.ones(len(may)) if priority is None else priority)
        if changed["rows"]:
            self._send_masses(*(np.concatenate(parts) for parts in changed.values()))
        return became

    def _send_masses(self, rows: Array, weight: Array, priority: Array) -> None:
        # A scatter with a row twice may keep either, so that only the last of each travels.
        _, last = np.unique(rows[::-1], return_index=True)
        last = len(rows) - 1 - last
        for first in range(0, len(last), BLOCK):
            at = last[first : first + BLOCK]
            self.ring = self._set_masses(
                self.ring,
                _padded(rows[at], (), np.dtype(np.int32), fill=NOWHERE),
                _padded(weight[at], (), np.dtype(np.float32)),
                _padded(priority[at], (), np.dtype(np.float32)),
            )


def _padded(rows: Array, shape: tuple[int, ...], dtype: np.dtype[Any], *, fill: int = 0) -> Array:
    padded = np.full((BLOCK, *shape), fill, dtype)
    padded[: len(rows)] = rows
    return padded
