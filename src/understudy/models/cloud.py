"""Objects of S3, Google Cloud, Azure and whatever else obstore reaches by a URL."""

from collections.abc import Sequence
from datetime import timedelta

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import AzureStore, GCSStore, ObjectStore, S3Store, from_url

from understudy.core.errors import ConfigError, StorageFailed
from understudy.core.location import parse_location
from understudy.models.cloud_trouble import Whereabouts, explained, is_missing, said, without_secrets
from understudy.models.objects import check_object_name
from understudy.models.s3 import open_s3

_CALL_S, _PATIENCE_S = 30.0, 15.0
"""How long one call of another vendor may take, and how long it is tried again; `s3.py` has its own."""
_LOOK_EVERY_S = 0.5
"""A look costs a request, and a vendor counts them: at two a second and game, some cents a day."""
_NEAR = ("file://", "memory://")


class CloudObjects:
    """Objects behind a URL; credentials come from where the vendors' tools look, never from the URL.

    Every call is tried again for a bounded time. Unreachable when nobody answered, or only that they cannot now;
    StorageFailed when they refused.
    """

    def __init__(self, url: str) -> None:
        self._where = Whereabouts(without_secrets(url))
        self.look_every_s = 0.0 if url.startswith(_NEAR) else _LOOK_EVERY_S
        self._store: ObjectStore
        try:
            if url.startswith("s3://"):
                self._store, self._where = open_s3(parse_location(url))
            else:
                self._store = _open_other(url)
        except (BaseError, ValueError) as error:
            raise ConfigError(
                f"{self._where.url!r} is no place for models: {said(error)}; try s3://BUCKET/PATH"
            ) from None

    def get(self, name: str) -> bytes | None:
        try:
            found = obstore.get(self._store, check_object_name(name))
            raw = bytes(found.bytes())
        except FileNotFoundError as error:
            if is_missing(error, self._where):
                return None
            raise self._failed(f"read {name}", error) from error
        except (BaseError, OSError) as error:
            raise self._failed(f"read {name}", error) from error
        if self._where.bucket and not found.meta.get("e_tag"):
            raise StorageFailed(
                f"cannot read {name} at {self._where}: who listens there is no S3 (its answer has no ETag); correct "
                "endpoint="
            )
        return raw

    def create(self, name: str, raw: bytes) -> bool:
        try:
            obstore.put(self._store, check_object_name(name), raw, mode="create", use_multipart=False)
        except AlreadyExistsError:
            # After a timeout the first attempt may have arrived: then it is ours all the same.
            return False
        except (BaseError, OSError) as error:
            raise self._failed(f"create {name}", error) from error
        return True

    def list(self, prefix: str) -> Sequence[str]:
        try:
            pages = obstore.list(self._store, check_object_name(prefix) + "/")
            return sorted(found["path"] for page in pages for found in page)
        except (BaseError, OSError) as error:
            raise self._failed(f"list {prefix}", error) from error

    def delete(self, name: str) -> None:
        try:
            obstore.delete(self._store, check_object_name(name))
        except FileNotFoundError as error:
            if not is_missing(error, self._where):
                raise self._failed(f"delete {name}", error) from error
        except (BaseError, OSError) as error:
            raise self._failed(f"delete {name}", error) from error

    def signed_url(self, name: str, *, for_s: float) -> str:
        """An address that gives anybody who has it this one object, until the time is over."""
        if not isinstance(self._store, S3Store | GCSStore | AzureStore):
            raise ConfigError(
                f"{self._where.url} gives no signed addresses; models in S3, Google Cloud or Azure have them"
            )
        try:
            return obstore.sign(self._store, "GET", check_object_name(name), timedelta(seconds=for_s))
        except (BaseError, ValueError) as error:
            raise ConfigError(f"{self._where.url} gives no signed address: {said(error)}; check its keys") from None

    def _failed(self, doing: str, error: Exception) -> StorageFailed:
        return explained(doing, error, self._where)


def _open_other(url: str) -> ObjectStore:
    return from_url(
        url, client_options={"timeout": timedelta(seconds=_CALL_S)},
        retry_config={"max_retries": 6, "retry_timeout": timedelta(seconds=_PATIENCE_S)},
    )  # fmt: skip
