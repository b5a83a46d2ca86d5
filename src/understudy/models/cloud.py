"""Objects in S3, Google Cloud, Azure and other stores that obstore opens by URL.

    s3://BUCKET/PATH?region=eu-west-1&profile=games&endpoint=http://127.0.0.1:9000

S3 credentials are found by botocore (`core/location.py`), those of other vendors in the default
locations of their tools. Credentials are never part of the URL.
"""

import functools
import html
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import AzureStore, GCSStore, ObjectStore, S3Store, from_url

from understudy.core.errors import ConfigError, StorageFailed, Unreachable
from understudy.core.location import (
    Location,
    aws_session,
    check_endpoint,
    parse_location,
    source_of_keys,
)
from understudy.models.objects import check_object_name

if TYPE_CHECKING:
    from obstore.store import RetryConfig

_CALL_S = 30.0
_RETRY_S = 15.0
"""How long a failed call is retried before it raises."""
_KEYS_FOR = timedelta(minutes=5)
"""How long credentials are cached; then botocore is called again, which renews expiring ones."""
_LOOK_EVERY_S = 0.5
"""Time between two looks for a journal's next entry; each is a billed request: some cents a day."""
_LOCAL = ("file://", "memory://")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
"""Allows more names than AWS does today, since old buckets and other servers have such names."""
_REGION = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OPTIONS = ("credentials", "endpoint", "insecure", "profile", "region")


@dataclass(frozen=True, slots=True)
class ObjectLocation:
    """Where objects are stored, for messages; bucket, region and endpoint are set only for S3."""

    url: str
    """Without secrets."""
    bucket: str = ""
    region: str = ""
    endpoint: str = ""
    keys_from: str = "the credentials of this machine"

    def __str__(self) -> str:
        return (
            f"{self.url} ({self.endpoint or 'AWS'}, region {self.region})"
            if self.bucket
            else self.url
        )


class CloudObjects:
    """Objects at a URL, which never contains credentials.

    Every call is retried for a limited time. It then raises Unreachable if the server did not
    respond or is temporarily unavailable, and StorageFailed if the server rejected the call.
    """

    def __init__(self, url: str) -> None:
        self._where = ObjectLocation(_without_secrets(url))
        self.poll_every_s = 0.0 if url.startswith(_LOCAL) else _LOOK_EVERY_S
        self._store: ObjectStore
        try:
            if url.startswith("s3://"):
                self._store, self._where = _open_s3(parse_location(url))
            else:
                self._store = from_url(
                    url,
                    client_options={"timeout": timedelta(seconds=_CALL_S)},
                    retry_config=_retries(),
                )
        except (BaseError, ValueError) as error:
            raise ConfigError(
                f"{self._where.url!r} cannot store models: {_message(error)}; use s3://BUCKET/PATH"
            ) from None

    def get(self, name: str) -> bytes | None:
        try:
            result = obstore.get(self._store, check_object_name(name))
            raw = bytes(result.bytes())
        except FileNotFoundError as error:
            if _is_missing(error, self._where):
                return None
            raise _explained(f"read {name}", error, self._where) from error
        except (BaseError, OSError) as error:
            raise _explained(f"read {name}", error, self._where) from error
        if self._where.bucket and not result.meta.get("e_tag"):
            raise StorageFailed(
                f"cannot read {name} at {self._where}: the response has no ETag; {_HINTS['not S3']}"
            )
        return raw

    def create(self, name: str, raw: bytes) -> bool:
        try:
            obstore.put(
                self._store, check_object_name(name), raw, mode="create", use_multipart=False
            )
        except AlreadyExistsError:
            # The object may be our own, from an attempt whose response timed out: callers read it.
            return False
        except (BaseError, OSError) as error:
            raise _explained(f"create {name}", error, self._where) from error
        return True

    def list(self, prefix: str) -> Sequence[str]:
        try:
            pages = obstore.list(self._store, check_object_name(prefix) + "/")
            return sorted(meta["path"] for page in pages for meta in page)
        except (BaseError, OSError) as error:
            raise _explained(f"list {prefix}", error, self._where) from error

    def delete(self, name: str) -> None:
        try:
            obstore.delete(self._store, check_object_name(name))
        except FileNotFoundError as error:
            if not _is_missing(error, self._where):
                raise _explained(f"delete {name}", error, self._where) from error
        except (BaseError, OSError) as error:
            raise _explained(f"delete {name}", error, self._where) from error

    def signed_url(self, name: str, *, for_s: float) -> str:
        """A signed URL that grants read access to one object for a limited time."""
        if not isinstance(self._store, S3Store | GCSStore | AzureStore):
            raise ConfigError(
                f"{self._where.url} does not support signed URLs; store models in S3, Google Cloud "
                "or Azure"
            )
        try:
            return obstore.sign(
                self._store, "GET", check_object_name(name), timedelta(seconds=for_s)
            )
        except (BaseError, ValueError) as error:
            raise ConfigError(
                f"{self._where.url} cannot sign a URL: {_message(error)}; check its credentials"
            ) from None


def _retries() -> "RetryConfig":
    return {"max_retries": 6, "retry_timeout": timedelta(seconds=_RETRY_S)}


