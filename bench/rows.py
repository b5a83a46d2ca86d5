"""Result files with a row for each run, so that a second call measures only the missing runs."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.machine import commit, machine
from understudy.core.errors import UnderstudyError

Row = Mapping[str, Any]


def read_rows(path: Path, run_of: Callable[[Row], object]) -> list[dict[str, Any]]:
    """The rows of a result file, if it exists; `run_of` raises KeyError for rows of other files."""
    if not path.parent.is_dir():
        raise UnderstudyError(f"the folder {path.parent} does not exist; create it, or pass --out")
    if path.is_dir():
        raise UnderstudyError(f"{path} is a folder; pass a file in it, such as {path / 'out.json'}")
    if not path.exists():
        return []
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
        for row in rows:
            run_of(row)
    except (ValueError, KeyError, TypeError) as error:
        raise UnderstudyError(
            f"{path} is not a result of this command ({error!r}); move it away, or pass another "
            "--out"
        ) from None
    return rows


def kept_rows(rows: Sequence[Row], *, every: bool) -> list[Row]:
    """The rows that are not measured again: those of the checked-out commit, or all of them."""
    here = commit()
    is_known = here != "unknown" and not here.endswith("(changed)")
    return [row for row in rows if every or (is_known and row["commit"] == here)]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write a result, with a description of this machine."""
    result = {"format": 1, "machine": machine(), "rows": rows}
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    temporary.replace(path)
