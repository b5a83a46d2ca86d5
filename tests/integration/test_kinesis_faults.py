"""Players, Kinesis with faults, ingest, store: nothing acked is lost, nothing is stored twice."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.ingest.specs import KnownSpecs
from tests.integration.kinesis import WAIT_TIMEOUT_S, KinesisHarness
from tests.servers.fault_proxy import FaultProxy, Rates
from tests.streams.memory import MemoryStream
from understudy.core.names import new_session
from understudy.experience.chunk import decode_chunk
from understudy.experience.frame import Frame
from understudy.ingest.service import IngestService, IngestStats
from understudy.ports import Audit, Partition, Receipt, Stored, Stream, WriteBatch
from understudy.stores.local import LocalStore
from understudy.streams.kinesis import KinesisStream, open_kinesis
from understudy.testing.samples import cart_spec, random_session, stamped

SPEC = cart_spec()
PLAYERS = 2
POLL_S = 0.1
WRITES = Rates(partial=0.05, cut=0.02)
EVERYTHING = Rates(
    partial=0.05,
    cut=0.02,
    twice=0.02,
    throttle=0.05,
    expired=0.1,
    repeat=0.2,
    empty=0.2,
    delay=0.05,
)


@dataclass(frozen=True)
class Told:
    """What a run sent and what came of it."""

    steps: int
    audit: Audit
    stats: IngestStats
    written_steps: int
    """What a store that drops no duplicate would hold."""
    arrivals: Sequence[tuple[str, int]]
    """Session and number in the order in which they came to be stored."""


class CountingStore(LocalStore):
    """A store that counts what it is given, before it looks whether it has it."""

    given_steps = 0

    def write(self, batch: WriteBatch) -> Receipt:
        self.given_steps += sum(
            one.chunk.meta.n_steps for one in batch.candidates if one.chunk is not None
        )
        return super().write(batch)


class Careless(KinesisStream):
    """Believes that a call which succeeded took every record, as the seed's producer did."""

    def _failure(self, answered: object) -> None:
        return None


