"""Objects of S3, Google Cloud, Azure and whatever else obstore reaches by a URL."""

from collections.abc import Sequence

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

from understudy.core.errors import ConfigError, StorageFailed
from understudy.models.objects import check_object_name


class CloudObjects:
    """Objects behind a URL; credentials and endpoints come from the environment, as for the vendors' tools."""

    def __init__(self, url: str) -> None:
        self._url = url
        try:
            self._store = from_url(url)
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

    def _failed(self, doing: str, name: str, error: Exception) -> StorageFailed:
        return StorageFailed(f"cannot {doing} {name} at {self._url}: {_first_line(error)}; check access and network")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]
