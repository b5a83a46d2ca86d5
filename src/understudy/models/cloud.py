"""Objects of S3, Google Cloud, Azure and whatever else obstore reaches by a URL."""

from collections.abc import Sequence
from datetime import timedelta

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import AzureStore, GCSStore, S3Store, from_url

from understudy.core.errors import ConfigError, StorageFailed
from understudy.core.location import parse_location
from understudy.models.objects import check_object_name
from understudy.models.s3 import open_s3


class CloudObjects:
    """Objects behind a URL; credentials come from where the vendors' tools look, never from the URL."""

    def __init__(self, url: str) -> None:
        # Options may hold what nobody should read in an error.
        self._url = url.partition("?")[0]
        try:
            self._store = open_s3(parse_location(url)) if url.startswith("s3://") else from_url(url)
        except (BaseError, ValueError) as error:
            raise ConfigError(f"{url!r} is no place for models: {_first_line(error)}; try s3://BUCKET/PATH") from None

    def get(self, name: str) -> bytes | None:
        try:
            return bytes(obstore.get(self._store, check_object_name(name)).bytes())
        except FileNotFoundError:
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
            raise ConfigError(f"{self._url} gives no signed address: {_first_line(error)}; check its keys") from None

    def _failed(self, doing: str, name: str, error: Exception) -> StorageFailed:
        return StorageFailed(f"cannot {doing} {name} at {self._url}: {_first_line(error)}; check access and network")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]
