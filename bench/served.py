"""A running platform to measure from outside, the peer's server, and a process's resources."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.games import CART
from bench.load import Endpoint
from understudy.backends.deployment import open_deployment
from understudy.platform.config import Config, GatewaySection
from understudy.platform.platform import Platform

PEER = Path(__file__).resolve().parent / "against" / "seed_tcp.py"
_READY_S = 120.0


class Served:
    """A platform that is ready, with the keys and process ids that a measurement needs."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self.opened = open_deployment(platform.data)
        self.opened.registry.register(CART)
        key, _ = self.opened.keys.create(["play", "work"], requests_s=1e6, bytes_s=1e10)
        self.step_until(lambda: platform.supervisor.is_ready)
        address = urlsplit(platform.url or "")
        self.endpoint = Endpoint(str(address.hostname), int(address.port or 0), key, CART.game)

    def step_until(self, is_true: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + _READY_S
        while not is_true():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the platform was not ready within {_READY_S:.0f} s")
            self.platform.supervisor.step()
            time.sleep(0.05)

    @property
    def gateway(self) -> int:
        """The process id of the gateway."""
        child = self.platform.supervisor.statuses["gateway"].child
        assert child is not None
        return child.pid


@contextlib.contextmanager
def served(folder: Path, *roles: str) -> Iterator[Served]:
    config = Config(data=str(folder), gateway=GatewaySection(port=0), roles=roles)
    with Platform(config, on_state_change=lambda *_: None) as platform:
        running = Served(platform)
        # The gateway accepts a new key within half a second; measuring starts after that.
        time.sleep(1.0)
        yield running


@contextlib.contextmanager
def seed_server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, str(PEER), "serve"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, int(json.loads(process.stdout.readline())["port"])
        finally:
            process.kill()


def ask_peer(*words: object) -> dict[str, Any]:
    command = [sys.executable, str(PEER), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    fields: dict[str, Any] = json.loads(done.stdout)
    return fields


def stop_peer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Stop the peer and return its last report."""
    output, _ = process.communicate(timeout=30)
    fields: dict[str, Any] = json.loads(output)
    return fields


def processor_s(pid: int) -> float:
    """Processor time of a process and all its threads, including ended ones; in 10 ms ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
