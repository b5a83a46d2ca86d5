"""WorkerTeam: the actors of a run are workers, which join and leave as they like."""

import contextlib
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from understudy.act.team import TeamPlan, join_collected
from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import ConfigError, LearningFailed
from understudy.core.location import is_loopback
from understudy.core.log import write_file
from understudy.core.tensors import Array
from understudy.models.keys import new_key_text
from understudy.nn.policy import Policy
from understudy.ports import Collected, TeamReport
from understudy.serve.server import GatewayServer, Listen
from understudy.workers.server import (
    Arrival,
    Broadcast,
    RunKeys,
    RunLimits,
    ServerState,
    WorkersApi,
    broadcast_of,
    explore_by_worker,
)
from understudy.workers.wire import KEY_VARIABLE, PORT, RunInfo, key_in, read_key, worker_command

HOST = "127.0.0.1"
_REPORT_EVERY_S = 1.0
_STOP_S = 10.0
_END_NOTICE_S = 3.0
"""How long the server remains after the run, so that every worker hears of its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersConfig:
    """Where workers join a run, and what they may do."""

    host: str = HOST
    port: int = PORT
    certificate: Path | None = None
    """The TLS certificate, a PEM file; needs `certificate_key`."""
    certificate_key: Path | None = None
    insecure: bool = False
    """Whether to allow plain HTTP from other machines, where something else encrypts."""
    key_file: Path | None = None
    """A file with the workers' key; by default the variable UNDERSTUDY_WORKER_KEY, or a file's name
    in UNDERSTUDY_WORKER_KEY_FILE, else the run's own file `worker.key`, which is created."""

    def __post_init__(self) -> None:
        self.listen()

    def listen(self) -> Listen:
        return Listen(
            host=self.host,
            port=self.port,
            certificate=self.certificate,
            certificate_key=self.certificate_key,
            insecure=self.insecure,
            body_timeout_s=90.0,  # above that of RunLimits, which sends an error
            drain_s=2,
        )

    def to_json(self) -> dict[str, Any]:
        files = {
            name: None if path is None else str(path.resolve())
            for name in ("certificate", "certificate_key", "key_file")
            for path in (getattr(self, name),)
        }
        return {"host": self.host, "port": self.port, "insecure": self.insecure, **files}


def workers_config(facts: Mapping[str, Any]) -> WorkersConfig:
    """The inverse of `WorkersConfig.to_json`."""
    paths = {
        name: None if facts[name] is None else Path(facts[name])
        for name in ("certificate", "certificate_key", "key_file")
    }
    return WorkersConfig(**{**facts, **paths})


