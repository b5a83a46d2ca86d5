"""A broker that dies, hangs or is away: nothing acknowledged is lost, nothing is stored twice, nobody waits for ever.

    players ─► KafkaStream ─► IngestService ─► LocalStore, with a real broker in the middle

Each claim has a control: the same run with one safeguard taken away must be seen by the same count.
"""

import contextlib
import os
import signal
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.backends.kafka import PATIENCE_S, Topic
from tests.ingest.specs import KnownSpecs
from understudy.app.roles.ingest import repeat
from understudy.core import session as session_module
from understudy.core.errors import StorageFailed, Unreachable
from understudy.core.frame import Frame, decode_frame
from understudy.core.names import new_session
from understudy.core.ports import Audit, Outcome, Stored, Stream
from understudy.core.session import Arrival, SessionState
from understudy.ingest.service import IngestService
from understudy.stores.local import LocalStore
from understudy.streams.kafka_writer import GRACE_S
from understudy.testing.samples import cart_spec, random_session, stamped
from understudy.testing.streams import read_all, sample_frames

SPEC = cart_spec()
PLAYERS = 4
TIMEOUT_S = 2.0
"""Shorter than a broker is away, so that frames run out of time while nobody knows whether they arrived."""

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
    """Players who send until told to stop, and remember what was acknowledged."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._changed = threading.Condition()
        self.acked: set[ChunkId] = set()
        self.refusals: Counter[str] = Counter()

    def play(self, seed: int, stop: threading.Event) -> None:
        rng = np.random.default_rng(seed)
        while not stop.is_set():
            chunks = random_session(SPEC, rng, n_chunks=12, session=new_session(time.time(), rng.bytes(10)))
            frames = list(stamped(chunks, received_s=time.time()))
            for start in range(0, len(frames), 3):
                self._send(frames[start : start + 3])
            time.sleep(0.01)

    def wait_for(self, count: int) -> None:
        """Until so many more were acknowledged."""
        with self._changed:
            wanted = len(self.acked) + count
            assert self._changed.wait_for(lambda: len(self.acked) >= wanted, timeout=60.0), self.refusals.most_common(1)

    def _send(self, frames: Sequence[Frame]) -> None:
        """As a client does: whatever is not durable is sent again, for as long as it takes."""
        give_up_s = time.monotonic() + 60.0
        while frames:
            outcomes = self._stream.append(frames)
            with self._changed:
                kept = [one for one, said in zip(frames, outcomes, strict=True) if said.durable]
                self.acked |= {(one.session, one.chunk_no) for one in kept}
                self._changed.notify_all()
            self.refusals.update(said.error or "" for said in outcomes if not said.durable)
            frames = [frame for frame, said in zip(frames, outcomes, strict=True) if not said.durable]
            assert time.monotonic() < give_up_s, f"not taken within a minute: {self.refusals.most_common(1)}"
            if frames:
                time.sleep(0.05)


def run(
    topic: Topic,
    folder: Path,
    trouble: Callable[[Table], None],
    *,
    wrap: Callable[[Stream], Stream] = lambda stream: stream,
) -> Found:
    """Players play while `trouble` happens; then everything is stored and counted."""
    stop, done = threading.Event(), threading.Event()
    with topic.open(timeout_s=TIMEOUT_S) as stream, topic.open() as reading, LocalStore(folder) as store:
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
        service.drain()
        frames = [decode_frame(record.raw) for records in read_all(reading).values() for record in records]
        items = store.tail(None, max_items=1_000_000, wait_s=0.0).items
        stored = Counter((one.frame.session, one.frame.chunk_no) for one in items if isinstance(one, Stored))
        in_stream = Counter((frame.session, frame.chunk_no) for frame in frames)
        return Found(table.acked, stored, in_stream, store.audit())


@pytest.fixture
def topic(kafka_server: Any) -> Iterator[Topic]:
    yield Topic(kafka_server)
    if not kafka_server.is_alive:  # a test that failed half way leaves the broker to the next one
        kafka_server.restart()


@contextlib.contextmanager
def hanging(server: Any) -> Iterator[None]:
    """A broker that takes connections and bytes, and says nothing."""
    if not server.pid:
        pytest.skip("the broker is somebody else's: tests may not stop it")
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def kill_and_hang(server: Any, table: Table) -> None:
    """Dies twice in the middle of appends, and hangs once: then what was sent arrives after its time is over."""
    for _ in range(2):
        table.wait_for(60)
        server.kill()
        server.restart()
    hang(server, table)


def hang(server: Any, table: Table) -> None:
    table.wait_for(60)
    with hanging(server):
        time.sleep(TIMEOUT_S + GRACE_S)
    table.wait_for(60)


def test_a_broker_killed_in_the_middle_loses_nothing_and_doubles_nothing(topic: Topic, tmp_path: Path):
    found = run(topic, tmp_path, lambda table: kill_and_hang(topic.server, table))
    assert len(found.acked) > 100
    assert found.doubled_in_stream > 0, "no frame was sent twice: the fault did not happen"
    assert (found.lost, max(found.stored.values())) == (0, 1)
    audit = found.audit
    assert (audit.duplicate_chunks, audit.duplicate_steps, audit.gap_chunks, audit.quarantined) == (0, 0, 0, 0)
    assert not audit.corrupt
    print(f"acked {len(found.acked)}, lost 0, doubled in the stream {found.doubled_in_stream}, stored twice 0")


class Hasty:
    """Calls a frame durable once it is handed over, as many a producer does."""

    def __init__(self, inner: Stream) -> None:
        self._inner, self._pool = inner, ThreadPoolExecutor(64)

    def append(self, frames: Sequence[Frame]) -> Sequence[Outcome]:
        self._pool.submit(self._inner.append, frames)
        return [Outcome(durable=True)] * len(frames)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_control_acks_before_the_delivery_report_lose_frames(topic: Topic, tmp_path: Path):
    def away(table: Table) -> None:
        table.wait_for(60)
        topic.server.kill()
        time.sleep(TIMEOUT_S + GRACE_S)
        topic.server.restart()

    assert run(topic, tmp_path, away, wrap=Hasty).lost > 0


def test_control_without_dedup_the_audit_sees_duplicates(topic: Topic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    admit = session_module.admit

    def admit_again(state: SessionState | None, arrival: Arrival) -> tuple[SessionState, str]:
        after, verdict = admit(state, arrival)
        return after, "" if verdict == "seen" else verdict

    for name, module in list(sys.modules.items()):
        if name.startswith("understudy.stores.") and getattr(module, "admit", None) is admit:
            monkeypatch.setattr(module, "admit", admit_again)

    found = run(topic, tmp_path, lambda table: hang(topic.server, table))
    assert found.doubled_in_stream > 0
    assert found.audit.duplicate_chunks > 0


# --- nobody waits for ever ------------------------------------------------------------------------------------------


def test_appending_and_reading_end_in_time_while_the_broker_hangs_and_go_on_after(topic: Topic):
    with topic.open(timeout_s=TIMEOUT_S) as stream:
        first, second, third = sample_frames(3)
        assert stream.append([first])[0].durable
        partition, (record,) = next((name, found) for name, found in read_all(stream).items() if found)
        with hanging(topic.server):
            began_s = time.monotonic()
            (outcome,) = stream.append([second])
            assert (outcome.durable, outcome.retry_after_s > 0) == (False, True)
            with pytest.raises(Unreachable):
                stream.read(partition, record.position, max_bytes=1, wait_s=0.0)
            assert time.monotonic() - began_s < 2 * (TIMEOUT_S + GRACE_S) + 1.0
        append_until_durable(stream, third)
        raws = {one.raw for one in read_all(stream)[partition]}
        assert raws >= {first.encode(), third.encode()}


def append_until_durable(stream: Stream, frame: Frame) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not stream.append([frame])[0].durable:
        assert time.monotonic() < give_up_s


def test_a_broker_away_is_one_clear_error_and_closing_is_quick(topic: Topic):
    with topic.open(timeout_s=TIMEOUT_S) as stream:
        partition = stream.partitions()[0].id
        stream.read(partition, None, max_bytes=1, wait_s=0.0)
        topic.server.kill()
        (outcome,) = stream.append(sample_frames(1))
        assert "no broker at 127.0.0.1" in str(outcome.error)
        with pytest.raises(StorageFailed, match=r"check that it runs"):
            stream.read(partition, None, max_bytes=1, wait_s=0.0)
        with pytest.raises(Unreachable, match="Connection refused"):
            topic.open(open_timeout_s=1)
        began_s = time.monotonic()
        stream.close()
        assert time.monotonic() - began_s < 3.0
    topic.server.restart()
