"""Starts real servers on this machine and gives them back: Cassandra, Kafka, two of Kinesis, S3."""

import contextlib
import errno
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from understudy.core.errors import ConfigError, ServerFailed, StorageFull
from understudy.core.log import FileLock, write_file
from understudy.dev import credentials as creds
from understudy.dev.cache import cached, place_of
from understudy.dev.cassandra import Cassandra
from understudy.dev.kafka import Kafka
from understudy.dev.kinesis import Kinesalite, KinesisLocal
from understudy.dev.packages import PACKAGES
from understudy.dev.ports import free_ports, is_free, listens
from understudy.dev.process import Identity, Process, spawn
from understudy.dev.recipe import Place, Recipe
from understudy.dev.s3 import Moto, Versity
from understudy.dev.tools import find, plain_environment

SERVERS = ("cassandra", "kafka", "kinesis", "kinesalite", "s3")
STATE = "server.json"
AWS_SHAPED = ("kinesis", "kinesalite", "s3")
_START_S = 240.0
_STOP_S = 30.0
_AGAIN_S = 0.1
_LAST_LINES = 12
_RECIPES: Mapping[str, Callable[[], Recipe]] = {
    "cassandra": Cassandra, "kafka": Kafka, "kinesis": KinesisLocal, "kinesalite": Kinesalite, "s3": Versity,
}  # fmt: skip


def recipe_of(name: str) -> Recipe:
    """How this server is run here: S3 by moto where versitygw is neither in the cache nor to be built."""
    if name not in SERVERS:
        raise ConfigError(f"there is no server {name!r}; give one of {', '.join(SERVERS)}")
    return Moto() if name == "s3" and uses_moto() else _RECIPES[name]()


def uses_moto() -> bool:
    """Whether S3 is moto on this machine: versitygw is not there, and cannot be built or could not be."""
    return cached("s3") is None and (find("go") is None or _no_versity().exists())


def give_up_on_versity() -> bool:
    """Let moto serve S3 until versitygw is fetched after all; False where moto is not installed."""
    if Moto().trouble():
        return False
    _no_versity().touch()
    return True


def _no_versity() -> Path:
    return place_of("s3").with_name("s3.failed")


