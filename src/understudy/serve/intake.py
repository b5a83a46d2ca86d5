"""How experience enters the stream: columns become frames, frames are admitted, many requests
are appended together."""

import asyncio
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
from understudy.serve.wire import ChunkColumns, Close

_log = structlog.get_logger("understudy.gateway")
_MAX_APPEND_BYTES = 8 * 1024 * 1024
_RETRY_AFTER_S = 1.0

# --- Columns: experience as JSON, made into the same frame that other clients send ----------------


def frame_of(sent: ChunkColumns, specs: Mapping[str, GameSpec]) -> tuple[Frame, PlayerName]:
    """The frame of these columns and whose it is; Refused when they are no chunk of this game."""
    player = _player(sent.player)
    if sent.schema is not None:
        if sent.schema not in specs:
            raise Refused(
                "unknown_schema", f"this game has no such schema; it has {sorted(specs)[:4]}"
            )
        return _frame(sent, specs[sent.schema]), player
    frames = []
    refused = Refused("unknown_schema", "no spec of this game is known")
    for spec in specs.values():
        try:
            frames.append(_frame(sent, spec))
        except Refused as error:
            refused = error
    if len(frames) > 1:
        raise Refused(
            "which_schema",
            f"the columns fit {len(frames)} specs of this game; say which in 'schema'",
        )
    if not frames:
        raise refused
    return frames[0], player


def close_of(sent: Close) -> tuple[Frame, PlayerName]:
    """The frame that closes a session, and whose it is."""
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
        raise Refused("bad_metadata", "a text holds half a character") from None
    # Read back as ingest will read it: what is acked here is not refused there.
    check_against_spec(chunk_of(frame), spec)
    return frame


def _arrays(sent: ChunkColumns, spec: GameSpec) -> dict[str, Array]:
    wanted: dict[str, Any] = {
        name: np.dtype(dtype) for name, dtype in (REQUIRED | OPTIONAL).items()
    }
    wanted |= {
        name: space.dtype for name, space in (spec.obs_columns | spec.action_columns).items()
    }
    wanted["legal"] = np.dtype(np.bool_)
    if unknown := sent.columns.keys() - wanted.keys():
        names = [name[:40] for name in sorted(unknown)[:4]]
        raise Refused(
            "bad_columns", f"{names} are no columns of {spec.game}; known: {sorted(wanted)[:40]}"
        )
    if missing := {*REQUIRED, *spec.obs_columns, *spec.action_columns} - sent.columns.keys():
        raise Refused("bad_columns", f"{sorted(missing)[:8]} are missing")
    return {name: _array(name, values, wanted[name]) for name, values in sent.columns.items()}


def _array(name: str, values: list[Any], dtype: np.dtype[Any]) -> Array:
    try:
        with np.errstate(all="ignore"):
            found = np.array(values)
            array = found.astype(dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise Refused(
            "bad_columns", f"{name} is no column of {dtype}: {str(error)[:100]}"
        ) from None
    is_kind = found.dtype.kind in "biuf" and (dtype.kind == "b") == (found.dtype.kind == "b")
    # Floats are rounded to the column's precision; whatever else changed would be another value.
    if not is_kind or (dtype.kind != "f" and not np.array_equal(array, found)):
        raise Refused("bad_columns", f"{name} holds values that {dtype} cannot")
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
            "bad_session", f"session {text[:40]!r} is no UUID; make a UUIDv7 once per session"
        ) from None


def _player(text: str) -> PlayerName:
    try:
        return player_name(text)
    except InvalidName as error:
        raise Refused("bad_player", str(error)) from None


# --- Admission: which frames of a parcel may enter under a key, and whose they are from then on ---


@dataclass(frozen=True, slots=True)
class Admitted:
    """A frame with its player's pseudonym and the time."""

    frame: Frame
    n_steps: int
    """How many steps it says it brings, for the quota; ingest checks whether that is true."""


class Admission:
    """The door of every game of a deployment; what a key may not write never enters the stream."""

    def __init__(self, deployment_key: bytes, clock: Clock) -> None:
        self._deployment_key = deployment_key
        self._clock = clock
        self._doors: dict[str, Intake] = {}

    def admit(
        self,
        key: Key,
        game: str,
        frames: Sequence[Frame | Refused],
        players: Mapping[uuid.UUID, PlayerName],
    ) -> list[Admitted | Refused]:
        """For each frame the stamped one, or why it is refused for good; the game is a
        registered one."""
        door = self._doors.get(game)
        if door is None:
            door = self._doors[game] = Intake(self._deployment_key, GameName(game), self._clock)
        judged = iter(door.admit([one for one in frames if isinstance(one, Frame)], players))
        stamped = [next(judged) if isinstance(one, Frame) else one for one in frames]
        return [_owned(one, key, game) if isinstance(one, Frame) else one for one in stamped]


