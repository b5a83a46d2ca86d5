"""A crowd of players in one thread: many kept connections that send real parcels when they are due,
at little cost.

The people of `understudy.simulation` play through the client, which sends for all of its players
over one connection. A thousand games on a thousand machines are a thousand connections, and a
thousand clients would need more than the two cores that are measured: so this crowd writes requests
to sockets itself, of frames that were recorded before.
"""

import asyncio
import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from understudy.core.names import PlayerName, player_name
from understudy.experience.frame import CONTENT_TYPE, Frame, encode_parcel

Answer = tuple[int, bytes]
"""Status and body; status 0 when the connection was lost."""
_AGAIN_S = 0.5


@dataclass(frozen=True, slots=True)
class Door:
    """Where a crowd sends to."""

    host: str
    port: int
    key: str
    game: str

    def parcel(self, frames: Sequence[Frame], player: str) -> bytes:
        """A whole request, ready to be written."""
        players: Mapping[uuid.UUID, PlayerName] = {
            frame.session: player_name(player) for frame in frames
        }
        body = encode_parcel(frames, players)
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
    """One kept connection; a request at a time."""

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
        found = head.find(b"content-length:")
        size = int(head[found + 15 :].split(b"\r\n", 1)[0]) if found >= 0 else 0
        if len(self._buffer) < at + 4 + size:
            return
        body = bytes(self._buffer[at + 4 : at + 4 + size])
        del self._buffer[: at + 4 + size]
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((int(head[9:12]), body))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def lines(door: Door, count: int) -> list[Line]:
    """So many open connections."""
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(Line, door.host, door.port))[1] for _ in range(count)]


@dataclass(slots=True)
class Heard:
    """What a crowd was answered."""

    took_s: list[float] = field(default_factory=list)
    """From when a parcel was due to its acknowledgement."""
    late_s: list[float] = field(default_factory=list)
    """How late the crowd itself was in sending; not the gateway's doing."""
    acked: list[Frame] = field(default_factory=list)
    again: int = 0
    """Answers other than an acknowledgement; sent again, as a client would."""

    async def play(
        self, line: Line, requests: Sequence[tuple[Frame, bytes]], *, first_s: float, every_s: float
    ) -> None:
        """Send each frame when it is due and the last one is answered."""
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
    door: Door,
    played: Sequence[Sequence[Frame]],
    *,
    linger_s: float,
    rng: random.Random,
    each: Callable[[], None],
) -> Heard:
    """All of them play to the end, each with a phase of its own; `each` is called ten times a
    second."""
    heard = Heard()
    opened = await lines(door, len(played))
    requests = [
        [(frame, door.parcel([frame], f"p-{at}")) for frame in frames]
        for at, frames in enumerate(played)
    ]
    now_s = asyncio.get_running_loop().time() + 0.5
    waiting = asyncio.gather(
        *(
            heard.play(
                line, requests[at], first_s=now_s + rng.uniform(0.0, linger_s), every_s=linger_s
            )
            for at, line in enumerate(opened)
        )
    )
    while not waiting.done():
        each()
        await asyncio.wait([waiting], timeout=0.1)
    await waiting  # raises what a player died of
    for line in opened:
        line.close()
    return heard
