"""The real ingest process with small thresholds, so that kills hit every stage of its work.

Run as `python -m tests.faults.ingester DATA`; it reports and stops like
`understudy.platform.ingest`.
"""

import sys
from pathlib import Path

from understudy.backends.data import DataFolder
from understudy.platform import ingest
from understudy.platform.children import log_to_stderr
from understudy.platform.config import Config
from understudy.stores import database

CHECKPOINT_BYTES = 256 * 1024
RETENTION_S = 1.0


def make_hasty() -> None:
    """Make stores of this process checkpoint every few commits, and trim the stream at once."""
    database.CHECKPOINT_BYTES = CHECKPOINT_BYTES
    role_defaults = ingest.IngestRole.__init__.__kwdefaults__
    assert role_defaults is not None
    role_defaults["retention_s"] = RETENTION_S
    ingest.TRIM_EVERY_S = 0.2


if __name__ == "__main__":
    log_to_stderr()
    make_hasty()
    ingest.main(DataFolder(Path(sys.argv[1])), Config())
