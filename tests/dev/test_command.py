"""`understudy dev servers`: its text and JSON output, with a small server as kafka."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.dev.small import BROKEN, instead_of_kafka
from understudy.cli.root import run
from understudy.core.log import FileLock
from understudy.dev.process import identify
from understudy.dev.servers import attach, start, stop

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60.0
SLOW = """
import sys
from pathlib import Path
from typing import Any
import pytest
from dataclasses import replace
from tests.dev.small import SMALL, instead_of_kafka
from understudy.cli.root import run

def probe(place):
    Path(sys.argv[1], "asked").touch()
    raise TimeoutError

recipe = replace(SMALL, probe=probe, initialise=probe)
instead_of_kafka(pytest.MonkeyPatch(), Path(sys.argv[1]), recipe)
sys.exit(run(["dev", "servers", "start", "kafka"]))
"""
TOGETHER = """
import sys
from pathlib import Path
import pytest
from tests.dev.small import instead_of_kafka
from understudy.cli.root import run

instead_of_kafka(pytest.MonkeyPatch(), Path(sys.argv[1]))
sys.exit(run(sys.argv[2:]))
"""


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    instead_of_kafka(monkeypatch, tmp_path)
    yield
    run(["dev", "servers", "stop"])
    for number, handler in before.items():
        signal.signal(number, handler)


def said(capsys, *words: str) -> tuple[int, dict[str, Any]]:
    code = run(["dev", "servers", *words, "--json"])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_server_is_started_found_started_again_and_stopped(capsys):
    code, started = said(capsys, "start", "kafka")
    assert code == 0
    assert set(started["kafka"]) == {"address", "credentials_file", "pid"}
    assert said(capsys, "start", "kafka") == (0, started)
    code, status = said(capsys, "status", "kafka")
    assert (code, status) == (0, {"kafka": {"state": "running", **started["kafka"]}})
    assert said(capsys, "stop")[1]["kafka"] == {"stopped": True}
    assert identify(started["kafka"]["pid"]) is None
    assert said(capsys, "stop", "kafka") == (0, {"kafka": {"stopped": False}})
    assert said(capsys, "status", "kafka") == (0, {"kafka": {"state": "stopped"}})


def test_the_text_output_is_a_table_with_full_paths(capsys):
    assert run(["dev", "servers", "start", "kafka"]) == 0
    assert "already running" not in capsys.readouterr().out
    assert run(["dev", "servers", "start", "kafka"]) == 0
    shown = capsys.readouterr().out
    assert "already running" in shown
    found = attach(Path(os.environ["UNDERSTUDY_SERVERS_CACHE"]) / "running" / "kafka")
    assert found is not None
    assert str(found.credentials_file) in shown
    assert found.address in shown


def test_a_dead_server_is_shown_with_the_end_of_its_log(capsys):
    pid = said(capsys, "start", "kafka")[1]["kafka"]["pid"]
    os.kill(pid, signal.SIGKILL)
    gone(pid)
    code, status = said(capsys, "status")
    assert code == 1
    assert (status["kafka"]["state"], status["kafka"]["words"]) == ("died", "serving")
    assert run(["dev", "servers", "status"]) == 1
    assert "next: understudy dev servers start kafka" in capsys.readouterr().out
    code, again = said(capsys, "start", "kafka")
    assert (code, again["kafka"]["pid"] != pid) == (0, True)


def test_the_next_step_names_the_folder_that_was_given(capsys, tmp_path):
    place = ["--folder", str(tmp_path / "my servers")]
    pid = said(capsys, "start", "kafka", *place)[1]["kafka"]["pid"]
    os.kill(pid, signal.SIGKILL)
    gone(pid)
    assert run(["dev", "servers", "status", *place]) == 1
    told = capsys.readouterr().out.splitlines()[-1]
    assert told == f"next: understudy dev servers start kafka --folder '{tmp_path}/my servers'"
    assert run(shlex.split(told)[2:]) == 0
    assert run(["dev", "servers", "stop", *place]) == 0


def test_a_failed_start_is_reported_with_the_end_of_the_log(capsys, monkeypatch, tmp_path):
    instead_of_kafka(monkeypatch, tmp_path / "second", BROKEN)
    code, fields = said(capsys, "start", "kafka")
    assert code == 3
    assert "not enough of everything" in fields["kafka"]["error"]


def test_data_stay_until_they_are_erased(capsys, tmp_path):
    said(capsys, "start", "kafka", "--folder", str(tmp_path / "here"))
    said(capsys, "stop", "--folder", str(tmp_path / "here"))
    assert (tmp_path / "here" / "kafka" / "guests").exists()
    said(capsys, "stop", "kafka", "--erase", "--folder", str(tmp_path / "here"))
    assert not (tmp_path / "here" / "kafka").exists()


def test_a_folder_with_foreign_files_is_neither_erased_nor_used(capsys, tmp_path):
    mine = tmp_path / "here" / "kafka"
    mine.mkdir(parents=True)
    (mine / "thesis.txt").write_text("years of work")
    (tmp_path / "here" / "s3").mkdir()
    for words in (["stop", "kafka", "--erase"], ["stop", "--erase"], ["start", "kafka"]):
        mode = mine.stat().st_mode
        code, fields = said(capsys, *words, "--folder", str(tmp_path / "here"))
        assert code == 3
        assert (
            "contains 'thesis.txt' and no server.json of ours; give another folder for kafka"
            in fields["kafka"]["error"]
        )
        assert [path.name for path in mine.iterdir()] == ["thesis.txt"]
        assert mine.stat().st_mode == mode
    assert (tmp_path / "here" / "s3").exists()
    (mine / "server.json").write_text('{"listen": 8080}')
    assert said(capsys, "stop", "kafka", "--erase", "--folder", str(tmp_path / "here"))[0] == 3
    assert (mine / "thesis.txt").exists()


def test_the_files_of_a_failed_start_can_be_erased(capsys, monkeypatch, tmp_path):
    instead_of_kafka(monkeypatch, tmp_path / "second", BROKEN)
    place = ["--folder", str(tmp_path / "here")]
    assert said(capsys, "start", "kafka", *place)[0] == 3
    assert (tmp_path / "here" / "kafka" / "log").exists()
    assert said(capsys, "stop", "kafka", "--erase", *place) == (0, {"kafka": {"stopped": False}})
    assert not (tmp_path / "here" / "kafka").exists()


def test_stop_creates_no_folder(capsys, tmp_path):
    assert said(capsys, "stop", "--erase", "--folder", str(tmp_path / "nowhere"))[0] == 0
    assert not (tmp_path / "nowhere").exists()


def test_stop_waits_for_a_start_and_ends_what_it_started(tmp_path):
    place = tmp_path / "here"
    with FileLock(place / ".kafka.lock", what="a start"):
        stopping = threading.Thread(target=stop, args=("kafka", place))
        stopping.start()
        server = start("kafka", place / "kafka")
        server.detach()
        stopping.join(0.3)
        assert stopping.is_alive()
        assert server.is_alive
    stopping.join(TIMEOUT_S)
    assert not server.is_alive


def test_a_port_that_is_now_in_use_is_reported(capsys):
    address = said(capsys, "start", "kafka")[1]["kafka"]["address"]
    said(capsys, "stop", "kafka")
    with socket.create_server(("127.0.0.1", int(address.split(":")[1]))):
        assert run(["dev", "servers", "start", "kafka"]) == 0
    assert f": port {address.split(':')[1]} is in use" in capsys.readouterr().out


def test_concurrent_starts_start_one_server(tmp_path):
    words = ["dev", "servers", "start", "kafka", "--json"]
    place = ["--folder", str(tmp_path / "here")]
    starters = [
        subprocess.Popen(
            [sys.executable, "-c", TOGETHER, str(tmp_path / str(number)), *words, *place],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for number in range(3)
    ]
    answers = [
        json.loads(one.communicate(timeout=TIMEOUT_S)[0].splitlines()[-1]) for one in starters
    ]
    assert [one.returncode for one in starters] == [0, 0, 0]
    assert answers[0] == answers[1] == answers[2]
    assert len(running(str(tmp_path / "here" / "kafka" / "program.py"))) == 1
    run(["dev", "servers", "stop", *place])
    assert running(str(tmp_path / "here" / "kafka" / "program.py")) == []


def test_a_server_with_missing_credentials_is_still_found_and_stopped(capsys, tmp_path):
    place = ["--folder", str(tmp_path)]
    pid = said(capsys, "start", "kafka", *place)[1]["kafka"]["pid"]
    (tmp_path / "kafka" / "credentials").write_text("=")
    assert said(capsys, "status", "kafka", *place)[1]["kafka"]["state"] == "running"
    (tmp_path / "kafka" / "credentials").unlink()
    code, status = said(capsys, "status", *place)
    assert (code, status["kafka"]["state"], status["kafka"]["pid"]) == (0, "running", pid)
    assert said(capsys, "stop", "kafka", *place) == (0, {"kafka": {"stopped": True}})
    gone(pid)


def test_an_unwritable_folder_is_reported_with_the_next_step(capsys, tmp_path):
    (tmp_path / "file").touch()
    code, fields = said(capsys, "start", "kafka", "--folder", str(tmp_path / "file" / "here"))
    assert code == 3
    assert "check that the path is correct, readable and writable" in fields["kafka"]["error"]


def test_fetch_names_the_missing_tool(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    code, fields = said(capsys, "fetch", "cassandra")
    assert code == 3
    assert "cannot be fetched: mvn is not installed; install Maven" in fields["cassandra"]["error"]


def test_an_unknown_name_is_a_usage_error(capsys):
    assert run(["dev", "servers", "start", "redis"]) == 2
    assert "redis" in capsys.readouterr().err


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_start_leaves_nothing_behind(tmp_path, how):
    folder = tmp_path / "interrupted"
    command = [sys.executable, "-c", SLOW, str(folder)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as starter:
        deadline = time.monotonic() + TIMEOUT_S
        while (
            not (folder / "asked").exists()
            and starter.poll() is None
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        program = str(folder / "cache" / "running" / "kafka" / "program.py")
        assert running(program)
        starter.send_signal(how)
    while running(program) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running(program) == []


def gone(pid: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while identify(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert identify(pid) is None


def running(program: str) -> list[str]:
    listed = subprocess.run(
        ["ps", "-e", "-ww", "-o", "args="], capture_output=True, text=True
    ).stdout
    return [line for line in listed.splitlines() if program in line]
