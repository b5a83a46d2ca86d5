"""A real gateway on a loopback port, and callers of it, for the tests of serving."""

import json
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import urllib3

from tests.act.policies import random_policy
from understudy.core.clock import Clock, SystemClock
from understudy.core.names import new_session, player_name
from understudy.core.signed import Signer
from understudy.experience.chunk import Chunk
from understudy.experience.frame import CONTENT_TYPE, Frame, decode_frame, encode_frame_batch
from understudy.experience.game import GameSpec
from understudy.experience.intake import deployment_key
from understudy.models.keys import Keys
from understudy.models.manifest import Lineage, Manifest
from understudy.models.objects import FolderObjects
from understudy.models.registry import Registry
from understudy.serve.gateway import Gateway
from understudy.serve.server import GatewayServer, Listen
from understudy.serve.state import GatewayConfig, GatewayState
from understudy.streams.file import FileStream
from understudy.testing.samples import cart_spec, random_session

SIGNER = Signer(bytes(range(32)))
TRUSTED = {SIGNER.key_id: SIGNER.public}
CART = cart_spec()
PLENTY: dict[str, Any] = {"requests_s": 1e6, "bytes_s": 1e11}


@dataclass(frozen=True)
class Reply:
    """What came back."""

    status: int
    raw: bytes
    headers: Any

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def code(self) -> str:
        return str(self.json["error"]["code"])


@dataclass
class Running:
    """A gateway that serves, and everything behind it."""

    folder: Path
    server: GatewayServer
    keys: Keys
    registry: Registry
    stream: FileStream
    thread: threading.Thread
    pool: urllib3.PoolManager = field(
        default_factory=lambda: urllib3.PoolManager(maxsize=64, retries=False)
    )

    @property
    def url(self) -> str:
        return self.server.url

    def key(self, *scopes: Any, **facts: Any) -> str:
        """A new key's text, known to the gateway at once."""
        text, _ = self.keys.create(scopes or ("play",), **PLENTY | facts)
        self.keys.follow()
        return text

    def register(self, spec: GameSpec = CART) -> GameSpec:
        self.registry.register(spec)
        return spec

    def release(
        self, spec: GameSpec, kind: str = "argmax", *, promote: bool = True, **facts: Any
    ) -> Manifest:
        """A new model of random weights."""
        epoch = self.registry.takeover(spec.game, owner="test")
        manifest = self.registry.release(
            random_policy(spec, kind, **facts), Lineage(algorithm="dqn"), epoch=epoch
        )
        if promote:
            self.registry.set_alias(spec.game, "champion", manifest.model_no, why="test")
        return manifest

    def ask(
        self,
        method: str,
        path: str,
        key: str | None = None,
        body: bytes | Any = None,
        *,
        headers: dict[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> Reply:
        """One request; what is not bytes is sent as JSON."""
        sent = dict(headers or {})
        if key is not None:
            sent["Authorization"] = f"Bearer {key}"
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            sent.setdefault("Content-Type", "application/json")
        got = self.pool.request(method, self.url + path, body=body, headers=sent, timeout=timeout_s)
        return Reply(got.status, got.data, got.headers)

    def send(
        self, key: str, frames: Sequence[Frame], player: str = "ada", game: str = "cart"
    ) -> Reply:
        """Sends a batch whose sessions are all of one player."""
        players = {frame.session: player_name(player) for frame in frames}
        body = encode_frame_batch(frames, players)
        return self.ask(
            "POST", f"/v1/games/{game}/frames", key, body, headers={"Content-Type": CONTENT_TYPE}
        )

    def streamed(self) -> list[Frame]:
        """Every frame that the stream holds, read by a reader of its own."""
        reader = FileStream(self.folder / "stream")
        try:
            return [
                decode_frame(record.raw)
                for partition in reader.partitions()
                for record in reader.read(partition.id, None, max_bytes=1 << 30, wait_s=0).records
            ]
        finally:
            reader.close()

    def stop(self) -> None:
        self.server.stop()
        self.thread.join(20)
        assert not self.thread.is_alive(), "the gateway did not stop"
        self.pool.clear()


@contextmanager
def running(
    folder: Path,
    config: GatewayConfig | None = None,
    listen: Listen | None = None,
    clock: Clock | None = None,
) -> Iterator[Running]:
    """A gateway on a folder that others may use too."""
    clock = clock or SystemClock()
    objects = FolderObjects(folder / "models")
    keys = Keys(objects, trusted=TRUSTED, signer=SIGNER, clock=clock)
    registry = Registry(objects, trusted=TRUSTED, signer=SIGNER)
    stream = FileStream(folder / "stream")

    def create_state() -> GatewayState:
        return GatewayState(
            config=config or GatewayConfig(),
            stream=stream,
            registry=registry,
            keys=keys,
            trusted=TRUSTED,
            deployment_key=deployment_key(folder),
            clock=clock,
        )

    server = GatewayServer(Gateway(create_state), listen or Listen())
    ready = threading.Event()
    thread = threading.Thread(target=server.run, args=(ready.set,), daemon=True)
    thread.start()
    assert ready.wait(60)
    found = Running(folder, server, keys, registry, stream, thread)
    try:
        yield found
    finally:
        found.stop()


def played(spec: GameSpec = CART, *, n_chunks: int = 3, seed: int = 0, **more: Any) -> list[Chunk]:
    """A session that began just now."""
    return random_session(
        spec,
        np.random.default_rng(seed),
        n_chunks=n_chunks,
        session=more.pop("session", new_session()),
        **more,
    )


def frames_of(chunks: Sequence[Chunk]) -> list[Frame]:
    return [chunk.frame() for chunk in chunks]


def as_columns(chunk: Chunk, player: str = "ada") -> dict[str, Any]:
    """A chunk as a small client sends it."""
    meta = chunk.meta
    return {
        "player": player,
        "session": str(meta.session),
        "chunk_no": meta.chunk_no,
        "first_step": meta.first_step,
        "consent": meta.consent,
        "client": meta.client,
        "episodes": [note.to_json() for note in meta.episodes],
        "columns": {name: column.tolist() for name, column in chunk.columns.items()},
    }


def fresh() -> uuid.UUID:
    return new_session()
