"""The state of a gateway: what its routes use, opened and closed together.

Each request that sends frames is answered with `recording_rate`. A client records whole episodes
with that probability, and states in its next request how many steps it did not record. So the
number of steps played is known exactly, whatever share is recorded.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from understudy.core.clock import Clock
from understudy.core.errors import ConfigError, Corrupt, Refused, SpecError, UnderstudyError
from understudy.core.signed import Trusted, public_key_text
from understudy.core.wording import joined
from understudy.experience.frame import MAX_FRAME_BATCH_BYTES
from understudy.experience.game import GameSpec
from understudy.experience.ticket import TicketSeal
from understudy.models.keys import Key, Keys
from understudy.models.registry import Registry
from understudy.ports import Ack, Stream
from understudy.serve.bots import PolicyServer, ServedBots, TicketIssuer
from understudy.serve.intake import Admission, Admitted, Appender

T = TypeVar("T")
_log = structlog.get_logger("understudy.gateway")

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)
_FRESH_S = 5.0
"""Age at which cached specs are read again, since another gateway may have registered one."""

_HOW = (
    "register its spec with the development key or an admin's (PUT /v1/games/GAME), as our clients "
    "do automatically, or run 'understudy games add'"
)
_MAX_SKIPPED_STEPS = 1_000_000
"""Limit of the skipped steps that one request may state; players never skip that many."""
BURST_S = 2.0
"""A key may use the allowance of this many seconds at once, so that a short burst passes."""
_MAX_DEBT_BYTES = MAX_FRAME_BATCH_BYTES
"""How far a key's allowance of bytes can be overdrawn: by one body of the largest size."""
_MAX_BUCKETS = 100_000
_STALLED_S = 1.0
"""When memory is full, a request that has received nothing for this long is evicted first."""
_WINDOW_S = 20.0
"""Time constant of the estimated rate of played steps: steps this old count about a third."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Settings of a gateway."""

    hosts: tuple[str, ...] = ()
    """Host names that the gateway serves, besides loopback; other Host headers are rejected."""
    target_steps_s: float | None = None
    """Steps per second to record in each game, of all its players together; None: all steps."""
    follow_every_s: float = 0.03
    """How often the registry is read; less often if the registry asks for a longer interval."""
    keys_every_s: float = 0.5
    """How often keys are read, which includes revocations."""
    body_timeout_s: float = 10.0
    """How long a client may take to send a request's body."""
    max_poll_s: float = 30.0
    """How long a request may wait for a newer bot."""
    decide_within_s: float = 0.05
    """The timeout of a decision, after which a game gets a random valid action."""
    max_bodies_bytes: int = 256 * 1024 * 1024
    """Memory for the bodies of all requests together; stalled or excessive ones are rejected."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", tuple(host.lower() for host in self.hosts))
        times = (
            self.follow_every_s,
            self.keys_every_s,
            self.body_timeout_s,
            self.max_poll_s,
            self.decide_within_s,
        )
        if not all(0 < time_s < 1e6 for time_s in times):
            raise ConfigError(
                "follow_every_s, keys_every_s, body_timeout_s, max_poll_s and decide_within_s are "
                f"{joined(times)}; pass seconds above 0 and below 1e6"
            )
        if self.keys_every_s > 1:
            raise ConfigError(
                f"keys_every_s is {self.keys_every_s}; pass at most 1, so that a revoked key is "
                "rejected within 2 s"
            )
        if self.max_bodies_bytes < 1:
            raise ConfigError(f"max_bodies_bytes is {self.max_bodies_bytes}; pass 1 or more bytes")


@dataclass(frozen=True, slots=True)
class _CachedSpecs:
    specs: dict[str, GameSpec]
    at_s: float
    is_failing: bool = False
    """Whether the last read failed; only the first failure is logged."""


class SpecCache:
    """Caches the specs of registered games; reads the registry in a thread."""

    def __init__(self, registry: Registry, executor: Executor, clock: Clock) -> None:
        self._registry = registry
        self._executor = executor
        self._clock = clock
        self._cache: dict[str, _CachedSpecs] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def of(
        self, game: str, *, schema: str | None = None, waits: bool = True
    ) -> dict[str, GameSpec]:
        """Return a game's specs by schema; Refused if it has none.

        Known specs that are due to be read again are returned after that, or with `waits=False` at
        once, unless `schema` is not one of them.
        """
        cached = self._cache.get(game)
        now_s = self._clock.monotonic()
        if cached is not None and now_s - cached.at_s <= _FRESH_S:
            return cached.specs
        if cached is not None:
            # Concurrent requests use the old specs, so that the registry is read only once.
            self._cache[game] = replace(cached, at_s=now_s)
        if cached is not None and not waits and (schema is None or schema in cached.specs):
            refresh = asyncio.get_running_loop().create_task(self._refreshed(game, cached))
            self._tasks.add(refresh)
            refresh.add_done_callback(self._end)
            return cached.specs
        return await self._refreshed(game, cached)

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # a request that waits gets it; here it is only marked as read

    async def _refreshed(self, game: str, cached: _CachedSpecs | None) -> dict[str, GameSpec]:
        now_s = self._clock.monotonic()
        try:
            specs = await self._run(self._read, game)
        except (UnderstudyError, OSError) as error:
            if cached is None:
                raise
            if not cached.is_failing:
                _log.warning(
                    "specs_not_readable",
                    game=game,
                    error=str(error)[:300],
                    next="the known specs stay valid",
                )
            self._cache[game] = replace(cached, at_s=now_s, is_failing=True)
            return cached.specs
        if not specs:
            raise Refused("not_registered", f"{game} is not registered; {_HOW}")
        self._cache[game] = _CachedSpecs(specs, now_s)
        return specs

    async def register(self, spec: GameSpec, *, may_add: bool) -> None:
        """Register a spec; Refused if it is new and the caller may not add specs."""
        try:
            if spec.schema in await self._run(self._read, spec.game):
                return
        except Corrupt:
            if not may_add:
                raise  # only a caller that may add specs repairs a damaged one
        if not may_add:
            raise Refused(
                "not_registered", f"{spec.game} is not registered with this schema; {_HOW}"
            )
        await self._run(self._registry.register, spec)
        self._cache.pop(spec.game, None)

    def _read(self, game: str) -> dict[str, GameSpec]:
        try:
            return {spec.schema: spec for spec in self._registry.specs(game)}
        except SpecError as error:
            raise Corrupt(f"a spec of {game} in the registry cannot be read: {error}") from None

    async def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)


class Metrics:
    """The gateway's metrics; labels are routes and registered games, never other request data."""

    def __init__(self, waiting_bytes: Callable[[], float]) -> None:
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
        self.frames = Counter(
            "understudy_frames",
            "Frames by outcome",
            ["game", "fate"],
            registry=registry,
        )
        self.frame_bytes = Counter(
            "understudy_frame_bytes", "Bytes of accepted frames", ["game"], registry=registry
        )
        self.recording_rate = Gauge(
            "understudy_recording_rate",
            "Share of episodes to record",
            ["game"],
            registry=registry,
        )
        waiting = Gauge(
            "understudy_waiting_bytes", "Bytes of frames waiting to be appended", registry=registry
        )
        waiting.set_function(waiting_bytes)


