"""Addresses of places on a server that runs: a stream, a topic, a keyspace, a folder of a bucket."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from understudy.core.location import Location


class Running(Protocol):
    """A server with its credentials, ours or somebody else's."""

    @property
    def address(self) -> str: ...

    @property
    def url(self) -> str: ...

    @property
    def credentials(self) -> Mapping[str, str]: ...

    @property
    def credentials_file(self) -> Path: ...


def on_host(server: Running, scheme: str, path: str, **options: str) -> Location:
    """A place on a server that is spoken to by host and port: Cassandra, Kafka."""
    host, _, port = server.address.rpartition(":")
    return Location(scheme, ((host, int(port)),), path, {"credentials": str(server.credentials_file), **options})


def on_aws(server: Running, scheme: str, name: str, path: str = "", **options: str) -> Location:
    """A place on a server that stands in for AWS: Kinesis, S3."""
    who = {
        "endpoint": server.url, "region": server.credentials["region"], "credentials": str(server.credentials_file)
    }  # fmt: skip
    return Location(scheme, ((name, None),), path, {**who, **options})
