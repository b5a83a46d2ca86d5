"""Ingest as a job of Spark's Structured Streaming: Spark decides what is read when, the store what is new.

A batch comes to the driver, which holds the claims: the frames of each stream partition are checked and written by it
in order, together with the position behind them. A batch that Spark hands over twice, because it died before it noted
that the first time was enough, gives duplicates, which the store tells apart by their numbers. Nothing depends on
Spark's batch number.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, TypeVar

import structlog

from understudy.core import errors
from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import ClaimLost, ConfigError, StorageFailed, StorageFull, Unreachable
from understudy.core.ports import Position, Record, Stream
from understudy.ingest.offsets import Passed
from understudy.ingest.writer import IngestStats, Writer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming import StreamingQuery

    from understudy.ingest.spark_session import Spark

_log = structlog.get_logger("understudy.ingest")
T = TypeVar("T")
_LOOK_S, _TROUBLE_S = 0.1, 1.0
_OURS = re.compile(r"understudy\.core\.errors\.(\w+): (.+)")
_PYTHON = re.compile(r"^(?:\w+\.)*(\w+(?:Error|Exception)): (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkJob:
    """What a job reads and where it notes how far it came."""

    opener: str
    """Import path of a function that opens the stream, in whatever process."""
    address: str
    """What the opener is called with."""
    stream: str
    """The stream's name, by which a checkpoint is known to belong to it."""
    checkpoint: str
    """A folder, or an address that Spark knows."""
    max_batch_bytes: int = 16 * 1024 * 1024

    def __post_init__(self) -> None:
        if self.max_batch_bytes < 1:
            raise ConfigError(f"max_batch_bytes is {self.max_batch_bytes}; give a number above 0, such as 16777216")


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """The last batch that Spark finished."""

    batch: int
    rows: int
    duration_s: float


class _Drained(Exception):
    """All that was in the stream when draining began is stored."""


