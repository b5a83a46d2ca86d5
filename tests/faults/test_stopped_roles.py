"""Roles stopped with SIGSTOP: seen everywhere, restarted, and nothing acknowledged is lost."""

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import urllib3

from tests.card import Card
from tests.cli.platforms import Sender, Up, processes_of, wait_for
from understudy.backends.data import DataFolder, stats
from understudy.cli.status import platform_status as status


def test_stopped_roles_are_seen_and_restarted(
    tmp_path: Path, card: Card, bar: Callable[[float], float]
) -> None:
    """20 s and more: a stopped role is killed after 12 s without a report."""
    data = DataFolder(tmp_path / "D")
    with Up(data.root) as up:

        def get(path: str) -> Any:
            headers = {"authorization": f"Bearer {up.ready['key']}"}
            return urllib3.request("GET", f"{up.ready['url']}{path}", headers=headers).data

        def stop(role: str) -> None:
            os.kill(int(up.status(role)["pid"]), signal.SIGSTOP)

        sender = Sender(up.ready["url"], up.ready["key"], pause_s=0.1)
        sender.register()
        with sender:
            sender.sends_on()
            wait_for(lambda: up.status("learner")["state"] == "running")
            wait_for(lambda: json.loads(get("/readyz"))["status"] == "ready")
            assert status(data)["ok"]
            stop("ingest")
            stop("learner")
            wait_for(lambda: json.loads(get("/readyz"))["status"] == "degraded", bar(8.0))
            assert up.status("ingest")["state"] == "silent"
            now = status(data)
            assert not now["ok"]
            assert now["lag_s"] >= 5.0
            assert b'understudy_role_running{role="ingest"} 0.0' in get("/metrics")
            stop("gateway")
            for role in ("ingest", "learner", "gateway"):
                wait_for(partial(up.is_back, role), bar(20.0))
            sender.sends_on()
            wait_for(lambda: bool(status(data)["ok"]))
        errors = {role["role"]: role["last_error"] for role in status(data)["roles"]}
        assert up.stop() == 0, up.errors
    reason = "reported nothing for 12 s and was killed"
    assert errors == dict.fromkeys(("gateway", "ingest", "learner"), reason)
    assert stats(data)["steps"] == sender.acked_steps
    assert processes_of(data.root) == []
    card.line("stopped roles, seen and restarted", tried=3, held=3)
