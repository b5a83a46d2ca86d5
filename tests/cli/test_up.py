"""The platform as an operator runs it: real processes, a real port, real kills."""

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.cli.platforms import SPEC, Sender, Up, processes_of, wait_for
from understudy.backends.data import DataFolder, stats
from understudy.backends.deployment import open_deployment
from understudy.cli.root import run as run_command
from understudy.cli.status import platform_status as status
from understudy.cli.up import _print_ready, _text, _View
from understudy.platform.config import resolve
from understudy.platform.platform import (
    GAME,
    DevelopmentKeys,
    Platform,
    Role,
    RoleStatus,
    development_keys,
)
from understudy.platform.play_page import network_url_text, page_address, play_error, play_key

ROLES = ("--role", "gateway,ingest")


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """The command line takes over SIGTERM; the tests' own process takes it back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_up_does_not_wait_for_gymnasium_or_jax():
    code = "import sys, understudy.cli.up; print(sorted({'gymnasium', 'jax'} & sys.modules.keys()))"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


def test_each_role_is_killed_while_a_client_sends_and_nothing_acknowledged_is_lost(tmp_path: Path):
    data = tmp_path / "D"
    with Up(data, *ROLES) as up:
        assert set(up.ready) == {"url", "admin_key", "key", "pages"}
        assert up.ready["pages"] == {}, "no game with a page is registered here"
        sender = Sender(up.ready["url"], up.ready["key"])
        sender.register()
        with sender:
            for role in ("gateway", "ingest"):
                sender.sends_on()
                before = up.kill(role)
                wait_for(partial(up.is_back, role))
                assert up.status(role)["pid"] != before
            sender.sends_on()
            now = status(DataFolder(data))
            assert now["ok"], now
            assert now["url"] == up.ready["url"]
            assert {
                role["role"]: (role["restarts"], role["last_error"]) for role in now["roles"]
            } == dict.fromkeys(("gateway", "ingest"), (1, "was killed by signal 9"))
            assert 0 < now["steps"] == now["games"][0]["steps"]
            wait_for(
                lambda: any(
                    role["rates"].get("stored") for role in status(DataFolder(data))["roles"]
                )
            )
        # Stopped right after the last ack: what it acknowledged is stored before it exits.
        assert up.stop() == 0, up.errors
        assert up.process.stdout is not None
        assert up.process.stdout.read() == "", "exactly one line"
    assert sender.failures > 0, "the gateway was away for a moment"
    assert stats(DataFolder(data))["steps"] == sender.acked_steps
    assert stats(DataFolder(data))["quarantined"] == {}
    assert "was killed by signal 9; restart 1" in up.errors
    assert processes_of(data) == []
    after = status(DataFolder(data))
    assert not after["ok"]
    assert {role["state"] for role in after["roles"]} == {"not running"}
    # The same keys and the same folder at the next start.
    with Up(data, *ROLES) as again:
        assert (again.ready["key"], again.ready["admin_key"]) == (
            up.ready["key"],
            up.ready["admin_key"],
        )
        assert again.stop(signal.SIGINT) == 130
    assert processes_of(data) == []


def test_a_revoked_key_is_refused_within_two_seconds_and_up_makes_another(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], bar: Callable[[float], float]
):
    data = tmp_path / "D"
    with Up(data, "--role", "gateway") as up:
        sender = Sender(up.ready["url"], up.ready["key"])
        sender.register()
        assert sender.status() == 200
        assert run_command(["keys", "revoke", up.ready["key"], "--data", str(data)]) == 0
        wait_for(lambda: sender.status() == 401, timeout_s=bar(2.0))
        kept = {path: path.read_bytes() for path in (data / "roles").glob("config-*")}
        assert run_command(["up", "--data", str(data), "--port", "1", *ROLES]) == 3
        assert "in use by another process" in capfd.readouterr().err
        assert kept == {path: path.read_bytes() for path in (data / "roles").glob("config-*")}
    again = development_keys(open_deployment(DataFolder(data)))
    assert again.key != up.ready["key"]
    assert development_keys(open_deployment(DataFolder(data))) == again


def test_the_game_that_up_prints_runs_as_it_is_and_a_killed_supervisor_takes_its_roles_with_it(
    tmp_path: Path,
):
    data = tmp_path / "D"
    with Up(data, *ROLES) as up:
        environment = {
            "UNDERSTUDY_URL": up.ready["url"],
            "UNDERSTUDY_KEY": up.ready["key"],
            "HOME": str(tmp_path),
        }
        done = subprocess.run(
            [sys.executable, "-c", GAME],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        assert len(processes_of(data)) == 2
        up.process.kill()
        up.process.wait()
        wait_for(lambda: not processes_of(data))
    # They drained although no supervisor was left to request it.
    assert stats(DataFolder(data))["games"] == {"balance": 3000}


def test_a_full_disk_is_in_the_status_while_it_lasts(tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("no full disk: mounting a tmpfs needs Linux and root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no full disk: a tmpfs cannot be mounted here ({done.stderr.strip()})")
    data = DataFolder(disk / "D")
    try:
        with Up(data.root, *ROLES) as up:
            sender = Sender(up.ready["url"], up.ready["key"])
            sender.register()
            with sender:
                sender.sends_on()
                with (
                    contextlib.suppress(OSError),
                    (disk / "ballast").open("wb", buffering=0) as ballast,
                ):
                    while ballast.write(bytes(4096)):
                        pass
                wait_for(
                    lambda: any("gateway accepts nothing" in said for said in status(data)["next"])
                )
                time.sleep(6)  # longer than a supervisor may be silent
                full = status(data)
                assert not full["ok"]
                assert "room" in full["next"][0], full["next"]
                (disk / "ballast").unlink()
                sender.sends_on()
            wait_for(lambda: bool(status(data)["ok"]))
            assert up.stop() == 0, up.errors
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_the_learner_runs_beside_them_and_is_restarted(tmp_path: Path):
    data = tmp_path / "D"
    with Up(data) as up:
        sender = Sender(up.ready["url"], up.ready["key"])
        sender.register()
        sender.send_session()
        wait_for(lambda: bool(up.status("learner")["report"].get("games")))
        up.kill("learner")
        wait_for(partial(up.is_back, "learner"))
        wait_for(
            lambda: "of 1000 steps of people" in status(DataFolder(data))["games"][0].get("why", "")
        )
        assert up.stop() == 0, up.errors
    assert processes_of(data) == []


def test_roles_do_not_block_when_the_log_is_not_read(monkeypatch: pytest.MonkeyPatch):
    is_read = threading.Event()
    written = list[str]()

    class Unread:
        def write(self, text: str) -> None:
            is_read.wait(30)
            written.append(text)

        def flush(self) -> None: ...

    monkeypatch.setattr(sys, "stderr", Unread())
    view = _View(Console(file=io.StringIO()), is_json=False)
    began_s = time.monotonic()
    for _ in range(5000):
        view.log("gateway", "x" * 1000)
    view.close()
    assert time.monotonic() - began_s < 10
    is_read.set()
    wait_for(lambda: len(written) >= 1000)


def test_a_terminal_shows_events_as_text():
    assert (
        _text('{"event": "store_full", "next": "free some", "level": "warning"}')
        == "store_full next=free some"
    )
    for line in ("plain", "[1]", "{}", '{"event": 1'):
        assert _text(line) == line


def test_a_bad_config_is_reported_in_one_line_and_leaves_no_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    data = tmp_path / "D"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert run_command(["up", "--data", str(data), "--port", port, "--role", "gateway"]) == 2
    shown = capfd.readouterr()
    assert (shown.out + shown.err).count(f"cannot listen on 127.0.0.1 port {port}") == 1
    assert f"understudy: cannot listen on 127.0.0.1 port {port}" in shown.err
    for arguments, said in (
        (["--role", "gateway,cook"], "gateway,ingest,learner"),
        (["--port", "99999"], "65535"),
        (["--host", "0.0.0.0"], "plain HTTP"),
        (["--config", str(tmp_path / "none.toml")], "cannot be read"),
    ):
        assert run_command(["up", "--data", str(data), *arguments]) == 2
        assert said in capfd.readouterr().err
    assert processes_of(data) == []
    assert run_command(["up", "--help"]) == 0
    assert capfd.readouterr().out.count("understudy ") >= 3


def test_a_roles_last_line_during_startup_is_shown_unless_it_is_the_commands_error():
    written = io.StringIO()
    view = _View(Console(file=written, force_terminal=True, width=200), is_json=False)
    for line in ("one", "two"):
        view.log("gateway", line)
    view.log("ingest", "three")
    view.log("learner", "the end")
    view.drop("the end")
    view.close()
    said = written.getvalue()
    assert said.index("one") < said.index("two") < said.index("three")
    assert "the end" not in said


def test_the_reason_why_a_role_ended_is_shown_once():
    written = io.StringIO()
    view = _View(Console(file=written, force_terminal=True, width=200), is_json=False)
    status = RoleStatus(Role(name="ingest", command=lambda _: [], drain_s=1.0))
    view.statuses = {"ingest": status}
    for said in (
        "ended with exit code 3: no broker; restart 1 in 0.1 s",
        "ended with exit code 3 as before; restart 2 in 0.2 s",
    ):
        view.log("ingest", "no broker")
        status.last_error = "ended with exit code 3: no broker"
        view.show_state(status, said)
    view.log("ingest", "no broker")
    view.close()
    assert written.getvalue().count("no broker") == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_before_any_role_runs_has_the_usual_exit_code(
    number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("understudy.cli.up.resolve", lambda *_, **__: signal.raise_signal(number))
    assert run_command(["up", "--data", str(tmp_path / "D")]) == code
    assert not (tmp_path / "D").exists()


def test_sigterm_during_startup_exits_with_0(tmp_path: Path):
    command = [
        sys.executable,
        "-m",
        "understudy.cli.main",
        "up",
        "--data",
        str(tmp_path / "D"),
        "--port",
        "0",
        *ROLES,
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_for(lambda: (tmp_path / "D" / "roles" / "gateway.json").exists())
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert processes_of(tmp_path) == []


@pytest.mark.usefixtures("sighup")
def test_sighup_stops_it_like_sigterm(tmp_path: Path):
    with Up(tmp_path / "D", "--role", "gateway") as up:
        assert up.stop(signal.SIGHUP) == 0, up.errors
    assert "has finished" in up.errors
    assert processes_of(tmp_path) == []


def test_no_development_key_is_created_when_other_machines_can_connect(tmp_path: Path):
    flags = {"data": str(tmp_path / "D"), "gateway.host": "0.0.0.0", "gateway.insecure": True}
    with Platform(resolve(flags, environ={}).config, on_state_change=lambda *_: None) as platform:
        assert platform.ready_line() == {"url": None, "key": None, "admin_key": None}
    assert open_deployment(DataFolder(tmp_path / "D")).keys.all() == []


def said_when_ready(keys: DevelopmentKeys | None, **more: Any) -> str:
    """What `up` prints for people."""
    written = io.StringIO()
    _print_ready(
        Console(file=written, width=40), "http://127.0.0.1:8600", keys, **{"pages": {}, **more}
    )
    return written.getvalue()


def test_the_play_page_is_printed_with_the_key():
    url = "http://127.0.0.1:8600"
    keys = DevelopmentKeys("uk_play", "uk_admin")
    address = page_address(url, "rally", key="uk_play")
    said = said_when_ready(keys, pages={"rally": address})
    assert f"play rally in a browser: {address}\n" in said
    assert (
        "play CartPole-v1 in a browser: run 'understudy play CartPole-v1 --web' on this folder"
        in said
    )
    assert said.index("/play#") < said.index(f"export UNDERSTUDY_URL={url}\n") < said.index(GAME)
    assert "other machines" not in said


def test_the_url_for_other_machines_is_printed_without_a_development_key():
    others = network_url_text("http://0.0.0.0:8600", ())
    said = said_when_ready(None, others=others)
    assert said.startswith("ready at http://127.0.0.1:8600;")
    assert "other machines are rejected until gateway.hosts has this machine's name\n" in said
    assert (
        network_url_text("http://[::]:8600", ("play.example",))
        == "other machines use http://play.example:8600"
    )


def test_a_game_with_a_page_is_played_with_the_development_key(tmp_path: Path):
    play_key(open_deployment(DataFolder(tmp_path / "D")), "rally")
    with Up(tmp_path / "D", "--role", "gateway") as up:
        url = up.ready["url"]
        key = up.ready["key"]
        assert up.ready["pages"] == {"rally": page_address(url, "rally", key=key)}
        assert play_error(url, "rally", key=key) == ""


def test_json_ready_has_a_reachable_url_when_it_listens_on_every_address(tmp_path: Path):
    with Up(
        tmp_path / "D", "--role", "gateway", "--host", "0.0.0.0", UNDERSTUDY_GATEWAY_INSECURE="true"
    ) as up:
        assert up.ready.pop("url") == f"http://127.0.0.1:{up.status('gateway')['report']['port']}"
        assert up.ready == {"admin_key": None, "key": None, "pages": {}}


def test_the_next_start_and_other_commands_use_the_saved_urls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    data = tmp_path / "D"
    elsewhere = tmp_path / "shared models"

    def say(*words: str) -> dict[str, Any]:
        run_command([*words, "--data", str(data), "--json"])
        answer: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return answer

    with Up(data, "--role", "gateway", "--models", str(elsewhere)) as first:
        Sender(first.ready["url"], first.ready["key"]).register()
        assert say("status")["elsewhere"] == {"models": str(elsewhere)}
    assert not (data / "models").exists()
    with Up(data, "--role", "gateway") as second:
        assert second.ready["key"] == first.ready["key"]
        assert f"models at {elsewhere}" in second.errors
    assert [one["game"] for one in say("status")["games"]] == [SPEC.game]
    assert not (data / "models").exists()
    with Up(data, "--role", "gateway", "--models", "folder") as third:
        assert "models is in the data folder (folder) now; at the last start it was" in third.errors
        assert third.ready["key"] != first.ready["key"]
    assert say("status")["elsewhere"] == {}


def test_a_failed_start_saves_no_urls(tmp_path: Path):
    stream = "kinesis://games?region=x&endpoint=http://127.0.0.1:9&retry_s=0"
    with Up(tmp_path / "D", "--role", "gateway", "--stream", stream) as up:
        assert up.process.wait(60) != 0
    assert not (tmp_path / "D" / "backends.json").exists()


def test_a_url_that_other_commands_will_not_use_is_reported(tmp_path: Path):
    data = tmp_path / "D"
    data.mkdir()
    (data / "understudy.toml").write_text('[models]\nurl = "folder"\n')
    with Up(data, "--role", "gateway", "--models", str(tmp_path / "M")) as up:
        wait_for(
            lambda: (
                "other commands on this folder use models.url of its understudy.toml" in up.errors
            )
        )
