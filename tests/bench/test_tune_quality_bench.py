"""The benchmark of searches of fixed time: a tiny run, and how studies are compared."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.contestants import python_of
from bench.figures import Findings
from bench.tune_quality import OURS, SIZES, StudyOutcome, core_pairs, merit, report

ROOT = Path(__file__).resolve().parents[2]


def test_a_tiny_run_searches_and_trains_the_winner_again(tmp_path: Path):
    out = tmp_path / "quality.json"
    command = [sys.executable, str(ROOT / "bench" / "tune_quality.py"), "--tiny", "--out", str(out)]
    subprocess.run(command, check=True, timeout=250, stdout=subprocess.DEVNULL)
    findings = json.loads(out.read_text())["passes"]["native"]["measurements"]["tune-quality"]
    values = {figure["name"]: figure["values"] for figure in findings["figures"]}
    assert list(values) == [
        "E2: understudy: held-out return of the winner",
        "E2: understudy: time to reach the cap",
        "E2: understudy: trials in time",
    ]
    assert values["E2: understudy: trials in time"] == [1]
    assert values["E2: understudy: held-out return of the winner"][0] > 0


def study(score: float, reached_s: float) -> StudyOutcome:
    return StudyOutcome(
        score=score, reached_s=reached_s, n_trials=9, n_winner_seeds=10, versions="x 1"
    )


def test_scores_count_below_the_cap_and_times_at_it():
    ordered = [study(150, 5), study(198.9, 60), study(200, 60), study(199.1, 20), study(200, 10)]
    merits = [merit(each, 60.0) for each in ordered]
    assert merits == sorted(merits)
    assert len({*merits}) == len(merits)


def test_the_report_has_the_probability_with_its_bounds_beside_each_peer():
    findings = Findings()
    studies = {
        OURS: [study(200, 10 + number) for number in range(10)],
        "peer": [study(190, 40)] * 9 + [study(200, 15.5)],
    }
    report(studies, SIZES["full"], findings)
    figures = {figure.name: figure for figure in findings.figures}
    better = figures["E2: probability of improvement over peer"]
    assert better.values == [0.96]
    assert better.verdict == "met"
    assert 0.5 < figures["E2: probability of improvement over peer, lower bound"].values[0] < 0.96
    assert findings.ratios[0].times[0] == 4.0


def test_each_study_at_once_has_two_cores_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5, 6}, raising=False)
    assert core_pairs(2) == [[0, 1], [4, 5]]
    with pytest.raises(SystemExit, match="--at-once is 3, and there are 5 cores"):
        core_pairs(3)


def test_peers_run_in_this_interpreter_if_they_are_here(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("UNDERSTUDY_PEERS", "here")
    assert python_of("tuners") == Path(sys.executable)
