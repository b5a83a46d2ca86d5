"""Options and output that commands share."""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click
from rich.console import Console

from understudy.app.data import DataFolder, data_folder
from understudy.core.errors import ConfigError

Command = TypeVar("Command", bound=Callable[..., Any])


def examples(*lines: str) -> str:
    """The end of a command's help: command lines to try."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def data_option(command: Command) -> Command:
    """`--data DIR`, also from UNDERSTUDY_DATA."""
    return click.option(
        "--data", "data_text", metavar="DIR", help="The data folder (or set UNDERSTUDY_DATA)."
    )(command)  # fmt: skip


def json_option(command: Command) -> Command:
    """`--json`: one JSON object as the last line of standard output."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")(command)


def folder(text: str | None) -> DataFolder:
    return data_folder(text)


def console(*, as_json: bool = False) -> Console:
    """Where people look: standard output, or standard error when standard output is for a program."""
    return Console(stderr=as_json, highlight=False)


def finish(fields: Mapping[str, Any], *, as_json: bool, code: int = 0) -> int:
    """Print the JSON object when asked for, and give the exit code."""
    if as_json:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()
    return code


def json_object(text: str, flag: str) -> dict[str, Any]:
    """The JSON object that was given to a flag; ConfigError shows what one looks like."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag} is no JSON: {error}; give an object such as '{{\"render_mode\": null}}'") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} is {value!r}; give a JSON object")
    return value


def count(number: float) -> str:
    """A number for people: 12 345."""
    return f"{number:,.0f}".replace(",", " ")


def size(size_bytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024 or unit == "GiB":
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    raise AssertionError
