"""A real S3 is killed when ingest first sees a game: nothing is quarantined, nothing is lost."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.integration.spark import Job, append, following, some_frames, wait_until
from understudy.backends.data import DataFolder
from understudy.backends.specs import RegistrySpecs
from understudy.core.errors import Unreachable
from understudy.experience.game import GameSpec
from understudy.ingest.service import IngestService
from understudy.models.cloud import CloudObjects
from understudy.models.registry import Registry
from understudy.platform.ingest import repeat
from understudy.ports import Audit
from understudy.stores.local import LocalStore
from understudy.streams.file import FileStream
from understudy.testing.store_harness import SPEC


class Watched(RegistrySpecs):
    """Tells when the registry did not answer."""

    def __init__(self, registry: Registry) -> None:
        super().__init__(registry)
        self.refusals = 0

    def spec(self, game: str, schema: str) -> GameSpec | None:
        try:
            return super().spec(game, schema)
        except Unreachable:
            self.refusals += 1
            raise


class Deployed:
    """A folder whose stream holds frames of a game, and whose models lie on the S3 server."""

    def __init__(self, url: str, folder: Path) -> None:
        self.data = DataFolder(folder)
        self.registry = Registry(CloudObjects(url), trusted={})
        self.specs = Watched(self.registry)
        self.stream = FileStream(self.data.stream)
        self.store = LocalStore(folder / "there")
        append(self.stream, some_frames(np.random.default_rng(6)))

    def carry(self, server, run: Callable[[threading.Event], None]) -> Audit:
        """What ingest stores when the server is down at first and then restarts."""
        self.registry.register(SPEC)
        server.kill()
        stop = threading.Event()
        thread = threading.Thread(target=run, args=(stop,))
        thread.start()
        try:
            wait_until(lambda: self.specs.refusals >= 2)
            away = self.store.audit()
            assert (away.chunks, away.quarantined, away.parked) == (0, 0, 0)
            server.restart()
            wait_until(lambda: self.store.audit().chunks >= 20)
        finally:
            stop.set()
            thread.join(60.0)
        assert not thread.is_alive()
        return self.store.audit()


@pytest.fixture
def deployed(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployed]:
    monkeypatch.setattr("understudy.models.cloud._RETRY_S", 0.5)
    deployed = Deployed(bucket, tmp_path)
    with closing(deployed.stream), closing(deployed.store):
        yield deployed


def assert_all_is_there(audit: Audit) -> None:
    assert (
        audit.chunks,
        audit.quarantined,
        audit.parked,
        audit.gap_chunks,
        audit.duplicate_chunks,
    ) == (20, 0, 0, 0, 0)


def test_our_own_ingest_waits_for_an_unreachable_registry(deployed: Deployed, s3_server):
    service = IngestService(deployed.stream, deployed.store, deployed.specs, owner="test")
    assert_all_is_there(deployed.carry(s3_server, lambda stop: repeat(service.step, stop)))


def test_a_spark_job_waits_for_an_unreachable_registry(job: Job, bucket: str, s3_server):
    """Tasks ask the registry themselves: nothing of it is in the driver."""
    registry = Registry(CloudObjects(bucket), trusted={})
    registry.register(SPEC)
    stream = FileStream(job.data.stream)
    append(stream, some_frames(np.random.default_rng(6)))
    # Workers were started before this test set its environment: keys reach them by a file.
    models = f"{bucket}&credentials={s3_server.credentials_file}"
    places = {"data": str(job.data.root), "stream": "", "store": job.keyspace.url, "models": models}
    ingest = job.ingest(
        stream, opener="understudy.platform.ingest:open_in_task", address=json.dumps(places)
    )
    s3_server.kill()
    with following(ingest, ends_in_s=60.0):
        wait_until(lambda: bool(ingest.stats.error))
        away = job.store.audit()
        assert (away.chunks, away.quarantined, away.parked) == (0, 0, 0)
        s3_server.restart()
        wait_until(lambda: job.store.audit().chunks >= 20)
    stream.close()
    assert_all_is_there(job.store.audit())
