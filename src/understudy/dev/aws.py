"""A boto3 client for a server of ours, for the few requests that say whether it works."""

from collections.abc import Mapping
from typing import Any, Protocol

_ASK_S = 5.0


class Reachable(Protocol):
    """Whatever has an address and credentials: a place, a server."""

    @property
    def url(self) -> str: ...

    @property
    def credentials(self) -> Mapping[str, str]: ...


def client(service: str, place: Reachable) -> Any:
    """A client that never waits long, never asks twice and looks at nobody's settings but the place's."""
    import boto3
    from botocore.config import Config

    who = place.credentials
    session = boto3.session.Session(
        aws_access_key_id=who["access_key_id"], aws_secret_access_key=who["secret_access_key"],
        region_name=who["region"],
    )  # fmt: skip
    config = Config(
        connect_timeout=_ASK_S, read_timeout=_ASK_S, retries={"total_max_attempts": 1}, proxies={},
        s3={"addressing_style": "path"},
    )  # fmt: skip
    return session.client(service, endpoint_url=place.url, config=config)
