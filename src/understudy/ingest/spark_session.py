"""A Spark session of our own: quiet, on loopback while its master is this machine, and gone when we are."""

import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from understudy.core.errors import ConfigError, MissingExtra, StorageFailed, Unreachable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = structlog.get_logger("understudy.ingest")
_LOG4J = """rootLogger.level = warn
rootLogger.appenderRef.err.ref = err
appender.err.type = Console
appender.err.name = err
appender.err.target = SYSTEM_ERR
appender.err.layout.type = PatternLayout
appender.err.layout.pattern = %d{yyyy-MM-dd HH:mm:ss} %p %c{1}: %m%n%ex
"""
_LOCAL_JVM = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""Nearly all work is done in Python: a small and quickly started JVM serves best."""
_STOP_S = 5.0
"""How long a JVM may take to end by itself."""
_LOOK_S, _SAY_S, _CONNECT_S = 0.1, 15.0, 10.0
_PYSPARK, _JAVA, _JAVA_S = 4, 17, 60.0
_MASTER = re.compile(r"local(\[(0*[1-9]\d*|\*)(, *0*[1-9]\d*)?\])?|local-cluster\[.+\]|spark://.+|k8s://.+|yarn")
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')


@dataclass(frozen=True, slots=True)
class Spark:
    """A session that runs."""

    session: "SparkSession"
    log: Path | None
    """Where Spark writes what it has to say; None where somebody else started it."""

    @property
    def ui(self) -> str | None:
        """Where people can watch it."""
        url: str | None = self.session.sparkContext.uiWebUrl
        return url

    @property
    def master(self) -> str:
        """Where its workers are."""
        master: str = self.session.sparkContext.master
        return master


def is_local(master: str) -> bool:
    """Whether a master means this machine."""
    return master.startswith("local")


def check_master(master: str) -> None:
    """ConfigError for what no Spark takes, before anything is started."""
    if not _MASTER.fullmatch(master):
        raise ConfigError(f"master is {master!r}, which Spark does not know; give local[2] or spark://HOST:7077")


def _find_master(master: str) -> None:
    """Unreachable when no master listens where one should; Spark itself would try for a minute, and not say why."""
    troubles = []
    for place in master.removeprefix("spark://").split(",") if master.startswith("spark://") else ():
        host, _, port = place.rpartition(":")
        if not (host and port.isdecimal()):
            raise ConfigError(f"master is {master!r}; give HOST:PORT, such as spark://{place or 'HOST'}:7077")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
            return
        except OSError as error:
            troubles.append(f"{place}: {error}")
    if troubles:
        raise Unreachable(f"no Spark master listens at {'; '.join(troubles)}; check the address, or start one")


def require_spark() -> None:
    """MissingExtra or ConfigError with what to install, where Spark cannot run."""
    try:
        import pyarrow  # noqa: F401
        import pyspark
        import pyspark.sql
    except ImportError as error:
        raise MissingExtra(
            f"ingest with Spark needs the package {error.name}; pip install 'understudy[spark]'"
        ) from error
    if int(pyspark.__version__.partition(".")[0]) < _PYSPARK:
        raise MissingExtra(
            f"ingest with Spark needs PySpark {_PYSPARK}, and this is {pyspark.__version__}; "
            "pip install 'understudy[spark]', or submit to a newer Spark"
        )
    _require_java()


def _require_java() -> None:
    """ConfigError unless the Java that Spark is going to call can run it: that of JAVA_HOME before all others."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which(str(Path(home) / "bin" / "java") if home else "java")
    if java is None:
        where = f"there is none in JAVA_HOME, which is {home}" if home else "there is none"
        raise ConfigError(f"ingest with Spark needs Java, and {where}; install Java {_JAVA} or newer, or set JAVA_HOME")
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=_JAVA_S).stderr
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        trouble = (
            f"it does not say its version in {_JAVA_S:g} s" if isinstance(error, subprocess.TimeoutExpired) else error
        )
        raise ConfigError(
            f"ingest with Spark needs Java, and {java} cannot be run: {trouble}; install Java {_JAVA} or newer, and "
            "set JAVA_HOME to it"
        ) from None
    found = _VERSION.search(said)
    if found is not None and int(found[1]) < _JAVA:
        raise ConfigError(
            f"ingest with Spark needs Java {_JAVA} or newer, and {java} is {found[1]}; "
            f"install Java {_JAVA}, and set JAVA_HOME to it"
        )


@contextlib.contextmanager
def open_spark(
    folder: Path, *, master: str, stop: threading.Event | None = None, name: str = "understudy ingest"
) -> Iterator[Spark]:
    """A session under a master, its log in `folder`, or the one that spark-submit made; closed at the end.

    Unreachable when `stop` is set before it runs.
    """
    require_spark()
    stop = stop or threading.Event()
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        with _submitted(name) as session:
            yield Spark(session, None)
        return
    _find_master(master)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "spark.log"
    with log.open("wb") as file, _gateway(folder, file, master=master, name=name) as (gateway, conf):
        wait = f"Spark has not started under master {master} yet; all it said is in {log}"
        with while_waiting(stop, gateway.proc.kill, wait=wait), _keeping_interrupts():
            session = _session(gateway, conf, log, master=master)
        yield Spark(session, log)


@contextlib.contextmanager
def _submitted(name: str) -> Iterator["SparkSession"]:
    """The session that spark-submit made, whose JVM started us."""
    from pyspark.sql import SparkSession

    _silence_py4j()
    with _keeping_interrupts():
        session = SparkSession.builder.appName(name).getOrCreate()
        session.sparkContext._accumulatorServer.handle_error = lambda *_: None
    try:
        yield session
    finally:
        with contextlib.suppress(Exception):  # asked to stop, it may have gone before us
            session.stop()


