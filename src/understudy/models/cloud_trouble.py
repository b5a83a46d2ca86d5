"""What obstore says about a call that came to nothing, made into one error with the next step, and without secrets."""

import html
import re
from dataclasses import dataclass

from understudy.core.errors import StorageFailed, Unreachable

_SECRETS = re.compile(r"(?<=://)[^/\s@]*@|\?[^\s)'\"]*")
"""A user in an address, and its options: either may hold what nobody should read in an error."""
_STATUS = re.compile(r"status code: (\d{3}[ \w]*)")
_CODE, _MESSAGE = re.compile(r"<Code>([^<]+)</Code>"), re.compile(r"<Message>([^<]+)</Message>")
_REGION = re.compile(r"<Region>([^<]+)</Region>|expecting '([^']+)'")
_ASKED, _DEEPER = re.compile(r"performing \w+ (\w+://[^/\s?]+)"), re.compile(r'(?:message|error): "([^"]+)"')
_NETWORK = ("HTTP error", "error sending request", "response body", "connection", "timed out")
_NO_ROLE = ("169.254.169.254", "metadata.google.internal")
"""Where a cloud tells its own machines their keys; asked when there are none elsewhere."""
_NO_TLS = "InvalidContentType"
_PUZZLES = {
    "InvalidCertificate": "its certificate is of nobody we trust",
    "IncompleteMessage": "it hung up without an answer",
}
_LATER, _STRANGE = ("408", "425", "429"), ("400", "404", "405", "501")
"""Statuses of a server that cannot now; and of one that is not S3, where it gives no code."""
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_NOT_THERE = ("NoSuchKey", "BlobNotFound")
_NO_ACCESS = (
    "AccessDenied", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch", "XAdminUserNotFound"
)  # fmt: skip
_ELSEWHERE = ("AuthorizationHeaderMalformed", "PermanentRedirect")


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where objects lie, for people; what only S3 has is empty elsewhere."""

    url: str
    """Without secrets."""
    bucket: str = ""
    region: str = ""
    endpoint: str = ""
    keys_from: str = ""

    def __str__(self) -> str:
        return f"{self.url} ({self.endpoint or 'AWS'}, region {self.region})" if self.bucket else self.url


def without_secrets(text: str) -> str:
    """A text in which addresses lost their users and options."""
    return _SECRETS.sub("", text)


def is_missing(error: Exception, where: Whereabouts) -> bool:
    """Whether an object is not there; a bucket, or a key to it, that is not there is told by the same status.

    S3 says so with a code of its own. A proxy before it that answers for it has none, and knows nothing of objects.
    """
    code = _first(_CODE, str(error))
    return code in _NOT_THERE or not (code or where.bucket)


def explained(doing: str, error: Exception, where: Whereabouts) -> StorageFailed:
    """The error to raise: Unreachable when nobody answered or only that they cannot now, else StorageFailed."""
    text, what = str(error), f"cannot {doing} at {where}"
    code, region = _first(_CODE, text), _first(_REGION, text)
    if any(asked in text for asked in _NO_ROLE):
        return Unreachable(
            f"{what}: no keys were found, and this machine has none of its own; set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or give ?credentials=FILE or ?profile=NAME"
        )
    if where.bucket and code in _NO_BUCKET:
        there = f" --endpoint-url {where.endpoint}" if where.endpoint else ""
        return StorageFailed(
            f"{what}: there is no bucket {where.bucket!r}; make it (`aws s3 mb s3://{where.bucket}{there}`), or "
            "correct the address"
        )
    if where.bucket and (code in _ELSEWHERE or "incorrectly configured region" in text):
        wanted = region if region and region != where.region else "that of the bucket"
        return StorageFailed(f"{what}: the bucket is of another region; give region={wanted}")
    if code in _NO_ACCESS and where.keys_from:
        return StorageFailed(
            f"{what}: these keys were refused ({code}: {_first(_MESSAGE, text)}); check {where.keys_from}, and the "
            "rights in docs/s3.md"
        )
    if where.bucket and not code and _is_stranger(text):
        return StorageFailed(
            f"{what}: who listens there is no S3 ({_first(_STATUS, text) or said(error)}); correct endpoint="
        )
    if where.endpoint and _NO_TLS in text:
        return StorageFailed(f"{what}: it speaks no TLS; give http:// in endpoint=")
    if _is_passing(text):
        return Unreachable(f"{what}: {said(error)}; check that it runs and that the network leads there")
    return StorageFailed(f"{what}: {said(error)}; check access, its name and its region")


def _is_stranger(text: str) -> bool:
    """Whether a server answered as none of S3 does: without its own words, or without what it must say."""
    status = _first(_STATUS, text)[:3]
    return status in _STRANGE or "Unable to extract metadata" in text


def _is_passing(text: str) -> bool:
    """Whether a failure may be over by itself: no answer, or one that says so."""
    if status := _first(_STATUS, text):
        return status.startswith("5") or status[:3] in _LATER
    return any(words in text for words in _NETWORK)


def said(error: Exception) -> str:
    """What went wrong in the library's words, without what only it wants to know, and without secrets."""
    text = str(error).strip()
    code, asked = _first(_CODE, text), _first(_ASKED, text)
    deeper = next((meaning for word, meaning in _PUZZLES.items() if word in text), _first(_DEEPER, text))
    first = text.partition("\n")[0].rpartition(" - ")[2].partition(": <")[0]
    told = f"{code}: {_first(_MESSAGE, text)}".rstrip(": ") if code else deeper
    words = [first, *([f"({told})"] if told else []), *([f"by {asked}"] if asked else [])]
    return without_secrets(" ".join(words))[:240]


def _first(pattern: re.Pattern[str], text: str) -> str:
    """What a pattern finds first, or nothing."""
    found = pattern.search(text)
    return html.unescape(next(filter(None, found.groups()), "")).strip(" .") if found else ""
