"""understudy dev servers: local Cassandra, Kafka, Kinesis and S3 for tests and development."""

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from understudy.cli.options import Command, console, examples, finish, json_option
from understudy.core.errors import ServerFailed, UnderstudyError
from understudy.dev import servers as background
from understudy.dev.packages import PACKAGES, cache_folder, cached
from understudy.dev.packages import fetch as fetch_server
from understudy.dev.servers import (
    AWS_COMPATIBLE,
    SERVERS,
    Server,
    fall_back_to_moto,
    is_ready,
    read_state,
    uses_moto,
)

_FAILED = 3
_DIED = 1
_LINE_EVERY_S = 10.0


@click.group(
    epilog=examples("understudy dev servers start", "understudy dev servers status --json")
)
def dev() -> None:
    """Tools for developing with and on understudy."""


@dev.group(epilog=examples("understudy dev servers start", "understudy dev servers stop"))
def servers() -> None:
    """Run real servers on loopback: cassandra, kafka, kinesis, kinesalite, s3."""


def _names(command: Command) -> Command:
    return click.argument("names", nargs=-1, type=click.Choice(SERVERS), metavar="[NAME]...")(
        command
    )


def _folder(command: Command) -> Command:
    return click.option(
        "--folder",
        "folder",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="DIR",
        help="Folder for data, logs and credentials (default: in the user's cache).",
    )(command)


@servers.command(
    epilog=examples(
        "understudy dev servers start",
        "understudy dev servers start kafka --json",
        "understudy dev servers start s3 --folder D",
    )
)
@_names
@_folder
@json_option
def start(names: Sequence[str], folder: Path | None, as_json: bool) -> int:
    """Start servers in the background; by default cassandra, kafka, kinesis and s3.

    Servers that are not in the cache are downloaded first.
    """
    place = _place(folder)
    out = console(as_json=as_json)
    fields: dict[str, Any] = {}
    started: list[Server] = []

    def start_server(name: str) -> Mapping[str, Any]:
        if not is_ready(name):
            _fetch(name, out)
        began_s = time.monotonic()
        before = read_state(place / name)
        with out.status(f"starting {name} ..."):
            server, is_new = background.ensure(name, place)
        if is_new:
            started.append(server)
        line = f"started in {time.monotonic() - began_s:.1f} s" if is_new else "already running"
        if before and is_new and server.place.ports != before["ports"]:
            line += f" at {server.address}: port {before['ports'].get('client')} is in use"
        if name == "s3" and uses_moto():
            line += " (moto, in memory; for persistent data: understudy dev servers fetch s3)"
        out.print(f"  {name:<11}{line}", soft_wrap=True)
        return _fields(server)

    try:
        fields = _each(_in_order(names or background.DEFAULT_SERVERS), start_server, out)
        for server in started:
            server.detach()
    except BaseException:
        for server in started:
            server.stop()
        raise
    if not as_json:
        _show(fields, out)
    return finish(fields, as_json=as_json, code=_code(fields))


@servers.command(
    epilog=examples("understudy dev servers status", "understudy dev servers status kafka --json")
)
@_names
@_folder
@json_option
def status(names: Sequence[str], folder: Path | None, as_json: bool) -> int:
    """Show the state of each server; exits 1 if one died, and shows the end of its log."""
    place = _place(folder)
    statuses = [background.server_status(name, place) for name in _in_order(names or SERVERS)]
    fields = {
        server.name: {
            "state": server.state,
            **(_fields(server.server) if server.server else {}),
            **({"words": server.words} if server.words else {}),
        }
        for server in statuses
    }
    dead = [server for server in statuses if server.state == "died"]
    if not as_json:
        out = console()
        _show(fields, out)
        for server in dead:
            assert server.server is not None
            out.print(
                f"{server.name} died; the end of {server.server.log}:\n{server.words}",
                soft_wrap=True,
                markup=False,
            )
            again = f" --folder {shlex.quote(str(folder))}" if folder else ""
            out.print(
                f"next: understudy dev servers start {server.name}{again}",
                soft_wrap=True,
                markup=False,
            )
    return finish(fields, as_json=as_json, code=_DIED if dead else 0)


@servers.command(
    epilog=examples("understudy dev servers stop", "understudy dev servers stop kafka --erase")
)
@_names
@_folder
@click.option("--erase", is_flag=True, help="Also delete data, log and credentials.")
@json_option
def stop(names: Sequence[str], folder: Path | None, erase: bool, as_json: bool) -> int:
    """Stop servers, by default all of them. Their data remain for the next start."""
    place = _place(folder)
    out = console(as_json=as_json)

    def stop_server(name: str) -> Mapping[str, Any]:
        with out.status(f"stopping {name} ..."):
            ran = background.stop(name, place, erases=erase)
        if ran or names:
            out.print(
                f"  {name:<11}{'stopped' if ran else 'was not running'}"
                f"{', data erased' if erase else ''}"
            )
        return {"stopped": ran}

    fields = _each(_in_order(names or SERVERS), stop_server, out)
    if not names and not any(server.get("stopped", True) for server in fields.values()):
        out.print("  no server was running")
    return finish(fields, as_json=as_json, code=_code(fields))


