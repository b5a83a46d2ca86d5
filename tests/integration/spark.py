"""Spark jobs for tests: from any stream to a real Cassandra, with faults inside the tasks."""

import contextlib
import json
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any, NoReturn

import numpy as np

from tests.integration.keyspaces import Keyspace, OneSpec
from understudy.backends.addresses import open_store, open_stream
from understudy.backends.data import DataFolder
from understudy.backends.deployment import open_deployment
from understudy.core.errors import StorageFailed, Unreachable
from understudy.core.names import new_session
from understudy.experience.frame import Frame
from understudy.ingest.service import (
    IngestProgress,
    IngestService,
    IngestStats,
    Turn,
    log_undrained_on_stop,
)
from understudy.ingest.spark import Opened, Spark, SparkJob, SparkTasks
from understudy.platform import ingest as role
from understudy.platform.children import Child, python_module
from understudy.platform.config import (
    Config,
    IngestSection,
    StoreSection,
    StreamSection,
    write_config,
)
from understudy.ports import Claim, FullStore, Partition, Read, Receipt, Stream, WriteBatch
from understudy.simulation.verify import digests
from understudy.stores.local import LocalStore
from understudy.streams.file import FileStream
from understudy.testing.samples import random_session, stamped
from understudy.testing.store_harness import SPEC

MARK = "UNDERSTUDY_TEST_MARK"


def some_frames(
    rng: np.random.Generator, *, n_sessions: int = 4, n_chunks: int = 5, now_s: float | None = None
) -> list[Frame]:
    """Frames of people who play now, a few concurrently."""
    now_s = time.time() if now_s is None else now_s
    sessions = [
        list(
            stamped(
                random_session(SPEC, rng, n_chunks=n_chunks, session=new_session(now_s)),
                received_s=now_s,
            )
        )
        for _ in range(n_sessions)
    ]
    return [frame for frames in zip(*sessions, strict=True) for frame in frames]


def digests_of(store: FullStore) -> dict[str, str]:
    return digests(lambda cursor: store.tail(cursor, max_items=500, wait_s=0.0))


def native_digests(stream: Stream, folder: Path) -> dict[str, str]:
    """What our own service stores from a stream, in a separate store."""
    with contextlib.closing(LocalStore(folder, specs=OneSpec())) as store:
        IngestService(stream, store, OneSpec(), owner="native").drain()
        return digests_of(store)


class FaultyStore:
    """A store in a task that goes wrong as long as there are files for it: whoever writes may be
    any process.

    no-claims, away    it does not answer claims, writes; `asked` is there when it was asked to
    broken             its disk refuses writes
    shaky              one write fails before it was made, and one after
    lossy              it says all was well and leaves the last frame of every batch out
    dies               the first write kills its process
    """

    def __init__(self, inner: FullStore, folder: Path) -> None:
        self._inner = inner
        self._folder = folder
        self.close = inner.close

    def _has(self, name: str) -> bool:
        return (self._folder / name).exists()

    def _note(self, name: str, text: str = ".") -> int:
        """How many notes of this name there are now, over all processes."""
        with (self._folder / name).open("a") as file:
            file.write(f"{text}\n")
        return len((self._folder / name).read_text().splitlines())

    def _refuse(self) -> NoReturn:
        self._note("asked")
        raise Unreachable("it does not answer")

    def claim(self, partition: str, *, owner: str, ttl_s: float) -> Claim:
        if self._has("no-claims"):
            self._refuse()
        claim = self._inner.claim(partition, owner=owner, ttl_s=ttl_s)
        self._note("claims", f"{partition} {claim.epoch}")
        return claim

    def write(self, batch: WriteBatch) -> Receipt:
        if self._has("away"):
            self._refuse()
        if self._has("broken"):
            raise StorageFailed("the disk refuses")
        if self._has("dies") and self._note("writes") == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        number = self._note("writes") if self._has("shaky") else 0
        if number == 1:
            raise Unreachable("it does not answer")
        if self._has("lossy"):
            less = WriteBatch(batch.partition, batch.epoch, batch.position, batch.candidates[:-1])
            return Receipt([*self._inner.write(less).fates, "new"])
        receipt = self._inner.write(batch)
        if number == 3:
            raise Unreachable("it answered too late")
        return receipt


class FaultyStream:
    """A stream whose first reads are throttled while there is a file `throttled`."""

    def __init__(self, inner: Stream, folder: Path) -> None:
        self._inner = inner
        self._folder = folder
        self.close = inner.close

    def read(self, *of: Any, **how: Any) -> Read:
        path = self._folder / "throttled"
        if path.exists() and len(path.read_text()) < 3:
            path.write_text(path.read_text() + ".")
            raise Unreachable("too many requests")
        return self._inner.read(*of, **how)


def open_in_task(address: str) -> Opened:
    """What tasks of these tests open: the real ones, and faults between."""
    places = json.loads(address)
    folder = Path(places["data"])
    stream = FaultyStream(open_stream(places["stream"], DataFolder(folder)), folder)
    store: Any = FaultyStore(open_store(places["store"], specs=OneSpec()), folder)
    return stream, store, OneSpec()  # type: ignore[return-value]


