"""ChunkBuilder: writes steps into preallocated columns, on the game's thread, and cuts blocks.

A block holds closed rows on their way from the game's thread to the sender, which encodes them as
frames and returns the columns to their pool.

    begin ─► stage(obs) ─► act(action) ─► add_reward ─► stage(next) ─► act ... ─► finish(last) | cut
             └────── decide(obs, action) ──────┘        └─ closes the step before

The row at `_at` is empty, staged (an observation waits for a decision) or open (a decision waits
for the next observation); all rows before it are closed. Not thread-safe: the lock of its session
guards it.
"""

import math
import operator
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, SupportsFloat

import numpy as np

from understudy.core.canonical import canonical_json
from understudy.core.errors import Refused
from understudy.core.tensors import Array
from understudy.experience.chunk import (
    COMPRESS_FROM_BYTES,
    CUT_BYTES,
    MAX_DECODED_BYTES,
    MAX_STEPS,
    OPTIONAL,
    REQUIRED,
    By,
    Chunk,
    ChunkMeta,
    EpisodeNote,
    RowKind,
    keeps_value_when_padded,
    read_meta,
    split_chunk,
)
from understudy.experience.frame import Frame, data_frame
from understudy.experience.game import GameSpec
from understudy.experience.spaces import MAX_NUMBER, Space
from understudy.experience.writer import (
    action_writer,
    check_mask,
    obs_writer,
    raw_action_writer,
    raw_space,
)

EXTRAS = ("logp", "value", "priority", "version")
"""Optional columns with one number per step; a chunk has those that any of its steps used."""

_HEADER_BYTES = 8 * 1024
_POOL_SETS = 8

MAX_NOTE_BYTES = 32 * 1024
"""A block with more bytes of episode notes is full, so that the notes fit into a chunk's header."""

_EMPTY = 0
_STAGED = 1
_OPEN = 2
_MAX_FLOAT = float(np.float32(MAX_NUMBER))
_MAX_FRAMES = (1 << 16) - 1
_MAX_T_MS = (1 << 32) - 1


class Columns:
    """One preallocated array per column; decision columns of unused rows are zero."""

    __slots__ = ("action", "action_mask", "all", "obs", "padded", "raw_action", "row", "views")

    def __init__(self, pool: "BlockPool") -> None:
        self.all: dict[str, Array] = {
            name: np.zeros((pool.n_rows, *shape), dtype)
            for name, (dtype, shape) in pool.layout.items()
        }
        self.obs = [self.all[name] for name in pool.spec.obs_columns]
        self.action = [self.all[name] for name in pool.spec.action_columns]
        self.raw_action = [self.all[raw_name(name)] for name in pool.spec.action_columns]
        self.action_mask = self.all.get("action_mask")
        self.row = self.all["row"]
        self.views: dict[str, Any] = {
            name: self.all[name].data for name in ("reward", "by", "frames", "t_ms")
        }
        self.padded = [
            column for name, column in self.all.items() if not keeps_value_when_padded(name)
        ]

    def pad(self, at: int) -> None:
        """Clear the decision of a row; its observation and action mask stay."""
        for column in self.padded:
            column[at] = 0


