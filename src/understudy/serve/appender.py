"""The way into the stream for many requests at once: gathered, appended by one thread, answered together."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import structlog

from understudy.core.errors import StorageFull
from understudy.core.frame import Frame
from understudy.core.ports import Ack, Stream

_log = structlog.get_logger("understudy.gateway")
_MAX_APPEND_BYTES = 8 * 1024 * 1024
_RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class _Waiting:
    frames: Sequence[Frame]
    size_bytes: int
    answer: "asyncio.Future[list[Ack]]"


class Appender:
    """Frames in, acks out; used on the event loop, with the disk in a thread. Full, it asks to come back later."""

    def __init__(self, stream: Stream, *, max_waiting_bytes: int = 64 * 1024 * 1024) -> None:
        self._stream, self._max_waiting_bytes = stream, max_waiting_bytes
        # A thread of its own: whatever else reads the disk must not delay an ack.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="understudy-appender")
        self._waiting: list[_Waiting] = []
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
            what = "the gateway is stopping" if self._is_closed else "the stream takes no more just now"
            return [_again(what)] * len(frames)
        self.waiting_bytes += size_bytes
        waiting = _Waiting(frames, size_bytes, asyncio.get_running_loop().create_future())
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

    def _take(self) -> list[_Waiting]:
        size_bytes, count = 0, 0
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
            failed = [ack.error or "the stream did not say why" for ack in acks if not (ack.accepted or ack.refused)]
            if failed or any(ack.accepted for ack in acks):
                self.trouble = failed[0] if failed else ""
            return acks
        except Exception as error:
            self.trouble = str(error) or repr(error)
            # Nothing was promised, so clients keep their frames; and whatever went wrong, the next ones are tried.
            _log.error("not_appended", frames=len(frames), error=repr(error)[:300], next="clients send them again")
            what = "there is no room just now" if isinstance(error, StorageFull) else "the stream does not answer"
            return [_again(what)] * len(frames)

    def _answer(self, taken: Sequence[_Waiting], acks: Sequence[Ack]) -> None:
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