def why_not(name: str) -> str | None:
    """Why a server cannot be had on this machine, in one sentence with the next step; None when it can."""
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

    def __init__(self, name: str, place: Place, *, process: Process) -> None:
        self.name, self.place, self._process = name, place, process
        self._recipe = recipe_of(name)

    @property
    def address(self) -> str:
        """ "127.0.0.1:PORT", where clients connect."""
        return self.place.address

    @property
    def url(self) -> str:
        """The same for those that speak HTTP."""
        return self.place.url

    @property
    def credentials(self) -> Mapping[str, str]:
        """username and password, or access_key_id, secret_access_key and region."""
        return self.place.credentials

    @property
    def credentials_file(self) -> Path:
        """The same as a file that only its owner may read."""
        return self.place.credentials_file

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def identity(self) -> Identity:
        """Its process as nobody else can be it; number 0 after it was stopped."""
        return self._process.identity

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive

    @property
    def log(self) -> Path:
        """What it wrote, over all of its starts."""
        return self.place.folder / "log"

    def kill(self) -> None:
        """SIGKILL; returns when it is gone. Its data stay."""
        self._process.kill()

    def restart(self) -> None:
        """Start it again on the same ports and data, after it was killed or stopped; stops it first if it runs."""
        self._process.terminate(patience_s=_STOP_S)
        self._process = _run(self.name, self._recipe, self.place)
        self.write_state()

    def stop(self) -> None:
        """End it well and leave no process behind, or ServerFailed; may be called twice."""
        self._process.terminate(patience_s=_STOP_S)
        if self.is_alive:
            raise ServerFailed(f"{self.name} (pid {self.pid}) does not end; look at it with ps")
        self._process = Process(Identity(0, ""))
        # On a full disk, or in a folder that its owner has taken away, it stands there as one that died.
        with contextlib.suppress(OSError):
            self.write_state()

    def write_state(self) -> None:
        """Keep in its folder who runs there."""
        write_state(self.place.folder, self.name, self.place.ports, self.identity)

    def detach(self) -> None:
        """Let it run on when this process ends; `attach` finds it again."""
        self._process.release()

    def __enter__(self) -> "Server":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start(name: str, folder: Path, *, ports: Mapping[str, int] | None = None) -> Server:
    """Start a server whose data, settings, log and credentials lie in `folder`; it ends with this process.

    A folder that a server of this name has used before brings its data, credentials and ports along. `ports` names
    the recipe's ports ("client" is the one clients use); free ones are found for those that are not given.
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
                raise ServerFailed(f"{other.name} runs in {folder} already (pid {other.pid}); stop it first")
            place = _place(name, recipe, folder, ports or {})
            recipe.prepare(place)
            server = Server(name, place, process=_run(name, recipe, place))
            server.write_state()
            return server
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"no room for {name} in {folder}: {error}; free some, or give another folder") from None
        raise


def _place(name: str, recipe: Recipe, folder: Path, ports: Mapping[str, int]) -> Place:
    if unknown := set(ports) - set(recipe.ports):
        raise ConfigError(f"{name} has no port {sorted(unknown)[0]!r}; give {', '.join(recipe.ports)}")
    before = (read_state(folder) or {}).get("ports", {})
    again = {port: number for port, number in before.items() if port in recipe.ports and is_free(number)}
    ports = {**free_ports(recipe.ports), **again, **ports}
    # The mark that this folder is ours stands there before anything else does.
    write_state(folder, name, ports, Identity(0, ""))
    file = folder / "credentials"
    if not file.exists():
        creds.write(file, creds.make(is_aws=name in AWS_SHAPED))
    return Place(
        folder=folder, package=cached(name) or folder, ports=ports, credentials=creds.read(file), credentials_file=file
    )


def _run(name: str, recipe: Recipe, place: Place) -> Process:
    """The process of a server that has answered; nothing is left of one that did not."""
    if taken := [port for port in place.ports.values() if not is_free(port)]:
        raise ConfigError(f"port {taken[0]}, wanted for {name}, is taken by another program; end that, or give another")
    launch = recipe.launch(place)
    process = spawn(launch.words, folder=place.folder, env=plain_environment(launch.env), log=place.folder / "log")
    try:
        # Whoever was interrupted before the welcome was over is welcomed again.
        welcomed = place.folder / "welcomed"
        if not (recipe.keeps_data and welcomed.exists()):
            _until_it_works(name, process, place, recipe.welcome)
            welcomed.touch()
        _until_it_works(name, process, place, recipe.ask)
    except BaseException:
        process.kill()
        raise
    return process


def _until_it_works(name: str, process: Process, place: Place, ask: Callable[[Place], None]) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            if not listens(place.ports["client"]):
                raise ConnectionRefusedError(f"nobody listens on {place.address}")
            ask(place)
        except Exception as error:
            if not process.is_alive:
                raise ServerFailed(
                    f"{name} ended while it started; its log {place.folder / 'log'} ends:\n{last_lines(place.folder)}"
                ) from None
            if time.monotonic() > deadline:
                raise ServerFailed(
                    f"{name} did not answer within {_START_S:.0f} s ({type(error).__name__}: {str(error)[:300]}); its "
                    f"log {place.folder / 'log'} ends:\n{last_lines(place.folder)}"
                ) from None
            time.sleep(_AGAIN_S)
        else:
            return


def last_lines(folder: Path, *, lines: int = _LAST_LINES) -> str:
    """How the log of the server in this folder ends."""
    try:
        with (folder / "log").open("rb") as file:
            file.seek(max(0, (folder / "log").stat().st_size - 8192))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return "(there is no log)"


def write_state(folder: Path, name: str, ports: Mapping[str, int], who: Identity) -> None:
    """Keep in its folder who runs there, so that another process finds it, and that the folder is ours."""
    state = {"name": name, "pid": who.pid, "started": who.started, "ports": dict(ports)}
    write_file(folder / STATE, json.dumps(state).encode(), mode=0o600)


def read_state(folder: Path) -> dict[str, Any] | None:
    """What `write_state` kept; None when there is nothing that can be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        found = json.loads((folder / STATE).read_bytes())
        ports = {str(name): int(number) for name, number in found["ports"].items()}
        return {
            "name": str(found["name"]), "pid": int(found["pid"]), "started": str(found["started"]), "ports": ports,
        }  # fmt: skip
    return None


def is_ours(name: str, folder: Path) -> bool:
    """Whether a server of this name has made this folder; False for an empty one.

    ConfigError where others' files are in it.
    """
    state = read_state(folder)
    if state is not None and state["name"] == name:
        return True
    ours = (".lock", f".{STATE}.")  # what a start leaves that was killed before it could write its mark
    if strange := sorted(path.name for path in folder.iterdir() if not path.name.startswith(ours)):
        what = f"is the folder of {state['name']}" if state else f"holds {strange[0]!r} and no {STATE} of ours"
        raise ConfigError(f"{folder} {what}, so {name} leaves it as it is; give another folder")
    return False


def attach(folder: Path) -> Server | None:
    """The server that a process started in this folder, running or dead; None when none was, or it was stopped."""
    state, file = read_state(folder), folder / "credentials"
    if state is None or state["name"] not in SERVERS or state["pid"] <= 0:
        return None
    # A server is found, and can be stopped, also where somebody has taken its credentials away.
    known: Mapping[str, str] = {}
    with contextlib.suppress(OSError, ConfigError):
        known = creds.read(file)
    place = Place(
        folder=folder, package=cached(state["name"]) or folder, ports=state["ports"], credentials=known,
        credentials_file=file,
    )  # fmt: skip
    return Server(state["name"], place, process=Process(Identity(state["pid"], state["started"])))
