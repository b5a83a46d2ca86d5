"""Players that send to a topic while its brokers fail, ingest that stores it, and the result."""

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.ingest.specs import KnownSpecs
from tests.integration.kafka import Topic
from understudy.core.errors import Unreachable
from understudy.core.names import new_session
from understudy.experience.frame import Frame, decode_frame
from understudy.ingest.service import IngestService
from understudy.platform.ingest import repeat
from understudy.ports import Audit, Stored, Stream
from understudy.stores.local import LocalStore
from understudy.testing.samples import cart_spec, random_session, stamped
from understudy.testing.streams import read_all

SPEC = cart_spec()
PLAYERS = 4
TIMEOUT_S = 2.0
"""Shorter than a broker's downtime, so that frames time out with an unknown outcome."""

ChunkId = tuple[uuid.UUID, int]


@dataclass(frozen=True)
class Found:
    """What a run left."""

    acked: set[ChunkId]
    stored: Counter[ChunkId]
    in_stream: Counter[ChunkId]
    audit: Audit

    @property
    def lost(self) -> int:
        return len(self.acked - set(self.stored))

    @property
    def doubled_in_stream(self) -> int:
        return sum(count - 1 for count in self.in_stream.values())


class Table:
    """Players that send until stopped, and record what was acknowledged."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._changed = threading.Condition()
        self.acked: set[ChunkId] = set()
        self.refusals: Counter[str] = Counter()

    def play(self, seed: int, stop: threading.Event) -> None:
        rng = np.random.default_rng(seed)
        while not stop.is_set():
            chunks = random_session(
                SPEC, rng, n_chunks=12, session=new_session(time.time(), rng.bytes(10))
            )
            frames = list(stamped(chunks, received_s=time.time()))
            for start in range(0, len(frames), 3):
                self._send(frames[start : start + 3])
            time.sleep(0.01)

    def wait_for(self, count: int) -> None:
        """Until so many more were acknowledged."""
        with self._changed:
            wanted = len(self.acked) + count
            assert self._changed.wait_for(lambda: len(self.acked) >= wanted, timeout=60.0), (
                self.refusals.most_common(1)
            )

    def _send(self, frames: Sequence[Frame]) -> None:
        """As a client does: whatever is not durable is sent again, for as long as it takes."""
        give_up_s = time.monotonic() + 60.0
        while frames:
            outcomes = self._stream.append(frames)
            with self._changed:
                kept = [one for one, said in zip(frames, outcomes, strict=True) if said.accepted]
                self.acked |= {(one.session, one.chunk_no) for one in kept}
                self._changed.notify_all()
            self.refusals.update(said.error or "" for said in outcomes if not said.accepted)
            frames = [
                frame for frame, said in zip(frames, outcomes, strict=True) if not said.accepted
            ]
            assert time.monotonic() < give_up_s, (
                f"not taken within a minute: {self.refusals.most_common(1)}"
            )
            if frames:
                time.sleep(0.05)


def drain(service: IngestService) -> None:
    """Store all that is there, for as long as brokers find a leader."""
    give_up_s = time.monotonic() + 60.0
    while True:
        try:
            service.drain()
            return
        except Unreachable:
            assert time.monotonic() < give_up_s


def run(
    topic: Topic,
    folder: Path,
    trouble: Callable[[Table], None],
    *,
    wrap: Callable[[Stream], Stream] = lambda stream: stream,
) -> Found:
    """Players play while `trouble` happens; then everything is stored and counted."""
    stop = threading.Event()
    done = threading.Event()
    with (
        topic.open(timeout_s=TIMEOUT_S) as stream,
        topic.open() as reading,
        LocalStore(folder) as store,
    ):
        table = Table(wrap(stream))
        service = IngestService(reading, store, KnownSpecs(SPEC), owner="test")
        with ThreadPoolExecutor(PLAYERS + 1) as pool:
            playing = [pool.submit(table.play, seed, stop) for seed in range(PLAYERS)]
            ingesting = pool.submit(repeat, service.step, done)
            try:
                trouble(table)
            finally:
                stop.set()
            for one in playing:
                one.result()
            done.set()
            ingesting.result()
        drain(service)
        frames = [
            decode_frame(record.raw) for records in read_all(reading).values() for record in records
        ]
        items = store.tail(None, max_items=1_000_000, wait_s=0.0).items
        stored = Counter(
            (one.frame.session, one.frame.chunk_no) for one in items if isinstance(one, Stored)
        )
        in_stream = Counter((frame.session, frame.chunk_no) for frame in frames)
        return Found(table.acked, stored, in_stream, store.audit())
