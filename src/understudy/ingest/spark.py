"""Ingest with Spark: the driver selects partitions; tasks claim, read, check and write them.

A batch is a plain Spark job with one task per partition. Each worker process opens stream and store
once, from an address, and tasks report only statistics: no frame bytes reach the driver. The store
holds all positions, so there is no checkpoint: after any failure, the next batch starts at the
stored position. A retried task claims its partition again, which fences an attempt that may still
be running.
"""

import contextlib
import functools
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import structlog

from understudy.core.clock import SystemClock
from understudy.core.errors import (
    ConfigError,
    MissingExtra,
    StorageFailed,
    StorageFull,
    Unreachable,
)
from understudy.core.settings import load_object
from understudy.ingest.service import IngestConfig, IngestProgress, PartitionIngest, Turn
from understudy.ports import ExperienceStore, Specs, Stream

if TYPE_CHECKING:
    from pyspark import SparkContext

_log = structlog.get_logger("understudy.ingest")
_clock = SystemClock()
_LOCAL_JVM = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""Nearly all work is done in Python, so the JVM should be small and start quickly."""
_STOP_S = 5.0
"""How long a JVM may take to exit, and how long a job may wait for a worker during a stop."""
_WAIT_S = 60.0
"""How long Spark may wait before the log reports what it waits for."""
_START_POLL_S = 0.1
_IDLE_S = 0.05
_JAVA = 17
_JAVA_S = 60.0
_JAVA_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_MASTER = re.compile(
    r"local(\[(0*[1-9]\d*|\*)(, *0*[1-9]\d*)?\])?|local-cluster\[.+\]|spark://.+|k8s://.+|yarn"
)
_RAISED = re.compile(r"^\s*(?:\w+\.)*(\w+(?:Error|Exception): .+)$", re.MULTILINE)

_CRASHED = re.compile("Python worker exited unexpectedly|exited caused by one of the running tasks")

_NEXT = "run `understudy ingest` again (`understudy up` does it by itself)"

Opened = tuple[Stream, ExperienceStore, Specs]
Report = tuple[IngestProgress, Exception | None]
"""A task's progress, and the error that ended it early."""


class SparkEnded(Unreachable):
    """Spark has exited; a new process must start it again."""

    retry_helps = False


class TaskCrashed(Unreachable):
    """A process that runs tasks died; a frame or a lack of memory may be the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkJob:
    """What a task needs, as plain data; credentials stay in files or the environment."""

    opener: str
    """Import path of a function that opens stream, store and specs in a worker process."""
    address: str
    """The argument of the opener."""
    owner: str
    """The owner of every task's claims: the latest claim of a partition is the valid one."""
    config: IngestConfig = field(default_factory=IngestConfig)
    max_batch_bytes: int = 16 * 1024 * 1024
    """Most bytes of one partition in a batch."""

    def __post_init__(self) -> None:
        if (most := self.max_batch_bytes) < 1:
            raise ConfigError(f"max_batch_bytes is {most}; use a number above 0, such as 16777216")


@dataclass(frozen=True, slots=True)
class Spark:
    """A running Spark."""

    context: "SparkContext"
    log: Path | None = None
    """Spark's log file; None if spark-submit started Spark."""


_connections: dict[SparkJob, tuple[Opened, PartitionIngest]] = {}
"""The connections of this process, reused by all its tasks."""


def _partitions_of(job: SparkJob) -> PartitionIngest:
    if job not in _connections:
        while _connections:
            stream, store, _ = _connections.popitem()[1][0]
            stream.close()
            store.close()
        opened: Opened = load_object(job.opener, what="opener")(job.address)
        ingest = PartitionIngest(*opened, owner=job.owner, config=job.config, clock=_clock)
        _connections[job] = opened, ingest
    return _connections[job][1]


def take_turn(job: SparkJob, turn: Turn) -> Report:
    """Advance one partition by at most a batch.

    Expected errors are returned, not raised: Spark would retry the task.
    """
    from pyspark import TaskContext

    task = TaskContext.get()
    if task is not None and task.attemptNumber():
        turn = replace(turn, claim=None)
    total = IngestProgress(turn.partition, turn.claim)
    try:
        partitions = _partitions_of(job)
        is_over = False
        while not is_over:
            progress = partitions.advance(turn)
            total.add(progress)
            turn = replace(turn, claim=progress.claim, crashes=0)
            is_over = not progress.records or progress.ended or progress.is_drained
            is_over |= total.size_bytes >= job.max_batch_bytes
    except (ConfigError, StorageFull, StorageFailed) as error:
        return replace(total, is_drained=False), error
    return total, None