def parse_listen(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, where either may be missing; ConfigError if it is neither."""
    host, colon, port = text.rpartition(":")
    if "/" in text:
        raise ConfigError(
            f"listen is {text[:60]!r}; pass HOST:PORT without a scheme, such as 127.0.0.1:{PORT}"
        )
    if not colon and text.isascii() and text.isdigit():
        return HOST, int(text)
    if not colon or text.endswith("]"):
        host = text
        port = str(PORT)
    is_bare = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not (port.isascii() and port.isdigit()) or is_bare or not text:
        raise ConfigError(f"listen is {text[:60]!r}; pass HOST:PORT, such as 127.0.0.1:{PORT}")
    return host.removeprefix("[").removesuffix("]") or HOST, int(port)


def worker_key(config: WorkersConfig, default: Path, environ: Mapping[str, str]) -> tuple[str, str]:
    """The key of a run's workers, and where it is.

    Without one, it is created in the file `default`, which only its owner can read.
    """
    if config.key_file is not None:
        return read_key(config.key_file), str(config.key_file)
    text, place = key_in(environ)
    if text:
        return text, place
    if not default.exists():
        write_file(default, (new_key_text() + "\n").encode())
    return read_key(default), str(default)


@dataclass(slots=True)
class _Counts:
    """What has entered the replay since the last report."""

    since_s: float
    update_s: float = 0.0
    chunks: int = 0
    steps: int = 0
    rounds: int = 0
    handling_s: float = 0.0
    lag_versions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What the workers of a run receive, beside the team's plan."""

    info: RunInfo
    steps: int
    """Steps per env and round."""
    seeds: Callable[[int, int], Sequence[int]]
    """Returns a number of held-out seeds; its second argument counts the calls."""
    limits: RunLimits = field(default_factory=RunLimits)
    max_steps: int = 10_000
    """Steps after which an evaluation cuts an episode of a game without a limit."""
    wait_s: float = 0.5
    """How long `collect` waits for a round, before it returns none."""


class WorkerTeam:
    """Serves workers until `close`; a Team that is always asynchronous and has no state.

    `num_envs` is that of the nominal team: its workers have the indexes below `plan.num_actors`,
    and more may join.
    """

    def __init__(
        self,
        plan: TeamPlan,
        run: RunPlan,
        config: WorkersConfig,
        *,
        key: str,
        key_place: str = "",
        clock: Clock | None = None,
    ) -> None:
        self._plan = plan
        self._wait_s = run.wait_s
        self._policy: Policy | None = None
        self._newest: Broadcast | None = None
        self._counts = _Counts(time.monotonic())
        self._lock = threading.Lock()
        self._reported_update_s = 0.0
        self._has_reported_rounds = False
        self._state = ServerState(run.limits, RunKeys({key: ("work",)}), clock or SystemClock())
        self.api = WorkersApi(
            run.info,
            plan,
            state=self._state,
            steps=run.steps,
            max_steps=run.max_steps,
            seeds=run.seeds,
        )
        self._server = GatewayServer(self.api, config.listen())
        self.url = self._server.url
        self.key_place = key_place
        self.command = worker_command(
            self.url.replace("//0.0.0.0:", "//HOST:").replace("//[::]:", "//HOST:"),
            game=run.info.game,
            wrappers=run.info.wrappers,
        )
        if not (config.certificate or is_loopback(config.host)):
            self.command += " --insecure"
        if key_place not in ("", KEY_VARIABLE):
            self.command += f" --key-file {shlex.quote(key_place)}"
        ready = threading.Event()
        self._thread = threading.Thread(
            target=self._server.run, args=(ready.set,), name="workers", daemon=True
        )
        self._thread.start()
        if not ready.wait(_STOP_S):
            self.close()
            raise LearningFailed(
                f"the server for workers did not start within {_STOP_S:g} s; resume the run"
            )

    @property
    def num_envs(self) -> int:
        return self._plan.num_envs

    def collect(
        self, policy: Policy, steps: int, *, round_no: int, explore: Any = None
    ) -> Collected:
        """Publish the policy, and return the rounds that have arrived, which may be none."""
        if policy.game.schema != self._plan.game.schema:
            raise ConfigError(
                f"cannot collect with a policy for {policy.game.game}; use one with the spaces of "
                f"{self._plan.game.game}"
            )
        self._publish(policy, explore)
        rounds = self.api.queue.take(self._wait_s)
        if not self._thread.is_alive():
            raise LearningFailed("the server for workers has ended; resume the run")
        return replace(
            join_collected([arrival.collected for arrival in rounds]),
            replaced=_drained(self.api.messages),
            evaluations=_drained(self.api.evaluations),
            report=self._report(),
            on_inserted=lambda update_s: self._inserted(rounds, update_s),
        )

    def _publish(self, policy: Policy, explore: Any) -> None:
        if self._newest is None or policy is not self._policy:
            newest = broadcast_of(policy.encode(), policy.version, explore, self._plan)
        else:
            newest = replace(self._newest, explore=explore_by_worker(explore, self._plan))
            if newest == self._newest:
                return
        self._policy = policy
        self._newest = newest
        self.api.publish(newest)

    def _inserted(self, rounds: Sequence[Arrival], update_s: float) -> None:
        now_s = time.monotonic()
        metrics = self._state.metrics
        with self._lock:
            counts = self._counts
            counts.update_s = update_s
            for arrival in rounds:
                handling_s = now_s - arrival.arrived_s
                counts.chunks += len(arrival.collected.chunks)
                counts.steps += arrival.collected.env_steps
                counts.rounds += 1
                counts.handling_s += handling_s
                counts.lag_versions = max(counts.lag_versions, arrival.lag_versions)
                metrics.handling_s.observe(handling_s)
                metrics.lag_versions.observe(arrival.lag_versions)
                metrics.chunks.inc(len(arrival.collected.chunks))
                metrics.steps.inc(arrival.collected.env_steps)
        self.api.inserted(rounds)

    def _report(self) -> TeamReport | None:
        """The work since the last report: after the first round, then at most once a second."""
        now_s = time.monotonic()
        with self._lock:
            counts = self._counts
            took_s = now_s - counts.since_s
            is_first = counts.rounds > 0 and not self._has_reported_rounds
            if took_s < _REPORT_EVERY_S and not is_first:
                return None
            self._counts = _Counts(now_s, counts.update_s)
            self._has_reported_rounds |= counts.rounds > 0
        load = min(1.0, (counts.update_s - self._reported_update_s) / took_s)
        self._reported_update_s = counts.update_s
        self._state.metrics.load.set(load)
        return TeamReport(
            workers=self.api.workers,
            chunks_s=counts.chunks / took_s,
            steps_s=counts.steps / took_s,
            handling_s=counts.handling_s / max(1, counts.rounds),
            learner_load=load,
            lag_versions=counts.lag_versions,
            queue_bytes=self.api.queue.size_bytes,
        )

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        raise _no_state()

    def restore(self, arrays: Mapping[str, Array], facts: Mapping[str, Any]) -> None:
        raise _no_state()

    def finish(self) -> None:
        """Tell the workers that the run is over, so that they end; waits for those that play."""
        self.api.end("run_over")
        self.api.all_have_left.wait(_END_NOTICE_S)

    def close(self) -> None:
        self._server.stop()
        self._thread.join(_STOP_S)


def _no_state() -> ConfigError:
    return ConfigError("a team of workers has no state, since they do not wait; restart episodes")


def _drained(items: Any) -> Any:
    """Remove and return what another thread has appended."""
    taken = []
    with contextlib.suppress(IndexError):
        while True:
            taken.append(items.popleft())
    return tuple(taken)
