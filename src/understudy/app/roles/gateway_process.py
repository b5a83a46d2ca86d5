"""The gateway role as a process of its own: reports lines of JSON, and drains when its standard input closes.

Run as `python -m understudy.app.roles.gateway_process DATA CONFIG`, where CONFIG is the file that `up` wrote.
"""

import sys
import threading
from pathlib import Path
from typing import Any

from understudy.app.backends import open_stream
from understudy.app.config import Config, read_config
from understudy.app.data import DataFolder
from understudy.app.deployment import open_deployment
from understudy.app.roles.children import report, run_role, stop_with_parent
from understudy.app.roles.ingest_metrics import IngestMetrics
from understudy.app.roles.logs import log_to_stderr
from understudy.app.roles.platform import roles_folder
from understudy.core.door import deployment_key
from understudy.serve.gateway import Gateway
from understudy.serve.house import House
from understudy.serve.server import Server

_REPORT_EVERY_S = 0.5


def main(data: DataFolder, config: Config) -> None:
    """Serve until told to stop, then answer whoever is being served."""
    stop = stop_with_parent()
    opened = open_deployment(data, models=config.models.url)
    houses: list[House] = []

    def make_house() -> House:
        houses.append(House(
            config=config.gateway_config, stream=open_stream(config.stream.url, data), registry=opened.registry,
            keys=opened.keys, trusted=opened.trusted, deployment_key=deployment_key(data.root), clock=opened.clock,
        ))  # fmt: skip
        ingest = IngestMetrics(roles_folder(data) / "ingest.json", opened.clock)
        houses[-1].metrics.registry.register(ingest)
        return houses[-1]

    server, is_ready = Server(Gateway(make_house), config.listen), threading.Event()
    watcher = threading.Thread(target=_watch, args=(server, houses, is_ready, stop), daemon=True)
    watcher.start()
    server.run(on_ready=is_ready.set)


def _watch(server: Server, houses: list[House], is_ready: threading.Event, stop: threading.Event) -> None:
    """Tell the parent how things stand until it asks to stop."""
    while not stop.is_set():
        if is_ready.wait(0.05):
            report({"is_ready": True, "url": server.url, "port": server.port, **_figures(houses[-1])})
            stop.wait(_REPORT_EVERY_S)
    server.stop()


def _figures(house: House) -> dict[str, Any]:
    """Totals since the start, from the gateway's own metrics; and why the stream takes nothing, while it does not."""
    totals = {"requests": 0.0, "frames": 0.0, "refused": 0.0, "errors": 0.0}
    for family in house.metrics.registry.collect():
        for sample in family.samples:
            match sample.name, sample.labels:
                case "understudy_requests_total", {"status": status}:
                    totals["requests"] += sample.value
                    totals["errors"] += sample.value if status.startswith("5") else 0
                case "understudy_frames_total", {"fate": "accepted"}:
                    totals["frames"] += sample.value
                case "understudy_frames_total", {"fate": "refused"}:
                    totals["refused"] += sample.value
    return {**totals, "waiting_bytes": house.appender.waiting_bytes, "storage_error": house.appender.trouble[:300]}


if __name__ == "__main__":
    log_to_stderr()
    folder, path = DataFolder(Path(sys.argv[1])), Path(sys.argv[2])
    raise SystemExit(run_role(lambda: main(folder, read_config(path))))
