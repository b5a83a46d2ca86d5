"""The demo: players record, everything is killed, the next start recovers, and verify proves it."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from understudy.app.data import DataFolder
from understudy.app.ingest import IngestRole
from understudy.app.simulate import Progress, SimulateConfig, SimulateResult, Simulation
from understudy.app.verify import Verdict, verify
from understudy.core.errors import UnderstudyError

Show = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Killed:
    """What was there at the moment of the kill."""

    processes: int
    recorded_steps: int
    acked_steps: int
    stored_steps: int
    after_s: float


def record_and_kill(data: DataFolder, config: SimulateConfig, show: Show, *, after_s: float) -> Killed:
    """Let players play, then kill every process at once."""
    with Simulation(data, config) as simulation:
        began_s = None
        while True:
            progress = simulation.progress()
            show(progress)
            failed = [child for child in simulation.children if child.exit_code not in (None, 0)]
            if failed:
                raise UnderstudyError(f"{failed[0].name} of the demo failed:\n{failed[0].errors}")
            if began_s is None and progress.stored_steps:
                began_s = time.monotonic()
            if began_s is not None and time.monotonic() - began_s >= after_s:
                break
            time.sleep(0.05)
        processes = len(simulation.children)
        simulation.kill()
    return Killed(processes, progress.recorded_steps, progress.acked_steps, progress.stored_steps, after_s)


def go_on(data: DataFolder, config: SimulateConfig, show: Show) -> SimulateResult:
    """Start again on the same folder, as a user would."""
    with Simulation(data, config) as simulation:
        return simulation.run(show)


def sabotage(data: DataFolder, scratch: Path) -> tuple[Verdict, str]:
    """Flip one bit of one stored observation in a copy, and verify that."""
    copy = DataFolder(scratch / "sabotaged")
    shutil.copytree(data.root, copy.root)
    with IngestRole(copy) as role:
        role.store.freeze(wait=True)
    segment = max((copy.store / "segments").glob("*.safetensors"), key=lambda path: path.stat().st_size)
    raw = bytearray(segment.read_bytes())
    at = len(raw) * 3 // 4
    raw[at] ^= 0x10
    segment.write_bytes(raw)
    return verify(copy), f"bit 4 of byte {at} of {segment.name}"
