"""A server process ends with its parent, and no other process is ever killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from understudy.dev.process import Identity, Process, identify, spawn

TIMEOUT_S = 20.0
STARTER = """
import sys, time
from pathlib import Path
from understudy.dev.process import spawn
import os
folder = Path(sys.argv[1])
process = spawn(["sleep", "300"], folder=folder, env=os.environ, log=folder / "log")
if sys.argv[2] == "releases":
    process.release()
print(process.pid, flush=True)
time.sleep(300)
"""

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(300)
"""


def gone(pid: int) -> bool:
    deadline = time.monotonic() + TIMEOUT_S
    while identify(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    return identify(pid) is None


def begin(command: list[str], folder: Path) -> Process:
    return spawn(command, folder=folder, env=os.environ, log=folder / "log")


def group_of(pid: int) -> list[int]:
    """The processes of this process group."""
    words = ["ps", "-e", "-o", "pid=,pgid=,stat="]
    rows = [
        line.split()
        for line in subprocess.run(words, capture_output=True, text=True).stdout.splitlines()
    ]
    return [
        int(member)
        for member, group, state in rows
        if int(group) == pid and not state.startswith("Z")
    ]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_ends_when_its_parent_is_killed(tmp_path, how):
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path), "keeps"], stdout=subprocess.PIPE
    ) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert identify(pid) is not None
        starter.send_signal(how)
    assert gone(pid)


def test_a_released_server_outlives_its_parent_and_has_no_watcher(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path), "releases"], stdout=subprocess.PIPE
    ) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        found = identify(pid)
        starter.kill()
    assert found is not None
    other = Process(found)
    assert other.is_alive
    deadline = time.monotonic() + TIMEOUT_S
    while group_of(pid) != [pid] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert group_of(pid) == [pid]
    other.terminate(timeout_s=TIMEOUT_S)
    assert gone(pid)


def test_a_released_server_causes_no_python_warning(tmp_path):
    words = [
        sys.executable,
        "-X",
        "dev",
        "-c",
        STARTER.replace("time.sleep(300)", ""),
        str(tmp_path),
        "releases",
    ]
    for ends_first in (False, True):
        ending = "process.kill()" if ends_first else ""
        words[4] = f"{words[4]}\n{ending}"
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S)
        found = identify(int(done.stdout))
        if found is not None:
            Process(found).kill()
        assert (found is None) == ends_first
        assert done.stderr == ""


def test_kill_ends_the_whole_process_group(tmp_path):
    process = begin(["sh", "-c", "sleep 300 & wait"], tmp_path)
    pid = process.pid
    process.kill()
    assert not process.is_alive
    assert gone(pid)
    assert group_of(pid) == []
    process.kill()


def test_a_server_that_ignores_sigterm_is_killed(tmp_path):
    process = begin([sys.executable, "-c", STUBBORN], tmp_path)
    while not (tmp_path / "log").read_text():
        time.sleep(0.01)
    process.terminate(timeout_s=0.2)
    assert not process.is_alive


def test_a_reused_pid_is_left_alone(tmp_path):
    stranger = begin(["sleep", "300"], tmp_path)
    mistaken = Process(Identity(stranger.pid, "another boot/17"))
    assert not mistaken.is_alive
    mistaken.terminate(timeout_s=1.0)
    mistaken.kill()
    assert stranger.is_alive
    stranger.kill()


def test_pid_zero_is_never_alive():
    nobody = Process(Identity(0, ""))
    nobody.terminate(timeout_s=1.0)
    assert not nobody.is_alive


def test_a_missing_command_is_reported_in_the_log(tmp_path):
    process = begin(["there-is-no-such-program"], tmp_path)
    assert gone(process.pid)
    process.kill()
    assert "there-is-no-such-program" in (tmp_path / "log").read_text()
