"""FolderWatch wakes at once when a file of a watched folder appears or grows, and not otherwise."""

import sys
import threading
import time
from pathlib import Path

import pytest

from understudy.core.watch import FolderWatch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports changes")


def wakes(watch: FolderWatch, *, wait_s: float) -> bool:
    """Whether a wait ends long before its time."""
    began_s = time.monotonic()
    watch.wait(threading.Event(), wait_s)
    return time.monotonic() - began_s < 0.9 * wait_s


def test_a_change_wakes_once_and_only_in_a_watched_folder(tmp_path: Path):
    one, two = (tmp_path / name for name in ("one", "two"))
    for folder in (one, two):
        folder.mkdir()
    watch = FolderWatch()
    assert watch.watch([str(one)])
    file = one / "a.log"
    with file.open("wb", buffering=0) as log:
        assert wakes(watch, wait_s=60.0), "a new file"
        log.write(b"x")
        assert wakes(watch, wait_s=60.0), "an append"
        assert not wakes(watch, wait_s=0.05), "nothing new"
        (two / "b.log").touch()
        assert not wakes(watch, wait_s=0.05), "another folder"
        assert watch.watch([str(two)])
        watch.wait(threading.Event(), 0.05)  # the end of the first watch is reported, too
        log.write(b"x")
        assert not wakes(watch, wait_s=0.05), "no longer watched"
    (two / "c.log").touch()
    assert wakes(watch, wait_s=60.0)
    watch.close()
    watch.close()


def test_a_folder_that_does_not_exist_is_not_watched(tmp_path: Path):
    watch = FolderWatch()
    assert not watch.watch([str(tmp_path / "nowhere")])
    watch.close()
    assert not watch.watch([str(tmp_path)])
