"""Objects of S3, Google Cloud, Azure and whatever else obstore reaches by a URL."""

import re
from collections.abc import Sequence
from datetime import timedelta

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import AzureStore, GCSStore, ObjectStore, S3Store, from_url

from understudy.core.errors import ConfigError, StorageFailed, Unreachable
from understudy.core.location import parse_location
from understudy.models.objects import check_object_name
from understudy.models.s3 import open_s3

_CALL_S, _PATIENCE_S = 30.0, 15.0
"""How long one call of another vendor may take, and how long it is tried again; `s3.py` has its own."""
_LOOK_EVERY_S = 0.5
"""A look costs a request, and a vendor counts them: at two a second and game, some cents a day."""
_NEAR = ("file://", "memory://")
_SECRETS = re.compile(r"(?<=://)[^/\s@]*@|\?[^\s)'\"]*")
"""A user in an address, and its options: either may hold what nobody should read in an error."""
_STATUS = re.compile(r"status code: (\d{3})")
_ASKED, _DEEPER = re.compile(r"performing \w+ (\w+://[^/\s?]+)"), re.compile(r'message: "([^"]+)"')
_NETWORK = ("HTTP error", "error sending request", "response body", "connection", "timed out")
_NO_ROLE = ("169.254.169.254", "metadata.google.internal")
"""Where a cloud tells its own machines their keys; asked when there are none elsewhere."""


class CloudObjects:
    """Objects behind a URL; credentials come from where the vendors' tools look, never from the URL.

    Every call is tried again for a bounded time. Unreachable when nobody answered, or only that they cannot now;
    StorageFailed when they refused.
    """

    def __init__(self, url: str) -> None:
        self._url = _SECRETS.sub("", url)
        self.look_every_s = 0.0 if url.startswith(_NEAR) else _LOOK_EVERY_S
        try:
            self._store = open_s3(parse_location(url)) if url.startswith("s3://") else _open_other(url)
        except (BaseError, ValueError) as error:
            said = _said(error)
            raise ConfigError(f"{self._url!r} is no place for models: {said}; try s3://BUCKET/PATH") from None

    def get(self, name: str) -> bytes | None:
        try:
            return bytes(obstore.get(self._store, check_object_name(name)).bytes())
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise self._failed("read", name, error) from error
            return None
        except (BaseError, OSError) as error:
            raise self._failed("read", name, error) from error

    def create(self, name: str, raw: bytes) -> bool:
        try:
            obstore.put(self._store, check_object_name(name), raw, mode="create", use_multipart=False)
        except AlreadyExistsError:
            # After a timeout the first attempt may have arrived: then it is ours all the same.
            return False
        except (BaseError, OSError) as error:
            raise self._failed("create", name, error) from error
        return True

    def list(self, prefix: str) -> Sequence[str]:
        try:
            pages = obstore.list(self._store, check_object_name(prefix) + "/")
            return sorted(found["path"] for page in pages for found in page)
        except (BaseError, OSError) as error:
            raise self._failed("list", prefix, error) from error

    def delete(self, name: str) -> None:
        try:
            obstore.delete(self._store, check_object_name(name))
        except FileNotFoundError:
            return
        except (BaseError, OSError) as error:
            raise self._failed("delete", name, error) from error

    def signed_url(self, name: str, *, for_s: float) -> str:
        """An address that gives anybody who has it this one object, until the time is over."""
        if not isinstance(self._store, S3Store | GCSStore | AzureStore):
            raise ConfigError(f"{self._url} gives no signed addresses; models in S3, Google Cloud or Azure have them")
        try:
            return obstore.sign(self._store, "GET", check_object_name(name), timedelta(seconds=for_s))
        except (BaseError, ValueError) as error:
            raise ConfigError(f"{self._url} gives no signed address: {_said(error)}; check its keys") from None

    def _failed(self, doing: str, name: str, error: Exception) -> StorageFailed:
        text, what = str(error), f"cannot {doing} {name} at {self._url}: {_said(error)}"
        if any(place in text for place in _NO_ROLE):
            return Unreachable(f"{what}; no keys were found, and this machine has none of its own: give them")
        if _is_passing(text):
            return Unreachable(f"{what}; check that it runs and that the network leads there")
        return StorageFailed(f"{what}; check access, its name and its region")


def _open_other(url: str) -> ObjectStore:
    return from_url(
        url, client_options={"timeout": timedelta(seconds=_CALL_S)},
        retry_config={"max_retries": 6, "retry_timeout": timedelta(seconds=_PATIENCE_S)},
    )  # fmt: skip


def _is_passing(text: str) -> bool:
    """Whether a failure may be over by itself: no answer, or one that says so."""
    if status := _STATUS.search(text):
        return status[1].startswith("5") or status[1] in ("408", "425", "429")
    return any(words in text for words in _NETWORK)


def _said(error: Exception) -> str:
    """What went wrong in the library's words, without what only it wants to know, and without secrets."""
    text = str(error).strip()
    asked, deeper = _ASKED.search(text), _DEEPER.search(text)
    words = [
        text.partition("\n")[0].rpartition(" - ")[2],
        *([f"({deeper[1]})"] if deeper else []),
        *([f"by {asked[1]}"] if asked else []),
    ]
    return _SECRETS.sub("", " ".join(words))[:240]
