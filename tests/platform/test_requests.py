import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from understudy.core.errors import ConfigError, Locked, UnderstudyError
from understudy.platform.requests import handle_requests, remove_stale_answers, send_request


def answering(folder: Path, handlers: Mapping[str, Any], stop: threading.Event) -> threading.Thread:
    def loop() -> None:
        while not stop.wait(0.005):
            handle_requests(folder, handlers)

    thread = threading.Thread(target=loop)
    thread.start()
    return thread


def test_a_request_is_answered_by_the_process_that_has_the_store(tmp_path: Path) -> None:
    stop = threading.Event()
    thread = answering(tmp_path, {"double": lambda asked: {"value": asked["value"] * 2}}, stop)
    try:
        assert send_request(tmp_path, "double", timeout_s=60, value=21) == {"value": 42}
        with pytest.raises(UnderstudyError, match="does not support"):
            send_request(tmp_path, "halve", timeout_s=60)
    finally:
        stop.set()
        thread.join()
    assert list(tmp_path.iterdir()) == []


def test_a_failing_handler_returns_an_error_and_the_next_request_is_answered(
    tmp_path: Path,
) -> None:
    def fail(_: Mapping[str, Any]) -> Mapping[str, Any]:
        raise ConfigError("no such player")

    stop = threading.Event()
    thread = answering(tmp_path, {"forget": fail}, stop)
    try:
        with pytest.raises(UnderstudyError, match="no such player"):
            send_request(tmp_path, "forget", timeout_s=60)
    finally:
        stop.set()
        thread.join()


def test_an_unexpected_error_of_a_handler_is_answered_and_its_request_removed(
    tmp_path: Path,
) -> None:
    def fail(_: Mapping[str, Any]) -> Mapping[str, Any]:
        raise RuntimeError("something odd")

    (tmp_path / "1.request").write_text('{"command": "odd"}')
    assert handle_requests(tmp_path, {"odd": fail}) == 1
    assert json.loads((tmp_path / "1.answer").read_text()) == {"error": "something odd"}
    assert not (tmp_path / "1.request").exists()


def test_a_request_without_answer_is_an_error_that_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(Locked, match=r"did not answer 'barrier' within 0\.05 s; try again later;"):
        send_request(tmp_path, "barrier", timeout_s=0.05)
    with pytest.raises(Locked, match="it may still carry it out; to check, look; otherwise stop"):
        send_request(tmp_path, "forget", timeout_s=0.05, check="look")
    assert list(tmp_path.iterdir()) == []


def test_unreadable_requests_are_answered_with_an_error(tmp_path: Path) -> None:
    (tmp_path / "1.request").write_text("{not json")
    (tmp_path / "2.request").write_text("[]")
    assert handle_requests(tmp_path, {}) == 2
    for number in (1, 2):
        assert "error" in json.loads((tmp_path / f"{number}.answer").read_text())


def test_answers_that_were_not_read_are_removed(tmp_path: Path) -> None:
    (tmp_path / "old.answer").write_text("{}")
    remove_stale_answers(tmp_path, older_than_s=-1.0)
    assert list(tmp_path.iterdir()) == []
    remove_stale_answers(tmp_path / "nowhere", older_than_s=0.0)
