"""Spark ingest as a process of its own: reports lines of JSON, and drains when its standard input closes.

Run as `python -m understudy.app.roles.spark_process DATA CONFIG [CHECKPOINT]`; `up` wrote the file CONFIG.
"""

import sys
import threading
from pathlib import Path

from understudy.app.config import Config, read_config
from understudy.app.data import DataFolder
from understudy.app.roles.children import report, run_role, stop_with_parent
from understudy.app.roles.ingest import ROLE_DRAIN_S
from understudy.app.roles.ingest_report import report_of
from understudy.app.roles.logs import log_to_stderr
from understudy.app.roles.spark_ingest import SparkIngestRole

_REPORT_EVERY_S = 0.5


def main(data: DataFolder, config: Config, *, checkpoint: str = "") -> None:
    """Follow the stream until told to stop."""
    stop = stop_with_parent()
    with SparkIngestRole(data, config, checkpoint=checkpoint) as role:
        is_over = threading.Event()
        reporter = threading.Thread(target=_report_often, args=(role, is_over), daemon=True)
        reporter.start()
        try:
            role.run(stop, drain_s=ROLE_DRAIN_S)
        finally:
            is_over.set()
            reporter.join()
        _report(role)


def _report_often(role: SparkIngestRole, is_over: threading.Event) -> None:
    while not is_over.wait(_REPORT_EVERY_S):
        # Whoever hears nothing knows that it does not run yet, and that a wrong setting is still found.
        if role.service.is_running:
            _report(role)


def _report(role: SparkIngestRole) -> None:
    report(report_of(role.service.stats, engine="spark", **role.figures()))


if __name__ == "__main__":
    log_to_stderr()
    folder, given = DataFolder(Path(sys.argv[1])), read_config(Path(sys.argv[2]))
    place = sys.argv[3] if len(sys.argv) > 3 else ""
    raise SystemExit(run_role(lambda: main(folder, given, checkpoint=place)))
