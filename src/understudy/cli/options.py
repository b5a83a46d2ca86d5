"""Options and output that commands share."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console, RenderableType
from rich.live import Live

from understudy.core.errors import ConfigError

Command = TypeVar("Command", bound=Callable[..., Any])
State = TypeVar("State")
PATH = click.Path(path_type=Path)


def examples(*lines: str) -> str:
    """The end of a command's help: command lines to try."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def data_option(command: Command) -> Command:
    """`--data DIR`, also from UNDERSTUDY_DATA."""
    return click.option(
        "--data", "data_text", metavar="DIR", help="The data folder (or set UNDERSTUDY_DATA)."
    )(command)


def json_option(command: Command) -> Command:
    """`--json`: one JSON object as the last line of standard output."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON object as the last line."
    )(command)


def common_options(command: Command) -> Command:
    """`--data DIR` and `--json`."""
    return data_option(json_option(command))


def config_option(command: Command) -> Command:
    """`--config FILE`, also from UNDERSTUDY_CONFIG, else the one in the data folder."""
    return click.option(
        "--config",
        "file",
        type=PATH,
        metavar="FILE",
        help="A TOML file (or set UNDERSTUDY_CONFIG; default: understudy.toml in the data folder).",
    )(command)


def store_option(command: Command) -> Command:
    """`--store URL`, else the deployment's own."""
    return click.option(
        "--store",
        "store_url",
        metavar="URL",
        help="cassandra://HOST:PORT/KEYSPACE, or local (default: the deployment's own).",
    )(command)


def console(*, as_json: bool = False) -> Console:
    """Where people look: standard output, or standard error when standard output is for a
    program."""
    return Console(stderr=as_json, highlight=False)


def results(*, as_json: bool) -> Console:
    """For what a command found: standard output, or nowhere when a JSON object says the same."""
    # A quiet console still parses markup, and a name such as "[/x]" is none.
    return Console(quiet=as_json, markup=not as_json, highlight=False)


@contextmanager
def watching(
    out: Console,
    *,
    draw: Callable[[State], RenderableType],
    line: Callable[[State], str],
    every_s: float,
    has_room: bool,
) -> Iterator[Callable[[State], None]]:
    """Show each new state until the block ends: as a picture where there is room, else as a line
    now and then."""
    next_s = 0.0

    def print_line(state: State) -> None:
        nonlocal next_s
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + every_s
            out.print(line(state), soft_wrap=True)

    if not has_room:
        yield print_line
        return
    with Live(console=out, refresh_per_second=10, transient=True) as live:
        yield lambda state: live.update(draw(state))


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
        raise ConfigError(
            f"{flag} is no JSON: {error}; give an object such as '{{\"render_mode\": null}}'"
        ) from None
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


def import_from_here() -> None:
    """Let `module:Class` name what lies in the folder the command was called in."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
