"""How experience enters the stream: JSON becomes frames, frames are checked and appended."""

import asyncio
import math
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import structlog

from understudy.core.clock import Clock
from understudy.core.errors import InvalidName, Refused, StorageFull
from understudy.core.names import GameName, PlayerName, player_name
from understudy.core.tensors import MAX_HEADER_BYTES, Array
from understudy.core.wording import joined
from understudy.experience.chunk import (
    MAX_STEPS,
    OPTIONAL,
    REQUIRED,
    Chunk,
    ChunkMeta,
    EpisodeNote,
    RowKind,
    chunk_of,
)
from understudy.experience.frame import CloseReport, Frame, FrameKind, close_frame
from understudy.experience.game import GameSpec
from understudy.experience.intake import Intake
from understudy.ingest.check import check_against_spec
from understudy.models.keys import Key
from understudy.ports import Ack, Stream
from understudy.serve.wire import ChunkColumns, Close, read_numbers

_log = structlog.get_logger("understudy.gateway")
_MAX_APPEND_BYTES = 8 * 1024 * 1024
_RETRY_AFTER_S = 1.0
_LOG_EVERY_S = 60.0
_MAX_ROWS = 2 * MAX_STEPS
"""Rows of a chunk, at most: a final or bootstrap row follows at least one step."""

# --- Columns: JSON experience, converted to the same frames that other clients send ---------------


def frame_of(sent: ChunkColumns, specs: Mapping[str, GameSpec]) -> tuple[Frame, PlayerName]:
    """Return the frame of these columns and its player; Refused if the columns do not fit."""
    player = _player(sent.player)
    if sent.schema is not None:
        if sent.schema not in specs:
            raise Refused(
                "unknown_schema",
                f"this game has no such schema; send one of {joined(specs, most=4)}",
            )
        return _frame(sent, specs[sent.schema]), player
    fitting = None
    refused = Refused("unknown_schema", "no spec of this game is known; register one")
    for spec in specs.values():
        try:
            frame = _frame(sent, spec)
        except Refused as error:
            refused = error
            continue
        if fitting is not None:
            raise Refused(
                "which_schema",
                "the columns fit more than one spec of this game; choose one with 'schema'",
            )
        fitting = frame
    if fitting is None:
        raise refused
    return fitting, player


def close_of(sent: Close) -> tuple[Frame, PlayerName]:
    """Return the frame that closes a session, and its player."""
    report = CloseReport(n_chunks=sent.chunk_no, n_steps=sent.n_steps)
    return close_frame(_session(sent.session), sent.chunk_no, report), _player(sent.player)


def _frame(sent: ChunkColumns, spec: GameSpec) -> Frame:
    columns = _arrays(sent, spec)
    meta = ChunkMeta(
        game=spec.game,
        schema=spec.schema,
        session=_session(sent.session),
        chunk_no=sent.chunk_no,
        first_step=sent.first_step,
        n_steps=int((columns["row"] == RowKind.STEP).sum()),
        consent=sent.consent,
        client=sent.client,
        episodes=_notes(sent, columns["is_first"]),
    )
    try:
        frame = Chunk(meta, columns).validate().frame()
    except UnicodeError:
        raise Refused(
            "bad_metadata", "a text holds an unpaired surrogate; send valid Unicode"
        ) from None
    # Decoded as ingest will do it, so that ingest does not reject a frame acknowledged here.
    check_against_spec(chunk_of(frame), spec)
    return frame


def _arrays(sent: ChunkColumns, spec: GameSpec) -> dict[str, Array]:
    kinds: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
        name: (np.dtype(dtype), ()) for name, dtype in (REQUIRED | OPTIONAL).items()
    }
    kinds |= {
        name: (space.dtype, space.shape)
        for name, space in (spec.obs_columns | spec.action_columns).items()
    }
    n_actions = spec.discrete.n if spec.discrete is not None else 0
    kinds["action_mask"] = (np.dtype(np.bool_), (n_actions,))
    if unknown := sent.columns.keys() - kinds.keys():
        raise Refused(
            "bad_columns",
            f"{joined(unknown, most=4)} are not columns of {spec.game}; known are "
            f"{joined(kinds, most=40)}",
        )
    if missing := {*REQUIRED, *spec.obs_columns, *spec.action_columns} - sent.columns.keys():
        raise Refused("bad_columns", f"the columns {joined(missing)} are missing; add them")
    return {name: _array(name, values, *kinds[name]) for name, values in sent.columns.items()}


