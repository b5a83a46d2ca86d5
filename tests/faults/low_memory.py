"""Ingest with less memory than a frame needs: `python -m tests.faults.low_memory FOLDER`.

Prints how many frames were stored and quarantined while memory was short, and afterwards.
"""

import json
import re
import resource
import sys
from pathlib import Path

from tests.faults.amplifying import SPECS
from tests.ingest.specs import KnownSpecs
from understudy.core.errors import StorageFull
from understudy.ingest.service import BatchMark, IngestService
from understudy.stores.local import LocalStore
from understudy.streams.file import FileStream

_SPARE_BYTES = 8 * 1024 * 1024


def main(folder: Path) -> None:
    """Store the folder's stream, first under a limit and then without one."""
    with LocalStore(folder / "store", synchronous="OFF") as store:
        service = IngestService(
            FileStream(folder / "stream"),
            store,
            KnownSpecs(*SPECS.values()),
            owner="test",
            mark=BatchMark(folder / "ingest.batch"),
        )
        found = re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        limit = int(found[1]) * 1024 + _SPARE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        errors: list[str] = []
        for _ in range(3):
            try:
                while service.step():
                    pass
            except StorageFull as error:
                errors.append(str(error))
        short = _counts(store)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        service.drain()
        after = _counts(store)
    print(json.dumps({"errors": errors, "short": short, "after": after}))


def _counts(store: LocalStore) -> list[int]:
    return [store.next_arrival - 1, len(store.quarantined())]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
