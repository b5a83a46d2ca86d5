"""The memory use of this process."""

import gc
import re
from itertools import pairwise
from pathlib import Path

MIB = 1024 * 1024


def own_bytes() -> int:
    """Private resident memory without mapped files, after a garbage collection."""
    gc.collect()
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def steady_growth(samples: list[int]) -> float:
    """Growth without the two largest steps: shows a leak, but not one large allocation."""
    steps = sorted(after - before for before, after in pairwise(samples))
    return sum(steps[:-2]) / len(steps[:-2]) * len(steps)
