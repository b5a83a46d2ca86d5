"""The benchmark of tuning: a tiny run reports every figure."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_tiny_run_reports_every_figure(tmp_path: Path):
    out = tmp_path / "tune.json"
    command = [sys.executable, str(ROOT / "bench" / "tune.py"), "--tiny", "--out", str(out)]
    subprocess.run(command, check=True, timeout=250, stdout=subprocess.DEVNULL)
    measured = json.loads(out.read_text())["passes"]["native"]["measurements"]["tune"]
    figures = {figure["name"]: figure for figure in measured["figures"]}
    assert list(figures) == [
        "a study with one empty trial: the whole command",
        "a further empty trial",
        "E1: trials per hour on two cores",
        "E1: iterations per processor second",
        "E1: mean return of the best quarter",
        "returns in lanes",
        "returns of runs alone",
        "seconds of these runs, in lanes and alone",
    ]
    assert all(figure["gate"]["passed"] for figure in figures.values()), figures
    assert len(figures["returns in lanes"]["values"]) == 2
    assert measured["ratios"] == []
