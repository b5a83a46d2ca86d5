"""The benchmark of lanes: a tiny run reports every figure, and names what it left out."""

import json
import subprocess
import sys
from pathlib import Path

from bench.figures import Findings
from bench.lanes import SIZES, Bench

ROOT = Path(__file__).resolve().parents[2]


def test_a_tiny_run_reports_every_count(tmp_path: Path):
    out = tmp_path / "lanes.json"
    command = [sys.executable, str(ROOT / "bench" / "lanes.py"), "--tiny", "--counts", "1,2"]
    subprocess.run([*command, "--out", out], check=True, timeout=250, stdout=subprocess.DEVNULL)
    findings = json.loads(out.read_text())["passes"]["native"]["measurements"]["lanes"]
    figures = {figure["name"]: figure for figure in findings["figures"]}
    assert list(figures) == ["1 lane", "2 lanes"]
    assert all(figure["gate"]["passed"] for figure in figures.values()), figures
    assert all(len(figure["values"]) >= 3 for figure in figures.values())
    assert findings["skipped"] == []
    assert findings["notes"][0].startswith("device: ")
    assert "compilation" in findings["notes"][-1]


def test_a_count_without_time_is_named(tmp_path: Path):
    findings = Findings()
    bench = Bench(ends_s=0.0, is_cpu=True)
    bench.measure(tmp_path, SIZES["tiny"], findings, lanes=2)
    assert findings.figures == []
    assert findings.skipped == ["2 lanes: there was no time left"]
