"""What a process holds and computes for what it was sent, measured from outside.

Run as `python -m tests.faults.amplification FOLDER`, it is a gateway in a process of its own.
"""

import ctypes
import gc
import re
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from understudy.platform.children import report, stop_with_parent

KIB = 1024
MIB = 1024 * KIB
_CLOCK_HZ = 100


@dataclass(slots=True)
class Cost:
    """What a process needed inside a `measured` block."""

    peak_bytes: int = 0
    """Resident memory at its highest, above that before the block."""
    cpu_s: float = 0.0


@contextmanager
def measured(pid: int) -> Iterator[Cost]:
    """Measure another process; the result is complete when the block ends."""
    process = Path(f"/proc/{pid}")
    (process / "clear_refs").write_text("5")  # the peak starts again at the current size
    before_bytes = _status_bytes(process, "VmRSS")
    before_s = _cpu_s(process)
    cost = Cost()
    yield cost
    cost.peak_bytes = _status_bytes(process, "VmHWM") - before_bytes
    cost.cpu_s = _cpu_s(process) - before_s


def _status_bytes(process: Path, name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", (process / "status").read_text())
    assert found is not None
    return int(found[1]) * KIB


def _cpu_s(process: Path) -> float:
    fields = (process / "stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / _CLOCK_HZ


MAX_BODIES_BYTES = 64 * MIB


def return_memory() -> None:
    """Return free memory to the system, which would hide the cost of what follows."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def main(folder: Path) -> None:
    """Serve games with small and large observations until the parent closes our input."""
    from tests.serve.gateways import running
    from understudy.core.tensors import DTYPES
    from understudy.experience.game import game_spec
    from understudy.experience.spaces import Box
    from understudy.serve.state import GatewayConfig

    # A fault must fail a test, not take the memory of the machine.
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
    stop = stop_with_parent()
    config = GatewayConfig(max_bodies_bytes=MAX_BODIES_BYTES, body_timeout_s=20.0)
    with running(folder, config) as gateway:
        gateway.release(gateway.register())
        gateway.register(game_spec("large", obs=50_000, actions=3))
        gateway.register(game_spec("grid", obs=(64, 64), actions=3, has_action_mask=True))
        parts = {f"part{at}.x": Box((8,), DTYPES["F32"]) for at in range(20)}
        gateway.register(game_spec("parts", obs=parts, actions=3))
        wide = gateway.register(game_spec("wide", obs=60_000, actions=2))
        for _ in range(2):
            gateway.release(wide)
        facts = {
            "port": gateway.server.port,
            "key": gateway.key("play"),
            "limited_key": gateway.key("play", requests_s=1_000.0, bytes_s=8e6),
        }
        n_trims = 0
        n_requests = 1

        def request(*_: object) -> None:
            # A handler may interrupt a report, which holds a lock: the loop below does the work.
            nonlocal n_requests
            n_requests += 1

        signal.signal(signal.SIGUSR1, request)
        while True:
            if n_trims < n_requests:
                n_trims = n_requests
                return_memory()
                report({**facts, "n_trims": n_trims})
            if stop.wait(0.02):
                break


if __name__ == "__main__":
    main(Path(sys.argv[1]))
