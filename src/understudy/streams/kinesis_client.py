"""Shared parts of a Kinesis stream: its address, calls through the AWS SDK, and their errors."""

import math
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from threading import Event
from typing import Any
from urllib.parse import urlsplit

from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import ConfigError, StorageFailed, UnderstudyError, Unreachable
from understudy.core.location import (
    Location,
    aws_session,
    check_endpoint,
    is_loopback,
    source_of_keys,
)

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_FORM = "kinesis://STREAM?region=eu-west-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class KinesisConfig:
    """How to reach a stream: its name, location, credentials and timeouts."""

    stream: str
    """The stream's name, without its ARN."""
    region: str = ""
    """The AWS region; empty: from AWS_REGION, AWS_DEFAULT_REGION or the profile."""
    endpoint: str = ""
    """URL of a local server or a VPC endpoint; empty: the AWS endpoint of the region."""
    profile: str = ""
    """A profile of the AWS configuration; empty: the default credential chain."""
    credentials: str = ""
    """An AWS shared credentials file that replaces the default credential chain."""
    insecure: bool = False
    """Whether plain http may be used beyond this machine."""
    poll_s: float = 0.2
    """Shortest time between two reads of a shard; AWS allows five per second."""
    list_s: float = 30.0
    """Maximum age of the shard list; an ended or unknown shard refreshes it at once."""
    retry_s: float = 8.0
    """How long a call is retried before it raises."""
    append_s: float = 3.0
    """How long `append` retries rejected records; after that it asks its caller to retry."""
    timeout_s: float = 5.0
    """Timeout of one request."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.stream):
            raise ConfigError(
                f"{self.stream[:80]!r} is not a valid name of a Kinesis stream; use 1 to 128 "
                f"characters from A-Z a-z 0-9 _ . - as in {_FORM}"
            )
        for name, least in (
            ("poll_s", 0.0),
            ("list_s", 0.0),
            ("retry_s", 0.0),
            ("append_s", 0.0),
            ("timeout_s", 0.1),
        ):
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise ConfigError(
                    f"{name} of kinesis:// is {value}; use a finite number of seconds, {least:g} "
                    "or more"
                )
        if self.endpoint:
            check_endpoint(self.endpoint, insecure=self.insecure)

    @property
    def is_local(self) -> bool:
        """Whether the endpoint is on this machine."""
        return is_loopback(urlsplit(self.endpoint).hostname or "")

    @property
    def where(self) -> str:
        """Where the stream is, for error messages."""
        return self.endpoint or f"AWS region {self.region or 'of the environment'}"

    @property
    def keys_from(self) -> str:
        """Where the AWS keys are read from, for error messages."""
        return source_of_keys(credentials=self.credentials, profile=self.profile)


def kinesis_config(location: Location) -> KinesisConfig:
    """Parse a `kinesis://` address; ConfigError for invalid settings."""
    location.check_options(
        [field.name for field in fields(KinesisConfig) if field.name != "stream"]
    )
    if len(location.hosts) != 1 or location.hosts[0][1] is not None or location.path:
        raise ConfigError(
            f"a kinesis:// address has one stream name and no port or path; write {_FORM}"
        )
    return KinesisConfig(
        stream=location.hosts[0][0],
        region=location.text("region"),
        endpoint=location.text("endpoint"),
        profile=location.text("profile"),
        credentials=location.text("credentials"),
        insecure=location.flag("insecure"),
        poll_s=location.number("poll_s", 0.2, most=60.0),
        list_s=location.number("list_s", 30.0, most=3600.0),
        retry_s=location.number("retry_s", 8.0, most=600.0),
        append_s=location.number("append_s", 3.0, most=600.0),
        timeout_s=location.number("timeout_s", 5.0, least=0.1, most=600.0),
    )


# --- Errors ---------------------------------------------------------------------------------------

_THROTTLES = {
    "ProvisionedThroughputExceededException",
    "LimitExceededException",
    "KMSThrottlingException",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "TooManyRequestsException",
    "SlowDown",
}
_TRANSIENT = {
    "InternalFailure",
    "InternalServerError",
    "ServiceUnavailable",
    "RequestTimeout",
    "Unreachable",
}
_NO_ACCESS = {
    "AccessDenied",
    "AccessDeniedException",
    "ExpiredToken",
    "ExpiredTokenException",
    "IncompleteSignature",
    "IncompleteSignatureException",
    "InvalidClientTokenId",
    "InvalidSignatureException",
    "MissingAuthenticationToken",
    "MissingAuthenticationTokenException",
    "NotAuthorized",
    "OptInRequired",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
}
_NEVER_TLS = ("WRONG_VERSION_NUMBER", "CERTIFICATE_VERIFY_FAILED", "RECORD_LAYER_FAILURE")
_MARKUP = re.compile(r"<[^>]*>")
_MOST_LETTERS = 300
"""Most characters kept of a server's error message, which may be a whole HTML page."""
_HINTS = {
    "missing": "create it with `understudy stream init URL`, or correct the stream or region in "
    "the address",
    "refused": "check {keys}, and the permissions in docs/kinesis.md",
    "NoCredentials": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or add ?profile=NAME or "
    "?credentials=FILE",
    "NotKinesis": "the endpoint is not Kinesis-compatible; correct endpoint=",
    "Tls": "use http:// if the server has no TLS, or trust the CA of its certificate in "
    "AWS_CA_BUNDLE",
    "Unreachable": "check the network and that the server runs, or correct endpoint= and region=",
    "throttled": "Kinesis is throttling: add shards, or wait",
    "busy": "Kinesis is temporarily unavailable: retry later",
    "": "check the address and the limits of the account",
}
"""The next step for each condition."""


