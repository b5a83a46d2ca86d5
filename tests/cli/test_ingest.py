"""understudy ingest: its flags work wherever the stream and the models are."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from tests.models.small_s3 import SmallS3, small_s3
from understudy.backends.data import DataFolder
from understudy.cli.root import run
from understudy.core.errors import ConfigError
from understudy.experience.intake import deployment_key
from understudy.models.cloud import CloudObjects
from understudy.models.registry import Registry
from understudy.stores.local import LocalStore
from understudy.streams.file import FileStream
from understudy.testing.clock import ManualClock
from understudy.testing.samples import cart_spec, random_session, stamped

SPEC = cart_spec()


@pytest.fixture
def data(tmp_path: Path) -> DataFolder:
    """A folder whose stream contains three chunks that were received long ago."""
    data = DataFolder(tmp_path)
    deployment_key(data.root)  # whoever records creates it first
    clock = ManualClock()
    stream = FileStream(data.stream, clock=clock)
    stream.append(
        list(
            stamped(
                random_session(SPEC, np.random.default_rng(2), n_chunks=3), received_s=clock.now()
            )
        )
    )
    stream.close()
    return data


@pytest.fixture(params=["models in the folder", "models elsewhere"])
def registered(request: pytest.FixtureRequest, data: DataFolder, monkeypatch: pytest.MonkeyPatch):
    with small_s3(monkeypatch) as server:
        _register(server, data, monkeypatch, is_elsewhere=request.param == "models elsewhere")
        yield


def _register(
    server: SmallS3, data: DataFolder, monkeypatch: pytest.MonkeyPatch, *, is_elsewhere: bool
) -> None:
    if is_elsewhere:
        monkeypatch.setenv("UNDERSTUDY_MODELS_URL", server.url)
        Registry(CloudObjects(server.url), trusted={}).register(SPEC)
    else:
        folder = data.games / SPEC.game
        folder.mkdir(parents=True)
        (folder / f"{SPEC.schema}.json").write_bytes(SPEC.to_json())


def _ingested(data: DataFolder, *flags: str) -> tuple[int, int]:
    """Chunks that are stored, and bytes left in the stream."""
    assert run(["ingest", "--data", str(data.root), "--until-empty", "--json", *flags]) == 0
    with LocalStore(data.store) as store:
        chunks = store.audit().chunks
    left = sum(path.stat().st_size for path in data.stream.rglob("*") if path.is_file())
    return chunks, left


def test_a_folder_that_does_not_exist_is_rejected_and_not_created(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for flags in (["--until-empty"], []):
        assert run(["ingest", "--data", str(tmp_path / "typo"), *flags]) == 2
        said = capsys.readouterr().err
        assert "typo does not exist, so it has no stream to store; pass the folder" in said
    assert not (tmp_path / "typo").exists()


def test_a_folder_that_is_not_a_data_folder_is_rejected_and_not_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "thesis.tex").touch()
    assert run(["ingest", "--data", str(tmp_path), "--until-empty"]) == 2
    said = capsys.readouterr().err
    assert "is not a data folder: it holds other files (thesis.tex); pass the folder" in said
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]

    def fails(*_: object) -> NoReturn:
        raise ConfigError("no network in tests")

    monkeypatch.setattr("understudy.cli.ingest.open_ingest", fails)
    before = signal.getsignal(signal.SIGINT)
    assert run(["ingest", "--data", str(tmp_path / "new"), "--stream", "kinesis://games"]) == 2
    assert capsys.readouterr().out == f"created {tmp_path / 'new'}\n"
    assert signal.getsignal(signal.SIGINT) is before, "for whoever called `run`"


@pytest.mark.usefixtures("registered")
def test_steps_are_kept_for_the_requested_days(data: DataFolder):
    assert _ingested(data)[0] == 3
    assert _ingested(data, "--keep-days", "100000")[0] == 3
    assert _ingested(data, "--keep-days", "90")[0] == 0


@pytest.mark.usefixtures("registered")
def test_the_stream_keeps_stored_frames_for_the_requested_time(data: DataFolder):
    kept = _ingested(data, "--retention", "4000000000")[1]
    assert kept > 300
    assert _ingested(data, "--retention", "0")[1] < kept


HANGS = """
import sys, time
from understudy.cli.root import run
from understudy.ingest.service import IngestService

def drain(self, **_):
    print("draining", flush=True)
    time.sleep(600)

IngestService.drain = drain
run(["ingest", "--data", sys.argv[1]])
"""


def test_a_second_interrupt_exits_immediately_while_draining(tmp_path: Path):
    with subprocess.Popen(
        [sys.executable, "-c", HANGS, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        assert command.stdout is not None
        assert command.stdout.readline().startswith("following ")
        command.send_signal(signal.SIGINT)
        assert command.stdout.readline() == "draining\n"
        command.send_signal(signal.SIGINT)
        _, errors = command.communicate(timeout=60.0)
    assert command.returncode == 130
    assert (
        errors
        == "interrupted; steps that are not stored yet stay in the stream until the next start\n"
    )
