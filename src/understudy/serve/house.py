"""What the routes of a gateway work with: everything it opened, in one place, closed together."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from understudy.core.clock import Clock
from understudy.core.errors import ConfigError, Refused
from understudy.core.ports import Ack, Stream
from understudy.core.signed import Trusted, public_key_text
from understudy.models.registry import Registry
from understudy.serve.admission import Admission, Admitted
from understudy.serve.appender import Appender
from understudy.serve.bots import Bots
from understudy.serve.inference import Decider
from understudy.serve.keys import Keys
from understudy.serve.limits import Limits
from understudy.serve.metrics import Metrics
from understudy.serve.quota import Quota
from understudy.serve.specs import Specs

_MAX_SKIPPED_STEPS = 1_000_000
"""More than this between two sends is nothing that a player did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """How a gateway behaves."""

    hosts: tuple[str, ...] = ()
    """Names it may be called by, besides those of loopback; a request for another Host is refused."""
    canary_share: float = 0.2
    """The share of episodes that a canary plays."""
    target_steps_s: float | None = None
    """Steps a second and game that are wanted of players together; none: all of them."""
    follow_every_s: float = 0.03
    """How often the registry is asked for news, unless a look at it costs something: then as seldom as it says."""
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
            raise ConfigError(f"canary_share is {self.canary_share}; give a share above 0 and at most 0.5")
        times = (
            self.follow_every_s, self.keys_every_s, self.body_timeout_s, self.max_poll_s, self.decide_within_s,
        )  # fmt: skip
        if not all(0 < time_s < 1e6 for time_s in times):
            raise ConfigError("times of a gateway are numbers of seconds above 0")
        if self.keys_every_s > 1:
            raise ConfigError(f"keys_every_s is {self.keys_every_s}; at most 1, so that a revoked key ends within 2 s")
        if self.max_bodies_bytes < 1:
            raise ConfigError(f"max_bodies_bytes is {self.max_bodies_bytes}; give 64 MiB or more")


class Room:
    """How much memory the bodies of all requests may use together; for the event loop alone."""

    def __init__(self, most_bytes: int) -> None:
        self.left_bytes = most_bytes

    @contextmanager
    def hold(self) -> Iterator[Callable[[int], None]]:
        """Takes memory for one request, which is free again at the end; Refused when others hold too much."""
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
class House:
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
    room: Room = field(init=False)
    admission: Admission = field(init=False)
    appender: Appender = field(init=False)
    specs: Specs = field(init=False)
    bots: Bots = field(init=False)
    decider: Decider = field(init=False)
    metrics: Metrics = field(init=False)
    _quotas: dict[str, Quota] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.disk = ThreadPoolExecutor(8, thread_name_prefix="understudy-gateway")
        self.limits, self.room = Limits(self.clock), Room(self.config.max_bodies_bytes)
        self.admission, self.appender = Admission(self.deployment_key, self.clock), Appender(self.stream)
        self.specs = Specs(self.registry, self.disk, self.clock)
        self.bots = Bots(
            self.registry, self.disk, trust=[public_key_text(public) for public in self.trusted.values()],
            canary_share=self.config.canary_share, follow_every_s=self.config.follow_every_s,
        )  # fmt: skip
        self.decider = Decider(self.bots, np.random.default_rng(), within_s=self.config.decide_within_s)
        self.metrics = Metrics(lambda: self.appender.waiting_bytes)

    def count(self, game: str, admitted: Sequence[Admitted], acks: Sequence[Ack], skipped_steps: int) -> float:
        """Tell metrics and quota what became of frames; the share of episodes that is asked for from now on."""
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
