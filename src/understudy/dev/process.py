"""A server process, which ends with its parent and is identified by pid and start time.

A small watcher process runs in the server's process group and reads a pipe that the parent holds.
When the parent dies, for whatever reason, the pipe closes and the watcher kills the server. A line
on the pipe ends the watcher, so that the server outlives the parent.

Ports are free ones on loopback, outside the ephemeral range: a client that keeps connecting to a
port of that range while its server is down can connect to itself, and then holds the port when the
server restarts.
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from understudy.core.errors import ConfigError

HOST = "127.0.0.1"
# `$$` is the pid of the shell that becomes the server, also inside the watcher. The watcher reads
# descriptor 3, since a shell redirects the standard input of background commands. The subshell
# around the watcher orphans it, so that the server has no child that it never reaps.
_LAUNCH = 'exec 3<&0 </dev/null; ((read -r _ <&3 || kill -9 "$$") &); exec 3<&-; exec "$@"'
_POLL_S = 0.02
_GONE_S = 30.0
_PORTS = range(20_000, 32_000)
_PORT_TRIES = 200


@dataclass(frozen=True, slots=True)
class Identity:
    """A process, by pid and start time: the system reuses pids."""

    pid: int
    started: str


def identify(pid: int) -> Identity | None:
    """The process that has this pid now; None if there is none, or a zombie."""
    if Path("/proc/self/stat").exists():
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return None
        return None if fields[0] in (b"Z", b"X") else Identity(pid, f"{boot}/{int(fields[19])}")
    ps = subprocess.run(
        ["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    state, _, started = ps.stdout.strip().partition(" ")
    return Identity(pid, started.strip()) if started and not state.startswith("Z") else None


class Process:
    """A server process, started by this command or by another one."""

    def __init__(
        self, identity: Identity, *, child: subprocess.Popen[bytes] | None = None, gate: int = -1
    ) -> None:
        self.identity = identity
        self._child = child
        self._gate = gate

    @property
    def pid(self) -> int:
        return self.identity.pid

    @property
    def is_alive(self) -> bool:
        """Whether exactly this process is still running; pid 0 is never alive."""
        if self.pid <= 0:
            return False
        if self._child is not None and self._child.poll() is not None:
            return False
        return identify(self.pid) == self.identity

    def release(self) -> None:
        """Keep the process running after the current one exits."""
        if self._gate >= 0:
            with contextlib.suppress(OSError):
                os.write(self._gate, b"stay\n")
            os.close(self._gate)
            self._gate = -1
        if self._child is not None:
            # It is still our child, and becomes a zombie if it ends first and is not waited for.
            threading.Thread(
                target=self._child.wait, name=f"waits for {self.pid}", daemon=True
            ).start()
            self._child = None

    def terminate(self, *, timeout_s: float) -> None:
        """Send SIGTERM, wait, and kill what is still running."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            self._wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """Kill its process group with SIGKILL; returns when it has ended."""
        # Once it has ended, another group may have its id, unless the watcher is still in it.
        if self._gate >= 0 or self.is_alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self._wait(_GONE_S)
        if self._child is not None:
            self._child.wait(_GONE_S)
        if self._gate >= 0:
            os.close(self._gate)
            self._gate = -1
        self._child = None

    def _wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self.is_alive and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def spawn(
    command: Sequence[str | Path], *, folder: Path, env: Mapping[str, str], log: Path
) -> Process:
    """Start a server in its own process group; it ends with this process unless released."""
    reading, writing = os.pipe()
    try:
        with log.open("ab") as out:
            os.fchmod(out.fileno(), 0o600)
            child = subprocess.Popen(
                ["sh", "-c", _LAUNCH, "sh", *map(str, command)],
                cwd=folder,
                env=dict(env),
                stdin=reading,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
    except BaseException:
        os.close(writing)
        raise
    finally:
        os.close(reading)
    return Process(identify(child.pid) or Identity(child.pid, "gone"), child=child, gate=writing)


def is_free(port: int) -> bool:
    """Whether a server could listen on this port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def free_ports(names: Sequence[str]) -> dict[str, int]:
    """A free port for each name, all different."""
    rng = random.SystemRandom()
    ports: dict[str, int] = {}
    for _ in range(_PORT_TRIES):
        if len(ports) == len(names):
            return ports
        port = rng.choice(_PORTS)
        if port not in ports.values() and is_free(port):
            ports[names[len(ports)]] = port
    raise ConfigError(
        f"fewer than {len(names)} free ports were found on {HOST} between {_PORTS.start} and "
        f"{_PORTS.stop}; stop programs that listen there"
    )


def listens(port: int) -> bool:
    """Whether a server accepts connections on this port."""
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex((HOST, port)) == 0
