"""understudy play GAME --web: prints a page URL with a key for that game only, and cleans up."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import urllib3

from tests.act.policies import random_policy
from tests.cli.platforms import processes_of, wait_for
from tests.serve.gateways import running
from understudy.backends.data import DataFolder
from understudy.backends.deployment import Deployment, open_deployment
from understudy.cli.root import run as run_command
from understudy.core.errors import ConfigError, LinkFailed, Refused
from understudy.core.log import FileLock
from understudy.models.manifest import Lineage
from understudy.platform.play_page import (
    await_gateway,
    browser_url,
    check_bot,
    is_free,
    network_url_text,
    page_address,
    play_error,
    play_key,
    running_url,
    save_port,
    saved_port,
)


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """The command line takes over SIGTERM; the tests' own process takes it back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def words(data: Path, *more: str, game: str = "rally") -> list[str]:
    return ["play", game, "--web", "--json", "--data", str(data), *more]


def command(data: Path) -> list[str]:
    return [sys.executable, "-m", "understudy.cli.main", *words(data)]


def asked(url: str, path: str, key: str | None = None) -> Any:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return urllib3.request("GET", url + path, headers=headers, retries=False, timeout=60.0)


def released(data: Path) -> Deployment:
    """A deployment whose rally has one model."""
    deployment = open_deployment(DataFolder(data))
    play_key(deployment, "rally")
    (spec,) = deployment.registry.specs("rally")
    epoch = deployment.registry.takeover("rally", owner="test")
    deployment.registry.release(
        random_policy(spec, "argmax"), Lineage(algorithm="dqn"), epoch=epoch
    )
    return deployment