def _array(name: str, values: msgspec.Raw, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    if b'"' in bytes(values):
        # NumPy would make every element as wide as the longest text.
        raise Refused("bad_columns", f"column {name} contains text; send numbers")
    numbers = read_numbers(values, [(_MAX_ROWS, *shape)], what=f"column {name}")
    try:
        with np.errstate(all="ignore"):
            received = np.array(numbers)
            array = received.astype(dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise Refused(
            "bad_columns", f"column {name} cannot be converted to {dtype}: {str(error)[:100]}"
        ) from None
    if array.ndim != 1 + len(shape) or array.shape[1:] != shape:
        raise Refused(
            "bad_columns",
            f"column {name} has the shape {list(array.shape)[:8]}; send one value of shape "
            f"{list(shape)} per row",
        )
    is_kind = received.dtype.kind in "biuf" and (dtype.kind == "b") == (received.dtype.kind == "b")
    # Floats may be rounded to the column's precision; other values must not change.
    if not is_kind or (dtype.kind != "f" and not np.array_equal(array, received)):
        raise Refused("bad_columns", f"column {name} holds values that do not fit {dtype}")
    return array


def _notes(sent: ChunkColumns, is_first: Array) -> tuple[EpisodeNote, ...]:
    if sent.episodes is None:
        return tuple(
            EpisodeNote(row=row) for row in [0, *(np.flatnonzero(is_first[1:]) + 1).tolist()]
        )
    notes = map(msgspec.structs.asdict, sent.episodes)
    return tuple(EpisodeNote(**note | {"opponents": tuple(note["opponents"])}) for note in notes)


def _session(text: str) -> uuid.UUID:
    try:
        return uuid.UUID(text)
    except ValueError:
        raise Refused(
            "bad_session",
            f"session {text[:40]!r} is not a UUID; create a UUIDv7 once per session",
        ) from None


def _player(text: str) -> PlayerName:
    try:
        return player_name(text)
    except InvalidName as error:
        raise Refused("bad_player", str(error)) from None


# --- Admission: which frames of a batch a key may send, and the player's pseudonym in them --------


@dataclass(frozen=True, slots=True)
class Admitted:
    """A frame in which the gateway has set the player's pseudonym and the time."""

    frame: Frame
    n_steps: int
    """Number of steps according to the frame's header, for the quota; ingest checks it."""


class Admission:
    """Admits frames of all games; frames that a key may not write never enter the stream."""

    def __init__(self, deployment_key: bytes, clock: Clock) -> None:
        self._deployment_key = deployment_key
        self._clock = clock
        self._intakes: dict[str, Intake] = {}
        self._log_at_s = -math.inf

    def admit(
        self,
        key: Key,
        game: str,
        frames: Sequence[Frame | Refused],
        players: Mapping[uuid.UUID, PlayerName],
    ) -> list[Admitted | Refused]:
        """Return each frame with player and time set, or why it is rejected, for good or for now.

        The game must be registered.
        """
        intake = self._intakes.get(game)
        if intake is None:
            intake = self._intakes[game] = Intake(self._deployment_key, GameName(game), self._clock)
        outcomes = iter(intake.admit([item for item in frames if isinstance(item, Frame)], players))
        stamped = [next(outcomes) if isinstance(item, Frame) else item for item in frames]
        again = [item for item in stamped if isinstance(item, Refused) and item.retry_after_s]
        if again and self._clock.monotonic() >= self._log_at_s:
            self._log_at_s = self._clock.monotonic() + _LOG_EVERY_S
            _log.error(again[0].reason, game=game, error=again[0].detail)
        return [_allowed(item, key, game) if isinstance(item, Frame) else item for item in stamped]


class _Facts(msgspec.Struct):
    """The metadata of a chunk that the intake checks."""

    game: str
    kind: str
    n_steps: str


class _Header(msgspec.Struct):
    metadata: _Facts = msgspec.field(name="__metadata__")


_read = msgspec.json.Decoder(_Header).decode


def _allowed(frame: Frame, key: Key, game: str) -> Admitted | Refused:
    """Return the frame if its chunk is of this game and of a kind that the key may write."""
    if frame.kind is not FrameKind.DATA:
        return Admitted(frame, 0)
    length = int.from_bytes(frame.body[:8], "little")
    if not 8 <= 8 + length <= min(len(frame.body), 8 + MAX_HEADER_BYTES):
        return Refused(
            "bad_tensors",
            f"the header of a chunk has {length} bytes in a body of {len(frame.body)}",
        )
    try:
        # Reading only these fields costs a tenth of reading all; ingest checks the others.
        facts = _read(memoryview(frame.body)[8 : 8 + length]).metadata
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        return Refused("bad_tensors", f"the body has no chunk header: {str(error)[:100]}")
    if facts.game != game:
        return Refused(
            "wrong_game",
            f"a chunk of {facts.game[:63]!r} was sent to {game}; send it to the path of its game",
        )
    if facts.kind != "player" and not key.may("work"):
        return Refused(
            "wrong_scope", f"chunks of kind {facts.kind[:20]!r} need a key with scope work"
        )
    steps = facts.n_steps
    is_number = steps.isascii() and steps.isdigit() and len(steps) < 7
    return Admitted(frame, min(int(steps), MAX_STEPS) if is_number else 0)


# --- The appender: one thread appends the frames of many requests together ------------------------


@dataclass(slots=True)
class _PendingFrames:
    frames: Sequence[Frame]
    size_bytes: int
    answer: "asyncio.Future[list[Ack]]"


class Appender:
    """Appends frames in a thread of its own and returns acks; limits the bytes that wait."""

    def __init__(self, stream: Stream, *, max_waiting_bytes: int = 64 * 1024 * 1024) -> None:
        self._stream = stream
        self._max_waiting_bytes = max_waiting_bytes
        # A thread of its own, since other disk reads must not delay an ack.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="understudy-appender")
        self._waiting: list[_PendingFrames] = []
        self.waiting_bytes = 0
        self.error = ""
        """The error of the last append; empty once the stream accepts frames again."""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def append(self, frames: Sequence[Frame]) -> list[Ack]:
        """Return one ack per frame; accepted means durable in the stream."""
        if not frames:
            return []
        size_bytes = sum(frame.size_bytes for frame in frames)
        if self._is_closed or self.waiting_bytes + size_bytes > self._max_waiting_bytes:
            what = (
                "the gateway is stopping"
                if self._is_closed
                else "the stream is overloaded at the moment"
            )
            return [_retry_later(what)] * len(frames)
        self.waiting_bytes += size_bytes
        waiting = _PendingFrames(frames, size_bytes, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._wake.set()
        return await waiting.answer

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting or not self._is_closed:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                batch = self._take()
                frames = [frame for pending in batch for frame in pending.frames]
                self._answer(batch, await loop.run_in_executor(self._thread, self._append, frames))

    def _take(self) -> list[_PendingFrames]:
        size_bytes = 0
        count = 0
        for pending in self._waiting:
            size_bytes += pending.size_bytes
            if count and size_bytes > _MAX_APPEND_BYTES:
                break
            count += 1
        batch = self._waiting[:count]
        del self._waiting[:count]
        return batch

    def _append(self, frames: Sequence[Frame]) -> list[Ack]:
        try:
            acks = list(self._stream.append(frames))
            failed = [
                ack.error or "the stream gave no reason"
                for ack in acks
                if not (ack.accepted or ack.refused)
            ]
            if failed or any(ack.accepted for ack in acks):
                self.error = failed[0] if failed else ""
            return acks
        except Exception as error:
            self.error = str(error) or repr(error)
            # Nothing was acknowledged, so clients keep their frames and send them again. No error
            # stops the appender: the next append is attempted.
            _log.error(
                "not_appended",
                frames=len(frames),
                error=repr(error)[:300],
                next="clients send them again",
            )
            what = (
                "the storage is full at the moment"
                if isinstance(error, StorageFull)
                else "the stream is not available"
            )
            return [_retry_later(what)] * len(frames)

    def _answer(self, batch: Sequence[_PendingFrames], acks: Sequence[Ack]) -> None:
        at = 0
        for pending in batch:
            own = list(acks[at : at + len(pending.frames)])
            at += len(pending.frames)
            self.waiting_bytes -= pending.size_bytes
            if not pending.answer.done():  # the client may have disconnected
                pending.answer.set_result(own)

    async def close(self) -> None:
        """Append pending frames, then accept no more."""
        self._is_closed = True
        self._wake.set()
        if self._task is not None:
            await self._task
        await asyncio.to_thread(self._thread.shutdown)


def _retry_later(what: str) -> Ack:
    return Ack(False, retry_after_s=_RETRY_AFTER_S, error=what)
