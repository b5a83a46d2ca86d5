"""The benchmark itself: a tiny run reports every figure with its gate, and leaves no files."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from bench import report
from bench.experience import MEASUREMENTS, PASSES
from bench.figures import Figure, Findings, Gate, Ratio, all_of, in_turn

ROOT = Path(__file__).resolve().parents[2]
GOALS = {
    "game thread, tight loop: p99",
    "game thread, tight loop: p99.99",
    "game thread, 60 Hz, 16 players: p99",
    "encode + spool, 512-step chunks",
    "ingest, 512-step chunks",
    "ingest, 84x84 Atari-like frames",
    "step to sampleable in another process, 20 ms linger: p99",
}
PASSED = Gate(True, "done right")


def run(out: Path, temporary: Path, *options: str) -> dict[str, Any]:
    """One tiny run; its temporary folders must be gone afterwards."""
    temporary.mkdir()
    command = [
        sys.executable,
        str(ROOT / "bench" / "experience.py"),
        "--tiny",
        "--out",
        str(out),
        *options,
    ]
    env = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(temporary.iterdir()) == []
    found: dict[str, Any] = json.loads((out / "experience.json").read_text())
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Result folders of a native run of everything, and of one measurement with slow syncs."""
    folder = tmp_path_factory.mktemp("bench")
    run(folder / "native", folder / "tmp-1", "--pass", "native")
    run(folder / "slow_sync", folder / "tmp-2", "--pass", "slow_sync", "--only", "log")
    return folder


@pytest.fixture(scope="module")
def result(results: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((results / "native" / "experience.json").read_text())
    return found


@pytest.fixture(scope="module")
def slow(results: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((results / "slow_sync" / "experience.json").read_text())
    return found


def test_a_result_names_its_machine_and_versions(result):
    assert result["format"] == 1
    assert result["machine"].keys() >= {"cpu", "cores", "kernel", "python", "versions"}
    assert len(result["load_average_before"]) == len(result["load_average_after"]) == 3
    assert result["date"].startswith("20")
    assert result["commit"]


def test_every_measurement_has_findings(result):
    measurements = result["passes"]["native"]["measurements"]
    assert measurements.keys() == set(MEASUREMENTS)
    assert not [one["error"] for one in measurements.values() if "error" in one]


def test_every_gate_passes_and_every_goal_has_a_verdict(result):
    assert report.is_sound(result)
    figures = {one["name"]: one for _, one in report.figures(result)}
    assert figures.keys() >= GOALS
    assert {figures[goal]["verdict"] for goal in GOALS} <= {"met", "missed"}
    assert all(
        one["gate"]["says"] and one["low"] <= one["median"] <= one["high"]
        for one in figures.values()
    )


def test_each_peer_is_measured_or_skipped_with_a_reason(result):
    measurements = result["passes"]["native"]["measurements"].values()
    ratios = " ".join(ratio["peer"] for one in measurements for ratio in one["ratios"])
    skipped = " ".join(reason for one in measurements for reason in one["skipped"])
    for peer in ("Redis", "LMDB", "SQLite", "JSON"):
        assert peer in ratios or f"{peer}:" in skipped


def test_slow_syncs_are_slow(result, slow):
    assert [*result["passes"], *slow["passes"]] == list(PASSES)
    took = slow["passes"]["slow_sync"]["syncs_ms"]
    assert took["fsync"] >= 10.0
    assert took["fdatasync"] >= 10.0
    assert took.keys() == result["passes"]["native"]["syncs_ms"].keys()


def test_results_name_no_folder_of_this_machine(results):
    text = "".join(path.read_text() for path in results.glob("*/experience.*"))
    assert text
    assert str(ROOT) not in text
    assert tempfile.gettempdir() not in text
    assert str(Path.home()) not in text


def test_a_figure_counts_only_while_its_gate_passes():
    good = Figure(name="speed", unit="steps/s", values=[9.0, 11.0, 12.0], goal=10.0, gate=PASSED)
    assert good.verdict == "met"
    void = Figure(
        name="speed", unit="steps/s", values=[99.0], goal=10.0, gate=all_of(("stored once", False))
    )
    assert void.verdict == "void"
    late = Figure(
        name="lag", unit="ms", values=[200.0], goal=150.0, more_is_better=False, gate=PASSED
    )
    assert late.verdict == "missed"


def test_a_failed_gate_makes_the_run_unsound():
    found = Findings(
        figures=[Figure(name="x", unit="s", values=[1.0], gate=all_of(("right", False)))]
    )
    result = {"passes": {"native": {"measurements": {"x": found.to_json()}, "syncs_ms": {}}}}
    assert not report.is_sound(result)


def test_a_ratio_above_one_means_that_we_are_better():
    faster = Ratio(
        name="rate", peer="p", unit="steps/s", ours=[4.0, 6.0], theirs=[2.0, 2.0], gate=PASSED
    )
    cheaper = Ratio(
        name="cost",
        peer="p",
        unit="ms",
        ours=[1.0],
        theirs=[4.0],
        more_is_better=False,
        gate=PASSED,
    )
    assert faster.times == [2.0, 3.0]
    assert cheaper.times == [4.0]


def test_contestants_take_turns_at_going_first():
    order: list[str] = []
    in_turn(2, {"a": lambda: order.append("a"), "b": lambda: order.append("b")})
    assert order == ["a", "b", "b", "a"]