def test_it_runs_a_platform_until_ctrl_c_and_a_second_one_finds_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    data = tmp_path / "D"
    released(data)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    save_port(DataFolder(data), port)
    with subprocess.Popen(
        command(data), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            assert ready["page"].startswith(ready["url"] + "/play#")
            fragment = parse_qs(urlsplit(ready["page"]).fragment)
            assert fragment == {"game": ["rally"], "key": [ready["key"]]}
            assert urlsplit(ready["url"]).port == port, "the browser finds what it kept"
            assert b"<canvas" in asked(ready["url"], "/play").data
            assert asked(ready["url"], "/v1/games/rally", ready["key"]).json()["schemas"]
            assert (
                asked(ready["url"], "/v1/games/CartPole-v1", ready["key"]).json()["error"]["code"]
                == "wrong_game"
            )
            assert (
                asked(ready["url"], "/metrics", ready["key"]).json()["error"]["code"]
                == "wrong_scope"
            )
            assert run_command(words(data, "--bot", "1")) == 0
            found = json.loads(capsys.readouterr().out)
            assert (found["url"], found["key"]) == (ready["url"], ready["key"])
            assert parse_qs(urlsplit(found["page"]).fragment)["bot"] == ["1"]
            # A new key is not printed before the running gateway accepts it.
            (data / "play.json").unlink()
            assert run_command(words(data)) == 0
            fresh = json.loads(capsys.readouterr().out)
            assert fresh["key"] != ready["key"]
            assert asked(ready["url"], "/v1/games/rally", fresh["key"]).status == 200
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
    assert processes_of(data) == []
    with pytest.raises(urllib3.exceptions.HTTPError):
        asked(ready["url"], "/play")


def test_without_a_data_folder_it_uses_a_temporary_one_and_removes_it(tmp_path: Path):
    line = [sys.executable, "-m", "understudy.cli.main", "play", "rally", "--web", "--json"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    environment.pop("UNDERSTUDY_DATA", None)
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            assert asked(ready["url"], "/v1/games/rally", ready["key"]).status == 200
            assert list(tmp_path.glob("understudy-play-*/D/store"))
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        assert process.stderr is not None
        assert "--data D keeps them" in process.stderr.read()
    assert processes_of(tmp_path) == []
    assert list(tmp_path.glob("understudy-play-*")) == []


def test_a_game_without_a_page_is_rejected_with_the_list_of_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run_command(words(tmp_path / "D", game="Acrobot-v1")) == 2
    assert "rally and CartPole-v1" in capsys.readouterr().err
    assert not (tmp_path / "D").exists()


@pytest.mark.parametrize("game", ["rally", "CartPole-v1"])
def test_the_key_is_saved_and_created_again_only_after_it_was_revoked(tmp_path: Path, game: str):
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
    assert parse_qs(urlsplit(address).fragment) == {
        "game": ["rally"],
        "bot": ["7"],
        "key": ["uk_a&b=#"],
    }


@pytest.mark.parametrize(
    ("url", "near"),
    [
        ("http://0.0.0.0:8600", "http://127.0.0.1:8600"),
        ("https://[::]:1", "https://[::1]:1"),
        ("http://127.0.0.1:8600", "http://127.0.0.1:8600"),
        ("http://play.example:80", "http://play.example:80"),
    ],
)
def test_the_unspecified_address_becomes_a_loopback_url(url: str, near: str):
    assert browser_url(url) == near
    assert page_address(url, "rally", key="uk_x").startswith(f"{near}/play#")
    assert bool(network_url_text(url, ("a.example",))) == (url != near)


def test_sigterm_before_it_is_ready_exits_with_0(tmp_path: Path):
    line = [sys.executable, "-m", "understudy.cli.main", "play", "rally", "--web"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    environment.pop("UNDERSTUDY_DATA", None)
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        wait_for(lambda: bool(list(tmp_path.glob("understudy-play-*"))))
        process.send_signal(signal.SIGTERM)
        said, errors = process.communicate(timeout=60)
    assert (process.returncode, said, errors.strip()) == (0, "", "")
    assert processes_of(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("more", "code"), [((), 130), (("--web",), 0)])
def test_sigterm_is_a_normal_end_only_with_web(
    more: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        "understudy.cli.play._check_options", lambda **_: signal.raise_signal(signal.SIGTERM)
    )
    assert run_command(["play", "rally", *more]) == code


def test_the_port_is_saved_with_the_keys(tmp_path: Path):
    deployment = open_deployment(DataFolder(tmp_path / "D"))
    assert saved_port(deployment.data) == 0
    key = play_key(deployment, "rally")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        save_port(deployment.data, port)
        assert not is_free("127.0.0.1", port)
    assert is_free("127.0.0.1", port)
    assert (saved_port(deployment.data), play_key(deployment, "rally")) == (port, key)
    for broken in ("[1, 2", '{"port": "x", "keys": 3}', '{"port": 70000}'):
        (tmp_path / "D" / "play.json").write_text(broken)
        assert saved_port(deployment.data) == 0
        assert play_key(deployment, "rally")


def test_the_status_file_is_used_only_while_the_gateway_runs(tmp_path: Path):
    data = DataFolder(tmp_path / "D")
    roles = tmp_path / "D" / "roles"
    assert running_url(data) is None
    roles.mkdir(parents=True)
    (roles / "gateway.json").write_text(json.dumps({"report": {"url": "http://127.0.0.1:9"}}))
    assert running_url(data) is None
    lock = FileLock(roles / "gateway.lock", what="test")
    assert running_url(data) == "http://127.0.0.1:9"
    with pytest.raises(LinkFailed, match="does not accept the page's key after 0 s"):
        await_gateway(data, "rally", key="uk_x", timeout_s=0.0)
    for broken in ('{"report": {}}', "[", "[]"):
        (roles / "gateway.json").write_text(broken)
        assert running_url(data) is None
    lock.close()


def test_a_gateway_that_rejects_the_key_has_no_page_yet(tmp_path: Path):
    with running(tmp_path) as gateway:
        assert play_error(gateway.url, "rally", key="uk_x").startswith("401: ")


def test_a_bot_must_exist(tmp_path: Path):
    deployment = released(tmp_path / "D")
    assert [check_bot(deployment, "rally", bot) for bot in ("champion", "1", "rally/1")] == [
        "champion",
        "1",
        "1",
    ]
    for bot in ("3", "worst", "CartPole-v1/1"):
        with pytest.raises(ConfigError):
            check_bot(deployment, "rally", bot)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--web", "--gif", "films", "--seed", "3"), "--seed, --gif"),
        (("--web", "--episodes", "1"), "--episodes"),
        (("--web", "--env-kwargs", "{}"), "--env-kwargs"),
        (("--open",), "add --web"),
        (("--web", "--bot", "7"), "--bot is 7"),
    ],
)
def test_options_that_cannot_be_combined_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], said: str
):
    assert run_command(["play", "rally", "--data", str(tmp_path / "D"), *more]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "D").exists()


def test_roles_without_a_gateway_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("UNDERSTUDY_ROLES", "ingest,learner")
    assert run_command(["play", "rally", "--web", "--data", str(tmp_path / "D")]) == 2
    assert "roles is ingest,learner" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "D").exists()
