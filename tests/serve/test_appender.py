"""Frames of many requests are appended together; none is acknowledged unless it is durable."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

from tests.serve.gateways import frames_of, played
from understudy.experience.frame import Frame
from understudy.ports import Ack
from understudy.serve.intake import Appender


class Slow:
    """A stream that appends when it is let."""

    def __init__(self) -> None:
        self.calls: list[list[Frame]] = []
        self.go_on = threading.Event()
        self.outcome = Ack(True)

    def append(self, frames: Sequence[Frame]) -> Sequence[Ack]:
        assert self.go_on.wait(10)
        self.calls.append(list(frames))
        return [self.outcome] * len(frames)

    def partitions(self) -> Any: ...
    def read(self, *_: Any, **__: Any) -> Any: ...
    def close(self) -> None: ...


FRAMES = frames_of(played(n_chunks=12))
SIZE = sum(frame.size_bytes for frame in FRAMES)


def test_pending_frames_are_appended_together_and_each_request_gets_its_own_acks():
    async def try_it() -> None:
        stream = Slow()
        appender = Appender(stream)
        appender.start()
        sends = [
            asyncio.create_task(appender.append(FRAMES[at : at + 2])) for at in range(0, 12, 2)
        ]
        await asyncio.sleep(0.05)
        assert appender.waiting_bytes == SIZE
        stream.go_on.set()
        assert [[ack.accepted for ack in await one] for one in sends] == [[True, True]] * 6
        assert len(stream.calls) <= 2, "what came while one append was under way goes together"
        assert [frame for call in stream.calls for frame in call] == FRAMES
        assert appender.waiting_bytes == 0
        assert await appender.append([]) == []
        await appender.close()

    asyncio.run(try_it())


def test_a_full_appender_asks_clients_to_retry():
    async def try_it() -> None:
        stream = Slow()
        appender = Appender(stream, max_waiting_bytes=SIZE)
        appender.start()
        first = asyncio.create_task(appender.append(FRAMES))
        await asyncio.sleep(0.05)
        (ack,) = await appender.append(FRAMES[:1])
        assert (ack.accepted, ack.refused, ack.retry_after_s) == (False, None, 1.0)
        stream.go_on.set()
        assert all(ack.accepted for ack in await first)
        assert (await appender.append(FRAMES[:1]))[0].accepted
        await appender.close()

    asyncio.run(try_it())


def test_closing_appends_pending_frames_and_accepts_no_more():
    async def try_it() -> None:
        stream = Slow()
        appender = Appender(stream)
        appender.start()
        sends = [asyncio.create_task(appender.append([frame])) for frame in FRAMES]
        gone = asyncio.create_task(appender.append(FRAMES[:1]))
        await asyncio.sleep(0.05)
        gone.cancel()
        closing = asyncio.create_task(appender.close())
        await asyncio.sleep(0.05)
        (late,) = await appender.append(FRAMES[:1])
        assert (late.accepted, late.error) == (False, "the gateway is stopping")
        stream.go_on.set()
        await closing
        assert [ack.accepted for acks in await asyncio.gather(*sends) for ack in acks] == [
            True
        ] * 12
        assert appender.waiting_bytes == 0
        await appender.close()

    asyncio.run(try_it())


def test_a_stream_error_is_reported_until_frames_are_accepted_again():
    async def try_it() -> None:
        stream = Slow()
        stream.go_on.set()
        appender = Appender(stream)
        appender.start()
        for outcome, wanted in (
            (Ack(True), ""),
            (Ack(False, None, 1.0, "no room for it"), "no room for it"),
            (Ack(False, "too_large: x"), "no room for it"),
            (Ack(True), ""),
        ):
            stream.outcome = outcome
            await appender.append(FRAMES[:1])
            assert appender.error == wanted
        appender._stream = None  # type: ignore[assignment]
        assert not (await appender.append(FRAMES[:1]))[0].accepted
        assert "append" in appender.error
        await appender.close()

    asyncio.run(try_it())


def test_the_sender_gets_the_streams_outcome_of_each_frame():
    async def try_it() -> None:
        stream = Slow()
        stream.go_on.set()
        appender = Appender(stream)
        appender.start()
        for outcome, wanted in (
            (Ack(False, "too_large: x"), (False, "too_large: x", 0.0)),
            (Ack(False, None, 2.5, "throttled"), (False, None, 2.5)),
        ):
            stream.outcome = outcome
            (ack,) = await appender.append(FRAMES[:1])
            assert (ack.accepted, ack.refused, ack.retry_after_s) == wanted
        await appender.close()

    asyncio.run(try_it())
