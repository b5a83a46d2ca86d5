"""Starts real servers on this machine and finds them again: Cassandra, Kafka, two of Kinesis, S3.

Everything of a server lies in one folder: data, settings, log, and random credentials that only
their owner may read. Servers in the background, which outlive their command, share a folder with
one inside it for each.
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
from understudy.dev.packages import PACKAGES, cache_root, cached, find, place_of, plain_environment
from understudy.dev.process import Identity, Process, free_ports, is_free, listens, spawn
from understudy.dev.recipes import MOTO, RECIPES, Recipe, ServerFolder

SERVERS = tuple(RECIPES)
USUAL = ("cassandra", "kafka", "kinesis", "s3")
"""Those that are started when none is named."""
AWS_SHAPED = ("kinesis", "kinesalite", "s3")
STATE = "server.json"
_START_S = 240.0
_STOP_S = 30.0
_AGAIN_S = 0.1
_LAST_LINES = 12
_OTHER_START_S = 600.0
"""Longer than any start."""
_USER = "understudy"
_REGION = "us-east-1"
_AWS_KEYS = ("access_key_id", "secret_access_key")


def recipe_of(name: str) -> Recipe:
    """How this server is run here: S3 by moto where versitygw is neither in the cache nor to be
    built."""
    if name not in RECIPES:
        raise ConfigError(f"there is no server {name!r}; give one of {', '.join(RECIPES)}")
    return MOTO if name == "s3" and uses_moto() else RECIPES[name]


def uses_moto() -> bool:
    """Whether S3 is moto on this machine: versitygw is not there, and cannot be built or could
    not be."""
    return cached("s3") is None and (find("go") is None or _no_versity().exists())


def give_up_on_versity() -> bool:
    """Let moto serve S3 until versitygw is fetched after all; False where moto is not installed."""
    if MOTO.trouble():
        return False
    _no_versity().touch()
    return True


def _no_versity() -> Path:
    return place_of("s3").with_name("s3.failed")


def why_not(name: str) -> str | None:
    """Why a server cannot be had on this machine, in one sentence with the next step; None when
    it can."""
    if sys.platform == "win32":
        return f"{name} runs on Linux and macOS only; give the address of one elsewhere"
    if trouble := recipe_of(name).trouble():
        return f"{name}: {trouble}"
    if is_ready(name):
        return None
    package = PACKAGES[name]
    next_step = package.trouble() or f"run: understudy dev servers fetch {name}"
    return f"{name} {package.version} is not in the cache; {next_step}"


def is_ready(name: str) -> bool:
    """Whether nothing has to be downloaded for it any more."""
    return cached(name) is not None or (name == "s3" and uses_moto())


class Server:
    """A running server; as a context manager it is stopped at the end."""

    def __init__(self, name: str, place: ServerFolder, *, process: Process) -> None:
        self.name = name
        self.place = place
        self.address = place.address
        """ "127.0.0.1:PORT", where clients connect."""
        self.url = place.url
        """The same for those that speak HTTP."""
        self.credentials = place.credentials
        """username and password, or access_key_id, secret_access_key and region."""
        self.credentials_file = place.credentials_file
        """The same as a file that only its owner may read."""
        self.log = place.folder / "log"
        """What it wrote, over all of its starts."""
        self._recipe = recipe_of(name)
        self._process = process

    @property
    def pid(self) -> int:
        """The number of its process; 0 after it was stopped."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive

    def kill(self) -> None:
        """SIGKILL; returns when it is gone. Its data stay."""
        self._process.kill()

    def restart(self) -> None:
        """Start it again on the same ports and data, after it was killed or stopped; stops it
        first if it runs."""
        self._process.terminate(patience_s=_STOP_S)
        self._process = _run(self.name, self._recipe, self.place)

    def stop(self) -> None:
        """End it well and leave no process behind, or ServerFailed; may be called twice."""
        self._process.terminate(patience_s=_STOP_S)
        if self.is_alive:
            raise ServerFailed(f"{self.name} (pid {self.pid}) does not end; look at it with ps")
        self._process = Process(Identity(0, ""))
        # On a full disk, or in a folder that its owner has taken away, it stands there as one that
        # died.
        with contextlib.suppress(OSError):
            _write_state(self.name, self.place.folder, self.place.ports, self._process.identity)

    def detach(self) -> None:
        """Let it run on when this process ends; `attach` finds it again."""
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
    """Start a server whose data, settings, log and credentials lie in `folder`; it ends with this
    process.

    A folder that a server of this name has used before brings its data, credentials and ports
    along. `ports` names the recipe's ports ("client" is the one clients use); free ones are found
    for those that are not given.
    """
    recipe = recipe_of(name)
    if trouble := why_not(name):
        raise ServerFailed(trouble)
    folder = folder.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        is_ours(name, folder)
        folder.chmod(0o700)  # settings and log may tell more than strangers should know
        with FileLock(folder / ".lock", what=f"the folder {folder}"):
            if (other := attach(folder)) is not None and other.is_alive:
                raise ServerFailed(
                    f"{other.name} runs in {folder} already (pid {other.pid}); stop it first"
                )
            place = _place(name, recipe, folder, ports or {})
            recipe.prepare(place)
            return Server(name, place, process=_run(name, recipe, place))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(
                f"no room for {name} in {folder}: {error}; free some, or give another folder"
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
    # The mark that this folder is ours stands there before anything else does.
    _write_state(name, folder, ports, Identity(0, ""))
    file = folder / "credentials"
    if not file.exists():
        write_credentials(file, new_credentials(is_aws=name in AWS_SHAPED))
    return ServerFolder(
        folder=folder,
        package=cached(name) or folder,
        ports=ports,
        credentials=read_credentials(file),
        credentials_file=file,
    )


def _run(name: str, recipe: Recipe, place: ServerFolder) -> Process:
    """The process of a server that has answered; nothing is left of one that did not."""
    if taken := [port for port in place.ports.values() if not is_free(port)]:
        raise ConfigError(
            f"port {taken[0]}, wanted for {name}, is taken by another program; end that, or give "
            "another"
        )
    launch = recipe.launch(place)
    process = spawn(
        launch.words,
        folder=place.folder,
        env=plain_environment(launch.env),
        log=place.folder / "log",
    )
    try:
        # A server that was interrupted during its welcome is welcomed again.
        welcomed = place.folder / "welcomed"
        if not (recipe.keeps_data and welcomed.exists()):
            _until_it_works(name, process, place, recipe.welcome)
            welcomed.touch()
        _until_it_works(name, process, place, recipe.ask)
        _write_state(name, place.folder, place.ports, process.identity)
    except BaseException:
        process.kill()
        raise
    return process


def _until_it_works(
    name: str, process: Process, place: ServerFolder, ask: Callable[[ServerFolder], None]
) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            if not listens(place.ports["client"]):
                raise ConnectionRefusedError(f"nothing listens on {place.address}")
            ask(place)
        except Exception as error:
            if not process.is_alive:
                raise ServerFailed(
                    f"{name} ended while it started; its log {place.folder / 'log'} "
                    f"ends:\n{_last_lines(place.folder)}"
                ) from None
            if time.monotonic() > deadline:
                raise ServerFailed(
                    f"{name} did not answer within {_START_S:.0f} s ({type(error).__name__}: "
                    f"{str(error)[:300]}); its "
                    f"log {place.folder / 'log'} ends:\n{_last_lines(place.folder)}"
                ) from None
            time.sleep(_AGAIN_S)
        else:
            return


def _last_lines(folder: Path) -> str:
    """How the log of the server in this folder ends."""
    try:
        with (folder / "log").open("rb") as file:
            file.seek(max(0, (folder / "log").stat().st_size - 8192))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-_LAST_LINES:])
    except OSError:
        return "(there is no log)"


