"""What the SDK of AWS says about a call that came to nothing, made into one error with the next step."""

import re

from understudy.core.errors import ConfigError, StorageFailed, UnderstudyError, Unreachable
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
_NEVER_TLS = ("WRONG_VERSION_NUMBER", "CERTIFICATE_VERIFY_FAILED", "RECORD_LAYER_FAILURE")
_MARKUP = re.compile(r"<[^>]*>")
_MOST_WORDS, _LEAST_WORDS = 300, 100
"""Letters of a server's answer that are shown: of Kinesis, of another one."""


class CallFailed(Exception):
    """A call or a record that Kinesis did not take; `code` is the server's own, or one of ours.

    Ours are `Unreachable`, `NoCredentials`, `Tls` and `NotKinesis`: somebody answered who does not speak Kinesis.
    """

    def __init__(self, code: str, detail: str, *, retry_helps: bool | None = None) -> None:
        detail = _in_a_line(detail)
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
                f"{what} does not exist; create it with `understudy stream init URL`, or correct the stream or region "
                "of the address"
            )
        if self.code in _NO_ACCESS:
            return lasting(
                f"{what} refused these credentials ({self.code}: {self.detail}); check {config.keys_from}, and the "
                "permissions in docs/kinesis.md"
            )
        if self.code == "NoCredentials":
            return lasting(
                f"no AWS credentials for {what}: {self.detail}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
                "AWS_SHARED_CREDENTIALS_FILE, or give ?profile=NAME or ?credentials=FILE"
            )
        if self.code == "NotKinesis":
            return lasting(f"{config.place} answers, and not as Kinesis does ({self.detail}); correct endpoint=")
        if self.code == "Tls":
            return lasting(
                f"TLS with {config.place} failed ({self.detail}); give http:// where it speaks none, or name the "
                "authority of its certificate in AWS_CA_BUNDLE"
            )
        if self.code == "Unreachable":
            return Unreachable(f"{what} cannot be reached: {self.detail}; start it, or correct endpoint= and region=")
        if self.retry_helps:
            return Unreachable(f"{what} takes no more calls now ({self.code}: {self.detail}); add shards, or wait")
        return StorageFailed(
            f"{what} refused a call ({self.code}: {self.detail}); check the address, and the limits of the account"
        )


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
            return _refusal(error)
        case NoCredentialsError() | PartialCredentialsError() | CredentialRetrievalError():
            return CallFailed("NoCredentials", str(error))
        case SSLError() if any(words in str(error) for words in _NEVER_TLS):
            return CallFailed("Tls", str(error))
        case NoAnswer() | NoConnection():
            return CallFailed("Unreachable", str(error))
        case BotoCoreError():
            return CallFailed(type(error).__name__, str(error))
    return None


def _refusal(error: Exception) -> CallFailed:
    """A call that was answered with an error: by Kinesis, or by another server, whose status is all there is."""
    response = getattr(error, "response", {})
    told, status = response.get("Error", {}), response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    code, detail = str(told.get("Code", "")), str(told.get("Message", ""))
    is_broken = isinstance(status, int) and status >= 500 and status != 501
    if code.isdigit() and not is_broken:
        return CallFailed("NotKinesis", f"status {code}: {_in_a_line(detail)[:_LEAST_WORDS]}")
    return CallFailed(code, detail, retry_helps=True if is_broken else None)


def _in_a_line(text: str) -> str:
    """A server's answer may be a whole page."""
    return " ".join(_MARKUP.sub(" ", text).split())[:_MOST_WORDS].rstrip(" .;")