class SparkTasks:
    """Runs the turns of an ingest service as tasks of a Spark job, inside `running`."""

    def __init__(
        self, job: SparkJob, open_spark: Callable[[Event], AbstractContextManager[Spark]]
    ) -> None:
        """`open_spark` starts Spark for the duration of a `with`; its event cancels the start."""
        self._job = job
        self._open_spark = open_spark
        self._spark: Spark | None = None
        self._stop = Event()
        self._batches = 0
        self._crashes: Counter[str] = Counter()
        """How many jobs in a row crashed, by partition."""
        self.figures: dict[str, float | str | None] = {}
        """URL of the Spark UI and figures of the last batch with records, for reports."""

    @property
    def is_running(self) -> bool:
        return self._spark is not None

    @contextlib.contextmanager
    def running(self, stop: Event) -> Iterator[None]:
        """Run Spark during the `with`; Unreachable if `stop` is set before it has started."""
        self._stop = stop
        over = Event()
        with self._open_spark(stop) as self._spark:
            self.figures["spark_ui"] = self._spark.context.uiWebUrl
            watcher = Thread(target=self._watch, args=(self._spark.context, over), daemon=True)
            watcher.start()
            try:
                yield
            finally:
                self._spark = None
                over.set()
                watcher.join()

    def __call__(self, turns: Iterable[Turn]) -> Iterator[IngestProgress]:
        """Run a batch with one task per turn; yields all progress, then raises a task's error."""
        assigned = [replace(turn, crashes=self._crashes[turn.partition]) for turn in turns]
        self._crashes = Counter({turn.partition: turn.crashes for turn in assigned})
        began_s = _clock.monotonic()
        reports: list[Report] = []
        # After a crash, each partition has a job of its own, which shows which of them crashes.
        jobs = [[turn] for turn in assigned] if self._crashes.total() else [assigned]
        for job in filter(None, jobs):
            try:
                reports += self._run_job(job)
                self._crashes.subtract({turn.partition: turn.crashes for turn in job})
            except TaskCrashed as crash:
                self._crashes.update(turn.partition for turn in job)
                reports.append((IngestProgress(job[0].partition, job[0].claim), crash))
        rows = sum(progress.records for progress, _ in reports)
        if rows:
            self._batches += 1
            took_s = _clock.monotonic() - began_s
            self.figures |= {"batch": self._batches, "batch_rows": rows, "batch_s": took_s}
        yield from (progress for progress, _ in reports)
        errors = [error for _, error in reports if error is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, StorageFull | Unreachable)):
            raise error
        if not rows:
            self._stop.wait(_IDLE_S)

    def _run_job(self, turns: Sequence[Turn]) -> list[Report]:
        assert self._spark is not None, "turns run only inside `running`"
        with _explained(self._spark):
            tasks = self._spark.context.parallelize(turns, len(turns))
            reports: list[Report] = tasks.map(functools.partial(take_turn, self._job)).collect()
        return reports

    def _watch(self, context: "SparkContext", over: Event) -> None:
        """Warn when no worker accepts a job, and cancel it during a stop: Spark waits silently."""
        waited_s = 0.0
        with contextlib.suppress(Exception):  # the JVM has exited, which the job reports
            tracker = context.statusTracker()
            while not over.wait(1.0):
                jobs = [tracker.getJobInfo(job) for job in tracker.getActiveJobsIds()]
                ids = [stage for job in jobs if job is not None for stage in job.stageIds]
                stages = [
                    stage for number in ids if (stage := tracker.getStageInfo(number)) is not None
                ]
                is_idle = stages and not any(stage.numActiveTasks for stage in stages)
                waited_s = waited_s + 1.0 if is_idle else 0.0
                if self._stop.is_set() and waited_s >= _STOP_S:
                    context.cancelAllJobs()
                elif waited_s and waited_s % _WAIT_S == 0:
                    _warn_waiting(
                        f"no worker of {context.master} accepts this job; check "
                        "that one has a free core"
                    )


def _warn_waiting(wait: str) -> None:
    _log.warning("spark_waits", error=wait, next="it continues by itself; Ctrl-C stops it")