@dataclass(slots=True)
class _Bucket:
    """The requests and bytes that a key has left; negative if it used more than allowed."""

    requests: float
    size_bytes: float
    at_s: float


class Limits:
    """Rate limits of one gateway, with two token buckets per key; for the event loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    def take(self, key: Key, size_bytes: int) -> float:
        """Count a request of this size; return 0 if it may pass, else the seconds to wait."""
        now_s = self._clock.monotonic()
        bucket = self._buckets.get(key.id)
        if bucket is None:
            if len(self._buckets) >= _MAX_BUCKETS:
                self._buckets.clear()
            bucket = self._buckets[key.id] = _Bucket(
                key.requests_s * BURST_S, key.bytes_s * BURST_S, now_s
            )
        passed_s = max(0.0, now_s - bucket.at_s)
        bucket.at_s = now_s
        bucket.requests = min(key.requests_s * BURST_S, bucket.requests + passed_s * key.requests_s)
        bucket.size_bytes = min(key.bytes_s * BURST_S, bucket.size_bytes + passed_s * key.bytes_s)
        wait_s = max(
            _until_one(bucket.requests, key.requests_s), _until_one(bucket.size_bytes, key.bytes_s)
        )
        if wait_s <= 0:
            bucket.requests -= 1
            bucket.size_bytes -= size_bytes
        return wait_s

    def owe(self, key: Key, size_bytes: int) -> float:
        """Charge the key for bytes of a body, which delays its later requests.

        Returns 0, or the seconds to wait if the key owes too much already; then the body is to be
        refused, and these bytes are not charged. Otherwise a few seconds of parallel bodies could
        lock out all its players for minutes. A negative number returns bytes that were charged.
        """
        bucket = self._buckets.get(key.id)
        if bucket is None:
            return 0.0
        if size_bytes > 0 and bucket.size_bytes - size_bytes < -_MAX_DEBT_BYTES:
            return _until_one(bucket.size_bytes, key.bytes_s)
        bucket.size_bytes -= size_bytes
        return 0.0


def _until_one(tokens: float, rate: float) -> float:
    # The tolerance allows for rounding of the time that was waited.
    return 0.0 if tokens > 1 - 1e-6 else (1 - tokens) / rate


class Quota:
    """A game's target of steps per second, and the recording rate to meet it; not thread-safe."""

    def __init__(self, target_steps_s: float | None, clock: Clock) -> None:
        """Without a target, all steps are recorded."""
        if target_steps_s is not None and not 0 < target_steps_s < 1e12:
            raise ConfigError(
                f"the quota is {target_steps_s} steps/s; pass a number above 0, or none for no "
                "limit"
            )
        self._target = target_steps_s
        self._clock = clock
        self._steps = 0.0
        self._weight_s = 0.0
        self._at_s = clock.monotonic()

    def count_steps(self, recorded_steps: int, skipped_steps: int) -> float:
        """Count a client's steps; return the probability of recording its next episode."""
        now_s = self._clock.monotonic()
        fade = math.exp(-max(0.0, now_s - self._at_s) / _WINDOW_S)
        self._at_s = now_s
        self._steps = self._steps * fade + recorded_steps + skipped_steps
        self._weight_s = self._weight_s * fade + _WINDOW_S * (1 - fade)
        if self._target is None:
            return 1.0
        # At least 1 s is assumed, so that a first burst of spooled chunks is not taken for a very
        # high rate.
        played = self._steps / max(self._weight_s, 1.0)
        return min(1.0, self._target / played) if played > 0 else 1.0


