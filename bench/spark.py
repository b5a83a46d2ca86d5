"""How much faster Spark ingest stores four partitions with two workers than with one.

Part of bench/backends.py. Each run is a separate process with its own Spark: `python -m bench.spark
MASTER FOLDER STORE` prints steps/s.
"""

import contextlib
import functools
import importlib.util
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from secrets import token_hex
from threading import Event
from typing import Any

from bench.figures import Figure, Findings, all_of, in_turn
from bench.games import CART, PLAYER, OneGame, person_frames
from understudy.backends.addresses import init_store, open_store
from understudy.core.errors import ClaimLost
from understudy.dev.servers import Server, host_location
from understudy.ingest.service import IngestConfig, IngestService
from understudy.ingest.spark import Opened, SparkJob, SparkTasks, open_spark
from understudy.ports import Claim, ExperienceStore, Position, Receipt, WriteBatch
from understudy.streams.file import FileStream

PARTITIONS = 4
STEPS = 64
FRAMES = 500
"""Frames per partition; each is a commit of its own, so that the store's 5 ms dominate."""
WAIT_S = 0.005


class WaitingStore:
    """A store of positions only, in files that all processes share; each write takes 5 ms."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def _read(self, partition: str) -> tuple[int, str | None]:
        path = self._folder / partition
        epoch, position = json.loads(path.read_text()) if path.exists() else (0, None)
        return epoch, position

    def _save(self, partition: str, epoch: int, position: str | None) -> None:
        path = self._folder / f".{partition}"
        path.write_text(json.dumps([epoch, position]))
        path.rename(self._folder / partition)

    def claim(self, partition: str, *, owner: str, ttl_s: float) -> Claim:
        epoch, position = self._read(partition)
        self._save(partition, epoch + 1, position)
        return Claim(partition, epoch + 1, None if position is None else Position(position))

    def write(self, batch: WriteBatch) -> Receipt:
        time.sleep(WAIT_S)
        if self._read(batch.partition)[0] != batch.epoch:
            raise ClaimLost("a newer epoch owns the partition")
        self._save(batch.partition, batch.epoch, batch.position)
        return Receipt(["new"] * len(batch.candidates), [""] * len(batch.candidates))

    def close(self) -> None:
        """Nothing is open."""


def open_in_task(address: str) -> Opened:
    """Open a folder's stream, and the store of a URL, or a waiting store if there is no URL."""
    locations = json.loads(address)
    folder = Path(locations["folder"])
    url = locations["store"]
    specs = OneGame(CART)
    store: Any = open_store(url, specs=specs) if url else WaitingStore(folder / "store")
    return FileStream(folder / "stream"), store, specs


def run(master: str, folder: Path, store: str) -> dict[str, float]:
    """Steps per second after Spark has started, and how many steps were stored."""
    job = SparkJob(
        opener="bench.spark:open_in_task",
        address=json.dumps({"folder": str(folder), "store": store}),
        owner="bench",
        config=IngestConfig(max_read_bytes=1),
    )
    unused: ExperienceStore = WaitingStore(folder / "unused")  # type: ignore[assignment]
    with contextlib.ExitStack() as opened:
        spark = opened.enter_context(open_spark(folder / "spark", Event(), master=master))
        tasks = SparkTasks(job, lambda _: contextlib.nullcontext(spark))
        streams = [
            opened.enter_context(contextlib.closing(FileStream(folder / "stream", sync=_no_sync)))
            for _ in range(PARTITIONS)
        ]
        service = IngestService(streams[0], unused, OneGame(CART), owner="bench", spread=tasks)
        opened.enter_context(tasks.running(Event()))
        for number, stream in enumerate(streams):
            _append(stream, 16, seed=number)
        for _ in range(3):  # warm-up: all workers start
            service.drain()
        for number, stream in enumerate(streams):
            _append(stream, frames_into(store), seed=10 + number)
        before = service.stats.steps
        began_s = time.monotonic()
        service.drain()
        took_s = time.monotonic() - began_s
        stored = service.stats.steps - before
    return {"steps_s": stored / took_s, "stored": stored}


def frames_into(store: str) -> int:
    """Frames per partition: `FRAMES` for the waiting store (no URL), a fifth for Cassandra."""
    return FRAMES // 5 if store else FRAMES


def _no_sync(_: int) -> None:
    """A sync that does nothing: these streams need not survive a power cut."""


def _append(stream: FileStream, count: int, *, seed: int) -> None:
    now_s = int(time.time())
    frames = [
        frame.stamped(PLAYER, now_s) for frame in person_frames(count, steps=STEPS, seed=seed)
    ]
    for frame in frames:
        assert all(outcome.accepted for outcome in stream.append([frame]))


def why_no_spark() -> str:
    """Why Spark cannot run here; empty if it can."""
    if importlib.util.find_spec("pyspark") is None:
        return "Spark: pyspark is not installed; pip install 'understudy[spark]'"
    return "" if shutil.which("java") else "Spark: Java is not installed; install 17 or newer"


def spread(folder: Path, findings: Findings, *, rounds: int, server: Server | None = None) -> None:
    """Steps per second with one worker and with two, and their ratio; `server`: a Cassandra."""
    if reason := why_no_spark():
        findings.skipped.append(reason)
        return
    stored: list[float] = []
    name = "a store that waits 5 ms a write" if server is None else "Cassandra"

    def steps_s(master: str) -> float:
        place = folder / token_hex(4)
        place.mkdir()
        url = ""
        if server is not None:
            url = host_location(server, "cassandra", f"bench_{token_hex(4)}", replication="1").url
            init_store(url)
        command = [sys.executable, "-m", "bench.spark", master, str(place), url]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1_800)
        measured = json.loads(done.stdout)
        stored.append(measured["stored"])
        return float(measured["steps_s"])

    rates = in_turn(
        rounds, {master: functools.partial(steps_s, master) for master in ("local[1]", "local[2]")}
    )
    expected = PARTITIONS * frames_into("" if server is None else server.url) * STEPS
    gate = all_of((f"{expected} steps stored in each run", set(stored) == {expected}))
    goal = 1.6 if server is None else None
    findings.figures += [
        Figure(
            name=f"steps by Spark {master} into {name}",
            unit="steps/s",
            values=rates[master],
            gate=gate,
        )
        for master in rates
    ]
    ratios = [two / one for one, two in zip(rates["local[1]"], rates["local[2]"], strict=True)]
    findings.figures.append(
        Figure(
            name=f"Spark local[2] beside local[1] into {name}",
            unit="x",
            values=ratios,
            gate=gate,
            goal=goal,
        )
    )


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], Path(sys.argv[2]), sys.argv[3])))
