"""Commands on a data folder with a local store and a remote registry of games and models."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.platform.test_backup import play
from understudy.backends.data import DataFolder
from understudy.backends.deployment import open_deployment
from understudy.cli.root import run as run_command
from understudy.experience.game import spec_from_json
from understudy.platform.config import read_last_start
from understudy.platform.ingest import IngestRole
from understudy.stores.view import StoreView


@pytest.fixture
def data(tmp_path: Path) -> DataFolder:
    """40 steps in the stream, of a game that only the registry knows."""
    data = DataFolder(tmp_path / "D")
    url = f"file://{tmp_path / 'elsewhere'}"
    play(data.root)
    registry = open_deployment(data, models=url).registry
    for path in data.games.glob("*/*.json"):
        registry.register(spec_from_json(path.read_bytes()))
    shutil.rmtree(data.root / "models")
    (data.root / "understudy.toml").write_text(f'[models]\nurl = "{url}"\n')
    return data


def play_more(data: DataFolder) -> None:
    """Record 40 more steps, of a game whose spec is not in the folder."""
    play(data.root)
    shutil.rmtree(data.root / "models")


def said(
    capsys: pytest.CaptureFixture[str], *words: str, data: DataFolder, code: int = 0
) -> dict[str, Any]:
    capsys.readouterr()
    assert run_command([*words, "--data", str(data.root), "--json"]) == code
    fields: dict[str, Any] = json.loads(capsys.readouterr().out)
    return fields


def test_verify_stores_the_steps_in_the_stream(
    data: DataFolder, capsys: pytest.CaptureFixture[str]
):
    found = said(capsys, "data", "verify", data=data, code=2)
    assert (found["steps"], found["quarantined_chunks"], found["parked_chunks"]) == (40, 0, 0)


def test_a_player_is_forgotten(data: DataFolder, capsys: pytest.CaptureFixture[str]):
    found = said(capsys, "data", "forget", "ada", data=data)
    assert (found["games"], found["chunks"] > 0) == (["pong"], True)
    assert said(capsys, "data", "stats", data=data)["steps"] == 0


def test_steps_are_exported(data: DataFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    said(capsys, "data", "verify", data=data, code=2)
    out = str(tmp_path / "steps.parquet")
    assert said(capsys, "data", "export", out, "--format", "parquet", data=data)["steps"] == 40


def test_frames_rejected_without_the_registry_are_replayed(
    data: DataFolder, capsys: pytest.CaptureFixture[str]
):
    with IngestRole(data) as role:  # by itself it looks for games in the data folder
        role.service.drain()
    assert said(capsys, "data", "stats", data=data)["steps"] == 0
    replayed = said(capsys, "data", "quarantine", "replay", data=data)
    assert (replayed["still_refused"], replayed["stored"] > 0) == (0, True)
    assert said(capsys, "data", "stats", data=data)["steps"] == 40


def test_a_backup_contains_the_registered_spec(
    data: DataFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    backup = tmp_path / "B"
    said(capsys, "data", "verify", data=data, code=2)
    play_more(data)
    assert said(capsys, "backup", str(backup), data=data)["steps"] == 80
    with StoreView(backup / "store") as view:
        assert len(view.specs()) == 1


def test_a_restored_deployment_uses_its_old_stream_and_store_and_the_restored_models(
    data: DataFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (data.root / "understudy.toml").unlink()
    places = {
        "stream.url": "kinesis://steps",
        "store.url": "",
        "models.url": f"file://{tmp_path / 'elsewhere'}",
    }
    before = {**places, "ingest.engine": "native"}
    (data.root / "backends.json").write_text(json.dumps(before))
    shutil.rmtree(data.root / "stream")
    said(capsys, "backup", str(tmp_path / "B"), data=data)
    restored = DataFolder(tmp_path / "E")
    said(capsys, "restore", str(tmp_path / "B"), "--keys", "keep", data=restored)
    assert read_last_start(restored.root) == {**before, "models.url": ""}
    assert restored.game_names() == ["pong"]


def test_restore_reports_other_models_in_the_restored_config(
    data: DataFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    said(capsys, "backup", str(tmp_path / "B"), data=data)
    restore = ["restore", str(tmp_path / "B"), "--keys", "keep"]
    assert run_command([*restore, "--data", str(tmp_path / "E")]) == 0
    assert (
        f"names other models (file://{tmp_path / 'elsewhere'}), which 'understudy up' will use"
        in capsys.readouterr().out
    )


def test_commands_that_need_no_stream_work_while_it_is_unreachable(
    data: DataFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    said(capsys, "data", "verify", data=data, code=2)
    with (data.root / "understudy.toml").open("a") as file:
        file.write('[stream]\nurl = "kafka://127.0.0.1:9/steps"\n')
    assert said(capsys, "data", "quarantine", "replay", data=data)["tried"] == 0
    assert said(capsys, "backup", str(tmp_path / "B"), data=data)["steps"] == 40
    assert said(capsys, "data", "forget", "ada", data=data)["chunks"] > 0
