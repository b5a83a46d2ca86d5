"""Starts local servers and finds them again: Cassandra, Kafka, two kinds of Kinesis, S3.

Each server has one folder: data, settings, log, and random credentials that only their owner can
read. Background servers, which outlive their command, have subfolders of one common folder.
"""

import configparser
import contextlib
import errno
import json
import os
import secrets
import shutil
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

from understudy.core.errors import ConfigError, ServerFailed, StorageFull
from understudy.core.location import Location
from understudy.core.log import FileLock, write_file
from understudy.dev.packages import (
    PACKAGES,
    cache_folder,
    cache_root,
    cached,
    find,
    server_environment,
)
from understudy.dev.process import Identity, Process, free_ports, is_free, listens, spawn
from understudy.dev.recipes import MOTO, RECIPES, Recipe, ServerFolder

SERVERS = tuple(RECIPES)
DEFAULT_SERVERS = ("cassandra", "kafka", "kinesis", "s3")
"""The servers that start by default."""
AWS_COMPATIBLE = ("kinesis", "kinesalite", "s3")
STATE = "server.json"
_START_S = 240.0
_STOP_S = 30.0
_AGAIN_S = 0.1
_LAST_LINES = 12
_OTHER_START_S = 600.0
"""How long to wait for another start or stop of the same server; longer than either takes."""
_USER = "understudy"
_REGION = "us-east-1"
_AWS_KEYS = ("access_key_id", "secret_access_key")


def recipe_of(name: str) -> Recipe:
    """The recipe of a server; S3 uses moto if versitygw is not cached and cannot be built."""
    if name not in RECIPES:
        raise ConfigError(f"unknown server {name!r}; give one of {', '.join(RECIPES)}")
    return MOTO if name == "s3" and uses_moto() else RECIPES[name]


def uses_moto() -> bool:
    """Whether S3 is moto here: versitygw is not cached, and cannot be built or failed to build."""
    return cached("s3") is None and (find("go") is None or _no_versity().exists())


def fall_back_to_moto() -> bool:
    """Use moto for S3 until versitygw is fetched; False if moto is not installed."""
    if MOTO.problem():
        return False
    _no_versity().touch()
    return True


def _no_versity() -> Path:
    return cache_folder("s3").with_name("s3.failed")


def unavailable_reason(name: str) -> str | None:
    """Why a server cannot run on this machine, with the next step; None if it can."""
    if sys.platform == "win32":
        return f"{name} runs on Linux and macOS only; use the address of a remote server"
    if problem := recipe_of(name).problem():
        return f"{name}: {problem}"
    if is_ready(name):
        return None
    package = PACKAGES[name]
    next_step = package.problem() or f"run: understudy dev servers fetch {name}"
    return f"{name} {package.version} is not in the cache; {next_step}"


def is_ready(name: str) -> bool:
    """Whether a server can start without a download."""
    return cached(name) is not None or (name == "s3" and uses_moto())


