"""RaySession: a Ray of this run's own, or a connection to a cluster; never one without a token.

Ray runs the code of whoever connects, so a cluster that accepts connections without a token is
refused. A Ray that the session starts has a token of its own and ends with the session.
"""

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from understudy.core.errors import ConfigError, MissingExtra

OBJECT_STORE_BYTES = 256 << 20
"""Of a Ray that the session starts: room for policies and results; more is spilled to disk."""
_ANSWER_S = 60.0
_CONNECT_S = 5.0
_END_S = 10.0
_WATCHER_S = 60.0
_LONGEST_FOLDER = 40
"""Ray adds 62 characters for its sockets, whose paths may have 107."""
_NEXT_STEP = {
    "no token": "no token was found; set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to a file",
    "wrong token": "the token is wrong; set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to a file",
    "open": "it runs the code of anyone who connects; start all its nodes again with "
    "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE",
    "not found": "none was found; start one with `ray start --head`, give host:port, or omit "
    "address",
}


def require_ray() -> Any:
    """The module `ray`; MissingExtra with the install command if it is missing or too old."""
    # Otherwise it prints a paragraph to stdout, where results go, for each actor that is lost.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    # Otherwise a call after the end of a session would start another Ray, without a token.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingExtra(
            f"the engine ray needs the package ray ({error}); pip install 'understudy[ray]'"
        ) from None
    if tuple(map(int, ray.__version__.split(".")[:2])) < (2, 60):
        raise MissingExtra(
            f"ray is version {ray.__version__}, but the engine ray needs 2.60 or newer, which has "
            "token authentication; pip install --upgrade 'understudy[ray]'"
        )
    return ray


def lost_reason(error: Exception) -> str:
    """How a Ray actor ended, without the page that Ray adds about possible causes."""
    text = " ".join(str(error).split())
    if "is unavailable" in text:
        return "its process or node does not answer"
    cause = re.search(r"because (its [^.]*)", text)
    detail = re.search(r"exit detail: ([^.]*)", text)
    if cause is None:
        return text.partition(". ")[0]
    return f"{cause[1]} ({detail[1]})" if detail else cause[1]


class RaySession:
    """Ray, ready to start actors, until it is closed."""

    def __init__(self, address: str | None = None, *, num_cpus: int) -> None:
        """Connect to the cluster at `address`, or to that of RAY_ADDRESS, which jobs have.

        Without an address, start a Ray with `num_cpus` on this machine. If this process is already
        connected, that connection is used and stays open.
        """
        self.ray = require_ray()
        self._opened = contextlib.ExitStack()
        address = address or os.environ.get("RAY_ADDRESS") or None
        if self.ray.is_initialized():
            if _session is None:  # the caller's connection
                _check_cluster(self.ray.get_runtime_context().gcs_address)
            return
        with contextlib.ExitStack() as opened:
            opened.callback(_reload_token)
            environment = _Environment()
            opened.callback(environment.restore)
            environment.set("RAY_AUTH_MODE", "token")
            if address is None:
                self._start(opened, environment, num_cpus)
            else:
                self._connect(opened, _check_cluster(address))
            opened.callback(_remember, None)
            _remember(self)
            self._opened = opened.pop_all()

    def _start(
        self, opened: contextlib.ExitStack, environment: "_Environment", num_cpus: int
    ) -> None:
        folder = tempfile.mkdtemp(prefix="understudy-ray-")
        if len(folder) > _LONGEST_FOLDER:
            Path(folder).rmdir()
            folder = tempfile.mkdtemp(prefix="understudy-ray-", dir="/tmp")
        watch = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, "watch", folder],
            stdin=subprocess.PIPE,
            env=_environment(),
            start_new_session=True,  # Ctrl-C is for this process
        )
        opened.callback(_end_watcher, watch)
        environment.set("RAY_AUTH_TOKEN", secrets.token_hex(32))
        try:
            self._init(
                opened,
                address="local",
                num_cpus=num_cpus,
                num_gpus=0,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                _temp_dir=folder,
            )
        except Exception as error:  # Ray has no class for a start that takes longer than its 30 s
            text = " ".join(str(error).split())
            next_step = (
                "wait until the machine is less busy"
                if "timed out" in text
                else "correct what it names"
            )
            raise ConfigError(
                f"Ray did not start on this machine: {text}; {next_step}, or give the address of a "
                "cluster"
            ) from error

    def _connect(self, opened: contextlib.ExitStack, address: str) -> None:
        try:
            self._init(opened, address=address)
        except (ConnectionError, RuntimeError, ValueError) as error:
            text = " ".join(str(error).split())
            next_step = (
                "install the cluster's versions here"
                if "mismatch" in text
                else "this machine must be a node of the cluster (`ray start --address "
                f"{address}`), or send the whole command to it with `ray job submit`"
            )
            raise ConfigError(
                f"cannot join the Ray cluster at {address}: {text}; {next_step}"
            ) from None

    def _init(self, opened: contextlib.ExitStack, **arguments: Any) -> None:
        _reload_token()
        handler = signal.getsignal(signal.SIGTERM)
        opened.callback(self.ray.shutdown)
        try:
            self.ray.init(
                namespace="understudy", log_to_driver=False, configure_logging=False, **arguments
            )
        finally:
            with contextlib.suppress(ValueError, TypeError):  # not in the main thread
                signal.signal(signal.SIGTERM, handler)  # which ray.init replaces

    def free_cpus(self) -> tuple[float, float]:
        """The CPUs that no actor uses, and all CPUs of the cluster."""
        return (
            self.ray.available_resources().get("CPU", 0.0),
            self.ray.cluster_resources().get("CPU", 0.0),
        )

    def close(self) -> None:
        """End what was started; may be called twice."""
        self._opened.close()


