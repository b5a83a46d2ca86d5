"""The ingest role as a process of its own: reports lines of JSON, and drains when its standard input closes.

Run as `python -m understudy.app.ingest_process DATA`.
"""

import sys
import threading
from pathlib import Path

from understudy.app.children import report, stop_with_parent
from understudy.app.data import DataFolder
from understudy.app.ingest import IngestRole
from understudy.app.logs import log_to_stderr

_REPORT_EVERY_S = 0.25


def main(data: DataFolder) -> None:
    stop = stop_with_parent()
    with IngestRole(data) as role:
        reporter = threading.Thread(target=_report_often, args=(role, stop), daemon=True)
        reporter.start()
        role.run(stop)
        reporter.join()
        _report(role)


def _report_often(role: IngestRole, stop: threading.Event) -> None:
    while not stop.is_set():
        _report(role)
        stop.wait(_REPORT_EVERY_S)


def _report(role: IngestRole) -> None:
    stats = role.service.stats
    fields = {"stored": stats.steps, "lag_s": round(stats.lag_s, 4), "fates": dict(stats.fates)}
    report({**fields, "refusals": dict(stats.refusals)})


if __name__ == "__main__":
    log_to_stderr()
    main(DataFolder(Path(sys.argv[1])))