class Server:
    """A running server; as a context manager, it is stopped on exit."""

    def __init__(self, name: str, place: ServerFolder, *, process: Process) -> None:
        self.name = name
        self.place = place
        self.address = place.address
        """ "127.0.0.1:PORT", where clients connect."""
        self.url = place.url
        """The same as a URL, for servers that use HTTP."""
        self.credentials = place.credentials
        """username and password, or access_key_id, secret_access_key and region."""
        self.credentials_file = place.credentials_file
        """The same as a file that only its owner can read."""
        self.log = place.folder / "log"
        """The log file, with the output of all starts."""
        self._recipe = recipe_of(name)
        self._process = process

    @property
    def pid(self) -> int:
        """Its process id; 0 after it was stopped."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive

    def kill(self) -> None:
        """Kill it with SIGKILL; returns when it has ended. Its data remain."""
        self._process.kill()

    def restart(self) -> None:
        """Start it again on the same ports and data; stops it first if it is running."""
        self._process.terminate(timeout_s=_STOP_S)
        self._process = _run(self.name, self._recipe, self.place)

    def stop(self) -> None:
        """Stop it gracefully; ServerFailed if it does not end. May be called twice."""
        self._process.terminate(timeout_s=_STOP_S)
        if self.is_alive:
            raise ServerFailed(
                f"{self.name} (pid {self.pid}) does not end; inspect it: ps -p {self.pid}"
            )
        self._process = Process(Identity(0, ""))
        # If this fails (full disk, deleted folder), the server is later reported as died.
        with contextlib.suppress(OSError):
            _write_state(self.name, self.place.folder, self.place.ports, self._process.identity)

    def detach(self) -> None:
        """Keep the server running after this process exits; `attach` finds it again."""
        self._process.release()

    def __enter__(self) -> "Server":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def start(name: str, folder: Path, *, ports: Mapping[str, int] | None = None) -> Server:
    """Start a server with all its files in `folder`; it ends with this process.

    In a folder that a server of this name used before, it keeps its data, credentials and ports.
    `ports` sets ports of the recipe ("client" is the one that clients use); the others are free
    ones.
    """
    recipe = recipe_of(name)
    if problem := unavailable_reason(name):
        raise ServerFailed(problem)
    folder = folder.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        is_server_folder(name, folder)
        folder.chmod(0o700)  # settings and log may contain secrets
        with FileLock(folder / ".lock", what=f"the folder {folder}"):
            if (other := attach(folder)) is not None and other.is_alive:
                raise ServerFailed(
                    f"{other.name} is already running in {folder} (pid {other.pid}); stop it first"
                )
            place = _place(name, recipe, folder, ports or {})
            recipe.prepare(place)
            return Server(name, place, process=_run(name, recipe, place))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(
                f"no disk space for {name} in {folder}: {error}; free some space, or give another "
                "folder"
            ) from None
        raise


def _place(name: str, recipe: Recipe, folder: Path, ports: Mapping[str, int]) -> ServerFolder:
    if unknown := set(ports) - set(recipe.ports):
        raise ConfigError(
            f"{name} has no port {sorted(unknown)[0]!r}; give {', '.join(recipe.ports)}"
        )
    before = (read_state(folder) or {}).get("ports", {})
    again = {
        port: number for port, number in before.items() if port in recipe.ports and is_free(number)
    }
    ports = {**free_ports(recipe.ports), **again, **ports}
    # Written first: it marks the folder as ours.
    _write_state(name, folder, ports, Identity(0, ""))
    file = folder / "credentials"
    if not file.exists():
        write_credentials(file, new_credentials(is_aws=name in AWS_COMPATIBLE))
    return ServerFolder(
        folder=folder,
        package=cached(name) or folder,
        ports=ports,
        credentials=read_credentials(file),
        credentials_file=file,
    )


def _run(name: str, recipe: Recipe, place: ServerFolder) -> Process:
    """Start the process and wait until the server responds; kills it if it does not."""
    if used_ports := [port for port in place.ports.values() if not is_free(port)]:
        raise ConfigError(
            f"port {used_ports[0]} of {name} is in use by another program; stop that program, or "
            "give another port"
        )
    launch = recipe.launch(place)
    process = spawn(
        launch.words,
        folder=place.folder,
        env=server_environment(launch.env),
        log=place.folder / "log",
    )
    try:
        # The file marks that `initialise` has finished; if it was interrupted, it runs again.
        welcomed = place.folder / "welcomed"
        if not (recipe.keeps_data and welcomed.exists()):
            _retry_until_success(name, process, place, recipe.initialise)
            welcomed.touch()
        _retry_until_success(name, process, place, recipe.probe)
        _write_state(name, place.folder, place.ports, process.identity)
    except BaseException:
        process.kill()
        raise
    return process


def _retry_until_success(
    name: str, process: Process, place: ServerFolder, call: Callable[[ServerFolder], None]
) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            if not listens(place.ports["client"]):
                raise ConnectionRefusedError(f"nothing listens on {place.address}")
            call(place)
        except Exception as error:
            if not process.is_alive:
                raise ServerFailed(
                    f"{name} exited during startup; the end of its log {place.folder / 'log'}:\n"
                    f"{_last_lines(place.folder)}"
                ) from None
            if time.monotonic() > deadline:
                raise ServerFailed(
                    f"{name} did not respond within {_START_S:.0f} s ({type(error).__name__}: "
                    f"{str(error)[:300]}); the end of its log {place.folder / 'log'}:\n"
                    f"{_last_lines(place.folder)}"
                ) from None
            time.sleep(_AGAIN_S)
        else:
            return


def _last_lines(folder: Path) -> str:
    """The last lines of the log of the server in this folder."""
    try:
        with (folder / "log").open("rb") as file:
            file.seek(max(0, (folder / "log").stat().st_size - 8192))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-_LAST_LINES:])
    except OSError:
        return "(no log)"


def _write_state(name: str, folder: Path, ports: Mapping[str, int], identity: Identity) -> None:
    """Record the process in its folder, so that others find it; also marks the folder as ours."""
    state = {"name": name, "pid": identity.pid, "started": identity.started, "ports": dict(ports)}
    write_file(folder / STATE, json.dumps(state).encode(), mode=0o600)


def read_state(folder: Path) -> dict[str, Any] | None:
    """Name, pid, start time and ports of the server in this folder; None if unreadable."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        state = json.loads((folder / STATE).read_bytes())
        ports = {str(name): int(number) for name, number in state["ports"].items()}
        return {
            "name": str(state["name"]),
            "pid": int(state["pid"]),
            "started": str(state["started"]),
            "ports": ports,
        }
    return None


