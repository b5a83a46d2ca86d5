"""The time from an append to a remote store's tail, with our own service and a Spark job."""

import contextlib
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.figures import Figure, Findings, Gate, Ratio, all_of, in_turn
from bench.games import CART, PLAYER, OneGame, person_frames
from bench.spark import why_no_spark
from understudy.backends.addresses import init_store, open_store, open_stream
from understudy.backends.data import DataFolder
from understudy.backends.deployment import open_deployment
from understudy.core.log import make_folder
from understudy.dev.servers import Server, host_location
from understudy.experience.chunk import chunk_of
from understudy.platform.children import Child, python_module
from understudy.platform.config import Config, IngestSection, StoreSection, write_config
from understudy.ports import Candidate, Cursor, FullStore, Stored, Stream

STEPS = 512


def candidates(count: int, seed: int) -> list[Candidate]:
    """Chunks of one session, ready to be written; equal seeds give equal chunks."""
    frames = [
        frame.stamped(PLAYER, int(time.time()))
        for frame in person_frames(count, steps=STEPS, seed=seed)
    ]
    return [Candidate(frame, chunk_of(frame)) for frame in frames]


def lags_of(
    chunks: Sequence[Candidate], send: Callable[[Candidate], None], reader: FullStore
) -> list[float]:
    """For each chunk, the seconds from just before it is sent until another reader has it."""
    sent_s = dict[int, float]()
    read_s = dict[int, float]()
    session = chunks[0].frame.session
    count = len(chunks)
    cursor: Cursor | None = None
    while (page := reader.tail(cursor, max_items=1_024, wait_s=0.0)).items:
        cursor = page.cursor

    def follow() -> None:
        at = cursor
        give_up_s = time.monotonic() + 180
        while len(read_s) < count and time.monotonic() < give_up_s:
            page = reader.tail(at, max_items=64, wait_s=1.0)
            at = page.cursor
            for item in page.items:
                if isinstance(item, Stored) and item.frame.session == session:
                    read_s[item.frame.chunk_no] = time.monotonic()

    follower = threading.Thread(target=follow)
    follower.start()
    for candidate in chunks:
        sent_s[candidate.frame.chunk_no] = time.monotonic()
        send(candidate)
        time.sleep(0.02)
    follower.join()
    assert read_s.keys() == sent_s.keys(), (
        f"{len(sent_s) - len(read_s)} chunks never appeared in the tail"
    )
    return [read_s[number] - sent_s[number] for number in sent_s]


def append_to_tail(
    server: Server, folder: Path, findings: Findings, *, rounds: int, arrivals: int
) -> None:
    """From a file stream to a tail of the same Cassandra, with our service and a Spark job."""
    if reason := why_no_spark():
        findings.skipped.append(reason)
        return
    with contextlib.ExitStack() as open_:
        ways = {
            engine: open_.enter_context(_way(server, folder, engine))
            for engine in ("native", "spark")
        }
        for way in ways.values():
            way.lags(4)  # warm-up: returns once ingest runs
        batch_s = list[float]()

        def by_spark() -> list[float]:
            lags = ways["spark"].lags(arrivals)
            batch_s.append(float(ways["spark"].child.latest["batch_s"]))
            return lags

        lags = in_turn(rounds, {"native": lambda: ways["native"].lags(arrivals), "spark": by_spark})
        gates = {engine: _once(way.reader, rounds * arrivals + 4) for engine, way in ways.items()}
    name = "from an append to a tail of Cassandra"
    by = {"native": "our own service", "spark": "a Spark job on two threads"}
    goals = {("native", 99): 1_000.0, ("spark", 99): 3_000.0}
    for part in (50, 99):
        took = {
            engine: [float(np.percentile(round_, part)) * 1e3 for round_ in lags[engine]]
            for engine in ways
        }
        findings.figures += [
            Figure(
                name=f"{name}, by {by[engine]}: p{part}",
                unit="ms",
                gate=gates[engine],
                values=took[engine],
                more_is_better=False,
                goal=goals.get((engine, part)),
            )
            for engine in ways
        ]
        findings.ratios.append(
            Ratio(
                name=f"{name}, our own service: p{part}",
                peer="our Spark job",
                unit="ms",
                ours=took["native"],
                theirs=took["spark"],
                gate=gates["native"],
                more_is_better=False,
            )
        )
    findings.figures.append(
        Figure(
            name="a batch of the Spark job",
            unit="s",
            values=batch_s,
            gate=gates["spark"],
            more_is_better=False,
        )
    )


@dataclass(frozen=True, slots=True)
class _Way:
    """A stream, an ingest process and a store with another reader."""

    stream: Stream
    child: Child
    reader: FullStore
    seeds: Iterator[int]

    def lags(self, count: int) -> list[float]:
        """Seconds from the stream to the reader, for each of `count` chunks."""
        return lags_of(candidates(count, next(self.seeds)), _into(self.stream), self.reader)


@contextlib.contextmanager
def _way(server: Server, folder: Path, engine: str) -> Iterator[_Way]:
    keyspace = f"bench_{secrets.token_hex(4)}"
    url = host_location(server, "cassandra", keyspace, replication="1").url
    init_store(url)
    data = DataFolder(folder / engine)
    with (
        _running(data, url, engine) as child,
        contextlib.closing(open_stream("", data)) as stream,
        contextlib.closing(open_store(url, specs=OneGame(CART))) as reader,
    ):
        yield _Way(stream, child, reader, itertools.count())


@contextlib.contextmanager
def _running(data: DataFolder, store: str, engine: str) -> Iterator[Child]:
    """An ingest process with one engine, from a folder's stream to a store."""
    make_folder(data.root)
    open_deployment(data).registry.register(CART)
    config = Config(
        data=str(data.root),
        store=StoreSection(url=store),
        ingest=IngestSection(engine="spark" if engine == "spark" else "native"),
    )
    path = data.root / "config.json"
    write_config(config, path)
    command = python_module("understudy.platform.ingest", str(data.root), str(path))
    child = Child(engine, command)
    try:
        yield child
    finally:
        child.stop()
        if child.wait(120.0) is None:
            child.kill()


def _into(stream: Stream) -> Callable[[Candidate], None]:
    def append(candidate: Candidate) -> None:
        assert all(outcome.accepted for outcome in stream.append([candidate.frame]))

    return append


def _once(store: FullStore, chunks: int) -> Gate:
    audit = store.audit()
    return all_of(
        (f"{chunks} chunks stored", audit.chunks == chunks),
        ("0 stored twice, nothing damaged", not (audit.duplicate_chunks or audit.corrupt)),
    )
