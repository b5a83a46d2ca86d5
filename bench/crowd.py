"""A crowd of players in one thread: many kept connections that send real parcels when they are due, at little cost."""

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.games import EPISODE_STEPS, record
from understudy.core.builder import ChunkBuilder, encode_block
from understudy.core.frame import CONTENT_TYPE, Frame, encode_parcel
from understudy.core.game import GameSpec
from understudy.core.names import PlayerName, new_session, player_name
from understudy.core.ports import Ack

Answered = Callable[[int, bytes], None]
_AGAIN_S = 0.5
_PERSON = 1


def frames_of(spec: GameSpec, count: int, *, steps: int, seed: int) -> list[Frame]:
    """A person's first frames, each of this many steps, as a client encodes them."""
    n = (count * steps * (EPISODE_STEPS + 1)) // EPISODE_STEPS + 2 * EPISODE_STEPS
    obs = np.random.default_rng(seed).normal(0, 0.5, (n, 4)).astype(np.float32)
    builder = ChunkBuilder(spec, session=new_session(time.time()), max_steps=steps, client="bench")
    frames: list[Frame] = []
    first_step = 0
    for _ in record(builder, obs, by=_PERSON):
        block = builder.take()
        assert block is not None
        for encoded in encode_block(block, chunk_no=len(frames), first_step=first_step):
            assert encoded.frame is not None
            frames.append(encoded.frame)
            first_step += encoded.n_steps
        builder.pool.give(block.columns)
        if len(frames) >= count:
            break
    return frames[:count]


@dataclass(frozen=True, slots=True)
class Door:
    """Where a crowd sends to."""

    host: str
    port: int
    key: str
    game: str

    def parcel(self, frames: Sequence[Frame], player: str) -> bytes:
        """A whole request, ready to be written."""
        players: Mapping[uuid.UUID, PlayerName] = {frame.session: player_name(player) for frame in frames}
        body = encode_parcel(frames, players)
        return self._head("POST", "/frames", f"content-type: {CONTENT_TYPE}\r\ncontent-length: {len(body)}\r\n") + body

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
        self._answered: Answered | None = None
        self._transport: asyncio.Transport | None = None
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        answered, self._answered = self._answered, None
        if answered is not None:
            answered(0, b"")

    def ask(self, request: bytes, answered: Answered) -> None:
        assert self._transport is not None
        self._answered = answered
        self._transport.write(request)

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
        answered, self._answered = self._answered, None
        if answered is not None:
            answered(int(head[9:12]), body)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def lines(door: Door, count: int) -> list[Line]:
    """So many open connections."""
    loop = asyncio.get_running_loop()
    found: list[Line] = []
    for _ in range(count):
        found.append((await loop.create_connection(Line, door.host, door.port))[1])
    return found


@dataclass(slots=True)
class Heard:
    """What a crowd was told."""

    took_s: list[float] = field(default_factory=list)
    """From when a parcel was due to its acknowledgement."""
    late_s: list[float] = field(default_factory=list)
    """How late the crowd itself was in sending; not the gateway's doing."""
    acked: list[Frame] = field(default_factory=list)
    again: int = 0
    """Answers other than an acknowledgement; sent again, as a client would."""


class Player:
    """Sends a frame whenever it is due and the last one is answered."""

    def __init__(self, line: Line, door: Door, frames: Sequence[Frame], name: str, heard: Heard) -> None:
        self._line, self._frames, self._heard = line, frames, heard
        self._requests = [door.parcel([frame], name) for frame in frames]
        self._at = 0
        self.is_finished = asyncio.Event()

    def start(self, first_s: float, every_s: float) -> None:
        self._first_s, self._every_s = first_s, every_s
        self._plan()

    @property
    def _due_s(self) -> float:
        return self._first_s + self._at * self._every_s

    def _plan(self, pause_s: float = 0.0) -> None:
        if self._at == len(self._requests) or self._line.is_lost:
            self.is_finished.set()
            return
        loop = asyncio.get_running_loop()
        loop.call_at(max(self._due_s, loop.time() + pause_s), self._send)

    def _send(self) -> None:
        sent_s = asyncio.get_running_loop().time()
        self._heard.late_s.append(max(0.0, sent_s - self._due_s))
        self._line.ask(self._requests[self._at], self._answered)

    def _answered(self, status: int, body: bytes) -> None:
        if status != 200 or b'"accepted":true' not in body:
            self._heard.again += 1
            return self._plan(_AGAIN_S)
        self._heard.took_s.append(asyncio.get_running_loop().time() - self._due_s)
        self._heard.acked.append(self._frames[self._at])
        self._at += 1
        return self._plan()


async def play(players: Sequence[Player], *, linger_s: float, rng: random.Random, each: Callable[[], None]) -> None:
    """Everybody plays to the end, each with a phase of their own; `each` is called ten times a second."""
    now_s = asyncio.get_running_loop().time() + 0.5
    for player in players:
        player.start(now_s + rng.uniform(0.0, linger_s), linger_s)
    waiting = asyncio.gather(*(player.is_finished.wait() for player in players))
    while not waiting.done():
        each()
        await asyncio.wait([waiting], timeout=0.1)


class Granted:
    """A Link of what was acknowledged before, so that a ledger can note it afterwards."""

    keep_share = 1.0

    def send(
        self, frames: Sequence[Frame], players: Mapping[uuid.UUID, PlayerName], *, skipped_steps: int = 0
    ) -> Sequence[Ack]:
        return [Ack(True)] * len(frames)

    def close(self) -> None:
        """Nothing is open."""


def in_parcels(frames: Sequence[Frame], at_once: int) -> Iterator[Sequence[Frame]]:
    for at in range(0, len(frames), at_once):
        yield frames[at : at + at_once]
