"""Network namespaces joined by cables that a test cuts, delays, or lets lose packets.

A cable is a thread that copies packets between two TUN devices, one in each namespace, so every
fault is drawn from a seed and counted.
"""

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

_TUN = Path("/dev/net/tun")
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x1001
_MAX_PACKET = 1 << 16


class Cable:
    """Copies packets both ways until closed; the attributes may change at any time."""

    def __init__(self, devices: tuple[int, int], *, seed: int) -> None:
        self.loss = 0.0
        """The probability that a packet is lost."""
        self.delay_s = 0.0
        """How late each packet is, in each direction."""
        self.is_cut = False
        self.fired: Counter[str] = Counter()
        """Packets that were `cut`, `lost` and `delayed`."""
        self._devices = devices
        self._rng = random.Random(seed)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cable", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        first, second = self._devices
        other = {first: second, second: first}
        late: list[tuple[float, int, int, bytes]] = []
        order = itertools.count()
        while not self._closed.is_set():
            wait_s = max(0.0, late[0][0] - time.monotonic()) if late else 0.05
            readable, _, _ = select.select(self._devices, [], [], min(wait_s, 0.05))
            for device in readable:
                with contextlib.suppress(OSError):
                    packet = os.read(device, _MAX_PACKET)
                    if self.is_cut:
                        self.fired["cut"] += 1
                    elif self._rng.random() < self.loss:
                        self.fired["lost"] += 1
                    else:
                        self.fired["delayed"] += self.delay_s > 0
                        due_s = time.monotonic() + self.delay_s
                        heapq.heappush(late, (due_s, next(order), other[device], packet))
            while late and late[0][0] <= time.monotonic():
                _, _, device, packet = heapq.heappop(late)
                with contextlib.suppress(OSError):  # the device is full or gone
                    os.write(device, packet)

    def close(self) -> None:
        self._closed.set()
        self._thread.join(5)
        for device in self._devices:
            os.close(device)


class Network:
    """A learner's namespace, and one for each worker, joined to it by a cable."""

    def __init__(self, name: str, cables: list[Cable]) -> None:
        self._name = name
        self.cables = cables

    def url(self, worker: int, port: int) -> str:
        """The learner's address as this worker reaches it."""
        return f"http://10.77.{worker}.1:{port}"

    def python(self, place: str) -> list[str]:
        """The start of a command in a namespace: `learner`, or a worker's number."""
        return ["ip", "netns", "exec", f"{self._name}-{place}", sys.executable]


@contextlib.contextmanager
def network(n_workers: int, *, seed: int) -> Iterator[Network]:
    """Namespaces that exist until the end of the block; skips the test where there can be none."""
    if os.geteuid() or not _TUN.exists() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root, /dev/net/tun and the command ip")
    name = f"understudy-{os.getpid()}"
    places = ["learner", *map(str, range(n_workers))]
    cables: list[Cable] = []
    try:
        for place in places:
            _ip("netns", "add", f"{name}-{place}")
            _ip("-n", f"{name}-{place}", "link", "set", "lo", "up")
        for worker in range(n_workers):
            ends = (
                _device(f"usl{worker}", f"{name}-learner", f"10.77.{worker}.1/24"),
                _device(f"usw{worker}", f"{name}-{worker}", f"10.77.{worker}.2/24"),
            )
            cables.append(Cable(ends, seed=seed + worker))
        yield Network(name, cables)
    finally:
        for cable in cables:
            cable.close()
        for place in places:
            subprocess.run(
                ["ip", "netns", "del", f"{name}-{place}"], capture_output=True, check=False
            )


def _device(name: str, namespace: str, address: str) -> int:
    """A TUN device that was moved into a namespace; its descriptor stays in this process."""
    device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    unique = f"{name}x{os.getpid() % 10**6}"
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", unique.encode(), _IFF_TUN_NO_PI))
    _ip("link", "set", unique, "netns", namespace)
    _ip("-n", namespace, "addr", "add", address, "dev", unique)
    _ip("-n", namespace, "link", "set", unique, "up")
    return device


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
