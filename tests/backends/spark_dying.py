"""Spark ingest that dies by its own hand as soon as a batch is stored, before Spark can note that it was."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from understudy.app.config import read_config
from understudy.app.data import DataFolder
from understudy.app.roles.logs import log_to_stderr
from understudy.app.roles.spark_process import main
from understudy.ingest.spark import SparkIngest

_store_batch = SparkIngest._store_batch


def _store_batch_and_die(self: SparkIngest, frames: Any, _batch: int) -> None:
    before = self.stats.frames
    _store_batch(self, frames, _batch)
    # Where the first batch begins is not noted by Spark, so that it is not handed over again: it asks the store.
    if _batch and self.stats.frames > before:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    log_to_stderr()
    SparkIngest._store_batch = _store_batch_and_die  # type: ignore[method-assign]
    main(DataFolder(Path(sys.argv[1])), read_config(Path(sys.argv[2])))
