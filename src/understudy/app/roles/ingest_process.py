"""The ingest role as a process of its own: reports lines of JSON, and drains when its standard input closes.

Run as `python -m understudy.app.roles.ingest_process DATA [CONFIG]`, where CONFIG is the file that `up` wrote.
"""

import sys
import threading
from functools import partial
from pathlib import Path

from understudy.app.backends import open_store, open_stream
from understudy.app.config import Config, read_config
from understudy.app.data import DataFolder
from understudy.app.deployment import open_deployment
from understudy.app.roles.children import report, run_role, stop_with_parent
from understudy.app.roles.ingest import RETENTION_S, IngestRole
from understudy.app.roles.logs import log_to_stderr
from understudy.app.roles.remote_ingest import RemoteIngestRole
from understudy.app.specs import RegistrySpecs

_REPORT_EVERY_S = 0.25


def main(data: DataFolder, config: Config) -> None:
    """Follow the stream until told to stop."""
    stop = stop_with_parent()
    with open_ingest(data, config) as role:
        reporter = threading.Thread(target=_report_often, args=(role, stop), daemon=True)
        reporter.start()
        role.run(stop)
        reporter.join()
        _report(role)


def open_ingest(
    data: DataFolder, config: Config, *, retention_s: float = RETENTION_S, keep_s: float | None = None
) -> IngestRole | RemoteIngestRole:
    """The role between the stream and the store that a config names.

    `retention_s`: how long a stream in the data folder keeps what is stored; `keep_s`: how long a store in it does.
    """
    stream, models = partial(open_stream, config.stream.url, data), config.models.url
    if not (models or config.store.url):
        return IngestRole(data, open_stream=stream, retention_s=retention_s, keep_s=keep_s)
    specs = RegistrySpecs(open_deployment(data, models=models).registry)
    if not config.store.url:
        return IngestRole(data, specs=specs, open_stream=stream, retention_s=retention_s, keep_s=keep_s)
    store = partial(open_store, config.store.url, specs=specs)
    return RemoteIngestRole(data, open_stream=stream, open_store=store, specs=specs, retention_s=retention_s)


def _report_often(role: IngestRole | RemoteIngestRole, stop: threading.Event) -> None:
    while not stop.is_set():
        _report(role)
        stop.wait(_REPORT_EVERY_S)


def _report(role: IngestRole | RemoteIngestRole) -> None:
    stats = role.service.stats
    fields = {"stored": stats.steps, "lag_s": round(stats.lag_s, 4), "fates": dict(stats.fates)}
    report({**fields, "refusals": dict(stats.refusals), "storage_error": stats.trouble[:300]})


if __name__ == "__main__":
    log_to_stderr()
    folder = DataFolder(Path(sys.argv[1]))
    given = read_config(Path(sys.argv[2])) if len(sys.argv) > 2 else Config()
    raise SystemExit(run_role(lambda: main(folder, given)))
