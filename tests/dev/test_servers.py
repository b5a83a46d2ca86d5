"""Starting, finding and stopping servers, with a small server as kafka."""

import socket
import stat
import subprocess
import sys

import pytest

from tests.dev.small import BROKEN, instead_of_kafka
from understudy.core.errors import ConfigError, ServerFailed
from understudy.dev import process, servers
from understudy.dev.process import identify
from understudy.dev.servers import (
    SERVERS,
    attach,
    fall_back_to_moto,
    new_credentials,
    read_credentials,
    start,
    unavailable_reason,
    uses_moto,
    write_credentials,
)


@pytest.fixture
def small(monkeypatch, tmp_path):
    instead_of_kafka(monkeypatch, tmp_path)


def command_line(pid: int) -> str:
    return subprocess.run(
        ["ps", "-ww", "-o", "args=", "-p", str(pid)], capture_output=True, text=True
    ).stdout


@pytest.mark.usefixtures("small")
def test_a_killed_server_restarts_on_the_same_port_and_stops(tmp_path):
    with start("kafka", tmp_path / "k") as server:
        first = server.pid
        address = server.address
        server.kill()
        assert identify(first) is None
        server.restart()
        assert server.is_alive
        assert (server.address, server.pid != first) == (address, True)
        pid = server.pid
    assert identify(pid) is None
    server.stop()
    assert (tmp_path / "k" / "guests").read_text() == "one\n"


@pytest.mark.usefixtures("small")
def test_a_folder_keeps_credentials_and_ports(tmp_path):
    with start("kafka", tmp_path / "k") as server:
        before = (server.address, server.credentials)
    with start("kafka", tmp_path / "k") as server:
        assert (server.address, server.credentials) == before
    with start("kafka", tmp_path / "other") as server:
        assert server.credentials["password"] != before[1]["password"]


@pytest.mark.usefixtures("small")
def test_secrets_are_in_one_private_file_and_on_no_command_line(tmp_path):
    with start("kafka", tmp_path / "k") as server:
        password = server.credentials["password"]
        assert read_credentials(server.credentials_file) == server.credentials
        assert stat.S_IMODE(server.credentials_file.stat().st_mode) == 0o600
        assert stat.S_IMODE((tmp_path / "k").stat().st_mode) == 0o700
        assert str(tmp_path) in command_line(server.pid)
        assert password not in command_line(server.pid)
        assert password not in server.log.read_text()


@pytest.mark.usefixtures("small")
def test_a_second_start_in_one_folder_is_rejected(tmp_path):
    with (
        start("kafka", tmp_path / "k"),
        pytest.raises(ServerFailed, match=r"is already running in "),
    ):
        start("kafka", tmp_path / "k")


@pytest.mark.usefixtures("small")
def test_a_server_that_does_not_end_is_reported_and_can_be_stopped_later(monkeypatch, tmp_path):
    server = start("kafka", tmp_path / "k")
    with monkeypatch.context() as deaf:
        deaf.setattr(process, "_GONE_S", 0.1)
        deaf.setattr(servers, "_STOP_S", 0.1)
        for name in ("kill", "killpg"):
            deaf.setattr(f"understudy.dev.process.os.{name}", lambda pid, number: None)
        server.detach()
        with pytest.raises(
            ServerFailed, match=f"kafka .pid {server.pid}. does not end; inspect it: ps -p"
        ):
            server.stop()
    found = attach(tmp_path / "k")
    assert found is not None
    assert (found.pid, found.is_alive) == (server.pid, True)
    found.stop()


@pytest.mark.usefixtures("small")
def test_a_taken_port_is_one_clear_error(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of kafka is in use"):
            start("kafka", tmp_path / "k", ports={"client": port})
    with pytest.raises(ConfigError, match="has no port 'clients'; give client"):
        start("kafka", tmp_path / "k", ports={"clients": 1})


def test_the_log_of_a_server_that_exits_during_startup_is_quoted(monkeypatch, tmp_path):
    instead_of_kafka(monkeypatch, tmp_path, BROKEN)
    with pytest.raises(ServerFailed, match=r"exited during startup(.|\n)*not enough of everything"):
        start("kafka", tmp_path / "k")
    assert attach(tmp_path / "k") is None


@pytest.mark.usefixtures("small")
def test_another_process_finds_a_detached_server_and_stops_it(tmp_path):
    server = start("kafka", tmp_path / "k")
    server.detach()
    other = attach(tmp_path / "k")
    assert other is not None
    assert (other.pid, other.address, other.credentials) == (
        server.pid,
        server.address,
        server.credentials,
    )
    other.stop()
    assert not server.is_alive
    assert attach(tmp_path / "k") is None


@pytest.mark.usefixtures("small")
def test_a_state_file_with_a_reused_pid_kills_no_other_process(tmp_path):
    server = start("kafka", tmp_path / "k")
    server.kill()
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    text = (tmp_path / "k" / "server.json").read_text()
    (tmp_path / "k" / "server.json").write_text(text.replace(str(server.pid), str(stranger.pid)))
    found = attach(tmp_path / "k")
    assert found is not None
    assert found.pid == stranger.pid
    assert not found.is_alive
    found.stop()
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"name": "kafka"}', '{"name": "x", "pid": 1, "started": "", "ports": {}}'],
)
def test_an_unreadable_state_file_is_no_server(tmp_path, text):
    (tmp_path / "server.json").write_text(text)
    assert attach(tmp_path) is None
    assert attach(tmp_path / "nowhere") is None


def test_every_server_reports_what_is_missing_and_the_next_step(monkeypatch, tmp_path):
    monkeypatch.setenv("UNDERSTUDY_SERVERS_CACHE", str(tmp_path))
    for name in SERVERS:
        if (reason := unavailable_reason(name)) is not None:  # without Go, S3 is moto
            assert name in reason
            assert len(reason.splitlines()) == 1
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    for name, tool in (
        ("cassandra", "java"),
        ("kafka", "java"),
        ("kinesis", "node"),
        ("kinesalite", "node"),
    ):
        assert f"{name}: {tool} is not installed; install" in (unavailable_reason(name) or "")
        with pytest.raises(ServerFailed, match=f"{tool} is not installed"):
            start(name, tmp_path / name)


def test_a_java_that_is_too_old_is_named(monkeypatch, tmp_path):
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert f"{java} is Java 11, but Java 17 is needed" in (unavailable_reason("cassandra") or "")
    assert f"{java} is Java 11, but Java 17 or newer is needed" in (
        unavailable_reason("kafka") or ""
    )


def test_an_unknown_server_is_rejected_with_the_list_of_servers(tmp_path):
    with pytest.raises(ConfigError, match="unknown server 'redis'; give one of cassandra, kafka"):
        start("redis", tmp_path)


def test_both_kinds_of_credentials_are_read_back(tmp_path):
    for is_aws in (True, False):
        made = new_credentials(is_aws=is_aws)
        write_credentials(tmp_path / "c", made)
        assert read_credentials(tmp_path / "c") == made
    (tmp_path / "c").write_text("password = 1")
    with pytest.raises(ConfigError, match="contains no credentials"):
        read_credentials(tmp_path / "c")


def test_s3_is_moto_if_versitygw_could_not_be_built(monkeypatch, tmp_path):
    pytest.importorskip("moto", reason="pip install 'understudy[servers]'")
    pytest.importorskip("boto3", reason="pip install 'understudy[aws]'")
    monkeypatch.setenv("UNDERSTUDY_SERVERS_CACHE", str(tmp_path))
    assert fall_back_to_moto()
    assert uses_moto()
    assert unavailable_reason("s3") is None