def is_server_folder(name: str, folder: Path) -> bool:
    """Whether a server of this name created this folder; False for an empty one.

    ConfigError if it contains files that no server of this name created.
    """
    state = read_state(folder)
    if state is not None and state["name"] == name:
        return True
    # A start that was killed before it wrote its state leaves these.
    own_names = (".lock", f".{STATE}.")
    if foreign := sorted(
        path.name for path in folder.iterdir() if not path.name.startswith(own_names)
    ):
        what = (
            f"is the folder of {state['name']}"
            if state
            else f"contains {foreign[0]!r} and no {STATE} of ours"
        )
        raise ConfigError(f"{folder} {what}; give another folder for {name}")
    return False


def attach(folder: Path) -> Server | None:
    """The server that was started in this folder, running or dead; None if stopped or unknown."""
    state = read_state(folder)
    file = folder / "credentials"
    if state is None or state["name"] not in SERVERS or state["pid"] <= 0:
        return None
    # A server can be found and stopped even if its credentials are missing.
    credentials: Mapping[str, str] = {}
    with contextlib.suppress(OSError, ConfigError):
        credentials = read_credentials(file)
    place = ServerFolder(
        folder=folder,
        package=cached(state["name"]) or folder,
        ports=state["ports"],
        credentials=credentials,
        credentials_file=file,
    )
    return Server(state["name"], place, process=Process(Identity(state["pid"], state["started"])))


