"""Rows from files, which a custom class trains on in place of an env."""

import csv
import json
from pathlib import Path
from typing import Any

from understudy.core.errors import ConfigError
from understudy.core.wording import shortened

ROWS_FILES = (".json", ".jsonl", ".csv", ".txt")


def is_rows_file(environment: str) -> bool:
    """Whether an environment is a file of rows, and not the id of an env."""
    return Path(environment).suffix.lower() in ROWS_FILES or Path(environment).is_file()


def read_rows(path: Path) -> list[Any]:
    """The rows of a file: values of JSON lines or of a JSON list, dicts of a CSV file, or lines.

    The first line of a CSV file has the names; a value that looks like a number is one.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the rows in {path} cannot be read: {error}; give a text file") from None
    suffix = path.suffix.lower()
    if suffix == ".csv":
        return [
            {name: _number(value) for name, value in row.items()}
            for row in csv.DictReader(text.splitlines())
        ]
    lines = [line for line in text.splitlines() if line.strip()]
    if suffix not in (".json", ".jsonl"):
        return lines
    try:
        if text.lstrip().startswith("["):
            return list(json.loads(text))
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise ConfigError(
            f"{path} has neither a JSON list nor one JSON value per line: "
            f"{shortened(str(error), 200)}; correct it there"
        ) from None


def _number(value: Any) -> Any:
    for kind in (int, float):
        try:
            return kind(value)
        except (TypeError, ValueError):
            continue
    return value