def _write_state(name: str, folder: Path, ports: Mapping[str, int], identity: Identity) -> None:
    """Keep in its folder which process runs there, so that another one finds it, and that the
    folder is ours."""
    state = {"name": name, "pid": identity.pid, "started": identity.started, "ports": dict(ports)}
    write_file(folder / STATE, json.dumps(state).encode(), mode=0o600)


def read_state(folder: Path) -> dict[str, Any] | None:
    """Name, pid, start time and ports of the server in this folder; None when there is nothing
    that can be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        found = json.loads((folder / STATE).read_bytes())
        ports = {str(name): int(number) for name, number in found["ports"].items()}
        return {
            "name": str(found["name"]),
            "pid": int(found["pid"]),
            "started": str(found["started"]),
            "ports": ports,
        }
    return None


def is_ours(name: str, folder: Path) -> bool:
    """Whether a server of this name has made this folder; False for an empty one.

    ConfigError where others' files are in it.
    """
    state = read_state(folder)
    if state is not None and state["name"] == name:
        return True
    ours = (
        ".lock",
        f".{STATE}.",
    )  # what a start leaves that was killed before it could write its mark
    if strange := sorted(path.name for path in folder.iterdir() if not path.name.startswith(ours)):
        what = (
            f"is the folder of {state['name']}"
            if state
            else f"holds {strange[0]!r} and no {STATE} of ours"
        )
        raise ConfigError(f"{folder} {what}, so {name} leaves it as it is; give another folder")
    return False


def attach(folder: Path) -> Server | None:
    """The server that a process started in this folder, running or dead; None when none was, or
    it was stopped."""
    state = read_state(folder)
    file = folder / "credentials"
    if state is None or state["name"] not in SERVERS or state["pid"] <= 0:
        return None
    # A server is found, and can be stopped, also where its credentials are gone.
    known: Mapping[str, str] = {}
    with contextlib.suppress(OSError, ConfigError):
        known = read_credentials(file)
    place = ServerFolder(
        folder=folder,
        package=cached(state["name"]) or folder,
        ports=state["ports"],
        credentials=known,
        credentials_file=file,
    )
    return Server(state["name"], place, process=Process(Identity(state["pid"], state["started"])))


State = Literal["running", "died", "stopped", "unavailable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """How one server stands."""

    name: str
    state: State
    server: Server | None = None
    """Only of one that runs or died."""
    words: str = ""
    """Why it is unavailable, or the last lines of one that died."""


def default_folder() -> Path:
    """Where background servers live unless another folder is named."""
    return cache_root() / "running"


def look(name: str, folder: Path) -> ServerStatus:
    """How this server stands in this folder; nothing is changed."""
    server = attach(folder / name)
    if server is None:
        reason = why_not(name)
        return ServerStatus(
            name=name, state="unavailable" if reason else "stopped", words=reason or ""
        )
    if server.is_alive:
        return ServerStatus(name=name, state="running", server=server)
    return ServerStatus(name=name, state="died", server=server, words=_last_lines(folder / name))


def ensure(name: str, folder: Path) -> tuple[Server, bool]:
    """The running server of this folder, and whether it was started now; then it ends with us
    unless detached."""
    with _alone(name, folder):
        found = look(name, folder)
        if found.state == "running" and found.server is not None:
            return found.server, False
        return start(name, folder / name), True


def stop(name: str, folder: Path, *, erases: bool = False) -> bool:
    """Stop the server of this folder, and remove its data if asked; says whether one ran.

    One that is being started is waited for. What no server of ours has made is never removed.
    """
    place = folder / name
    if not (place.exists() or (folder / f".{name}.lock").exists()):
        return False
    with _alone(name, folder):
        goes = erases and place.exists() and is_ours(name, place)
        server = attach(place)
        ran = server is not None and server.is_alive
        if server is not None:
            server.stop()
        if goes:
            shutil.rmtree(place)
        return ran


def _alone(name: str, folder: Path) -> FileLock:
    """Held while a server of this folder is started or stopped."""
    return FileLock(
        folder / f".{name}.lock", what=f"the start or stop of {name}", patience_s=_OTHER_START_S
    )


def new_credentials(*, is_aws: bool) -> dict[str, str]:
    """New random credentials."""
    if is_aws:
        return {
            "access_key_id": "LOCAL" + secrets.token_hex(8).upper(),
            "secret_access_key": secrets.token_hex(20),
            "region": _REGION,
        }
    return {"username": _USER, "password": secrets.token_hex(20)}


def write_credentials(path: Path, credentials: Mapping[str, str]) -> None:
    """Keep them: as an AWS shared-credentials file, or as TOML with username and password."""
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
    """Credentials from either kind of file; ConfigError when they are not there."""
    text = path.read_text(encoding="utf-8")
    try:
        if text.lstrip().startswith("["):
            parser = configparser.ConfigParser(interpolation=None)
            parser.read_string(text)
            found = parser["default"]
            return {
                **{name: found[f"aws_{name}"] for name in _AWS_KEYS},
                "region": found.get("region", _REGION),
            }
        table = tomllib.loads(text)
        return {"username": str(table["username"]), "password": str(table["password"])}
    except (configparser.Error, KeyError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"{path} holds no credentials: {error}; give a TOML file with username and password, "
            "or an AWS "
            "shared-credentials file with a section [default]"
        ) from None


class Running(Protocol):
    """A server with its credentials, ours or another."""

    @property
    def address(self) -> str: ...

    @property
    def url(self) -> str: ...

    @property
    def credentials(self) -> Mapping[str, str]: ...

    @property
    def credentials_file(self) -> Path: ...


def on_host(server: Running, scheme: str, path: str, **options: str) -> Location:
    """A place on a server that is spoken to by host and port: Cassandra, Kafka."""
    host, _, port = server.address.rpartition(":")
    return Location(
        scheme, ((host, int(port)),), path, {"credentials": str(server.credentials_file), **options}
    )


def on_aws(server: Running, scheme: str, name: str, path: str = "", **options: str) -> Location:
    """A place on a server that stands in for AWS: Kinesis, S3."""
    region = server.credentials["region"]
    account = {
        "endpoint": server.url,
        "region": region,
        "credentials": str(server.credentials_file),
    }
    return Location(scheme, ((name, None),), path, {**account, **options})
