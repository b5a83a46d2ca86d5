"""A real Ray cluster on one machine: a head and nodes, each a `ray start` of its own."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.cli.platforms import wait_for
from tests.docs.machines import environment
from understudy.act.ray_session import processes_in

RAY = Path(sys.executable).with_name("ray")
_STORE_BYTES = 80 << 20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def processes_with(text: str) -> list[int]:
    """The processes whose environment contains a text, other than this one.

    Some of Ray's hide it; `processes_in` finds those.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if text.encode() in (path / "environ").read_bytes() and int(path.name) != os.getpid():
                found.append(int(path.name))
    return found


class RayCluster:
    """A head and nodes that come and go, with one CPU each; `close` ends all that they started."""

    def __init__(self, folder: Path, *, has_token: bool = True, has_jobs: bool = False) -> None:
        self._mark = f"RAY_TEST_CLUSTER={secrets.token_hex(8)}"
        self.folder = folder
        """In which the head and the nodes are started."""
        self.token = secrets.token_hex(32)
        (folder / "ray.token").write_text(f"{self.token}\n")
        self.port = free_port()
        self.jobs_port = free_port()
        name, _, value = self._mark.partition("=")
        self.environment = {
            **{key: text for key, text in environment().items() if not key.startswith("RAY_")},
            name: value,
            "RAY_AUTH_MODE": "token" if has_token else "disabled",
            "RAY_AUTH_TOKEN_PATH": str(folder / "ray.token"),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "RAY_health_check_initial_delay_ms": "1000",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_failure_threshold": "3",
        }
        self._started: list[subprocess.Popen[bytes]] = []
        self.nodes: list[subprocess.Popen[bytes]] = []
        """Without the head."""
        arguments = ["--head", f"--port={self.port}", f"--temp-dir={folder}"]
        arguments += [f"--include-dashboard={has_jobs}", f"--dashboard-port={self.jobs_port}"]
        self._start(*arguments)

    @property
    def commands(self) -> list[str]:
        """How the head and the nodes were started, oldest first."""
        return [" ".join(map(str, [*node.args])) for node in self._started]  # type: ignore[misc]

    @property
    def address(self) -> str:
        return f"{_node_ip()}:{self.port}"

    def add_node(self) -> None:
        """Start a node; one after the other, or their sockets clash."""
        self.nodes.append(self._start(f"--address={self.address}"))

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a head or a node, again if Ray gives up after its 30 s on a busy machine."""
        for _ in range(3):
            node = self._start_once(*arguments)
            if node.poll() is None:
                return node
        raise AssertionError(f"Ray does not start; {self.folder} has the logs")

    def _start_once(self, *arguments: str) -> subprocess.Popen[bytes]:
        log = self.folder / f"node-{len(self._started)}.log"
        with log.open("wb") as out:
            node = subprocess.Popen(
                [
                    *(str(RAY), "start", "--block", "--disable-usage-stats"),
                    *(f"--object-store-memory={_STORE_BYTES}", "--num-cpus=1", "--num-gpus=0"),
                    *("--min-worker-port=0", "--max-worker-port=0"),
                    # Jobs need it on the head; another Ray of this machine may have the usual port.
                    f"--dashboard-agent-listen-port={free_port()}",
                    *arguments,
                ],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**self.environment, "RAY_TEST_NODE": f"{self._mark} {len(self._started)}"},
                start_new_session=True,
            )
        self._started.append(node)
        # Seconds on a quiet machine, and more than a minute beside two test runs.
        wait_for(
            lambda: b"Ray runtime started" in log.read_bytes() or node.poll() is not None,
            timeout_s=180.0,
        )
        return node

    def kill_node(self) -> None:
        """End the oldest node as a power cut does: by force, and without a word."""
        node = self.nodes.pop(0)
        for pid in processes_with(f"RAY_TEST_NODE={self._mark} {self._started.index(node)}\0"):
            _kill(pid)
        node.wait()

    def _kill_all(self) -> bool:
        """Kill every process of the cluster; return whether there was none."""
        left = {*processes_with(f"{self._mark}\0"), *processes_in(str(self.folder))}
        left.discard(os.getpid())  # whose connection has a log there
        for pid in left:
            _kill(pid)
        return not left

    def close(self) -> None:
        for node in self._started:
            node.kill()
        wait_for(self._kill_all)
        for node in self._started:
            node.wait()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _node_ip() -> str:
    """The address of this machine that Ray chooses."""
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())