@dataclass(slots=True, eq=False)
class HeldMemory:
    """Memory of one request; `evict` is set while it may be freed for another request."""

    budget: "MemoryBudget"
    owner: tuple[str, str]
    """Key and address."""
    size_bytes: int = 0
    at_s: float = 0.0
    """When bytes last arrived."""
    evict: Callable[[], None] | None = None
    is_evicted: bool = False

    def take(self, size_bytes: int) -> None:
        """Reserve more bytes; Refused if none are left. A negative number returns some."""
        self.budget.make_room(self, size_bytes)
        self.budget.left_bytes -= size_bytes
        self.size_bytes += size_bytes

    def release(self) -> None:
        """Release all reserved bytes."""
        self.budget.left_bytes += self.size_bytes
        self.size_bytes = 0

    def __enter__(self) -> "HeldMemory":
        self.budget.held.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.budget.held.discard(self)
        self.release()


class MemoryBudget:
    """Limits the memory for the bodies of all requests together; for the event loop only.

    When it is full, requests that are still waiting for data from their client are evicted: first
    those that have stalled, then those of the key that holds most, and within that key, of the
    address that holds most. So neither a game nor a player can lock out the others, although all
    players of a game share its key.
    """

    def __init__(self, most_bytes: int, clock: Clock) -> None:
        self.left_bytes = most_bytes
        self._clock = clock
        self.held: set[HeldMemory] = set()

    def hold(self, key: Key | None, address: str) -> HeldMemory:
        """Return an empty reservation, a context manager that releases it."""
        return HeldMemory(self, (key.id if key is not None else "", address))

    def make_room(self, requester: HeldMemory, size_bytes: int) -> None:
        """Evict other requests until this many bytes are left; Refused if none may be evicted."""
        now_s = self._clock.monotonic()
        requester.at_s = now_s
        while size_bytes > self.left_bytes:
            by_key = defaultdict[str, int](int, {requester.owner[0]: size_bytes})
            by_owner = defaultdict[tuple[str, str], int](int, {requester.owner: size_bytes})
            for held in self.held:
                by_key[held.owner[0]] += held.size_bytes
                by_owner[held.owner] += held.size_bytes
            others = [
                held
                for held in self.held
                if held.evict is not None and held.size_bytes and held is not requester
            ]
            victim = min(others, key=lambda held: held.at_s, default=None)
            if victim is not None and now_s - victim.at_s < _STALLED_S:
                victim = max(
                    others,
                    key=lambda held: (by_key[held.owner[0]], by_owner[held.owner], -held.at_s),
                )
                if (by_key[victim.owner[0]], by_owner[victim.owner]) <= (
                    by_key[requester.owner[0]],
                    by_owner[requester.owner],
                ):
                    victim = None
            if victim is None:
                raise Refused("busy", "too many large requests at once; try again")
            assert victim.evict is not None
            victim.is_evicted = True
            victim.evict()
            victim.evict = None
            victim.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class GameProgress:
    """What the learner reports of a game."""

    missing_steps: int | None = None
    """Steps to its next candidate."""
    schema: str | None = None
    """The schema that is trained now."""
    schema_steps: Mapping[str, int] = field(default_factory=dict)
    """Recorded steps, by schema."""


