"""Measures streams and stores on real servers, beside what the seed's pipeline did with the same servers.

    python bench/backends.py             some minutes on two cores; writes bench/results/backends.json
    python bench/backends.py --quick     a look with less; writes nothing unless --out is given

The servers are those of `understudy dev servers`, started here and stopped again. The peer is the seed's way, rebuilt
from its description: one JSON record a step and call into Kinesis, one row a step into Cassandra.
"""

import argparse
import contextlib
import datetime
import importlib.util
import json
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Run as a file, the first place to import from is bench/ itself; make it the folder that holds the package.
    sys.path[0] = str(ROOT)

import numpy as np  # noqa: E402

from bench import machine, report  # noqa: E402
from bench.crowd import frames_of  # noqa: E402
from bench.figures import Figure, Findings, Gate, Ratio, all_of, in_turn  # noqa: E402
from bench.games import CART, PLAYER, OneGame  # noqa: E402
from understudy.app.backends import create_stream, init_store, open_store, open_stream  # noqa: E402
from understudy.app.config import Config, IngestSection, StoreSection, write_config  # noqa: E402
from understudy.app.data import DataFolder  # noqa: E402
from understudy.app.deployment import open_deployment  # noqa: E402
from understudy.app.roles.children import Child, python_module  # noqa: E402
from understudy.core.chunk import chunk_of  # noqa: E402
from understudy.core.frame import Frame  # noqa: E402
from understudy.core.log import make_folder  # noqa: E402
from understudy.core.ports import Candidate, Cursor, FullStore, Position, Stored, Stream, WriteBatch  # noqa: E402
from understudy.dev import aws  # noqa: E402
from understudy.dev.servers import Server, start, why_not  # noqa: E402