class _Facts(msgspec.Struct):
    """What of a chunk's metadata decides at the door."""

    game: str
    kind: str
    n_steps: str


class _Header(msgspec.Struct):
    metadata: _Facts = msgspec.field(name="__metadata__")


_read = msgspec.json.Decoder(_Header).decode


def _owned(frame: Frame, key: Key, game: str) -> Admitted | Refused:
    """The frame when its chunk is of the key's game and of a kind the key may write."""
    if frame.kind is not FrameKind.DATA:
        return Admitted(frame, 0)
    length = int.from_bytes(frame.body[:8], "little")
    if not 8 <= 8 + length <= min(len(frame.body), 8 + MAX_HEADER_BYTES):
        return Refused("bad_tensors", f"a header of {length} bytes in a body of {len(frame.body)}")
    try:
        # Only these facts are read here, at a tenth of the cost of all of them: ingest refuses
        # whatever is not exact.
        facts = _read(memoryview(frame.body)[8 : 8 + length]).metadata
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        return Refused("bad_tensors", f"the header is no chunk's: {str(error)[:100]}")
    if facts.game != game:
        return Refused("wrong_game", f"a chunk of {facts.game[:63]!r} was sent to {game}")
    if facts.kind != "player" and not key.may("work"):
        return Refused(
            "wrong_scope", f"chunks of kind {facts.kind[:20]!r} need a key with scope work"
        )
    said = facts.n_steps
    return Admitted(
        frame,
        min(int(said), MAX_STEPS) if said.isascii() and said.isdigit() and len(said) < 7 else 0,
    )


# --- The appender: many requests at once, gathered, appended by one thread, answered together -----


@dataclass(slots=True)
class _PendingFrames:
    frames: Sequence[Frame]
    size_bytes: int
    answer: "asyncio.Future[list[Ack]]"


class Appender:
    """Frames in, acks out; used on the event loop, with the disk in a thread. Full, it asks to
    come back later."""

    def __init__(self, stream: Stream, *, max_waiting_bytes: int = 64 * 1024 * 1024) -> None:
        self._stream = stream
        self._max_waiting_bytes = max_waiting_bytes
        # A thread of its own: whatever else reads the disk must not delay an ack.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="understudy-appender")
        self._waiting: list[_PendingFrames] = []
        self.waiting_bytes = 0
        self.trouble = ""
        """Why the stream took nothing the last time; empty once it takes frames again."""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def append(self, frames: Sequence[Frame]) -> list[Ack]:
        """One ack per frame; accepted means durable in the stream."""
        if not frames:
            return []
        size_bytes = sum(frame.size_bytes for frame in frames)
        if self._is_closed or self.waiting_bytes + size_bytes > self._max_waiting_bytes:
            what = (
                "the gateway is stopping"
                if self._is_closed
                else "the stream takes no more just now"
            )
            return [_again(what)] * len(frames)
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
                taken = self._take()
                frames = [frame for one in taken for frame in one.frames]
                self._answer(taken, await loop.run_in_executor(self._thread, self._append, frames))

    def _take(self) -> list[_PendingFrames]:
        size_bytes = 0
        count = 0
        for one in self._waiting:
            size_bytes += one.size_bytes
            if count and size_bytes > _MAX_APPEND_BYTES:
                break
            count += 1
        taken = self._waiting[:count]
        del self._waiting[:count]
        return taken

    def _append(self, frames: Sequence[Frame]) -> list[Ack]:
        try:
            acks = list(self._stream.append(frames))
            failed = [
                ack.error or "the stream did not say why"
                for ack in acks
                if not (ack.accepted or ack.refused)
            ]
            if failed or any(ack.accepted for ack in acks):
                self.trouble = failed[0] if failed else ""
            return acks
        except Exception as error:
            self.trouble = str(error) or repr(error)
            # Nothing was promised, so clients keep their frames; and whatever went wrong, the next
            # ones are tried.
            _log.error(
                "not_appended",
                frames=len(frames),
                error=repr(error)[:300],
                next="clients send them again",
            )
            what = (
                "there is no room just now"
                if isinstance(error, StorageFull)
                else "the stream does not answer"
            )
            return [_again(what)] * len(frames)

    def _answer(self, taken: Sequence[_PendingFrames], acks: Sequence[Ack]) -> None:
        at = 0
        for one in taken:
            own = list(acks[at : at + len(one.frames)])
            at += len(one.frames)
            self.waiting_bytes -= one.size_bytes
            if not one.answer.done():  # whoever asked may have gone
                one.answer.set_result(own)

    async def close(self) -> None:
        """Append what waits, then take no more."""
        self._is_closed = True
        self._wake.set()
        if self._task is not None:
            await self._task
        await asyncio.to_thread(self._thread.shutdown)


def _again(what: str) -> Ack:
    return Ack(False, retry_after_s=_RETRY_AFTER_S, error=what)
