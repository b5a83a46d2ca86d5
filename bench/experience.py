"""Measures the path of experience: recording, ingest, storing and reading, against its peers.

    python bench/experience.py                  both passes, about seven minutes; writes
                                                bench/results/
    python bench/experience.py --quick          about a minute; writes nothing
                                                unless --out is given
    python bench/experience.py --only ingest    one measurement

Every measurement runs in its own process, twice: with normal syncs, and with 10 ms added to each
sync. A figure counts only if its gate passes. Temporary folders and servers are removed after each
measurement, also on Ctrl-C.
"""

import argparse
import contextlib
import datetime
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Run as a file, sys.path starts with bench/; replace it with the folder that contains bench/.
    sys.path[0] = str(ROOT)

from bench import machine, slow_sync  # noqa: E402
from bench.figures import Findings  # noqa: E402
from bench.sizes import SCALES  # noqa: E402

MEASUREMENTS = ("recorder", "codec", "ingest", "lag", "log", "store")
PASSES = ("native", "slow_sync")
RESULTS = ROOT / "bench" / "results"
_CHILD_S = 400.0


def main() -> int:
    """Run the requested measurements; 0 if every gate passed."""
    options = _options()
    # On SIGTERM, a measurement exits through its context managers, which stop servers and remove
    # folders.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.child:
        return _child(options)
    from bench import report  # late: it imports rich, which a measurement does not need

    began_s = time.monotonic()
    requested = options.only or list(MEASUREMENTS)
    result: dict[str, Any] = {
        "format": 1,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": machine.commit(),
        "scale": options.scale,
        "load_average_before": machine.load_average(),
        "machine": machine.machine(),
        "passes": {},
    }
    with _temporary() as folder:
        for name in options.passes:
            result["passes"][name] = _pass(name, requested, options.scale, folder)
    result["machine"] = machine.machine()
    result["load_average_after"] = machine.load_average()
    result["seconds"] = round(time.monotonic() - began_s, 1)
    out = options.out or (RESULTS if options.scale == "full" and not options.only else None)
    if out is not None:
        report.save(result, out)
    report.show(result)
    return 0 if report.is_sound(result) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", dest="scale", action="store_const", const="quick", default="full"
    )
    parser.add_argument(
        "--tiny", dest="scale", action="store_const", const="tiny", help="for the smoke test"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=MEASUREMENTS,
        metavar="NAME",
        help=", ".join(MEASUREMENTS),
    )
    parser.add_argument(
        "--pass",
        dest="passes",
        action="append",
        choices=PASSES,
        help="native or slow_sync (default: both)",
    )
    parser.add_argument("--out", type=Path, help="folder for experience.json and experience.md")
    parser.add_argument("--child", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.passes = options.passes or list(PASSES)
    return options


@contextlib.contextmanager
def _temporary() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="understudy-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _pass(name: str, requested: list[str], scale: str, folder: Path) -> dict[str, Any]:
    """All measurements, with normal or slow syncs."""
    environment = dict(os.environ)
    # Child processes import understudy and bench from the same folders as this process.
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(ROOT), environment.get("PYTHONPATH")))
    )
    if name == "slow_sync":
        environment |= slow_sync.environment(folder)
    delayed = slow_sync.reaches(environment) if name == "slow_sync" else ""
    result: dict[str, Any] = {"delayed": delayed, "syncs_ms": {}, "measurements": {}}
    for measurement in requested:
        began_s = time.monotonic()
        print(f"{name:<10} {measurement:<10}", end="", flush=True)
        answer = _run(measurement, folder / f"{name}-{measurement}", scale, environment)
        result["syncs_ms"] = answer.pop("syncs_ms", {}) or result["syncs_ms"]
        result["measurements"][measurement] = answer
        print(
            f"{time.monotonic() - began_s:6.1f} s{'  FAILED' if 'error' in answer else ''}",
            flush=True,
        )
    return result


def _run(measurement: str, folder: Path, scale: str, environment: dict[str, str]) -> dict[str, Any]:
    """Run one measurement in its own process; returns an error instead of findings if it fails."""
    folder.mkdir()
    command = [
        sys.executable,
        str(ROOT / "bench" / "experience.py"),
        "--child",
        measurement,
        str(folder),
    ]
    process = subprocess.Popen(
        [*command, f"--{scale}"] if scale != "full" else command, env=environment
    )
    try:
        code = process.wait(_CHILD_S)
    except subprocess.TimeoutExpired:
        return Findings().to_json() | {"error": f"took longer than {_CHILD_S:.0f} s"}
    finally:
        # Terminated first, so that it stops its servers and children; killed if it does not end.
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20.0)
            process.kill()
            process.wait()
        answer = folder / "findings.json"
        text = answer.read_text() if answer.exists() else ""
        shutil.rmtree(folder, ignore_errors=True)
    if code or not text:
        return Findings().to_json() | {"error": f"ended with code {code}"}
    findings: dict[str, Any] = json.loads(text)
    return findings


def _child(options: argparse.Namespace) -> int:
    measurement = options.child[0]
    folder = Path(options.child[1])
    slow_sync.obey()
    syncs_ms = slow_sync.reach(folder)
    work = folder / "work"
    work.mkdir()
    findings = importlib.import_module(f"bench.{measurement}").measure(work, SCALES[options.scale])
    (folder / "findings.json").write_text(json.dumps(findings.to_json() | {"syncs_ms": syncs_ms}))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
