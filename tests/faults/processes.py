"""Real processes: our command line, and children that report lines of JSON."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import understudy as package
from understudy.platform.children import Child

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(package.__file__).resolve().parents[1]


def environment() -> dict[str, str]:
    """Ours, with the package under test and the tests importable."""
    path = os.pathsep.join([str(SOURCE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "default"}


@dataclass(frozen=True, slots=True)
class Answer:
    """How a command ended; `fields` is the JSON object of its last line."""

    code: int
    fields: Mapping[str, Any]
    errors: str


def understudy(*arguments: str | Path, timeout_s: float = 120.0) -> Answer:
    """Run our command line with `--json`."""
    command = [
        sys.executable,
        "-m",
        "understudy.cli.main",
        *(str(one) for one in arguments),
        "--json",
    ]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=timeout_s, check=False
    )
    lines = done.stdout.strip().splitlines()
    return Answer(done.returncode, json.loads(lines[-1]) if lines else {}, done.stderr)


def start(module: str, settings: object) -> Child:
    """Start one of our modules as a process that takes its settings as JSON."""
    text = settings if isinstance(settings, str) else json.dumps(settings)
    # Child hands its own environment on; the source tree has to be in ours.
    os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]
    return Child(module, [sys.executable, "-m", module, text])


def wait_until(done: Callable[[], bool], *, timeout_s: float, what: str) -> None:
    """Poll every few milliseconds until the condition is true; the error names it."""
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {timeout_s} s")
        time.sleep(0.01)
