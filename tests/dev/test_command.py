"""`understudy dev servers`: what a person or a program sees, on a small server in place of a big one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.dev.small import Broken, instead_of_kafka
from understudy.cli.root import run
from understudy.dev.process import identify
from understudy.dev.servers import attach

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
SLOW = """
import sys
from pathlib import Path
from typing import Any
import pytest
from tests.dev.small import Small, instead_of_kafka
from understudy.cli.root import run

class Slow(Small):
    def ask(self, place):
        Path(sys.argv[1], "asked").touch()
        raise TimeoutError

instead_of_kafka(pytest.MonkeyPatch(), Path(sys.argv[1]), Slow)
sys.exit(run(["dev", "servers", "start", "kafka"]))
"""


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
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


def test_people_read_a_table_with_whole_paths(capsys):
    assert run(["dev", "servers", "start", "kafka"]) == 0
    assert "runs already" not in capsys.readouterr().out
    assert run(["dev", "servers", "start", "kafka"]) == 0
    shown = capsys.readouterr().out
    assert "runs already" in shown
    found = attach(Path(os.environ["UNDERSTUDY_SERVERS_CACHE"]) / "running" / "kafka")
    assert found is not None
    assert str(found.credentials_file) in shown
    assert found.address in shown


def test_one_that_died_is_shown_with_its_last_lines(capsys):
    pid = said(capsys, "start", "kafka")[1]["kafka"]["pid"]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)  # it is a child of this very process
    code, status = said(capsys, "status")
    assert code == 1
    assert (status["kafka"]["state"], status["kafka"]["words"]) == ("died", "serving")
    assert run(["dev", "servers", "status"]) == 1
    assert "next: understudy dev servers start kafka" in capsys.readouterr().out
    code, again = said(capsys, "start", "kafka")
    assert (code, again["kafka"]["pid"] != pid) == (0, True)


def test_what_fails_is_told_and_holds_up_nobody(capsys, monkeypatch, tmp_path):
    instead_of_kafka(monkeypatch, tmp_path / "second", Broken)
    code, fields = said(capsys, "start", "kafka")
    assert code == 3
    assert "not enough of everything" in fields["kafka"]["error"]


def test_data_stay_until_they_are_erased(capsys, tmp_path):
    said(capsys, "start", "kafka", "--folder", str(tmp_path / "here"))
    said(capsys, "stop", "--folder", str(tmp_path / "here"))
    assert (tmp_path / "here" / "kafka" / "guests").exists()
    said(capsys, "stop", "kafka", "--erase", "--folder", str(tmp_path / "here"))
    assert not (tmp_path / "here" / "kafka").exists()


def test_fetch_says_what_is_there_and_what_cannot_be_had(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    code, fields = said(capsys, "fetch", "cassandra")
    assert code == 3
    assert "cannot be fetched: mvn is not installed; install Maven" in fields["cassandra"]["error"]


def test_an_unknown_name_is_wrong_use(capsys):
    assert run(["dev", "servers", "start", "redis"]) == 2
    assert "redis" in capsys.readouterr().err


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_start_leaves_nothing_behind(tmp_path, how):
    folder = tmp_path / "interrupted"
    command = [sys.executable, "-c", SLOW, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as starter:
        deadline = time.monotonic() + PATIENCE_S
        while not (folder / "asked").exists() and starter.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        program = str(folder / "cache" / "running" / "kafka" / "program.py")
        assert running(program)
        starter.send_signal(how)
    while running(program) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running(program) == []


def running(program: str) -> list[str]:
    listed = subprocess.run(["ps", "-e", "-ww", "-o", "args="], capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if program in line]
