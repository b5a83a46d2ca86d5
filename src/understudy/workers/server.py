"""The server of a run: routes for workers, in a thread of the learner's process.

    worker ─► key ─► run ─► lease ─► check ─► queue ─► learner: insert ─► ack

The learner never waits for a socket: it takes what is in the queue. The queue is bounded in bytes;
a worker that finds it full gets 429 and sends the same round again later.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import structlog
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

import understudy
from understudy.act.team import TeamPlan, explore_parts
from understudy.act.vector import is_train_only
from understudy.core.clock import Clock
from understudy.core.errors import ConfigError, Refused, SpecError
from understudy.core.wording import joined, shortened
from understudy.experience.game import GameSpec, spec_from_json
from understudy.experience.spaces import MAX_NUMBER
from understudy.models.keys import NO_KEY, Key, KeyRing, check_key, key_with_text
from understudy.models.keys import Scope as KeyScope
from understudy.ports import Collected, PlayedEvaluation
from understudy.serve.api import STATUS, Answer, ApiRoute, Call, Denied, not_found
from understudy.serve.gateway import serve_request
from understudy.serve.state import Limits, MemoryBudget
from understudy.serve.wire import Health, read_json
from understudy.workers.leases import (
    Lease,
    Leases,
    check_round,
    count_round,
    read_round,
)
from understudy.workers.wire import (
    BINARY,
    PROTOCOL,
    JoinAnswer,
    JoinRequest,
    Leave,
    Results,
    RoundAnswer,
    RoundHead,
    RunInfo,
    WeightsHead,
    pack,
    unpack,
)

_log = structlog.get_logger("understudy.workers")
_INLINE_BYTES = 256 * 1024
"""Larger rounds are decoded and checked in a thread, so that other requests do not wait."""
_MAX_POLL_S = 30.0
_MAX_ACK_S = 10.0
_EXPIRE_EVERY_S = 0.5
_MAX_MESSAGES = 100
_MAX_REPEATS = 2
_STATUS = {
    **STATUS,
    "no_such_run": 404,
    "out_of_order": 409,
    "join_again": 410,
    "run_over": 410,
    "queue_full": 429,
}
_MAX_EPISODES = 4096
_SPARE_BYTES = 1 << 20
"""Of a body, beside its rows."""
_ROWS_PER_STEP = 4
"""Of a body, at most: a round of episodes of one step has two rows per step, and more columns."""
_NO_LIMIT: dict[str, Any] = {"requests_s": 1e8, "bytes_s": 1e11}
"""All workers share one key; what they send is limited by the queue."""
_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_BUCKETS_VERSIONS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)


class RunKeys:
    """The keys of a run, known by their text."""

    def __init__(self, texts: Mapping[str, Sequence[KeyScope]]) -> None:
        keys = [key_with_text(text, scopes, **_NO_LIMIT) for text, scopes in texts.items()]
        self._ring = KeyRing(keys={key.id: key for key in keys})

    def check(self, text: str | None) -> Key:
        if not text:
            raise Refused("no_key", NO_KEY)
        try:
            return check_key(text, self._ring, now_s=0.0)
        except Refused as error:
            raise Refused(
                error.reason,
                "this is not a worker key of this run; use the one in RUN/worker.key on the "
                "learner's machine",
            ) from None

    def allows_origin(self, origin: str) -> bool:
        return False


class RunMetrics:
    """The metrics of a run with workers."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "understudy_requests", "Requests", ["route", "status"], registry=registry
        )
        self.seconds = Histogram(
            "understudy_request_seconds",
            "Time to answer",
            ["route"],
            registry=registry,
            buckets=_BUCKETS_S,
        )
        self.chunks = Counter(
            "understudy_arrived_chunks",
            "Workers' chunks in the replay, or rejected by it",
            registry=registry,
        )
        self.steps = Counter(
            "understudy_arrived_steps",
            "Workers' steps in the replay, or rejected by it",
            registry=registry,
        )
        self.refused = Counter(
            "understudy_refused_rounds", "Rejected rounds", ["reason"], registry=registry
        )
        self.handling_s = Histogram(
            "understudy_handling_seconds",
            "Time from the arrival of a round until the learner has inserted or rejected it",
            registry=registry,
            buckets=_BUCKETS_S,
        )
        self.lag_versions = Histogram(
            "understudy_lag_versions",
            "Lag of arrived rounds",
            registry=registry,
            buckets=_BUCKETS_VERSIONS,
        )
        self.load = Gauge(
            "understudy_learner_load", "Share of time spent in updates", registry=registry
        )
        self.queue = Gauge(
            "understudy_queue_bytes", "Bytes that wait for the learner", registry=registry
        )
        self.workers = Gauge("understudy_workers", "Workers by task", ["task"], registry=registry)
        self.evaluations = Counter(
            "understudy_evaluated_episodes", "Episodes that workers evaluated", registry=registry
        )


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A valid round that waits for the learner."""

    collected: Collected
    size_bytes: int
    arrived_s: float
    lag_versions: int
    answer: asyncio.Future[None]
    """Done once the learner has inserted the round."""


class RoundQueue:
    """Rounds between the server's thread and the learner's, bounded in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.size_bytes = 0
        """Of rounds that have arrived and are not in the replay yet."""
        self._rounds: deque[Arrival] = deque()
        self._changed = threading.Condition()

    def reserve(self, size_bytes: int) -> bool:
        """Whether there is room, which is then taken; an empty queue accepts any round."""
        with self._changed:
            if self.size_bytes and self.size_bytes + size_bytes > self.max_bytes:
                return False
            self.size_bytes += size_bytes
            return True

    def release(self, size_bytes: int) -> None:
        with self._changed:
            self.size_bytes -= size_bytes

    def put(self, arrival: Arrival) -> None:
        """Append a round whose room is reserved."""
        with self._changed:
            self._rounds.append(arrival)
            self._changed.notify()

    def take(self, timeout_s: float) -> list[Arrival]:
        """Everything that has arrived; waits for the first round, at most for `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._rounds, timeout_s)
            rounds = list(self._rounds)
            self._rounds.clear()
            return rounds


@dataclass(frozen=True, slots=True)
class Broadcast:
    """A version's policy as every worker receives it, and the epsilon of each."""

    version: int
    policy: bytes
    explore: Sequence[Any]
    """By worker: one epsilon, one per env, or None."""
    packed: bytes
    """The answer of the route `weights`."""


