"""ChunkBuilder: what the game's thread calls; writes steps into preallocated columns and cuts them into blocks.

    begin ─► stage(obs) ─► act(action) ─► add_reward ─► stage(next obs) ─► act ... ─► finish(last obs) | cut
             └────── decide(obs, action) ──────┘        └─ closes the step before

The row at `_at` is empty, staged (an observation waits for a decision) or open (a decision waits for what follows);
all rows before it are closed. Not thread-safe: its session's lock guards it.
"""

import operator
import uuid
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from understudy.core.block import EXTRAS, Block, BlockPool, Columns
from understudy.core.canonical import canonical_json
from understudy.core.chunk import MAX_STEPS, By, RowKind
from understudy.core.errors import Refused
from understudy.core.game import GameSpec
from understudy.core.meta import ChunkMeta, EpisodeNote, read_meta
from understudy.core.tensors import Array
from understudy.core.writer import action_writer, check_mask, obs_writer, raw_action_writer

MAX_NOTE_BYTES = 32 * 1024
"""Notes of many short episodes must not outgrow a chunk's header."""

_EMPTY, _STAGED, _OPEN = 0, 1, 2
_MAX_REWARD = float(np.finfo(np.float32).max)
_MAX_FRAMES = (1 << 16) - 1
_MAX_T_MS = (1 << 32) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What a policy knows about its own decision."""

    logp: float | None = None
    value: float | None = None
    priority: float | None = None
    version: int | None = None
    raw_action: Any = None


class ChunkBuilder:
    """Rows of one session; `full` blocks are taken by the caller, who must do so before the next call."""

    def __init__(
        self, spec: GameSpec, *, session: uuid.UUID, kind: str = "player", client: str = "",
        max_steps: int = MAX_STEPS, pool: BlockPool | None = None,
    ) -> None:  # fmt: skip
        self.spec, self.session = spec, session
        self.pool = BlockPool(spec, max_steps=max_steps) if pool is None else pool
        self._meta = ChunkMeta(
            game=spec.game, schema=spec.schema, session=session, chunk_no=0, first_step=0, n_steps=0, kind=kind,
            client=client, episodes=(),
        )  # fmt: skip
        self._write_obs, self._write_action = obs_writer(spec), action_writer(spec)
        self._write_raw_action = raw_action_writer(spec)
        self._n_actions = spec.discrete.n if spec.discrete is not None else 0
        self._first_action = spec.discrete.start if spec.discrete is not None else 0
        self.consent = "unknown"
        self._last_row, self._max_steps = self.pool.n_rows - 1, self.pool.max_steps
        self.closed_steps = 0
        """Closed steps not yet taken."""
        self.oldest_ms: int | None = None
        """When the oldest of them was closed."""
        self._state, self._at, self._reward = _EMPTY, 0, 0.0
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
        self._obs, self._action, self._legal = columns.obs, columns.action, columns.legal
        # Single numbers go in through memoryviews, at two thirds of the cost of NumPy's own indexing.
        self._rewards, self._by = columns.views["reward"], columns.views["by"]
        self._frames, self._t_ms = columns.views["frames"], columns.views["t_ms"]

    @property
    def in_episode(self) -> bool:
        return self._note is not None

    @property
    def has_decision(self) -> bool:
        """Whether a decision is open."""
        return self._state == _OPEN

    # --- An episode -------------------------------------------------------------------------------------------------

    def begin(self, note: EpisodeNote, *, consent: str = "unknown") -> Block | None:
        """Start an episode; the block before it, when that has another consent."""
        if self._note is not None:
            raise Refused("bad_order", "an episode is still running; finish or cut it first")
        note = replace(note, row=0, cut=False, result=None)
        _check_note(replace(self._meta, consent=consent, episodes=(note,)))
        block = self.take() if consent != self.consent else None
        self.consent, self._note, self._is_first, self._episode_row = consent, note, True, self._at
        return block

    def name_model(self, model: str) -> None:
        """Say in the running episode's note which model decides from now on; blocks taken before do not have it."""
        if self._note is not None and self._note.model != model:
            self._note = replace(self._note, model=model)
            if self._state == _OPEN or not self._is_first:
                self._notes[-1] = replace(self._notes[-1], model=model)

    def decide(
        self, obs: Any, action: Any, *, legal: Any = None, by: int = By.UNKNOWN, frames: int = 1, t_ms: int = 0,
        extras: Extras | None = None,
    ) -> bool:  # fmt: skip
        """Close the open step and open the next one; says whether a block is full and must be taken."""
        self._stage(obs, legal, t_ms)
        return self._act(action, by, frames, t_ms, extras)

    def stage(self, obs: Any, *, legal: Any = None, t_ms: int = 0) -> bool:
        """Write the next observation, which closes the open step; says whether a block is full."""
        self._stage(obs, legal, t_ms)
        return self._at >= self._last_row or self.closed_steps >= self._max_steps

    def act(
        self, action: Any, *, by: int = By.UNKNOWN, frames: int = 1, t_ms: int = 0, extras: Extras | None = None
    ) -> bool:
        """Decide on the staged observation; says whether a block is full."""
        return self._act(action, by, frames, t_ms, extras)

    def _stage(self, obs: Any, legal: Any, t_ms: int) -> None:
        is_open = self._state == _OPEN
        at = self._at + is_open
        if self._note is None:
            raise Refused("bad_order", "no episode is running; begin one first")
        self._write_obs(self._obs, at, obs)
        if self._legal is not None or legal is not None:
            self._write_legal(at, legal)
        if is_open:
            self._close(t_ms)
            self._at = at
        self._state = _STAGED

    def _act(self, action: Any, by: int, frames: int, t_ms: int, extras: Extras | None) -> bool:
        at = self._at
        if self._state != _STAGED:
            raise Refused("bad_order", "a decision needs an observation before it")
        self._write_action(self._action, at, action)
        if self._legal is not None and not self._legal[at, self._action[0][at] - self._first_action]:
            raise Refused("illegal_action", f"action {action!r} is not legal in its own mask")
        self._by[at] = by
        self._frames[at] = frames if 0 <= frames <= _MAX_FRAMES else _capped(frames)
        self._t_ms[at] = t_ms if t_ms <= _MAX_T_MS else _MAX_T_MS
        self._open_used = () if extras is None else self._write_extras(at, extras)
        if self._is_first:
            self._first_decision(at)
        self._reward, self._state = 0.0, _OPEN
        return at >= self._last_row or self.closed_steps >= self._max_steps

    def add_reward(self, reward: float) -> None:
        """Add to the open step."""
        try:
            total = self._reward + float(reward)
        except (TypeError, ValueError):
            raise Refused("bad_dtype", f"reward {str(reward)[:40]!r} is no number") from None
        if self._state != _OPEN:
            raise Refused("bad_order", "a reward needs a decision before it")
        if not -_MAX_REWARD <= total <= _MAX_REWARD:
            raise Refused("not_finite", f"reward {reward!r} is not finite in float32; give a smaller number")
        self._reward = total

    def finish(
        self, obs: Any = None, *, terminated: bool, truncated: bool = False, legal: Any = None,
        result: str | float | None = None, t_ms: int = 0,
    ) -> bool:  # fmt: skip
        """End the episode after its open step; without a last observation a truncated one is cut."""
        if self._state != _OPEN or self._note is None:
            raise Refused("bad_order", "an episode ends after a decision; cut it instead")
        if not terminated and not truncated:
            raise Refused("bad_order", "an episode ends terminated or truncated; cut it instead")
        note = self._note
        if result is not None:
            note = replace(note, result=result)
            _check_note(replace(self._meta, episodes=(replace(note, row=0),)))
        if obs is None and not terminated:
            return self.cut(result=result)
        at = self._at + 1
        if obs is None:
            # Never bootstrapped from; the last one seen again is sure to lie in the space.
            for column in self._obs:
                column[at] = column[at - 1]
        else:
            self._write_obs(self._obs, at, obs)
        if self._legal is not None or legal is not None:
            self._write_legal(at, legal)
        self._columns.all["terminated"][self._at] = terminated
        self._columns.all["truncated"][self._at] = truncated
        self._close(t_ms)
        self._columns.row[at] = RowKind.FINAL
        self._leave(at + 1, note)
        return self._is_full

    def cut(self, *, result: str | float | None = None) -> bool:
        """Stop the episode where it is known: an open step is dropped, a staged observation kept."""
        if self._state != _EMPTY:
            self._columns.pad(self._at)
        if self._note is None or self._state == _EMPTY or self._at == self._episode_row:
            if self._state != _EMPTY and self._notes and self._notes[-1].row == self._at:
                self._notes.pop()
            self._state, self._note = _EMPTY, None
            return self._is_full
        self._columns.row[self._at] = RowKind.BOOTSTRAP
        self._leave(self._at + 1, replace(self._note, cut=True, result=result))
        return self._is_full

    # --- Its rows ---------------------------------------------------------------------------------------------------

    def take(self) -> Block | None:
        """The closed rows as a block, or None; the row in work moves into fresh columns."""
        if not self.closed_steps:
            return None
        old, at = self._columns, self._at
        fresh = self.pool.take()
        notes, carried = self._notes, []
        n_rows = at
        if self._state != _EMPTY:
            fresh.copy_row(old, at)
            assert self._note is not None
            if self._at == self._episode_row:
                # Nothing of this episode is closed yet: it belongs to the next block as a whole.
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
            old, n_rows, replace(self._meta, n_steps=self.closed_steps, consent=self.consent, episodes=tuple(notes)),
            frozenset(self._used),
        )  # fmt: skip
        self._notes, self._used, self._note_bytes = carried, set(), 0
        self._at = self._episode_row = 0
        self.closed_steps, self.oldest_ms = 0, None
        self._use(fresh)
        return block

    @property
    def _is_full(self) -> bool:
        return self._at >= self._last_row or self.closed_steps >= self._max_steps or self._note_bytes > MAX_NOTE_BYTES

    def _close(self, t_ms: int) -> None:
        self._rewards[self._at] = self._reward
        if not self.closed_steps:
            self.oldest_ms = t_ms
        self.closed_steps += 1
        self._is_first = False
        if self._open_used:
            self._used.update(self._open_used)

    def _first_decision(self, at: int) -> None:
        assert self._note is not None
        self._columns.all["is_first"][at] = True
        self._note = replace(self._note, row=at)
        self._notes.append(self._note)

    def _leave(self, at: int, note: EpisodeNote) -> None:
        self._notes[-1] = replace(note, row=self._notes[-1].row)
        self._note_bytes += 2 * len(canonical_json(note.to_json()))
        self._state, self._at, self._note = _EMPTY, at, None

    def _write_legal(self, at: int, legal: Any) -> None:
        if self._legal is None:
            raise Refused("bad_columns", "a legal mask was given; connect with has_legal=True to record it")
        self._legal[at] = True if legal is None else check_mask(legal, self._n_actions)

    def _write_extras(self, at: int, extras: Extras) -> tuple[str, ...]:
        columns, used = self._columns.all, []
        for name in EXTRAS:
            given = getattr(extras, name)
            if given is not None:
                _write_number(columns[name], at, name, given)
                used.append(name)
        if extras.raw_action is not None:
            self._write_raw_action(self._columns.raw_action, at, extras.raw_action)
            used += [f"raw_{name}" for name in self.spec.action_columns]
        return tuple(used)


def _capped(frames: int) -> int:
    if not frames > 0:
        raise Refused("bad_frames", f"frames is {frames!r}; give how many frames the decision lasts, from 0")
    return _MAX_FRAMES


def _write_number(column: Array, at: int, name: str, given: Any) -> None:
    if column.dtype.kind == "u":
        given = _whole(name, given)
    elif not -_MAX_REWARD <= given <= _MAX_REWARD:
        raise Refused("not_finite", f"{name} is {given!r}; give a finite number")
    column[at] = given


def _whole(name: str, given: Any) -> int:
    try:
        number = operator.index(given)
    except TypeError:
        raise Refused("bad_dtype", f"{name} is {str(given)[:40]!r}; give a whole number from 0") from None
    if not 0 <= number < 1 << 32:
        raise Refused("not_finite", f"{name} is {number}; give a whole number from 0 to {(1 << 32) - 1}")
    return number


def _check_note(meta: ChunkMeta) -> None:
    # The reader's own rules, so that nothing is recorded that could not be read back.
    read_meta(meta.to_metadata())
