"""understudy play GAME --web: the address of the page with a key for that game alone, and nothing left behind."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import urllib3

from tests.cli.platforms import processes_of
from understudy.app.data import DataFolder
from understudy.app.deployment import open_deployment
from understudy.app.play_web import page_address, play_key
from understudy.core.errors import Refused


def command(data: Path, *more: str, game: str = "rally") -> list[str]:
    return [sys.executable, "-m", "understudy.cli.main", "play", game, "--web", "--json", "--data", str(data), *more]


def asked(url: str, path: str, key: str | None = None) -> Any:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return urllib3.request("GET", url + path, headers=headers, retries=False, timeout=10.0)


def test_it_runs_a_platform_until_ctrl_c_and_a_second_one_finds_it(tmp_path: Path):
    data = tmp_path / "D"
    with subprocess.Popen(command(data), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            assert ready["page"].startswith(ready["url"] + "/play#")
            fragment = parse_qs(urlsplit(ready["page"]).fragment)
            assert fragment == {"game": ["rally"], "key": [ready["key"]]}
            assert b"<canvas" in asked(ready["url"], "/play").data
            assert asked(ready["url"], "/v1/games/rally", ready["key"]).json()["schemas"]
            assert asked(ready["url"], "/v1/games/CartPole-v1", ready["key"]).json()["error"]["code"] == "wrong_game"
            assert asked(ready["url"], "/metrics", ready["key"]).json()["error"]["code"] == "wrong_scope"
            again = subprocess.run(command(data, "--bot", "3"), capture_output=True, text=True, check=True, timeout=60)
            found = json.loads(again.stdout)
            assert (found["url"], found["key"]) == (ready["url"], ready["key"])
            assert parse_qs(urlsplit(found["page"]).fragment)["bot"] == ["3"]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
    assert processes_of(data) == []
    with pytest.raises(urllib3.exceptions.HTTPError):
        asked(ready["url"], "/play")


def test_without_a_data_folder_it_plays_in_one_of_its_own_and_nothing_is_left(tmp_path: Path):
    line = [sys.executable, "-m", "understudy.cli.main", "play", "rally", "--web", "--json"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    environment.pop("UNDERSTUDY_DATA", None)
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            assert asked(ready["url"], "/v1/games/rally", ready["key"]).status == 200
            assert list(tmp_path.glob("understudy-play-*/D/store"))
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        assert process.stderr is not None
        assert "--data D keeps both" in process.stderr.read()
    assert processes_of(tmp_path) == []
    assert list(tmp_path.glob("understudy-play-*")) == []


def test_a_game_without_a_page_is_refused_with_those_that_have_one(tmp_path: Path):
    done = subprocess.run(
        command(tmp_path / "D", game="Acrobot-v1"), capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert "rally and CartPole-v1" in done.stderr
    assert not (tmp_path / "D").exists()


@pytest.mark.parametrize("game", ["rally", "CartPole-v1"])
def test_the_key_is_kept_and_made_anew_only_when_it_was_revoked(tmp_path: Path, game: str):
    deployment = open_deployment(DataFolder(tmp_path / "D"))
    key = play_key(deployment, game)
    facts = deployment.keys.check(key)
    assert (facts.scopes, facts.game, facts.registers) == (("play",), game, False)
    assert play_key(open_deployment(DataFolder(tmp_path / "D")), game) == key
    path = tmp_path / "D" / "play.json"
    if os.name != "nt":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    deployment.keys.revoke(facts.id)
    other = play_key(deployment, game)
    assert other != key
    with pytest.raises(Refused, match="revoked"):
        deployment.keys.check(key)
    path.write_text("[1, 2")
    assert play_key(deployment, game) not in (key, other)
    assert [spec.game for spec in deployment.registry.specs(game)] == [game]


def test_an_address_can_carry_any_key_and_name():
    address = page_address("http://127.0.0.1:1", "rally", key="uk_a&b=#", bot="7")
    assert parse_qs(urlsplit(address).fragment) == {"game": ["rally"], "bot": ["7"], "key": ["uk_a&b=#"]}
