"""ChunkBuilder: validates a session's steps and keeps them as rows.

A block holds closed rows on their way from a session to the sender, which packs them into
columns and encodes them as frames. A session takes the memory of the rows that it has.

    begin ─► stage(obs) ─► act(action) ─► add_reward ─► stage(next) ─► act ... ─► finish(last) | cut
             └────── decide(obs, action) ──────┘        └─ closes the step before

A step becomes a row when it is closed. Until then it is staged (an observation waits for a
decision) or open (a decision waits for the next observation), in the builder's own fields. Not
thread-safe: the lock of its session guards it.
"""

import itertools
import math
import operator
import struct
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    read_meta,
    split_chunk,
)
from understudy.experience.frame import Frame, data_frame
from understudy.experience.game import GameSpec
from understudy.experience.spaces import MAX_NUMBER, Box, Space
from understudy.experience.writer import (
    Write,
    action_writer,
    check_mask,
    obs_writer,
    raw_action_writer,
    raw_space,
)

EXTRAS = ("logp", "value", "priority", "version")
"""Optional columns with one number per step; a chunk has those that any of its steps used."""

_HEADER_BYTES = 8 * 1024
_SHORT = 32
"""Up to this length, arithmetic with Python's integers is faster than a call into NumPy."""
_BLOCK_BYTES = 1024
_ROW_BYTES = 256
"""Approximate memory of a block and of each of its rows, besides the values."""

MAX_NOTE_BYTES = 32 * 1024
"""A block with more bytes of episode notes is full, so that the notes fit into a chunk's header."""

_EMPTY = 0
_STAGED = 1
_OPEN = 2
_MAX_FLOAT = float(np.float32(MAX_NUMBER))
_MAX_SUM = _MAX_FLOAT + 2.0**41
"""Sums up to this are rounded to _MAX_FLOAT in float32."""
_MAX_FRAMES = (1 << 16) - 1
_MAX_T_MS = (1 << 32) - 1


Row = tuple[Any, ...]
"""Observation, action mask and action (a number if it is discrete, else bytes), then one number for
each of `_NUMBERS`."""
_NUMBERS = {
    "is_first": "?",
    "by": "B",
    "frames": "H",
    "t_ms": "I",
    "reward": "f",
    "terminated": "?",
    "truncated": "?",
    "row": "B",
}
"""The columns with one number per row, in the order of a row, and their format codes."""
_CODES = dict(zip(("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"), "bhiqBHIQ", strict=True))
"""The format code of each type of whole numbers."""