class SparkIngest:
    """A streaming job over a stream; may be killed at any moment and started again."""

    def __init__(
        self, spark: "Spark", stream: Stream, writer: Writer, *, job: SparkJob, clock: Clock | None = None
    ) -> None:
        """`stream`: the same that the job's opener opens, for looking at; all reading is Spark's."""
        self._spark, self._stream, self._writer, self._job = spark, stream, writer, job
        self._clock = clock or SystemClock()
        self._stop = Event()
        self._drains_since_s: float | None = None
        self._failure: Exception | None = None
        self._figures: BatchFigures | None = None
        with self._watching():
            self._query = self._start()

    # --- running ----------------------------------------------------------------------------------------------------

    def run(self, stop: Event, each: Callable[[], None] = lambda: None) -> None:
        """Let Spark read until told to stop, starting the job again where a retry helps."""
        self._stop = stop
        with self._watching():
            while not stop.wait(_LOOK_S):
                each()
                if not self._query.isActive:
                    self._restart(stop)

    def drain(self) -> None:
        """Store everything that was in the stream when this was called; it ends however fast more comes."""
        from pyspark.errors import StreamingQueryException

        self._stop.set()
        self._drains_since_s = self._clock.now()
        with self._watching():
            try:
                if not self._query.isActive:
                    self._query = self._start()
                self._query.processAllAvailable()
            except StreamingQueryException as error:
                if not isinstance(self._failure, _Drained):
                    raise self._trouble(error) from None

    def close(self) -> None:
        with contextlib.suppress(*_spark_gone()):
            self._query.stop()

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """StorageFailed when Spark itself dies; whoever starts the job again goes on where the store stands."""
        try:
            yield
        except _spark_gone() as error:
            raise StorageFailed(f"Spark has ended ({type(error).__name__}){self._where()}; start it again") from None

    @property
    def stats(self) -> IngestStats:
        return self._writer.stats

    def figures(self) -> BatchFigures | None:
        """The last batch with rows in it that was seen, as Spark tells of it."""
        last = None
        with contextlib.suppress(*_spark_gone()):
            last = self._query.lastProgress
        if last is not None and last["numInputRows"]:
            took_s = last["durationMs"]["triggerExecution"] / 1000
            self._figures = BatchFigures(last["batchId"], last["numInputRows"], took_s)
        return self._figures

    def _start(self) -> "StreamingQuery":
        from pyspark.errors import PySparkException

        from understudy.ingest.spark_source import NAME, FrameSource

        self._failure = None
        session, job = self._spark.session, self._job
        session.dataSource.register(FrameSource)
        options = {
            "opener": job.opener, "address": job.address, "stream": job.stream,
            "start": json.dumps(self._patiently(self._positions)), "max_bytes": str(job.max_batch_bytes),
        }  # fmt: skip
        frames = session.readStream.format(NAME).options(**options).load()
        query = frames.writeStream.queryName("ingest").option("checkpointLocation", job.checkpoint)
        try:
            return query.foreachBatch(self._store_batch).start()
        except PySparkException as error:
            raise self._trouble(error) from None

    def _positions(self) -> Mapping[str, Position | None]:
        """How far each partition is stored: where a job without a checkpoint begins."""
        return {one.id: self._writer.claim(one.id).position for one in self._stream.partitions()}

    def _restart(self, stop: Event) -> None:
        trouble = self._trouble(self._query.exception())
        if not isinstance(trouble, StorageFull | Unreachable):
            raise trouble
        _log.warning("unreachable", error=str(trouble), next="it is tried again; nothing acknowledged is lost")
        if not stop.wait(_TROUBLE_S):
            self._query = self._start()

    def _trouble(self, error: Exception | None) -> Exception:
        """What made the job fail, as one of our own errors where it was one."""
        if self._failure is not None:
            return self._failure
        text = "it ended by itself" if error is None else str(error)
        for name, said in reversed(_OURS.findall(text)):
            kind = getattr(errors, name, None)
            if kind in (ConfigError, errors.MissingExtra, StorageFailed, StorageFull, Unreachable):
                return kind(said)  # type: ignore[no-any-return]
        said = [f"{name}: {rest}" for name, rest in _PYTHON.findall(text)] or [text.strip().splitlines()[0]]
        return StorageFailed(f"the Spark job failed: {said[-1][:300]}{self._where()}")

    def _where(self) -> str:
        return f"; all it said is in {self._spark.log}" if self._spark.log else ""

    # --- one batch --------------------------------------------------------------------------------------------------

    def _store_batch(self, frames: "DataFrame", _batch: int) -> None:
        try:
            parts = _by_partition(frames)
            times_s = [records[0].time_s for records in parts.values()]
            if self._drains_since_s is not None and min(times_s, default=0.0) > self._drains_since_s:
                raise _Drained  # Spark has noted this batch, and will hand it over again next time
            for partition, records in parts.items():
                self._patiently(partial(self._store, partition, records))
        except Exception as error:
            # Spark shows it as a text; whoever started the job wants to know what it was.
            self._failure = error
            raise

    def _store(self, partition: str, records: Sequence[Passed]) -> None:
        held = self._writer.claim(partition)
        after = records[0].after
        # What begins at the partition's first record leaves nothing out, and so does what reaches over our position.
        if after not in (None, held.position) and held.position not in {one.position for one in records}:
            raise ConfigError(
                f"checkpoint {self._job.checkpoint} goes on behind {after} of partition {partition}, which "
                f"is stored up to {held.position}; remove the checkpoint: the job then begins where the store stands"
            )
        read = [Record(one.position, one.time_s, one.raw) for one in records]
        self._writer.write(partition, read, read[-1].position)

    def _patiently(self, call: Callable[[], T]) -> T:
        """The call's result, tried again while the store is full, away or another's; until told to stop."""
        while True:
            try:
                return call()
            except (StorageFull, Unreachable, ClaimLost) as error:
                if self._stop.is_set():
                    raise
                _log.warning("store_waits", error=str(error), next="it is tried again; nothing acknowledged is lost")
                self._stop.wait(_TROUBLE_S)


def _spark_gone() -> tuple[type[Exception], ...]:
    """What a call into a JVM that died raises."""
    from py4j.protocol import Py4JError

    return (Py4JError, ConnectionError)


def _by_partition(frames: "DataFrame") -> dict[str, list[Passed]]:
    """A batch's records of each partition, in the order in which they were read; parents before their children."""
    table = frames.toArrow()
    names = ("partition", "after", "position", "time_s", "frame")
    columns = [table.column(name).to_pylist() for name in names]
    found: dict[str, list[Passed]] = {}
    for row in zip(*columns, strict=True):
        one = Passed(*row)
        found.setdefault(one.partition, []).append(one)
    return found
