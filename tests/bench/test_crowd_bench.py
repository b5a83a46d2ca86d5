"""The crowd benchmark: a tiny run beside another checkout reports every figure."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOALS = {
    "descriptors": 64.0,
    "most memory": 150.0,
    "episode(): p99": 1.0,
    "dropped steps": 0.0,
}


def test_a_tiny_run_reports_every_figure_beside_another_checkout(tmp_path: Path) -> None:
    out = tmp_path / "crowd.json"
    command = [sys.executable, str(ROOT / "bench" / "crowd.py"), "--tiny", "--out", str(out)]
    command += ["--before", str(ROOT / "src")]
    env = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert list(tmp_path.iterdir()) == [out]
    found = json.loads(out.read_text())["passes"]["native"]["measurements"]["crowd"]
    goals = {
        figure["name"].partition(": ")[2]: figure["goal"]
        for figure in found["figures"]
        if figure["goal"] is not None
    }
    assert goals == GOALS
    assert all(figure["gate"]["passed"] for figure in found["figures"])
    (ratio,) = found["ratios"]
    assert ratio["name"] == "game thread, 60 Hz, 16 players: p99"
