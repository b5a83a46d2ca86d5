"""Calls to a Kinesis server, with one kind of failure for all that the SDK raises."""

import random
from collections.abc import Callable, Mapping
from threading import Event
from typing import Any

from understudy.core.aws import aws_session
from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import ConfigError
from understudy.streams.kinesis_config import KinesisConfig
from understudy.streams.kinesis_trouble import CallFailed, explained

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


def pause_s(attempt: int, rng: random.Random) -> float:
    """How long to wait before try number `attempt` (from 1): full jitter, so that callers do not come back at once."""
    return rng.uniform(0.0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(attempt, 16)))


class KinesisApi:
    """One stream's calls; any thread may make them."""

    def __init__(self, client: Any, config: KinesisConfig, *, clock: Clock, rng: random.Random) -> None:
        self._client = client
        self.config, self.clock, self.rng = config, clock, rng
        self.closed = Event()
        self.is_starting = True

    def call(self, operation: str, **fields: Any) -> Mapping[str, Any]:
        """One try; CallFailed when it came to nothing."""
        method: Callable[..., Mapping[str, Any]] = getattr(self._client, operation)
        try:
            return method(**fields)
        except Exception as error:
            if (failed := explained(error)) is None:
                raise
            raise failed from error

    def patient(self, operation: str, **fields: Any) -> Mapping[str, Any]:
        """An answer, tried again for `retry_s` where that helps; then the error for people."""
        return self.patiently(lambda: self.call(operation, **fields))

    def patiently(self, attempt: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """What `attempt` gives, tried again for `retry_s` where that helps; then the error for people."""
        give_up_s = self.clock.monotonic() + self.config.retry_s
        for number in range(1, 1_000_000):
            try:
                return attempt()
            except CallFailed as error:
                if not error.retry_helps or self.clock.monotonic() >= give_up_s or self.closed.is_set():
                    raise error.for_people(self.config, at_start=self.is_starting) from error
                self.clock.wait(self.closed, pause_s(number, self.rng))
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Let go of the connections that nobody uses."""
        self._client.close()


def connect(config: KinesisConfig, *, clock: Clock | None = None) -> KinesisApi:
    """Calls with boto3; ConfigError when its settings do not go together, MissingExtra without it."""
    return KinesisApi(_client(config), config, clock=clock or SystemClock(), rng=random.Random())


def _client(config: KinesisConfig) -> Any:
    session = aws_session("kinesis", credentials=config.credentials, profile=config.profile, region=config.region)
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, InvalidRegionError, NoRegionError

    try:
        return session.create_client(
            "kinesis",
            endpoint_url=config.endpoint or None,
            config=Config(
                # Retries are ours: the SDK would not try the failed records of a call that succeeded in part.
                retries={"total_max_attempts": 1, "mode": "standard"},
                connect_timeout=min(config.timeout_s, 3.0),
                read_timeout=config.timeout_s,
                max_pool_connections=16,
                proxies={} if config.is_local else None,
            ),
        )
    except NoRegionError:
        raise ConfigError(
            f"no AWS region for Kinesis stream {config.stream!r}; write kinesis://{config.stream}?region=eu-west-1, "
            "or set AWS_REGION"
        ) from None
    except InvalidRegionError:
        raise ConfigError(
            f"region of Kinesis stream {config.stream!r} is {config.region[:40]!r}; give one such as eu-west-1"
        ) from None
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(
            f"the AWS settings for Kinesis stream {config.stream!r} cannot be used: {error}; correct the address, or "
            f"{config.keys_from}"
        ) from None