class RowLayout:
    """How the rows of one game are validated and packed; many threads may share it."""

    def __init__(self, spec: GameSpec, *, max_steps: int = MAX_STEPS) -> None:
        self.spec = spec
        self.max_steps = min(max_steps, MAX_STEPS)
        discrete = spec.discrete
        self.first_action = discrete.start if discrete is not None else 0
        self.end_action = discrete.start + discrete.n if discrete is not None else 0
        n_masked = discrete.n if discrete is not None and spec.has_action_mask else 0
        self.full_mask = b"\1" * n_masked
        """A mask that allows every action; empty if the game has no masks."""
        spaces: dict[str, Space] = dict(spec.obs_columns)
        if n_masked:
            spaces["action_mask"] = Box((n_masked,), np.dtype(np.bool_))
        spaces |= spec.action_columns
        columns = [(name, space.dtype, space.shape) for name, space in spaces.items()]
        columns += [(name, (REQUIRED | OPTIONAL)[name], ()) for name in _NUMBERS]
        self.dtype = np.dtype(columns)
        self.extras: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
            name: (OPTIONAL[name], ()) for name in EXTRAS
        }
        raw = {raw_name(name): raw_space(space) for name, space in spec.action_columns.items()}
        self.extras |= {name: (space.dtype, space.shape) for name, space in raw.items()}
        self.write_raw_action = raw_action_writer(spec)
        self.row_bytes = self.dtype.itemsize
        """Without extras."""
        obs_code = f"{_size(spec.obs_columns)}s"
        mask_code = f"{n_masked}s"
        # A discrete action is packed as a number; any other is validated as arrays and packed as
        # their bytes.
        if discrete is not None:
            action_code = _CODES[discrete.dtype.str[1:]]
            self.no_action: Any = 0
            self.pack_action: Callable[[Any], Any] = _number_of(action_writer(spec))
        else:
            action_code = f"{_size(spec.action_columns)}s"
            self.no_action = bytes(_size(spec.action_columns))
            self.pack_action = _bytes_of(action_writer(spec), len(spec.action_columns))
        self.pack_obs = _obs_packer(spec)
        codes = "".join(_NUMBERS.values())
        self._pack = struct.Struct(f"<{obs_code}{mask_code}{action_code}{codes}").pack
        # Without compression the rows must fit into one body; with compressed images they must fit
        # into the limit for decoded bytes.
        shrinks = any(
            space.dtype.itemsize == 1
            and space.dtype.kind in "ui"
            and math.prod(space.shape) >= COMPRESS_FROM_BYTES
            for space in spec.obs.values()
        )
        max_bytes = (MAX_DECODED_BYTES if shrinks else CUT_BYTES) - _HEADER_BYTES
        most_bytes = self.row_bytes + sum(
            dtype.itemsize * math.prod(shape) for dtype, shape in self.extras.values()
        )
        # Each episode adds a final row; an extra eighth is enough for episodes of at least eight
        # steps.
        self.n_rows = max(2, min(max_bytes // most_bytes, self.max_steps + self.max_steps // 8 + 2))
        """The most rows of a block."""

    def pack(self, rows: Iterable[Row]) -> Array:
        """The rows as one structured array, with a field for each column."""
        return np.frombuffer(b"".join(itertools.starmap(self._pack, rows)), self.dtype)

    def padding(self, obs: bytes, mask: bytes, kind: int) -> Row:
        """A row of this kind, which has only an observation and an action mask."""
        return (obs, mask, self.no_action, *[0] * (len(_NUMBERS) - 1), kind)


def _size(spaces: Mapping[str, Space]) -> int:
    return sum(space.dtype.itemsize * math.prod(space.shape) for space in spaces.values())


def _number_of(write: Write) -> Callable[[Any], int]:
    """Return a function that validates one number."""

    def validated(value: Any) -> int:
        column: list[Any] = [None]
        write([column], 0, value)
        number: int = column[0]
        return number

    return validated


def _obs_packer(spec: GameSpec) -> Callable[[Any], bytes]:
    """Return a function that validates an observation and returns the bytes of its columns."""
    validated = _bytes_of(obs_writer(spec), len(spec.obs_columns))
    (space, *others) = spec.obs_columns.values()
    dtype = space.dtype
    shape = space.shape
    if others or dtype != np.float32 or len(shape) != 1 or shape[0] > _SHORT:
        return validated
    # An element from 2^66, a little less than MAX_NUMBER, is left to the validation, and so are
    # infinities and NaN: adding 63 to the biased exponent of these carries into the sign.
    n_bytes = 4 * shape[0]
    exponents = int.from_bytes(b"\x00\x00\x80\x7f" * shape[0], "little")
    carry = int.from_bytes(b"\x00\x00\x80\x1f" * shape[0], "little")
    signs = int.from_bytes(b"\x00\x00\x00\x80" * shape[0], "little")
    array_type = np.ndarray
    number_of = int.from_bytes

    def packed(obs: Any) -> bytes:
        # A few floats, as most games have them, with as few calls as possible.
        if type(obs) is array_type and obs.dtype is dtype and obs.ndim == 1:
            raw: bytes = obs.tobytes()
            if len(raw) == n_bytes and not (number_of(raw, "little") & exponents) + carry & signs:
                return raw
        return validated(obs)

    return packed


def _bytes_of(write: Write, n_columns: int) -> Callable[[Any], bytes]:
    """Return a function that validates a value and returns the bytes of its columns."""

    def validated_one(value: Any) -> bytes:
        column: list[Any] = [None]
        write([column], 0, value)
        raw: bytes = column[0].tobytes()
        return raw

    def validated_all(value: Any) -> bytes:
        columns: list[list[Any]] = [[None] for _ in range(n_columns)]
        write(columns, 0, value)
        return b"".join(column[0].tobytes() for column in columns)

    return validated_one if n_columns == 1 else validated_all


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Closed rows; chunk_no and first_step of `meta` are set when the block is encoded."""

    rows: list[Row]
    extras: list[tuple[int, dict[str, Any]]]
    """Numbers of rows, and the values of their optional columns."""
    layout: RowLayout
    meta: ChunkMeta

    @property
    def n_steps(self) -> int:
        return self.meta.n_steps

    @property
    def size_bytes(self) -> int:
        """About what the block takes in memory."""
        each_bytes = self.layout.row_bytes + _ROW_BYTES
        return (len(self.rows) + len(self.extras)) * each_bytes + _BLOCK_BYTES

    def chunk(self, *, chunk_no: int, first_step: int) -> Chunk:
        """The chunk; columns that no step used are left out."""
        rows = self.layout.pack(self.rows)
        columns = {name: rows[name] for name in self.layout.dtype.fields or ()}
        for row, values in self.extras:
            for name, value in values.items():
                if name not in columns:
                    dtype, shape = self.layout.extras[name]
                    columns[name] = np.zeros((len(rows), *shape), dtype)
                columns[name][row] = value
        return Chunk(replace(self.meta, chunk_no=chunk_no, first_step=first_step), columns)


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

    __slots__ = (
        "_episode_row",
        "_extras",
        "_is_first",
        "_last_row",
        "_mask",
        "_max_steps",
        "_meta",
        "_note",
        "_note_bytes",
        "_notes",
        "_obs",
        "_open_extras",
        "_reward",
        "_rows",
        "_state",
        "_step",
        "closed_steps",
        "consent",
        "layout",
        "on_waiting",
        "session",
        "spec",
    )

    def __init__(
        self,
        spec: GameSpec,
        *,
        session: uuid.UUID,
        kind: str = "player",
        client: str = "",
        max_steps: int = MAX_STEPS,
        layout: RowLayout | None = None,
    ) -> None:
        self.spec = spec
        self.session = session
        self.layout = RowLayout(spec, max_steps=max_steps) if layout is None else layout
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
        self.consent = "unknown"
        self._last_row = self.layout.n_rows - 1
        self._max_steps = self.layout.max_steps
        self.closed_steps = 0
        """Closed steps that were not taken yet."""
        self.on_waiting: Callable[[], object] | None = None
        """Called when a first closed step waits to be taken."""
        self._rows: list[Row] = []
        self._extras: list[tuple[int, dict[str, Any]]] = []
        self._notes: list[EpisodeNote] = []
        self._note_bytes = 0
        self._note: EpisodeNote | None = None
        self._is_first = False
        self._episode_row = 0
        self._state = _EMPTY
        self._obs = b""
        self._mask = b""
        self._step: Row = ()
        """The open step, without reward, end and kind."""
        self._reward = 0.0
        self._open_extras: dict[str, Any] | None = None

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
        self._episode_row = len(self._rows)
        return block

    def name_model(
        self,
        model: str,
        ticket: str | None = None,
        noise: float | None = None,
        temperature: float | None = None,
    ) -> None:
        """Note which model decides from now on in this episode; earlier blocks are unchanged.

        `ticket`: the draw of this model, if there were several. `noise` and `temperature`: those at
        which it plays, if not as released.
        """
        note = self._note
        if note is not None and (note.model != model or note.noise != noise):
            named: dict[str, Any] = {
                "model": model,
                "ticket": ticket,
                "noise": noise,
                "temperature": temperature,
            }
            self._note = replace(note, **named)
            if self._state == _OPEN or not self._is_first:
                self._notes[-1] = replace(self._notes[-1], **named)

    def decide(
        self,
        obs: Any,
        action: Any,
        action_mask: Any = None,
        by: int = By.UNKNOWN,
        frames: int = 1,
        t_ms: int = 0,
        extras: Extras | None = None,
    ) -> bool:
        """Close the open step and open the next one; returns whether the block is full."""
        self.stage(obs, action_mask)
        return self.act(action, by, frames, t_ms, extras)

    def decide_packed(self, obs: bytes, action: Any, by: int, frames: int, t_ms: int) -> bool:
        """As `decide`, for values that are validated and packed, while a decision is open."""
        self._stage(obs, self.layout.full_mask)
        return self._open(action, by, frames, t_ms)

    def stage(self, obs: Any, action_mask: Any = None) -> bool:
        """Keep the next observation, which closes the open step; returns whether it is full."""
        if self._note is None:
            raise Refused("bad_order", "no episode is running; begin one first")
        self._stage(self.layout.pack_obs(obs), self._pack_mask(action_mask))
        return self.is_full

    def act(
        self,
        action: Any,
        by: int = By.UNKNOWN,
        frames: int = 1,
        t_ms: int = 0,
        extras: Extras | None = None,
    ) -> bool:
        """Keep the decision for the staged observation; returns whether a block is full."""
        if self._state != _STAGED:
            raise Refused(
                "bad_order", "a decision needs an observation before it; record one first"
            )
        chosen = self.layout.pack_action(action)
        if self._mask and not self._mask[chosen - self.layout.first_action]:
            raise Refused(
                "invalid_action",
                f"action {action!r} is excluded by its action mask; give one that the mask allows",
            )
        frames = check_frames(frames)
        self._open_extras = None if extras is None else self._check_extras(extras)
        return self._open(chosen, by, frames, t_ms)

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
        if not -_MAX_SUM <= total <= _MAX_SUM:
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
        # The observation after a terminated step is never used; a copy of the one before it is
        # always in the space.
        last = self._obs if obs is None else self.layout.pack_obs(obs)
        mask = self._pack_mask(action_mask)
        self._close(terminated=terminated, truncated=truncated)
        row = self.layout.padding(last, mask, RowKind.FINAL)
        self._leave(row, replace(self._note, result=result))
        return self.is_full

    def check_result(self, result: str | float | None) -> None:
        """Raise Refused if an episode cannot have this result."""
        if result is not None:
            note = EpisodeNote(row=0, result=result)
            _check_note(replace(self._meta, episodes=(note,)))

    def cut(self, *, result: str | float | None = None) -> bool:
        """End the episode early: drops an open step, keeps a staged observation."""
        self.check_result(result)
        if self._note is None or self._state == _EMPTY or len(self._rows) == self._episode_row:
            if self._state != _EMPTY and self._notes and self._notes[-1].row == len(self._rows):
                self._notes.pop()
            self._state = _EMPTY
            self._note = None
            return self.is_full
        row = self.layout.padding(self._obs, self._mask, RowKind.BOOTSTRAP)
        self._leave(row, replace(self._note, cut=True, result=result))
        return self.is_full

    # --- The rows ---------------------------------------------------------------------------------

    def take(self) -> Block | None:
        """Return the closed steps as a block, or None; the next block starts at the current row.

        Inside an episode, that row's observation also ends this block, to bootstrap from.
        """
        if not self.closed_steps:
            return None
        rows = self._rows
        notes = self._notes
        carried = []
        if self._state != _EMPTY:
            assert self._note is not None
            if len(self._rows) == self._episode_row:
                # No step of this episode is closed yet: the whole episode moves to the next block.
                if self._state == _OPEN:
                    carried = [replace(notes[-1], row=0)]
                    notes = notes[:-1]
            else:
                rows.append(self.layout.padding(self._obs, self._mask, RowKind.BOOTSTRAP))
                carried = [replace(self._note, row=0)]
                self._note = carried[0]
        block = Block(
            rows,
            self._extras,
            self.layout,
            replace(
                self._meta, n_steps=self.closed_steps, consent=self.consent, episodes=tuple(notes)
            ),
        )
        self._rows = []
        self._extras = []
        self._episode_row = 0
        self._notes = carried
        self._note_bytes = 0
        self.closed_steps = 0
        return block

    @property
    def is_full(self) -> bool:
        """Whether a block must be taken."""
        return (
            len(self._rows) >= self._last_row
            or self.closed_steps >= self._max_steps
            or self._note_bytes > MAX_NOTE_BYTES
        )

    def _stage(self, obs: bytes, mask: bytes) -> None:
        if self._state == _OPEN:
            self._close()
        self._obs = obs
        self._mask = mask
        self._state = _STAGED

    def _open(self, action: Any, by: int, frames: int, t_ms: int) -> bool:
        is_first = self._is_first
        if is_first:
            assert self._note is not None
            self._note = replace(self._note, row=len(self._rows))
            self._notes.append(self._note)
        if t_ms > _MAX_T_MS:
            t_ms = _MAX_T_MS
        self._step = (self._obs, self._mask, action, is_first, by, frames, t_ms)
        self._reward = 0.0
        self._state = _OPEN
        return len(self._rows) >= self._last_row or self.closed_steps >= self._max_steps

    def _close(self, *, terminated: bool = False, truncated: bool = False) -> None:
        if self._open_extras:
            self._extras.append((len(self._rows), self._open_extras))
            self._open_extras = None
        self._rows.append((*self._step, self._reward, terminated, truncated, RowKind.STEP))
        self._is_first = False
        self.closed_steps += 1
        if self.closed_steps == 1 and self.on_waiting is not None:
            self.on_waiting()

    def _leave(self, last_row: Row, note: EpisodeNote) -> None:
        self._rows.append(last_row)
        self._notes[-1] = replace(note, row=self._notes[-1].row)
        self._note_bytes += 2 * len(canonical_json(note.to_json()))
        self._state = _EMPTY
        self._note = None

    def _pack_mask(self, action_mask: Any) -> bytes:
        if action_mask is None:
            return self.layout.full_mask
        n_actions = len(self.layout.full_mask)
        if not n_actions:
            raise Refused(
                "bad_columns",
                "got an action mask; connect with has_action_mask=True to record it",
            )
        return check_mask(action_mask, n_actions).tobytes()

    def _check_extras(self, extras: Extras) -> dict[str, Any]:
        values: dict[str, Any] = {}
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
            values[name] = value if name == "version" else float(value)
        if extras.raw_action is not None:
            names = [raw_name(name) for name in self.spec.action_columns]
            columns: list[list[Any]] = [[None] for _ in names]
            self.layout.write_raw_action(columns, 0, extras.raw_action)
            # Copies, since the game may change its arrays.
            values |= {
                name: np.array(column[0]) for name, column in zip(names, columns, strict=True)
            }
        return values


def check_frames(frames: Any) -> int:
    """Return the number of game frames of a decision; Refused if it is negative."""
    number = operator.index(frames)
    if number < 0:
        raise Refused(
            "bad_frames", f"frames is {number}; give the decision's number of game frames, from 0"
        )
    return min(number, _MAX_FRAMES)


def _check_note(meta: ChunkMeta) -> None:
    # The reader's own rules, so that everything recorded can be read back.
    try:
        read_meta(meta.to_metadata())
    except (TypeError, ValueError) as error:
        raise Refused(
            "bad_metadata",
            f"the episode's result or note is not a text or a finite number: {str(error)[:120]}; "
            "pass one of these",
        ) from None