State = Literal["running", "died", "stopped", "unavailable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """The state of one server."""

    name: str
    state: State
    server: Server | None = None
    """Set if it is running or died."""
    words: str = ""
    """Why it is unavailable, or the last lines of its log if it died."""


def default_folder() -> Path:
    """The default folder of background servers."""
    return cache_root() / "running"


def server_status(name: str, folder: Path) -> ServerStatus:
    """The state of a server in this folder, without changing anything."""
    server = attach(folder / name)
    if server is None:
        reason = unavailable_reason(name)
        return ServerStatus(
            name=name, state="unavailable" if reason else "stopped", words=reason or ""
        )
    if server.is_alive:
        return ServerStatus(name=name, state="running", server=server)
    return ServerStatus(name=name, state="died", server=server, words=_last_lines(folder / name))


def ensure(name: str, folder: Path) -> tuple[Server, bool]:
    """Return this folder's server, started if needed, and whether this call started it.

    A server started by this call ends with this process unless it is detached.
    """
    with _lock(name, folder):
        status = server_status(name, folder)
        if status.state == "running" and status.server is not None:
            return status.server, False
        return start(name, folder / name), True


def stop(name: str, folder: Path, *, erases: bool = False) -> bool:
    """Stop the server of this folder, optionally delete its data; returns whether it was running.

    Waits for a server that is being started. Files that no server of ours created are never
    deleted.
    """
    place = folder / name
    if not (place.exists() or (folder / f".{name}.lock").exists()):
        return False
    with _lock(name, folder):
        must_erase = erases and place.exists() and is_server_folder(name, place)
        server = attach(place)
        ran = server is not None and server.is_alive
        if server is not None:
            server.stop()
        if must_erase:
            shutil.rmtree(place)
        return ran


def _lock(name: str, folder: Path) -> FileLock:
    """Held while a server of this folder is started or stopped."""
    return FileLock(
        folder / f".{name}.lock", what=f"the start or stop of {name}", timeout_s=_OTHER_START_S
    )


def new_credentials(*, is_aws: bool) -> dict[str, str]:
    """New random credentials: AWS keys and a region, or a username and a password."""
    if is_aws:
        return {
            "access_key_id": "LOCAL" + secrets.token_hex(8).upper(),
            "secret_access_key": secrets.token_hex(20),
            "region": _REGION,
        }
    return {"username": _USER, "password": secrets.token_hex(20)}


def write_credentials(path: Path, credentials: Mapping[str, str]) -> None:
    """Write an AWS shared-credentials file, or a TOML file with username and password."""
    if "access_key_id" in credentials:
        lines = [
            "[default]",
            *(f"aws_{name} = {credentials[name]}" for name in _AWS_KEYS),
            f"region = {_REGION}",
        ]
    else:
        lines = [f'{name} = "{value}"' for name, value in credentials.items()]
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write("\n".join(lines) + "\n")


def read_credentials(path: Path) -> dict[str, str]:
    """Read credentials from either kind of file; ConfigError if it contains none."""
    text = path.read_text(encoding="utf-8")
    try:
        if text.lstrip().startswith("["):
            parser = configparser.ConfigParser(interpolation=None)
            parser.read_string(text)
            section = parser["default"]
            return {
                **{name: section[f"aws_{name}"] for name in _AWS_KEYS},
                "region": section.get("region", _REGION),
            }
        table = tomllib.loads(text)
        return {"username": str(table["username"]), "password": str(table["password"])}
    except (configparser.Error, KeyError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"{path} contains no credentials: {error}; give a TOML file with username and "
            "password, or an AWS shared-credentials file with a section [default]"
        ) from None


class Running(Protocol):
    """A running server with its credentials, started by us or not."""

    @property
    def address(self) -> str: ...

    @property
    def url(self) -> str: ...

    @property
    def credentials(self) -> Mapping[str, str]: ...

    @property
    def credentials_file(self) -> Path: ...


def host_location(server: Running, scheme: str, path: str, **options: str) -> Location:
    """A location on a server with host and port: Cassandra, Kafka."""
    host, _, port = server.address.rpartition(":")
    return Location(
        scheme, ((host, int(port)),), path, {"credentials": str(server.credentials_file), **options}
    )


def aws_location(
    server: Running, scheme: str, name: str, path: str = "", **options: str
) -> Location:
    """A location on a server with an AWS API: Kinesis, S3."""
    region = server.credentials["region"]
    account = {
        "endpoint": server.url,
        "region": region,
        "credentials": str(server.credentials_file),
    }
    return Location(scheme, ((name, None),), path, {**account, **options})