@contextlib.contextmanager
def _explained(spark: Spark) -> Iterator[None]:
    """Translate errors of a Spark job into understudy's errors."""
    from py4j.protocol import Py4JError, Py4JJavaError

    where = f"; its log is {spark.log}" if spark.log else ""
    try:
        yield
    except Py4JJavaError as error:
        text = str(error.java_exception)
        reason = failure_reason(text)
        if "ModuleNotFoundError" in text or "ImportError" in text:
            raise ConfigError(
                f"a worker of {spark.context.master} cannot run a task: {reason}; install "
                "understudy and the packages for its addresses in the Python of PYSPARK_PYTHON on "
                "every worker"
            ) from None
        if "SparkContext was shut down" in text or "stopped SparkContext" in text:
            raise SparkEnded(f"Spark was stopped; {_NEXT}{where}") from None
        if _CRASHED.search(text):
            raise TaskCrashed(
                f"a worker process of {spark.context.master} died: {reason}; retrying with "
                f"smaller batches, to isolate a frame that may cause it{where}"
            ) from None
        if "Traceback (most recent call last)" in text:
            raise StorageFailed(f"a Spark task failed: {reason}{where}") from None
        raise Unreachable(f"a Spark job failed: {reason}{where}") from None
    except (Py4JError, OSError) as error:
        raise SparkEnded(f"Spark has exited ({type(error).__name__}); {_NEXT}{where}") from None


def failure_reason(text: str) -> str:
    """The line of a failed job's error that best explains it."""
    return (_RAISED.findall(text) or text.strip().splitlines() or ["no reason"])[-1][:300]


@contextlib.contextmanager
def open_spark(
    folder: Path, stop: Event, *, master: str, only_here: str = "", app: str = "understudy ingest"
) -> Iterator[Spark]:
    """Start Spark under a master, or use that of spark-submit; leaves no JVM or worker behind.

    Its log is written to `folder`. `only_here` describes data of the job that exists only on this
    machine.
    """
    from pyspark import SparkConf

    is_submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    conf = SparkConf(loadDefaults=False).setAppName(app)
    log = folder / "spark.log"
    folder.mkdir(parents=True, exist_ok=True)
    if not is_submitted:
        _require_master(master)
        conf.setMaster(master).setAll(_settings(folder.absolute(), master))
    # PySpark logs errors of a job and the death of a JVM; we report both ourselves.
    logging.getLogger("py4j").setLevel(logging.CRITICAL + 1)
    with log.open("w") as file, contextlib.redirect_stderr(file), contextlib.ExitStack() as opened:
        context = _start(conf, log, stop, opened=opened, master=master)
        refuse_speculation(context)
        check_master(context.master, only_here=only_here)
        yield Spark(context, None if is_submitted else log)


def _start(
    conf: Any, log: Path, stop: Event, *, opened: contextlib.ExitStack, master: str
) -> "SparkContext":
    """Create a context in a separate thread: in the main one it would catch Ctrl-C itself."""
    from pyspark import SparkContext
    from pyspark.java_gateway import launch_gateway

    gateways: list[Any] = []
    contexts: list[SparkContext] = []

    def start() -> "SparkContext":
        with log.open("ab") as file:
            # Signals of the terminal do not reach another session; the JVM exits when our pipe
            # closes.
            settings = {"stdout": file, "stderr": file, "start_new_session": True}
            gateways.append(launch_gateway(conf, settings))
        opened.callback(_end, gateways[0], contexts)
        contexts.append(SparkContext(conf=conf, gateway=gateways[0]))
        return contexts[0]

    waited_s = 0.0
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(start)
        while not starting.done():
            wait([starting], timeout=_START_POLL_S)
            waited_s += _START_POLL_S
            if stop.is_set() and gateways and gateways[0].proc is not None:
                gateways[0].proc.kill()
            if waited_s >= _WAIT_S:
                waited_s = 0.0
                _warn_waiting(f"Spark has not started under master {master} yet; its log is {log}")
    try:
        return starting.result()
    except Exception as error:
        if stop.is_set():
            raise Unreachable("Spark was stopped before it had started") from None
        reason = _reason_in(log)
        # A JVM that logs an error has rejected a setting; one that was killed may start next time.
        is_setting = not gateways and ("rror" in reason or "xception" in reason)
        text = f"Spark did not start under master {master!r}: {reason}; see its log, {log}"
        raise (ConfigError if is_setting else StorageFailed)(text) from error


