"""Ingest as a job of Spark's Structured Streaming: Spark decides what is read when, the store what is new.

A batch comes to the driver, which holds the claims: the frames of each stream partition are checked and written by it
in order, together with the position behind them. A batch that Spark hands over twice, because it died before it noted
that the first time was enough, gives duplicates, which the store tells apart by their numbers. Nothing depends on
Spark's batch number.
"""

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Timer
from typing import TYPE_CHECKING, TypeVar

import structlog

from understudy.core import errors
from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import ClaimLost, ConfigError, StorageFailed, StorageFull, Unreachable
from understudy.core.ports import Position, Record, Stream
from understudy.ingest.draining import DRAIN_S, TOO_MUCH, Drain, leaving_the_rest, tell_not_drained
from understudy.ingest.offsets import Passed, first_left_out, places_of
from understudy.ingest.spark_batch import batch_of
from understudy.ingest.spark_session import Spark, is_local, while_waiting
from understudy.ingest.writer import IngestStats, Writer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming import StreamingQuery

_log = structlog.get_logger("understudy.ingest")
T = TypeVar("T")
OpenSpark = Callable[[Event], AbstractContextManager[Spark]]
_LOOK_S, _TROUBLE_S, _WORKERS_S = 0.1, 1.0, 5.0
_TELLS = 100
"""How often Spark is looked at for what it tells behind a batch."""
_ANOTHER = "give another --checkpoint, or remove this one: the job then begins where the store stands"
_QUERY = re.compile(r"\[STREAM_FAILED\] Query \[.*?\] terminated with exception: ")
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
        self, open_spark: OpenSpark, stream: Stream, writer: Writer, *, job: SparkJob, clock: Clock | None = None
    ) -> None:
        """`open_spark`: a session for as long as the job runs, given what tells it to stop.

        `stream`: the same that the job's opener opens, for looking at; all reading is Spark's.
        """
        self._open_spark, self._stream, self._writer, self._job = open_spark, stream, writer, job
        self._clock = clock or SystemClock()
        self._stop, self._ends = Event(), Event()
        self._draining: Drain | None = None
        self._failure: Exception | None = None
        self._spark: Spark
        self._said: Path | None = None
        self._query: StreamingQuery | None = None
        self._figures: BatchFigures | None = None
        self._begun_at: Mapping[str, Position | None] = {}
        self._has_met = True
        self._next_look_s, self._has_workers = 0.0, True
        self._was_restarted = False
        self.ui: str | None = None
        """Where people can watch Spark, once it runs."""

    # --- running ----------------------------------------------------------------------------------------------------

    def run(self, stop: Event, each: Callable[[], None] = lambda: None, *, drain_s: float = DRAIN_S) -> None:
        """Let Spark read until told to stop, starting the job again where a retry helps; then drain.

        Draining ends after `drain_s`, and at once where nothing can be read or stored: the rest is left in the stream.
        """
        with leaving_the_rest(stop.is_set), self._running(stop, stop):
            while not stop.wait(_LOOK_S):
                each()
                if not self._active.isActive:
                    self._restart(stop)
                self._look_at_progress()
                self._meet()
                self._look_at_workers()
            self._drain(drain_s)

    def drain(self) -> None:
        """Store everything that is in the stream now, and end; it does however fast more comes. It never waits."""
        at_once = Event()
        at_once.set()
        with self._running(Event(), at_once):
            self._drain(None)

    @property
    def is_running(self) -> bool:
        """Whether the job was started, and not ended yet."""
        return self._query is not None

    @property
    def stats(self) -> IngestStats:
        return self._writer.stats

    def figures(self) -> BatchFigures | None:
        """The last batch with rows in it that was seen, as Spark tells of it."""
        last, query = None, self._query
        with contextlib.suppress(*_spark_gone()):
            last = query.lastProgress if query is not None else None
        if last is not None and last["numInputRows"]:
            took_s = last["durationMs"]["triggerExecution"] / 1000
            self._figures = BatchFigures(last["batchId"], last["numInputRows"], took_s)
        return self._figures

    @contextlib.contextmanager
    def _running(self, stop: Event, impatient: Event) -> Iterator[None]:
        """A session and the job in it, until the end; `stop` ends the start, `impatient` every wait for a server."""
        self._stop, self._ends, self._draining = impatient, Event(), None
        with self._watching(), self._open_spark(stop) as self._spark:
            self.ui, self._said = self._spark.ui, self._spark.log
            self._try_worker(stop)
            try:
                self._query = self._start()
                yield
            finally:
                self._ends.set()
                self.figures()
                query, self._query = self._query, None
                with contextlib.suppress(*_spark_gone()):
                    # A batch under way is finished first, or given up where it waits: Spark waits for us.
                    if query is not None:
                        query.stop()

    def _drain(self, within_s: float | None) -> None:
        from pyspark.errors import StreamingQueryException

        # The clock of this machine, on which Spark's source reads as well.
        self._draining = Drain(self._clock.monotonic())
        late = Timer(within_s or 0.0, self._give_up)
        if within_s is not None:
            late.start()
        try:
            if not self._active.isActive:
                self._query = self._start()
            self._active.processAllAvailable()
            for _ in range(_TELLS):  # what was processed is told a moment later
                if self._meet():
                    break
                time.sleep(_LOOK_S)
        except StreamingQueryException as error:
            if not isinstance(self._failure, _Drained):
                raise self._trouble(error) from None
        finally:
            late.cancel()

    def _give_up(self) -> None:
        query = self._query
        if query is None:
            return  # it ended a moment ago
        tell_not_drained(TOO_MUCH)
        with contextlib.suppress(*_spark_gone()):
            query.stop()

    @property
    def _active(self) -> "StreamingQuery":
        assert self._query is not None
        return self._query

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Unreachable when Spark itself dies; whoever starts the job again goes on where the store stands."""
        try:
            yield
        except _spark_gone() as error:
            raise Unreachable(f"Spark has ended ({type(error).__name__}){self._where()}; start it again") from None

    # --- the job ----------------------------------------------------------------------------------------------------

    def _start(self) -> "StreamingQuery":
        from py4j.protocol import Py4JJavaError
        from pyspark.errors import PySparkException

        from understudy.ingest.spark_source import NAME, FrameSource

        self._failure, self._has_met = None, False
        self._begun_at = self._patiently(self._positions)
        session, job = self._spark.session, self._job
        session.dataSource.register(FrameSource)
        options = {
            "opener": job.opener, "address": job.address, "stream": job.stream,
            "start": json.dumps(self._begun_at), "max_bytes": str(job.max_batch_bytes),
        }  # fmt: skip
        frames = session.readStream.format(NAME).options(**options).load()
        query = frames.writeStream.queryName("ingest").option("checkpointLocation", job.checkpoint)
        try:
            return query.foreachBatch(self._store_batch).start()
        except (PySparkException, Py4JJavaError) as error:
            raise self._trouble(error) from None

    def _meet(self) -> bool:
        """Whether Spark has told by now where its checkpoint goes on; ConfigError when the store is not that far.

        A batch that comes shows it, too. In a partition to which nothing comes any more it would never show.
        """
        last = None if self._has_met else self._active.lastProgress
        if last is not None:
            self._has_met = True
            told = json.loads(last["sources"][0]["endOffset"] or "null")
            places = places_of(told, self._job.stream) if told else {}
            held = {name: one.position for name, one in dict(self._writer.held).items()}
            # What was written since the start was looked at then.
            idle = {name: at for name, at in self._begun_at.items() if held.get(name, at) == at}
            if found := self._patiently(partial(first_left_out, self._stream, places, idle)):
                raise self._does_not_meet(*found, idle[found[0]])
        return self._has_met or not self._active.isActive

    def _does_not_meet(self, partition: str, after: Position | None, stored: Position | None) -> ConfigError:
        return ConfigError(
            f"checkpoint {self._job.checkpoint} goes on behind {after} of partition {partition}, which is stored up to "
            f"{stored}; {_ANOTHER}"
        )

    def _try_worker(self, stop: Event) -> None:
        """ConfigError when a worker on another machine cannot open the stream: it has to, to read a batch again."""
        from py4j.protocol import Py4JJavaError
        from pyspark.errors import PySparkException

        from understudy.ingest.spark_source import open_once

        if is_local(self._spark.master):
            return
        context, job = self._spark.session.sparkContext, self._job
        wait = f"no worker of {context.master} takes this job; are there any, with a free core and 1 GiB of memory?"
        try:
            with while_waiting(stop, context.cancelAllJobs, wait=wait):
                context.parallelize([job.address], 1).foreach(partial(open_once, job.opener))
        except (PySparkException, Py4JJavaError) as error:
            trouble = self._trouble(error)
            if isinstance(trouble, Unreachable):
                raise trouble from None
            raise ConfigError(
                f"a worker of {context.master} cannot open the stream: {trouble}; install understudy and what the "
                "stream needs in the Python that PYSPARK_PYTHON names, the same on every worker, with the files that "
                "the address names"
            ) from None

    def _look_at_workers(self) -> None:
        """Say when there are none: Spark waits for them without a word."""
        now_s = self._clock.monotonic()
        if is_local(self._spark.master) or now_s < self._next_look_s:
            return
        self._next_look_s = now_s + _WORKERS_S
        # The driver is one of them.
        has_workers = len(self._spark.session.sparkContext._jsc.sc().statusTracker().getExecutorInfos()) > 1
        if self._has_workers and not has_workers:
            _log.warning("no_workers", next="Spark waits until its cluster gives it some; nothing is lost meanwhile")
        self._has_workers = has_workers

    def _positions(self) -> Mapping[str, Position | None]:
        """How far each partition is stored: where a job without a checkpoint begins."""
        return {one.id: self._writer.claim(one.id).position for one in self._stream.partitions()}

    def _restart(self, stop: Event) -> None:
        trouble = self._trouble(self._active.exception())
        if not isinstance(trouble, StorageFull | Unreachable):
            raise trouble
        self._was_restarted, self.stats.trouble = True, str(trouble)
        _log.warning("unreachable", error=str(trouble), next="it is tried again; nothing acknowledged is lost")
        if not stop.wait(_TROUBLE_S):
            self._query = self._start()

    def _look_at_progress(self) -> None:
        """Forget why the job had to be started again, once it has read the stream."""
        if self._was_restarted and self._active.lastProgress is not None:
            self._was_restarted, self.stats.trouble = False, ""

    def _trouble(self, error: Exception | None) -> Exception:
        """What made the job fail, as one of our own errors where it was one."""
        if self._failure is not None:
            return self._failure
        text = str(getattr(error, "java_exception", None) or error or "it ended by itself")
        for name, said in reversed(_OURS.findall(text)):
            kind = getattr(errors, name, None)
            if kind in (ConfigError, errors.MissingExtra, StorageFailed, StorageFull, Unreachable):
                return kind(said)  # type: ignore[no-any-return]
        if "CONCURRENT_STREAM_LOG_UPDATE" in text:
            return ConfigError(
                f"another job uses checkpoint {self._job.checkpoint}; give another --checkpoint, or end it"
            )
        if self._spark.session.sparkContext._jsc.sc().isStopped():
            return Unreachable(f"Spark was stopped{self._where()}; start it again")
        said = [f"{name}: {rest}" for name, rest in _PYTHON.findall(text)] or [_QUERY.sub("", text.strip(), count=1)]
        # Before it told of anything it has done little but read its checkpoint.
        advice = f"; if checkpoint {self._job.checkpoint} is damaged, {_ANOTHER}" if not self._has_met else ""
        return StorageFailed(f"the Spark job failed: {said[-1].splitlines()[0][:300]}{advice}{self._where()}")

    def _where(self) -> str:
        return f"; all it said is in {self._said}" if self._said else ""

    # --- one batch --------------------------------------------------------------------------------------------------

    def _store_batch(self, frames: "DataFrame", _batch: int) -> None:
        try:
            draining = self._draining
            if draining is not None and draining.is_done:
                raise _Drained  # Spark has noted this batch, and will hand it over again next time
            batch = batch_of(frames)
            for partition, records in batch.parts.items():
                self._patiently(partial(self._store, partition, records))
            if draining is not None:
                draining.note(batch.complete)
        except Exception as error:
            # Spark shows it as a text; whoever started the job wants to know what it was.
            self._failure = error
            raise

    def _store(self, partition: str, records: Sequence[Passed]) -> None:
        held = self._writer.claim(partition)
        after = records[0].after
        # What begins at the partition's first record leaves nothing out, and so does what reaches over our position.
        if after not in (None, held.position) and held.position not in {one.position for one in records}:
            raise self._does_not_meet(partition, after, held.position)
        read = [Record(one.position, one.time_s, one.raw) for one in records]
        self._writer.write(partition, read, read[-1].position)

    def _patiently(self, call: Callable[[], T]) -> T:
        """The call's result, tried again while the store is full, away or another's; until told to stop."""
        has_waited = False
        while True:
            try:
                result = call()
            except (StorageFull, Unreachable, ClaimLost) as error:
                self.stats.trouble = str(error)
                if self._stop.is_set() or self._ends.is_set():
                    raise
                _log.warning("store_waits", error=str(error), next="it is tried again; nothing acknowledged is lost")
                self._stop.wait(_TROUBLE_S)
                has_waited = True
                continue
            if has_waited:
                self.stats.trouble = ""
            return result


def _spark_gone() -> tuple[type[Exception], ...]:
    """What a call into a JVM that died raises."""
    from py4j.protocol import Py4JError

    return (Py4JError, ConnectionError)
