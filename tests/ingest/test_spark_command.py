"""What is said about Spark before any of it is started."""

import contextlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from tests.ingest.specs import KnownSpecs
from tests.streams.memory import MemoryStream
from understudy.backends.data import DataFolder
from understudy.cli.root import run
from understudy.core.errors import ConfigError, MissingExtra, Unreachable
from understudy.experience.game import GameSpec
from understudy.ingest import spark
from understudy.ingest.service import IngestService, Turn
from understudy.ingest.spark import (
    Opened,
    Report,
    Spark,
    SparkJob,
    SparkTasks,
    TaskCrashed,
    _reason_in,
    check_master,
    require_spark,
    take_turn,
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
from understudy.ports import CRASHED_INGEST
from understudy.stores.local import LocalStore
from understudy.testing.clock import ManualClock
from understudy.testing.faults import Crash
from understudy.testing.samples import cart_spec, random_session, stamped
from understudy.testing.store_harness import SPEC

STORE = "cassandra://nowhere:9042/play"


@pytest.fixture
def with_pyspark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends that the packages are installed."""
    monkeypatch.setitem(sys.modules, "pyspark", ModuleType("pyspark"))
    monkeypatch.setattr(sys.modules["pyspark"], "__version__", "4.1.0", raising=False)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--engine", "spark"],
            "this store is in the data folder, which only the native engine writes; pass --store",
        ),
        (
            ["--master", "local[2]"],
            "--master needs the Spark engine, but ingest.engine is native; omit it, or give",
        ),
        (["--store", STORE, "--keep-days", "3"], "set ttl_s in the store's URL"),
        (["--stream", "ftp://x"], "stream.url starts with ftp://"),
        (
            ["--stream", "kafka://nowhere:1/t", "--retention", "9"],
            "--retention applies to a stream in the data folder only",
        ),
        (["--retention", "-1"], "ingest.retention_s is -1"),
        (["--keep-days", "-1"], "ingest.keep_days is -1"),
    ],
)
def test_an_invalid_command_is_rejected_in_one_line(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(["ingest", "--data", str(tmp_path), *flags]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert len(told.strip().splitlines()) == 1


def test_a_role_with_a_local_store_is_rejected(tmp_path: Path):
    with pytest.raises(
        ConfigError, match="a Spark job needs a store that it can reach over the network"
    ):
        open_ingest(DataFolder(tmp_path), Config(ingest=IngestSection(engine="spark")))


def test_a_missing_package_is_reported_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(
        MissingExtra, match=r"needs the package pyspark; pip install 'understudy\[spark\]'"
    ):
        require_spark()


@pytest.mark.usefixtures("with_pyspark")
def test_an_old_pyspark_is_rejected(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules["pyspark"], "__version__", "3.5.1")
    with pytest.raises(
        MissingExtra,
        match=r"needs PySpark 4, but this is 3\.5\.1; pip install 'understudy\[spark\]'",
    ):
        require_spark()


def script(home: Path, text: str) -> None:
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").write_text(text)
    (home / "bin" / "java").chmod(0o755)


def java(home: Path, version: str) -> None:
    """A Java that prints its version on standard error, as every one does."""
    script(home, f"#!/bin/sh\necho 'openjdk version \"{version}\" 2020-01-01' >&2\n")


@pytest.mark.usefixtures("with_pyspark")
def test_a_missing_java_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(
        ConfigError,
        match="needs Java, but none is installed; install Java 17 or newer, or set JAVA_HOME",
    ):
        require_spark()
    java(tmp_path / "17", "17.0.15")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "17"))
    require_spark()
    # Spark asks no other one then.
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "gone"))
    monkeypatch.setenv("PATH", str(tmp_path / "17" / "bin"))
    with pytest.raises(ConfigError, match=f"JAVA_HOME, which is {tmp_path}/gone, has none"):
        require_spark()


@pytest.fixture
def with_java(with_pyspark: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java(tmp_path / "java", "17")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "java"))


@pytest.mark.usefixtures("with_pyspark")
@pytest.mark.parametrize(
    ("version", "is_enough"), [("1.8.0_392", False), ("11.0.2", False), ("17", True), ("25", True)]
)
def test_an_old_java_is_rejected(
    version: str, is_enough: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    java(tmp_path, version)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    if is_enough:
        require_spark()
        return
    with pytest.raises(
        ConfigError,
        match=r"needs Java 17 or newer, but .*bin/java is (8|11); install Java 17 or newer, and "
        r"set",
    ):
        require_spark()


@pytest.mark.usefixtures("with_pyspark")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("#!/nowhere/at/all\n", "No such file"),
        ("\x7fELF of another machine", "Exec format error"),
        ("#!/bin/sh\nexec sleep 60\n", "`java -version` timed out after 0.2 s"),
    ],
)
def test_a_java_that_cannot_be_run_is_reported_in_one_line(
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
def test_an_invalid_master_is_rejected_before_spark_starts(master: str):
    with pytest.raises(
        ConfigError, match=r"which Spark does not support; use local\[2\] or spark://HOST:7077"
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


def test_workers_open_the_addresses_of_the_driver_and_need_no_keys(
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


def test_an_empty_batch_runs_no_job():
    with pytest.raises(ConfigError, match="max_batch_bytes is 0; use a number above 0"):
        SparkJob(opener="a:b", address="", owner="o", max_batch_bytes=0)


def test_local_data_is_rejected_for_workers_on_other_machines(tmp_path: Path, with_java: None):
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
def test_an_exited_spark_is_an_error_except_during_a_stop(is_asked: bool, tmp_path: Path):
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
                Unreachable, match=r"Spark has exited \(ConnectionRefusedError\); run `understudy i"
            ):
                role.run(stop)
    assert [one["event"] for one in logs] == ["not_drained"] * is_asked


def test_the_line_of_a_log_that_explains_the_exit_is_found(tmp_path: Path):
    log = tmp_path / "spark.log"
    said = (
        "WARNING: x\nSparkException: no master 'here'\n\tat "
        "org.apache.Submit.error(Submit.scala:1)\nRun with --help\n"
    )
    log.write_text(said)
    assert _reason_in(log) == "SparkException: no master 'here'"
    log.write_text("")
    assert _reason_in(log) == "its log is empty"


class DeadlySpecs(KnownSpecs):
    """Kills the worker that checks a frame of the game "poison"."""

    def spec(self, game: str, schema: str) -> GameSpec | None:
        if game == "poison":
            raise Crash
        return super().spec(game, schema)


class DyingTasks(SparkTasks):
    """Runs tasks here, each job in a worker of its own that may die."""

    def _run_job(self, turns: Sequence[Turn]) -> list[Report]:
        spark._connections.clear()
        try:
            return [take_turn(self._job, turn) for turn in turns]
        except Crash:
            raise TaskCrashed("a worker died") from None


opened: list[Opened] = []


def open_in_worker(address: str) -> Opened:
    return opened[-1]


def test_a_frame_that_kills_every_worker_is_isolated_and_quarantined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyspark = ModuleType("pyspark")
    pyspark.TaskContext = SimpleNamespace(get=lambda: None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyspark", pyspark)
    clock = ManualClock()
    rng = np.random.default_rng(1)
    stream = MemoryStream(3, clock=clock)
    games = [cart_spec()] * 40 + [cart_spec("poison")] + [cart_spec()] * 40
    for spec in games:
        stream.append(list(stamped(random_session(spec, rng, n_chunks=1))))
    with LocalStore(tmp_path, clock=clock) as store:
        specs = DeadlySpecs(cart_spec())
        opened.append((stream, store, specs))
        job = SparkJob(opener=f"{__name__}:open_in_worker", address="", owner="test")
        tasks = DyingTasks(job, lambda stop: contextlib.nullcontext())  # type: ignore[arg-type,return-value]
        service = IngestService(stream, store, specs, owner="test", clock=clock, spread=tasks)
        crashes = 0
        moved = 1
        while moved:
            try:
                moved = service.step()
            except TaskCrashed:
                crashes += 1
        assert crashes == 6, "batches of all, 256, 16 and 1 records, then that record twice more"
        assert store.audit().chunks == 80
        assert [entry.reason for entry in store.quarantined()] == [CRASHED_INGEST]
        stream.append(list(stamped(random_session(cart_spec(), rng, n_chunks=3))))
        assert service.step() == 3, "the partition is stored at full speed again"
    spark._connections.clear()
