"""The seed's pipeline as an example, and the backends benchmark: both run unchanged."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.platforms import wait_for
from understudy.dev.servers import unavailable_reason

ROOT = Path(__file__).resolve().parents[2]


def must_have(*servers: str) -> None:
    if reasons := [reason for name in servers if (reason := unavailable_reason(name))]:
        pytest.skip("; ".join(reasons))


def test_the_seeds_client_learns_on_the_whole_stack_and_draws_its_returns(tmp_path: Path):
    """Takes over 20 seconds: servers start, and a bot improves measurably."""
    must_have("kinesalite", "cassandra", "s3")
    command: list[str | Path] = [
        sys.executable,
        ROOT / "examples" / "seed_pipeline" / "stack.py",
        "--seconds",
        "300",
        "--until",
        "100",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "returns.png").read_bytes().startswith(b"\x89PNG")
    bot = re.search(r"bot (\d+); plot saved to", done.stdout)
    stored = re.search(r"(\d+) steps are in Cassandra", done.stdout)
    assert bot is not None
    assert int(bot[1]) >= 100, done.stdout[-1000:]
    assert stored is not None
    assert int(stored[1]) > 1_000


def test_all_processes_of_the_pipeline_end_if_it_is_killed(tmp_path: Path):
    must_have("kinesalite", "cassandra", "s3")
    pipeline = subprocess.Popen(
        [sys.executable, ROOT / "examples" / "seed_pipeline" / "stack.py"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with pipeline:
        assert pipeline.stdout is not None
        line = pipeline.stdout.readline()
        while line and "the platform runs at" not in line:
            line = pipeline.stdout.readline()
        try:
            assert line, "it ended"
            assert processes_of(tmp_path)
        finally:
            pipeline.kill()
    wait_for(lambda: not processes_of(tmp_path), timeout_s=120)


def processes_of(folder: Path) -> list[int]:
    """The processes whose command line names this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if os.fsencode(folder) in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@pytest.mark.slow  # `make bench` runs the same at full size
def test_the_backends_benchmark_passes_its_gates(tmp_path: Path):
    """Takes over 20 seconds: servers start, and a bot improves measurably."""
    must_have("kinesalite", "cassandra", "kafka")
    out = tmp_path / "backends.json"
    command: list[str | Path] = [
        sys.executable,
        ROOT / "bench" / "backends.py",
        "--tiny",
        "--out",
        out,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(out.read_text())["passes"]["native"]["measurements"]["backends"]
    assert {figure["gate"]["passed"] for figure in found["figures"]} == {True}
    assert found["skipped"] == []
    peers = [ratio for ratio in found["ratios"] if ratio["peer"] != "our Spark job"]
    assert len(peers) == 3
    assert min(ratio["median"] for ratio in peers) > 1
