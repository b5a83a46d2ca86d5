"""The gateway role as a process, which stops when its standard input closes.

Run as `python -m understudy.platform.gateway_process DATA CONFIG`, where CONFIG is the file that
`up` wrote. It prints its status as JSON lines; before it exits, it completes the requests in
progress.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import structlog
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from understudy.backends.addresses import open_stream
from understudy.backends.data import DataFolder
from understudy.backends.deployment import open_deployment
from understudy.core.clock import Clock
from understudy.core.wording import shortened
from understudy.experience.intake import deployment_key
from understudy.platform.children import report, run_role, stop_with_parent
from understudy.platform.config import Config
from understudy.platform.platform import read_roles
from understudy.serve.gateway import Gateway
from understudy.serve.server import GatewayServer
from understudy.serve.state import GameProgress, GatewayState

_REPORT_EVERY_S = 0.5

_log = structlog.get_logger("understudy.gateway")


class RoleMetrics(Collector):
    """Adds the roles of the data folder to the gateway's metrics, so that one URL serves them all.

    Reads the status files that supervisors write. Counts start at 0 when a process starts, as
    Prometheus expects.
    """

    def __init__(self, data: DataFolder, clock: Clock) -> None:
        self._data = data
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        running = GaugeMetricFamily(
            "understudy_role_running", "Whether a role runs and reports", labels=["role"]
        )
        age = GaugeMetricFamily(
            "understudy_role_report_age_seconds", "Time since its last report", labels=["role"]
        )
        restarts = CounterMetricFamily(
            "understudy_role_restarts", "Number of restarts", labels=["role"]
        )
        roles = read_roles(self._data, self._clock.now())
        for role in roles:
            running.add_metric([role["role"]], float(role["state"] == "running"))
            restarts.add_metric([role["role"]], role["restarts"])
            if role["report_age_s"] is not None:
                age.add_metric([role["role"]], role["report_age_s"])
        yield from (running, age, restarts) if roles else ()
        for role in roles:
            if role["role"] == "ingest":
                yield from self._ingest(role)
            if role["role"] == "learner":
                yield _not_compared(role["report"])

    def _ingest(self, role: dict[str, Any]) -> Iterator[Metric]:
        now = role["report"]
        engine = now.get("engine", "native")
        is_running = role["state"] == "running"

        def metric(kind: Any, name: str, text: str, value: Any, *label: str) -> Metric:
            """A metric by engine; with `label`, `value` is a dict that has one sample per key."""
            family: Metric = kind(f"understudy_ingest_{name}", text, labels=["engine", *label])
            for part, number in value.items() if label else [("", value)]:
                family.add_metric([engine, part] if label else [engine], number)  # type: ignore[attr-defined]
            return family

        yield metric(GaugeMetricFamily, "running", "Whether ingest runs", float(is_running))
        yield metric(CounterMetricFamily, "restarts", "Number of restarts", role["restarts"])
        if not now:
            return
        yield metric(CounterMetricFamily, "steps", "Steps stored", now["stored"])
        yield metric(CounterMetricFamily, "frames", "Frames by outcome", now["fates"], "fate")
        yield metric(
            CounterMetricFamily, "refusals", "Frames rejected, by reason", now["refusals"], "reason"
        )
        if role["lag_s"] is not None:
            text = "How long the oldest frame that is not stored may have been in the stream"
            yield metric(GaugeMetricFamily, "lag_seconds", text, role["lag_s"])
        if is_running and "batch" in now:
            yield metric(GaugeMetricFamily, "batch", "Number of Spark's last batch", now["batch"])
            yield metric(GaugeMetricFamily, "batch_rows", "Frames in that batch", now["batch_rows"])
            yield metric(
                GaugeMetricFamily, "batch_seconds", "Duration of that batch", now["batch_s"]
            )


def _not_compared(now: Mapping[str, Any]) -> Metric:
    family = GaugeMetricFamily(
        "understudy_learner_episodes_not_compared",
        "Episodes whose draw the gate does not believe, by reason",
        labels=["game", "reason"],
    )
    for name, game in now.get("games", {}).items():
        for reason, n_episodes in game.get("not_compared", {}).items():
            family.add_metric([name, reason], n_episodes)
    return family


def main(data: DataFolder, config: Config) -> None:
    """Serve until the parent requests a stop, then complete the requests in progress."""
    stop = stop_with_parent()
    opened = open_deployment(data, models=config.models.url)
    states: list[GatewayState] = []

    def create_state() -> GatewayState:
        states.append(
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
        states[-1].metrics.registry.register(RoleMetrics(data, opened.clock))
        return states[-1]

    server = GatewayServer(Gateway(create_state), config.listen)
    is_ready = threading.Event()

    def watch() -> None:
        try:
            while not stop.is_set():
                if is_ready.wait(0.05):
                    try:
                        roles = read_roles(data, opened.clock.now())
                        states[-1].roles = role_states(roles)
                        states[-1].progress = learner_progress(roles)
                        figures = _figures(states[-1])
                    except OSError as error:
                        # Too many open files for a moment do not end the gateway.
                        _log.warning("roles_unreadable", error=str(error))
                        figures = {}
                    here = {"is_ready": True, "url": server.url, "port": server.port}
                    report(here | figures)
                    stop.wait(_REPORT_EVERY_S)
        except BrokenPipeError:
            pass  # the parent was killed, and `stop` is not set yet
        finally:
            server.stop()

    threading.Thread(target=watch, daemon=True).start()
    server.run(on_ready=is_ready.set)


def learner_progress(roles: Sequence[Mapping[str, Any]]) -> dict[str, GameProgress]:
    """Return what the learner of this machine reports of each game."""
    reports = (role["report"].get("games", {}) for role in roles if role["role"] == "learner")
    games: dict[str, dict[str, Any]] = next(reports, {})
    return {
        name: GameProgress(
            missing_steps=game.get("missing_steps"),
            schema=game.get("schema"),
            schema_steps=game.get("schema_steps", {}),
        )
        for name, game in games.items()
    }


def role_states(roles: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the state of each role; one that starts again after a crash is `restarting`."""
    return {
        role["role"]: "restarting"
        if role["state"] == "starting" and role["restarts"]
        else role["state"]
        for role in roles
    }


def _figures(state: GatewayState) -> dict[str, Any]:
    """Return totals since the start from the gateway's metrics, and the stream's current error."""
    totals = {"requests": 0.0, "frames": 0.0, "refused": 0.0, "errors": 0.0}
    for family in state.metrics.registry.collect():
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
        "waiting_bytes": state.appender.waiting_bytes,
        "storage_error": shortened(state.appender.error, 1000),
    }


if __name__ == "__main__":
    raise SystemExit(run_role(main))