@dataclass(slots=True)
class GatewayState:
    """What the routes use; created on the event loop that runs them."""

    config: GatewayConfig
    stream: Stream
    registry: Registry
    keys: Keys
    trusted: Trusted
    deployment_key: bytes
    clock: Clock
    is_ready: bool = field(default=False, init=False)
    roles: Mapping[str, str] = field(default_factory=dict, init=False)
    """The state of each role that runs beside this gateway, by name; `/readyz` returns it."""
    progress: Mapping[str, GameProgress] = field(default_factory=dict, init=False)
    """Of each game, if the learner runs beside this gateway."""

    disk: ThreadPoolExecutor = field(init=False)
    """Threads that read and write the registry."""
    limits: Limits = field(init=False)
    memory_budget: MemoryBudget = field(init=False)
    admission: Admission = field(init=False)
    appender: Appender = field(init=False)
    specs: SpecCache = field(init=False)
    bots: ServedBots = field(init=False)
    tickets: TicketIssuer = field(init=False)
    decider: PolicyServer = field(init=False)
    metrics: Metrics = field(init=False)
    _quotas: dict[str, Quota] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.disk = ThreadPoolExecutor(8, thread_name_prefix="understudy-gateway")
        self.limits = Limits(self.clock)
        self.memory_budget = MemoryBudget(self.config.max_bodies_bytes, self.clock)
        self.admission = Admission(self.deployment_key, self.clock)
        self.appender = Appender(self.stream)
        self.specs = SpecCache(self.registry, self.disk, self.clock)
        self.bots = ServedBots(
            self.registry,
            self.disk,
            trust=[public_key_text(public) for public in self.trusted.values()],
            follow_every_s=self.config.follow_every_s,
        )
        self.tickets = TicketIssuer(self.bots, TicketSeal(self.deployment_key), self.clock)
        self.decider = PolicyServer(
            self.bots,
            np.random.default_rng(),
            self.tickets,
            within_s=self.config.decide_within_s,
        )
        self.metrics = Metrics(lambda: self.appender.waiting_bytes)

    def count(
        self, game: str, admitted: Sequence[Admitted], acks: Sequence[Ack], skipped_steps: int
    ) -> float:
        """Update metrics and quota with these frames; return the recording rate from now on."""
        steps = 0
        for outcome, ack in zip(admitted, acks, strict=True):
            fate = "accepted" if ack.accepted else "refused" if ack.refused else "again"
            self.metrics.frames.labels(game, fate).inc()
            if ack.accepted:
                self.metrics.frame_bytes.labels(game).inc(outcome.frame.size_bytes)
                steps += outcome.n_steps
        if game not in self._quotas:
            self._quotas[game] = Quota(self.config.target_steps_s, self.clock)
        rate = self._quotas[game].count_steps(steps, min(skipped_steps, _MAX_SKIPPED_STEPS))
        self.metrics.recording_rate.labels(game).set(rate)
        return rate

    async def close(self) -> None:
        """Append pending frames, then close everything."""
        self.is_ready = False
        await self.appender.close()
        await self.decider.close()
        await asyncio.to_thread(self.disk.shutdown)
        await asyncio.to_thread(self.stream.close)
