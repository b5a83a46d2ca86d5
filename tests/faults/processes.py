"""Real processes: our command line, and children that report lines of JSON."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import understudy as package
from understudy.cli.root import run
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


def understudy_here(*arguments: str | Path) -> Answer:
    """Run our command line with `--json` in this process, where its start would be most of it."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    out = io.StringIO()
    errors = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = run([*(str(one) for one in arguments), "--json"])
    for number, handler in handlers.items():
        signal.signal(number, handler)
    lines = out.getvalue().strip().splitlines()
    return Answer(code, json.loads(lines[-1]) if lines else {}, errors.getvalue())


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
