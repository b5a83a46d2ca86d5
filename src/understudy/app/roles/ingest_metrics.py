"""What ingest reports, among the gateway's metrics: one address for whoever watches a deployment."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from understudy.core.clock import Clock

_STALE_S = 10.0
"""A standing is written every second; one this old is of a supervisor that is gone."""


class IngestMetrics(Collector):
    """The ingest role's standing beside this gateway, as its supervisor wrote it; nothing where there never was one.

    Counts begin at 0 when the role starts, as Prometheus expects of every process.
    """

    def __init__(self, standing: Path, clock: Clock) -> None:
        self._standing, self._clock = standing, clock

    def collect(self) -> Iterator[Metric]:
        try:
            standing = json.loads(self._standing.read_text())
        except (OSError, ValueError):
            return
        report = standing["report"]
        engine = report.get("engine", "native")
        is_running = standing["state"] == "running" and self._clock.now() - standing["at_s"] < _STALE_S
        yield _gauge("understudy_ingest_running", "Whether ingest runs", engine, float(is_running))
        yield _counter("understudy_ingest_restarts", "How often it was started again", engine, standing["restarts"])
        if not report:
            return
        yield _counter("understudy_ingest_steps", "Steps that were stored", engine, report["stored"])
        yield _counters("understudy_ingest_frames", "Frames by what became of them", engine, "fate", report["fates"])
        refusals = report["refusals"]
        yield _counters("understudy_ingest_refusals", "Frames refused, by reason", engine, "reason", refusals)
        if is_running:
            said = "From coming into the stream to being stored, the last frame"
            yield _gauge("understudy_ingest_lag_seconds", said, engine, report["lag_s"])
        if is_running and "batch" in report:
            yield _gauge("understudy_ingest_batch", "Spark's number of its last batch", engine, report["batch"])
            yield _gauge("understudy_ingest_batch_rows", "Frames in it", engine, report["batch_rows"])
            yield _gauge("understudy_ingest_batch_seconds", "Time it took", engine, report["batch_s"])


def _gauge(name: str, said: str, engine: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, said, labels=["engine"])
    family.add_metric([engine], value)
    return family


def _counter(name: str, said: str, engine: str, value: float) -> Metric:
    family = CounterMetricFamily(name, said, labels=["engine"])
    family.add_metric([engine], value)
    return family


def _counters(name: str, said: str, engine: str, label: str, values: Mapping[str, Any]) -> Metric:
    family = CounterMetricFamily(name, said, labels=["engine", label])
    for one, value in values.items():
        family.add_metric([engine, one], value)
    return family
