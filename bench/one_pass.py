"""Runs a benchmark that has one pass: reads its options, writes its result, prints its table."""

import argparse
import datetime
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bench import machine, report
from bench.figures import Findings

RESULTS = Path(__file__).resolve().parent / "results"

Size = TypeVar("Size")


def run_once(
    name: str,
    *,
    about: str | None,
    sizes: Mapping[str, Size],
    parts: Mapping[str, Callable[[Path, Size, Findings], None]],
    arguments: Sequence[str] | None = None,
    saves_each_part: bool = False,
) -> int:
    """Measure each part in its own folder and print the findings; 0 if every gate passed.

    A full run writes bench/results/NAME.json, with `saves_each_part` after each part. `arguments`
    replace those of the command line.
    """
    options = _options(about, arguments)
    began_s = time.monotonic()
    before = machine.load_average()
    findings = Findings()
    out = options.out or (RESULTS / f"{name}.json" if options.size == "full" else None)

    def result_so_far() -> dict[str, Any]:
        return {
            "format": 1,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": machine.commit(),
            "scale": options.size,
            "machine": machine.machine(),
            "load_average_before": before,
            "load_average_after": machine.load_average(),
            "seconds": round(time.monotonic() - began_s, 1),
            "passes": {
                "native": {
                    "delayed": "",
                    "syncs_ms": {},
                    "measurements": {name: findings.to_json()},
                }
            },
        }

    def save(result: dict[str, Any]) -> None:
        if out is not None:
            out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")

    with tempfile.TemporaryDirectory(prefix="understudy-bench-") as folder:
        for part, measure in parts.items():
            measure(Path(folder) / part, sizes[options.size], findings)
            print(f"{part:<10} measured after {time.monotonic() - began_s:5.1f} s", flush=True)
            if saves_each_part:
                save(result_so_far())
    result = result_so_far()
    save(result)
    report.show(result)
    return 0 if report.is_sound(result) else 1


def _options(about: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", dest="size", action="store_const", const="quick", default="full")
    parser.add_argument(
        "--tiny", dest="size", action="store_const", const="tiny", help="for the smoke test"
    )
    parser.add_argument("--out", type=Path, help="file for the result")
    return parser.parse_args(arguments)
