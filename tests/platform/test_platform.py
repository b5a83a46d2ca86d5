"""The supervisor: real processes that crash, hang or exit, and are restarted and stopped."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from understudy.core.clock import SystemClock
from understudy.core.errors import ConfigError, Locked
from understudy.platform.platform import Role, RoleStatus, Supervisor

GOOD = "import sys; print('{\"stored\": 1}', flush=True); sys.stdin.read()"
CRASHING = (
    "import sys; print('{\"stored\": 1}', flush=True); sys.stderr.write('no luck\\n'); sys.exit(7)"
)
WRONG = "import sys; sys.stderr.write('pass another port\\n'); sys.exit(2)"
WAITING = "import sys; sys.stderr.write('no broker\\n'); sys.exit(3)"
DEAF = "import time; print('{}', flush=True); print('{\"a\": 1}', flush=True); time.sleep(600)"


def _command(script: str, _report: object) -> list[str]:
    return [sys.executable, "-c", script]


class Watched:
    """A supervisor of scripts, and what it told."""

    def __init__(self, folder: Path, scripts: dict[str, str], **more: Any) -> None:
        self.told: list[tuple[str, str]] = []
        roles = [
            Role(name=name, command=partial(_command, text), drain_s=0.3, **more.get(name, {}))
            for name, text in scripts.items()
        ]
        self.it = Supervisor(
            roles,
            folder,
            clock=SystemClock(),
            on_state_change=self._record_state,
            log=lambda *_: None,
        )

    def _record_state(self, status: RoleStatus, said: str) -> None:
        self.told.append((status.role.name, said))

    def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.told
            self.it.step()
            time.sleep(0.01)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    made: list[Watched] = []

    def make(scripts: dict[str, str], **more: Any) -> Watched:
        made.append(Watched(tmp_path, scripts, **more))
        return made[-1]

    yield make
    for one in made:
        one.it.close()


def standing_of(folder: Path, name: str) -> dict[str, Any]:
    fields = json.loads((folder / f"{name}.json").read_text())
    assert isinstance(fields, dict)
    return fields


def test_a_crashing_role_is_restarted_after_growing_delays_that_are_reported(
    watched, tmp_path: Path
):
    one = watched({"bad": CRASHING, "good": GOOD})
    one.until(lambda: one.it.statuses["bad"].restarts >= 3)
    pauses = [said for name, said in one.told if name == "bad" and "restart" in said]
    assert pauses[0] == "ended with exit code 7: no luck; restart 1 in 0.1 s"
    assert pauses[2].endswith("restart 3 in 0.4 s")
    found = standing_of(tmp_path, "bad")
    assert (found["state"], found["restarts"], found["pid"]) == ("waiting", 3, None)
    assert "no luck" in found["last_error"]
    assert one.it.statuses["good"].restarts == 0
    assert one.it.stop()


def test_an_error_is_reported_in_full_once_for_all_roles_and_restarts(
    watched, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("understudy.platform.platform._LONGEST_PAUSE_S", 0.2)
    one = watched({"first": WAITING, "second": WAITING})
    one.until(lambda: all(status.restarts >= 5 for status in one.it.statuses.values()))
    said = [text for _, text in one.told]
    assert [text for text in said if "no broker" in text] == [
        "ended with exit code 3: no broker; restart 1 in 0.1 s"
    ]
    assert [text for text in said if " did; " in text] in (
        ["ended with exit code 3 as first did; restart 1 in 0.1 s"],
        ["ended with exit code 3 as second did; restart 1 in 0.1 s"],
    )
    for name in ("first", "second"):
        own = [text for who, text in one.told if who == name]
        assert own[1:] == [
            "ended with exit code 3 as before; restart 2 in 0.2 s, and so on until it runs"
        ]
    assert all(
        status.last_error == "ended with exit code 3: no broker"
        for status in one.it.statuses.values()
    )


def test_a_killed_role_is_restarted_and_its_status_shows_it(watched, tmp_path: Path):
    one = watched({"good": GOOD})
    one.until(lambda: one.it.is_ready)
    first = standing_of(tmp_path, "good")["pid"]
    os.kill(first, 9)
    one.until(lambda: one.it.statuses["good"].restarts == 1 and one.it.is_ready)
    found = standing_of(tmp_path, "good")
    assert found["pid"] != first
    assert found["last_error"] == "was killed by signal 9"
    assert found["report"] == {"stored": 1}


def test_a_role_with_invalid_settings_is_not_restarted(watched):
    one = watched({"wrong": WRONG})
    with pytest.raises(ConfigError, match="pass another port"):
        one.until(lambda: False)


def test_a_role_that_does_not_finish_in_time_is_killed(watched, tmp_path: Path):
    one = watched({"deaf": DEAF, "good": GOOD})
    one.until(lambda: one.it.is_ready)
    pid = standing_of(tmp_path, "deaf")["pid"]
    began_s = time.monotonic()
    assert not one.it.stop()
    assert time.monotonic() - began_s < 10
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert ("good", "has finished") in one.told


def test_a_second_stop_request_kills_at_once(watched):
    one = watched({"deaf": DEAF})
    one.until(lambda: one.it.is_ready)
    at_once = threading.Event()
    at_once.set()
    assert not one.it.stop(at_once)


def test_a_replaced_role_is_not_restarted(watched, tmp_path: Path):
    one = watched(
        {"old": "import sys; sys.stderr.write('new has taken over\\n'); sys.exit(4)"},
        old={"takeover_exit_code": 4},
    )
    one.until(lambda: one.it.statuses["old"].state == "ended")
    for _ in range(20):
        one.it.step()
    found = standing_of(tmp_path, "old")
    assert (found["state"], found["restarts"], found["pid"]) == ("ended", 0, None)
    assert "new has taken over" in found["last_error"]
    assert one.it.stop()


def test_roles_stop_in_order(watched):
    one = watched({"second": GOOD, "first": GOOD}, second={"stops_after": ("first",)})
    one.until(lambda: one.it.is_ready)
    assert one.it.stop()
    stops = [(name, said) for name, said in one.told if said in ("is stopping", "has finished")]
    assert [name for name, _ in stops] == ["first", "first", "second", "second"]


def test_a_role_runs_once_in_a_folder(watched, tmp_path: Path):
    watched({"good": GOOD})
    with pytest.raises(Locked, match="in use by another process"):
        watched({"good": GOOD})
    watched({"other": GOOD})


def test_leaving_without_a_stop_leaves_no_process(watched, tmp_path: Path):
    one = watched({"deaf": DEAF})
    one.until(lambda: one.it.is_ready)
    pid = standing_of(tmp_path, "deaf")["pid"]
    one.it.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    one.it.close()
