"""The ingest role as a process of its own: reports lines of JSON, and drains when its standard input closes.

Run as `python -m understudy.app.roles.ingest_process DATA [CONFIG]`, where CONFIG is the file that `up` wrote.
"""

import sys
import threading
from pathlib import Path

from understudy.app.config import Config, read_config
from understudy.app.data import DataFolder
from understudy.app.roles.children import report, run_role, stop_with_parent
from understudy.app.roles.ingest import ROLE_DRAIN_S, IngestRole, open_ingest
from understudy.app.roles.logs import log_to_stderr

_REPORT_EVERY_S = 0.25


def main(data: DataFolder, config: Config) -> None:
    """Follow the stream until told to stop."""
    stop = stop_with_parent()
    is_over = threading.Event()
    with open_ingest(data, config) as role:
        reporter = threading.Thread(target=_report_often, args=(role, is_over), daemon=True)
        reporter.start()
        try:
            role.run(stop, drain_s=ROLE_DRAIN_S)
        finally:
            is_over.set()
            reporter.join()
        report(role.report())


def _report_often(role: IngestRole, is_over: threading.Event) -> None:
    while True:
        # Whoever hears nothing knows that it does not run yet, and that a wrong setting is still found.
        if role.is_running:
            report(role.report())
        if is_over.wait(_REPORT_EVERY_S):
            return


if __name__ == "__main__":
    log_to_stderr()
    folder = DataFolder(Path(sys.argv[1]))
    given = read_config(Path(sys.argv[2])) if len(sys.argv) > 2 else Config()
    raise SystemExit(run_role(lambda: main(folder, given)))
