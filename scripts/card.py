"""The reliability card: for every injected fault, how often it was tried and the guarantee held.

Run as `python scripts/card.py` (or `make card`): the profile `ci` takes minutes, `full` an hour.
Prints a table, saves it as bench/results/card-DATE-TIME-PROFILE.json, and exits 1 if anything
failed. Skipped lines show the reason.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"


@dataclass(slots=True)
class Line:
    """One claim of the card."""

    what: str
    tried: int = 0
    held: int = 0
    seconds: float = 0.0
    outcome: str = "held"
    """`held`, `failed` or `skipped`."""
    note: str = ""


class Collector:
    """A pytest plug-in that turns test reports into lines; lines of the same claim are summed."""

    def __init__(self) -> None:
        self.lines: dict[str, Line] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.split("::", 1)[-1]
        if report.skipped:
            reason = (
                report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            )
            self._line(
                name,
                seconds=report.duration,
                outcome="skipped",
                note=reason.removeprefix("Skipped: "),
            )
        elif report.failed:
            # Counts of a failed test are discarded: it is one attempt that did not hold.
            self._line(
                name,
                tried=1,
                seconds=report.duration,
                outcome="failed",
                note=_last_line(report.longreprtext),
            )
        elif report.when == "call":
            self._passed(name, report)

    def _passed(self, name: str, report: pytest.TestReport) -> None:
        claims: list[Any] = [value for key, value in report.user_properties if key == "card"]
        for at, claim in enumerate(claims):
            # The test's duration is added to its first claim only.
            self._line(**claim, seconds=0.0 if at else report.duration)
        if not claims and "tests/faults/" in report.nodeid:
            file = Path(report.nodeid.split("::")[0]).stem.removeprefix("test_")
            self._line(
                f"{file.replace('_', ' ')}: other tests", tried=1, held=1, seconds=report.duration
            )

    def _line(
        self,
        what: str,
        *,
        tried: int = 0,
        held: int = 0,
        seconds: float = 0.0,
        outcome: str = "held",
        note: str = "",
    ) -> None:
        line = self.lines.setdefault(what, Line(what, note=note))
        line.note = line.note if line.note == note else ""
        line.tried = line.tried + tried
        line.held = line.held + held
        line.seconds = line.seconds + seconds
        if outcome != "held" or line.held < line.tried:
            line.outcome = "failed" if outcome == "held" else outcome


def _last_line(text: str) -> str:
    errors = [line for line in text.splitlines() if line.startswith("E ")]
    return (errors or text.splitlines() or [""])[0].removeprefix("E").strip()[:200]


def run(profile: str, seed: int) -> tuple[int, Collector]:
    """Run the tests of a profile; returns pytest's exit code and the collected lines."""
    os.environ["UNDERSTUDY_FAULT_SEED"] = str(seed)
    if profile == "full":
        os.environ["UNDERSTUDY_BARS"] = "1"
    collector = Collector()
    # Some tests exist in two sizes: the full profile omits the short one.
    choice = (
        ["-m", "card or slow", "-k", "not short"]
        if profile == "full"
        else ["-m", "card and not slow"]
    )
    code = pytest.main(
        [str(ROOT / "tests"), "-q", "-p", "no:cacheprovider", "-n", "2", *choice],
        plugins=[collector],
    )
    return int(code), collector


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    return (
        subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        or "unknown"
    )


def show(lines: Sequence[Line], *, title: str) -> None:
    """Print the card as a table."""
    table = Table(title=title)
    for heading, justify in (
        ("claim", "left"),
        ("tried", "right"),
        ("held", "right"),
        ("s", "right"),
        ("", "left"),
    ):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    colours = {"held": "green", "failed": "red", "skipped": "yellow"}
    for line in lines:
        counts = [f"{line.tried:,}", f"{line.held:,}"] if line.outcome != "skipped" else ["-", "-"]
        outcome = f"[{colours[line.outcome]}]{line.outcome}[/]"
        table.add_row(line.what, *counts, f"{line.seconds:.0f}", f"{outcome} {line.note}".strip())
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--profile", choices=["ci", "full"], default="ci")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    began_s = time.monotonic()
    now = datetime.now(UTC)
    code, collector = run(arguments.profile, arguments.seed)
    lines = list(collector.lines.values())
    seconds = time.monotonic() - began_s
    is_fine = code == 0 and all(line.outcome != "failed" for line in lines) and bool(lines)
    show(
        lines,
        title=f"reliability card, {arguments.profile} profile, seed {arguments.seed}, "
        f"{now:%Y-%m-%d}",
    )
    fields = {
        "commit": _commit(),
        "date": now.isoformat(timespec="seconds"),
        "profile": arguments.profile,
        "seed": arguments.seed,
        "seconds": round(seconds, 1),
        "ok": is_fine,
        "python": platform.python_version(),
        "machine": f"{platform.platform()}, {os.cpu_count()} cores",
        "lines": [asdict(line) for line in lines],
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"card-{now:%Y-%m-%d-%H%M}-{arguments.profile}.json"
    path.write_text(json.dumps(fields, indent=1) + "\n")
    held = sum(line.outcome == "held" for line in lines)
    skipped = sum(line.outcome == "skipped" for line in lines)
    print(
        f"{held} claims held, {len(lines) - held - skipped} failed, {skipped} skipped in "
        f"{seconds / 60:.1f} min; {path}"
    )
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
