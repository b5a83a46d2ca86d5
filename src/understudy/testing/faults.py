"""Parts that fail on demand, the way real streams, links, stores and disks fail."""

import errno
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from understudy.core.errors import StorageFailed
from understudy.core.log import sync_data
from understudy.core.names import PlayerName
from understudy.experience.frame import Frame
from understudy.experience.game import GameSpec
from understudy.ports import (
    Ack,
    Claim,
    Cursor,
    ExperienceStore,
    Link,
    LiveModels,
    Partition,
    Position,
    Read,
    Receipt,
    SessionFilter,
    SessionInfo,
    Stream,
    Tail,
    TicketBatch,
    WriteBatch,
)


class Crash(BaseException):
    """Simulates the death of a process; `except Exception` does not catch it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The probability of each fault, from 0 to 1."""

    duplicate: float = 0.0
    """A frame arrives twice."""
    reorder: float = 0.0
    """The frames of a call arrive in another order."""
    fail: float = 0.0
    """A frame is not accepted, and its ack reports that."""
    lose_answer: float = 0.0
    """The call fails although the frames were accepted."""


class _Dice:
    """Draws which frames are accepted and in which order they arrive."""

    def __init__(self, faults: Faults, rng: np.random.Generator) -> None:
        self._faults = faults
        self._rng = rng

    def __call__(self, probability: float) -> bool:
        return bool(self._rng.random() < probability)

    def accepted(self, count: int) -> list[bool]:
        return [not self(self._faults.fail) for _ in range(count)]

    def arrivals(self, frames: Sequence[Frame]) -> list[Frame]:
        arriving = [
            copy
            for frame in frames
            for copy in [frame] * (2 if self(self._faults.duplicate) else 1)
        ]
        if self(self._faults.reorder):
            arriving = [arriving[index] for index in self._rng.permutation(len(arriving))]
        return arriving


class FaultyStream:
    """A Stream that duplicates, reorders and fails frames, and loses responses after success."""

    def __init__(self, inner: Stream, faults: Faults, rng: np.random.Generator) -> None:
        self._inner = inner
        self._faults = faults
        self._dice = _Dice(faults, rng)

    def append(self, frames: Sequence[Frame]) -> Sequence[Ack]:
        accepted = self._dice.accepted(len(frames))
        arriving = self._dice.arrivals(
            [frame for frame, ok in zip(frames, accepted, strict=True) if ok]
        )
        acks = self._inner.append(arriving)
        if not all(ack.accepted for ack in acks):
            return [Ack(False, error="injected: the inner stream failed")] * len(frames)
        if self._dice(self._faults.lose_answer):
            raise StorageFailed("injected: the frames were stored and the response was lost")
        return [Ack(True) if ok else Ack(False, error="injected") for ok in accepted]

    def partitions(self) -> Sequence[Partition]:
        return self._inner.partitions()

    def read(
        self, partition: str, after: Position | None, *, max_bytes: int, wait_s: float
    ) -> Read:
        return self._inner.read(partition, after, max_bytes=max_bytes, wait_s=wait_s)

    def close(self) -> None:
        self._inner.close()


class FaultyLink:
    """A Link that duplicates, reorders and defers frames, and times out after success."""

    def __init__(
        self,
        inner: Link,
        faults: Faults,
        rng: np.random.Generator,
        *,
        error: Callable[[], Exception] = lambda: TimeoutError("injected: no response in time"),
    ) -> None:
        self._inner = inner
        self._faults = faults
        self._dice = _Dice(faults, rng)
        self._error = error

    def register(self, spec: GameSpec) -> None:
        self._inner.register(spec)

    @property
    def recording_rate(self) -> float:
        return self._inner.recording_rate

    def send(
        self,
        frames: Sequence[Frame],
        players: Mapping[uuid.UUID, PlayerName],
        *,
        skipped_steps: int = 0,
    ) -> Sequence[Ack]:
        accepted = self._dice.accepted(len(frames))
        arriving = self._dice.arrivals(
            [frame for frame, ok in zip(frames, accepted, strict=True) if ok]
        )
        acks_by_id: dict[tuple[uuid.UUID, int], Ack] = {}
        acks = (
            self._inner.send(arriving, players, skipped_steps=skipped_steps)
            if arriving or skipped_steps
            else ()
        )
        for frame, ack in zip(arriving, acks, strict=True):
            acks_by_id[frame.session, frame.chunk_no] = ack
        if self._dice(self._faults.lose_answer):
            raise self._error()
        return [
            acks_by_id.get((frame.session, frame.chunk_no), Ack(False, retry_after_s=0.001))
            for frame in frames
        ]

    def bot(self, after: int, *, wait_s: float, schema: str | None = None) -> LiveModels | None:
        if self._dice(self._faults.lose_answer):
            raise self._error()
        return self._inner.bot(after, wait_s=wait_s, schema=schema)

    def tickets(self, n: int, *, schema: str, with_control: bool = True) -> TicketBatch:
        if self._dice(self._faults.lose_answer):
            raise self._error()
        return self._inner.tickets(n, schema=schema, with_control=with_control)

    def policy(self, model_no: int) -> bytes:
        return self._inner.policy(model_no)

    def close(self) -> None:
        self._inner.close()


class CrashingStore:
    """An ExperienceStore that raises Crash after its nth durable write if `dies(n)` is true."""

    def __init__(self, inner: ExperienceStore, dies: Callable[[int], bool]) -> None:
        self._inner = inner
        self._dies = dies
        self.writes = 0

    def claim(self, partition: str, *, owner: str, ttl_s: float) -> Claim:
        return self._inner.claim(partition, owner=owner, ttl_s=ttl_s)

    def write(self, batch: WriteBatch) -> Receipt:
        receipt = self._inner.write(batch)
        self.writes += 1
        if self._dies(self.writes):
            raise Crash(f"after write {self.writes}")
        return receipt

    def tail(self, cursor: Cursor | None, *, max_items: int, wait_s: float) -> Tail:
        return self._inner.tail(cursor, max_items=max_items, wait_s=wait_s)

    def sessions(self, session_filter: SessionFilter) -> Iterator[SessionInfo]:
        return self._inner.sessions(session_filter)

    def forget(self, player: bytes) -> int:
        return self._inner.forget(player)

    def close(self) -> None:
        self._inner.close()


class FaultySync:
    """A Sync that counts its calls, may be slow, and fails chosen calls with EIO or ENOSPC.

    Calls are counted from 1.
    """

    def __init__(
        self, *, eio_at: Collection[int] = (), full_at: Collection[int] = (), delay_s: float = 0.0
    ) -> None:
        self._eio_at = eio_at
        self._full_at = full_at
        self._delay_s = delay_s
        self.calls = 0

    def __call__(self, descriptor: int) -> None:
        self.calls += 1
        if self._delay_s:
            time.sleep(self._delay_s)
        for calls, code in ((self._eio_at, errno.EIO), (self._full_at, errno.ENOSPC)):
            if self.calls in calls:
                raise OSError(code, f"injected: {os.strerror(code)}")
        sync_data(descriptor)