class CallFailed(Exception):
    """A call that failed or a record that Kinesis rejected.

    `code` is the server's error code, a botocore exception's name, or one of ours: `Unreachable`,
    `NoCredentials`, `Tls`, `Closed`, and `NotKinesis` for a server that is not Kinesis-compatible.
    """

    def __init__(self, code: str, detail: str, *, retry_helps: bool | None = None) -> None:
        detail = " ".join(_MARKUP.sub(" ", detail).split())[:_MOST_LETTERS].rstrip(" .;")
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail
        self.is_throttle = code in _THROTTLES
        self.retry_helps = (
            self.is_throttle or code in _TRANSIENT if retry_helps is None else retry_helps
        )

    @property
    def condition(self) -> str:
        """The kind of failure, as a key of `_HINTS`."""
        if self.code == "ResourceNotFoundException":
            return "missing"
        if self.code in _NO_ACCESS:
            return "refused"
        if self.code in _HINTS:
            return self.code
        if self.is_throttle:
            return "throttled"
        return "busy" if self.retry_helps else ""

    def to_error(self, config: KinesisConfig, *, at_start: bool = False) -> UnderstudyError:
        """The error to raise, with the server's own message and the next step.

        ConfigError only `at_start`, when the operator can correct the address. Later it is
        Unreachable, because a stream or a permission may be restored. StorageFailed for an error
        without a hint of its own.
        """
        condition = self.condition
        kind: type[UnderstudyError] = ConfigError if at_start else Unreachable
        if condition in ("Unreachable", "throttled", "busy"):
            kind = Unreachable
        elif not condition:
            kind = StorageFailed
        hint = _HINTS[condition].format(keys=config.keys_from)
        return kind(f"Kinesis stream {config.stream!r} at {config.where} failed: {self}; {hint}")


def explained(error: Exception) -> CallFailed | None:
    """Translate an exception of the SDK; None when it is not from the SDK."""
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        CredentialRetrievalError,
        NoCredentialsError,
        PartialCredentialsError,
        SSLError,
    )
    from botocore.exceptions import ConnectionError as NoConnection
    from botocore.exceptions import HTTPClientError as NoAnswer

    match error:
        case ClientError():
            return _error_response(error.response)
        case NoCredentialsError() | PartialCredentialsError() | CredentialRetrievalError():
            return CallFailed("NoCredentials", str(error))
        case SSLError() if any(words in str(error) for words in _NEVER_TLS):
            return CallFailed("Tls", str(error))
        case NoAnswer() | NoConnection():
            return CallFailed("Unreachable", str(error))
        case BotoCoreError():
            return CallFailed(type(error).__name__, str(error))
    return None


