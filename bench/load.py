"""Simulated players in one thread: many open connections that send real frame batches on time.

The players of `understudy.simulation` use the client, which sends for all of its players over one
connection. A thousand games on a thousand machines are a thousand connections, and a thousand
clients would need more than the two measured cores. So these players write requests of previously
recorded frames directly to sockets.
"""

import asyncio
import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from understudy.core.names import PlayerName, player_name
from understudy.experience.frame import CONTENT_TYPE, Frame, encode_frame_batch

Answer = tuple[int, bytes]
"""Status and body; status 0 if the connection was lost."""
_AGAIN_S = 0.5


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The gateway, key and game that players send to."""

    host: str
    port: int
    key: str
    game: str

    def frame_batch(self, frames: Sequence[Frame], player: str) -> bytes:
        """A complete request, ready to be sent."""
        players: Mapping[uuid.UUID, PlayerName] = {
            frame.session: player_name(player) for frame in frames
        }
        body = encode_frame_batch(frames, players)
        return (
            self._head(
                "POST",
                "/frames",
                f"content-type: {CONTENT_TYPE}\r\ncontent-length: {len(body)}\r\n",
            )
            + body
        )

    def weights(self, after: int, wait_s: float) -> bytes:
        """A request that waits for the next policy."""
        return self._head("GET", f"/weights?after={after}&wait_s={wait_s:g}", "")

    def _head(self, method: str, path: str, more: str) -> bytes:
        return (
            f"{method} /v1/games/{self.game}{path} HTTP/1.1\r\nhost: {self.host}:{self.port}\r\n"
            f"authorization: Bearer {self.key}\r\n{more}\r\n"
        ).encode()


class Line(asyncio.Protocol):
    """One open connection; one request at a time."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._answer: asyncio.Future[Answer] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((0, b""))

    def ask(self, request: bytes) -> asyncio.Future[Answer]:
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            self._answer.set_result((0, b""))
        else:
            self._transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        at = self._buffer.find(b"\r\n\r\n")
        if at < 0:
            return
        head = bytes(self._buffer[:at]).lower()
        length_at = head.find(b"content-length:")
        size = int(head[length_at + 15 :].split(b"\r\n", 1)[0]) if length_at >= 0 else 0
        if len(self._buffer) < at + 4 + size:
            return
        body = bytes(self._buffer[at + 4 : at + 4 + size])
        del self._buffer[: at + 4 + size]
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((int(head[9:12]), body))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def lines(endpoint: Endpoint, count: int) -> list[Line]:
    """Open this many connections."""
    loop = asyncio.get_running_loop()
    return [
        (await loop.create_connection(Line, endpoint.host, endpoint.port))[1] for _ in range(count)
    ]


@dataclass(slots=True)
class Answers:
    """The gateway's answers to all players."""

    took_s: list[float] = field(default_factory=list)
    """Time from when a batch was due until its acknowledgement."""
    late_s: list[float] = field(default_factory=list)
    """How late each batch was sent; a delay of the players, not of the gateway."""
    acked: list[Frame] = field(default_factory=list)
    again: int = 0
    """Number of answers other than an ack; the batch is then sent again, as a client does."""

    async def play(
        self, line: Line, requests: Sequence[tuple[Frame, bytes]], *, first_s: float, every_s: float
    ) -> None:
        """Send each frame when it is due and the previous one is answered."""
        loop = asyncio.get_running_loop()
        for at, (frame, request) in enumerate(requests):
            due_s = first_s + at * every_s
            next_s = due_s
            while True:
                await asyncio.sleep(max(0.0, next_s - loop.time()))
                self.late_s.append(max(0.0, loop.time() - due_s))
                status, body = await line.ask(request)
                if status == 200 and b'"accepted":true' in body:
                    break
                self.again += 1
                if not status:
                    return
                next_s = loop.time() + _AGAIN_S
            self.took_s.append(loop.time() - due_s)
            self.acked.append(frame)


async def play_all(
    endpoint: Endpoint,
    played: Sequence[Sequence[Frame]],
    *,
    linger_s: float,
    rng: random.Random,
    each: Callable[[], None],
) -> Answers:
    """Play all sessions to the end, with random phases; calls `each` ten times a second."""
    answers = Answers()
    opened = await lines(endpoint, len(played))
    requests = [
        [(frame, endpoint.frame_batch([frame], f"p-{at}")) for frame in frames]
        for at, frames in enumerate(played)
    ]
    now_s = asyncio.get_running_loop().time() + 0.5
    waiting = asyncio.gather(
        *(
            answers.play(
                line, requests[at], first_s=now_s + rng.uniform(0.0, linger_s), every_s=linger_s
            )
            for at, line in enumerate(opened)
        )
    )
    while not waiting.done():
        each()
        await asyncio.wait([waiting], timeout=0.1)
    await waiting  # raises the error of a failed player
    for line in opened:
        line.close()
    return answers