@servers.command(
    epilog=examples("understudy dev servers fetch", "understudy dev servers fetch cassandra kafka")
)
@_names
@json_option
def fetch(names: Sequence[str], as_json: bool) -> int:
    """Download servers into the cache, by default all of them; cached ones are verified."""
    out = console(as_json=as_json)
    fields = _each(_in_order(names or SERVERS), lambda name: _fetch(name, out), out)
    return finish(fields, as_json=as_json, code=_code(fields))


def _fetch(name: str, out: Console) -> Mapping[str, Any]:
    package = PACKAGES[name]
    if name == "s3" and package.problem() and uses_moto():
        return _moto("Go, which builds versitygw, is not installed", out)
    began_s = time.monotonic()
    title = f"{name:<11}{package.version:<8}"
    is_cached = cached(name) is not None
    work = "checking" if is_cached else f"about {package.size_mib} MiB with {package.tool}"
    if not out.is_terminal and not is_cached:
        out.print(f"  {title}{work} ...", soft_wrap=True)
    parts = 0
    printed_s = began_s
    try:
        with out.status(f"{title}{work} ...") as live:

            def show_part(part: str) -> None:
                """Show each downloaded part in a terminal, or a line every ten seconds."""
                nonlocal parts, printed_s
                parts += 1
                now_s = time.monotonic()
                line = f"{title}{now_s - began_s:.0f} s, {parts} parts, {escape(part[-60:])}"
                live.update(line)
                if not out.is_terminal and now_s - printed_s >= _LINE_EVERY_S:
                    printed_s = now_s
                    out.print(f"  {line}", soft_wrap=True)

            is_new = fetch_server(name, on_part=show_part)
    except ServerFailed as error:
        if name == "s3" and fall_back_to_moto():
            return _moto(f"versitygw could not be built: {error}", out)
        raise
    took_s = time.monotonic() - began_s
    result = f"fetched in {took_s:.0f} s" if is_new else "already cached"
    out.print(f"  {title}{result}", soft_wrap=True)
    return {"version": package.version, "fetched": is_new, "folder": str(cache_folder(name))}


def _moto(reason: str, out: Console) -> Mapping[str, Any]:
    out.print(
        f"  {'s3':<11}using moto, which keeps data in memory: {reason}",
        soft_wrap=True,
        markup=False,
    )
    return {"version": "moto", "fetched": False}


def _each(
    names: Sequence[str], work: Callable[[str], Mapping[str, Any]], out: Console
) -> dict[str, Any]:
    """The result of `work` for each name; a failure is printed, and the other names continue."""
    fields: dict[str, Any] = {}
    for name in names:
        try:
            fields[name] = work(name)
        except (UnderstudyError, OSError) as error:
            advice = (
                "; check that the path is correct, readable and writable"
                if isinstance(error, OSError)
                else ""
            )
            out.print(f"  {name:<11}{error}{advice}", soft_wrap=True, markup=False)
            fields[name] = {"error": f"{error}{advice}"}
    return fields


def _in_order(names: Sequence[str]) -> Sequence[str]:
    return [name for name in SERVERS if name in names]


def _place(folder: Path | None) -> Path:
    return folder.expanduser().absolute() if folder else background.default_folder()


def _fields(server: Server) -> dict[str, Any]:
    fields = {
        "address": server.address,
        "credentials_file": str(server.credentials_file),
        "pid": server.pid,
    }
    return {**fields, "url": server.url} if server.name in AWS_COMPATIBLE else fields


def _code(fields: Mapping[str, Any]) -> int:
    return _FAILED if any("error" in server for server in fields.values()) else 0


def _show(fields: Mapping[str, Any], out: Console) -> None:
    """Print a table that never truncates paths."""
    rows = [("server", "state", "address", "pid", "credentials file")]
    for name, server in fields.items():
        if "error" not in server:
            state = server.get("state", "running")
            last = server.get("words" if state == "unavailable" else "credentials_file", "")
            rows.append((name, state, server.get("address", ""), str(server.get("pid", "")), last))
    for row in rows if len(rows) > 1 else []:
        line = "  ".join(
            f"{cell:<{width}}" for cell, width in zip(row, (10, 11, 15, 7, 0), strict=True)
        )
        out.print(line.rstrip(), soft_wrap=True, markup=False)
