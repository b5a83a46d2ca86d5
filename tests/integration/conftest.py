"""Real servers for the tests of this folder: each starts with the first test that needs it.

Servers are stopped at the end. Tests of a server that cannot run here are skipped with the reason.
Another server can be used instead:

    UNDERSTUDY_TEST_CASSANDRA=host:port   UNDERSTUDY_TEST_CASSANDRA_CREDENTIALS=file
    (also _KAFKA, _KINESIS, _S3)
"""

import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Event
from typing import NoReturn

import pytest

from tests.integration.keyspaces import Keyspace
from tests.integration.spark import Job
from understudy.backends.data import DataFolder
from understudy.core.errors import ConfigError
from understudy.dev.servers import Server, read_credentials, start, unavailable_reason
from understudy.ingest.spark import Spark, open_spark, require_spark

HERE = Path(__file__).parent


class External:
    """A server that is not ours; tests that would kill it are skipped."""

    pid = 0
    is_alive = True

    def __init__(self, name: str, address: str, file: Path) -> None:
        self.name = name
        self.credentials_file = file
        has_scheme = "://" in address
        self.address = address.partition("://")[2].rstrip("/") if has_scheme else address
        self.url = address.rstrip("/") if has_scheme else f"http://{address}"
        self.credentials: Mapping[str, str] = read_credentials(file)

    def kill(self) -> NoReturn:
        pytest.skip(f"{self.name} at {self.address} is somebody else's: tests may not kill it")

    restart = stop = kill


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("backends")


def serve(name: str, factory: pytest.TempPathFactory) -> Iterator[Server | External]:
    variable = f"UNDERSTUDY_TEST_{'KINESIS' if name == 'kinesalite' else name.upper()}"
    if address := os.environ.get(variable):
        file = os.environ.get(f"{variable}_CREDENTIALS")
        if not file:
            pytest.fail(
                f"{variable} is set; name the file with its credentials in {variable}_CREDENTIALS"
            )
        yield External(name, address, Path(file))
        return
    if reason := unavailable_reason(name):
        pytest.skip(reason)
    folder = factory.mktemp(name)
    with start(name, folder) as server:
        yield server
    shutil.rmtree(
        folder / "data", ignore_errors=True
    )  # pytest keeps the rest for a while: log, settings


@pytest.fixture(scope="session")
def cassandra_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server | External]:
    yield from serve("cassandra", tmp_path_factory)


@pytest.fixture(scope="session")
def kafka_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server | External]:
    yield from serve("kafka", tmp_path_factory)


@pytest.fixture(scope="session")
def kinesis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server | External]:
    """The one that reshards as Kinesis does."""
    yield from serve("kinesis", tmp_path_factory)


@pytest.fixture(scope="session")
def kinesalite_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server | External]:
    """The quick one."""
    yield from serve("kinesalite", tmp_path_factory)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server | External]:
    yield from serve("s3", tmp_path_factory)


@pytest.fixture
def bucket(s3_server: Server | External, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a folder in a new bucket; the keys are where AWS tools look for them."""
    boto3 = pytest.importorskip("boto3")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(s3_server.credentials_file))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    name = f"models-{uuid.uuid4().hex[:12]}"
    region = s3_server.credentials["region"]
    boto3.client("s3", endpoint_url=s3_server.url, region_name=region).create_bucket(Bucket=name)
    return f"s3://{name}/deployment?endpoint={s3_server.url}&region={region}"


@pytest.fixture(scope="session")
def quick_keyspace(cassandra_server: Server | External) -> Iterator[Keyspace]:
    """One for all files that say `IS_QUICK`: what they write need not outlive the server."""
    # another's server may be shared by several
    name = f"quick_{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"
    keyspace = Keyspace(cassandra_server, cassandra_server.credentials_file, name, is_durable=False)
    yield keyspace
    keyspace.close()


@pytest.fixture(scope="module")
def module_keyspace(
    cassandra_server: Server | External, request: pytest.FixtureRequest
) -> Iterator[Keyspace]:
    """One for all tests of a file, since making tables is slow; as a test before left it."""
    if getattr(request.module, "IS_QUICK", False):
        yield request.getfixturevalue("quick_keyspace")
        return
    name = request.module.__name__.rpartition("test_")[2]
    keyspace = Keyspace(cassandra_server, cassandra_server.credentials_file, name)
    yield keyspace
    keyspace.close()


@pytest.fixture
def keyspace(module_keyspace: Keyspace) -> Keyspace:
    """The same, emptied."""
    module_keyspace.empty()
    return module_keyspace


@pytest.fixture(scope="session")
def with_spark() -> None:
    """Skips where there is no PySpark or no Java."""
    try:
        require_spark()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def spark(with_spark: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spark]:
    """One for all tests, since it takes long to start; tasks are tried twice."""
    with open_spark(tmp_path_factory.mktemp("spark"), Event(), master="local[2,2]") as spark:
        yield spark


@pytest.fixture
def job(spark: Spark, keyspace: Keyspace, tmp_path: Path) -> Iterator[Job]:
    """From a stream in its own folder to the emptied keyspace."""
    job = Job(spark, keyspace, DataFolder(tmp_path / "D"))
    yield job
    job.store.close()
