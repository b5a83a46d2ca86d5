"""How much memory this process uses."""

import gc
from pathlib import Path

PAGE_BYTES = 4096
MIB = 1024 * 1024


def resident_bytes() -> int:
    """Resident memory, with what Python could free freed."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
