"""Measures streams and stores on real servers, and the original pipeline on the same servers.

    python bench/backends.py            some minutes on two cores; writes
                                        bench/results/backends.json
    python bench/backends.py --quick    smaller; writes nothing unless --out is given

The servers are those of `understudy dev servers`, started and stopped by the benchmark. The peer is
the original pipeline (seed a of docs/seeds.md), rebuilt from its description: one JSON record and
call per step into Kinesis, one row per step into Cassandra.
"""

import contextlib
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Run as a file, sys.path starts with bench/; replace it with the folder that contains bench/.
    sys.path[0] = str(ROOT)

import numpy as np  # noqa: E402

from bench.against import a_step_each  # noqa: E402
from bench.append_to_tail import STEPS, append_to_tail, candidates, lags_of  # noqa: E402
from bench.figures import Figure, Findings, Gate, Ratio, all_of, in_turn  # noqa: E402
from bench.games import CART, PLAYER, OneGame, person_frames  # noqa: E402
from bench.one_pass import run_once  # noqa: E402
from bench.spark import spread  # noqa: E402
from understudy.backends.addresses import create_stream, init_store, open_store, open_stream  # noqa: E402
from understudy.backends.data import DataFolder  # noqa: E402
from understudy.dev.recipes import aws_client  # noqa: E402
from understudy.dev.servers import Server, aws_location, host_location, start, unavailable_reason  # noqa: E402
from understudy.experience.frame import Frame  # noqa: E402
from understudy.ports import Candidate, FullStore, Position, Stream, WriteBatch  # noqa: E402

SHARD_BYTES_S = 1_000_000
"""The limit of AWS for one shard; a local server has no such limit."""
COMMIT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a run is."""

    name: str
    frames: int
    """Our frames in one round."""
    steps: int
    """The peer's steps in one round."""
    rounds: int
    arrivals: int
    """Chunks whose arrival in a tail is timed."""
    spark_rounds: int
    """Rounds with Spark; each starts Spark four times."""


SIZES = {
    size.name: size
    for size in (
        Size(name="full", frames=512, steps=2_000, rounds=5, arrivals=200, spark_rounds=3),
        Size(name="quick", frames=128, steps=500, rounds=2, arrivals=40, spark_rounds=1),
        Size(name="tiny", frames=32, steps=50, rounds=1, arrivals=10, spark_rounds=0),
    )
}


def main() -> int:
    """Run the measures whose server can run on this machine; 0 if every gate passed."""
    parts = {
        "kinesalite": on_server(kinesis),
        "kafka": on_server(kafka),
        "cassandra": on_server(cassandra, ingest, spark_into_cassandra),
        "spark": spark_into_a_waiting_store,
    }
    return run_once("backends", about=__doc__, sizes=SIZES, parts=parts)


def on_server(
    *measures: Callable[[Server, Path, Size, Findings], None],
) -> Callable[[Path, Size, Findings], None]:
    """A function that runs these measures on the server named like its folder.

    If the server cannot run, it notes the reason in the findings.
    """

    def measure(folder: Path, size: Size, findings: Findings) -> None:
        if reason := unavailable_reason(folder.name):
            findings.skipped.append(f"{folder.name}: {reason}")
            return
        with start(folder.name, folder) as server:
            for run in measures:
                run(server, folder.parent, size, findings)

    return measure


# --- Streams --------------------------------------------------------------------------------------


