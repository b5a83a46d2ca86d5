"""The ingest role as a process of its own: reports lines of JSON, and drains when its standard input closes.

Run as `python -m understudy.app.roles.ingest_process DATA [CONFIG]`, where CONFIG is the file that `up` wrote.
"""

import sys
import threading
from pathlib import Path

from understudy.app.config import read_config
from understudy.app.data import DataFolder
from understudy.app.deployment import open_deployment
from understudy.app.roles.children import report, run_role, stop_with_parent
from understudy.app.roles.ingest import IngestRole
from understudy.app.roles.logs import log_to_stderr
from understudy.app.specs import RegistrySpecs

_REPORT_EVERY_S = 0.25


def main(data: DataFolder, *, models: str = "") -> None:
    """Follow the stream until told to stop; `models` is the URL of the registry, when it is not in the data folder."""
    stop = stop_with_parent()
    specs = RegistrySpecs(open_deployment(data, models=models).registry) if models else None
    with IngestRole(data, specs=specs) as role:
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
    folder = DataFolder(Path(sys.argv[1]))
    url = read_config(Path(sys.argv[2])).models.url if len(sys.argv) > 2 else ""
    raise SystemExit(run_role(lambda: main(folder, models=url)))
