"""Spark jobs of the tests: between any stream and a store on a real Cassandra."""

import contextlib
import os
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any, NoReturn

import numpy as np

from tests.backends.keyspaces import Keyspace, OneSpec
from understudy.app.config import Config, IngestSection, StoreSection, StreamSection, write_config
from understudy.app.data import DataFolder
from understudy.app.deployment import open_deployment
from understudy.app.digest import digests
from understudy.app.roles.children import Child, python_module
from understudy.app.roles.spark_stream import OPENER, name_of, text_of
from understudy.core.clock import SystemClock
from understudy.core.errors import Unreachable
from understudy.core.frame import Frame
from understudy.core.names import new_session
from understudy.core.ports import FullStore, Receipt, Stream, WriteBatch
from understudy.ingest.service import IngestService
from understudy.ingest.spark import SparkIngest, SparkJob
from understudy.ingest.spark_session import Spark
from understudy.ingest.writer import Writer
from understudy.stores.local import LocalStore
from understudy.streams.file import FileStream
from understudy.testing.desk import SPEC
from understudy.testing.samples import random_session, stamped

MARK = "UNDERSTUDY_TEST_MARK"


def some_frames(
    rng: np.random.Generator, *, n_sessions: int = 4, n_chunks: int = 5, now_s: float | None = None
) -> list[Frame]:  # fmt: skip
    """Frames of people who play now, a few at the same time."""
    now_s = time.time() if now_s is None else now_s
    sessions = [
        list(stamped(random_session(SPEC, rng, n_chunks=n_chunks, session=new_session(now_s)), received_s=now_s))
        for _ in range(n_sessions)
    ]
    return [frame for frames in zip(*sessions, strict=True) for frame in frames]


def digests_of(store: FullStore) -> dict[str, str]:
    return digests(lambda cursor: store.tail(cursor, max_items=500, wait_s=0.0))


def native_digests(stream: Stream, folder: Path) -> dict[str, str]:
    """What our own service makes of a stream, in a store of its own."""
    with contextlib.closing(LocalStore(folder, specs=OneSpec())) as store:
        IngestService(stream, store, OneSpec(), owner="native").drain()
        return digests_of(store)


def forget_last_commit(checkpoint: Path) -> None:
    """As if the job had died when its last batch was stored and not yet noted."""
    commits = [path for path in (checkpoint / "commits").iterdir() if path.name.isdigit()]
    last = max(commits, key=lambda path: int(path.name))
    last.unlink()
    last.with_name(f".{last.name}.crc").unlink(missing_ok=True)


class Job:
    """A stream, a keyspace and a checkpoint; a Spark job between them as often as wanted, in one session."""

    def __init__(self, spark: Spark, keyspace: Keyspace, data: DataFolder, *, url: str = "") -> None:
        self.spark, self.keyspace, self.data, self.url = spark, keyspace, data, url
        self.checkpoint = data.root / "checkpoint"
        self.store: FullStore = keyspace.open()

    def ingest(self, stream: Stream, *, store: Any = None, **settings: Any) -> SparkIngest:
        """A job that was not started yet."""
        writer = Writer(store or self.store, OneSpec(), owner="spark", claim_ttl_s=30.0, clock=SystemClock())
        given = {
            "opener": OPENER, "address": text_of(self.url, self.data), "stream": name_of(self.url, self.data),
            "checkpoint": str(self.checkpoint), **settings,
        }  # fmt: skip
        return SparkIngest(lambda _: contextlib.nullcontext(self.spark), stream, writer, job=SparkJob(**given))

    def drain(self, stream: Stream, **settings: Any) -> SparkIngest:
        """Store what is in the stream, and stop; the job as it stood at the end."""
        ingest = self.ingest(stream, **settings)
        ingest.drain()
        return ingest

    def forget_last_commit(self) -> None:
        forget_last_commit(self.checkpoint)

    def lose_checkpoint(self) -> None:
        shutil.rmtree(self.checkpoint)


def marked(mark: str) -> list[int]:
    """Processes that live and were started with this mark in their environment, also by others who were."""
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
    """Spark ingest as `up` runs it, from a file stream into a keyspace; can be killed at any moment."""

    def __init__(self, keyspace: Keyspace, data: DataFolder) -> None:
        self.data, self.mark = data, uuid.uuid4().hex
        open_deployment(data).registry.register(SPEC)
        self._config = data.root / "config.json"
        config = Config(
            data=str(data.root), stream=StreamSection(), store=StoreSection(url=keyspace.url),
            ingest=IngestSection(engine="spark", master="local[2]"),
        )  # fmt: skip
        write_config(config, self._config)
        self.stream = FileStream(data.stream)

    def start(self, module: str = "understudy.app.roles.spark_process") -> Child:
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


def wait_until(is_so: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.1)


def append(stream: Stream, frames: Sequence[Frame]) -> None:
    assert all(one.accepted for one in stream.append(frames))


class Away:
    """A store that can be claimed, perhaps, and takes nothing until it is back; `asked` is set when it was asked to."""

    def __init__(self, inner: Any, *, takes_claims: bool) -> None:
        self._inner, self._takes_claims, self.asked, self.is_back = inner, takes_claims, Event(), False

    def claim(self, *of: Any, **who: Any) -> Any:
        if not (self._takes_claims or self.is_back):
            self._refuse()
        return self._inner.claim(*of, **who)

    def write(self, batch: WriteBatch) -> Receipt:
        if not self.is_back:
            self._refuse()
        receipt: Receipt = self._inner.write(batch)
        return receipt

    def _refuse(self) -> NoReturn:
        self.asked.set()
        raise Unreachable("it does not answer")


@contextlib.contextmanager
def following(ingest: SparkIngest, *, ends_in_s: float) -> Iterator[None]:
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