class ChildrenFirst:
    """A stream whose readers are told of no parents and meet the youngest shards first."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.append = stream.append
        self.read = stream.read
        self.close = stream.close

    def partitions(self) -> Sequence[Partition]:
        return [Partition(one.id) for one in reversed(self._stream.partitions())]


def sessions(count: int, *, n_chunks: int) -> list[list[Frame]]:
    rng = np.random.default_rng(11)
    now_s = time.time()
    starts = [new_session(now_s, rng.bytes(10)) for _ in range(count)]
    played = [random_session(SPEC, rng, n_chunks=n_chunks, session=session) for session in starts]
    return [list(stamped(chunks, received_s=now_s)) for chunks in played]


def steps_of(frames: Sequence[Frame]) -> int:
    return sum(decode_chunk(frame.body).meta.n_steps for frame in frames)


def play(stream: Stream, lots: Sequence[Sequence[Frame]], *, acked: Callable[[], None]) -> None:
    """Send frame by frame like a client; what is not durable is sent again unchanged."""

    def one_player(mine: Sequence[Sequence[Frame]]) -> None:
        for frames in mine:
            for frame in frames:
                deadline = time.monotonic() + WAIT_TIMEOUT_S
                while not stream.append([frame])[0].accepted:
                    assert time.monotonic() < deadline, "a frame is never taken"
                acked()

    with ThreadPoolExecutor(PLAYERS) as pool:
        list(pool.map(one_player, [lots[number::PLAYERS] for number in range(PLAYERS)]))


def carry(
    folder: Path,
    open_stream: Callable[[], Stream],
    lots: Sequence[Sequence[Frame]],
    *,
    in_the_middle: Callable[[], None] = lambda: None,
    reading: Callable[[Stream], Stream] = lambda stream: stream,
    ingest_at_once: bool = True,
) -> Told:
    """Players write while ingest reads; a fault happens halfway; then all is stored."""
    writer = open_stream()
    reader = open_stream()
    store = CountingStore(folder)
    service = IngestService(reading(reader), store, KnownSpecs(SPEC), owner="test")
    stop = threading.Event()
    half = threading.Semaphore(0)
    total = sum(map(len, lots))
    with ThreadPoolExecutor(2) as pool:
        playing = pool.submit(play, writer, lots, acked=half.release)
        ingesting = pool.submit(service.run, stop) if ingest_at_once else None
        for _ in range(total // 2):
            if not half.acquire(timeout=WAIT_TIMEOUT_S):
                break
        in_the_middle()
        playing.result()
        stop.set()
        if ingesting is not None:
            ingesting.result()
    service.drain()
    items = store.tail(None, max_items=100_000, wait_s=0.0).items
    told = Told(
        sum(map(steps_of, lots)),
        store.audit(),
        service.stats,
        store.given_steps,
        [
            (str(item.frame.session), item.frame.chunk_no)
            for item in items
            if isinstance(item, Stored)
        ],
    )
    store.close()
    writer.close()
    reader.close()
    return told


def assert_nothing_lost_or_doubled(told: Told) -> None:
    audit = told.audit
    assert (audit.steps, audit.gap_chunks, audit.gap_steps) == (told.steps, 0, 0)
    assert (
        audit.duplicate_chunks,
        audit.duplicate_steps,
        audit.quarantined,
        list(audit.corrupt),
    ) == (0, 0, 0, [])


@pytest.fixture
def faulty(kinesis_server) -> Iterator[Callable[..., tuple[KinesisHarness, FaultProxy]]]:
    """Makes a stream on the server that reshards, behind a proxy with these faults."""
    opened = []

    def make(rates: Rates, *, shards: int = 2, seed: int = 1) -> tuple[KinesisHarness, FaultProxy]:
        proxy = FaultProxy(kinesis_server.url, rates, seed=seed)
        table = KinesisHarness(kinesis_server, shards=shards, url=proxy.url)
        opened.append((table, proxy))
        return table, proxy

    yield make
    for table, proxy in opened:
        print(f"faults: {dict(proxy.fired)} in {dict(proxy.calls)}")
        proxy.close()
        table.close()


def reshard(table: KinesisHarness) -> None:
    """A split and a merge, so that some shard has two parents and some parent two children."""
    table.split(table.open_shards()[0])
    table.merge_first()


# --- the whole way --------------------------------------------------------------------------------


def test_partial_failures_timeouts_after_success_and_a_reshard_lose_and_duplicate_nothing(
    faulty, tmp_path
):
    table, proxy = faulty(WRITES)
    lots = sessions(16, n_chunks=25)
    told = carry(
        tmp_path, lambda: table.open(poll_s=POLL_S), lots, in_the_middle=lambda: reshard(table)
    )
    proxy.assert_fired()
    assert len(table.open_shards()) == 2
    assert_nothing_lost_or_doubled(told)
    assert told.stats.fates["duplicate"] > 0


def test_all_faults_at_once_lose_and_duplicate_nothing(faulty, tmp_path):
    table, proxy = faulty(EVERYTHING)
    told = carry(
        tmp_path,
        lambda: table.open(poll_s=POLL_S),
        sessions(16, n_chunks=20),
        in_the_middle=lambda: reshard(table),
    )
    proxy.assert_fired()
    assert_nothing_lost_or_doubled(told)


def test_an_in_memory_stream_passes_the_same_test(tmp_path):
    stream = MemoryStream(2)
    told = carry(
        tmp_path,
        lambda: stream,
        sessions(16, n_chunks=25),
        in_the_middle=lambda: stream.split("p0"),
    )
    assert_nothing_lost_or_doubled(told)
    assert told.written_steps == told.steps


# --- controls: what goes wrong without it ---------------------------------------------------------


def test_control_a_producer_that_ignores_failed_records_loses_acked_steps(
    faulty, tmp_path, monkeypatch
):
    table, proxy = faulty(WRITES)
    monkeypatch.setattr("understudy.streams.kinesis.KinesisStream", Careless)
    told = carry(
        tmp_path, lambda: open_kinesis(table.location(poll_s=POLL_S)), sessions(8, n_chunks=20)
    )
    proxy.assert_fired()
    assert told.audit.steps < told.steps
    assert told.audit.gap_chunks > 0
    with pytest.raises(AssertionError):
        assert_nothing_lost_or_doubled(told)


def test_control_a_store_without_dedup_stores_some_steps_twice(faulty, tmp_path):
    table, proxy = faulty(Rates(cut=0.05, twice=0.05))
    told = carry(tmp_path, lambda: table.open(poll_s=POLL_S), sessions(8, n_chunks=15))
    proxy.assert_fired()
    assert told.written_steps > told.steps == told.audit.steps


def test_parents_are_stored_before_children_and_the_reverse_would_reorder_sessions(
    faulty, tmp_path
):
    table, _ = faulty(Rates())
    lots = sessions(8, n_chunks=12)
    writer = table.open(poll_s=POLL_S)
    # Half of every session before the reshard and half behind it, so that none lies in one shard
    # alone by chance.
    play(writer, [frames[:6] for frames in lots], acked=lambda: None)
    reshard(table)
    play(writer, [frames[6:] for frames in lots], acked=lambda: None)
    writer.close()
    orders = {}
    for name, reading in {"parents": lambda stream: stream, "children": ChildrenFirst}.items():
        told = carry(
            tmp_path / name,
            lambda: table.open(poll_s=POLL_S),
            [],
            reading=reading,
            ingest_at_once=False,
        )
        orders[name] = told.arrivals
        assert told.audit.steps == sum(map(steps_of, lots))
    assert sum(1 for _ in turned(orders["parents"])) == 0
    assert sum(1 for _ in turned(orders["children"])) > 0


def turned(arrivals: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """What came behind a later number of its session."""
    last: dict[str, int] = {}
    for session, chunk_no in arrivals:
        if chunk_no < last.get(session, -1):
            yield session, chunk_no
        last[session] = max(chunk_no, last.get(session, -1))
