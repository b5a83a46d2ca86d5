"""understudy dev servers: real Cassandra, Kafka, Kinesis and S3 servers on this machine, for
tests and development."""

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
from understudy.dev.packages import PACKAGES, cached, place_of
from understudy.dev.packages import fetch as fetch_one
from understudy.dev.servers import (
    AWS_SHAPED,
    SERVERS,
    Server,
    give_up_on_versity,
    is_ready,
    read_state,
    uses_moto,
)

_FAILED = 3
_DIED = 1
_TELL_S = 10.0


@click.group(
    epilog=examples("understudy dev servers start", "understudy dev servers status --json")
)
def dev() -> None:
    """For people who develop with or on understudy."""


@dev.group(epilog=examples("understudy dev servers start", "understudy dev servers stop"))
def servers() -> None:
    """Real servers on this machine, on loopback alone: cassandra, kafka, kinesis, kinesalite,
    s3."""


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
        help="Where data, logs and credentials lie (default: in the user's cache).",
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
    """Start servers in the background; without NAME cassandra, kafka, kinesis and s3. What is
    missing is fetched."""
    place = _place(folder)
    out = console(as_json=as_json)
    fields: dict[str, Any] = {}
    begun: list[Server] = []

    def one(name: str) -> Mapping[str, Any]:
        if not is_ready(name):
            _fetch(name, out)
        began_s = time.monotonic()
        before = read_state(place / name)
        with out.status(f"starting {name} ..."):
            server, is_new = background.ensure(name, place)
        if is_new:
            begun.append(server)
        took = f"started in {time.monotonic() - began_s:.1f} s" if is_new else "runs already"
        if before and is_new and server.place.ports != before["ports"]:
            took += (
                f" at {server.address}, since others use its port {before['ports'].get('client')}"
            )
        if name == "s3" and uses_moto():
            took += " (moto, in memory; versitygw keeps data: understudy dev servers fetch s3)"
        out.print(f"  {name:<11}{took}", soft_wrap=True)
        return _fields(server)

    try:
        fields = _each(_in_order(names or background.USUAL), one, out)
        for server in begun:
            server.detach()
    except BaseException:
        for server in begun:
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
    """Show which servers run, and the last words of one that died (then the exit code is 1)."""
    place = _place(folder)
    found = [background.look(name, place) for name in _in_order(names or SERVERS)]
    fields = {
        one.name: {
            "state": one.state,
            **(_fields(one.server) if one.server else {}),
            **({"words": one.words} if one.words else {}),
        }
        for one in found
    }
    if not as_json:
        out = console()
        _show(fields, out)
        for one in found:
            if one.state == "died" and one.server is not None:
                out.print(
                    f"{one.name} died; {one.server.log} ends:\n{one.words}",
                    soft_wrap=True,
                    markup=False,
                )
                again = f" --folder {shlex.quote(str(folder))}" if folder else ""
                out.print(
                    f"next: understudy dev servers start {one.name}{again}",
                    soft_wrap=True,
                    markup=False,
                )
    return finish(
        fields, as_json=as_json, code=_DIED if any(one.state == "died" for one in found) else 0
    )


@servers.command(
    epilog=examples("understudy dev servers stop", "understudy dev servers stop kafka --erase")
)
@_names
@_folder
@click.option("--erase", is_flag=True, help="Remove data, log and credentials, too.")
@json_option
def stop(names: Sequence[str], folder: Path | None, erase: bool, as_json: bool) -> int:
    """Stop servers; without NAME all of them. Data stay for the next start."""
    place = _place(folder)
    out = console(as_json=as_json)

    def one(name: str) -> Mapping[str, Any]:
        with out.status(f"stopping {name} ..."):
            ran = background.stop(name, place, erases=erase)
        if ran or names:
            out.print(
                f"  {name:<11}{'stopped' if ran else 'did not run'}"
                f"{', data erased' if erase else ''}"
            )
        return {"stopped": ran}

    fields = _each(_in_order(names or SERVERS), one, out)
    if not names and not any(one.get("stopped", True) for one in fields.values()):
        out.print("  no server ran")
    return finish(fields, as_json=as_json, code=_code(fields))


