"""The demo as a user types it, where it does not come to play."""

import sys
from pathlib import Path

import pytest

from understudy.cli.root import run as run_command


@pytest.mark.parametrize(
    ("wrong", "code", "said"),
    [
        (["--stream", "kinesis://x"], 2, "no AWS region"),
        (["--stream", "nosuch://x"], 2, "is no stream"),
        (["--models", "nosuch://x"], 2, "is no place for models"),
        (["--game", "nosuch"], 2, "no game 'nosuch' is known"),
        (["--players", "0"], 2, "--players is 0"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_made(
    wrong: list[str], code: int, said: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    assert run_command(["demo", "--keep", str(tmp_path / "kept"), *wrong]) == code
    out, err = capsys.readouterr()
    assert said in err
    assert "people play" not in out
    assert not (tmp_path / "kept").exists()


def test_a_missing_package_is_named_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "botocore", None)
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    assert run_command(["demo", "--keep", str(tmp_path / "kept"), "--stream", "kinesis://x?region=eu-west-1"]) == 2
    out, err = capsys.readouterr()
    assert "pip install 'understudy[aws]'" in err
    assert "people play" not in out
    assert not (tmp_path / "kept").exists()
