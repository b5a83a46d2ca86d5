"""What the routes of a gateway work with: everything it opened, in one place, closed together.

Each send is answered with `keep_share`. A client keeps whole episodes with that probability, and
says with its next send how many steps it did not record: so what is played is known exactly,
whatever share is sent.
"""

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from understudy.core.clock import Clock
from understudy.core.errors import ConfigError, Corrupt, Refused, SpecError, UnderstudyError
from understudy.core.signed import Trusted, public_key_text
from understudy.experience.game import GameSpec
from understudy.models.keys import Key, Keys
from understudy.models.registry import Registry
from understudy.ports import Ack, Stream
from understudy.serve.bots import PolicyServer, ServedBots
from understudy.serve.intake import Admission, Admitted, Appender

T = TypeVar("T")
_log = structlog.get_logger("understudy.gateway")

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)
_FRESH_S = 5.0
"""After this the registry is asked again, since another gateway may have registered another
schema."""

_HOW = (
    "the development key or an admin's may send its spec (PUT /v1/games/GAME), as our clients do "
    "by themselves; "
    "or run 'understudy games add'"
)
_MAX_SKIPPED_STEPS = 1_000_000
"""More than this between two sends is nothing that a player did."""
BURST_S = 2.0
"""A bucket holds what its rate gives in this time, so that a short rush passes."""
_MAX_BUCKETS = 100_000
_WINDOW_S = 20.0
"""How fast the estimate of played steps follows: what was played this long ago counts a third."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """How a gateway behaves."""

    hosts: tuple[str, ...] = ()
    """Names it may be called by, besides those of loopback; a request for another Host is
    refused."""
    canary_share: float = 0.2
    """The share of episodes that a canary plays."""
    target_steps_s: float | None = None
    """Steps a second and game that are wanted of players together; none: all of them."""
    follow_every_s: float = 0.03
    """How often the registry is asked for news, unless a look at it costs something: then as
    seldom as it says."""
    keys_every_s: float = 0.5
    """How often revoked keys are looked for."""
    body_timeout_s: float = 10.0
    """How long a client may take to send a request's body."""
    max_poll_s: float = 30.0
    """How long a request may wait for a newer bot."""
    decide_within_s: float = 0.05
    """After this a game gets a random legal action instead of waiting longer for its bot."""
    max_bodies_bytes: int = 256 * 1024 * 1024
    """Memory for the bodies of all requests together; beyond it they are asked to come back."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", tuple(host.lower() for host in self.hosts))
        if not 0 < self.canary_share <= 0.5:
            raise ConfigError(
                f"canary_share is {self.canary_share}; give a share above 0 and at most 0.5"
            )
        times = (
            self.follow_every_s,
            self.keys_every_s,
            self.body_timeout_s,
            self.max_poll_s,
            self.decide_within_s,
        )
        if not all(0 < time_s < 1e6 for time_s in times):
            raise ConfigError("times of a gateway are numbers of seconds above 0")
        if self.keys_every_s > 1:
            raise ConfigError(
                f"keys_every_s is {self.keys_every_s}; at most 1, so that a revoked key ends "
                "within 2 s"
            )
        if self.max_bodies_bytes < 1:
            raise ConfigError(f"max_bodies_bytes is {self.max_bodies_bytes}; give 64 MiB or more")


@dataclass(frozen=True, slots=True)
class _Known:
    specs: dict[str, GameSpec]
    at_s: float
    is_failing: bool = False
    """Whether the last look came to nothing, which is said once."""


class SpecCache:
    """Every registered game's specs by schema; for the event loop, with the disk in a thread."""

    def __init__(self, registry: Registry, executor: Executor, clock: Clock) -> None:
        self._registry = registry
        self._executor = executor
        self._clock = clock
        self._known: dict[str, _Known] = {}

    async def of(self, game: str) -> dict[str, GameSpec]:
        """A game's specs; Refused when it has none."""
        known = self._known.get(game)
        now_s = self._clock.monotonic()
        if known is not None and now_s - known.at_s <= _FRESH_S:
            return known.specs
        if known is not None:
            # Whoever comes meanwhile goes on with the old ones; one look is enough.
            self._known[game] = replace(known, at_s=now_s)
        try:
            specs = await self._run(self._read, game)
        except (UnderstudyError, OSError) as error:
            if known is None:
                raise
            if not known.is_failing:
                _log.warning(
                    "specs_not_readable",
                    game=game,
                    error=str(error)[:300],
                    next="the known ones stay in force",
                )
            self._known[game] = replace(known, at_s=now_s, is_failing=True)
            return known.specs
        if not specs:
            raise Refused("not_registered", f"{game} is not registered; {_HOW}")
        self._known[game] = _Known(specs, now_s)
        return specs

    async def register(self, spec: GameSpec, *, may_add: bool) -> None:
        """Keep a spec; Refused when it is new and the caller may not add any."""
        if spec.schema in await self._run(self._read, spec.game):
            return
        if not may_add:
            raise Refused(
                "not_registered", f"{spec.game} is not registered with this schema; {_HOW}"
            )
        await self._run(self._registry.register, spec)
        self._known.pop(spec.game, None)

    def _read(self, game: str) -> dict[str, GameSpec]:
        try:
            return {spec.schema: spec for spec in self._registry.specs(game)}
        except SpecError as error:
            raise Corrupt(
                f"a spec of {game} in the registry is not readable: {error}; restore it"
            ) from None

    async def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)


