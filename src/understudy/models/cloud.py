"""Objects of S3, Google Cloud, Azure and whatever else obstore reaches by a URL.

    s3://BUCKET/PATH?region=eu-west-1&profile=games&endpoint=http://127.0.0.1:9000

Keys of S3 come from botocore (`core/location.py`), those of other vendors from where their tools
look; they are never part of the URL.
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
"""How long a call that fails is tried again; whoever called decides what then."""
_KEYS_FOR = timedelta(minutes=5)
"""How long keys are used before botocore is asked for them again, which renews those that
expire."""
_LOOK_EVERY_S = 0.5
"""A look costs a request, and a vendor counts them: at two a second and game, some cents a day."""
_NEAR = ("file://", "memory://")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
"""More than AWS allows today: buckets of old, and other servers, have such names."""
_REGION = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OPTIONS = ("credentials", "endpoint", "insecure", "profile", "region")


@dataclass(frozen=True, slots=True)
class ObjectLocation:
    """Where objects lie, for people; what only S3 has is empty elsewhere."""

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
    """Objects behind a URL; credentials come from where the vendors' tools look, never from the
    URL.

    Every call is tried again for a bounded time. Unreachable when nobody answered, or only that
    they cannot now; StorageFailed when they refused.
    """

    def __init__(self, url: str) -> None:
        self._where = ObjectLocation(_without_secrets(url))
        self.look_every_s = 0.0 if url.startswith(_NEAR) else _LOOK_EVERY_S
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
                f"{self._where.url!r} is no place for models: {_said(error)}; try s3://BUCKET/PATH"
            ) from None

    def get(self, name: str) -> bytes | None:
        try:
            found = obstore.get(self._store, check_object_name(name))
            raw = bytes(found.bytes())
        except FileNotFoundError as error:
            if _is_missing(error, self._where):
                return None
            raise _explained(f"read {name}", error, self._where) from error
        except (BaseError, OSError) as error:
            raise _explained(f"read {name}", error, self._where) from error
        if self._where.bucket and not found.meta.get("e_tag"):
            raise StorageFailed(
                f"cannot read {name} at {self._where}: its answer has no ETag; {_HINTS['not S3']}"
            )
        return raw

    def create(self, name: str, raw: bytes) -> bool:
        try:
            obstore.put(
                self._store, check_object_name(name), raw, mode="create", use_multipart=False
            )
        except AlreadyExistsError:
            # After a timeout the first attempt may have arrived: then it is ours all the same.
            return False
        except (BaseError, OSError) as error:
            raise _explained(f"create {name}", error, self._where) from error
        return True

    def list(self, prefix: str) -> Sequence[str]:
        try:
            pages = obstore.list(self._store, check_object_name(prefix) + "/")
            return sorted(found["path"] for page in pages for found in page)
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
        """An address that gives anybody who has it this one object, until the time is over."""
        if not isinstance(self._store, S3Store | GCSStore | AzureStore):
            raise ConfigError(
                f"{self._where.url} gives no signed addresses; models in S3, Google Cloud or Azure "
                "have them"
            )
        try:
            return obstore.sign(
                self._store, "GET", check_object_name(name), timedelta(seconds=for_s)
            )
        except (BaseError, ValueError) as error:
            raise ConfigError(
                f"{self._where.url} gives no signed address: {_said(error)}; check its keys"
            ) from None


def _retries() -> "RetryConfig":
    return {"max_retries": 6, "retry_timeout": timedelta(seconds=_RETRY_S)}


def _open_s3(location: Location) -> tuple[S3Store, ObjectLocation]:
    """The store of a bucket, and where it is; nothing is asked of the network yet."""
    from obstore.auth.boto3 import Boto3CredentialProvider

    location.refuse_others(_OPTIONS)
    if len(location.hosts) != 1:
        raise ConfigError("s3:// names no bucket; write s3://BUCKET/PATH")
    bucket, port = location.hosts[0]
    if port is not None or not _BUCKET.fullmatch(bucket):
        raise ConfigError(
            f"{bucket[:80]!r} is no name of a bucket; write s3://BUCKET/PATH, BUCKET of a-z 0-9 . -"
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
    region = session.get_config_variable("region") or "us-east-1"
    if not _REGION.fullmatch(region):
        raise ConfigError(f"region of s3://{bucket} is {region[:40]!r}; give one such as eu-west-1")
    where = ObjectLocation(
        f"s3://{bucket}{'/' * bool(location.path)}{location.path}",
        bucket=bucket,
        region=region,
        endpoint=endpoint or "",
        keys_from=source_of_keys(credentials=credentials, profile=profile),
    )
    # Made with the first request: the role of a machine is asked for over the network.
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
    "no keys": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give ?credentials=FILE or "
    "?profile=NAME",
    "no bucket": "create the bucket, or correct the address",
    "region": "give the region= of the bucket",
    "refused": "check {keys}, and the permissions in docs/s3.md",
    "not S3": "this server is not S3-compatible; correct endpoint=",
    "no TLS": "it speaks no TLS; give http:// in endpoint=",
    "away": "check that it runs and that the network leads there",
    "": "check access, its name and its region",
}
"""What to do about each condition; after "no keys" and "away" a retry may help."""
_SECRETS = re.compile(r"(?<=://)[^/\s@]*@|\?[^\s)'\"]*")
"""A user in an address, and its options: either may hold what nobody should read in an error."""
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]+)</Code>")
_MARKUP = re.compile(r"<(RequestId|HostId|Resource|BucketName)>[^<]*</\1>|<[^>]*>")
_INNER = re.compile(r'(?:message|error): "([^"]+)"|(InvalidCertificate|IncompleteMessage)')
"""What a connection said, deep inside the library's own text."""
_KEY_SERVERS = ("External AWS credential provider", "169.254.169.254", "metadata.google.internal")
"""Whom the library asks for keys that are not in files or the environment."""
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
    """The error to raise: the library's text and the next step; Unreachable where a retry may
    help."""
    condition = _condition(str(error), where)
    kind = Unreachable if condition in ("no keys", "away") else StorageFailed
    return kind(
        f"cannot {doing} at {where}: {_said(error)}; "
        f"{_HINTS[condition].format(keys=where.keys_from)}"
    )


def _condition(text: str, where: ObjectLocation) -> str:
    """A key of `_HINTS`. A server that answers without a code of S3 is another one, or a proxy
    in front of it."""
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
    """Whether an object is not there; a bucket, or a key to it, that is not there is told by the
    same status.

    S3 says so with a code of its own. A proxy before it that answers for it has none, and knows
    nothing of objects.
    """
    code = _first(_CODE, str(error))
    return code in _NO_OBJECT or not (code or where.bucket)


def _said(error: Exception) -> str:
    """The library's own text in a line, without what only it wants to know, and without secrets."""
    text, _, debug = str(error).partition("\n\nDebug source")
    text = text.partition(" - ")[2] or text
    inner = "" if _STATUS.search(text) else _first(_INNER, debug)
    line = " ".join(_MARKUP.sub(" ", html.unescape(text)).split())
    return _without_secrets(f"{line} ({inner})" if inner else line)[:240].rstrip(" .;")


def _without_secrets(text: str) -> str:
    """A text in which addresses lost their users and options."""
    return _SECRETS.sub("", text)


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return next(filter(None, found.groups()), "") if found else ""
