"""The supervisor: real processes that crash, hang or exit, and are restarted and stopped."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import ConfigError, Locked
from understudy.platform.platform import Role, RoleStatus, Supervisor
from understudy.testing.clock import ManualClock

BEATING = """
import threading, time
def beat(text):
    while True:
        print(text, flush=True)
        time.sleep(0.02)
def beats(text):
    threading.Thread(target=beat, args=(text,), daemon=True).start()
"""
GOOD = f"{BEATING}import sys; beats('{{\"stored\": 1}}'); sys.stdin.read(); sys.exit(0)"
CRASHING = (
    "import sys; print('{\"stored\": 1}', flush=True); sys.stderr.write('no luck\\n'); sys.exit(7)"
)
WRONG = "import sys; sys.stderr.write('pass another port\\n'); sys.exit(2)"
WAITING = "import sys; sys.stderr.write('no broker\\n'); sys.exit(3)"
DEAF = f"{BEATING}print('{{\"a\": 1}}', flush=True); beats('{{}}'); time.sleep(600)"
BUSY = (
    "from understudy.platform.children import report, reporting\n"
    "with reporting(dict, every_s=0.02):\n"
    "    report({'stored': 1})\n"
    "    while True:\n"
    "        sum(range(1000))\n"
)
SILENT = "import time; time.sleep(600)"


def _command(script: str, _report: object) -> list[str]:
    return [sys.executable, "-c", script]


class Watched:
    """A supervisor of scripts, and what it told."""

    def __init__(
        self, folder: Path, scripts: dict[str, str], clock: Clock | None = None, **more: Any
    ) -> None:
        self.told: list[tuple[str, str]] = []
        roles = [
            Role(
                name=name,
                command=partial(_command, text),
                **{"drain_s": 0.3, **more.get(name, {})},
            )
            for name, text in scripts.items()
        ]
        self.it = Supervisor(
            roles,
            folder,
            clock=clock or SystemClock(),
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


# --- Roles that stop without ending ---------------------------------------------------------------


def listen(one: Watched, clock: ManualClock, condition: Callable[[], bool]) -> None:
    """Let time pass, second by second, in which the supervisor listens."""

    def passes() -> bool:
        clock.advance(1.0)
        return condition()

    one.until(passes)


def stop_process(one: Watched, name: str) -> int:
    child = one.it.statuses[name].child
    assert child is not None
    pid = child.pid
    os.kill(pid, signal.SIGSTOP)
    one.until(lambda: os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None)
    return pid


def test_a_stopped_role_is_shown_as_silent_and_restarted(watched, tmp_path: Path):
    clock = ManualClock()
    one = watched({"good": GOOD, "other": GOOD}, clock=clock)
    one.until(lambda: one.it.is_ready)
    status = one.it.statuses["good"]
    first = stop_process(one, "good")
    listen(one, clock, lambda: status.state == "silent")
    assert not one.it.is_ready
    listen(one, clock, lambda: standing_of(tmp_path, "good")["report_age_s"] >= 6)
    listen(one, clock, lambda: status.restarts == 1 and one.it.is_ready)
    one.until(lambda: status.heartbeats > 0)
    found = standing_of(tmp_path, "good")
    assert found["pid"] != first
    assert found["last_error"] == "reported nothing for 12 s and was killed"
    assert [text for name, text in one.told if name == "good"][1:3] == [
        "has reported nothing for 5 s; it is restarted after 12 s",
        "reported nothing for 12 s and was killed; restart 1 in 0.1 s",
    ]


def test_a_role_that_reports_again_is_left_alone(watched):
    clock = ManualClock()
    one = watched({"good": GOOD}, clock=clock)
    one.until(lambda: one.it.is_ready)
    status = one.it.statuses["good"]
    stopped = stop_process(one, "good")
    listen(one, clock, lambda: status.state == "silent")
    os.kill(stopped, signal.SIGCONT)
    one.until(lambda: one.it.is_ready)
    assert (status.restarts, one.told[-1]) == (0, ("good", "reports again"))


def test_a_role_that_is_only_busy_is_not_killed(watched):
    clock = ManualClock()
    one = watched({"busy": BUSY}, clock=clock)
    one.until(lambda: one.it.is_ready)
    status = one.it.statuses["busy"]
    for _ in range(30):
        heard = status.child.heartbeats
        one.until(lambda heard=heard: status.child.heartbeats > heard)
        clock.advance(1.0)
        one.it.step()
    assert (status.state, status.restarts, status.silent_s) == ("running", 0, 0.0)


def test_time_in_which_the_supervisor_was_suspended_is_not_silence(watched):
    clock = ManualClock()
    one = watched({"good": GOOD}, clock=clock)
    one.until(lambda: one.it.is_ready)
    status = one.it.statuses["good"]
    stop_process(one, "good")
    clock.advance(3600.0)
    one.it.step()
    assert status.state == "running"
    assert status.silent_s <= 1.0
    listen(one, clock, lambda: status.restarts == 1)


def test_a_role_has_more_time_for_its_first_report(watched):
    clock = ManualClock()
    one = watched({"slow": SILENT}, clock=clock)
    one.it.step()
    status = one.it.statuses["slow"]
    for _ in range(119):
        clock.advance(1.0)
        one.it.step()
    assert (status.state, status.restarts, status.why_killed) == ("starting", 0, "")
    listen(one, clock, lambda: status.restarts == 1)
    assert status.last_error == "reported nothing for 120 s and was killed"
    # A process that never came up was not steady, however long it took.
    listen(one, clock, lambda: status.restarts == 2)
    assert one.told[-1][1].endswith("restart 2 in 0.2 s")


def test_a_stopped_role_does_not_delay_the_end(watched):
    clock = ManualClock()
    one = watched({"good": GOOD}, clock=clock, good={"drain_s": 1e9})
    one.until(lambda: one.it.is_ready)
    stop_process(one, "good")
    assert not one.it.stop()
    assert one.told[-1] == ("good", "reported nothing for 12 s and was killed")


def test_a_role_that_is_still_starting_is_not_waited_for_unless_it_drains(watched):
    importing = f"{BEATING}beats('{{}}'); time.sleep(600)"
    draining = f"{BEATING}import sys; beats('{{}}'); sys.stdin.read(); sys.exit(0)"
    one = watched(
        {"learner": importing, "ingest": draining},
        learner={"drain_s": 1e9},
        ingest={"drain_s": 1e9, "drains_at_start": True},
    )
    one.until(lambda: all(status.heartbeats for status in one.it.statuses.values()))
    assert one.it.stop(), "nothing was lost"
    assert sorted(one.told) == [
        (name, said) for name in ("ingest", "learner") for said in ("has finished", "is stopping")
    ]


def test_a_process_without_anything_to_report_still_shows_that_it_lives(watched):
    one = watched({"empty": f"{BEATING}beats('{{}}'); time.sleep(600)"})
    status = one.it.statuses["empty"]
    one.until(lambda: status.heartbeats > 3)
    assert (status.state, dict(status.report)) == ("starting", {})