def _open_s3(location: Location) -> tuple[S3Store, ObjectLocation]:
    """Open a bucket, without a network request; return the store and its location."""
    location.check_options(_OPTIONS)
    if len(location.hosts) != 1:
        raise ConfigError("s3:// has no bucket; write s3://BUCKET/PATH")
    bucket, port = location.hosts[0]
    if port is not None or not _BUCKET.fullmatch(bucket):
        raise ConfigError(
            f"{bucket[:80]!r} is not a valid bucket name; write s3://BUCKET/PATH, with a BUCKET of "
            "a-z 0-9 . -"
        )
    endpoint = (
        location.text("endpoint")
        or os.environ.get("AWS_ENDPOINT_URL_S3")
        or os.environ.get("AWS_ENDPOINT_URL")
    )
    if endpoint:
        check_endpoint(endpoint, insecure=location.flag("insecure"))
    credentials = location.text("credentials")
    profile = location.text("profile")
    session = aws_session(
        "s3", credentials=credentials, profile=profile, region=location.text("region")
    )
    # Imports boto3, which `aws_session` has found by now.
    from obstore.auth.boto3 import Boto3CredentialProvider

    region = session.get_config_variable("region") or "us-east-1"
    if not _REGION.fullmatch(region):
        raise ConfigError(
            f"region of s3://{bucket} is {region[:40]!r}; use a region such as eu-west-1"
        )
    where = ObjectLocation(
        f"s3://{bucket}{'/' * bool(location.path)}{location.path}",
        bucket=bucket,
        region=region,
        endpoint=endpoint or "",
        keys_from=source_of_keys(credentials=credentials, profile=profile),
    )
    # Created at the first request, since reading a machine's role needs the network.
    provider = functools.cache(lambda: Boto3CredentialProvider(session, ttl=_KEYS_FOR))
    store = S3Store(
        bucket,
        prefix=location.path or None,
        region=region,
        credential_provider=lambda: provider()(),
        **({"endpoint": endpoint, "virtual_hosted_style_request": False} if endpoint else {}),  # type: ignore[arg-type]
        client_options={
            "allow_http": (endpoint or "").startswith("http://"),
            "timeout": timedelta(seconds=_CALL_S),
        },
        retry_config=_retries(),
    )
    return store, where


# --- Errors ---------------------------------------------------------------------------------------

_HINTS = {
    "no keys": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or add ?credentials=FILE or "
    "?profile=NAME",
    "no bucket": "create the bucket, or correct the address",
    "region": "set region= to the region of the bucket",
    "refused": "check {keys}, and the permissions in docs/s3.md",
    "not S3": "the endpoint is not S3-compatible; correct endpoint=",
    "no TLS": "the endpoint does not use TLS; use http:// in endpoint=",
    "away": "check that the server is running and reachable over the network",
    "": "check the permissions, the name and the region",
}
"""The next step for each condition; after "no keys" and "away" a retry may help."""
_SECRETS = re.compile(r"(?<=://)[^/\s@]*@|\?[^\s)'\"]*")
"""The user and the options of a URL: either may hold a secret, so errors omit them."""
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]+)</Code>")
_MARKUP = re.compile(r"<(RequestId|HostId|Resource|BucketName)>[^<]*</\1>|<[^>]*>")
_INNER = re.compile(r'(?:message|error): "([^"]+)"|(InvalidCertificate|IncompleteMessage)')
"""The connection's own error message, which is nested in the library's text."""
_KEY_SERVERS = ("External AWS credential provider", "169.254.169.254", "metadata.google.internal")
"""Servers that the library asks for credentials not found in files or the environment."""
_NETWORK = ("HTTP error", "error sending request", "response body", "connection", "timed out")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_NO_OBJECT = ("NoSuchKey", "BlobNotFound")
_OTHER_REGION = ("AuthorizationHeaderMalformed", "PermanentRedirect")
_NO_ACCESS = (
    "AccessDenied",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "XAdminUserNotFound",
)


def _explained(doing: str, error: Exception, where: ObjectLocation) -> StorageFailed:
    """The error to raise: the library's message and the next step; Unreachable if a retry helps."""
    condition = _condition(str(error), where)
    kind = Unreachable if condition in ("no keys", "away") else StorageFailed
    return kind(
        f"cannot {doing} at {where}: {_message(error)}; "
        f"{_HINTS[condition].format(keys=where.keys_from)}"
    )


def _condition(text: str, where: ObjectLocation) -> str:
    """A key of `_HINTS`; a response without an S3 error code is from another server or a proxy."""
    code = _first(_CODE, text)
    status = _first(_STATUS, text)
    if any(server in text for server in _KEY_SERVERS):
        return "no keys"
    if code in _NO_BUCKET:
        return "no bucket"
    if code in _OTHER_REGION or "incorrectly configured region" in text:
        return "region"
    if code in _NO_ACCESS:
        return "refused"
    if (
        where.bucket
        and not code
        and (status in ("400", "404", "405", "501") or "Unable to extract metadata" in text)
    ):
        return "not S3"
    if where.endpoint and "InvalidContentType" in text:
        return "no TLS"
    is_busy = status.startswith("5") or status in ("408", "425", "429")
    return "away" if is_busy or (not status and any(words in text for words in _NETWORK)) else ""


def _is_missing(error: Exception, where: ObjectLocation) -> bool:
    """Whether the object, and not its bucket, is missing; the HTTP status is the same for both.

    S3 also sends an error code. An S3 response without one is from a proxy, which cannot know
    whether the object exists.
    """
    code = _first(_CODE, str(error))
    return code in _NO_OBJECT or not (code or where.bucket)


def _message(error: Exception) -> str:
    """The library's message in one line, without its debug output and without secrets."""
    text, _, debug = str(error).partition("\n\nDebug source")
    text = text.partition(" - ")[2] or text
    inner = "" if _STATUS.search(text) else _first(_INNER, debug)
    line = " ".join(_MARKUP.sub(" ", html.unescape(text)).split())
    return _without_secrets(f"{line} ({inner})" if inner else line)[:240].rstrip(" .;")


def _without_secrets(text: str) -> str:
    """The text without the users and options of its URLs."""
    return _SECRETS.sub("", text)


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return next(filter(None, match.groups()), "") if match else ""
