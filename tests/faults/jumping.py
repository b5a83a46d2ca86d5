"""The real gateway or ingest process with a clock that jumps.

Run as `python -m tests.faults.jumping ROLE CLOCK DATA CONFIG`: the file CLOCK holds the seconds by
which its clock is wrong. It reports and stops like the role itself.
"""

import sys
import threading
import time
from pathlib import Path

from understudy.platform import gateway_process, ingest
from understudy.platform.children import run_role

ROLES = {"gateway": gateway_process.main, "ingest": ingest.main}


def jump_with(path: Path) -> None:
    """Make this process's wall clock wrong by the seconds in a file, from now on."""
    true_time = time.time
    offset_s = float(path.read_text())

    def follow() -> None:
        nonlocal offset_s
        while True:
            time.sleep(0.02)
            offset_s = float(path.read_text())

    time.time = lambda: true_time() + offset_s
    threading.Thread(target=follow, daemon=True).start()


if __name__ == "__main__":
    _, role, clock, *sys.argv[1:] = sys.argv
    jump_with(Path(clock))
    raise SystemExit(run_role(ROLES[role]))
