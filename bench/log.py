"""Our stream against Redis Streams: the same 512-step chunks, each synced before its ack."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.figures import Figure, Findings, Took, all_of, in_turn, rate_ratios
from bench.games import cart_frames, n_steps
from bench.redis_server import Missing, cpu_s, redis_server
from bench.sizes import Scale
from understudy.experience.frame import Frame, decode_frame
from understudy.streams.file import FileStream

_AT_ONCE = 16
_READ_BYTES = 8 << 20


def measure(folder: Path, scale: Scale) -> Findings:
    """Measure appends of 16 chunks at a time, and of one chunk at a time."""
    findings = Findings()
    frames = cart_frames(scale.commits * _AT_ONCE)
    single = frames[: max(2, scale.commits * 2)]
    stream = FileStream(folder / "stream")
    stream.append(frames[:1])
    contestants: dict[str, Callable[[], Took]] = {
        "ours": lambda: _append(stream, frames, _AT_ONCE),
        "ours, single": lambda: _append(stream, single, 1),
    }
    try:
        with redis_server(folder / "redis") as client:
            contestants |= {
                "pipeline": lambda: _xadd(client, frames, _AT_ONCE),
                "MULTI": lambda: _xadd(client, frames, _AT_ONCE, is_transaction=True),
                "single": lambda: _xadd(client, single, 1),
            }
            took = in_turn(scale.rounds, contestants)
            is_complete = client.xlen("bench") == scale.rounds * (2 * len(frames) + len(single))
    except Missing as missing:
        findings.skipped.append(str(missing))
        took = in_turn(scale.rounds, {name: contestants[name] for name in ("ours", "ours, single")})
        is_complete = True
    n_expected = 1 + scale.rounds * (len(frames) + len(single))
    read = _read_all(stream)
    stream.close()
    gate = all_of(
        (
            "every frame can be read back from our stream",
            len(read) == n_expected and set(read) == set(frames),
        ),
        ("Redis has as many entries", is_complete),
    )
    for name, used, key, theirs in (
        (f"{_AT_ONCE} chunks at a time", frames, "ours", ("pipeline", "MULTI")),
        ("one chunk at a time", single, "ours, single", ("single",)),
    ):
        amount = n_steps(used)
        findings.figures.append(
            Figure(
                name=f"stream append, {name}: wall clock",
                unit="steps/s",
                gate=gate,
                values=[amount / each.wall_s for each in took[key]],
            )
        )
        for peer in theirs:
            if peer in took:
                how = "XADD" if peer == "single" else f"XADD, {peer}"
                findings.ratios += rate_ratios(
                    f"stream, {name}",
                    f"Redis ({how})",
                    amount,
                    took[key],
                    took[peer],
                    unit="steps/s",
                    gate=gate,
                )
    if not findings.skipped:
        findings.notes.append(
            "stream: Redis runs with appendonly yes and appendfsync always on a Unix socket; its "
            "processor time is that of client and server. A pipeline is synced once per event "
            "loop iteration, MULTI once."
        )
    return findings


def _append(stream: FileStream, frames: Sequence[Frame], at_once: int) -> Took:
    cpu = time.process_time()
    wall = time.perf_counter()
    for at in range(0, len(frames), at_once):
        outcomes = stream.append(frames[at : at + at_once])
        assert all(outcome.accepted for outcome in outcomes)
    return Took(time.process_time() - cpu, time.perf_counter() - wall)


def _xadd(
    client: Any, frames: Sequence[Frame], at_once: int, *, is_transaction: bool = False
) -> Took:
    """The cost of appending to Redis: processor time of client and server, and wall time."""
    server = cpu_s(client)
    cpu = time.process_time()
    wall = time.perf_counter()
    for at in range(0, len(frames), at_once):
        if at_once == 1:
            client.xadd("bench", {"f": frames[at].encode()})
            continue
        pipeline = client.pipeline(transaction=is_transaction)
        for frame in frames[at : at + at_once]:
            pipeline.xadd("bench", {"f": frame.encode()})
        pipeline.execute()
    cpu = time.process_time() - cpu
    wall = time.perf_counter() - wall
    return Took(cpu + cpu_s(client) - server, wall)


def _read_all(stream: FileStream) -> list[Frame]:
    (partition,) = stream.partitions()
    frames: list[Frame] = []
    after = None
    while True:
        read = stream.read(partition.id, after, max_bytes=_READ_BYTES, wait_s=0.0)
        if not read.records:
            return frames
        frames += [decode_frame(record.raw) for record in read.records]
        after = read.next
