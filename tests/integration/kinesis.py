"""Streams on a Kinesis server of the tests, and operations of an administrator."""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3

from understudy.core.location import Location
from understudy.dev.servers import aws_location
from understudy.streams.kinesis import KinesisStream, open_kinesis

WAIT_TIMEOUT_S = 60.0


class KinesisHarness:
    """One stream of a server; `url` may be that of a proxy before it."""

    def __init__(self, server: Any, *, shards: int = 2, url: str = "") -> None:
        self.server = server
        self.url = url or server.url
        self.name = f"test-{uuid.uuid4().hex[:12]}"
        self.client = _client(server)
        self.client.create_stream(StreamName=self.name, ShardCount=shards)
        self._wait()

    def location(self, *, url: str = "", **options: float) -> Location:
        given = {"poll_s": 0.02, "append_s": WAIT_TIMEOUT_S, "timeout_s": 20.0, **options}
        more = {name: str(value) for name, value in given.items()}
        return aws_location(
            self.server, "kinesis", self.name, **{"endpoint": url or self.url, **more}
        )

    def open(self, *, url: str = "", **options: float) -> KinesisStream:
        return open_kinesis(self.location(url=url, **options))

    def open_shards(self) -> list[dict[str, Any]]:
        """Those that take records, by the range of keys they hold."""
        shards = self.client.list_shards(StreamName=self.name)["Shards"]
        is_open = [
            one for one in shards if not one["SequenceNumberRange"].get("EndingSequenceNumber")
        ]
        return sorted(is_open, key=lambda one: int(one["HashKeyRange"]["StartingHashKey"]))

    def split(self, shard: dict[str, Any]) -> None:
        keys = shard["HashKeyRange"]
        middle = (int(keys["StartingHashKey"]) + int(keys["EndingHashKey"])) // 2
        self.client.split_shard(
            StreamName=self.name, ShardToSplit=shard["ShardId"], NewStartingHashKey=str(middle)
        )
        self._wait()

    def split_all(self) -> None:
        for shard in self.open_shards():
            self.split(shard)

    def merge_first(self) -> None:
        """Make one shard of the first two."""
        first, second = self.open_shards()[:2]
        self.client.merge_shards(
            StreamName=self.name,
            ShardToMerge=first["ShardId"],
            AdjacentShardToMerge=second["ShardId"],
        )
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + WAIT_TIMEOUT_S
        while self.client.describe_stream_summary(StreamName=self.name)["StreamDescriptionSummary"][
            "StreamStatus"
        ] != ("ACTIVE"):
            assert time.monotonic() < deadline, f"stream {self.name} does not become active"
            time.sleep(0.02)

    def close(self) -> None:
        self.client.delete_stream(StreamName=self.name)
        # Its connections only, it may be used again: a server that is to stop waits for those that
        # are open.
        self.client.close()


_CLIENTS: dict[str, Any] = {}


def _client(server: Any) -> Any:
    """One for all tests of a server: making it takes longer than most of them."""
    if server.url not in _CLIENTS:
        _CLIENTS[server.url] = boto3.client(
            "kinesis",
            region_name=server.credentials["region"],
            endpoint_url=server.url,
            aws_access_key_id=server.credentials["access_key_id"],
            aws_secret_access_key=server.credentials["secret_access_key"],
        )
    return _CLIENTS[server.url]


@contextmanager
def harness(server: Any, *, shards: int = 2, url: str = "") -> Iterator[KinesisHarness]:
    """A stream for one test, deleted at the end."""
    one = KinesisHarness(server, shards=shards, url=url)
    try:
        yield one
    finally:
        one.close()
