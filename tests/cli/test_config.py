"""The config from the command line."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from understudy.cli.root import run


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """The command line takes over SIGTERM; the tests' own process takes it back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_config_is_created_once_shown_with_origins_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    data = str(tmp_path / "D")
    assert run(["config", "init", "--data", data, "--json"]) == 0
    file = json.loads(capsys.readouterr().out)["file"]
    assert run(["config", "init", "--data", data]) == 2
    assert "--force" in capsys.readouterr().err
    assert run(["config", "init", "--data", data, "--force"]) == 0
    monkeypatch.setenv("UNDERSTUDY_GATEWAY_PORT", "0")
    Path(file).write_text('[models]\nurl = "https://me:secret@host/x"\n')
    capsys.readouterr()
    assert run(["config", "show", "--data", data, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)["values"]
    assert values["gateway.port"] == {"value": 0, "origin": "UNDERSTUDY_GATEWAY_PORT"}
    assert values["models.url"] == {"value": "https://***@host/x", "origin": file}
    assert values["data"]["origin"] == "flag --data"
    assert run(["config", "show", "--data", data]) == 0
    assert "secret" not in capsys.readouterr().out
    assert run(["config", "check", "--data", data, "--json"]) == 0
    fields = {"ok": True, "file": file, "set": 3, "warnings": []}
    assert json.loads(capsys.readouterr().out) == fields
    monkeypatch.setenv("UNDERSTUDY_GATEWAY_HOST", "0.0.0.0")
    assert run(["config", "check", "--data", data]) == 2
    assert "insecure" in capsys.readouterr().err


def test_config_init_needs_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert run(["config", "init"]) == 2
    assert "--config FILE" in capsys.readouterr().err


def test_config_init_writes_to_the_path_in_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("UNDERSTUDY_DATA", str(tmp_path / "D"))
    assert run(["config", "init", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": str(tmp_path / "D" / "understudy.toml")}
    assert run(["config", "init", "--data", str(tmp_path / "E")]) == 0
    assert (tmp_path / "E" / "understudy.toml").exists()
    monkeypatch.setenv("UNDERSTUDY_CONFIG", str(tmp_path / "own.toml"))
    assert run(["config", "init"]) == 0
    assert (tmp_path / "own.toml").exists()
    (tmp_path / "own.toml").write_text('[models]\nurl = "ftp://me:secret@x"\n')
    assert run(["config", "check"]) == 2
    assert "models.url" in (said := capsys.readouterr().err)
    assert "secret" not in said


def test_config_init_creates_no_folder_for_a_mistyped_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(["config", "init", "--config", str(tmp_path / "nosuch" / "x.toml")]) == 2
    assert f"the folder {tmp_path / 'nosuch'} does not exist" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_rejected_url_is_not_announced_as_a_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    before = {"stream.url": "", "store.url": "", "models.url": "", "ingest.engine": "native"}
    (tmp_path / "backends.json").write_text(json.dumps(before))
    assert run(["up", "--data", str(tmp_path), "--stream", "nothing://x"]) == 2
    said = capsys.readouterr()
    assert "nothing://, which is not a supported stream" in said.err
    assert "at the last start" not in said.out + said.err


@pytest.mark.parametrize("url", ["foo", "s3:/bucket", "~/models"])
def test_models_at_something_that_is_neither_a_url_nor_a_path_create_no_folder(
    url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNDERSTUDY_MODELS_URL", url)
    for command in (["config", "check"], ["keys", "create"], ["keys", "list"], ["up"]):
        assert run([*command, "--data", "D"]) == 2
        assert "is neither a URL nor a path; use s3://" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["config", "config init", "config show", "config check"])
def test_every_command_has_help_with_two_examples(command: str, capsys: pytest.CaptureFixture[str]):
    assert run([*command.split(), "--help"]) == 0
    assert capsys.readouterr().out.count("understudy ") >= 3