RESULT = ROOT / "bench" / "results" / "backends.json"
SHARD_BYTES_S = 1_000_000
"""What AWS lets into one shard a second; a local server has no such limit."""
STEPS = 512
COMMIT = 16
BY_STEP = (
    "CREATE TABLE IF NOT EXISTS by_step (pk uuid, episode int, step int, state list<float>, action int, reward float, "
    "next_state list<float>, done boolean, game_id text, PRIMARY KEY ((game_id), episode, step, pk)) "
    "WITH CLUSTERING ORDER BY (episode DESC, step DESC, pk DESC)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a run is."""

    name: str
    frames: int
    """Of ours in one round."""
    steps: int
    """Of the peer in one round."""
    rounds: int
    arrivals: int
    """Chunks whose way into a tail is timed."""


SIZES = {
    size.name: size
    for size in (
        Size(name="full", frames=512, steps=2_000, rounds=5, arrivals=200),
        Size(name="quick", frames=128, steps=500, rounds=2, arrivals=40),
        Size(name="tiny", frames=32, steps=50, rounds=1, arrivals=10),
    )
}


def main() -> int:
    """Run what can run here; 0 when every gate passed."""
    options = _options()
    size, began_s, before = SIZES[options.size], time.monotonic(), machine.load_average()
    found = Findings()
    with tempfile.TemporaryDirectory(prefix="understudy-bench-") as folder:
        for name, what in (("kinesalite", kinesis), ("kafka", kafka), ("cassandra", cassandra)):
            if reason := why_not(name):
                found.skipped.append(f"{name}: {reason}")
                continue
            with start(name, Path(folder) / name) as server:
                what(server, size, found)
                if name == "cassandra":
                    ingest(server, Path(folder), size, found)
            print(f"{name:<10} measured after {time.monotonic() - began_s:5.1f} s", flush=True)
    result: dict[str, Any] = {
        "format": 1, "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": machine.commit(), "scale": size.name, "machine": machine.machine(), "load_average_before": before,
        "load_average_after": machine.load_average(), "seconds": round(time.monotonic() - began_s, 1),
        "passes": {"native": {"delayed": "", "syncs_ms": {}, "measurements": {"backends": found.to_json()}}},
    }  # fmt: skip
    out = options.out or (RESULT if size.name == "full" else None)
    if out is not None:
        out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    report.show(result)
    return 0 if report.is_sound(result) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", dest="size", action="store_const", const="quick", default="full")
    parser.add_argument("--tiny", dest="size", action="store_const", const="tiny", help="for the smoke test")
    parser.add_argument("--out", type=Path, help="file for the result")
    return parser.parse_args()


# --- Streams ----------------------------------------------------------------------------------------------------------


def kinesis(server: Server, size: Size, found: Findings) -> None:
    """Frames into one shard, beside one JSON record a step and call, into a shard of the same server."""
    name, region = f"bench-{secrets.token_hex(4)}", server.credentials["region"]
    place = f"?endpoint={server.url}&region={region}&credentials={server.credentials_file}"
    for stream in (name, f"{name}-seed"):
        create_stream(f"kinesis://{stream}{place}", partitions=1)
    client, frames = aws.client("kinesis", server), _frames(size)
    with contextlib.closing(_stream(f"kinesis://{name}{place}")) as stream_:
        took = in_turn(
            size.rounds,
            {
                "ours": lambda: _timed(lambda: _append(stream_, frames)),
                "theirs": lambda: _timed(lambda: _put_steps(client, f"{name}-seed", size.steps)),
            },
        )
        gate = _all_read(stream_, frames, size.rounds)
    ours = [len(frames) * STEPS / took_s for took_s in took["ours"]]
    theirs = [size.steps / took_s for took_s in took["theirs"]]
    by_bytes = [SHARD_BYTES_S * STEPS / float(np.mean([frame.size_bytes for frame in frames]))]
    found.figures += [
        Figure(name="steps into one Kinesis shard, local server", unit="steps/s", values=ours, gate=gate, goal=20_000.0,
               bound_by="the local server's own speed; it does not throttle"),
        Figure(name="steps a shard of AWS takes at 1 MB/s, from the frames' bytes", unit="steps/s", values=by_bytes,
               gate=gate, goal=20_000.0, bound_by="30 bytes a step; AWS itself was not asked"),
    ]  # fmt: skip
    found.ratios.append(Ratio(
        name="steps into one Kinesis shard", peer="the seed's JSON record a step and call", unit="steps/s", ours=ours,
        theirs=theirs, gate=gate,
    ))  # fmt: skip


def kafka(server: Server, size: Size, found: Findings) -> None:
    """Frames into one partition of a topic, each acknowledged by the broker."""
    url = f"kafka://{server.address}/bench-{secrets.token_hex(4)}?credentials={server.credentials_file}"
    create_stream(url, partitions=1)
    frames = _frames(size)
    with contextlib.closing(_stream(url)) as stream:
        took = [_timed(lambda: _append(stream, frames)) for _ in range(size.rounds)]
        gate = _all_read(stream, frames, size.rounds)
    ours = [len(frames) * STEPS / took_s for took_s in took]
    found.figures.append(
        Figure(name="steps into one Kafka partition", unit="steps/s", values=ours, gate=gate, goal=20_000.0)
    )


def _stream(url: str, data: DataFolder | None = None) -> Stream:
    return open_stream(url, data or DataFolder(ROOT))


def _append(stream: Stream, frames: Sequence[Frame]) -> None:
    for at in range(0, len(frames), 64):
        outcomes = stream.append(frames[at : at + 64])
        assert all(outcome.durable for outcome in outcomes), [one.error for one in outcomes if not one.durable][:1]


def _put_steps(client: Any, stream: str, steps: int) -> None:
    """One call for each step, its record an array of one object under a constant key, as the seed's client did it."""
    row = {
        "episode": 1, "step": 0, "state": [0.0123456789] * 4, "action": 1, "reward": 1.0,
        "next_state": [0.0123456789] * 4, "done": False, "game_id": "CartPole-v0",
    }  # fmt: skip
    for step in range(steps):
        raw = json.dumps([row | {"step": step}]).encode()
        client.put_records(StreamName=stream, Records=[{"Data": raw, "PartitionKey": "game_records"}])


def _all_read(stream: Stream, frames: Sequence[Frame], rounds: int) -> Gate:
    """Everything that was appended can be read, each frame as often as it was appended."""
    seen: dict[bytes, int] = {}
    for partition in stream.partitions():
        position: Position | None = None
        while (read := stream.read(partition.id, position, max_bytes=8 << 20, wait_s=2.0)).records:
            position = read.next
            for record in read.records:
                seen[record.raw] = seen.get(record.raw, 0) + 1
    return Gate(
        seen == {frame.encode(): rounds for frame in frames},
        f"{len(frames)} frames read back as they were, {rounds} times each",
    )


# --- Stores -----------------------------------------------------------------------------------------------------------


def cassandra(server: Server, size: Size, found: Findings) -> None:
    """Chunks by one writer, beside one row a step; and how long a chunk takes into a tail elsewhere."""
    keyspace = f"bench_{secrets.token_hex(4)}"
    url = f"cassandra://{server.address}/{keyspace}?replication=1&credentials={server.credentials_file}"
    init_store(url)
    with (
        contextlib.closing(open_store(url, specs=OneGame(CART))) as store,
        contextlib.closing(open_store(url, specs=OneGame(CART))) as reader,
        contextlib.closing(_by_step(server, keyspace)) as peer,
    ):
        writer, turn = _Writer(store), iter(range(1_000))
        took = in_turn(
            size.rounds,
            {
                "ours": lambda: _timed_with(writer.write, _candidates(size.frames, next(turn))),
                "theirs": lambda: _timed(lambda: peer.write(size.steps)),
            },
        )
        wanted = _candidates(size.arrivals, 999)
        lags = _lags(wanted, lambda one: writer.write([one]), reader)
        audit = store.audit()
    written = size.frames * size.rounds + size.arrivals
    gate = all_of(
        (f"{written} chunks stored", audit.chunks == written),
        ("0 lost, 0 stored twice, by the store's audit", not (audit.gap_chunks or audit.duplicate_chunks)),
        ("nothing damaged", not audit.corrupt),
    )
    ours = [size.frames * STEPS / took_s for took_s in took["ours"]]
    theirs = [size.steps / took_s for took_s in took["theirs"]]
    found.figures += [
        Figure(name="steps into Cassandra by one writer", unit="steps/s", values=ours, gate=gate,
               bound_by="one node on the same two cores, synced every 5 ms"),
        Figure(name="from a write's begin to another process's tail: p50", unit="ms", gate=gate, more_is_better=False,
               values=[float(np.percentile(lags, 50)) * 1e3]),
        Figure(name="from a write's begin to another process's tail: p99", unit="ms", gate=gate, more_is_better=False,
               values=[float(np.percentile(lags, 99)) * 1e3], goal=1_000.0),
    ]  # fmt: skip
    found.ratios.append(Ratio(
        name="steps into Cassandra, one writer", peer="one row a step, prepared, 64 at once", unit="steps/s",
        ours=ours, theirs=theirs, gate=gate,
    ))  # fmt: skip
    found.notes.append(
        "the peer's rows are written 64 at once by prepared statements; the seed wrote one after another, and each "
        "retry made a new row; ours are checked against what is known of each session and committed with the position"
    )


class _Writer:
    """One partition's writer."""

    def __init__(self, store: FullStore) -> None:
        self._store, self._position = store, 0
        self._epoch = store.claim("bench", owner="bench", ttl_s=600.0).epoch

    def write(self, candidates: Sequence[Candidate]) -> None:
        for at in range(0, len(candidates), COMMIT):
            self._position += 1
            part = candidates[at : at + COMMIT]
            receipt = self._store.write(WriteBatch("bench", self._epoch, Position(str(self._position)), part))
            assert set(receipt.fates) == {"new"}, receipt


def _candidates(count: int, seed: int) -> list[Candidate]:
    frames = [frame.stamped(PLAYER, int(time.time())) for frame in frames_of(CART, count, steps=STEPS, seed=seed)]
    return [Candidate(frame, chunk_of(frame)) for frame in frames]


def _lags(wanted: Sequence[Candidate], hand_over: Callable[[Candidate], None], reader: FullStore) -> list[float]:
    """Seconds from before a chunk is handed over until a reader elsewhere has it."""
    begun_s, seen_s = dict[int, float](), dict[int, float]()
    session, count = wanted[0].frame.session, len(wanted)
    cursor: Cursor | None = None
    while (page := reader.tail(cursor, max_items=1_024, wait_s=0.0)).items:
        cursor = page.cursor

    def follow() -> None:
        at, give_up_s = cursor, time.monotonic() + 180
        while len(seen_s) < count and time.monotonic() < give_up_s:
            found = reader.tail(at, max_items=64, wait_s=1.0)
            at = found.cursor
            for item in found.items:
                if isinstance(item, Stored) and item.frame.session == session:
                    seen_s[item.frame.chunk_no] = time.monotonic()

    follower = threading.Thread(target=follow)
    follower.start()
    for candidate in wanted:
        begun_s[candidate.frame.chunk_no] = time.monotonic()
        hand_over(candidate)
        time.sleep(0.02)
    follower.join()
    assert seen_s.keys() == begun_s.keys(), f"{len(begun_s) - len(seen_s)} chunks never came into the tail"
    return [seen_s[number] - begun_s[number] for number in begun_s]


# --- Ingest -----------------------------------------------------------------------------------------------------------


def ingest(server: Server, folder: Path, size: Size, found: Findings) -> None:
    """From an append to a tail, by our own service and by a Spark job, from a file stream into the same Cassandra."""
    if reason := _no_spark():
        found.skipped.append(reason)
        return
    lags, batch_s = {"native": list[float](), "spark": list[float]()}, list[float]()
    for engine in lags:
        keyspace = f"bench_{secrets.token_hex(4)}"
        url = f"cassandra://{server.address}/{keyspace}?replication=1&credentials={server.credentials_file}"
        init_store(url)
        data = DataFolder(folder / engine)
        with _running(data, url, engine) as child, contextlib.closing(_stream("", data)) as stream:
            with contextlib.closing(open_store(url, specs=OneGame(CART))) as reader:
                _lags(_candidates(4, 0), _into(stream), reader)  # until it runs
                lags[engine] = _lags(_candidates(size.arrivals, 1), _into(stream), reader)
                gate = _once(reader, size.arrivals + 4)
            if engine == "spark":
                batch_s.append(float(child.latest["batch_s"]))
    for engine, name in (("native", "our own service"), ("spark", "a Spark job on two threads")):
        for part in (50, 99):
            found.figures.append(
                Figure(name=f"from an append to a tail of Cassandra, by {name}: p{part}", unit="ms", gate=gate,
                       values=[float(np.percentile(lags[engine], part)) * 1e3], more_is_better=False,
                       goal={("native", 99): 1_000.0, ("spark", 99): 3_000.0}.get((engine, part)))
            )  # fmt: skip
    found.figures.append(
        Figure(name="a batch of the Spark job, its last one", unit="s", values=batch_s, gate=gate, more_is_better=False)
    )


def _no_spark() -> str:
    if importlib.util.find_spec("pyspark") is None:
        return "Spark: pyspark is not installed; pip install 'understudy[spark]'"
    return "" if shutil.which("java") else "Spark: there is no Java; install 17 or newer"


@contextlib.contextmanager
def _running(data: DataFolder, store: str, engine: str) -> Iterator[Child]:
    """An ingest process of one kind between a folder's stream and a store."""
    make_folder(data.root)
    open_deployment(data).registry.register(CART)
    config = Config(
        data=str(data.root), store=StoreSection(url=store),
        ingest=IngestSection(engine="spark" if engine == "spark" else "native"),
    )  # fmt: skip
    path = data.root / "config.json"
    write_config(config, path)
    module = "spark_process" if engine == "spark" else "ingest_process"
    child = Child(engine, python_module(f"understudy.app.roles.{module}", str(data.root), str(path)))
    try:
        yield child
    finally:
        child.stop()
        if child.wait(120.0) is None:
            child.kill()


def _into(stream: Stream) -> Callable[[Candidate], None]:
    def append(candidate: Candidate) -> None:
        assert all(outcome.durable for outcome in stream.append([candidate.frame]))

    return append


def _once(store: FullStore, chunks: int) -> Gate:
    audit = store.audit()
    return all_of(
        (f"{chunks} chunks stored", audit.chunks == chunks),
        ("0 stored twice, nothing damaged", not (audit.duplicate_chunks or audit.corrupt)),
    )


class _ByStep:
    """The seed's table, written as fast as its rows allow."""

    def __init__(self, cluster: Any, session: Any) -> None:
        self._cluster, self._session = cluster, session
        session.execute(BY_STEP)
        self._insert = session.prepare(
            "INSERT INTO by_step (pk, episode, step, state, action, reward, next_state, done, game_id) "
            "VALUES (uuid(), ?, ?, ?, ?, ?, ?, ?, ?)"
        )
        self._episode = 0

    def write(self, steps: int) -> None:
        from cassandra.concurrent import execute_concurrent_with_args

        self._episode += 1
        rows = [
            (self._episode, step, [0.1] * 4, 1, 1.0, [0.1] * 4, False, "CartPole-v0") for step in range(steps)
        ]  # fmt: skip
        execute_concurrent_with_args(self._session, self._insert, rows, concurrency=64)

    def close(self) -> None:
        self._cluster.shutdown()


def _by_step(server: Server, keyspace: str) -> _ByStep:
    from cassandra.auth import PlainTextAuthProvider
    from cassandra.cluster import Cluster

    host, _, port = server.address.partition(":")
    login = PlainTextAuthProvider(server.credentials["username"], server.credentials["password"])
    cluster = Cluster([host], port=int(port), auth_provider=login, protocol_version=5)
    return _ByStep(cluster, cluster.connect(keyspace))


def _frames(size: Size) -> list[Frame]:
    return [frame.stamped(PLAYER, int(time.time())) for frame in frames_of(CART, size.frames, steps=STEPS, seed=0)]


def _timed(work: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def _timed_with(work: Callable[[Sequence[Candidate]], None], given: Sequence[Candidate]) -> float:
    """The same, without the making of what is given."""
    return _timed(lambda: work(given))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
