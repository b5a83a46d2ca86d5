"""What every part of a Kinesis stream uses: its address, calls with the AWS SDK, and their
errors."""

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
    """A stream's name and place, and how long to try."""

    stream: str
    """The stream's name, without its ARN."""
    region: str = ""
    """The AWS region; empty: from AWS_REGION, AWS_DEFAULT_REGION or the profile."""
    endpoint: str = ""
    """Another address than that of AWS, for a local server or a VPC endpoint."""
    profile: str = ""
    """A profile of the AWS configuration; empty: the usual chain of credentials."""
    credentials: str = ""
    """An AWS shared-credentials file that goes before the usual chain."""
    insecure: bool = False
    """Whether plain http may leave this machine."""
    poll_s: float = 0.2
    """The shortest time between two reads of a shard; AWS allows five a second."""
    list_s: float = 30.0
    """How old the list of shards may be; an ended shard or an unknown one renews it at once."""
    retry_s: float = 8.0
    """How long a call is tried again before its caller is told."""
    append_s: float = 3.0
    """The same for records that were not taken: their sender keeps them and comes back."""
    timeout_s: float = 5.0
    """How long the server may take for one answer."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.stream):
            raise ConfigError(
                f"{self.stream[:80]!r} is no name of a Kinesis stream; give 1 to 128 of A-Z a-z "
                f"0-9 _ . - as in {_FORM}"
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
                raise ConfigError(f"{name} is {value}; give a number of seconds from {least:g}")
        if self.endpoint:
            check_endpoint(self.endpoint, insecure=self.insecure)

    @property
    def is_local(self) -> bool:
        """Whether the endpoint is on this machine."""
        return is_loopback(urlsplit(self.endpoint).hostname or "")

    @property
    def place(self) -> str:
        """Where the stream is looked for, for people."""
        return self.endpoint or f"AWS region {self.region or 'of the environment'}"

    @property
    def keys_from(self) -> str:
        """Where its keys come from, for people."""
        return source_of_keys(credentials=self.credentials, profile=self.profile)


def kinesis_config(location: Location) -> KinesisConfig:
    """The settings in a `kinesis://` address; ConfigError for what cannot work."""
    location.refuse_others(
        [field.name for field in fields(KinesisConfig) if field.name != "stream"]
    )
    if len(location.hosts) != 1 or location.hosts[0][1] is not None or location.path:
        raise ConfigError(
            f"a kinesis:// address names one stream and no port or path; write {_FORM}"
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
_ANOTHER_TIME = {
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
"""Of a server's answer, which may be a whole page."""
_HINTS = {
    "missing": "create it with `understudy stream init URL`, or correct the stream or region of "
    "the address",
    "refused": "check {keys}, and the permissions in docs/kinesis.md",
    "NoCredentials": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give ?profile=NAME or "
    "?credentials=FILE",
    "NotKinesis": "this server does not speak Kinesis; correct endpoint=",
    "Tls": "give http:// where the server speaks no TLS, or name the authority of its certificate "
    "in AWS_CA_BUNDLE",
    "Unreachable": "start it, or correct endpoint= and region=",
    "busy": "add shards, or wait",
    "": "check the address, and the limits of the account",
}
"""What to do about each condition."""


class CallFailed(Exception):
    """A call or a record that Kinesis did not accept; `code` is the server's own, or one of ours.

    Ours are `Unreachable`, `NoCredentials`, `Tls` and `NotKinesis`, for an answer of a server that
    does not speak it.
    """

    def __init__(self, code: str, detail: str, *, retry_helps: bool | None = None) -> None:
        detail = " ".join(_MARKUP.sub(" ", detail).split())[:_MOST_LETTERS].rstrip(" .;")
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail
        self.is_throttle = code in _THROTTLES
        self.retry_helps = (
            self.is_throttle or code in _ANOTHER_TIME if retry_helps is None else retry_helps
        )

    @property
    def condition(self) -> str:
        """A key of `_HINTS`."""
        if self.code == "ResourceNotFoundException":
            return "missing"
        if self.code in _NO_ACCESS:
            return "refused"
        if self.code in _HINTS:
            return self.code
        return "busy" if self.retry_helps else ""

    def for_people(self, config: KinesisConfig, *, at_start: bool = False) -> UnderstudyError:
        """What to raise: the server's own words and the next step.

        ConfigError at the start only, where whoever gave the address is there to correct it; later
        on a stream or a right may come back, and what was acknowledged is safe.
        """
        condition = self.condition
        kind: type[UnderstudyError] = ConfigError if at_start else Unreachable
        if condition in ("Unreachable", "busy"):
            kind = Unreachable
        elif not condition:
            kind = StorageFailed
        hint = _HINTS[condition].format(keys=config.keys_from)
        return kind(f"Kinesis stream {config.stream!r} at {config.place} failed: {self}; {hint}")


def explained(error: Exception) -> CallFailed | None:
    """What an exception of the SDK means; None when it is none of the SDK."""
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
            return _answered(error.response)
        case NoCredentialsError() | PartialCredentialsError() | CredentialRetrievalError():
            return CallFailed("NoCredentials", str(error))
        case SSLError() if any(words in str(error) for words in _NEVER_TLS):
            return CallFailed("Tls", str(error))
        case NoAnswer() | NoConnection():
            return CallFailed("Unreachable", str(error))
        case BotoCoreError():
            return CallFailed(type(error).__name__, str(error))
    return None


def _answered(response: Mapping[str, Any]) -> CallFailed:
    """A call that was answered with an error: by Kinesis, or by another server, whose status is
    all there is."""
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
    """How long to wait before try number `attempt` (from 1): full jitter, so that callers do not
    come back at once."""
    return rng.uniform(0.0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(attempt, 16)))


class KinesisApi:
    """One stream's calls; any thread may make them."""

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
        """What `attempt` gives, tried again for `retry_s` where that helps; then the error for
        people."""
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
                    raise error.for_people(self.config, at_start=self.is_starting) from error
                self.clock.wait(self.closed, pause_s(number, self.rng))
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Let go of the connections that nobody uses."""
        self._client.close()


def connect(config: KinesisConfig, *, clock: Clock | None = None) -> KinesisApi:
    """Calls with boto3; ConfigError when its settings do not go together, MissingExtra without
    it."""
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
                # Retries are ours: the SDK would not try the failed records of a call that
                # succeeded in part.
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
            f"kinesis://{config.stream}?region=eu-west-1, "
            "or set AWS_REGION"
        ) from None
    except InvalidRegionError:
        raise ConfigError(
            f"region of Kinesis stream {config.stream!r} is {config.region[:40]!r}; give one such "
            "as eu-west-1"
        ) from None
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(
            f"the AWS settings for Kinesis stream {config.stream!r} cannot be used: {error}; "
            "correct the address, or "
            f"{config.keys_from}"
        ) from None
