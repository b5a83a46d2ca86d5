"""Options and output that commands share."""

import json
import math
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO, TypeVar

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table

from understudy.core.errors import ConfigError
from understudy.core.plural import plural
from understudy.core.settings import parse_value

Command = TypeVar("Command", bound=Callable[..., Any])
State = TypeVar("State")
_UNLIMITED = 10_000
"""Columns in which every table fits."""
PATH = click.Path(path_type=Path)


class FiniteRange(click.FloatRange):
    """A range of finite numbers: click's accept NaN, and infinity where they have no end."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return float(number)


TIMEOUT = FiniteRange(min=0.0, min_open=True)
_json_out: TextIO | None = None
"""Where `print_json` prints while `only_json` reserves standard output."""


def examples(*lines: str) -> str:
    """The epilog of a command's help: example command lines."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def data_option(command: Command) -> Command:
    """Add `--data DIR`; without it, commands read UNDERSTUDY_DATA."""
    return click.option(
        "--data", "data_text", metavar="DIR", help="The data folder (or set UNDERSTUDY_DATA)."
    )(command)


def json_option(command: Command) -> Command:
    """Add `--json`: print one JSON object as the last line of standard output."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON object as the last line of output."
    )(command)


def common_options(command: Command) -> Command:
    """Add `--data DIR` and `--json`."""
    return data_option(json_option(command))


def config_option(command: Command) -> Command:
    """Add `--config FILE`; without it, UNDERSTUDY_CONFIG or the file in the data folder is read."""
    return click.option(
        "--config",
        "file",
        type=PATH,
        metavar="FILE",
        help="A TOML file (or set UNDERSTUDY_CONFIG; default: understudy.toml in the data folder).",
    )(command)


def store_option(command: Command) -> Command:
    """Add `--store URL`; without it, the deployment's own store is used."""
    return click.option(
        "--store",
        "store_url",
        metavar="URL",
        help="The store: cassandra://HOST:PORT/KEYSPACE, or the word `local` for the data folder "
        "(default: the deployment's own).",
    )(command)


def console(*, as_json: bool = False) -> Console:
    """A console on standard output, or on standard error if standard output carries JSON."""
    return Console(stderr=as_json, highlight=False)


def results(*, as_json: bool) -> Console:
    """A console for results on standard output; silent with --json, which prints an object."""
    # A quiet console still parses markup, and a name such as "[/x]" is invalid markup.
    return Console(quiet=as_json, markup=not as_json, highlight=False)


class ResultTable:
    """A table that shortens and breaks no value: if it is too wide, each row is a paragraph."""

    def __init__(self, *headers: str) -> None:
        self._headers = headers
        self._rows: list[tuple[str, ...]] = []

    def add_row(self, *values: str) -> None:
        self._rows.append(values)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(*(header.replace(" ", "\n") for header in self._headers), box=SIMPLE_HEAD)
        for row in self._rows:
            table.add_row(*row)
        width = Measurement.get(console, options.update(width=_UNLIMITED), table).maximum
        if width <= options.max_width:
            yield table
            return
        for name, *values in self._rows:
            named = zip(self._headers[1:], values, strict=True)
            facts = ", ".join(f"{header} {value}" for header, value in named if value)
            yield paragraph(f"{name}: {facts}", width=options.max_width)


def paragraph(text: str, *, width: int, indent: str = "") -> str:
    """A text in lines of whole words; those after the first are indented by two more."""
    return textwrap.fill(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


@contextmanager
def live_view(
    out: Console,
    *,
    draw: Callable[[State], RenderableType],
    line: Callable[[State], str],
    every_s: float,
    has_room: bool,
) -> Iterator[Callable[[State], None]]:
    """Yield a function that shows a state: in a live view if there is room, else as a line."""
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


@contextmanager
def only_json() -> Iterator[None]:
    """Reserve standard output for `print_json`; everything else is printed to standard error.

    That includes what games, C libraries and processes that are started in the block print.
    """
    global _json_out
    ours = sys.stdout
    if ours is None:  # closed by the caller
        yield
        return
    ours.flush()
    with ExitStack() as opened:
        opened.callback(setattr, sys.modules[__name__], "_json_out", None)
        _json_out = ours
        with suppress(OSError, ValueError):  # standard output is closed, or not a file
            copy = os.dup(1)
            opened.callback(os.close, copy)
            if ours.fileno() == 1:
                _json_out = os.fdopen(copy, "w", encoding="utf-8", closefd=False)
        with suppress(OSError, ValueError):
            os.dup2(2, 1)
            opened.callback(os.dup2, copy, 1)
        opened.callback(ours.flush)  # into standard error
        opened.enter_context(redirect_stdout(sys.stderr))
        yield


def print_json(fields: Mapping[str, Any]) -> None:
    """Print one JSON object as a line of standard output."""
    out = _json_out or sys.stdout
    if out is not None:
        out.write(json.dumps(fields) + "\n")
        out.flush()


def finish(fields: Mapping[str, Any], *, as_json: bool, code: int = 0) -> int:
    """Print the JSON object if requested, and return the exit code."""
    if as_json:
        print_json(fields)
    return code


def json_object(text: str, flag: str) -> dict[str, Any]:
    """Parse the JSON object that was passed to a flag; raises ConfigError for anything else."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"{flag} is not valid JSON: {error}; give an object such as '{{\"render_mode\": null}}'"
        ) from None
    if not isinstance(value, dict):
        raise ConfigError(
            f"{flag} is {value!r}; give a JSON object such as '{{\"render_mode\": null}}'"
        )
    return value


def setting_pairs(sets: Sequence[str]) -> dict[str, Any]:
    """The values of --set by name; ConfigError if a name is given twice."""
    texts: dict[str, str] = {}
    for text in sets:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name:
            raise ConfigError(f"--set is {text!r}; give NAME=VALUE, such as learning_rate=0.001")
        if name in texts:
            raise ConfigError(
                f"--set {name} is given twice, as {texts[name]!r} and {value!r}; give it once"
            )
        texts[name] = value
    return {name: parse_value(value) for name, value in texts.items()}


def format_count(number: float) -> str:
    """Format a number for display: 12 345."""
    return f"{number:,.0f}".replace(",", " ")


def count_of(number: float, noun: str, nouns: str = "") -> str:
    """Format a number of things for display: 1 step, 12 345 steps; `nouns`: an unusual plural."""
    return f"{format_count(number)} {plural(number, noun, nouns)}"


def format_size(size_bytes: float) -> str:
    """Format a number of bytes for display: 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024 or unit == "GiB":
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    raise AssertionError


def import_from_here() -> None:
    """Make modules in the current folder importable, so that `module:Class` can name them."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