class BlockPool:
    """A pool of column sets for one game; many threads may share it."""

    def __init__(self, spec: GameSpec, *, max_steps: int = MAX_STEPS) -> None:
        self.spec = spec
        self.max_steps = min(max_steps, MAX_STEPS)
        spaces: dict[str, Space] = {**spec.obs_columns, **spec.action_columns}
        spaces |= {raw_name(name): raw_space(space) for name, space in spec.action_columns.items()}
        self.layout: dict[str, tuple[np.dtype[np.generic], tuple[int, ...]]] = {
            name: (space.dtype, space.shape) for name, space in spaces.items()
        }
        self.layout |= {
            name: (dtype, ()) for name, dtype in (REQUIRED | OPTIONAL).items() if name != "event"
        }
        if spec.has_action_mask and spec.discrete is not None:
            self.layout["action_mask"] = (np.dtype(np.bool_), (spec.discrete.n,))
        row_bytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.layout.values())
        # Without compression the rows must fit into one body; with compressed images they must fit
        # into the limit for decoded bytes.
        shrinks = any(
            space.dtype.itemsize == 1
            and space.dtype.kind in "ui"
            and math.prod(space.shape) >= COMPRESS_FROM_BYTES
            for space in spec.obs.values()
        )
        max_bytes = (MAX_DECODED_BYTES if shrinks else CUT_BYTES) - _HEADER_BYTES
        # Each episode adds a final row; an extra eighth is enough for episodes of at least eight
        # steps.
        self.n_rows = max(2, min(max_bytes // row_bytes, self.max_steps + self.max_steps // 8 + 2))
        self.set_bytes = self.n_rows * row_bytes
        self._free: deque[Columns] = deque(maxlen=_POOL_SETS)

    def take(self) -> Columns:
        """Return an empty set of columns, reusing an old one if available."""
        try:
            return self._free.pop()
        except IndexError:
            return Columns(self)

    def give(self, columns: Columns) -> None:
        """Clear a set of columns and put it back into the pool; not called on the game's thread."""
        for column in columns.padded:
            column.fill(0)
        self._free.append(columns)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Closed rows; chunk_no and first_step of `meta` are set when the block is encoded."""

    columns: Columns
    n_rows: int
    meta: ChunkMeta
    used: frozenset[str]
    """Optional columns that at least one step used."""

    @property
    def n_steps(self) -> int:
        return self.meta.n_steps

    def chunk(self, *, chunk_no: int, first_step: int) -> Chunk:
        """The chunk, as views into the columns."""
        views = {
            name: column[: self.n_rows]
            for name, column in self.columns.all.items()
            if name in self.used or (name not in EXTRAS and not name.startswith("raw_action"))
        }
        return Chunk(replace(self.meta, chunk_no=chunk_no, first_step=first_step), views)


@dataclass(frozen=True, slots=True)
class Encoded:
    """One chunk number and its frame; the frame is None if a single step is too large to send."""

    chunk_no: int
    n_steps: int
    frame: Frame | None


def encode_block(block: Block, *, chunk_no: int, first_step: int) -> Iterator[Encoded]:
    """Yield a block's frames, split until each body fits, with numbers from `chunk_no` on."""
    waiting = [block.chunk(chunk_no=chunk_no, first_step=first_step)]
    while waiting:
        chunk = waiting.pop()
        if chunk.meta.chunk_no != chunk_no:
            chunk = Chunk(replace(chunk.meta, chunk_no=chunk_no), chunk.columns)
        body = chunk.encode()
        if len(body) > CUT_BYTES and chunk.meta.n_steps > 1:
            left, right = split_chunk(chunk)
            waiting += [right, left]
            continue
        try:
            frame: Frame | None = data_frame(chunk.meta.session, chunk_no, body)
        except Refused:
            frame = None
        yield Encoded(chunk_no, chunk.meta.n_steps, frame)
        chunk_no += 1


def raw_name(action_column: str) -> str:
    """`action.x` becomes `raw_action.x`."""
    return f"raw_{action_column}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """A policy's own data about a decision."""

    logp: float | None = None
    value: float | None = None
    priority: float | None = None
    version: int | None = None
    raw_action: Any = None


class ChunkBuilder:
    """Builds the rows of one session; once a block is full, call `take` before recording more."""

    def __init__(
        self,
        spec: GameSpec,
        *,
        session: uuid.UUID,
        kind: str = "player",
        client: str = "",
        max_steps: int = MAX_STEPS,
        pool: BlockPool | None = None,
    ) -> None:
        self.spec = spec
        self.session = session
        self.pool = BlockPool(spec, max_steps=max_steps) if pool is None else pool
        self._meta = ChunkMeta(
            game=spec.game,
            schema=spec.schema,
            session=session,
            chunk_no=0,
            first_step=0,
            n_steps=0,
            kind=kind,
            client=client,
            episodes=(),
        )
        self._write_obs = obs_writer(spec)
        self._write_action = action_writer(spec)
        self._write_raw_action = raw_action_writer(spec)
        self._n_actions = spec.discrete.n if spec.discrete is not None else 0
        self._first_action = spec.discrete.start if spec.discrete is not None else 0
        self.consent = "unknown"
        self._last_row = self.pool.n_rows - 1
        self._max_steps = self.pool.max_steps
        self.closed_steps = 0
        """Closed steps that were not taken yet."""
        self.oldest_ms: int | None = None
        """When the oldest of these steps was closed."""
        self._state = _EMPTY
        self._at = 0
        self._reward = 0.0
        self._note: EpisodeNote | None = None
        self._is_first = False
        self._episode_row = 0
        self._open_used: tuple[str, ...] = ()
        self._notes: list[EpisodeNote] = []
        self._note_bytes = 0
        self._used: set[str] = set()
        self._use(self.pool.take())

    def _use(self, columns: Columns) -> None:
        self._columns = columns
        self._obs = columns.obs
        self._action = columns.action
        self._action_mask = columns.action_mask
        # Single numbers are written through memoryviews, at two thirds of the cost of NumPy
        # indexing.
        self._rewards = columns.views["reward"]
        self._by = columns.views["by"]
        self._frames = columns.views["frames"]
        self._t_ms = columns.views["t_ms"]

    @property
    def in_episode(self) -> bool:
        return self._note is not None

    @property
    def has_decision(self) -> bool:
        """Whether a decision is open."""
        return self._state == _OPEN

    # --- An episode -------------------------------------------------------------------------------

    def begin(self, note: EpisodeNote, *, consent: str = "unknown") -> Block | None:
        """Start an episode; returns the previous block if its consent is different."""
        if self._note is not None:
            raise Refused("bad_order", "an episode is still running; finish or cut it first")
        note = replace(note, row=0, cut=False, result=None)
        _check_note(replace(self._meta, consent=consent, episodes=(note,)))
        block = self.take() if consent != self.consent else None
        self.consent = consent
        self._note = note
        self._is_first = True
        self._episode_row = self._at
        return block

    def name_model(self, model: str) -> None:
        """Note which model decides from now on in this episode; earlier blocks are unchanged."""
        if self._note is not None and self._note.model != model:
            self._note = replace(self._note, model=model)
            if self._state == _OPEN or not self._is_first:
                self._notes[-1] = replace(self._notes[-1], model=model)

    def decide(
        self,
        obs: Any,
        action: Any,
        *,
        action_mask: Any = None,
        by: int = By.UNKNOWN,
        frames: int = 1,
        t_ms: int = 0,
        extras: Extras | None = None,
    ) -> bool:
        """Close the open step and open the next one; returns whether the block is full."""
        self.stage(obs, action_mask, t_ms)
        return self.act(action, by, frames, t_ms, extras)

    def stage(self, obs: Any, action_mask: Any = None, t_ms: int = 0) -> None:
        """Write the next observation, which closes the open step; then check `is_full`."""
        is_open = self._state == _OPEN
        at = self._at + is_open
        if self._note is None:
            raise Refused("bad_order", "no episode is running; begin one first")
        self._write_obs(self._obs, at, obs)
        if self._action_mask is not None or action_mask is not None:
            self._write_action_mask(at, action_mask)
        if is_open:
            self._close(t_ms)
            self._at = at
        self._state = _STAGED

    def act(
        self,
        action: Any,
        by: int = By.UNKNOWN,
        frames: int = 1,
        t_ms: int = 0,
        extras: Extras | None = None,
    ) -> bool:
        """Write the decision for the staged observation; returns whether a block is full."""
        at = self._at
        if self._state != _STAGED:
            raise Refused(
                "bad_order", "a decision needs an observation before it; record one first"
            )
        self._write_action(self._action, at, action)
        if (
            self._action_mask is not None
            and not self._action_mask[at, self._action[0][at] - self._first_action]
        ):
            raise Refused(
                "invalid_action",
                f"action {action!r} is excluded by its action mask; give one that the mask allows",
            )
        if not 0 <= frames <= _MAX_FRAMES:
            if not frames > 0:
                raise Refused(
                    "bad_frames",
                    f"frames is {frames!r}; give the decision's number of game frames, from 0",
                )
            frames = _MAX_FRAMES
        self._by[at] = by
        self._frames[at] = frames
        self._t_ms[at] = t_ms if t_ms <= _MAX_T_MS else _MAX_T_MS
        self._open_used = () if extras is None else self._write_extras(at, extras)
        if self._is_first:
            assert self._note is not None
            self._columns.all["is_first"][at] = True
            self._note = replace(self._note, row=at)
            self._notes.append(self._note)
        self._reward = 0.0
        self._state = _OPEN
        return at >= self._last_row or self.closed_steps >= self._max_steps

    def add_reward(self, reward: SupportsFloat) -> None:
        """Add to the reward of the open step."""
        if self._state != _OPEN:
            raise Refused(
                "early_reward", "a reward needs a decision before it; record the decision first"
            )
        try:
            if isinstance(reward, str):
                raise TypeError
            total = self._reward + float(reward)
        except (TypeError, ValueError, OverflowError):
            raise Refused(
                "bad_dtype", f"reward {str(reward)[:40]!r} is not a number; give a finite number"
            ) from None
        if not -_MAX_FLOAT <= total <= _MAX_FLOAT:
            raise Refused(
                "not_finite",
                f"reward {reward!r} makes the step's reward NaN, or larger than {MAX_NUMBER:g}; "
                "give a finite, smaller number",
            )
        self._reward = total

    def finish(
        self,
        obs: Any = None,
        *,
        terminated: bool,
        truncated: bool = False,
        action_mask: Any = None,
        result: str | float | None = None,
        t_ms: int = 0,
    ) -> bool:
        """End the episode after its open step; a terminated one needs no last observation."""
        if self._state != _OPEN or self._note is None:
            raise Refused("bad_order", "an episode ends after a decision; cut it instead")
        if not terminated and not truncated:
            raise Refused("bad_order", "an episode ends terminated or truncated; cut it instead")
        self.check_result(result)
        if obs is None and not terminated:
            raise Refused(
                "no_last_obs",
                "a truncated episode ends without its last observation, so the outcome of its last "
                "decision is unknown; give that observation, as in end(obs, truncated=True)",
            )
        at = self._at + 1
        if obs is None:
            # The observation after a terminated step is never used; a copy of the one before it is
            # always in the space.
            for column in self._obs:
                column[at] = column[at - 1]
        else:
            self._write_obs(self._obs, at, obs)
        if self._action_mask is not None or action_mask is not None:
            self._write_action_mask(at, action_mask)
        self._columns.all["terminated"][self._at] = terminated
        self._columns.all["truncated"][self._at] = truncated
        self._close(t_ms)
        self._columns.row[at] = RowKind.FINAL
        self._leave(at + 1, replace(self._note, result=result))
        return self.is_full

    def check_result(self, result: str | float | None) -> None:
        """Raise Refused if an episode cannot have this result."""
        if result is not None:
            note = EpisodeNote(row=0, result=result)
            _check_note(replace(self._meta, episodes=(note,)))

    def cut(self, *, result: str | float | None = None) -> bool:
        """End the episode early: drops an open step, keeps a staged observation."""
        self.check_result(result)
        if self._state != _EMPTY:
            self._columns.pad(self._at)
        if self._note is None or self._state == _EMPTY or self._at == self._episode_row:
            if self._state != _EMPTY and self._notes and self._notes[-1].row == self._at:
                self._notes.pop()
            self._state = _EMPTY
            self._note = None
            return self.is_full
        self._columns.row[self._at] = RowKind.BOOTSTRAP
        self._leave(self._at + 1, replace(self._note, cut=True, result=result))
        return self.is_full

    # --- The rows ---------------------------------------------------------------------------------

    def take(self) -> Block | None:
        """Return the closed steps as a block, or None; the next block starts at the current row.

        Inside an episode, that row's observation also ends this block, to bootstrap from.
        """
        if not self.closed_steps:
            return None
        old = self._columns
        at = self._at
        fresh = self.pool.take()
        notes = self._notes
        carried = []
        n_rows = at
        if self._state != _EMPTY:
            for name, column in fresh.all.items():
                column[0] = old.all[name][at]
            assert self._note is not None
            if self._at == self._episode_row:
                # No step of this episode is closed yet: the whole episode moves to the next block.
                if self._state == _OPEN:
                    carried = [replace(notes[-1], row=0)]
                    notes = notes[:-1]
            else:
                old.pad(at)
                old.row[at] = RowKind.BOOTSTRAP
                n_rows = at + 1
                carried = [replace(self._note, row=0)]
                self._note = carried[0]
        block = Block(
            old,
            n_rows,
            replace(
                self._meta, n_steps=self.closed_steps, consent=self.consent, episodes=tuple(notes)
            ),
            frozenset(self._used),
        )
        self._notes = carried
        self._used = set()
        self._note_bytes = 0
        self._at = self._episode_row = 0
        self.closed_steps = 0
        self.oldest_ms = None
        self._use(fresh)
        return block

    @property
    def is_full(self) -> bool:
        """Whether a block must be taken."""
        return (
            self._at >= self._last_row
            or self.closed_steps >= self._max_steps
            or self._note_bytes > MAX_NOTE_BYTES
        )

    def _close(self, t_ms: int) -> None:
        self._rewards[self._at] = self._reward
        if not self.closed_steps:
            self.oldest_ms = t_ms
        self.closed_steps += 1
        self._is_first = False
        if self._open_used:
            self._used.update(self._open_used)

    def _leave(self, at: int, note: EpisodeNote) -> None:
        self._notes[-1] = replace(note, row=self._notes[-1].row)
        self._note_bytes += 2 * len(canonical_json(note.to_json()))
        self._state = _EMPTY
        self._at = at
        self._note = None

    def _write_action_mask(self, at: int, action_mask: Any) -> None:
        if self._action_mask is None:
            raise Refused(
                "bad_columns",
                "got an action mask; connect with has_action_mask=True to record it",
            )
        self._action_mask[at] = (
            True if action_mask is None else check_mask(action_mask, self._n_actions)
        )

    def _write_extras(self, at: int, extras: Extras) -> tuple[str, ...]:
        used = []
        for name in EXTRAS:
            value = getattr(extras, name)
            if value is None:
                continue
            if name != "version":
                if not -_MAX_FLOAT <= value <= _MAX_FLOAT:
                    raise Refused(
                        "not_finite",
                        f"{name} is {value!r}; give a finite number of at most {MAX_NUMBER:g}",
                    )
            else:
                try:
                    value = operator.index(value)
                except TypeError:
                    raise Refused(
                        "bad_dtype", f"{name} is {str(value)[:40]!r}; give a whole number from 0"
                    ) from None
                if not 0 <= value < 1 << 32:
                    raise Refused(
                        "not_finite",
                        f"{name} is {value}; give a whole number from 0 to {(1 << 32) - 1}",
                    )
            self._columns.all[name][at] = value
            used.append(name)
        if extras.raw_action is not None:
            self._write_raw_action(self._columns.raw_action, at, extras.raw_action)
            used += [raw_name(name) for name in self.spec.action_columns]
        return tuple(used)


def _check_note(meta: ChunkMeta) -> None:
    # The reader's own rules, so that everything recorded can be read back.
    try:
        read_meta(meta.to_metadata())
    except (TypeError, ValueError) as error:
        raise Refused(
            "bad_metadata",
            f"a fact about the episode is not a text or a finite number: {str(error)[:120]}",
        ) from None