class OnlyListed:
    """The stream of a driver: it may be asked for its partitions, and for no record."""

    def __init__(self, inner: Stream) -> None:
        self.partitions: Callable[[], Sequence[Partition]] = inner.partitions

    def read(self, *of: Any, **how: Any) -> NoReturn:
        raise AssertionError("the driver reads frames")


class Untouched:
    """The store of a driver: it may be asked for nothing."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(f"the driver calls {name} of its store")


class Ingest:
    """A job that runs when it is told to, in a Spark that others use after it."""

    def __init__(self, spark: Spark, job: SparkJob, stream: Stream) -> None:
        self.tasks = SparkTasks(job, lambda _: contextlib.nullcontext(spark))
        self.reports: list[IngestProgress] = []
        driver: Any = (OnlyListed(stream), Untouched(), OneSpec())
        self.service = IngestService(*driver, owner="driver", spread=self._spread)

    def _spread(self, turns: Iterable[Turn]) -> Iterator[IngestProgress]:
        for progress in self.tasks(turns):
            self.reports.append(progress)
            yield progress

    @property
    def stats(self) -> IngestStats:
        return self.service.stats

    def drain(self) -> None:
        with self.tasks.running(Event()):
            self.service.drain()

    def run(self, stop: Event, *, drain_s: float = role.DRAIN_S) -> None:
        """As the role does."""
        with log_undrained_on_stop(stop.is_set), self.tasks.running(stop):
            role.repeat(self.service.step, stop)
            role.drain(self.service, within_s=drain_s)


class Job:
    """A stream and a keyspace; a Spark job between them as often as wanted, in one Spark."""

    def __init__(
        self, spark: Spark, keyspace: Keyspace, data: DataFolder, *, url: str = ""
    ) -> None:
        self.spark = spark
        self.keyspace = keyspace
        self.data = data
        self.url = url
        self.store: FullStore = keyspace.open()
        data.root.mkdir(parents=True, exist_ok=True)

    def fault(self, name: str) -> Path:
        """Let tasks meet a fault from now on; the file that makes it."""
        path = self.data.root / name
        path.touch()
        return path

    def notes(self, name: str) -> list[str]:
        """What tasks noted under a name."""
        path = self.data.root / name
        return path.read_text().splitlines() if path.exists() else []

    def ingest(self, stream: Stream, **settings: Any) -> Ingest:
        """A job that was not started yet."""
        address = json.dumps(
            {"data": str(self.data.root), "stream": self.url, "store": self.keyspace.url}
        )
        given = {
            "opener": "tests.integration.spark:open_in_task",
            "address": address,
            "owner": "spark",
            **settings,
        }
        return Ingest(self.spark, SparkJob(**given), stream)

    def drain(self, stream: Stream, **settings: Any) -> Ingest:
        """Store what is in the stream, and stop; the job as it stood at the end."""
        ingest = self.ingest(stream, **settings)
        ingest.drain()
        return ingest


def marked(mark: str) -> list[int]:
    """Live processes with this mark in their environment, including descendants."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue  # it ended, or is somebody else's
    return found


def left_of(mark: str, timeout_s: float = 30.0) -> list[int]:
    """Those that are still there after this long."""
    deadline = time.monotonic() + timeout_s
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


class Process:
    """Spark ingest as `up` runs it, from a file stream to a keyspace; may be killed."""

    def __init__(self, keyspace: Keyspace, data: DataFolder) -> None:
        self.data = data
        self.mark = uuid.uuid4().hex
        open_deployment(data).registry.register(SPEC)
        self._config = data.root / "config.json"
        config = Config(
            data=str(data.root),
            stream=StreamSection(),
            store=StoreSection(url=keyspace.url),
            ingest=IngestSection(engine="spark", master="local[2]"),
        )
        write_config(config, self._config)
        self.stream = FileStream(data.stream)

    def start(self, module: str = "understudy.platform.ingest") -> Child:
        os.environ[MARK] = self.mark
        try:
            return Child("ingest", python_module(module, str(self.data.root), str(self._config)))
        finally:
            del os.environ[MARK]

    def left(self) -> list[int]:
        """Processes of this job that live: the driver, its JVM and its workers."""
        return marked(self.mark)

    def jvm(self) -> int | None:
        """The process in which Spark itself runs."""
        for pid in self.left():
            with contextlib.suppress(OSError):
                if b"SparkSubmit" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        return None

    def wait_until_gone(self) -> list[int]:
        """Processes that are still there after a while."""
        return left_of(self.mark)

    def kill_all(self) -> None:
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)


def wait_for(child: Child, stored: int, *, timeout_s: float = 180.0) -> None:
    """Wait until a process reports at least this many steps stored."""
    deadline = time.monotonic() + timeout_s
    while child.latest.get("stored", -1) < stored:
        assert child.exit_code is None, child.errors
        assert time.monotonic() < deadline, f"nothing but {child.latest}"
        time.sleep(0.05)


def wait_until(is_so: Callable[[], bool], timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.1)


def append(stream: Stream, frames: Sequence[Frame]) -> None:
    assert all(one.accepted for one in stream.append(frames))


@contextlib.contextmanager
def following(ingest: Ingest, *, ends_in_s: float) -> Iterator[None]:
    """A job that follows its stream meanwhile, and ends in time when it is asked to stop."""
    stop = Event()
    thread = Thread(target=ingest.run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(ends_in_s)
    assert not thread.is_alive(), f"asked to stop, it goes on after {ends_in_s} s"
