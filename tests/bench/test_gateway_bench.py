"""The gateway benchmark: a tiny run reports every figure with its gate and leaves no files."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOALS = {
    "p99 ack": 250.0,
    "memory of the gateway: growth": 10.0,
    "gateway CPU": 250.0,
    "waiting workers: p99": 100.0,
}


def test_a_tiny_run_reports_every_figure_and_its_peer_and_loses_nothing(tmp_path: Path) -> None:
    out = tmp_path / "gateway.json"
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    command = [sys.executable, str(ROOT / "bench" / "gateway.py"), "--tiny", "--out", str(out)]
    env = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(ROOT / "src")}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert list(temporary.iterdir()) == []
    found = json.loads(out.read_text())["passes"]["native"]["measurements"]["gateway"]
    goals = {
        figure["name"]: figure["goal"] for figure in found["figures"] if figure["goal"] is not None
    }
    assert {
        next(goal for name, goal in goals.items() if name.endswith(end)) for end in GOALS
    } == set(GOALS.values())
    assert all(figure["gate"]["passed"] for figure in found["figures"])
    assert [
        ratio["peer"].startswith("the seed's pickle over TCP") for ratio in found["ratios"]
    ] == [True] * 3
