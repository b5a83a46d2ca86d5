"""The benchmark of actors in processes and workers: a tiny run reports every figure."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.scale import why_skipped

ROOT = Path(__file__).resolve().parents[2]


def test_a_tiny_run_reports_every_figure(tmp_path: Path):
    out = tmp_path / "scale.json"
    command = [sys.executable, str(ROOT / "bench" / "scale.py"), "--tiny", "--out", str(out)]
    subprocess.run(command, check=True, timeout=250, stdout=subprocess.DEVNULL)
    measured = json.loads(out.read_text())["passes"]["native"]["measurements"]["scale"]
    figures = {figure["name"]: figure for figure in measured["figures"]}
    growth = (
        "steps/s, of as many times those of one",
        "steps",
        "updates",
        "most memory of one",
        "largest lag",
    )
    assert list(figures) == [
        *(f"2 processes, steps of 5 ms: {name}" for name in growth),
        "2 processes, steps of 5 ms: start of all until the first round is in",
        *(f"2 workers, steps of 5 ms: {name}" for name in growth),
        "one worker: start until its first round is in the replay",
        "weights of 0.4 MB to 2 workers: p99",
    ]
    assert len(measured["figures"]) == len(figures)
    assert all(figure["gate"]["passed"] for figure in figures.values()), figures
    assert figures["2 processes, steps of 5 ms: most memory of one"]["verdict"] == "met"
    assert figures["2 processes, steps of 5 ms: steps"]["median"] > 0
    assert figures["2 workers, steps of 5 ms: steps"]["median"] > 0
    assert measured["skipped"] == ["every peer: a run for the smoke test"]


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ({"steps_per_s": 800.0, "updates_per_s": 109.0}, None),
        ({"steps_per_s": 800.0, "updates_per_s": 50.0}, None),
        ({"steps_per_s": 800.0, "updates_per_s": 160.0}, "one update per 5.0 steps instead of 8"),
        ({"failed": "no wheel"}, "no wheel"),
    ],
    ids=["one in eight", "fewer", "more", "failed"],
)
def test_a_peer_that_updates_more_often_is_skipped_by_name(
    second: dict[str, float], reason: str | None
):
    assert why_skipped([{"steps_per_s": 800.0, "updates_per_s": 100.0}, second]) == reason