def kinesis(server: Server, _: Path, size: Size, findings: Findings) -> None:
    """Frames into one shard, and one JSON record and call per step into another."""
    name = f"bench-{secrets.token_hex(4)}"
    for stream in (name, f"{name}-seed"):
        create_stream(aws_location(server, "kinesis", stream).url, partitions=1)
    client = aws_client("kinesis", server.url, server.credentials)
    frames = _frames(size)
    with contextlib.closing(_stream(aws_location(server, "kinesis", name).url)) as stream_:
        took = in_turn(
            size.rounds,
            {
                "ours": lambda: _timed(lambda: _append(stream_, frames)),
                "theirs": lambda: _timed(
                    lambda: a_step_each.put_steps(client, f"{name}-seed", size.steps)
                ),
            },
        )
        gate = _all_read(stream_, frames, size.rounds)
    ours = [len(frames) * STEPS / took_s for took_s in took["ours"]]
    theirs = [size.steps / took_s for took_s in took["theirs"]]
    by_bytes = [SHARD_BYTES_S * STEPS / float(np.mean([frame.size_bytes for frame in frames]))]
    findings.figures += [
        Figure(
            name="steps into one Kinesis shard, local server",
            unit="steps/s",
            values=ours,
            gate=gate,
            goal=20_000.0,
            bound_by="the local server's own speed; it does not throttle",
        ),
        Figure(
            name="steps a shard of AWS takes at 1 MB/s, from the frames' bytes",
            unit="steps/s",
            values=by_bytes,
            gate=gate,
            goal=20_000.0,
            bound_by="30 bytes a step; AWS itself was not measured",
        ),
    ]
    findings.ratios.append(
        Ratio(
            name="steps into one Kinesis shard",
            peer="the seed's JSON record a step and call",
            unit="steps/s",
            ours=ours,
            theirs=theirs,
            gate=gate,
        )
    )


def kafka(server: Server, _: Path, size: Size, findings: Findings) -> None:
    """Frames into one partition, and one JSON record per step into another."""
    topic = f"bench-{secrets.token_hex(4)}"
    frames = _frames(size)
    for name in (topic, f"{topic}-seed"):
        create_stream(host_location(server, "kafka", name).url, partitions=1)
    producer = a_step_each.producer(server)
    a_step_each.produce_steps(producer, f"{topic}-seed", 1)  # so that the broker knows the producer
    with contextlib.closing(_stream(host_location(server, "kafka", topic).url)) as stream:
        took = in_turn(
            size.rounds,
            {
                "ours": lambda: _timed(lambda: _append(stream, frames)),
                "theirs": lambda: _timed(
                    lambda: a_step_each.produce_steps(producer, f"{topic}-seed", size.steps)
                ),
            },
        )
        gate = _all_read(stream, frames, size.rounds)
    ours = [len(frames) * STEPS / took_s for took_s in took["ours"]]
    theirs = [size.steps / took_s for took_s in took["theirs"]]
    findings.figures.append(
        Figure(
            name="steps into one Kafka partition",
            unit="steps/s",
            values=ours,
            gate=gate,
            goal=20_000.0,
        )
    )
    findings.ratios.append(
        Ratio(
            name="steps into one Kafka partition",
            peer="one JSON record a step, packed by the producer",
            unit="steps/s",
            ours=ours,
            theirs=theirs,
            gate=gate,
        )
    )


def _stream(url: str) -> Stream:
    return open_stream(url, DataFolder(ROOT))


def _append(stream: Stream, frames: Sequence[Frame]) -> None:
    for at in range(0, len(frames), 64):
        outcomes = stream.append(frames[at : at + 64])
        assert all(outcome.accepted for outcome in outcomes), [
            outcome.error for outcome in outcomes if not outcome.accepted
        ][:1]


def _all_read(stream: Stream, frames: Sequence[Frame], rounds: int) -> Gate:
    """Passes if every frame can be read as often as it was appended."""
    counts: dict[bytes, int] = {}
    for partition in stream.partitions():
        position: Position | None = None
        while (read := stream.read(partition.id, position, max_bytes=8 << 20, wait_s=2.0)).records:
            position = read.next
            for record in read.records:
                counts[record.raw] = counts.get(record.raw, 0) + 1
    return Gate(
        counts == {frame.encode(): rounds for frame in frames},
        f"{len(frames)} frames read back unchanged, {rounds} times each",
    )


# --- Stores ---------------------------------------------------------------------------------------