class Metrics:
    """What an operator watches; labels are routes and registered games, never what a caller made
    up."""

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
            "Frames by what became of them",
            ["game", "fate"],
            registry=registry,
        )
        self.frame_bytes = Counter(
            "understudy_frame_bytes", "Bytes of accepted frames", ["game"], registry=registry
        )
        self.keep_share = Gauge(
            "understudy_keep_share", "Share of episodes asked for", ["game"], registry=registry
        )
        waiting = Gauge(
            "understudy_waiting_bytes", "Bytes on their way into the stream", registry=registry
        )
        waiting.set_function(waiting_bytes)


@dataclass(slots=True)
class _Bucket:
    """Requests and bytes that are left; below zero, they are owed."""

    requests: float
    size_bytes: float
    at_s: float


class Limits:
    """One pair of buckets per key, on one gateway; not thread-safe, for the event loop alone."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    def take(self, key: Key, size_bytes: int) -> float:
        """Count a request of this size: 0 when it may pass, else after how many seconds to try
        again."""
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

    def owe(self, key: Key, size_bytes: int) -> None:
        """Count bytes that came beyond those that were announced; later requests wait for them."""
        bucket = self._buckets.get(key.id)
        if bucket is not None and size_bytes > 0:
            bucket.size_bytes -= size_bytes


def _until_one(left: float, rate: float) -> float:
    # A little less is enough, since a time that was waited for is rounded.
    return 0.0 if left > 1 - 1e-6 else (1 - left) / rate


class Quota:
    """One game's target of steps a second, and the share that meets it; for the event loop
    alone."""

    def __init__(self, target_steps_s: float | None, clock: Clock) -> None:
        """No target: everything is wanted."""
        if target_steps_s is not None and not 0 < target_steps_s < 1e12:
            raise ConfigError(
                f"a quota of {target_steps_s} steps/s; give a number above 0, or none for no limit"
            )
        self._target = target_steps_s
        self._clock = clock
        self._steps = 0.0
        self._weight_s = 0.0
        self._at_s = clock.monotonic()

    def saw(self, kept_steps: int, skipped_steps: int) -> float:
        """Count what a client sent and left out; the probability with which it should record its
        next episode."""
        now_s = self._clock.monotonic()
        fade = math.exp(-max(0.0, now_s - self._at_s) / _WINDOW_S)
        self._at_s = now_s
        self._steps = self._steps * fade + kept_steps + skipped_steps
        self._weight_s = self._weight_s * fade + _WINDOW_S * (1 - fade)
        if self._target is None:
            return 1.0
        # Until the window has filled a little, a first burst of spooled chunks says nothing about a
        # rate.
        played = self._steps / max(self._weight_s, 1.0)
        return min(1.0, self._target / played) if played > 0 else 1.0


class MemoryBudget:
    """How much memory the bodies of all requests may use together; for the event loop alone."""

    def __init__(self, most_bytes: int) -> None:
        self.left_bytes = most_bytes

    @contextmanager
    def hold(self) -> Iterator[Callable[[int], None]]:
        """Takes memory for one request, which is free again at the end; Refused when others hold
        too much."""
        held_bytes = 0

        def take(size_bytes: int) -> None:
            nonlocal held_bytes
            if size_bytes > self.left_bytes:
                raise Refused("busy", "too many large requests at once; try again")
            self.left_bytes -= size_bytes
            held_bytes += size_bytes

        try:
            yield take
        finally:
            self.left_bytes += held_bytes


@dataclass(slots=True)
class GatewayState:
    """Everything behind the routes; made on the event loop that uses it."""

    config: GatewayConfig
    stream: Stream
    registry: Registry
    keys: Keys
    trusted: Trusted
    deployment_key: bytes
    clock: Clock
    is_ready: bool = field(default=False, init=False)

    disk: ThreadPoolExecutor = field(init=False)
    """For whatever reads or writes the registry."""
    limits: Limits = field(init=False)
    room: MemoryBudget = field(init=False)
    admission: Admission = field(init=False)
    appender: Appender = field(init=False)
    specs: SpecCache = field(init=False)
    bots: ServedBots = field(init=False)
    decider: PolicyServer = field(init=False)
    metrics: Metrics = field(init=False)
    _quotas: dict[str, Quota] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.disk = ThreadPoolExecutor(8, thread_name_prefix="understudy-gateway")
        self.limits, self.room = Limits(self.clock), MemoryBudget(self.config.max_bodies_bytes)
        self.admission, self.appender = (
            Admission(self.deployment_key, self.clock),
            Appender(self.stream),
        )
        self.specs = SpecCache(self.registry, self.disk, self.clock)
        self.bots = ServedBots(
            self.registry,
            self.disk,
            trust=[public_key_text(public) for public in self.trusted.values()],
            canary_share=self.config.canary_share,
            follow_every_s=self.config.follow_every_s,
        )
        self.decider = PolicyServer(
            self.bots, np.random.default_rng(), within_s=self.config.decide_within_s
        )
        self.metrics = Metrics(lambda: self.appender.waiting_bytes)

    def count(
        self, game: str, admitted: Sequence[Admitted], acks: Sequence[Ack], skipped_steps: int
    ) -> float:
        """Tell metrics and quota what became of frames; the share of episodes that is asked for
        from now on."""
        steps = 0
        for one, ack in zip(admitted, acks, strict=True):
            fate = "accepted" if ack.accepted else "refused" if ack.refused else "again"
            self.metrics.frames.labels(game, fate).inc()
            if ack.accepted:
                self.metrics.frame_bytes.labels(game).inc(one.frame.size_bytes)
                steps += one.n_steps
        if game not in self._quotas:
            self._quotas[game] = Quota(self.config.target_steps_s, self.clock)
        share = self._quotas[game].saw(steps, min(skipped_steps, _MAX_SKIPPED_STEPS))
        self.metrics.keep_share.labels(game).set(share)
        return share

    async def close(self) -> None:
        """Append what waits, then let go of everything."""
        self.is_ready = False
        await self.appender.close()
        await self.decider.close()
        await asyncio.to_thread(self.disk.shutdown)
        await asyncio.to_thread(self.stream.close)
