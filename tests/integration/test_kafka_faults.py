"""A broker that dies, hangs or is unreachable: no loss, no duplicates, and every call times out.

    players ─► KafkaStream ─► IngestService ─► LocalStore, with a real broker in the middle

Each claim has a control: the same run with one safeguard taken away must be seen by the same count.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ingest.specs import KnownSpecs
from tests.integration.hanging import hanging
from tests.integration.kafka import WAIT_TIMEOUT_S, Skewed, Topic
from tests.integration.kafka_table import TIMEOUT_S, Table, run
from understudy.core.errors import StorageFailed, Unreachable
from understudy.core.names import new_session
from understudy.experience import session as session_module
from understudy.experience.frame import Frame
from understudy.experience.session import Arrival, SessionState
from understudy.ingest.service import IngestConfig, IngestService
from understudy.ports import Ack, Stored, Stream
from understudy.stores import database
from understudy.stores.local import LocalStore
from understudy.streams.kafka import GRACE_S, open_kafka
from understudy.testing.samples import cart_spec, random_session, stamped
from understudy.testing.streams import read_all, sample_frames

SPEC = cart_spec()


@pytest.fixture
def topic(kafka_server: Any) -> Iterator[Topic]:
    yield Topic(kafka_server)
    if not kafka_server.is_alive:  # a test that failed half way leaves the broker to the next one
        kafka_server.restart()


def kill_and_hang(server: Any, table: Table) -> None:
    """The broker dies twice during appends and hangs once, so that frames arrive late."""
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


def test_a_broker_killed_mid_write_loses_and_duplicates_nothing(topic: Topic, tmp_path: Path):
    found = run(topic, tmp_path, lambda table: kill_and_hang(topic.server, table))
    assert len(found.acked) > 100
    assert found.doubled_in_stream > 0, "no frame was sent twice: the fault did not happen"
    assert (found.lost, max(found.stored.values())) == (0, 1)
    audit = found.audit
    assert (audit.duplicate_chunks, audit.duplicate_steps, audit.gap_chunks, audit.quarantined) == (
        0,
        0,
        0,
        0,
    )
    assert not audit.corrupt
    print(
        f"acked {len(found.acked)}, lost 0, doubled in the stream {found.doubled_in_stream}, "
        "stored twice 0"
    )


class Hasty:
    """Calls a frame durable once it is handed over, as many a producer does."""

    def __init__(self, inner: Stream) -> None:
        self._inner = inner
        self._pool = ThreadPoolExecutor(64)

    def append(self, frames: Sequence[Frame]) -> Sequence[Ack]:
        self._pool.submit(self._inner.append, frames)
        return [Ack(True)] * len(frames)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_control_acks_before_the_delivery_report_lose_frames(topic: Topic, tmp_path: Path):
    def away(table: Table) -> None:
        table.wait_for(60)
        topic.server.kill()
        time.sleep(TIMEOUT_S + GRACE_S)
        topic.server.restart()

    assert run(topic, tmp_path, away, wrap=Hasty).lost > 0


def test_control_without_dedup_the_audit_sees_duplicates(
    topic: Topic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    admit = session_module.admit

    def admit_again(state: SessionState | None, arrival: Arrival) -> tuple[SessionState, str]:
        after, verdict = admit(state, arrival)
        return after, "" if verdict == "seen" else verdict

    for name, module in list(sys.modules.items()):
        if name.startswith("understudy.stores.") and getattr(module, "admit", None) is admit:
            monkeypatch.setattr(module, "admit", admit_again)
    # The store's own unique key is a second safeguard.
    monkeypatch.setattr(
        database, "_SCHEMA", database._SCHEMA.replace("CREATE UNIQUE INDEX", "CREATE INDEX")
    )

    found = run(topic, tmp_path, lambda table: hang(topic.server, table))
    assert found.doubled_in_stream > 0
    assert found.audit.duplicate_chunks > 0


# --- nobody waits for ever ------------------------------------------------------------------------


def test_append_and_read_time_out_while_the_broker_hangs_and_resume_afterwards(topic: Topic):
    with topic.open(timeout_s=TIMEOUT_S) as stream:
        first, second, third = sample_frames(3)
        assert stream.append([first])[0].accepted
        partition, (record,) = next(
            (name, found) for name, found in read_all(stream).items() if found
        )
        with hanging(topic.server):
            began_s = time.monotonic()
            (outcome,) = stream.append([second])
            assert (outcome.accepted, outcome.retry_after_s > 0) == (False, True)
            with pytest.raises(Unreachable):
                stream.read(partition, record.position, max_bytes=1, wait_s=0.0)
            assert time.monotonic() - began_s < 2 * (TIMEOUT_S + GRACE_S) + 1.0
        append_until_durable(stream, third)
        raws = {one.raw for one in read_all(stream)[partition]}
        assert raws >= {first.encode(), third.encode()}


def append_until_durable(stream: Stream, frame: Frame) -> None:
    give_up_s = time.monotonic() + WAIT_TIMEOUT_S
    while not stream.append([frame])[0].accepted:
        assert time.monotonic() < give_up_s


def test_an_unreachable_broker_is_one_clear_error_and_closing_is_quick(topic: Topic):
    with topic.open(timeout_s=TIMEOUT_S) as stream:
        partition = stream.partitions()[0].id
        stream.read(partition, None, max_bytes=1, wait_s=0.0)
        topic.server.kill()
        (outcome,) = stream.append(sample_frames(1))
        assert "at 127.0.0.1" in str(outcome.error)
        with pytest.raises(StorageFailed, match=r"check that a broker is running"):
            stream.read(partition, None, max_bytes=1, wait_s=0.0)
        with pytest.raises(Unreachable, match="Connection refused"):
            topic.open(open_timeout_s=1)
        began_s = time.monotonic()
        stream.close()
        assert time.monotonic() - began_s < 3.0
    topic.server.restart()


def played(n_sessions: int, *, now_s: float, seed: int) -> list[Frame]:
    rng = np.random.default_rng(seed)
    sessions = [
        random_session(SPEC, rng, n_chunks=3, session=new_session(now_s)) for _ in range(n_sessions)
    ]
    return [frame for chunks in sessions for frame in stamped(chunks, received_s=now_s)]


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
def test_draining_ends_even_if_players_never_pause_and_clocks_differ(
    topic: Topic, tmp_path: Path, ahead_s: float
):
    clock = Skewed(ahead_s)
    stop = threading.Event()
    taken = threading.Event()
    before, more = (played(20, now_s=clock.now(), seed=seed) for seed in (1, 2))
    with open_kafka(topic.location(), clock=clock) as writer, topic.open() as reader:
        assert all(outcome.accepted for outcome in writer.append(before))

        def play() -> None:
            while not stop.is_set():
                writer.append(more)
                taken.set()

        with contextlib.closing(LocalStore(tmp_path)) as store, ThreadPoolExecutor(2) as pool:
            playing = pool.submit(play)
            config = IngestConfig(max_read_bytes=4_000)
            service = IngestService(reader, store, KnownSpecs(SPEC), owner="test", config=config)
            assert taken.wait(WAIT_TIMEOUT_S)
            draining = pool.submit(service.drain)
            try:
                draining.result(2 * WAIT_TIMEOUT_S)
            finally:
                stop.set()
                playing.result(WAIT_TIMEOUT_S)
            items = store.tail(None, max_items=10_000, wait_s=0.0).items
    stored = {
        (item.frame.session, item.frame.chunk_no) for item in items if isinstance(item, Stored)
    }
    assert {(frame.session, frame.chunk_no) for frame in before} <= stored
