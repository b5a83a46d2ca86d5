"""Calls to a Kinesis server, with one kind of failure for all that the SDK raises."""

import importlib.util
import random
from collections.abc import Callable, Mapping
from threading import Event
from typing import Any

from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import ConfigError, MissingExtra, StorageFailed, UnderstudyError, Unreachable
from understudy.streams.kinesis_config import KinesisConfig

_THROTTLES = {
    "ProvisionedThroughputExceededException", "LimitExceededException", "KMSThrottlingException", "Throttling",
    "ThrottlingException", "RequestLimitExceeded", "TooManyRequestsException", "SlowDown",
}  # fmt: skip
_ANOTHER_TIME = {"InternalFailure", "InternalServerError", "ServiceUnavailable", "RequestTimeout", "Unreachable"}
_NO_ACCESS = {
    "AccessDenied", "AccessDeniedException", "ExpiredToken", "ExpiredTokenException", "IncompleteSignature",
    "IncompleteSignatureException", "InvalidClientTokenId", "InvalidSignatureException", "MissingAuthenticationToken",
    "MissingAuthenticationTokenException", "NotAuthorized", "OptInRequired", "SignatureDoesNotMatch",
    "UnrecognizedClientException",
}  # fmt: skip
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


class CallFailed(Exception):
    """A call or a record that Kinesis did not take; `code` is the server's, or `Unreachable`."""

    def __init__(self, code: str, detail: str, *, retry_helps: bool | None = None) -> None:
        super().__init__(f"{code}: {detail}")
        self.code, self.detail = code, detail
        self.is_throttle = code in _THROTTLES
        self.retry_helps = self.is_throttle or code in _ANOTHER_TIME if retry_helps is None else retry_helps

    def for_people(self, config: KinesisConfig, *, at_start: bool = False) -> UnderstudyError:
        """What to raise: whose fault it is, and the next step.

        ConfigError at the start only, where whoever gave the address is there to mend it; later on a stream or a right
        may come back, and what was acknowledged is safe.
        """
        what = f"Kinesis stream {config.stream!r} at {config.place}"
        lasting = ConfigError if at_start else Unreachable
        if self.code == "ResourceNotFoundException":
            return lasting(
                f"{what} does not exist; create it (`aws kinesis create-stream --stream-name {config.stream}`), or "
                "correct the stream or region of the address"
            )
        if self.code in _NO_ACCESS:
            return lasting(
                f"{what} refused these credentials ({self.code}: {self.detail}); docs/kinesis.md lists the permissions "
                "that are needed; check AWS_PROFILE, AWS_ACCESS_KEY_ID or the role of this machine"
            )
        if self.code == "NoCredentials":
            return lasting(
                f"no AWS credentials for {what}: {self.detail}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
                "AWS_SHARED_CREDENTIALS_FILE, or give ?profile=NAME or ?credentials=FILE"
            )
        if self.code == "Unreachable":
            return Unreachable(f"{what} cannot be reached: {self.detail}; start it, or correct endpoint= and region=")
        if self.retry_helps:
            return Unreachable(f"{what} takes no more calls now ({self.code}: {self.detail}); add shards, or wait")
        return StorageFailed(f"{what} refused a call ({self.code}: {self.detail})")


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
        from botocore.exceptions import (
            BotoCoreError,
            ClientError,
            CredentialRetrievalError,
            NoCredentialsError,
            PartialCredentialsError,
        )
        from botocore.exceptions import ConnectionError as NoConnection
        from botocore.exceptions import HTTPClientError as NoAnswer

        try:
            method: Callable[..., Mapping[str, Any]] = getattr(self._client, operation)
            return method(**fields)
        except ClientError as error:
            told = error.response.get("Error", {})
            code, status = str(told.get("Code", "")), error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            is_broken = isinstance(status, int) and status >= 500
            raise CallFailed(code, str(told.get("Message", "")), retry_helps=True if is_broken else None) from error
        except (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError) as error:
            raise CallFailed("NoCredentials", str(error)) from error
        except (NoAnswer, NoConnection) as error:
            raise CallFailed("Unreachable", str(error)) from error
        except BotoCoreError as error:
            raise CallFailed(type(error).__name__, str(error)) from error

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
    if importlib.util.find_spec("boto3") is None:
        raise MissingExtra("kinesis:// needs the package boto3; pip install 'understudy[aws]'")
    import boto3
    import botocore.session
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, NoRegionError

    try:
        # A profile that is asked for goes before keys in the environment.
        profile = config.profile or ("default" if config.credentials else None)
        chain = botocore.session.Session(profile=profile)
        if config.credentials:
            chain.set_config_variable("credentials_file", config.credentials)
        return boto3.Session(botocore_session=chain, region_name=config.region or None).client(
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
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(f"the AWS settings for Kinesis stream {config.stream!r} cannot be used: {error}") from None