def _error_response(response: Mapping[str, Any]) -> CallFailed:
    """Translate an error response; with only an HTTP status as code, the server is not Kinesis."""
    error = response.get("Error", {})
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    code = str(error.get("Code", ""))
    detail = str(error.get("Message", ""))
    is_broken = isinstance(status, int) and status >= 500 and status != 501
    if code.isdigit() and not is_broken:
        return CallFailed("NotKinesis", f"status {code}: {detail}")
    return CallFailed(code, detail, retry_helps=True if is_broken else None)


# --- Calls ----------------------------------------------------------------------------------------


def pause_s(attempt: int, rng: random.Random) -> float:
    """Pause before retry number `attempt` (from 1), random so that callers do not retry at once."""
    return rng.uniform(0.0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(attempt, 16)))


class KinesisApi:
    """API calls for one stream; thread-safe."""

    def __init__(
        self, client: Any, config: KinesisConfig, *, clock: Clock, rng: random.Random
    ) -> None:
        self._client = client
        self.config = config
        self.clock = clock
        self.rng = rng
        self.closed = Event()
        self.is_starting = True

    def call(self, operation: str, **fields: Any) -> Mapping[str, Any]:
        """Call an operation of the SDK once; CallFailed on any error of the server or the SDK."""
        method: Callable[..., Mapping[str, Any]] = getattr(self._client, operation)
        try:
            return method(**fields)
        except Exception as error:
            if (failed := explained(error)) is None:
                raise
            raise failed from error

    def call_with_retries(self, operation: str, **fields: Any) -> Mapping[str, Any]:
        """Call and retry transient errors for `retry_s`, then raise the final error."""
        return self.with_retries(lambda: self.call(operation, **fields))

    def with_retries(self, attempt: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Run `attempt` and retry transient errors for `retry_s`, then raise the final error."""
        give_up_s = self.clock.monotonic() + self.config.retry_s
        for number in range(1, 1_000_000):
            try:
                return attempt()
            except CallFailed as error:
                if (
                    not error.retry_helps
                    or self.clock.monotonic() >= give_up_s
                    or self.closed.is_set()
                ):
                    raise error.to_error(self.config, at_start=self.is_starting) from error
                self.clock.wait(self.closed, pause_s(number, self.rng))
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Close idle connections."""
        self._client.close()


def connect(config: KinesisConfig, *, clock: Clock | None = None) -> KinesisApi:
    """Create a botocore client; ConfigError for invalid settings, MissingExtra without botocore."""
    return KinesisApi(_client(config), config, clock=clock or SystemClock(), rng=random.Random())


def _client(config: KinesisConfig) -> Any:
    session = aws_session(
        "kinesis", credentials=config.credentials, profile=config.profile, region=config.region
    )
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, InvalidRegionError, NoRegionError

    try:
        return session.create_client(
            "kinesis",
            endpoint_url=config.endpoint or None,
            config=Config(
                # We retry ourselves: the SDK ignores failed records of a partly successful call.
                retries={"total_max_attempts": 1, "mode": "standard"},
                connect_timeout=min(config.timeout_s, 3.0),
                read_timeout=config.timeout_s,
                max_pool_connections=16,
                proxies={} if config.is_local else None,
            ),
        )
    except NoRegionError:
        raise ConfigError(
            f"no AWS region for Kinesis stream {config.stream!r}; write "
            f"kinesis://{config.stream}?region=eu-west-1, or set AWS_REGION"
        ) from None
    except InvalidRegionError:
        raise ConfigError(
            f"region of Kinesis stream {config.stream!r} is {config.region[:40]!r}; use a region "
            "such as eu-west-1"
        ) from None
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(
            f"invalid AWS settings for Kinesis stream {config.stream!r}: {error}; correct the "
            f"address, or the keys from {config.keys_from}"
        ) from None