class _Environment:
    """Changes of environment variables, which Ray and its processes read."""

    def __init__(self) -> None:
        self._before: dict[str, str | None] = {}

    def set(self, name: str, value: str) -> None:
        self._before.setdefault(name, os.environ.get(name))
        os.environ[name] = value

    def restore(self) -> None:
        for name, value in self._before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


_session: RaySession | None = None
"""The session that has connected this process, if one has."""


def _end_watcher(watch: "subprocess.Popen[bytes]") -> None:
    """Close its standard input, and wait until it has deleted the folder."""
    try:
        watch.communicate(timeout=_WATCHER_S)
    except subprocess.TimeoutExpired:
        watch.kill()
        watch.wait()


def _remember(session: RaySession | None) -> None:
    global _session
    _session = session


def _reload_token() -> None:
    """Ray reads mode and token when it is imported, and keeps them."""
    from ray._raylet import AuthenticationTokenLoader, Config

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


# --- Whether a cluster is there, needs a token, and accepts ours ----------------------------------


def _check_cluster(address: str) -> str:
    """The host and port of a cluster that needs a token and accepts ours; ConfigError otherwise."""
    if "://" in address:
        raise ConfigError(
            f"the Ray address is {address}; give host:port of its head, or auto. Ray Client is not "
            "supported: run the command on a node of the cluster, or send it there with "
            "`ray job submit`"
        )
    if address != "auto":
        host, _, port = address.rpartition(":")
        if not re.fullmatch(r"\d{1,5}", port) or not host:
            raise ConfigError(f"the Ray address is {address!r}; give host:port, or auto")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
        except OSError as error:
            raise ConfigError(
                f"no Ray cluster answers at {address} ({error}); check that its head runs and that "
                "this is its port (6379 unless it was started with another one), or omit address"
            ) from None
    try:
        probe = subprocess.run(
            [sys.executable, "-P", "-m", __name__, "probe", address],
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            env=_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{address} accepts connections but did not answer as Ray within {_ANSWER_S:g} s; "
            "check that this is the port of its head"
        ) from None
    verdict, _, detail = probe.stdout.strip().rpartition("\n")[2].partition("\t")
    if verdict == "closed":
        return detail
    next_step = _NEXT_STEP.get(verdict) or detail or probe.stderr.strip().rpartition("\n")[2]
    raise ConfigError(f"cannot use the Ray cluster at {address}: {next_step}")


def _probe(address: str) -> str:
    """What a cluster is, as `verdict TAB detail`: asked first without a token, then with ours."""
    import ray
    from ray._private.services import canonicalize_bootstrap_address
    from ray._raylet import AuthenticationTokenLoader, GcsClient

    if address == "auto":
        try:
            address = canonicalize_bootstrap_address(address)
        except ConnectionError:
            return "not found"
    try:
        for mode in ("disabled", "token"):
            os.environ["RAY_AUTH_MODE"] = mode
            _reload_token()
            if mode == "token" and not AuthenticationTokenLoader.instance().has_token(
                ignore_auth_mode=True
            ):
                return "no token"
            try:
                GcsClient(address=address).internal_kv_get(b"understudy", None, timeout=_CONNECT_S)
            except ray.exceptions.AuthenticationError:
                if mode == "token":
                    return "wrong token"
            else:
                if mode == "disabled":
                    return "open"
    except Exception as error:
        return f"failed\t{' '.join(str(error).split())}"
    return f"closed\t{address}"


# --- After the end, also if this process was killed -----------------------------------------------


def processes_in(folder: str) -> list[int]:
    """The processes that have files of a folder open; Ray's change their names and arguments."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if any(
                os.readlink(file).startswith(f"{folder}/") for file in (process / "fd").iterdir()
            ):
                found.append(int(process.name))
    return found


def _watch(folder: str) -> None:
    """Wait until the session has ended; end what is left of its Ray, and delete the folder.

    If the process of the session is killed, Ray's servers and workers end with it, but two agents
    try to report that for a minute or two.
    """
    owner = os.getppid()  # which keeps its log open
    sys.stdin.read()
    deadline_s = time.monotonic() + _END_S
    while (left := {*processes_in(folder)} - {owner}) and time.monotonic() < deadline_s:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


def _environment() -> dict[str, str]:
    """This process's environment, for one that imports the same modules."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }


def main() -> None:
    task, argument = sys.argv[1:]
    if task == "watch":
        _watch(argument)
    else:
        sys.stdout.write(f"{_probe(argument)}\n")


if __name__ == "__main__":
    main()
