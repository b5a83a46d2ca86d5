"""The gateway role as a process of its own: reports lines of JSON, and drains when its standard
input closes.

Run as `python -m understudy.platform.gateway_process DATA CONFIG`, where CONFIG is the file that
`up` wrote.
"""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from understudy.backends.addresses import open_stream
from understudy.backends.data import DataFolder
from understudy.backends.deployment import open_deployment
from understudy.core.clock import Clock
from understudy.experience.intake import deployment_key
from understudy.platform.children import report, run_role, stop_with_parent
from understudy.platform.config import Config
from understudy.platform.platform import roles_folder
from understudy.serve.gateway import Gateway
from understudy.serve.server import GatewayServer
from understudy.serve.state import GatewayState

_REPORT_EVERY_S = 0.5
_STALE_S = 10.0
"""A standing is written every second; one this old is of a supervisor that is gone."""


class IngestMetrics(Collector):
    """The ingest role's standing among the gateway's metrics: one address for all that is watched.

    It is as its supervisor wrote it; nothing where there never was one. Counts begin at 0 when the
    role starts, as Prometheus expects of every process.
    """

    def __init__(self, standing: Path, clock: Clock) -> None:
        self._standing = standing
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        try:
            standing = json.loads(self._standing.read_text())
        except (OSError, ValueError):
            return
        now = standing["report"]
        engine = now.get("engine", "native")
        is_running = (
            standing["state"] == "running" and self._clock.now() - standing["at_s"] < _STALE_S
        )

        def metric(kind: Any, name: str, said: str, value: Any, *label: str) -> Metric:
            """A family by engine; `label` parts it further, by the keys of `value`."""
            family: Metric = kind(f"understudy_ingest_{name}", said, labels=["engine", *label])
            for part, number in value.items() if label else [("", value)]:
                family.add_metric([engine, part] if label else [engine], number)  # type: ignore[attr-defined]
            return family

        yield metric(GaugeMetricFamily, "running", "Whether ingest runs", float(is_running))
        yield metric(
            CounterMetricFamily, "restarts", "How often it was started again", standing["restarts"]
        )
        if not now:
            return
        yield metric(CounterMetricFamily, "steps", "Steps that were stored", now["stored"])
        yield metric(
            CounterMetricFamily, "frames", "Frames by what became of them", now["fates"], "fate"
        )
        yield metric(
            CounterMetricFamily, "refusals", "Frames refused, by reason", now["refusals"], "reason"
        )
        if is_running:
            said = "From coming into the stream to being stored, the last frame"
            yield metric(GaugeMetricFamily, "lag_seconds", said, now["lag_s"])
        if is_running and "batch" in now:
            yield metric(
                GaugeMetricFamily, "batch", "Spark's number of its last batch", now["batch"]
            )
            yield metric(GaugeMetricFamily, "batch_rows", "Frames in it", now["batch_rows"])
            yield metric(GaugeMetricFamily, "batch_seconds", "Time it took", now["batch_s"])


def main(data: DataFolder, config: Config) -> None:
    """Serve until the parent asks to stop, then answer the requests that are being served."""
    stop = stop_with_parent()
    opened = open_deployment(data, models=config.models.url)
    houses: list[GatewayState] = []

    def make_house() -> GatewayState:
        houses.append(
            GatewayState(
                config=config.gateway_config,
                stream=open_stream(config.stream.url, data),
                registry=opened.registry,
                keys=opened.keys,
                trusted=opened.trusted,
                deployment_key=deployment_key(data.root),
                clock=opened.clock,
            )
        )
        ingest = IngestMetrics(roles_folder(data) / "ingest.json", opened.clock)
        houses[-1].metrics.registry.register(ingest)
        return houses[-1]

    server = GatewayServer(Gateway(make_house), config.listen)
    is_ready = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            if is_ready.wait(0.05):
                report(
                    {
                        "is_ready": True,
                        "url": server.url,
                        "port": server.port,
                        **_figures(houses[-1]),
                    }
                )
                stop.wait(_REPORT_EVERY_S)
        server.stop()

    threading.Thread(target=watch, daemon=True).start()
    server.run(on_ready=is_ready.set)


def _figures(house: GatewayState) -> dict[str, Any]:
    """Totals since the start, from the gateway's own metrics; and why the stream takes nothing,
    while it does not."""
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
    return {
        **totals,
        "waiting_bytes": house.appender.waiting_bytes,
        "storage_error": house.appender.trouble[:300],
    }


if __name__ == "__main__":
    raise SystemExit(run_role(main))