def cassandra(server: Server, _: Path, size: Size, findings: Findings) -> None:
    """Chunks by one writer and one row per step; and the time until another reader has a chunk."""
    keyspace = f"bench_{secrets.token_hex(4)}"
    url = host_location(server, "cassandra", keyspace, replication="1").url
    init_store(url)
    with (
        contextlib.closing(open_store(url, specs=OneGame(CART))) as store,
        contextlib.closing(open_store(url, specs=OneGame(CART))) as reader,
        contextlib.closing(a_step_each.Rows(server, keyspace)) as peer,
    ):
        writer = _Writer(store)
        turn = iter(range(1_000))
        took = in_turn(
            size.rounds,
            {
                "ours": lambda: _timed_with(writer.write, candidates(size.frames, next(turn))),
                "theirs": lambda: _timed(lambda: peer.write(size.steps)),
            },
        )
        arrivals = candidates(size.arrivals, 999)
        lags = lags_of(arrivals, lambda candidate: writer.write([candidate]), reader)
        audit = store.audit()
    written = size.frames * size.rounds + size.arrivals
    gate = all_of(
        (f"{written} chunks stored", audit.chunks == written),
        (
            "0 lost, 0 stored twice, by the store's audit",
            not (audit.gap_chunks or audit.duplicate_chunks),
        ),
        ("nothing damaged", not audit.corrupt),
    )
    ours = [size.frames * STEPS / took_s for took_s in took["ours"]]
    theirs = [size.steps / took_s for took_s in took["theirs"]]
    findings.figures += [
        Figure(
            name="steps into Cassandra by one writer",
            unit="steps/s",
            values=ours,
            gate=gate,
            bound_by="one node on the same two cores, synced every 5 ms",
        ),
        Figure(
            name="from the start of a write to another process's tail: p50",
            unit="ms",
            gate=gate,
            more_is_better=False,
            values=[float(np.percentile(lags, 50)) * 1e3],
        ),
        Figure(
            name="from the start of a write to another process's tail: p99",
            unit="ms",
            gate=gate,
            more_is_better=False,
            values=[float(np.percentile(lags, 99)) * 1e3],
            goal=1_000.0,
        ),
    ]
    findings.ratios.append(
        Ratio(
            name="steps into Cassandra, one writer",
            peer="one row a step, prepared, 64 at once",
            unit="steps/s",
            ours=ours,
            theirs=theirs,
            gate=gate,
        )
    )
    findings.notes.append(
        "the peer's rows are written 64 at once with prepared statements; the seed wrote them one "
        "by one, and each retry created a new row; ours are checked against the state of each "
        "session and committed with the position"
    )


class _Writer:
    """One partition's writer."""

    def __init__(self, store: FullStore) -> None:
        self._store = store
        self._position = 0
        self._epoch = store.claim("bench", owner="bench", ttl_s=600.0).epoch

    def write(self, candidates: Sequence[Candidate]) -> None:
        for at in range(0, len(candidates), COMMIT):
            self._position += 1
            part = candidates[at : at + COMMIT]
            receipt = self._store.write(
                WriteBatch("bench", self._epoch, Position(str(self._position)), part)
            )
            assert set(receipt.fates) == {"new"}, receipt


def ingest(server: Server, folder: Path, size: Size, findings: Findings) -> None:
    """From a file stream into this Cassandra, with the native service and with Spark."""
    append_to_tail(server, folder, findings, rounds=size.rounds, arrivals=size.arrivals)


def spark_into_cassandra(server: Server, folder: Path, size: Size, findings: Findings) -> None:
    """One Spark worker and two, into this Cassandra."""
    if size.spark_rounds:
        spread(folder, findings, rounds=size.spark_rounds, server=server)


def spark_into_a_waiting_store(folder: Path, size: Size, findings: Findings) -> None:
    """One Spark worker and two, into a store whose writes only wait 5 ms."""
    if size.spark_rounds:
        spread(folder, findings, rounds=size.spark_rounds)


def _frames(size: Size) -> list[Frame]:
    return [
        frame.stamped(PLAYER, int(time.time()))
        for frame in person_frames(size.frames, steps=STEPS, seed=0)
    ]


def _timed(work: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def _timed_with(work: Callable[[Sequence[Candidate]], None], chunks: Sequence[Candidate]) -> float:
    """The time that `work` takes for chunks that were created before."""
    return _timed(lambda: work(chunks))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
