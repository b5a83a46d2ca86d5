"""Two workers play CarRacing behind an encoder, with the commands of docs/scale.md."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import urllib3

from tests.cli.platforms import wait_for
from tests.docs.machines import environment
from tests.docs.scale_page import ROOT, commands_of
from tests.workers.test_processes import ended, free_port
from understudy.stores.view import StoreView

pytest.importorskip("Box2D", reason="needs gymnasium[box2d], of the extra examples")
MIN_STEPS = 500
ROUND_STEPS = 32
"""Of a worker: eight steps in each of its four envs."""


def test_workers_feed_encoded_pictures_and_the_learner_updates(tmp_path: Path):
    shutil.copy(ROOT / "examples" / "car_racing.py", tmp_path)
    train, work = (each.text for each in commands_of("2.") if "car_racing" in each.text)
    port = free_port()
    assert ":4444" in work
    work = work.replace(":4444", f":{port}") + " --json"
    learner = start(tmp_path, "learner", f"{train} --set collect=8 --listen 127.0.0.1:{port}")
    with ended(learner):
        key = tmp_path / "C" / "worker.key"
        wait_for(lambda: key.exists() or learner.poll() is not None)
        workers = [start(tmp_path, f"worker-{index}", work) for index in range(2)]
        with ended(*workers):
            wait_for(lambda: has_learned(port, key.read_text().strip()), timeout_s=300.0)
            # A worker has at most three rounds of the earlier version: two sent, and one it plays.
            steps = arrived_steps(port, key.read_text().strip())
            more = 7 * ROUND_STEPS
            wait_for(
                lambda: arrived_steps(port, key.read_text().strip()) >= steps + more,
                timeout_s=300.0,
            )
            for process in (*workers, learner):
                process.terminate()
            assert [worker.wait(30) for worker in workers] == [0, 0]
            assert learner.wait(60) == 130, (tmp_path / "learner").read_text()
    ends = [json.loads((tmp_path / f"worker-{i}").read_text().splitlines()[-1]) for i in range(2)]
    assert all(worked["steps"] > 0 for worked in ends)
    assert max(worked["version"] for worked in ends) > 1
    with StoreView(tmp_path / "C" / "store") as view:
        (spec,) = view.specs("CarRacing-v3")
    assert spec.obs[""].shape == (57,)


def start(folder: Path, name: str, command: str) -> "subprocess.Popen[str]":
    """A shell command in the folder, whose output is in the file of this name."""
    with (folder / name).open("w") as out:
        return subprocess.Popen(
            ["sh", "-c", f"exec {command}"],
            cwd=folder,
            env=environment(),
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
        )


def has_learned(port: int, key: str) -> bool:
    """Whether enough steps are in the replay, and a worker has received weights newer than those
    with which it joined."""
    sent = re.search(
        r'^understudy_requests_total{.*weights",status="200"} ', metrics_of(port, key), re.M
    )
    return sent is not None and arrived_steps(port, key) >= MIN_STEPS


def arrived_steps(port: int, key: str) -> float:
    steps = re.search(r"^understudy_arrived_steps_total (\S+)", metrics_of(port, key), re.M)
    return 0.0 if steps is None else float(steps[1])


def metrics_of(port: int, key: str) -> str:
    """The metrics of the learner as text; empty while it does not listen yet."""
    try:
        answer = urllib3.request(
            "GET",
            f"http://127.0.0.1:{port}/metrics",
            headers={"authorization": f"Bearer {key}"},
            retries=False,
        )
    except urllib3.exceptions.HTTPError:
        return ""
    return answer.data.decode()