def _end(gateway: Any, contexts: "Sequence[SparkContext]") -> None:
    """Stop the context and a JVM that we started; that of spark-submit exits after us."""
    # Twice: if the JVM is gone, the second call stops what runs in this process.
    for context in [*contexts, *contexts]:
        with contextlib.suppress(Exception):
            context.stop()
    if gateway.proc is None:
        return
    with contextlib.suppress(Exception):
        gateway.shutdown()
    with contextlib.suppress(OSError):
        gateway.proc.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        gateway.proc.wait(_STOP_S)
    gateway.proc.kill()
    gateway.proc.wait()


def _settings(folder: Path, master: str) -> list[tuple[str, str]]:
    """Settings for quiet logs, loopback with a local master, and files only in the folder."""
    # Workers with another Python cannot connect back.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    scratch = folder / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)  # left by a JVM that was killed
    scratch.mkdir()
    java = f'-Djava.io.tmpdir="{scratch}"'
    settings = [("spark.ui.showConsoleProgress", "false")]
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        settings.append(("spark.driver.host", "127.0.0.1"))
        java = f"{java} {_LOCAL_JVM}"
    return [*settings, ("spark.driver.extraJavaOptions", java)]


def refuse_speculation(context: "SparkContext") -> None:
    """Raise ConfigError if Spark would run a second attempt of a task beside the first."""
    if context.getConf().get("spark.speculation", "false") == "true":
        raise ConfigError(
            "spark.speculation is true: two attempts of a task would hinder each other; set it to "
            "false"
        )


def check_master(master: str, *, only_here: str = "") -> None:
    """Raise ConfigError for an invalid master, or one whose workers cannot reach `only_here`."""
    if not _MASTER.fullmatch(master):
        raise ConfigError(
            f"master is {master!r}, which Spark does not support; use local[2] or spark://HOST:7077"
        )
    if only_here and not master.startswith("local"):
        raise ConfigError(
            f"{only_here}, which workers of {master} cannot reach; use a server for it, or "
            "--master local[2]"
        )


def _require_master(master: str) -> None:
    """Raise Unreachable if no master is listening; Spark would retry silently for a minute."""
    if not master.startswith("spark://"):
        return
    errors = []
    for place in master.removeprefix("spark://").split(","):
        host, _, port = place.rpartition(":")
        if not (host and port.isdecimal()):
            raise ConfigError(
                f"master is {master!r}; use HOST:PORT, such as spark://{place or 'HOST'}:7077"
            )
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10.0).close()
            return
        except OSError as error:
            errors.append(f"{place}: {error}")
    raise Unreachable(
        f"no Spark master is listening at {'; '.join(errors)}; check the address, or start one"
    )


def require_spark(what: str = "ingest with Spark") -> None:
    """Raise MissingExtra or ConfigError, with what to install, if Spark cannot run here."""
    needs = f"{what} needs"
    try:
        import pyspark
    except ImportError as error:
        raise MissingExtra(
            f"{needs} the package {error.name}; pip install 'understudy[spark]'"
        ) from error
    if int(pyspark.__version__.partition(".")[0]) < 4:
        raise MissingExtra(
            f"{needs} PySpark 4, but this is {pyspark.__version__}; pip install "
            "'understudy[spark]', or submit to a newer Spark"
        )
    home = os.environ.get("JAVA_HOME")
    java = shutil.which(str(Path(home) / "bin" / "java") if home else "java")
    newer = f"install Java {_JAVA} or newer"
    if java is None:
        where = f"JAVA_HOME, which is {home}, has none" if home else "none is installed"
        raise ConfigError(f"{needs} Java, but {where}; {newer}, or set JAVA_HOME")
    try:
        output = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=_JAVA_S
        ).stderr
    except subprocess.TimeoutExpired:
        output = f"`java -version` timed out after {_JAVA_S:g} s"
    except (OSError, ValueError) as error:
        output = str(error)
    version = _JAVA_VERSION.search(output)
    if version is None:
        raise ConfigError(
            f"{needs} Java, but {java} cannot be run: {output.strip()[:300]}; {newer}, and set "
            "JAVA_HOME to it"
        )
    if int(version[1]) < _JAVA:
        raise ConfigError(
            f"{needs} Java {_JAVA} or newer, but {java} is {version[1]}; {newer}, and set "
            "JAVA_HOME to it"
        )


def _reason_in(log: Path) -> str:
    """The line of Spark's log that best explains why it did not start."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line and not line.startswith("at ")]
    errors = [line for line in lines if "rror" in line or "ERROR" in line or "xception" in line]
    return (errors or lines or ["its log is empty"])[-1][:300]