@servers.command(
    epilog=examples("understudy dev servers fetch", "understudy dev servers fetch cassandra kafka")
)
@_names
@json_option
def fetch(names: Sequence[str], as_json: bool) -> int:
    """Download servers into the cache; without NAME all of them. What is there already is
    checked byte by byte."""
    out = console(as_json=as_json)
    fields = _each(_in_order(names or SERVERS), lambda name: _fetch(name, out), out)
    return finish(fields, as_json=as_json, code=_code(fields))


def _fetch(name: str, out: Console) -> Mapping[str, Any]:
    package = PACKAGES[name]
    if name == "s3" and package.trouble() and uses_moto():
        return _moto("there is no Go here to build versitygw with", out)
    began_s = time.monotonic()
    what = f"{name:<11}{package.version:<8}"
    is_there = cached(name) is not None
    doing = (
        f"{what}{'checking' if is_there else f'about {package.size_mib} MiB by {package.tool}'} ..."
    )
    if not out.is_terminal and not is_there:
        out.print(f"  {doing}", soft_wrap=True)
    parts = 0
    told_s = began_s
    try:
        with out.status(doing) as shown:

            def tell(part: str) -> None:
                """Show each part as it comes: in place in a terminal, now and then as a line
                elsewhere."""
                nonlocal parts, told_s
                parts += 1
                now_s = time.monotonic()
                said = f"{what}{now_s - began_s:.0f} s, {parts} parts, {escape(part[-60:])}"
                shown.update(said)
                if not out.is_terminal and now_s - told_s >= _TELL_S:
                    told_s = now_s
                    out.print(f"  {said}", soft_wrap=True)

            is_new = fetch_one(name, tell=tell)
    except ServerFailed as error:
        if name == "s3" and give_up_on_versity():
            return _moto(f"versitygw could not be built: {error}", out)
        raise
    took_s = time.monotonic() - began_s
    out.print(f"  {what}{f'fetched in {took_s:.0f} s' if is_new else 'is there'}", soft_wrap=True)
    return {"version": package.version, "fetched": is_new, "folder": str(place_of(name))}


def _moto(reason: str, out: Console) -> Mapping[str, Any]:
    out.print(f"  {'s3':<11}moto will serve it, in memory: {reason}", soft_wrap=True, markup=False)
    return {"version": "moto", "fetched": False}


def _each(
    names: Sequence[str], work: Callable[[str], Mapping[str, Any]], out: Console
) -> dict[str, Any]:
    """What the work gave for each name; one that fails is shown and does not hold up the others."""
    fields: dict[str, Any] = {}
    for name in names:
        try:
            fields[name] = work(name)
        except (UnderstudyError, OSError) as error:
            advice = (
                "; check that the path is right and may be read and written"
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
    return {**fields, "url": server.url} if server.name in AWS_SHAPED else fields


def _code(fields: Mapping[str, Any]) -> int:
    return _FAILED if any("error" in one for one in fields.values()) else 0


def _show(fields: Mapping[str, Any], out: Console) -> None:
    """A table whose paths are never cut."""
    rows = [("server", "state", "address", "pid", "credentials file")]
    for name, one in fields.items():
        if "error" not in one:
            state = one.get("state", "running")
            last = (
                one.get("words", "") if state == "unavailable" else one.get("credentials_file", "")
            )
            rows.append((name, state, one.get("address", ""), str(one.get("pid", "")), last))
    for row in rows if len(rows) > 1 else []:
        line = "  ".join(
            f"{cell:<{width}}" for cell, width in zip(row, (10, 11, 15, 7, 0), strict=True)
        )
        out.print(line.rstrip(), soft_wrap=True, markup=False)
