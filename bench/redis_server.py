"""A private redis-server for one measurement, which syncs every write before its answer."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_START_S = 10.0
_INSTALL_S = 180.0


class Missing(Exception):
    """Redis cannot run here; the text is the reason."""


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[Any]:
    """A client on a Unix socket; server and files are removed on exit."""
    program = _program()
    try:
        import redis
    except ImportError:
        raise Missing(
            "Redis: the redis package is not installed (make bench installs it)"
        ) from None
    folder.mkdir(parents=True)
    # A socket path is limited to about 100 characters, so it is relative to the server's folder.
    command = [
        program,
        "--port",
        "0",
        "--unixsocket",
        "redis.sock",
        "--dir",
        ".",
        "--save",
        "",
        "--appendonly",
        "yes",
        "--appendfsync",
        "always",
        "--auto-aof-rewrite-percentage",
        "0",
        "--daemonize",
        "no",
    ]
    server = subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        client = redis.Redis(unix_socket_path=os.path.relpath(folder / "redis.sock"))
        _wait(client, server)
        yield client
        client.close()
    finally:
        server.terminate()
        try:
            server.wait(10.0)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        shutil.rmtree(folder, ignore_errors=True)


def cpu_s(client: Any) -> float:
    """Processor time the server has used so far."""
    used = client.info("cpu")
    return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


def _wait(client: Any, server: subprocess.Popen[bytes]) -> None:
    import redis

    deadline_s = time.monotonic() + _START_S
    while server.poll() is None:
        with contextlib.suppress(redis.exceptions.ConnectionError, FileNotFoundError):
            client.ping()
            return
        if time.monotonic() > deadline_s:
            raise Missing(f"Redis: redis-server did not respond within {_START_S:.0f} s")
        time.sleep(0.02)
    raise Missing(f"Redis: redis-server ended with code {server.returncode}")


def _program() -> str:
    program = shutil.which("redis-server")
    if program is None:
        reason = _install()
        program = shutil.which("redis-server")
        if program is None:
            raise Missing(f"Redis: redis-server is not installed, and {reason}")
    return program


def _install() -> str:
    """Install Debian's package; returns why that failed, or an empty text."""
    if shutil.which("apt-get") is None:
        return "there is no apt-get to install it"
    if os.geteuid() != 0:
        return "only root can install it (apt-get install redis-server)"
    # Run level 1 keeps the package from starting its own server.
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1", "LD_PRELOAD": ""}
    install = ["apt-get", "install", "-y", "--no-install-recommends", "redis-server"]
    for command in (install, ["apt-get", "update"], install):
        try:
            done = subprocess.run(
                command, env=env, capture_output=True, check=False, timeout=_INSTALL_S
            )
        except subprocess.TimeoutExpired:
            return f"{' '.join(command[:2])} took longer than {_INSTALL_S:.0f} s"
        if command is install and done.returncode == 0:
            return ""
    return "apt-get install redis-server failed"
