"""Ingest in Spark's tasks: the driver says which partitions may advance; tasks claim, read, check
and write them.

A batch is a plain Spark job with one task for each partition. A task builds stream and store from a
text, once in each worker process, and reports a few numbers: no byte of a frame comes to the
driver. The store holds all positions, so there is no checkpoint: whatever dies, the next batch
begins where the store stands. A task that Spark tries again claims its partition anew, which fences
an attempt that still runs somewhere.
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
from understudy.core.settings import load
from understudy.ingest.service import IngestConfig, IngestProgress, PartitionIngest, Turn
from understudy.ports import ExperienceStore, Specs, Stream

if TYPE_CHECKING:
    from pyspark import SparkContext

_log = structlog.get_logger("understudy.ingest")
_clock = SystemClock()
_LOCAL_JVM = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""Nearly all work is done in Python: a small and quickly started JVM serves best."""
_STOP_S = 5.0
"""How long a JVM may take to end, and a job to find a worker once a stop was asked for."""
_WAIT_S = 60.0
"""How long Spark may be silent before the log tells what it waits for."""
_LOOK_S = 0.1
_IDLE_S = 0.05
_JAVA = 17
_JAVA_S = 60.0
_JAVA_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_MASTER = re.compile(
    r"local(\[(0*[1-9]\d*|\*)(, *0*[1-9]\d*)?\])?|local-cluster\[.+\]|spark://.+|k8s://.+|yarn"
)
_RAISED = re.compile(r"^\s*(?:\w+\.)*(\w+(?:Error|Exception): .+)$", re.MULTILINE)

Opened = tuple[Stream, ExperienceStore, Specs]
Report = tuple[IngestProgress, Exception | None]
"""What a task did, and what ended it before its time."""


class SparkEnded(Unreachable):
    """Spark is gone; another process has to start it again."""

    retry_helps = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkJob:
    """What a task needs, as plain data; credentials are in files that the address names, or in
    the environment."""

    opener: str
    """Import path of a function that opens stream, store and specs in a worker's process."""
    address: str
    """What the opener is called with."""
    owner: str
    """The owner of every claim, whichever task makes it: the latest claim of a partition is the
    valid one."""
    config: IngestConfig = field(default_factory=IngestConfig)
    max_batch_bytes: int = 16 * 1024 * 1024
    """How much of one partition a batch covers at most."""

    def __post_init__(self) -> None:
        if (most := self.max_batch_bytes) < 1:
            raise ConfigError(f"max_batch_bytes is {most}; give a number above 0, such as 16777216")


@dataclass(frozen=True, slots=True)
class Spark:
    """A Spark that runs."""

    context: "SparkContext"
    log: Path | None = None
    """Where it writes what it has to say; None where somebody else started it."""


_kept: dict[SparkJob, tuple[Opened, PartitionIngest]] = {}
"""The connections of this process, kept from task to task."""


def _partitions_of(job: SparkJob) -> PartitionIngest:
    if job not in _kept:
        while _kept:
            stream, store, _ = _kept.popitem()[1][0]
            stream.close()
            store.close()
        opened: Opened = load(job.opener, what="opener")(job.address)
        ingest = PartitionIngest(*opened, owner=job.owner, config=job.config, clock=_clock)
        _kept[job] = opened, ingest
    return _kept[job][1]


