"""A learner stops when its copy of a remote store stops growing."""

import io
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.simulation.recordings import recording
from understudy.backends.data import DataFolder
from understudy.core.errors import StorageFailed, Unreachable
from understudy.platform.children import FAILED, run_role
from understudy.platform.config import Config, StoreSection, write_config
from understudy.platform.learner_process import WindowFiller, learn, main
from understudy.ports import Cursor, Tail
from understudy.release.game_training import LearnerServiceConfig
from understudy.stores.view import StoreView
from understudy.stores.window import Window
from understudy.testing.samples import random_session
from understudy.testing.store_harness import SPEC


class Remote:
    """A store elsewhere with some chunks, of which one call of its tail fails."""

    def __init__(self, folder: Path, fails: Callable[[int], BaseException | None]) -> None:
        recording(DataFolder(folder), SPEC).store(
            random_session(SPEC, np.random.default_rng(7), n_chunks=6)
        )
        self._folder = DataFolder(folder).store
        self._fails = fails
        self.calls = 0

    def tail(self, cursor: Cursor | None, *, max_items: int, wait_s: float) -> Tail:
        self.calls += 1
        if error := self._fails(self.calls):
            raise error
        with StoreView(self._folder) as view:
            return view.tail(cursor, max_items=2, wait_s=wait_s)


def until(stop: threading.Event, is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not is_so() and not stop.is_set() and time.monotonic() < deadline_s:
        time.sleep(0.005)


@pytest.mark.parametrize("error", [StorageFailed("the table is gone"), KeyError("a bug")])
def test_an_error_of_the_window_thread_stops_the_role_and_is_raised(
    tmp_path: Path, error: Exception
) -> None:
    remote = Remote(tmp_path / "there", lambda call: error if call == 3 else None)
    stop = threading.Event()
    window = Window(remote, tmp_path / "window")  # type: ignore[arg-type]
    with window, pytest.raises(type(error), match=r"gone|bug"), WindowFiller(window, stop):
        assert stop.wait(30), "the role is told to stop"
    assert window.items == 4


def test_a_learner_stops_when_its_window_thread_has_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remote = Remote(
        tmp_path / "there", lambda call: StorageFailed("the table is gone") if call == 4 else None
    )
    data = DataFolder(tmp_path / "D", store_name="window")
    stop = threading.Event()
    window = Window(remote, data.store)  # type: ignore[arg-type]
    registry = recording(data, SPEC).registry()
    with window, pytest.raises(StorageFailed, match="gone"), WindowFiller(window, stop) as follower:
        assert learn(data, registry, LearnerServiceConfig(), stop, fields=follower.fields) == 0
    assert '"window": {"items": 6, "error": ""}' in capsys.readouterr().out


def test_a_store_that_is_unreachable_for_a_while_is_reported_and_retried(tmp_path: Path) -> None:
    remote = Remote(
        tmp_path / "there", lambda call: Unreachable("nobody answers") if call == 2 else None
    )
    stop = threading.Event()
    window = Window(remote, tmp_path / "window")  # type: ignore[arg-type]
    with window, WindowFiller(window, stop) as follower:
        until(stop, lambda: bool(follower.fields()["window"]["error"]))
        assert follower.fields()["window"] == {"items": 2, "error": "nobody answers"}
        until(stop, lambda: window.items == 6 and not window.error)
        assert follower.fields()["window"] == {"items": 6, "error": ""}
        assert not stop.is_set()


def test_a_store_that_is_down_at_the_start_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cassandra")
    with socket.socket() as nobody:  # bound and not listening: connections are refused
        nobody.bind(("127.0.0.1", 0))
        credentials = tmp_path / "credentials.toml"
        credentials.write_text('username = "a"\npassword = "b"\n')
        url = f"cassandra://127.0.0.1:{nobody.getsockname()[1]}/games?credentials={credentials}&retry_s=1"
        config = tmp_path / "config.json"
        write_config(Config(data=str(tmp_path / "D"), store=StoreSection(url=url)), config)
        monkeypatch.setattr("sys.argv", ["learner", str(tmp_path / "D"), str(config)])
        monkeypatch.setattr("sys.stdin", io.StringIO())
        assert run_role(main) == FAILED
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert "127.0.0.1" in errors
    assert "Traceback" not in errors
