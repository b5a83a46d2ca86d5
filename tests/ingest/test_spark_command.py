"""What is said about Spark before any of it is started."""

import contextlib
import json
import re
import sys
from pathlib import Path
from threading import Event
from types import ModuleType
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.streams.memory import MemoryStream
from understudy.backends.data import DataFolder
from understudy.cli.root import run
from understudy.core.errors import ConfigError, MissingExtra, Unreachable
from understudy.ingest.spark import (
    Spark,
    SparkJob,
    SparkTasks,
    _last_words,
    check_master,
    require_spark,
)
from understudy.models.objects import open_objects
from understudy.models.registry import Registry
from understudy.platform.config import (
    Config,
    IngestSection,
    ModelsSection,
    StoreSection,
    StreamSection,
)
from understudy.platform.ingest import IngestRole, open_in_task, open_ingest
from understudy.stores.local import LocalStore
from understudy.testing.desk import SPEC

STORE = "cassandra://nowhere:9042/play"


@pytest.fixture
def with_pyspark(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the packages were there, whether they are or not."""
    monkeypatch.setitem(sys.modules, "pyspark", ModuleType("pyspark"))
    monkeypatch.setattr(sys.modules["pyspark"], "__version__", "4.1.0", raising=False)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--engine", "spark"],
            "this store is in the data folder, which our own service alone writes; give --store",
        ),
        (
            ["--master", "local[2]"],
            "--master needs the Spark engine, but ingest.engine is native; omit it, or give",
        ),
        (["--store", STORE, "--keep-days", "3"], "--keep-days applies to a store in the data"),
        (["--stream", "ftp://x"], "stream.url begins with ftp://"),
        (
            ["--stream", "kafka://nowhere:1/t", "--retention", "9"],
            "--retention applies to a stream in the data folder only",
        ),
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
    with pytest.raises(
        ConfigError, match="a Spark job stores where it can be reached over the network"
    ):
        open_ingest(DataFolder(tmp_path), Config(ingest=IngestSection(engine="spark")))


def test_a_missing_package_is_told_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(
        MissingExtra, match=r"needs the package pyspark; pip install 'understudy\[spark\]'"
    ):
        require_spark()


@pytest.mark.usefixtures("with_pyspark")
def test_a_pyspark_that_is_too_old_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules["pyspark"], "__version__", "3.5.1")
    with pytest.raises(
        MissingExtra,
        match=r"needs PySpark 4, and this is 3\.5\.1; pip install 'understudy\[spark\]'",
    ):
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
    with pytest.raises(
        ConfigError,
        match="needs Java, and there is none; install Java 17 or newer, or set JAVA_HOME",
    ):
        require_spark()
    java(tmp_path / "17", "17.0.15")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "17"))
    require_spark()
    # Spark asks no other one then.
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "gone"))
    monkeypatch.setenv("PATH", str(tmp_path / "17" / "bin"))
    with pytest.raises(ConfigError, match=f"there is none in JAVA_HOME, which is {tmp_path}/gone"):
        require_spark()


@pytest.fixture
def with_java(with_pyspark: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java(tmp_path / "java", "17")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "java"))


@pytest.mark.usefixtures("with_pyspark")
@pytest.mark.parametrize(
    ("version", "is_enough"), [("1.8.0_392", False), ("11.0.2", False), ("17", True), ("25", True)]
)
def test_java_that_is_too_old_is_told(
    version: str, is_enough: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    java(tmp_path, version)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    if is_enough:
        require_spark()
        return
    with pytest.raises(
        ConfigError,
        match=r"needs Java 17 or newer, and .*bin/java is (8|11); install Java 17 or newer, and "
        r"set",
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
    monkeypatch.setattr("understudy.ingest.spark._JAVA_S", 0.2)
    with pytest.raises(
        ConfigError, match=rf"bin/java cannot be run: .*{said}.*; install Java 17 or newer, and"
    ) as told:
        require_spark()
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    "master", ["here", "", "mesos://host", "spark:/host", "local[x]", "local[0]", "local[2,0]"]
)
def test_a_master_that_no_spark_takes_is_told_before_anything_is_started(master: str):
    with pytest.raises(
        ConfigError, match=r"which Spark does not know; give local\[2\] or spark://HOST:7077"
    ):
        check_master(master)
    for known in (
        "local",
        "local[2]",
        "local[*,3]",
        "spark://a:7077,b:7077",
        "yarn",
        "k8s://https://host:443",
    ):
        check_master(known)


def test_workers_open_what_the_driver_named_and_need_no_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    there = LocalStore(tmp_path / "there")
    monkeypatch.setattr("understudy.platform.ingest.open_store", lambda url, *, specs: there)
    places = {
        "data": str(tmp_path / "nowhere"),
        "stream": "",
        "store": STORE,
        "models": f"file://{tmp_path}/models",
    }
    Registry(open_objects(tmp_path / "models"), trusted={}).register(SPEC)
    stream, store, specs = open_in_task(json.dumps(places))
    assert (stream.partitions(), store) == ([], there)
    assert specs.spec(SPEC.game, SPEC.schema) == SPEC
    assert not (tmp_path / "nowhere").exists()
    there.close()


def test_a_batch_of_nothing_is_no_job():
    with pytest.raises(ConfigError, match="max_batch_bytes is 0; give a number above 0"):
        SparkJob(opener="a:b", address="", owner="o", max_batch_bytes=0)


def test_what_only_this_machine_has_is_refused_for_workers_elsewhere(
    tmp_path: Path, with_java: None
):
    data = DataFolder(tmp_path)
    for stream, models, said in (
        ("", "", "the stream is in the data folder (stream.url)"),
        ("kafka://nowhere:1/t", "", "games are registered in the data folder (models.url)"),
    ):
        config = Config(
            data=str(tmp_path),
            ingest=IngestSection(engine="spark", master="spark://nowhere:7077"),
            stream=StreamSection(url=stream),
            store=StoreSection(url=STORE),
            models=ModelsSection(url=models),
        )
        with pytest.raises(ConfigError, match=re.escape(said)):
            open_ingest(data, config)


JOB = SparkJob(opener="a:b", address="", owner="o")


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_spark_that_has_ended_is_an_error_unless_a_stop_was_asked_for(
    is_asked: bool, tmp_path: Path
):
    pytest.importorskip("pyspark", reason="pip install 'understudy[spark]'")

    class Gone:
        master = uiWebUrl = "local[2]"  # noqa: N815

        def statusTracker(self) -> None:  # noqa: N802
            raise ConnectionRefusedError

        def parallelize(self, *_: Any) -> None:
            raise ConnectionRefusedError

    context: Any = Gone()
    tasks = SparkTasks(JOB, lambda _: contextlib.nullcontext(Spark(context)))
    stream = MemoryStream()
    stop = Event()
    with (
        IngestRole(
            DataFolder(tmp_path),
            open_stream=lambda: stream,
            open_store=lambda: LocalStore(tmp_path / "x"),
            spark=tasks,
        ) as role,
        capture_logs() as logs,
    ):
        if is_asked:
            stop.set()
            role.run(stop)
        else:
            with pytest.raises(
                Unreachable, match=r"Spark has ended \(ConnectionRefusedError\); start it again"
            ):
                role.run(stop)
    assert [one["event"] for one in logs] == ["not_drained"] * is_asked


def test_the_line_of_a_log_that_tells_why_is_found(tmp_path: Path):
    log = tmp_path / "spark.log"
    said = (
        "WARNING: x\nSparkException: no master 'here'\n\tat "
        "org.apache.Submit.error(Submit.scala:1)\nRun with --help\n"
    )
    log.write_text(said)
    assert _last_words(log) == "SparkException: no master 'here'"
    log.write_text("")
    assert _last_words(log) == "it said nothing"
