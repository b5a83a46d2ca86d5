"""Figures of a gateway, for Prometheus."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)


class Metrics:
    """What an operator watches; labels are routes and registered games, never what a caller made up."""

    def __init__(self, waiting_bytes: Callable[[], float]) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("understudy_requests", "Requests", ["route", "status"], registry=registry)
        self.seconds = Histogram(
            "understudy_request_seconds", "Time to answer", ["route"], registry=registry, buckets=_BUCKETS_S
        )
        self.frames = Counter("understudy_frames", "Frames by what became of them", ["game", "fate"], registry=registry)
        self.frame_bytes = Counter("understudy_frame_bytes", "Bytes of accepted frames", ["game"], registry=registry)
        self.keep_share = Gauge("understudy_keep_share", "Share of episodes asked for", ["game"], registry=registry)
        waiting = Gauge("understudy_waiting_bytes", "Bytes on their way into the stream", registry=registry)
        waiting.set_function(waiting_bytes)
