"""The lock: held by one process at a time, released when its holder dies."""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from understudy.core.errors import Locked, StorageFailed
from understudy.core.log import FileLock, is_locked

HOLDER = """
import sys
from pathlib import Path
from understudy.core.log import FileLock
lock = FileLock(Path(sys.argv[1]), what="spool")
print("held", flush=True)
sys.stdin.readline()
lock.close()
print("released", flush=True)
sys.stdin.readline()
"""


def hold(path: Path) -> "subprocess.Popen[str]":
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_a_second_process_fails_with_what_is_locked(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / ".lock"
    with hold(path) as holder:
        with pytest.raises(
            Locked, match=r"spool is in use by another process .*\.lock.*; stop that process"
        ):
            FileLock(path, what="spool")
        assert is_locked(path)
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.write("\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == "released\n"
        with FileLock(path, what="spool"):
            assert is_locked(path)
        assert not is_locked(path)
        holder.kill()


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is of POSIX")
def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with hold(path) as holder:
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=10)
    with FileLock(path, what="store"):
        pass


@pytest.mark.skipif(sys.platform == "win32", reason="flock is of POSIX")
def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    path = tmp_path / ".lock"
    path.touch()
    monkeypatch.setattr("fcntl.flock", flock)
    for lock in (lambda: FileLock(path, what="store", timeout_s=60.0), lambda: is_locked(path)):
        with pytest.raises(StorageFailed, match=r"No locks available.*use a file system"):
            lock()


def test_one_process_cannot_take_a_lock_twice(tmp_path: Path) -> None:
    with FileLock(tmp_path / ".lock", what="store"), pytest.raises(Locked):
        FileLock(tmp_path / ".lock", what="store")


def test_is_locked_creates_no_file_and_closing_twice_is_fine(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    assert not is_locked(path)
    assert not path.exists()
    lock = FileLock(path, what="store")
    lock.close()
    lock.close()
    assert path.exists()
    assert path.stat().st_mode & 0o077 == 0


def test_a_child_process_does_not_inherit_the_lock(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    lock = FileLock(path, what="store")
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False
    ) as child:
        lock.close()
        with FileLock(path, what="store"):
            pass
        child.kill()


def test_the_timeout_outlasts_a_short_probe(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    probe = FileLock(path, what="a probe")
    threading.Timer(0.05, probe.close).start()
    with FileLock(path, what="store", timeout_s=10.0):
        assert is_locked(path)
