"""What is said about Spark before any of it is started."""

import sys
from pathlib import Path
from threading import Event
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
from structlog.testing import capture_logs

from understudy.app.config import Config, GatewaySection, IngestSection, StoreSection
from understudy.app.data import DataFolder
from understudy.app.roles.platform import Platform
from understudy.app.roles.spark_ingest import SparkIngestRole
from understudy.app.roles.spark_stream import name_of, open_from_text, text_of
from understudy.cli.root import run
from understudy.core.errors import ConfigError, MissingExtra, StorageFailed, Unreachable
from understudy.ingest.spark import SparkIngest, SparkJob
from understudy.ingest.spark_session import check_master, last_words, require_spark

STORE = "cassandra://nowhere:9042/play"


@pytest.fixture
def with_pyspark(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the packages were there, whether they are or not."""
    for name in ("pyarrow", "pyspark", "pyspark.sql"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["pyspark"], "__version__", "4.1.0", raising=False)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--engine", "spark"], "this store is in the data folder, which our own service alone writes; give --store"),
        (["--checkpoint", "C"], "--checkpoint is Spark's, and ingest.engine is native"),
        (["--master", "local[2]"], "--master is Spark's, and ingest.engine is native; leave it out, or give --engine"),
        (["--engine", "spark", "--store", STORE, "--checkpoint", ""], "--checkpoint is empty; give a folder"),
        (["--store", STORE, "--keep-days", "3"], "--keep-days is for a store in the data folder"),
        (["--stream", "ftp://x"], "stream.url begins with ftp://"),
        (["--stream", "kafka://nowhere:1/t", "--retention", "9"], "--retention is for a stream in the data folder"),
        (["--engine", "spark", "--store", STORE, "--retention", "9"], "--retention is for --engine native"),
        (["--retention", "-1"], "give a time from 0, such as 3600"),
        (["--keep-days", "0"], "give a time above 0"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(["ingest", "--data", str(tmp_path), *flags]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert len(told.strip().splitlines()) == 1


def test_a_role_with_a_local_store_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="a Spark job stores where it can be reached over the network"):
        SparkIngestRole(DataFolder(tmp_path), Config())


def test_a_missing_package_is_told_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"needs the package pyarrow; pip install 'understudy\[spark\]'"):
        require_spark()


@pytest.mark.usefixtures("with_pyspark")
def test_a_pyspark_that_is_too_old_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules["pyspark"], "__version__", "3.5.1")
    with pytest.raises(MissingExtra, match=r"needs PySpark 4, and this is 3\.5\.1; pip install 'understudy\[spark\]'"):
        require_spark()


def script(home: Path, text: str) -> None:
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").write_text(text)
    (home / "bin" / "java").chmod(0o755)


def java(home: Path, version: str) -> None:
    """A Java that says its version, as every one does: on standard error."""
    script(home, f"#!/bin/sh\necho 'openjdk version \"{version}\" 2020-01-01' >&2\n")


@pytest.mark.usefixtures("with_pyspark")
def test_missing_java_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(ConfigError, match="needs Java, and there is none; install Java 17 or newer, or set JAVA_HOME"):
        require_spark()
    java(tmp_path / "17", "17.0.15")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "17"))
    require_spark()
    # Spark asks no other one then.
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "gone"))
    monkeypatch.setenv("PATH", str(tmp_path / "17" / "bin"))
    with pytest.raises(ConfigError, match=f"there is none in JAVA_HOME, which is {tmp_path}/gone"):
        require_spark()


@pytest.mark.usefixtures("with_pyspark")
@pytest.mark.parametrize(
    ("version", "is_enough"), [("1.8.0_392", False), ("11.0.2", False), ("17", True), ("25", True)]
)
def test_java_that_is_too_old_is_told(version: str, is_enough: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    java(tmp_path, version)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    if is_enough:
        require_spark()
        return
    with pytest.raises(
        ConfigError, match=r"needs Java 17 or newer, and .*bin/java is (8|11); install Java 17, and set"
    ):
        require_spark()


@pytest.mark.usefixtures("with_pyspark")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("#!/nowhere/at/all\n", "No such file"),
        ("\x7fELF of another machine", "Exec format error"),
        ("#!/bin/sh\nexec sleep 60\n", "it does not say its version in 0.2 s"),
    ],
)
def test_java_that_cannot_be_run_is_told_in_one_line(
    text: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    script(tmp_path, text)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setattr("understudy.ingest.spark_session._JAVA_S", 0.2)
    with pytest.raises(
        ConfigError, match=rf"bin/java cannot be run: .*{said}.*; install Java 17 or newer, and"
    ) as told:
        require_spark()
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("master", ["here", "", "mesos://host", "spark:/host", "local[x]", "local[0]", "local[2,0]"])
def test_a_master_that_no_spark_takes_is_told_before_anything_is_started(master: str):
    with pytest.raises(ConfigError, match=r"which Spark does not know; give local\[2\] or spark://HOST:7077"):
        check_master(master)
    for known in ("local", "local[2]", "local[*,3]", "spark://a:7077,b:7077", "yarn", "k8s://https://host:443"):
        check_master(known)


@pytest.mark.parametrize(("engine", "module"), [("spark", "spark_process"), ("native", "ingest_process")])
def test_the_platform_starts_the_engine_that_the_config_names(engine: Any, module: str, tmp_path: Path):
    config = Config(
        data=str(tmp_path), roles=("ingest",), gateway=GatewaySection(port=0),
        ingest=IngestSection(engine=engine), store=StoreSection(url=STORE),
    )  # fmt: skip
    with Platform(config, tell=lambda *_: None) as platform:
        command = platform.supervisor.standings["ingest"].role.command({})
    assert f"understudy.app.roles.{module}" in command


def test_workers_open_the_stream_that_the_driver_named(tmp_path: Path):
    data = DataFolder(tmp_path)
    assert open_from_text(text_of("", data)).partitions() == []
    assert name_of("", data) == f"file:{tmp_path}/stream"
    with_options = "kafka://b:9092,a:9092/topic?credentials=/secret/file"
    assert name_of(with_options, data) == name_of("kafka://a:9092,b:9092/topic", data) == "kafka://a:9092,b:9092/topic"


def test_a_batch_of_nothing_is_no_job():
    with pytest.raises(ConfigError, match="max_batch_bytes is 0; give a number above 0"):
        SparkJob(opener="a:b", address="", stream="s", checkpoint="c", max_batch_bytes=0)


def test_a_checkpoint_that_another_job_uses_is_told():
    job = SparkJob(opener="a:b", address="", stream="s", checkpoint="C")
    ingest = SparkIngest(Mock(), Mock(), Mock(), job=job)
    told = ingest._trouble(RuntimeError("[CONCURRENT_STREAM_LOG_UPDATE] Concurrent update to the log. Multiple jobs"))
    assert isinstance(told, ConfigError)
    assert str(told) == "another job uses checkpoint C; give another --checkpoint, or end it"


def test_time_that_is_up_when_all_is_done_says_nothing():
    ingest = SparkIngest(Mock(), Mock(), Mock(), job=SparkJob(opener="a:b", address="", stream="s", checkpoint="C"))
    with capture_logs() as logs:
        ingest._give_up()
    assert logs == []


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_spark_that_has_ended_is_an_error_unless_somebody_asked_to_stop(is_asked: bool):
    pytest.importorskip("pyspark", reason="pip install 'understudy[spark]'")
    job, stop = SparkJob(opener="a:b", address="", stream="s", checkpoint="C"), Event()
    ingest = SparkIngest(Mock(side_effect=ConnectionRefusedError), Mock(), Mock(), job=job)
    with capture_logs() as logs:
        if is_asked:
            stop.set()
            ingest.run(stop)
        else:
            with pytest.raises(Unreachable, match=r"Spark has ended \(ConnectionRefusedError\); start it again"):
                ingest.run(stop)
    assert [one["event"] for one in logs] == ["not_drained"] * is_asked


def test_a_job_that_failed_because_spark_was_stopped_may_be_started_again():
    ingest = SparkIngest(Mock(), Mock(), Mock(), job=SparkJob(opener="a:b", address="", stream="s", checkpoint="C"))
    ingest._spark, is_stopped = Mock(), Mock(return_value=True)
    ingest._spark.session.sparkContext._jsc.sc().isStopped = is_stopped
    told = ingest._trouble(RuntimeError("the scheduler is null"))
    assert (type(told), str(told)) == (Unreachable, "Spark was stopped; start it again")
    is_stopped.return_value = False
    assert type(ingest._trouble(RuntimeError("the scheduler is null"))) is StorageFailed


def test_the_line_of_a_log_that_tells_why_is_found(tmp_path: Path):
    log = tmp_path / "spark.log"
    said = (
        "WARNING: x\nSparkException: no master 'here'\n\tat org.apache.Submit.error(Submit.scala:1)\nRun with --help\n"
    )
    log.write_text(said)
    assert last_words(log) == "SparkException: no master 'here'"
    log.write_text("")
    assert last_words(log) == "it said nothing"
