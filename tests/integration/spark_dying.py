"""Spark ingest that kills itself after storing a batch, before the driver knows of it."""

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from understudy.backends.data import DataFolder
from understudy.ingest.service import IngestProgress, Turn
from understudy.ingest.spark import SparkTasks
from understudy.platform.children import log_to_stderr
from understudy.platform.config import read_config
from understudy.platform.ingest import main

_take = SparkTasks.__call__


def _take_and_die(self: SparkTasks, turns: Iterable[Turn]) -> Iterator[IngestProgress]:
    for progress in _take(self, turns):
        if progress.records:
            os.kill(os.getpid(), signal.SIGKILL)
        yield progress


if __name__ == "__main__":
    log_to_stderr()
    SparkTasks.__call__ = _take_and_die  # type: ignore[method-assign]
    main(DataFolder(Path(sys.argv[1])), read_config(Path(sys.argv[2])))
