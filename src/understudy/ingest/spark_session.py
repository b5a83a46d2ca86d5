"""A Spark session of our own: quiet, on loopback while its master is this machine, and gone when we are."""

import contextlib
import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.core.errors import ConfigError, MissingExtra, StorageFailed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
_STOP_S = 20.0


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


def require_spark() -> None:
    """MissingExtra or ConfigError with what to install, where Spark cannot run."""
    try:
        import pyarrow  # noqa: F401
        import pyspark.sql  # noqa: F401
    except ImportError as error:
        raise MissingExtra(
            f"ingest with Spark needs the package {error.name}; pip install 'understudy[spark]'"
        ) from error
    java_home = os.environ.get("JAVA_HOME")
    if not shutil.which("java") and not (java_home and (Path(java_home) / "bin" / "java").exists()):
        raise ConfigError("ingest with Spark needs Java, and there is none; install Java 17 or newer, or set JAVA_HOME")


@contextlib.contextmanager
def open_spark(folder: Path, *, master: str, name: str = "understudy ingest") -> Iterator[Spark]:
    """A session under a master, its log in `folder`, or the one that spark-submit made; closed at the end."""
    require_spark()
    from pyspark.sql import SparkSession

    if "PYSPARK_GATEWAY_PORT" in os.environ:
        session = SparkSession.builder.appName(name).getOrCreate()
        try:
            yield Spark(session, None)
        finally:
            session.stop()
        return
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "spark.log"
    with log.open("wb") as file, _gateway(folder, file, master=master, name=name) as (gateway, conf):
        yield Spark(_session(gateway, conf, log), log)


@contextlib.contextmanager
def _gateway(folder: Path, log: Any, *, master: str, name: str) -> Iterator[tuple[Any, Any]]:
    """A JVM that writes into the log; it also ends when this process does, since it reads our pipe."""
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkException
    from pyspark.java_gateway import launch_gateway

    _set_environment(is_local=master.startswith("local"))
    settings = _settings(folder, is_local=master.startswith("local"))
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
        # A JVM that died already can be asked nothing.
        with contextlib.suppress(Exception):
            if SparkContext._active_spark_context is not None:
                SparkContext._active_spark_context.stop()
            gateway.shutdown()
        with contextlib.suppress(Exception):
            gateway.proc.stdin.close()
            gateway.proc.wait(_STOP_S)
        gateway.proc.kill()
        gateway.proc.wait()
        # Another session in this process starts a JVM of its own.
        SparkContext._gateway = SparkContext._jvm = None


@contextlib.contextmanager
def _taking_signals() -> Iterator[None]:
    """Roles ignore being asked to stop, and what they start inherits it; Spark ends its own workers that way."""
    before = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _session(gateway: Any, conf: Any, log: Path) -> "SparkSession":
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
        raise StorageFailed(f"Spark did not start: {said}; all it said is in {log}") from None


def _set_environment(*, is_local: bool) -> None:
    # It logs the trace of whatever a batch raises, which is told by us, and of a JVM that died, which is as well.
    logging.getLogger("py4j").setLevel(logging.CRITICAL + 1)
    logging.getLogger().addFilter(_is_not_of_py4j)
    # Workers that run in another Python cannot connect back.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if is_local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    """Some of it goes by the root logger."""
    return "py4j" not in Path(record.pathname).parts


def _settings(folder: Path, *, is_local: bool) -> dict[str, str]:
    settings = folder / "log4j2.properties"
    settings.write_text(_LOG4J)
    java = f"-Dlog4j2.configurationFile={settings.as_uri()}"
    return {
        "spark.driver.extraJavaOptions": f"{java} {_LOCAL_JVM}" if is_local else java,
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.ui.showConsoleProgress": "false",
        **({"spark.driver.host": "127.0.0.1"} if is_local else {}),
    }


def last_words(log: Path) -> str:
    """The line of a log that says most about why it ended."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line and not line.startswith("at ")]
    errors = [line for line in lines if "rror" in line or "xception" in line]
    return (errors or lines or ["it said nothing"])[-1][:300]