@contextlib.contextmanager
def while_waiting(stop: threading.Event, end: Callable[[], object], *, wait: str) -> Iterator[None]:
    """While a call into Spark is under way: `end` it when told to stop, and say what it waits for when it takes long.

    Unreachable instead of whatever the call raises when it was ended.
    """
    over = threading.Event()

    def watch() -> None:
        waited_s = 0.0
        while not over.wait(_LOOK_S):
            if stop.is_set():
                with contextlib.suppress(Exception):
                    end()
                return
            waited_s += _LOOK_S
            if waited_s >= _SAY_S:
                waited_s = 0.0
                _log.warning("spark_waits", error=wait, next="it goes on by itself; Ctrl-C ends it")

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    except Exception:
        if stop.is_set():
            raise Unreachable("Spark was asked to stop before it ran") from None
        raise
    finally:
        over.set()
        watcher.join()


@contextlib.contextmanager
def _keeping_interrupts() -> Iterator[None]:
    """A new session takes Ctrl-C for itself; whoever opens one has an answer of their own to that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _gateway(folder: Path, log: Any, *, master: str, name: str) -> Iterator[tuple[Any, Any]]:
    """A JVM that writes into the log; it also ends when this process does, since it reads our pipe."""
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkException
    from pyspark.java_gateway import launch_gateway

    _set_environment(local=is_local(master))
    shutil.rmtree(_scratch(folder), ignore_errors=True)
    settings = _settings(folder, local=is_local(master))
    conf = SparkConf(loadDefaults=False).setAll([("spark.master", master), ("spark.app.name", name), *settings.items()])
    try:
        with _taking_signals():
            gateway = launch_gateway(conf, {"stdout": log, "stderr": log, "start_new_session": True})
    except PySparkException:
        said = last_words(Path(log.name))
        # What it complains of is a setting; a JVM that was killed says nothing, and may do better next time.
        kind = ConfigError if "rror" in said or "xception" in said else StorageFailed
        raise kind(f"Spark did not start under master {master!r}: {said}; all it said is in {log.name}") from None
    try:
        yield gateway, conf
    finally:
        late = threading.Timer(_STOP_S, gateway.proc.kill)
        late.start()
        # A JVM that died already can be asked nothing.
        with contextlib.suppress(Exception):
            if SparkContext._active_spark_context is not None:
                SparkContext._active_spark_context.stop()
            gateway.shutdown()
        with contextlib.suppress(Exception):
            gateway.proc.stdin.close()
            gateway.proc.wait(_STOP_S)
        late.cancel()
        gateway.proc.kill()
        gateway.proc.wait()
        shutil.rmtree(_scratch(folder), ignore_errors=True)
        # Another session in this process starts a JVM of its own.
        SparkContext._gateway = SparkContext._jvm = None


@contextlib.contextmanager
def _taking_signals() -> Iterator[None]:
    """Roles block being asked to stop, and what they start inherits it; Spark ends its own workers that way.

    What comes then is heard by nobody all the same, since a JVM whose start was cut off would stay; and so it is from
    then on, since threads that are started meanwhile never block anything.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    for one in blocked:
        signal.signal(one, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _session(gateway: Any, conf: Any, log: Path, *, master: str) -> "SparkSession":
    from py4j.protocol import Py4JError
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    try:
        context = SparkContext(conf=conf, gateway=gateway)
        # It prints a trace when the JVM is gone, which is told by us.
        context._accumulatorServer.handle_error = lambda *_: None
        return SparkSession(context)
    except (Py4JError, OSError) as error:
        said = str(getattr(error, "java_exception", "") or error).splitlines()[0]
        if "stopped SparkContext" in said:
            said = last_words(log)  # it gave up before
        raise StorageFailed(f"Spark did not start under master {master!r}: {said}; all it said is in {log}") from None


def _silence_py4j() -> None:
    """It logs the trace of whatever a batch raises, which is told by us, and of a JVM that died, which is as well."""
    logging.getLogger("py4j").setLevel(logging.CRITICAL + 1)
    logging.getLogger().addFilter(_is_not_of_py4j)


def _set_environment(*, local: bool) -> None:
    _silence_py4j()
    # Workers that run in another Python cannot connect back.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    """Some of it goes by the root logger."""
    return "py4j" not in Path(record.pathname).parts


def _scratch(folder: Path) -> Path:
    """Where a JVM keeps what it needs for a while; one that was killed leaves it lying."""
    return folder.absolute() / "scratch"


def _settings(folder: Path, *, local: bool) -> dict[str, str]:
    settings = folder / "log4j2.properties"
    settings.write_text(_LOG4J)
    _scratch(folder).mkdir()
    java = f'-Dlog4j2.configurationFile={settings.as_uri()} -Djava.io.tmpdir="{_scratch(folder)}"'
    return {
        "spark.driver.extraJavaOptions": f"{java} {_LOCAL_JVM}" if local else java,
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.ui.showConsoleProgress": "false",
        **({"spark.driver.host": "127.0.0.1"} if local else {}),
    }


def last_words(log: Path) -> str:
    """The line of a log that says most about why it ended."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line and not line.startswith("at ")]
    errors = [line for line in lines if "rror" in line or "ERROR" in line or "xception" in line]
    return (errors or lines or ["it said nothing"])[-1][:300]