def broadcast_of(policy: bytes, version: int, explore: Any, plan: TeamPlan) -> Broadcast:
    """A version for all workers; their part of `explore` is that of their index."""
    packed = pack(WeightsHead(version=version), policy)
    return Broadcast(version, policy, explore_by_worker(explore, plan), packed)


def explore_by_worker(explore: Any, plan: TeamPlan) -> list[Any]:
    """The `explore` of each worker of the nominal team, as JSON values."""
    return [
        part if part is None else np.asarray(part, float).tolist()
        for part in explore_parts(explore, plan)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """What a run allows its workers."""

    queue_bytes: int = 64 << 20
    """Bytes of rounds that have arrived and are not in the replay yet; beyond it, 429."""
    lease_s: float = 30.0
    """A worker that is silent for longer loses its place."""
    evaluate_share: float = 0.0
    """The probability that a worker's next task is to evaluate."""
    hosts: Sequence[str] | None = None
    """None: any Host header, since every route needs a key, and no page is served."""
    body_timeout_s: float = 60.0
    bodies_bytes: int = 256 << 20
    """Memory for the bodies of all requests together."""


@dataclass(slots=True)
class ServerState:
    """What serving any request needs; an `ApiState`."""

    config: RunLimits
    keys: RunKeys
    clock: Clock
    metrics: RunMetrics = field(default_factory=RunMetrics)
    limits: Limits = field(init=False)
    memory_budget: MemoryBudget = field(init=False)

    def __post_init__(self) -> None:
        self.limits = Limits(self.clock)
        self.memory_budget = MemoryBudget(self.config.bodies_bytes, self.clock)


class WorkersApi:
    """The routes of one run; an `Api` of `serve/server.py`."""

    def __init__(
        self,
        info: RunInfo,
        plan: TeamPlan,
        *,
        state: ServerState,
        steps: int,
        max_steps: int,
        seeds: Callable[[int, int], Sequence[int]],
    ) -> None:
        """`seeds` returns a number of held-out seeds; its second argument counts the calls."""
        self._info = info
        self._plan = plan
        self._state = state
        self._steps = steps
        self._round_steps = steps * plan.num_envs // plan.num_actors
        row_bytes = _ROWS_PER_STEP * (plan.game.row_bytes + 64)
        max_body_bytes = _SPARE_BYTES + self._round_steps * row_bytes
        if max_body_bytes > state.config.bodies_bytes:
            raise ConfigError(
                f"a worker's round of collect={steps} steps in each of "
                f"{plan.num_envs // plan.num_actors} envs may have {max_body_bytes >> 20} MiB, but "
                f"the learner accepts {state.config.bodies_bytes >> 20} MiB; set a lower collect, "
                "or more actors for the same envs"
            )
        self._max_steps = max_steps
        self._seeds = seeds
        self._leases = Leases(plan, lease_s=state.config.lease_s, clock=state.clock)
        self._rng = np.random.default_rng([plan.root_seed, plan.incarnation])
        self._n_evaluations = 0
        self._in_flight: dict[Lease, asyncio.Future[None]] = {}
        """The answer to the last round of each lease, which may be sent again."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()
        self._published: Broadcast | None = None
        self._ended = ""
        """Why no request is served any more, as the reason of a refusal."""
        self.all_have_left = threading.Event()
        """After the end of the run."""
        self.queue = RoundQueue(state.config.queue_bytes)
        self.memory_budget = state.memory_budget
        self.messages: deque[str] = deque(maxlen=_MAX_MESSAGES)
        """For the run's log: workers that were lost, and rounds that were rejected."""
        self.evaluations: deque[PlayedEvaluation] = deque(maxlen=_MAX_EPISODES)
        self.workers: Mapping[str, int] = self._leases.by_task()
        """Workers by task."""
        run = "/v1/runs/{run}"
        self._router = Router(
            [
                ApiRoute("GET", "/healthz", None, self._healthz, "Whether it is alive"),
                ApiRoute("GET", "/metrics", "work", self._metrics, "Metrics of the run"),
                ApiRoute("GET", "/v1/runs", "work", self._runs, "The run that can be joined"),
                ApiRoute(
                    "POST", f"{run}/join", "work", self._join, "Join the run", max_bytes=1 << 20
                ),
                ApiRoute(
                    "POST",
                    f"{run}/chunks",
                    "work",
                    self._chunks,
                    "Send a round, which is answered once it is in the replay",
                    max_bytes=max_body_bytes,
                ),
                ApiRoute(
                    "GET",
                    f"{run}/weights",
                    "work",
                    self._weights,
                    "Weights newer than a version",
                    waits=True,
                ),
                ApiRoute(
                    "POST",
                    f"{run}/results",
                    "work",
                    self._results,
                    "Send the returns of an evaluation",
                    max_bytes=1 << 20,
                ),
                ApiRoute(
                    "POST", f"{run}/leave", "work", self._leave, "Leave the run", max_bytes=1 << 12
                ),
            ],
            redirect_slashes=False,
            default=not_found,
        )

    # --- The learner's side, from any thread ------------------------------------------------------

    def publish(self, newest: Broadcast) -> None:
        is_new = self._published is None or newest.packed is not self._published.packed
        self._published = newest
        if is_new:
            self._call(self._wake)

    def inserted(self, rounds: Sequence[Arrival]) -> None:
        """Answer rounds that the learner has inserted."""
        self.queue.release(sum(arrival.size_bytes for arrival in rounds))
        self._call(lambda: _finish(rounds))

    def end(self, reason: str) -> None:
        """Refuse all requests from now on, those that wait first: `run_over` or `not_ready`."""
        self._call(lambda: self._end(reason))

    def _call(self, work: Callable[[], object]) -> None:
        loop = self._loop  # the server's thread sets it to None
        if loop is not None:
            with suppress(RuntimeError):  # the server has stopped
                loop.call_soon_threadsafe(work)

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _end(self, reason: str) -> None:
        self._ended = self._ended or reason
        self._count_workers()
        for answer in self._in_flight.values():
            if not answer.done():
                answer.set_exception(self._over())
                answer.exception()  # marked as read, in case no request waits for it
        self._wake()

    def _over(self) -> Refused:
        if self._ended == "run_over":
            return Refused("run_over", "the run is over; start no more workers for it")
        return Refused("not_ready", "the learner is starting or stopping; try again")

    # --- An Api -----------------------------------------------------------------------------------

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        expiring = self._loop.create_task(self._expire())
        try:
            yield
        finally:
            expiring.cancel()
            await asyncio.gather(expiring, return_exceptions=True)
            self._loop = None

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(min(_EXPIRE_EVERY_S, self._leases.lease_s / 4))
            for lease in self._leases.expire():
                self._forget(lease)
                self.messages.append(
                    f"worker {lease.index} was silent for {self._leases.lease_s:g} s and lost its "
                    "place"
                )
            self._count_workers()

    def _count_workers(self) -> None:
        self.workers = self._leases.by_task()
        if self._ended and not any(self.workers.values()):
            self.all_have_left.set()
        for task, number in self.workers.items():
            self._state.metrics.workers.labels(task).set(number)
        self._state.metrics.queue.set(self.queue.size_bytes)

    def drain(self) -> None:
        self._end("not_ready")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await serve_request(self._router, self._state, scope, receive, send, statuses=_STATUS)

    # --- Routes -----------------------------------------------------------------------------------

    async def _healthz(self, call: Call) -> Answer:
        return Answer(Health(status="ok"))

    async def _metrics(self, call: Call) -> Answer:
        self._count_workers()
        text = generate_latest(self._state.metrics.registry)
        return Answer(text, kind=CONTENT_TYPE_LATEST)

    async def _runs(self, call: Call) -> Answer:
        return Answer(self._info)

    def _check_run(self, call: Call) -> Broadcast:
        """The newest version; Refused if the call is for another run, or this one is over."""
        if call.path_params["run"] != self._info.run:
            raise Refused(
                "no_such_run",
                f"this learner trains run {self._info.run}, not {call.path_params['run'][:40]!r}; "
                "join the run that it trains",
            )
        if self._ended or self._published is None:
            raise self._over()
        return self._published

    async def _join(self, call: Call) -> Answer:
        newest = self._check_run(call)
        request = read_json(call.content, JoinRequest)
        if (request.protocol, request.understudy) != (PROTOCOL, understudy.__version__):
            raise Refused(
                "other_version",
                f"the worker has understudy {request.understudy[:20]} and protocol "
                f"{request.protocol}, the learner {understudy.__version__} and {PROTOCOL}; "
                "install the same version on both",
            )
        try:
            spec = spec_from_json(request.spec)
        except SpecError as error:
            raise Refused("bad_spec", shortened(str(error), 200)) from None
        if spec.schema != self._plan.game.schema:
            raise Refused(
                "other_game",
                f"{_difference(spec, self._plan.game)}; give the worker the learner's game, "
                "wrappers and package versions",
            )
        if list(map(_wrapper, request.wrappers)) != list(map(_wrapper, self._info.wrappers)):
            raise Refused(
                "other_game",
                f"the worker's wrappers are {shortened(joined(request.wrappers) or 'none', 100)}, "
                f"the learner's {joined(self._info.wrappers) or 'none'}; give the worker the "
                "learner's wrappers, in the same order",
            )
        lease = self._leases.join(newest.version)
        self._count_workers()
        answer = JoinAnswer(
            lease=lease.id,
            index=lease.index,
            incarnation=lease.incarnation,
            first_env=lease.first_env,
            num_envs=len(lease.sessions),
            steps=self._steps,
            root_seed=self._plan.root_seed,
            created_ms=self._plan.created_ms,
            lease_s=self._leases.lease_s,
            explore=self._explore(lease, newest),
            version=newest.version,
            max_steps=self._max_steps,
        )
        packed = pack(answer, newest.policy)
        return Answer(packed, kind=BINARY, own_bytes=len(packed))

    async def _chunks(self, call: Call) -> Answer:
        newest = self._check_run(call)
        text, body = unpack(call.content)
        head: RoundHead = read_json(text, RoundHead)
        lease = self._leases.find(head.lease)
        last = self._in_flight.get(lease)
        if last is not None and head.number == lease.next_round - 1:
            await self._repeated(lease, last)
            return self._next_task(lease, is_new=False)
        if head.number != lease.next_round or (last is not None and not last.done()):
            # The chunks of a round are checked against those before it, which must be counted.
            raise Refused(
                "out_of_order",
                f"round {head.number} was sent; expected {lease.next_round}, after the ack before",
            )
        arrived_s = time.monotonic()
        size_bytes = len(call.content)
        if not self.queue.reserve(size_bytes):
            raise Denied(
                "queue_full",
                f"{self.queue.size_bytes} bytes wait for the learner; send the round again",
                retry_after_s=1.0,
            )
        # From here on, the same round may be sent again.
        answer = self._in_flight[lease] = asyncio.get_running_loop().create_future()
        lease.next_round += 1
        try:
            arguments = (body, lease, self._plan.game, self._round_steps, newest.version)
            if size_bytes > _INLINE_BYTES:
                collected = await asyncio.to_thread(_read_checked, *arguments)
            else:
                collected = _read_checked(*arguments)
        except BaseException as error:
            self.queue.release(size_bytes)
            refused = error if isinstance(error, Refused) else Refused("bad_body", repr(error))
            self._refuse(lease, refused, what="a round")
            raise
        if self._in_flight.get(lease) is not answer:
            self.queue.release(size_bytes)
            raise Refused("join_again", "this worker lost its lease meanwhile; join again")
        count_round(collected, lease)
        lag_versions = newest.version - int(collected.chunks[0].columns["version"][0])
        self.queue.put(Arrival(collected, size_bytes, arrived_s, lag_versions, answer))
        await self._acked(answer)
        return self._next_task(lease, is_new=True)

    async def _acked(self, answer: "asyncio.Future[None]") -> None:
        """Wait until a round is in the replay; a learner that evaluates may take longer."""
        try:
            async with asyncio.timeout(min(_MAX_ACK_S, self._leases.lease_s / 3)):
                await asyncio.shield(answer)
        except TimeoutError:
            raise Denied(
                "busy",
                "the learner has not inserted the round yet; send it again",
                retry_after_s=0.05,
            ) from None

    async def _repeated(self, lease: Lease, answer: asyncio.Future[None]) -> None:
        """Wait for the answer to a round that was sent again, whose body is in memory meanwhile."""
        if lease.n_repeats >= _MAX_REPEATS:
            raise Denied("queue_full", "this round waits for the learner", retry_after_s=1.0)
        lease.n_repeats += 1
        try:
            await self._acked(answer)
        finally:
            lease.n_repeats -= 1

    def _refuse(self, lease: Lease, error: Refused, *, what: str) -> None:
        """End the lease of a worker whose round is invalid: its sessions cannot continue."""
        self._state.metrics.refused.labels(error.reason).inc()
        self.messages.append(
            f"{what} of worker {lease.index} was rejected: {shortened(str(error), 200)}"
        )
        self._forget(lease)

    def _forget(self, lease: Lease) -> None:
        self._leases.end(lease)
        answer = self._in_flight.pop(lease, None)
        if answer is not None and not answer.done():
            answer.set_exception(Refused("join_again", "this worker lost its lease; join again"))
            answer.exception()
        self._count_workers()

    def _next_task(self, lease: Lease, *, is_new: bool) -> Answer:
        """The answer to a round or results; a repeated round has no new task."""
        newest = self._published
        assert newest is not None
        share = self._state.config.evaluate_share
        if is_new and lease.may_evaluate and lease.task == "train" and self._rng.random() < share:
            lease.task = "evaluate"
            lease.seeds = list(self._seeds(len(lease.sessions), self._n_evaluations))
            self._n_evaluations += 1
        answer = RoundAnswer(
            task=lease.task,
            seeds=lease.seeds,
            explore=self._explore(lease, newest),
            version=newest.version,
        )
        return Answer(answer)

    def _explore(self, lease: Lease, newest: Broadcast) -> Any:
        """The worker's epsilons; workers beyond the nominal team repeat its ladder."""
        return newest.explore[lease.index % len(newest.explore)]

    async def _weights(self, call: Call) -> Answer:
        newest = self._check_run(call)
        lease = self._leases.find(call.query_params.get("lease", ""))
        after = call.integer("after")
        wait_s = call.seconds("wait_s", most=min(_MAX_POLL_S, self._leases.lease_s / 3))
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while newest.version <= after:
                    await self._news.wait()
                    newest = self._check_run(call)
        self._leases.find(lease.id)  # it may have ended meanwhile
        if newest.version <= after:
            return Answer(b"", 204)
        return Answer(newest.packed, kind=BINARY)

    async def _results(self, call: Call) -> Answer:
        newest = self._check_run(call)
        results: Results = read_json(call.content, Results)
        lease = self._leases.find(results.lease)
        if results.seeds and results.seeds == lease.evaluated:
            return self._next_task(lease, is_new=False)  # sent again: answered as before
        if lease.task != "evaluate" or results.seeds != lease.seeds:
            raise Refused("out_of_order", "these are not the seeds of this worker's task")
        n_returns = len(results.returns)
        is_sound = all(abs(value) <= MAX_NUMBER for value in results.returns)  # False for NaN
        error = None
        if n_returns not in (0, len(lease.seeds)) or not is_sound:
            error = Refused(
                "bad_number",
                f"{n_returns} returns, or not finite ones; expected one for each of "
                f"{len(lease.seeds)} seeds",
            )
        elif not lease.version <= results.version <= newest.version:
            error = Refused("bad_version", f"version {results.version} was not sent to this worker")
        if error is not None:
            self._refuse(lease, error, what="an evaluation")
            raise error
        lease.task = "train"
        lease.evaluated = lease.seeds
        lease.seeds = []
        lease.may_evaluate = bool(n_returns)
        if n_returns:
            self.evaluations.append(PlayedEvaluation(results.version, results.returns))
            self._state.metrics.evaluations.inc(n_returns)
        return self._next_task(lease, is_new=True)

    async def _leave(self, call: Call) -> Answer:
        # Also after the end of the run, which `finish` waits for.
        self._forget(self._leases.find(read_json(call.content, Leave).lease))
        return Answer(b"", 204)


def _read_checked(
    body: memoryview, lease: Lease, game: GameSpec, max_steps: int, newest: int
) -> Collected:
    try:
        collected = read_round(body, game=game, max_steps=max_steps)
        check_round(collected, lease, game, newest=newest)
    except Refused:
        raise
    except Exception as error:
        _log.error("round_check_failed", error=repr(error)[:300])
        raise Refused("bad_body", f"the round cannot be checked: {repr(error)[:120]}") from None
    return collected


def _finish(rounds: Sequence[Arrival]) -> None:
    for arrival in rounds:
        if not arrival.answer.done():
            arrival.answer.set_result(None)


def _wrapper(path: str) -> tuple[bool, str]:
    """Whether it is of training only, and its class; its module may have another name elsewhere."""
    return is_train_only(path), path.rpartition(":")[2].rpartition(".")[2]


def _difference(spec: GameSpec, other: GameSpec) -> str:
    """Which part of the worker's spec differs from the learner's."""
    for name in ("game", "obs", "action", "has_action_mask", "max_episode_steps"):
        here = getattr(spec, name)
        there = getattr(other, name)
        if here != there:
            what = "name" if name == "game" else name
            return (
                f"the {what} of the worker's game is {shortened(str(here), 120)}, that of the "
                f"learner's {shortened(str(there), 120)}"
            )
    return "the names of observations or actions differ from those of the run"