def take_turn(job: SparkJob, turn: Turn) -> Report:
    """Advance one partition by at most a batch.

    Spark tries a task again that raises: only a bug does, or a process that dies.
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
            turn = replace(turn, claim=progress.claim)
            is_over = not progress.records or progress.ended or progress.is_past
            is_over |= total.size_bytes >= job.max_batch_bytes
    except (ConfigError, StorageFull, StorageFailed) as error:
        return replace(total, is_past=False), error
    return total, None


class SparkTasks:
    """Takes the turns of an ingest service as tasks of a Spark job, while it is `running`."""

    def __init__(
        self, job: SparkJob, open_spark: Callable[[Event], AbstractContextManager[Spark]]
    ) -> None:
        """`open_spark`: a Spark for as long as the tasks run, given what ends its start."""
        self._job = job
        self._open_spark = open_spark
        self._spark: Spark | None = None
        self._stop = Event()
        self._batches = 0
        self.figures: dict[str, float | str | None] = {}
        """Where people can watch Spark, and the last batch in which anything came; for reports."""

    @property
    def is_running(self) -> bool:
        return self._spark is not None

    @contextlib.contextmanager
    def running(self, stop: Event) -> Iterator[None]:
        """A Spark that takes turns; Unreachable when `stop` is set before it has started."""
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
        """A batch: one task for each turn. Errors of tasks are raised when all the others have
        been told of."""
        assigned = list(turns)
        assert self._spark is not None, "turns are taken while it is running"
        began_s = _clock.monotonic()
        reports: list[Report] = []
        if assigned:
            with _explained(self._spark):
                tasks = self._spark.context.parallelize(assigned, len(assigned))
                reports = tasks.map(functools.partial(take_turn, self._job)).collect()
        rows = sum(progress.records for progress, _ in reports)
        if rows:
            self._batches += 1
            took_s = _clock.monotonic() - began_s
            self.figures |= {"batch": self._batches, "batch_rows": rows, "batch_s": took_s}
        yield from (progress for progress, _ in reports)
        errors = [error for _, error in reports if error is not None]
        for error in sorted(errors, key=lambda one: isinstance(one, StorageFull | Unreachable)):
            raise error
        if not rows:
            self._stop.wait(_IDLE_S)

    def _watch(self, context: "SparkContext", over: Event) -> None:
        """Tell when no worker takes a job, and end it when a stop was asked for: Spark waits
        without a word."""
        waited_s = 0.0
        with contextlib.suppress(Exception):  # of a JVM that is gone, of which the job tells
            tracker = context.statusTracker()
            while not over.wait(1.0):
                jobs = [tracker.getJobInfo(job) for job in tracker.getActiveJobsIds()]
                ids = [stage for job in jobs if job is not None for stage in job.stageIds]
                stages = [stage for one in ids if (stage := tracker.getStageInfo(one)) is not None]
                is_idle = stages and not any(stage.numActiveTasks for stage in stages)
                waited_s = waited_s + 1.0 if is_idle else 0.0
                if self._stop.is_set() and waited_s >= _STOP_S:
                    context.cancelAllJobs()
                elif waited_s and waited_s % _WAIT_S == 0:
                    _tell_wait(
                        f"no worker of {context.master} takes this job; is there a free core?"
                    )


def _tell_wait(wait: str) -> None:
    _log.warning("spark_waits", error=wait, next="it goes on by itself; Ctrl-C ends it")


@contextlib.contextmanager
def _explained(spark: Spark) -> Iterator[None]:
    """What a job raises, as one of our errors."""
    from py4j.protocol import Py4JError, Py4JJavaError

    where = f"; all it said is in {spark.log}" if spark.log else ""
    try:
        yield
    except Py4JJavaError as error:
        text = str(error.java_exception)
        said = (_RAISED.findall(text) or text.strip().splitlines() or ["no reason"])[-1][:300]
        if "ModuleNotFoundError" in text or "ImportError" in text:
            raise ConfigError(
                f"a worker of {spark.context.master} cannot take a task: {said}; install "
                "understudy and what the "
                "addresses need in the Python that PYSPARK_PYTHON names, the same on every worker"
            ) from None
        if "SparkContext was shut down" in text or "stopped SparkContext" in text:
            raise SparkEnded(f"Spark was stopped{where}; start it again") from None
        if "Traceback (most recent call last)" in text:
            raise StorageFailed(f"a Spark task failed: {said}{where}") from None
        raise Unreachable(f"a Spark job failed: {said}{where}") from None
    except (Py4JError, OSError) as error:
        raise SparkEnded(
            f"Spark has ended ({type(error).__name__}){where}; start it again"
        ) from None


@contextlib.contextmanager
def open_spark(folder: Path, stop: Event, *, master: str, only_here: str = "") -> Iterator[Spark]:
    """A Spark under a master, or the one of spark-submit; at the end no JVM and no worker of it is
    left.

    `folder`: where its log goes; `only_here`: what of the job lies in a folder that only this
    machine has.
    """
    from pyspark import SparkConf

    is_submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    conf = SparkConf(loadDefaults=False).setAppName("understudy ingest")
    log = folder / "spark.log"
    folder.mkdir(parents=True, exist_ok=True)
    if not is_submitted:
        _find_master(master)
        conf.setMaster(master).setAll(_settings(folder.absolute(), master))
    # PySpark tells of whatever a job raises, and of a JVM that died; both are told by us.
    logging.getLogger("py4j").setLevel(logging.CRITICAL + 1)
    with log.open("w") as file, contextlib.redirect_stderr(file), contextlib.ExitStack() as opened:
        context = _start(conf, log, stop, opened=opened, master=master)
        if context.getConf().get("spark.speculation", "false") == "true":
            raise ConfigError(
                "spark.speculation is true: two attempts of a task would take the partition from "
                "each other for ever; "
                "set it to false"
            )
        check_master(context.master, only_here=only_here)
        yield Spark(context, None if is_submitted else log)


def _start(
    conf: Any, log: Path, stop: Event, *, opened: contextlib.ExitStack, master: str
) -> "SparkContext":
    """A context, made in a thread of its own: in the main one it would take Ctrl-C for itself."""
    from pyspark import SparkContext
    from pyspark.java_gateway import launch_gateway

    gateways: list[Any] = []
    contexts: list[SparkContext] = []

    def start() -> "SparkContext":
        with log.open("ab") as file:
            # What a terminal sends to us does not reach another session; the JVM ends when our pipe
            # does.
            settings = {"stdout": file, "stderr": file, "start_new_session": True}
            gateways.append(launch_gateway(conf, settings))
        opened.callback(_end, gateways[0], contexts)
        contexts.append(SparkContext(conf=conf, gateway=gateways[0]))
        return contexts[0]

    waited_s = 0.0
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(start)
        while not starting.done():
            wait([starting], timeout=_LOOK_S)
            waited_s += _LOOK_S
            if stop.is_set() and gateways and gateways[0].proc is not None:
                gateways[0].proc.kill()
            if waited_s >= _WAIT_S:
                waited_s = 0.0
                _tell_wait(
                    f"Spark has not started under master {master} yet; all it said is in {log}"
                )
    try:
        return starting.result()
    except Exception as error:
        if stop.is_set():
            raise Unreachable("Spark was asked to stop before it ran") from None
        said = _last_words(log)
        # A JVM that complains has read a setting; one that was killed may do better next time.
        is_setting = not gateways and ("rror" in said or "xception" in said)
        text = f"Spark did not start under master {master!r}: {said}; all it said is in {log}"
        raise (ConfigError if is_setting else StorageFailed)(text) from error


def _end(gateway: Any, contexts: "Sequence[SparkContext]") -> None:
    """Stop what runs, and end a JVM that we started; the one of spark-submit ends after us."""
    for context in [
        *contexts,
        *contexts,
    ]:  # where the JVM is gone, the second call ends what runs here
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
    """Quiet, on loopback while the master is this machine, with nothing left outside of the
    folder."""
    # Workers that run in another Python cannot connect back.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    scratch = folder / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)  # of a JVM that was killed
    scratch.mkdir()
    java = f'-Djava.io.tmpdir="{scratch}"'
    settings = [("spark.ui.showConsoleProgress", "false")]
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        settings.append(("spark.driver.host", "127.0.0.1"))
        java = f"{java} {_LOCAL_JVM}"
    return [*settings, ("spark.driver.extraJavaOptions", java)]


def check_master(master: str, *, only_here: str = "") -> None:
    """ConfigError for what no Spark takes, and for workers that cannot reach what is
    `only_here`."""
    if not _MASTER.fullmatch(master):
        raise ConfigError(
            f"master is {master!r}, which Spark does not know; give local[2] or spark://HOST:7077"
        )
    if only_here and not master.startswith("local"):
        raise ConfigError(
            f"{only_here}, which workers of {master} have not; or give --master local[2]"
        )


def _find_master(master: str) -> None:
    """Unreachable when no master listens where one should; Spark would try for a minute, and not
    say why."""
    if not master.startswith("spark://"):
        return
    troubles = []
    for place in master.removeprefix("spark://").split(","):
        host, _, port = place.rpartition(":")
        if not (host and port.isdecimal()):
            raise ConfigError(
                f"master is {master!r}; give HOST:PORT, such as spark://{place or 'HOST'}:7077"
            )
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10.0).close()
            return
        except OSError as error:
            troubles.append(f"{place}: {error}")
    raise Unreachable(
        f"no Spark master listens at {'; '.join(troubles)}; check the address, or start one"
    )


def require_spark() -> None:
    """MissingExtra or ConfigError with what to install, where Spark cannot run."""
    needs = "ingest with Spark needs"
    try:
        import pyspark
    except ImportError as error:
        raise MissingExtra(
            f"{needs} the package {error.name}; pip install 'understudy[spark]'"
        ) from error
    if int(pyspark.__version__.partition(".")[0]) < 4:
        raise MissingExtra(
            f"{needs} PySpark 4, and this is {pyspark.__version__}; pip install "
            "'understudy[spark]', or "
            "submit to a newer Spark"
        )
    home = os.environ.get("JAVA_HOME")
    java = shutil.which(str(Path(home) / "bin" / "java") if home else "java")
    newer = f"install Java {_JAVA} or newer"
    if java is None:
        where = f"there is none in JAVA_HOME, which is {home}" if home else "there is none"
        raise ConfigError(f"{needs} Java, and {where}; {newer}, or set JAVA_HOME")
    try:
        said = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=_JAVA_S
        ).stderr
    except subprocess.TimeoutExpired:
        said = f"it does not say its version in {_JAVA_S:g} s"
    except (OSError, ValueError) as error:
        said = str(error)
    found = _JAVA_VERSION.search(said)
    if found is None:
        raise ConfigError(
            f"{needs} Java, and {java} cannot be run: {said.strip()[:300]}; {newer}, and set "
            "JAVA_HOME to it"
        )
    if int(found[1]) < _JAVA:
        raise ConfigError(
            f"{needs} Java {_JAVA} or newer, and {java} is {found[1]}; {newer}, and set JAVA_HOME "
            "to it"
        )


def _last_words(log: Path) -> str:
    """The line of a log that says most about why it ended."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line and not line.startswith("at ")]
    errors = [line for line in lines if "rror" in line or "ERROR" in line or "xception" in line]
    return (errors or lines or ["it said nothing"])[-1][:300]
